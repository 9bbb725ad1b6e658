"""Audits: exact sums, the same bytes for any number of processes, and a cue that is found."""

import csv
import dataclasses
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.numpy import load_file, save_file

import bcosvit
from bcosvit.attribution import CompletenessWarning
from bcosvit.auditing import report, run
from bcosvit.auditing.clusters import class_evidence
from bcosvit.auditing.cues import Bench, Cells, margins
from bcosvit.auditing.evidence import (
    FOR_LABEL,
    Adjoint,
    Evidence,
    chunk_path,
    collect_evidence,
    default_grid,
)
from bcosvit.auditing.mistakes import find_mistakes, grouped
from bcosvit.auditing.report import write_audit
from bcosvit.auditing.run import open_pictures
from bcosvit.auditing.suspicions import (
    _corrected,
    _for_rivals,
    find_suspicions,
    permutation_test,
)
from bcosvit.files import locked_folder
from bcosvit.metrics.accuracy import class_accuracies
from bcosvit.models.weights import CLASSES_KEY
from tests.auditing.conftest import draw


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
def test_processes_find_the_same_clusters(audited):
    found = class_evidence(audited.evidence, processes=2)
    assert len(found) == len(audited.classes)
    for one, other in zip(found, audited.classes, strict=True):
        assert one.terms() == other.terms() and one.error == other.error
        for mine, its in zip(one.clusters, other.clusters, strict=True):
            assert np.array_equal(mine.rows, its.rows) and mine.dense == its.dense


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


def test_batches_of_nothing_are_refused_before_anything_is_written(trained, tmp_path):
    predictor, pictures = collect(trained, tmp_path / "one")
    with pytest.raises(ValueError, match="batch_size = 0 is not allowed"):
        collect_evidence(predictor, pictures, tmp_path / "two", batch_size=0)
    assert not (tmp_path / "two").exists()


def test_batches_stay_as_large_where_no_size_is_given(trained, tmp_path):
    predictor, pictures = collect(trained, tmp_path / "one")
    before = chunk_path(tmp_path / "one", 0).read_bytes()
    chunk_path(tmp_path / "one", 0).unlink()
    assert collect_evidence(predictor, pictures, tmp_path / "one").batch_size == 16
    assert chunk_path(tmp_path / "one", 0).read_bytes() == before
    with pytest.raises(ValueError, match="another batch_size"):
        collect_evidence(predictor, pictures, tmp_path / "one", batch_size=8)


def test_of_two_audits_in_a_folder_the_second_is_told(trained, tmp_path):
    folder, weights = trained
    options = {"out": tmp_path / "out", "split": "all", "device": "cpu"}
    with locked_folder(tmp_path / "out"):
        with pytest.raises(ValueError, match=r"Another process is writing to .*out"):
            bcosvit.audit(weights, folder / "data", **options)
        # Shards are collected side by side, where nothing else is written.
        assert list((tmp_path / "out").iterdir()) == []
        with pytest.raises(ValueError, match=r"Another process is writing to .*out"):
            bcosvit.audit(weights, folder / "data", shard=(0, 1), **options)
        assert chunk_path(tmp_path / "out", 0).exists()
    assert not (tmp_path / "out" / "report.html").exists()


def test_the_tag_is_the_first_suspicion(trained, tmp_path):
    predictor, pictures = collect(trained, tmp_path / "one")
    evidence = Evidence(tmp_path / "one")
    classes = class_evidence(evidence)
    found = find_suspicions(predictor, pictures, evidence, classes, pairs=24)
    first = found[0]
    assert first.cue.label == 0 and first.significant
    # In the corner with the tag, or the edge that contains it.
    if first.cue.kind == "cells":
        rows, columns = np.divmod(evidence.cell_index[first.cue.cluster.rows], 8)
        assert np.mean((rows < 2) & (columns < 2)) > 0.8
    assert first.turned > first.turned_control
    again = find_suspicions(predictor, pictures, evidence, classes, pairs=24)
    assert [each.cue.name for each in again] == [each.cue.name for each in found]
    assert [each.p for each in again] == [each.p for each in found]


