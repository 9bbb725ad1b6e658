"""What the demo answers, without a server: the numbers are the model's."""

import threading

import numpy as np
import pytest
import torch
from PIL import Image

import bcosvit
from bcosvit.web.answers import Box, Region
from bcosvit.web.limits import Limits
from tests.report.support import CLASSES, write_pictures
from tests.web.support import small_answers


def test_predictions_are_the_models(answers, pictures):
    picture = answers.open(pictures[0])
    logits = bcosvit.load(answers.predictor.weights)(picture.image[None])[0].detach()
    found = answers.predict(picture)
    torch.testing.assert_close(found.logits, logits)
    first = answers.entry(found, found.top(1)[0])
    assert first["index"] == logits.argmax()
    assert first["class"] == CLASSES[first["index"]]
    assert first["probability"] == pytest.approx(logits.max().sigmoid().item())


@pytest.mark.parametrize("label", [0, 3])
def test_sums_are_complete(answers, pictures, label):
    picture = answers.open(pictures[1])
    own = bcosvit.explain(answers.predictor.model, picture.image[None], label)
    sums = answers.sums(picture, label)
    assert sums.contributions == pytest.approx(own.map.double().sum().item(), rel=1e-5)
    total = sums.contributions + sums.residual + sums.bias
    assert abs(total - sums.logit) == pytest.approx(sums.completeness_error, abs=1e-12)
    assert sums.completeness_error < 1e-4 * max(1, abs(sums.logit))


def test_regions_of_a_partition_add_up(answers, pictures):
    picture = answers.open(pictures[2])
    sums = answers.sums(picture, 2)
    parts = [
        answers.region(picture, 2, Box(x=x, y=y, width=8, height=4))
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


def test_a_region_is_where_it_says(answers, pictures):
    picture = answers.open(pictures[0])
    map_ = bcosvit.explain(answers.predictor.model, picture.image[None], 1).map[0].double()
    # One column from the left, three rows down; two wide, five high.
    inside = map_[3:8, 1:3]
    assert answers.region(picture, 1, Box(x=1, y=3, width=2, height=5)) == Region(
        positive=pytest.approx(inside.clamp_min(0).sum().item(), rel=1e-4),
        negative=pytest.approx(inside.clamp_max(0).sum().item(), rel=1e-4),
        together=pytest.approx(inside.sum().item(), rel=1e-4, abs=1e-6),
        share=pytest.approx(
            inside.sum().item()
            / (answers.sums(picture, 1).logit - answers.predictor.model.logit.bias),
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
def test_boxes_outside_are_refused(answers, pictures, box, says):
    with pytest.raises(ValueError, match=says):
        answers.region(answers.open(pictures[0]), 0, box)


def test_a_joint_scale_is_that_of_the_strongest(answers, pictures):
    picture = answers.open(pictures[0])
    top = answers.predict(picture).top(5)
    joint = {answers.explain(picture, label, joint=True).scale for label in top}
    own = [answers.explain(picture, label).scale for label in top]
    (one,) = joint
    assert min(own) < one <= max(own)
    assert len(set(own)) == len(own)


def test_every_method_has_a_map(answers, pictures):
    picture = answers.open(pictures[0])
    assert "inherent" in answers.methods
    for method in answers.methods:
        shown = answers.explain(picture, 1, method)
        assert shown.method == method
        assert shown.map.shape == (16, 16)
    with pytest.raises(ValueError, match="no method 'magic'"):
        answers.explain(picture, 1, "magic")
    with pytest.raises(ValueError, match="names 2 methods; give one"):
        answers.explain(picture, 1, "inherent,rollout")


def test_classes_by_name_and_number(answers, pictures):
    picture = answers.open(pictures[0])
    assert answers.label("dog", picture) == 1
    assert answers.label("2", picture) == 2
    # A name with a comma is one name.
    assert answers.label(CLASSES[4], picture) == 4
    assert answers.label(" ", picture) == answers.predict(picture).top(1)[0]
    with pytest.raises(ValueError, match="did you mean 'cat'"):
        answers.label("catt", picture)
    with pytest.raises(ValueError, match="names 2 classes; give one"):
        answers.label("cat,dog", picture)


def test_conventional_models_claim_no_sum(tmp_path, pictures):
    answers = small_answers(tmp_path, family="conventional")
    picture = answers.open(pictures[0])
    assert not answers.exact
    assert answers.explain(picture, 0).method == "ixg"
    for ask in (
        answers.sums,
        lambda *given: answers.region(*given, Box(x=0, y=0, width=1, height=1)),
    ):
        with pytest.raises(ValueError, match="not a B-cos model"):
            ask(picture, 0)


def test_limits_are_kept(tmp_path, pictures):
    answers = small_answers(tmp_path, limits=Limits(pixels=1599, megabytes=1, pictures=2))
    with pytest.raises(ValueError, match="1,600 pixels, 1,599 are allowed"):
        answers.open(pictures[0])
    noise = np.random.default_rng(0).integers(0, 255, (700, 700, 3), dtype=np.uint8)
    Image.fromarray(noise).save(tmp_path / "large.png")
    with pytest.raises(ValueError, match=r"large\.png is larger than 1 MB"):
        answers.open(tmp_path / "large.png")
    assert answers.limited(["a", "b"]) == ["a", "b"]
    with pytest.raises(ValueError, match="3 pictures are too many at once: give at most 2"):
        answers.limited(["a", "b", "c"])
    with pytest.raises(ValueError, match="The limit queue = 0 lets nothing through"):
        Limits(queue=0)


def test_what_cannot_be_read(answers, tmp_path):
    (tmp_path / "broken.png").write_bytes(b"no picture")
    with pytest.raises(ValueError, match=r"The file broken\.png is not an image"):
        answers.open(tmp_path / "broken.png")
    with pytest.raises(ValueError, match=r"The upload gone\.png is no longer kept: upload it"):
        answers.open(tmp_path / "gone.png")
    with pytest.raises(ValueError, match="no picture: upload one"):
        answers.open(None)


def test_the_memory_is_bounded_and_nobodys(tmp_path, pictures):
    answers = small_answers(tmp_path, limits=Limits(cached=4))
    for path in pictures:
        for label in range(3):
            answers.explain(answers.open(path), label)
    assert len(answers._memory) == 4
    assert {found.name for found in answers._memory.values()} == {""}
    # The same pixels are explained once, whatever the file is called.
    other = tmp_path / "other.png"
    other.write_bytes(pictures[-1].read_bytes())
    found = answers.explain(answers.open(pictures[-1]), 2).found
    assert answers.explain(answers.open(other), 2).found is found


def test_threads_do_not_mix(tmp_path):
    answers = small_answers(tmp_path, limits=Limits(cached=3))
    paths = sorted(write_pictures(tmp_path / "many", 6).iterdir())
    alone = small_answers(tmp_path)
    expected = [alone.sums(alone.open(path), 1) for path in paths]
    wrong: list[object] = []

    def ask(user: int) -> None:
        for turn in range(4):
            number = (user + turn) % len(paths)
            found = answers.sums(answers.open(paths[number]), 1)
            if found.contributions != pytest.approx(expected[number].contributions, rel=1e-4):
                wrong.append((user, number, found))

    threads = [threading.Thread(target=ask, args=(user,)) for user in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
