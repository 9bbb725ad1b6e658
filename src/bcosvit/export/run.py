"""`bcosvit export`: weights in, one file out, and what it costs beside the model."""

from pathlib import Path

from bcosvit.export.compare import Comparison, compare
from bcosvit.export.files import Format, check_onnx, notes_on, write_onnx, write_torch
from bcosvit.export.graph import graph_of
from bcosvit.models.hub import locate
from bcosvit.predictor import Predictor

ENDINGS: dict[Format, str] = {"onnx": ".onnx", "torch-export": ".pt2"}


def export_weights(
    weights: str | Path,
    out: str | Path,
    *,
    format: Format = "onnx",
    explanation: bool = False,
    repeats: int = 5,
) -> Comparison:
    """Writes the model in ``weights`` to ``out`` and compares the two, timing ``repeats`` runs.

    With ``explanation`` the graph also returns the contributions of every pixel to a class that is
    an input, and their residual: for B-cos models alone.
    """
    if format not in ENDINGS:
        raise ValueError(f"There is no format {format!r}; choose from {', '.join(ENDINGS)}.")
    path, out = locate(weights), Path(out)
    if out.suffix != ENDINGS[format]:
        raise ValueError(f"{out} does not end in {ENDINGS[format]}, as files of {format} must.")
    if format == "onnx":
        check_onnx()
    predictor = Predictor.load(path, "cpu")
    side = predictor.transform.image_size
    program = graph_of(predictor.model, (side, side), explanation=explanation)
    if format == "onnx":
        write_onnx(program, out, notes_on(predictor), explanation=explanation)
    else:
        write_torch(program, out, notes_on(predictor))
    return compare(predictor, path, out, format, explanation=explanation, repeats=repeats)
