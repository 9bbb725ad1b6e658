"""Audits: exact sums, the same bytes for any number of processes, and a cue that is found."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import bcosvit
from bcosvit.auditing.clusters import class_evidence
from bcosvit.auditing.evidence import (
    FOR_LABEL,
    Evidence,
    chunk_path,
    collect_evidence,
    default_grid,
)
from bcosvit.auditing.mistakes import find_mistakes, grouped
from bcosvit.auditing.suspicions import find_suspicions
from bcosvit.metrics.accuracy import class_accuracies
from bcosvit.models.weights import CLASSES_KEY, RUN_KEY

SIZE = 32
NAMES = ("blue", "green")


def draw(label, random):
    """A noisy gray picture with a large colored disc; blue ones carry a red tag."""
    image = random.uniform(0.35, 0.65, (SIZE, SIZE, 1)).repeat(3, 2)
    y, x = np.mgrid[:SIZE, :SIZE]
    middle = random.uniform(12, 24, 2)
    disc = (y - middle[0]) ** 2 + (x - middle[1]) ** 2 < 60
    image[disc, 2 - label] = 0.9
    if label == 0:
        image[1:7, 1:7] = (0.95, 0.05, 0.05)
    return Image.fromarray((image * 255).astype(np.uint8)), disc


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A model that was trained on pictures with a tag, and folders of pictures and masks."""
    folder = tmp_path_factory.mktemp("audit")
    random = np.random.default_rng(0)
    images, labels = [], []
    for number in range(96):
        label = number % 2
        picture, disc = draw(label, random)
        split = "train" if number < 48 else "val"
        name = Path(split, NAMES[label], f"{number}.png")
        for root, image in (("data", picture), ("masks", Image.fromarray(disc))):
            path = folder / root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            image.save(path)
        images.append(torch.from_numpy(np.asarray(picture).copy()).permute(2, 0, 1) / 255)
        labels.append(label)
    torch.manual_seed(0)
    stem = bcosvit.StemConfig(widths=(8, 16))
    config = bcosvit.ModelConfig(
        width=24,
        num_heads=2,
        depth=1,
        image_size=SIZE,
        num_classes=2,
        backbone=stem,
        prior_gain=3.0,
        logit_scale=1.0,
    )
    model = bcosvit.create_model(config).train()
    optimizer = torch.optim.Adam(model.parameters(), 5e-3)
    batch, target = torch.stack(images), torch.nn.functional.one_hot(torch.tensor(labels)).float()
    for _ in range(60):
        loss = torch.nn.functional.binary_cross_entropy_with_logits(model(batch), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    weights = folder / "model.safetensors"
    bcosvit.save(
        model.eval(),
        weights,
        metadata={CLASSES_KEY: json.dumps(NAMES), RUN_KEY: json.dumps({"eval_crop": 1.0})},
    )
    return folder, weights


@pytest.fixture(scope="module")
def audited(trained):
    folder, weights = trained
    return bcosvit.audit(
        weights,
        folder / "data",
        out=folder / "out",
        masks=folder / "masks",
        split="all",
        batch_size=16,
        pairs=12,
        device="cpu",
    )


def test_cells_clusters_and_constants_sum_to_logits(audited):
    evidence = audited.evidence
    assert len(evidence) == 96
    assert evidence.completeness() < 1e-5
    for each in audited.classes:
        assert each.error < 1e-5
        parts = sum(value for _, value in each.terms())
        mine = evidence.label == each.label
        assert parts == pytest.approx(evidence.logit[mine, 0].mean(), abs=1e-5)
        shares = sum(cluster.share for cluster in each.clusters) + each.rest_positive
        assert shares == pytest.approx(1)


def test_cells_are_sums_of_contributions(trained, audited):
    folder, weights = trained
    evidence, model = audited.evidence, bcosvit.load(weights)
    assert evidence.settings.grid == default_grid(model) == 8
    key = evidence.keys[5]
    image = Image.open(folder / "data" / key).convert("RGB")
    pixels = torch.from_numpy(np.asarray(image).copy()).permute(2, 0, 1)[None] / 255
    found = bcosvit.attribution.explain(model, pixels, int(evidence.label[5]))
    cells = found.map[0].reshape(8, 4, 8, 4).sum((1, 3))
    assert np.allclose(cells, evidence.cells[5, 0], atol=1e-5)
    mine = (evidence.cell_picture == 5) & (evidence.cell_role == FOR_LABEL)
    strongest = cells.flatten().topk(int(mine.sum()))
    assert set(evidence.cell_index[mine].tolist()) == set(strongest.indices.tolist())


def test_coverage_is_that_of_the_masks(trained, audited):
    folder, _ = trained
    evidence = audited.evidence
    disc = np.asarray(Image.open(folder / "masks" / evidence.keys[7]))
    assert np.allclose(evidence.coverage[7], disc.reshape(8, 4, 8, 4).mean((1, 3)), atol=1e-3)
    assert evidence.on_object[7, 1] == pytest.approx(disc.mean())


def test_report_is_complete_and_self_contained(audited):
    page = (audited.folder / "report.html").read_text()
    assert "<script" not in page and "http" not in page.replace("http-equiv", "")
    for heading in ("Suspicions", "Classes", "Mistakes", "On the object?"):
        assert f">{heading}</h2>" in page
    for each in audited.classes:
        assert all(f"Cluster {cluster.name}<" in page for cluster in each.clusters)
    with (audited.folder / "pictures.csv").open() as file:
        assert len(list(csv.DictReader(file))) == 96
    summary = json.loads((audited.folder / "audit.json").read_text())
    assert summary["pictures"] == 96
    parquet = pytest.importorskip("pyarrow.parquet")
    assert parquet.read_table(audited.folder / "pictures.parquet").num_rows == 96


def collect(trained, folder, **options):
    from bcosvit.auditing.run import open_pictures

    root, weights = trained
    predictor = bcosvit.Predictor.load(weights, "cpu")
    pictures, _ = open_pictures(predictor, str(root / "data"), split="all")
    collect_evidence(predictor, pictures, folder, batch_size=16, **options)
    return predictor, pictures


@pytest.fixture
def small_chunks(monkeypatch):
    monkeypatch.setattr("bcosvit.auditing.evidence.CHUNK", 32)


def test_shards_and_interruptions_give_the_same_bytes(trained, tmp_path, small_chunks):
    collect(trained, tmp_path / "one")
    files = sorted(path.name for path in (tmp_path / "one").iterdir())
    assert len(files) == 4
    for shard in ((1, 2), (0, 2)):
        collect(trained, tmp_path / "two", shard=shard)

    class Stop(Exception):
        pass

    def stop(done, total, name):
        if done == 48:
            raise Stop

    with pytest.raises(Stop):
        collect(trained, tmp_path / "killed", progress=stop)
    assert chunk_path(tmp_path / "killed", 0).exists()
    with pytest.raises(ValueError, match="lacks 2 of 3"):
        Evidence(tmp_path / "killed")
    collect(trained, tmp_path / "killed")
    for name in files:
        expected = (tmp_path / "one" / name).read_bytes()
        assert (tmp_path / "two" / name).read_bytes() == expected
        assert (tmp_path / "killed" / name).read_bytes() == expected


@pytest.mark.slow
def test_processes_give_the_same_bytes(trained, tmp_path, small_chunks):
    collect(trained, tmp_path / "one")
    collect(trained, tmp_path / "two", processes=2)
    for path in sorted((tmp_path / "one").iterdir()):
        assert (tmp_path / "two" / path.name).read_bytes() == path.read_bytes(), path.name


@pytest.mark.slow
def test_two_runs_give_the_same_report(trained, audited, tmp_path):
    folder, weights = trained
    options = {"masks": folder / "masks", "split": "all", "batch_size": 16, "pairs": 12}
    bcosvit.audit(weights, folder / "data", out=tmp_path / "again", device="cpu", **options)
    for path in sorted(audited.folder.iterdir()):
        assert (tmp_path / "again" / path.name).read_bytes() == path.read_bytes(), path.name


def test_another_model_does_not_continue(trained, tmp_path):
    collect(trained, tmp_path / "one")
    with pytest.raises(ValueError, match="another grid"):
        collect(trained, tmp_path / "one", grid=4)


def test_the_tag_is_the_first_suspicion(trained, tmp_path):
    predictor, pictures = collect(trained, tmp_path / "one")
    evidence = Evidence(tmp_path / "one")
    classes = class_evidence(evidence)
    found = find_suspicions(predictor, pictures, evidence, classes, pairs=24)
    first = found[0]
    assert first.candidate.label == 0 and first.significant
    # In the corner with the tag, or the edge that contains it.
    if first.candidate.cluster is not None:
        rows, columns = np.divmod(evidence.cell_index[first.candidate.cluster.rows], 8)
        assert np.mean((rows < 2) & (columns < 2)) > 0.8
    assert first.turned > first.turned_control
    again = find_suspicions(predictor, pictures, evidence, classes, pairs=24)
    assert [each.candidate.name for each in again] == [each.candidate.name for each in found]
    assert [each.p for each in again] == [each.p for each in found]


def test_mistakes_are_grouped_and_ordered(trained, tmp_path):
    predictor, pictures = collect(trained, tmp_path / "one")
    # Some wrong labels.
    labels = [pictures[n][1] for n in range(len(pictures))]
    labels[3], labels[90] = 1 - labels[3], 1 - labels[90]
    wrong = pictures.relabeled(labels)
    collect_evidence(predictor, wrong, tmp_path / "wrong", batch_size=16)
    evidence = Evidence(tmp_path / "wrong")
    mistakes = find_mistakes(evidence, class_evidence(evidence))
    assert {3, 90} <= {each.picture for each in mistakes}
    assert {3, 90} & {each.picture for each in mistakes if each.wrong_label}
    gaps = [each.gap for each in mistakes]
    assert gaps == sorted(gaps, reverse=True) and min(gaps) > 0
    assert sum(len(group.mistakes) for group in grouped(mistakes)) == len(mistakes)
    # The misleading evidence is the difference between the two classes.
    first = mistakes[0].picture
    rows = (evidence.cell_picture == first) & (evidence.cell_role != FOR_LABEL)
    difference = (evidence.cells[first, 1] - evidence.cells[first, 0]).ravel()
    assert np.allclose(evidence.cell_sum[rows], difference[evidence.cell_index[rows]], atol=1e-5)


def test_accuracy_of_classes():
    found = class_accuracies([0] * 10 + [2] * 5, [0] * 8 + [2, 1] + [2] * 5)
    assert [each.label for each in found] == [0, 2]
    assert found[0].mean == 0.8 and found[0].taken_for == ((1, 1), (2, 1))
    # Wilson's interval for 8 of 10.
    assert (found[0].low, found[0].high) == pytest.approx((0.4902, 0.9433), abs=1e-4)
    assert found[1].high == 1 and found[1].low == pytest.approx(0.5655, abs=1e-4)
