"""The HTTP API in one step: the same answers, one sentence for each mistake, and the guard."""

import base64
import io
import json
import socket
import threading
import time

import httpx
import numpy as np
import pytest
from PIL import Image

from bcosvit.report.images import method_image
from bcosvit.web.service import Box
from tests.report.support import write_pictures, write_weights
from tests.web.support import is_busy, serving
from tests.web.test_guard import WAIT, Abused, closed_within, sentence_of


def close(value):
    return pytest.approx(value, rel=1e-4, abs=1e-6)


def post(address, endpoint, picture=None, **options):
    files = {} if picture is None else {"files": {"picture": picture.read_bytes()}}
    return httpx.post(f"{address}api/{endpoint}", timeout=60, **files, **options)


def test_model(address, service):
    about = httpx.get(f"{address}api/model", timeout=60).json()
    assert about["classes"] == list(service.predictor.class_names)
    assert about["weights"] == "model.safetensors"


def test_predictions(address, service, pictures):
    for path in pictures:
        found = service.predict(service.open(path))
        expected = [service.entry(found, label) for label in found.top(2)]
        got = post(address, "predict", path, data={"top": "2"}).json()["top"]
        assert [entry["class"] for entry in got] == [entry["class"] for entry in expected]
        assert got[0]["logit"] == close(expected[0]["logit"])


def test_explanations(address, service, pictures):
    opened = service.open(pictures[1])
    expected, shown = service.sums(opened, 1), service.explain(opened, 1)
    numbers = post(address, "explain", pictures[1], data={"label": "dog"}).json()
    assert numbers["contributions"] == close(expected.contributions)
    assert numbers["incompleteness"] is None
    assert "images" not in numbers
    options = {"label": "dog", "images": "true", "joint": "False", "overlay": "0.5"}
    images = post(address, "explain", pictures[1], data=options).json()["images"]
    with Image.open(io.BytesIO(base64.b64decode(images["map"]))) as drawn:
        drawing = method_image(shown.method, shown.map, shown.scale)
        assert np.abs(np.array(drawn.convert("RGB")) - drawing.astype(int)).max() <= 1
    assert set(images) == {"map", "overlay", "colors"}


def test_an_upload_is_sent_once(address, service, pictures):
    with pictures[0].open("rb") as file:
        sent = httpx.post(f"{address}gradio_api/upload", files={"files": file}).json()
    opened, box = service.open(pictures[0]), {"x": 0, "y": 0, "width": 8, "height": 16}
    for label in (0, 1):
        given = {"picture": sent[0], "label": str(label), **box}
        got = post(address, "region", json=given).json()
        assert got["together"] == close(service.region(opened, label, Box(**box)).together)
        assert got["index"] == label


PICTURE = object()
BOX = {"x": "0", "y": "0", "width": "99", "height": "9"}


@pytest.mark.parametrize(
    ("endpoint", "fields", "status", "says"),
    [
        ("predict", {"top": "1"}, 422, "upload one first"),
        ("predict", {"picture": PICTURE, "top": "five"}, 422, "top is wrong: give a finite number"),
        ("predict", {"picture": PICTURE, "top": "nan"}, 422, "top is wrong"),
        ("predict", {"picture": PICTURE, "top": "0"}, 422, "integer >= 1"),
        ("predict", {"picture": PICTURE, "top": "2.7"}, 422, "top = 2.7 is not allowed"),
        ("predict", {"picture": b"no picture"}, 422, "not an image of a known format"),
        ("predict", {"picture": "/etc/passwd"}, 422, "not an upload of this server"),
        ("predict", {"picture": PICTURE, "size": "5"}, 422, "no argument 'size'"),
        ("explain", {"picture": PICTURE, "label": "catt"}, 422, "did you mean 'cat'"),
        ("explain", {"picture": PICTURE, "method": "magic"}, 422, "no method 'magic'"),
        ("explain", {"picture": PICTURE, "joint": "perhaps"}, 422, "joint is wrong"),
        ("explain", {"picture": PICTURE, "images": "perhaps"}, 422, "images is wrong"),
        ("explain", {"picture": PICTURE, "label": b"a file"}, 400, "damaged"),
        ("region", {"picture": PICTURE}, 422, "A box needs four numbers"),
        ("region", {"picture": PICTURE, **BOX}, 422, "beyond the picture"),
        ("region", {"picture": PICTURE, **BOX, "x": "0.7"}, 422, "0.7 is no number of whole"),
        (
            "explain",
            {"picture": PICTURE, "overlay": "7", "images": "true"},
            422,
            "overlay = 7 is not allowed",
        ),
        ("magic", {"picture": PICTURE}, 404, "no endpoint '/api/magic'"),
        ("report", {"picture": PICTURE}, 404, "choose from /api/model"),
        ("model", {"picture": PICTURE}, 405, "use GET"),
    ],
)
def test_mistakes_in_forms(address, pictures, endpoint, fields, status, says):
    form = {}
    for key, each in fields.items():
        content = pictures[0].read_bytes() if each is PICTURE else each
        form[key] = (f"{key}.png" if isinstance(content, bytes) else None, content)
    answer = httpx.post(f"{address}api/{endpoint}", files=form, timeout=60)
    assert answer.status_code == status, answer.text
    assert says in sentence_of(answer)