def test_what_speaks_for_the_class_that_comes_next(trained, tmp_path):
    predictor, pictures = collect(trained, tmp_path / "one")
    evidence = Evidence(tmp_path / "one")
    numbers = np.flatnonzero(evidence.label == 1)[:5]
    bench = Bench(
        model=predictor.model,
        pictures=pictures,
        evidence=evidence,
        batch_size=2,
        known={},
        means={},
    )
    images = bench.images(numbers)
    found = _for_rivals(bench, Adjoint(predictor.model), images, numbers)
    # There is one other class.
    expected = bcosvit.attribution.explain(predictor.model, images, 0).map
    cells = expected.unflatten(1, (8, 4)).unflatten(3, (8, 4)).sum((2, 4))
    assert np.allclose(found, cells, atol=1e-5)


def test_permutation_counts_all_flips_of_signs():
    random = np.random.default_rng(0).integers(-1000, 1000, 9) / 1000
    for difference in ([1, 1, 0, -1, 1], [-1, -1, 1], [1] * 8, [1, *random]):
        values = np.array(difference, float)
        flips = [np.dot(signs, values) for signs in itertools.product((-1, 1), repeat=len(values))]
        expected = np.mean(np.array(flips) >= values.sum() - 1e-9)
        assert permutation_test(values) == pytest.approx(expected)
    assert permutation_test(np.zeros(3)) == 1


def test_what_repeats_is_corrected_apart_from_what_varies(audited):
    found = [
        dataclasses.replace(audited.suspicions[0], p=p, repeats=repeats)
        for p, repeats in ((0.01, 1), (0.5, 0), (0.04, 1), (0.02, 0), (0.03, 1))
    ]
    # By Holm's method, three that repeat and two that vary.
    expected = [0.03, 0.5, 0.06, 0.04, 0.06]
    assert [each.p_corrected for each in _corrected(found)] == pytest.approx(expected)


def test_margins_are_above_the_largest_other_logit():
    logits = torch.tensor([[3.0, 1.0, 2.0], [0.0, 5.0, 4.0]])
    assert margins(logits, 0).tolist() == [1, -5]
    assert margins(logits, np.array([2, 1])).tolist() == [-1, 1]


def test_the_control_is_as_many_of_the_strongest_cells_outside_the_cluster(trained, tmp_path):
    collect(trained, tmp_path / "one")
    evidence = Evidence(tmp_path / "one")
    cluster = max(class_evidence(evidence)[0].clusters, key=lambda each: len(each.rows))
    number = int(cluster.pictures[0])
    cue, control = Cells(label=0, cluster=cluster).chosen(evidence, np.array([number]))
    cells = cluster.cells_of(evidence, number)
    chosen = np.flatnonzero(cue[0])
    assert len(chosen) == min(3, len(cells)) and set(chosen) <= set(cells)
    strength = evidence.cells[number, 0].ravel().copy()
    strength[cells] = -np.inf
    assert set(np.flatnonzero(control[0])) == set(np.argsort(-strength)[: len(chosen)])


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


def write_again(trained, audited, folder):
    """The report of the same findings in another folder."""
    predictor = bcosvit.Predictor.load(trained[1], "cpu")
    pictures, _ = open_pictures(predictor, str(trained[0] / "data"), split="all")
    write_audit(
        dataclasses.replace(audited, folder=folder), predictor, pictures, facts={}, command="again"
    )
    return (folder / "report.html").read_text()


def test_many_pictures_get_files_of_their_own(trained, audited, tmp_path, monkeypatch):
    monkeypatch.setattr("bcosvit.auditing.report.INLINE", 1000)
    page = write_again(trained, audited, tmp_path)
    assert "data:image/jpeg" not in page
    named = re.findall(r'loading="lazy" decoding="async" src="(pictures/\d+\.jpg)"', page)
    assert named and len(set(named)) == len(named) == page.count("<img") - page.count('"where"')
    assert {f"pictures/{path.name}" for path in (tmp_path / "pictures").iterdir()} == set(named)
    with Image.open(tmp_path / named[0]) as picture:
        assert picture.size == (112, 112)


def test_large_effects_in_few_pictures_are_said(trained, audited, tmp_path):
    first = audited.suspicions[0]
    said = "It is large, but seen in too few pictures to be significant."
    assert first.significant and said not in (audited.folder / "report.html").read_text()
    few = dataclasses.replace(audited, suspicions=[dataclasses.replace(first, p_corrected=0.2)])
    page = write_again(trained, few, tmp_path)
    assert page.count(said) == 1 and not few.significant


