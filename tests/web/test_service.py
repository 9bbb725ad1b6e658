"""What the service computes, without a server: the numbers are the model's."""

import threading

import numpy as np
import pytest
import torch
from PIL import Image

import bcosvit
from bcosvit.predictor import Predictor
from bcosvit.web.service import FILES, Box, Limits, Region
from tests.report.support import CLASSES, write_pictures
from tests.web.support import small_service


def test_predictions_are_the_models(service, pictures):
    picture = service.open(pictures[0])
    logits = bcosvit.load(service.predictor.weights)(picture.image[None])[0].detach()
    found = service.predict(picture)
    torch.testing.assert_close(found.logits, logits)
    first = service.entry(found, found.top(1)[0])
    assert first["index"] == logits.argmax()
    assert first["class"] == CLASSES[first["index"]]
    assert first["probability"] == pytest.approx(logits.max().sigmoid().item())


@pytest.mark.parametrize("label", [0, 3])
def test_sums_are_complete(service, pictures, label):
    picture = service.open(pictures[1])
    own = bcosvit.explain(service.predictor.model, picture.image[None], label)
    sums = service.sums(picture, label)
    assert sums.contributions == pytest.approx(own.map.double().sum().item(), rel=1e-5)
    total = sums.contributions + sums.residual + sums.bias
    assert abs(total - sums.logit) == pytest.approx(sums.completeness_error, abs=1e-12)
    assert sums.completeness_error < 1e-4 * max(1, abs(sums.logit))


def test_regions_of_a_partition_add_up(service, pictures):
    picture = service.open(pictures[2])
    sums = service.sums(picture, 2)
    parts = [
        service.region(picture, 2, Box(x=x, y=y, width=8, height=4))
        for x in (0, 8)
        for y in (0, 4, 8, 12)
    ]
    assert sum(part.together for part in parts) == pytest.approx(sums.contributions, rel=1e-9)
    assert sum(part.area for part in parts) == pytest.approx(1)
    evidence = sums.logit - sums.bias
    assert sum(part.share for part in parts) == pytest.approx(sums.contributions / evidence)
    for part in parts:
        assert part.negative <= 0 <= part.positive
        assert part.positive + part.negative == pytest.approx(part.together)


def test_a_region_is_where_it_says(service, pictures):
    picture = service.open(pictures[0])
    map_ = bcosvit.explain(service.predictor.model, picture.image[None], 1).map[0].double()
    # One column from the left, three rows down; two wide, five high.
    inside = map_[3:8, 1:3]
    assert service.region(picture, 1, Box(x=1, y=3, width=2, height=5)) == Region(
        positive=pytest.approx(inside.clamp_min(0).sum().item(), rel=1e-4),
        negative=pytest.approx(inside.clamp_max(0).sum().item(), rel=1e-4),
        together=pytest.approx(inside.sum().item(), rel=1e-4, abs=1e-6),
        share=pytest.approx(
            inside.sum().item()
            / (service.sums(picture, 1).logit - service.predictor.model.logit.bias),
            rel=1e-4,
            abs=1e-6,
        ),
        area=10 / 256,
    )


@pytest.mark.parametrize(
    ("box", "says"),
    [
        (Box(x=0, y=0, width=0, height=3), "a width and height from 1"),
        (Box(x=-1, y=0, width=2, height=3), "x and y from 0"),
        (Box(x=10, y=2, width=7, height=3), r"ends at \(17, 5\), beyond the picture of 16×16"),
    ],
)
def test_boxes_outside_are_refused(service, pictures, box, says):
    with pytest.raises(ValueError, match=says):
        service.region(service.open(pictures[0]), 0, box)


def test_a_joint_scale_is_that_of_the_strongest(service, pictures):
    picture = service.open(pictures[0])
    top = service.predict(picture).top(5)
    joint = {service.explain(picture, label, joint=True).scale for label in top}
    own = [service.explain(picture, label).scale for label in top]
    (one,) = joint
    assert min(own) < one <= max(own)
    assert len(set(own)) == len(own)


