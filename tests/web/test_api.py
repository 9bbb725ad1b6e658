"""The HTTP API as other programs use it: through gradio_client, through curl, and with mistakes."""

import json
import re
import shutil
import subprocess
import zipfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

import httpx
import numpy as np
import pytest
from examples.client import ask
from gradio_client import Client, handle_file
from gradio_client.exceptions import AppError
from PIL import Image

from bcosvit.report.images import method_image, weight_image
from bcosvit.web.service import Box
from tests.report.support import CLASSES, Page, write_pictures


@pytest.fixture(scope="module")
def client(address, tmp_path_factory):
    files = tmp_path_factory.mktemp("downloads")
    client = Client(address, verbose=False, analytics_enabled=False, download_files=files)
    yield client
    client.close()


def pixels(path):
    with Image.open(path) as image:
        return np.array(image.convert("RGB"))


def test_model(client):
    about = client.predict(api_name="/model")
    assert about["classes"] == list(CLASSES)
    assert about["methods"][0] == "inherent"
    assert (about["image_size"], about["exact"]) == (16, True)
    # Users do not see where the weights are stored.
    assert about["weights"] == "model.safetensors"


def test_predict(client, service, pictures):
    for path in pictures:
        found = service.predict(service.open(path))
        expected = [service.entry(found, label) for label in found.top(2)]
        got = client.predict(handle_file(path), 2, api_name="/predict")["top"]
        assert [entry["class"] for entry in got] == [entry["class"] for entry in expected]
        assert got[0]["logit"] == pytest.approx(expected[0]["logit"], rel=1e-4)
    # The second argument has a default.
    assert len(client.predict(handle_file(pictures[0]), api_name="/predict")["top"]) == 5


def test_explain(client, service, pictures):
    numbers, map_, overlay, colored = client.predict(
        handle_file(pictures[1]), "dog", "", 0.5, False, api_name="/explain"
    )
    picture = service.open(pictures[1])
    shown = service.explain(picture, 1)
    for name, value in asdict(service.sums(picture, 1)).items():
        assert numbers[name] == pytest.approx(value, rel=1e-4, abs=1e-5)
    assert numbers["class"] == "dog"
    assert numbers["method"] == "inherent"
    assert np.array_equal(pixels(map_), method_image("inherent", shown.map, shown.scale))
    assert np.array_equal(pixels(colored), weight_image(shown.found.exact, 0))
    assert pixels(overlay).shape == (16, 16, 3)


def test_strict(client, pictures):
    # Of a model whose contributions add up; tests/web/test_session.py has one of which they do not.
    photo = handle_file(pictures[1])
    numbers, *_ = client.predict(photo, "dog", strict=True, api_name="/explain")
    assert numbers["incompleteness"] is None
    region = client.predict(photo, "dog", 0, 0, 4, 4, strict=True, api_name="/region")
    assert region["incompleteness"] is None
    assert Path(client.predict([photo], "", "", "png", True, api_name="/report")).exists()


def test_explain_by_another_method_on_a_joint_scale(client, service, pictures):
    numbers, map_, _, colored = client.predict(
        handle_file(pictures[1]), "1", "rollout", 0.5, True, api_name="/explain"
    )
    shown = service.explain(service.open(pictures[1]), 1, "rollout", joint=True)
    assert numbers["scale"] == pytest.approx(shown.scale, rel=1e-4)
    assert np.array_equal(pixels(map_), method_image("rollout", shown.map, shown.scale))
    assert colored is None
    # The sums are the model's, whichever map is drawn.
    assert numbers["completeness_error"] < 1e-3


def test_region(client, service, pictures):
    got = client.predict(handle_file(pictures[0]), "cat", 2, 3, 4, 5, api_name="/region")
    expected = service.region(service.open(pictures[0]), 0, Box(x=2, y=3, width=4, height=5))
    for name, value in asdict(expected).items():
        assert got[name] == pytest.approx(value, rel=1e-4, abs=1e-6)