def test_clusters_of_few_classes_are_shown(trained, audited, tmp_path, monkeypatch):
    monkeypatch.setattr("bcosvit.auditing.report.DETAILED", 1)
    monkeypatch.setattr("bcosvit.auditing.report.LISTED", 1)
    page = write_again(trained, audited, tmp_path)
    suspicious = audited.suspicions[0].cue.label
    assert re.findall(r'<details class="class" data-class="(\d+)"', page) == [str(suspicious)]
    assert "The 1 classes of suspicions" in page and "tables have all 2" in page
    assert (tmp_path / "cells.csv").read_bytes() == (audited.folder / "cells.csv").read_bytes()


@pytest.fixture(scope="module")
def client(trained, audited):
    testclient = pytest.importorskip("starlette.testclient")
    from starlette.applications import Starlette

    from bcosvit.web.audits import audit_routes
    from bcosvit.web.service import ExplanationService

    service = ExplanationService(predictor=bcosvit.Predictor.load(trained[1], "cpu"))
    return testclient.TestClient(Starlette(routes=[audit_routes(service, audited.folder)]))


def test_served_report_links_to_pictures(audited, client):
    page = client.get("/audit/").text
    links = set(re.findall(r'href="((?:list|picture)/[^"]+)"', page))
    clusters = {cluster.name for each in audited.classes for cluster in each.clusters}
    expected = {"list/class-0", "list/class-1"} | {f"list/{name}" for name in clusters}
    assert {link for link in links if link.startswith("list/")} - {"list/mistakes"} == expected
    assert ("list/mistakes" in links) == bool(audited.mistakes)
    for link in sorted(links)[:6]:
        assert client.get(f"/audit/{link}").status_code == 200, link
    own = client.get("/audit/list/class-1").text
    mine = np.flatnonzero(audited.evidence.label == 1).tolist()
    assert re.findall(r'href="../picture/(\d+)"', own) == [str(number) for number in mine]
    assert "green: 48 pictures" in own
    thumbnail = client.get("/audit/thumbnail/3")
    assert thumbnail.status_code == 200 and thumbnail.headers["content-type"] == "image/png"
    picture = client.get("/audit/picture/3").text
    assert picture.count("<img") >= 2
    assert '<a href="../">Report</a>' in picture
    table = client.get("/audit/clusters.csv")
    assert table.content == (audited.folder / "clusters.csv").read_bytes()


@pytest.mark.parametrize(
    "path",
    ["picture/96", "thumbnail/96", "list/9.9", "evidence-00000.safetensors", "x.py"],
)
def test_what_is_not_served(client, path):
    assert client.get(f"/audit/{path}").status_code == 404


def test_audits_that_cannot_be_served(trained, audited, tmp_path):
    pytest.importorskip("starlette")
    from bcosvit.web.audits import audit_routes
    from bcosvit.web.service import ExplanationService

    service = ExplanationService(predictor=bcosvit.Predictor.load(trained[1], "cpu"))
    with pytest.raises(ValueError, match="holds no finished audit"):
        audit_routes(service, tmp_path)
    shutil.copytree(audited.folder, tmp_path / "other")
    source = json.loads((tmp_path / "other" / "source.json").read_text())
    (tmp_path / "other" / "source.json").write_text(json.dumps({**source, "split": "val"}))
    with pytest.raises(ValueError, match="not what they were"):
        audit_routes(service, tmp_path / "other")