@pytest.mark.parametrize(
    ("method", "options", "status"),
    [
        ("GET", {}, 405),
        ("PUT", {}, 405),
        ("POST", {"content": b"{no json"}, 400),
        ("POST", {"content": b"[" * 100_000}, 400),
        ("POST", {"json": [1, 2]}, 422),
        ("POST", {"json": {"picture": 5}}, 422),
        ("POST", {"json": {"picture": {"path": "a"}}}, 422),
        ("POST", {"json": {"picture": "a\0b"}}, 422),
        ("POST", {"json": {"picture": "https://example.org/a.png"}}, 422),
        ("POST", {"json": {"picture": "/bcosvit-files/../../etc/passwd"}}, 422),
        ("POST", {"json": {"picture": "/bcosvit-files/gone.png"}}, 422),
        ("POST", {"json": {"label": 3}}, 422),
        ("POST", {"json": {"overlay": 10**400}}, 422),
        ("POST", {"json": {"images": 1}}, 422),
        ("POST", {"json": {"label": "x" * 2_000_000}}, 413),
        ("POST", {"content": b"{}", "headers": {"content-type": "text/plain"}}, 415),
        ("POST", {"content": b"x", "headers": {"content-type": "multipart/form-data"}}, 400),
        ("POST", {"json": {}, "headers": {"host": "evil.example"}}, 403),
    ],
)
def test_mistakes_in_requests(address, method, options, status):
    answer = httpx.request(method, f"{address}api/explain", **options)
    assert answer.status_code == status, answer.text
    sentence_of(answer)


@pytest.mark.parametrize("content", [b"", b"x=1", b"[1]"])
def test_bodies_that_are_no_object_are_told_what_to_send(address, content):
    answer = httpx.post(f"{address}api/predict", content=content)
    assert "multipart/form-data" in sentence_of(answer)


def test_large_pictures_are_refused(address):
    for size, says in ((1_500_000, "larger than 1 MB"), (5_000_000, "larger than 2 MB")):
        answer = httpx.post(f"{address}api/predict", files={"picture": b"\0" * size})
        assert answer.status_code in (413, 422)
        assert says in sentence_of(answer)


def test_clients_that_still_send_read_why_they_are_refused(address):
    place = httpx.URL(address)
    head = "POST /api/predict HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5000000\r\n\r\n"
    with socket.create_connection((place.host, place.port), timeout=10) as client:
        client.sendall(head.encode())
        answer = client.recv(1)
        for _ in range(5):
            time.sleep(0.05)
            client.sendall(b"\0" * 1_000_000)
        while part := client.recv(4096):
            answer += part
    assert answer.startswith(b"HTTP/1.1 413") and b"larger than" in answer


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """One whose expensive methods take a while."""
    folder = tmp_path_factory.mktemp("direct")
    weights = write_weights(folder / "model.safetensors", image_size=96, width=96)
    photo = next(write_pictures(folder / "pictures", 1, size=100).iterdir())
    options = ("--queue", "2", "--concurrency", "1", "--upload-timeout", "2")
    with serving(weights, *options, folder=folder) as address:
        yield Abused(address, folder, photo)


def request_of(server, method):
    """A request as bytes, whose connection the test can close."""
    body = json.dumps({"picture": server.upload()["path"], "label": "cat", "method": method})
    head = "POST /api/explain HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode()


def test_clients_who_hang_up_stop_their_work_and_a_full_queue_says_so(server):
    sent, open_ones = request_of(server, "occlusion"), []
    for _ in range(3):
        open_ones.append(socket.create_connection(server.place))
        open_ones[-1].sendall(sent)
    refused = None
    for _ in range(100):
        refused = post(server.address, "predict", server.photo)
        if refused.status_code == 503:
            break
    assert "Queue is full" in sentence_of(refused)
    for connection in open_ones:
        connection.close()
    for _ in range(600):
        answer = post(server.address, "predict", server.photo)
        if answer.status_code == 200:
            break
        time.sleep(0.05)
    assert answer.json()["top"]
    time.sleep(1)
    # Nothing is computed any more.
    assert not is_busy(server.address)


def test_a_form_that_never_ends(server):
    with socket.create_connection(server.place) as connection:
        connection.sendall(
            b"POST /api/predict HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n"
            b"Content-Type: multipart/form-data; boundary=x\r\n\r\n--x\r\n"
        )
        assert closed_within(connection, WAIT).startswith(b"HTTP/1.1 408")


def test_many_at_once_get_their_own_answers(address, service, pictures):
    expected = {
        (path, label): service.sums(service.open(path), label).contributions
        for path in pictures
        for label in (0, 1)
    }
    found = {}

    def ask(path, label):
        numbers = post(address, "explain", path, data={"label": str(label)}).json()
        found[path, label] = numbers["contributions"]

    threads = [threading.Thread(target=ask, args=each) for each in expected]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {key: close(each) for key, each in expected.items()}