def test_reports(client, pictures):
    two = [handle_file(path) for path in pictures[:2]]
    html = client.predict(two, "", "inherent,rollout", "html", api_name="/report")
    page = Page(Path(html))
    page.assert_self_contained()
    assert [each for each in page.headings if each.endswith(".png")] == ["0000.png", "0001.png"]
    with zipfile.ZipFile(client.predict(two, "", "", "npz", api_name="/report")) as archive:
        assert archive.namelist() == ["00001-0000.npz", "00002-0001.npz"]
    with np.load(client.predict(two[:1], "dog", "", "npz", api_name="/report")) as one:
        assert one["classes"].tolist() == ["dog"]
        assert one["map_inherent"].shape == (1, 16, 16)
    with Image.open(client.predict(two, "", "", "png", api_name="/report")) as image:
        assert image.format == "PNG"
        # One row per picture.
        assert image.height > 2 * 192


def test_the_example(address, pictures, tmp_path, capsys):
    found = ask(address, pictures[0], tmp_path / "answers")
    assert found["explained"]["class"] == found["top"][0]["class"]
    for name in ("map.png", "overlay.png", "colors.png", "report.html"):
        assert (tmp_path / "answers" / name).stat().st_size > 0
    assert "contributions + residual + bias = logit" in capsys.readouterr().out