def test_pages_run_nothing_and_show_nothing_but_the_audit(trained, audited, tmp_path, monkeypatch):
    testclient = pytest.importorskip("starlette.testclient")
    from starlette.applications import Starlette

    from bcosvit.data.labeled import LabeledImages
    from bcosvit.web.audits import audit_routes
    from bcosvit.web.service import ExplanationService

    folder = tmp_path / "hostile"
    shutil.copytree(audited.folder, folder)
    (tmp_path / "secret.csv").write_text("secret")
    (folder / "more.csv").symlink_to(tmp_path / "secret.csv")
    (folder / "report.html").write_text("<script>alert(1)</script>")
    summary = json.loads((folder / "audit.json").read_text())
    summary["classes"][0]["class"] = "<script>alert(2)</script>"
    (folder / "audit.json").write_text(json.dumps(summary))
    service = ExplanationService(predictor=bcosvit.Predictor.load(trained[1], "cpu"))
    client = testclient.TestClient(Starlette(routes=[audit_routes(service, folder)]))
    assert client.get("/audit/more.csv").status_code == 404
    for path in ("", "list/class-0", "picture/3"):
        answer = client.get(f"/audit/{path}")
        assert answer.status_code == 200
        assert "default-src 'none'" in answer.headers["content-security-policy"]
        assert "script-src" not in answer.headers["content-security-policy"]
    assert "<script>" not in client.get("/audit/list/class-0").text

    def gone(self, index):
        raise bcosvit.data.SourceError("It is gone.")

    monkeypatch.setattr(LabeledImages, "__getitem__", gone)
    for path in ("picture/3", "thumbnail/3"):
        assert client.get(f"/audit/{path}").status_code == 404
    broken = {
        "audit.json": [
            "[1]",
            json.dumps({**summary, "mistakes": [float("inf")]}),
            "[" * 100_000,
            json.dumps({**summary, "mistakes": ["<script>"]}),
            json.dumps({**summary, "clusters": []}),
            json.dumps({key: value for key, value in summary.items() if key != "classes"}),
        ],
        "source.json": ["[]", "{}", "{", "[" * 100_000, "[" + " " * 1_000_000 + "]"],
    }
    for name, contents in broken.items():
        before = (folder / name).read_text()
        for content in contents:
            (folder / name).write_text(content)
            with pytest.raises(ValueError, match=r"holds no finished audit|is damaged"):
                audit_routes(service, folder)
        (folder / name).unlink()
        os.mkfifo(folder / name)
        with pytest.raises(ValueError, match=r"holds no finished audit|is damaged"):
            audit_routes(service, folder)
        (folder / name).unlink()
        (folder / name).write_text(before)


@pytest.fixture
def hostile(trained, audited, tmp_path):
    testclient = pytest.importorskip("starlette.testclient")
    from starlette.applications import Starlette

    from bcosvit.web.audits import audit_routes
    from bcosvit.web.service import ExplanationService

    folder = tmp_path / "hostile"
    shutil.copytree(audited.folder, folder)
    service = ExplanationService(predictor=bcosvit.Predictor.load(trained[1], "cpu"))
    client = testclient.TestClient(Starlette(routes=[audit_routes(service, folder)]))
    client.folder = folder
    return client


def test_addresses_that_are_no_pictures(hostile):
    for index in ("9" * 5000, "96", "-1", "1.5", "٣", "0x1", ""):
        for kind in ("picture", "thumbnail"):
            assert hostile.get(f"/audit/{kind}/{index}").status_code == 404


def test_reports_of_others_neither_wait_nor_take_long(hostile):
    page = hostile.get("/audit/").text
    assert 'href="picture/' in page and 'href="list/class-0"' in page
    report = hostile.folder / "report.html"
    # Looked at anew from each of them, this would take hours.
    for start in (
        '<details class="class" data-class="1"',
        '<figure class="example" data-picture="1">',
    ):
        report.write_text((start + "<div>") * 200_000)
        assert hostile.get("/audit/").status_code == 200
    with report.open("wb") as file:
        file.truncate(60_000_000)
    assert hostile.get("/audit/").status_code == 404
    report.unlink()
    os.mkfifo(report)
    assert hostile.get("/audit/").status_code == 404


def test_names_of_files_and_classes_are_text(trained, tmp_path):
    """Markup, formulas, mathematics, long and bidirectional names reach no page as such."""
    names = [
        "=1+1<script>alert(1)</script>",
        "\"'><img src=x onerror=alert(2)>$\\frac{$" + "é" * 60,
    ]
    model = bcosvit.load(trained[1])
    bcosvit.save(model, tmp_path / "w.safetensors", metadata={CLASSES_KEY: json.dumps(names)})
    for number in range(24):
        picture, _ = draw(number % 2, np.random.default_rng(number))
        path = tmp_path / "data" / str(number % 2) / f"\u202e<b>{number}\n&amp;{'x' * 180}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        picture.save(path)
    out = tmp_path / "out"
    bcosvit.audit(
        tmp_path / "w.safetensors", tmp_path / "data", out=out, split="all", pairs=4, device="cpu"
    )
    page = (out / "report.html").read_text(encoding="utf-8")
    assert "&lt;script&gt;alert(1)" in page
    assert "\u202e&lt;b&gt;" in page
    assert not any(part in page for part in ("<script", "<img src=x", "\u202e<b>", "\"'><img"))
    for table in out.glob("*.csv"):
        with table.open(newline="", encoding="utf-8") as file:
            cells = [cell for row in csv.DictReader(file) for cell in row.values()]
        assert not any(cell[:1] in ("=", "+", "@") for cell in cells)
    with (out / "pictures.csv").open(newline="", encoding="utf-8") as file:
        assert {row["label"] for row in csv.DictReader(file)} == {f"'{names[0]}", names[1]}


