"""CUDA graphs: the kernels of a pass are captured once and replayed without launch costs.

A dense network launches a thousand small kernels per pass, a training step several thousand, and
each costs the host more time than the device.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

WARM_UP = 3
"""Passes before the capture, in which kernels are compiled and libraries choose algorithms."""


class _Key(NamedTuple):
    """What a graph is valid for; anything else runs without one."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    autocast: torch.dtype | None


class CUDAGraphRunner:
    """A module, or a part of one, that is captured as a CUDA graph in its first call.

    There are up to three graphs: of the forward and backward pass of a training step, and of
    inference in either mode of the module. Each is for batches like the first one; a batch of
    another shape (the last of an epoch), or one that is itself differentiated (an explanation), is
    computed without a graph. Parameters and buffers are read where they lie, so training goes on
    between replays; a module that gets *other* tensors (``module.to``) needs a new runner.

    What a training step returns is overwritten by the next one, and its gradients belong to one
    backward pass, so they cannot be accumulated over several batches.

    Args:
        module: The module whose parameters are used.
        run: The function to capture; by default the module itself.
    """

    def __init__(self, module: nn.Module, run: Callable[[Tensor], Tensor] | None = None) -> None:
        self.module, self.run = module, run or module
        self._graphs: dict[tuple[bool, bool], tuple[_Key, Callable[[Tensor], Tensor]]] = {}

    def __call__(self, x: Tensor) -> Tensor:
        if not x.is_cuda:
            raise ValueError(
                f"CUDA graphs exist on CUDA devices alone, and the batch is on {x.device}: "
                f"call the module itself."
            )
        learns = torch.is_grad_enabled() and any(p.requires_grad for p in self.module.parameters())
        if x.requires_grad and torch.is_grad_enabled():
            return self.run(x)
        kind = (learns, self.module.training)
        narrow = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else None
        key = _Key(x.shape, x.dtype, x.device, narrow)
        if kind not in self._graphs:
            # Autocast's cache would hand the graph weights that were cast before the capture.
            with torch.autocast("cuda", narrow, enabled=narrow is not None, cache_enabled=False):
                capture = self._capture_step if learns else self._capture_pass
                self._graphs[kind] = key, capture(x)
        captured, replay = self._graphs[kind]
        return replay(x) if key == captured else self.run(x)

    def _capture_step(self, x: Tensor) -> Callable[[Tensor], Tensor]:
        # Parameters' gradients are added up by nodes that the capture has made, on a stream of
        # its own. Autograd waits for it where it must, and would warn that it does.
        hush = getattr(torch.autograd.graph, "set_warn_on_accumulate_grad_stream_mismatch", None)
        if hush is not None:
            hush(False)
        kept = [buffer.clone() for buffer in self.module.buffers()]
        step = torch.cuda.make_graphed_callables(
            _Part(self.module, self.run), (x.clone(),), num_warmup_iters=WARM_UP
        )
        assert isinstance(step, _Part)
        with torch.no_grad():
            # Running statistics saw the warm-up.
            for buffer, before in zip(self.module.buffers(), kept, strict=True):
                buffer.copy_(before)
        return step

    def _capture_pass(self, x: Tensor) -> Callable[[Tensor], Tensor]:
        place = x.clone()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP):
                self.run(place)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # What other threads ask of the device meanwhile is no part of it, and no error.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            out = self.run(place)

        def replay(x: Tensor) -> Tensor:
            place.copy_(x)
            graph.replay()
            return out.clone()

        return replay


def with_cuda_graphs(
    module: nn.Module, run: Callable[[Tensor], Tensor]
) -> Callable[[Tensor], Tensor]:
    """``run`` with CUDA graphs where ``module`` is on a CUDA device, and as it is elsewhere."""
    on_gpu = any(tensor.is_cuda for tensor in module.parameters())
    return CUDAGraphRunner(module, run) if on_gpu else run


class _Part(nn.Module):
    """``run`` as a module, so that the gradients of ``module``'s parameters are known."""

    def __init__(self, module: nn.Module, run: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.module, self.run = module, run

    def forward(self, x: Tensor) -> Tensor:
        return self.run(x)