def documented(kind: str) -> str:
    """The last block of a kind in the documentation, for this model and its pictures."""
    text = Path(__file__).parents[2].joinpath("docs/serve.md").read_text()
    (block,) = (
        block
        for block in re.findall(rf"^```{kind}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
        if "/region" in block
    )
    small = {"112, 224": "8, 16", "width=112": "width=8", "height=224": "height=16"}
    for given, used in small.items():
        block = block.replace(given, used)
    return block


def test_the_documented_python(address, service, pictures, tmp_path, monkeypatch):
    shutil.copy(pictures[0], tmp_path / "photo.jpg")
    monkeypatch.chdir(tmp_path)
    block = documented("py").replace("http://127.0.0.1:7860", address)
    # Its last line, as a reader would see it.
    before, _, last = block.rstrip().rpartition("\n")
    names: dict[str, object] = {}
    exec(before, names)
    expected = service.region(service.open(pictures[0]), 0, Box(x=0, y=0, width=8, height=16))
    assert eval(last, names) == pytest.approx(expected.together, rel=1e-4, abs=1e-6)
    assert names["numbers"]["class"] == "cat"
    names["client"].close()


def test_the_documented_curl(address, service, pictures, tmp_path):
    shutil.copy(pictures[0], tmp_path / "photo.jpg")
    block = documented("sh").replace("http://127.0.0.1:7860/", address)
    done = subprocess.run(
        ["bash", "-euc", block], capture_output=True, text=True, timeout=60, cwd=tmp_path
    )
    decoder, answers, rest = json.JSONDecoder(), [], done.stdout
    while rest:
        answer, end = decoder.raw_decode(rest)
        answers.append(answer)
        rest = rest[end:]
    about, predicted, explained, got = answers
    assert about["classes"] == list(CLASSES)
    assert predicted["top"][0]["probability"] >= predicted["top"][1]["probability"]
    assert explained["class"] == "cat"
    assert set(explained["images"]) == {"map", "overlay", "colors"}
    expected = service.region(service.open(pictures[0]), 0, Box(x=0, y=0, width=8, height=16))
    assert got["together"] == pytest.approx(expected.together, rel=1e-4, abs=1e-6)


def test_only_the_documented_endpoints(client):
    named = client.view_api(return_format="dict", print_info=False)["named_endpoints"]
    assert set(named) == {"/model", "/predict", "/explain", "/region", "/report"}
    assert [each["parameter_name"] for each in named["/region"]["parameters"]] == [
        *("picture", "label", "x", "y", "width", "height", "strict")
    ]


@pytest.mark.parametrize(
    ("arguments", "endpoint", "says"),
    [
        (["photo", 0], "/predict", "top = 0 is not allowed: give an integer >= 1."),
        (["broken"], "/predict", "The file broken.png is not an image of a known format"),
        ([None], "/predict", "There is no picture: upload one first."),
        (["photo", "catt", "", 0.5, False], "/explain", "did you mean 'cat'"),
        (["photo", "", "magic", 0.5, False], "/explain", "no method 'magic'"),
        (["photo", "", "", 2, False], "/explain", "overlay = 2 is not allowed"),
        (["photo", "", 10, 0, 9, 1], "/region", "beyond the picture of 16×16 pixels"),
        (["photo", "", None, 0, 9, 1], "/region", "A box needs four numbers"),
        ([["photo"], "", "", "pdf"], "/report", "no kind of file 'pdf'; choose from html, npz"),
        ([["photo"] * 5, "", "", "html"], "/report", "5 pictures are too many at once"),
        ([[], "", "", "html"], "/report", "There is no picture: upload one first."),
    ],
)
def test_mistakes_are_one_sentence(client, pictures, tmp_path, arguments, endpoint, says):
    broken = tmp_path / "broken.png"
    broken.write_bytes(b"no picture")
    files = {"photo": handle_file(pictures[0]), "broken": handle_file(broken)}

    def given(value):
        if isinstance(value, list):
            return [given(each) for each in value]
        return files.get(value, value) if isinstance(value, str) else value

    with pytest.raises(AppError, match=re.escape(says)) as raised:
        client.predict(*map(given, arguments), api_name=endpoint)
    assert "Traceback" not in str(raised.value)


def test_nothing_but_uploads_is_read(address, tmp_path):
    """Neither files of the server nor addresses, however they are named."""
    secret = tmp_path / "secret.png"
    Image.new("RGB", (20, 20)).save(secret)
    for file in (
        {"path": str(secret), "meta": {"_type": "gradio.FileData"}},
        {"path": str(secret)},
        {"path": "http://127.0.0.1:9/a.png", "meta": {"_type": "gradio.FileData"}},
    ):
        call = f"{address}gradio_api/call/predict"
        answer = httpx.post(call, json={"data": [file, 5]})
        done = answer.text
        if answer.status_code == 200:
            done = httpx.get(f"{call}/{answer.json()['event_id']}").text
            assert "event: error" in done
        assert "upload" in done
        assert str(tmp_path) not in done
        assert "logit" not in done


def test_browsers_are_forbidden_other_hosts(address):
    policy = httpx.get(address).headers["content-security-policy"]
    assert policy.startswith("default-src 'self'")
    assert "http" not in policy


def test_large_uploads_are_refused(client, address, tmp_path):
    noise = np.random.default_rng(0).integers(0, 255, (700, 700, 3), dtype=np.uint8)
    Image.fromarray(noise).save(tmp_path / "large.png")
    with (tmp_path / "large.png").open("rb") as file:
        answer = httpx.post(f"{address}gradio_api/upload", files={"files": file})
    assert answer.status_code == 413
    with pytest.raises(Exception, match="exceeds the maximum file size of 1000000 bytes"):
        client.predict(handle_file(tmp_path / "large.png"), 5, api_name="/predict")


def test_of_twelve_at_once_each_is_right_or_refused(address, service, tmp_path):
    """How many are refused depends on the machine; see test_guard for a queue that is full."""
    api = f"{address}gradio_api/"
    # Each its own, so that no answer is one that the server remembers.
    pictures = sorted(write_pictures(tmp_path, 12).iterdir())
    with httpx.Client(timeout=60) as user, ThreadPoolExecutor(12) as pool:

        def upload(picture):
            with picture.open("rb") as file:
                (path,) = user.post(api + "upload", files={"files": file}).json()
            return {"path": path, "meta": {"_type": "gradio.FileData"}}

        def explain(photo):
            body = {"data": [photo, "cat", "occlusion", 0.5, True]}
            return user.post(api + "call/explain", json=body)

        photos = [upload(picture) for picture in pictures]
        answers = list(pool.map(explain, photos))
        refused = [each.json()["error"] for each in answers if each.status_code == 503]
        assert len(refused) < 12
        assert all("Queue is full" in error for error in refused)
        accepted = {
            picture: each.json()["event_id"]
            for picture, each in zip(pictures, answers, strict=True)
            if each.status_code == 200
        }
        done = list(
            pool.map(lambda event: user.get(f"{api}call/explain/{event}").text, accepted.values())
        )
    # On a busy machine some waited too long for somebody who listens, and were given up.
    complete = {
        picture: text
        for picture, text in zip(accepted, done, strict=True)
        if "event: error" not in text
    }
    assert complete
    scales = [
        json.loads(text.partition("data: ")[2].partition("\n")[0])[0]["scale"]
        for text in complete.values()
    ]
    expected = [
        service.explain(service.open(picture), 0, "occlusion", joint=True).scale
        for picture in complete
    ]
    assert scales == pytest.approx(expected, rel=1e-4)