def test_damaged_evidence_is_told(audited, tmp_path):
    folder = tmp_path / "store"
    shutil.copytree(audited.folder, folder)
    chunk = chunk_path(folder, 0)
    content = chunk.read_bytes()
    chunk.write_bytes(content[:-1000])
    with pytest.raises(ValueError, match="is damaged"):
        Evidence(folder)
    # It says that a cell is in a picture that does not exist.
    tensors = load_file(chunk_path(audited.folder, 0))
    save_file({**tensors, "cell_picture": tensors["cell_picture"] + 10_000}, chunk)
    with pytest.raises(ValueError, match="is damaged"):
        Evidence(folder)
    chunk.write_bytes(content)
    settings = json.loads((folder / "settings.json").read_text())
    for changes, says in (
        ({"chunk": 0}, "holds no evidence"),
        ({"chunk": 1, "pictures": 10**9}, "lacks 999999999 of 1000000000 parts"),
        ({"pictures": "many"}, "holds no evidence"),
    ):
        (folder / "settings.json").write_text(json.dumps({**settings, **changes}))
        with pytest.raises(ValueError, match=says):
            Evidence(folder)


def test_tables_with_names_that_are_not_unicode(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    report._write_parquet(tmp_path / "t.parquet", {"key": ["a\udcff.png", "b"], "n": [1, 2]})
    assert parquet.read_table(tmp_path / "t.parquet").to_pydict() == {
        "key": ["a\\udcff.png", "b"],
        "n": [1, 2],
    }


RUN = """
import sys
import torch
import bcosvit
import bcosvit.auditing.evidence as evidence

if __name__ == "__main__":
    torch.set_num_threads(1)
    evidence.CHUNK = 16
    weights, data, out, processes = sys.argv[1:]
    bcosvit.audit(weights, data, out=out, split="all", batch_size=4, pairs=12,
                  processes=int(processes), device="cpu")
"""


@pytest.mark.slow
def test_killed_runs_and_processes_give_the_same_report(trained, tmp_path):
    folder, weights = trained
    script = tmp_path / "run.py"
    script.write_text(RUN)

    def start(name, processes):
        arguments = [str(weights), str(folder / "data"), str(tmp_path / name), str(processes)]
        return subprocess.Popen([sys.executable, str(script), *arguments], start_new_session=True)

    assert start("one", 1).wait() == 0
    assert start("two", 2).wait() == 0
    random, killed = np.random.default_rng(0), tmp_path / "killed"
    # Within the evidence of the first and of the fourth part, and in what follows after the last.
    for processes, parts in ((1, 1), (2, 4), (1, 6)):
        running = start("killed", processes)
        while len(list(killed.glob("evidence-*"))) < parts and running.poll() is None:
            time.sleep(0.01)
        time.sleep(random.uniform(0, 0.2))
        # With its children.
        os.killpg(running.pid, signal.SIGKILL)
        running.wait()
        assert not (killed / "report.html").exists()
    assert start("killed", 2).wait() == 0
    expected = {path.name: path.read_bytes() for path in (tmp_path / "one").iterdir()}
    assert "report.html" in expected and len(expected) > 15
    for name in ("two", "killed"):
        assert {path.name for path in (tmp_path / name).iterdir()} == set(expected)
        for file, content in expected.items():
            assert (tmp_path / name / file).read_bytes() == content, (name, file)


def test_sums_that_miss_a_logit_are_not_silent(audited, monkeypatch):
    run._check_sums(audited.evidence)
    monkeypatch.setattr(type(audited.evidence), "completeness", lambda self: float("nan"))
    with pytest.warns(CompletenessWarning, match="miss a logit"):
        run._check_sums(audited.evidence)
