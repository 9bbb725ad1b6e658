"""Explanations compute in all of float32, whatever the process is set to, and leave it set so."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from bcosvit import explain
from bcosvit.attribution.inherent import full_float32
from bcosvit.attribution.layers import input_contributions, token_contributions


def switches() -> tuple[bool, str]:
    return torch.backends.cudnn.allow_tf32, torch.get_float32_matmul_precision()


@pytest.fixture(params=[(True, "highest"), (False, "highest"), (True, "high")])
def before(request, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", request.param[0])
    torch.set_float32_matmul_precision(request.param[1])
    yield request.param
    torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize(
    "run",
    [
        lambda model, images: explain(model, images),
        lambda model, images: explain(model, images, "all"),
        lambda model, images: token_contributions(model, images, 0),
        lambda model, images: input_contributions(model, images, 1, 0),
    ],
)
def test_both_passes_use_all_of_float32(run, model, images, before):
    seen = []
    layer = model.blocks[0]
    layer.register_forward_hook(lambda *_: seen.append(switches()))

    def hook(module, inputs, out):
        if out.requires_grad:
            out.register_hook(lambda grad: seen.append(switches()))

    layer.register_forward_hook(hook)
    run(model, images)
    assert len(seen) >= 2
    assert set(seen) == {(False, "highest")}
    assert switches() == before


def test_it_is_restored_after_an_error(model, images, before):
    with pytest.raises(ValueError, match="out of range"):
        explain(model, images, 99)
    assert switches() == before


def test_threads_do_not_undo_each_other(model, images, before):
    seen = []
    model.blocks[0].register_forward_hook(lambda *_: seen.append(switches()))
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: explain(model, images[:1], 0), range(48)))
    assert set(seen) == {(False, "highest")}
    assert switches() == before


def test_the_first_to_leave_does_not_switch_back(before):
    """The order that goes wrong without counting: A enters, B enters, A leaves, B leaves."""
    entered, leave, left = threading.Event(), threading.Event(), threading.Event()

    def other():
        with full_float32:
            entered.set()
            leave.wait(10)
        left.set()

    thread = threading.Thread(target=other)
    thread.start()
    entered.wait(10)
    with full_float32:
        leave.set()
        left.wait(10)
        assert switches() == (False, "highest")
    thread.join()
    assert switches() == before