def test_every_method_has_a_map(service, pictures):
    picture = service.open(pictures[0])
    assert "inherent" in service.methods
    for method in service.methods:
        shown = service.explain(picture, 1, method)
        assert shown.method == method
        assert shown.map.shape == (16, 16)
    with pytest.raises(ValueError, match="no method 'magic'"):
        service.explain(picture, 1, "magic")
    with pytest.raises(ValueError, match="names 2 methods; give one"):
        service.explain(picture, 1, "inherent,rollout")


def test_classes_by_name_and_number(service, pictures):
    picture = service.open(pictures[0])
    assert service.find_class("dog", picture) == 1
    assert service.find_class("2", picture) == 2
    # A name with a comma is one name.
    assert service.find_class(CLASSES[4], picture) == 4
    assert service.find_class(" ", picture) == service.predict(picture).top(1)[0]
    with pytest.raises(ValueError, match="did you mean 'cat'"):
        service.find_class("catt", picture)
    with pytest.raises(ValueError, match="names 2 classes; give one"):
        service.find_class("cat,dog", picture)


def test_conventional_models_claim_no_sum(tmp_path, pictures):
    service = small_service(tmp_path, family="conventional")
    picture = service.open(pictures[0])
    assert service.exact is None
    assert service.explain(picture, 0).method == "ixg"
    for ask in (
        service.sums,
        lambda *given: service.region(*given, Box(x=0, y=0, width=1, height=1)),
    ):
        with pytest.raises(ValueError, match="not a B-cos model"):
            ask(picture, 0)


def test_limits(tmp_path, pictures):
    service = small_service(tmp_path, limits=Limits(pixels=1599, megabytes=1, pictures=2))
    with pytest.raises(ValueError, match="1,600 pixels, 1,599 are allowed"):
        service.open(pictures[0])
    noise = np.random.default_rng(0).integers(0, 255, (700, 700, 3), dtype=np.uint8)
    Image.fromarray(noise).save(tmp_path / "large.png")
    with pytest.raises(ValueError, match=r"large\.png is larger than 1 MB"):
        service.open(tmp_path / "large.png")
    assert service.check_count(["a", "b"]) == ["a", "b"]
    with pytest.raises(ValueError, match="3 pictures are too many at once: give at most 2"):
        service.check_count(["a", "b", "c"])
    with pytest.raises(ValueError, match="queue = 0 is not allowed"):
        Limits(queue=0)


def test_what_cannot_be_read(service, tmp_path):
    (tmp_path / "broken.png").write_bytes(b"no picture")
    with pytest.raises(ValueError, match=r"The file broken\.png is not an image"):
        service.open(tmp_path / "broken.png")
    with pytest.raises(ValueError, match=r"gone\.png .* upload it again"):
        service.open(tmp_path / "gone.png")
    with pytest.raises(ValueError, match="no picture: upload one"):
        service.open(None)


def test_the_cache_is_bounded_and_contains_no_names(tmp_path, pictures):
    service = small_service(tmp_path, limits=Limits(cached=4))
    for path in pictures:
        for label in range(3):
            service.explain(service.open(path), label)
    assert len(service._cache) == 4
    assert {found.name for _, found in service._cache.values()} == {""}
    # The same pixels are explained once, whatever the file is called.
    other = tmp_path / "other.png"
    other.write_bytes(pictures[-1].read_bytes())
    found = service.explain(service.open(pictures[-1]), 2).found
    assert service.explain(service.open(other), 2).found is found


