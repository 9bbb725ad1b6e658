"""The one door to torchvision.

torchvision's wheels are built against CUDA builds of torch. Beside a CPU build their compiled
operators don't load, and importing torchvision fails while it registers metadata for operators
that nobody defined. Declaring the two schemas first lets the import through; transforms, models
and datasets then work, and calling the missing operators still fails loudly.

Everything in bcosvit writes ``from bcosvit._torchvision import torchvision``.
"""

import torch

__all__ = ["torchvision"]

_SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
_library: torch.library.Library | None = None


def _import() -> object:
    global _library
    try:
        import torchvision
    except RuntimeError as error:
        if "torchvision::nms does not exist" not in str(error):
            raise
        # The library object owns the schemas: it must live as long as the process.
        _library = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            _library.define(name + _SCHEMA)
        import torchvision
    return torchvision


_import()

import torchvision  # noqa: E402