def test_threads_do_not_mix(tmp_path):
    service = small_service(tmp_path, limits=Limits(cached=3))
    paths = sorted(write_pictures(tmp_path / "many", 6).iterdir())
    alone = small_service(tmp_path)
    expected = [alone.sums(alone.open(path), 1) for path in paths]
    wrong: list[object] = []

    def ask(user: int) -> None:
        for turn in range(4):
            number = (user + turn) % len(paths)
            found = service.sums(service.open(paths[number]), 1)
            if found.contributions != pytest.approx(expected[number].contributions, rel=1e-4):
                wrong.append((user, number, found))

    threads = [threading.Thread(target=ask, args=(user,)) for user in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.fixture
def computed(monkeypatch):
    """The methods that the model was asked for, in order."""
    asked, explain = [], Predictor.explain

    def counted(self, image, classes=None, *, methods=None, **options):
        asked.extend(methods)
        return explain(self, image, classes, methods=methods, **options)

    monkeypatch.setattr(Predictor, "explain", counted)
    return asked


@pytest.mark.parametrize("joint", [False, True])
def test_downloads_use_the_maps_that_were_shown(tmp_path, pictures, computed, joint):
    service = small_service(tmp_path)
    picture = service.open(pictures[0])
    label = service.predict(picture).top(1)[0]
    shown = {m: service.explain(picture, label, m, joint=joint) for m in ("inherent", "occlusion")}
    assert computed == ["inherent", "occlusion"]
    for kind in FILES:
        folder = tmp_path / kind
        folder.mkdir()
        written = service.write_file([(picture, label)], "inherent,occlusion", kind, folder)
        assert written.stat().st_size > 1000
    assert computed == ["inherent", "occlusion"]
    (arrays_file,) = (tmp_path / "npz").rglob("*.npz")
    with np.load(arrays_file) as arrays:
        for method, each in shown.items():
            assert np.array_equal(arrays[f"map_{method}"][0], each.map.numpy())
    # What was not shown is computed, and then known.
    service.write_file([(picture, label)], "inherent,ixg,rollout", "npz", folder)
    service.explain(picture, label, "rollout")
    assert computed == ["inherent", "occlusion", "ixg", "rollout"]


def test_nobody_waits_behind_a_slow_method(tmp_path, pictures, monkeypatch):
    service = small_service(tmp_path, limits=Limits(concurrency=1))
    picture = service.open(pictures[0])
    begun, go_on, explain = threading.Event(), threading.Event(), Predictor.explain
    calls = []

    def slow(self, image, classes=None, *, methods=None, **options):
        calls.extend(methods)
        if "occlusion" in methods:
            begun.set()
            assert go_on.wait(60)
        return explain(self, image, classes, methods=methods, **options)

    monkeypatch.setattr(Predictor, "explain", slow)
    found = []

    def ask() -> None:
        found.append(service.explain(picture, 1, "occlusion"))

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    assert begun.wait(60)
    # While occlusion is at work.
    assert service.explain(picture, 1, "ixg").map.shape == (16, 16)
    assert service.sums(picture, 1).completeness_error < 1e-3
    assert found == []
    go_on.set()
    for thread in threads:
        thread.join()
    # The second one found what the first one had computed.
    assert torch.equal(found[0].map, found[1].map)
    assert calls.count("occlusion") == 1


def test_costs_are_predictions_times_passes(tmp_path):
    service = small_service(tmp_path)
    assert service.seconds("ixg") == pytest.approx(3 * service.seconds("rollout"))
    # Windows of 2 pixels that move by 1 over 16.
    assert service.seconds("occlusion") == pytest.approx((1 + 15 * 15) * service.seconds("rollout"))
    assert service.is_slow("occlusion") and not service.is_slow("ixg")


def test_progress(tmp_path, pictures):
    service = small_service(tmp_path)
    picture, shares = service.open(pictures[0]), []
    service.explain(picture, 1, "smoothgrad", progress=shares.append)
    assert shares == [number / 16 for number in range(16)]
    shares.clear()
    service.explain(picture, 1, "smoothgrad", joint=True, progress=shares.append)
    assert shares == pytest.approx([number / 80 for number in range(80)])
