"""A model as one file, in ONNX's format or in PyTorch's, that also says how it is to be used."""

import io
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console
from torch import Tensor
from torch.export import ExportedProgram

from bcosvit.attribution import Attribution
from bcosvit.attribution.base import check_completeness
from bcosvit.export.compare import Comparison, compare, runtime
from bcosvit.export.graph import graph_of, inputs, outputs
from bcosvit.files import atomic, locked_file
from bcosvit.messages import require, unknown
from bcosvit.models.hub import locate
from bcosvit.models.weights import CLASSES_KEY, CONFIG_KEY
from bcosvit.predictor import Predictor
from bcosvit.progress import stages
from bcosvit.report.provenance import versions

Format = Literal["onnx", "torch-export"]
ENDINGS: dict[Format, str] = {"onnx": ".onnx", "torch-export": ".pt2"}
SHARES: dict[Format, dict[str, float]] = {
    "onnx": {
        "Reading weights": 2,
        "Tracing the model": 60,
        "Writing the file": 26,
        "Comparing the file with the model": 12,
    },
    "torch-export": {
        "Reading weights": 3,
        "Tracing the model": 52,
        "Writing the file": 10,
        "Comparing the file with the model": 35,
    },
}
"""The stages of an export, with the share of the time that each takes, for the time left."""
INPUT_KEY, VERSIONS_KEY, BIAS_KEY = "bcosvit.input", "bcosvit.versions", "bcosvit.bias"


def export_weights(
    weights: str | Path,
    out: str | Path,
    *,
    format: Format = "onnx",
    explanation: bool = False,
    repeats: int = 5,
    console: Console | None = None,
) -> Comparison:
    """Writes a model as one file that runs without bcosvit, and compares the two.

    Args:
        weights: The model, as ``bcosvit.load`` takes it.
        out: The file to write, which ends in ``.onnx`` or ``.pt2``.
        format: ``"onnx"``, or ``"torch-export"`` for ``torch.export.load``.
        explanation: Whether the file also returns the contributions of every pixel to a class that
            is an input, and their residual; for B-cos models alone.
        repeats: How often both are timed.
        console: Where progress is shown.

    Returns:
        Sizes, times and errors of the file and of the model.

    Raises:
        ValueError: The format and the file's ending do not fit, what the format needs is not
            installed, or a conventional model is to be exported with explanations.
    """
    if format not in ENDINGS:
        raise ValueError(unknown("format", format, ENDINGS))
    path, out = locate(weights), Path(out)
    if out.suffix != ENDINGS[format]:
        raise ValueError(f"{out} does not end in {ENDINGS[format]}, as files of {format} must.")
    if format == "onnx":
        for name in ("onnx", "onnxscript", "onnxruntime"):
            require(name, extra="export", purpose="Writing ONNX files")
    with locked_file(out), stages(SHARES[format], console) as begin:
        begin("Reading weights")
        predictor = Predictor.load(path, "cpu")
        side = predictor.transform.image_size
        begin("Tracing the model")
        program = graph_of(predictor.model, (side, side), explanation=explanation)
        begin("Writing the file")
        if format == "onnx":
            write_onnx(program, out, notes_on(predictor), explanation=explanation)
        else:
            write_torch(program, out, notes_on(predictor))
        begin("Comparing the file with the model")
        return compare(predictor, path, out, explanation=explanation, repeats=repeats)


def load_exported(path: str | Path, *, strict: bool = False) -> Callable[..., Attribution]:
    """Loads an exported file with explanations, whose contributions are checked in every call.

    Args:
        path: What `export_weights` wrote with ``explanation=True``.
        strict: Whether contributions that miss the logit beyond rounding are an error; by default
            they are a `bcosvit.attribution.CompletenessWarning`.

    Returns:
        A function of images [n, 3, H, W] and, if wanted, a class for all or classes [n], which
        returns an `Attribution`.

    Raises:
        ValueError: The file has no explanations, or its ending is not known.
    """
    path = Path(path)
    if path.suffix not in ENDINGS.values():
        raise ValueError(f"{path} ends neither in .onnx nor in .pt2; give an exported file.")
    if path.suffix == ENDINGS["onnx"]:
        require("onnxruntime", extra="export", purpose="Reading ONNX files")
    run, notes = runtime(path, (BIAS_KEY,))
    if BIAS_KEY not in notes:
        raise ValueError(f"{path} says nothing about its bias; export the model again.")
    bias = float(json.loads(notes[BIAS_KEY]))

    def explain(images: Tensor, target: int | Tensor | None = None) -> Attribution:
        given = torch.as_tensor(-1 if target is None else target)
        classes = given.expand(len(images)).contiguous()
        found = run(images, classes)
        if len(found) != len(outputs(True)):
            raise ValueError(f"{path} returns logits alone; export it --with-explanation.")
        logits, contributions, residual = found
        classes = torch.where(classes < 0, logits.argmax(1), classes)
        attribution = Attribution(
            map=contributions,
            target=classes,
            logits=logits,
            residual=residual,
            logit=logits.gather(1, classes[:, None])[:, 0],
            bias=bias,
        )
        check_completeness(attribution, strict)
        return attribution

    return explain


def notes_on(predictor: Predictor) -> dict[str, str]:
    """The file's metadata: class names, how a picture becomes the input, config and versions."""
    side, resize = predictor.transform.image_size, predictor.transform.resize
    picture = {
        "layout": "[n, 3, height, width], RGB, float32 in [0, 1], not normalized",
        "size": [side, side],
        "resize_short_side": resize,
        "crop": "center",
        "interpolation": "bilinear, antialiased",
    }
    return {
        CLASSES_KEY: json.dumps(predictor.class_names),
        INPUT_KEY: json.dumps(picture),
        CONFIG_KEY: json.dumps(predictor.config),
        VERSIONS_KEY: json.dumps(versions()),
        BIAS_KEY: json.dumps(predictor.model.logit.bias),
    }


def write_onnx(
    program: ExportedProgram, out: str | Path, notes: dict[str, str], *, explanation: bool
) -> None:
    """Writes one ONNX file with the notes as its metadata."""
    import onnx_ir
    from onnx_ir.passes.common import ClearMetadataAndDocStringPass
    from onnxscript import optimizer

    with warnings.catch_warnings():
        # torch's own bookkeeping warns about itself when it copies what it exports.
        warnings.filterwarnings("ignore", "`isinstance\\(treespec, LeafSpec\\)`", FutureWarning)
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        converted: Any = torch.onnx.export(
            program,
            dynamo=True,
            verbose=False,
            # Runtimes optimize for their machine when they load; the exporter's rewriting takes
            # minutes here and gains nothing on top.
            optimize=False,
            input_names=inputs(explanation),
            output_names=outputs(explanation),
            # One name is enough for the batch that all share.
            dynamic_shapes=({0: "n"}, *[{0: None}] * (len(inputs(explanation)) - 1)),
        )
    model = converted.model
    optimizer.fold_constants(model)
    optimizer.remove_unused_nodes(model)
    # Every node would say which line of which file on this machine it comes from.
    ClearMetadataAndDocStringPass()(model)
    model.metadata_props.clear()
    model.metadata_props.update(notes)
    model.producer_name = "bcosvit"
    with atomic(out) as temporary:
        onnx_ir.save(model, temporary)


def write_torch(program: ExportedProgram, out: str | Path, notes: dict[str, str]) -> None:
    """Writes a file for ``torch.export.load`` with the notes as its extra files."""
    for node in program.graph.nodes:
        # Lines of files on this machine, and addresses in memory.
        for name in ("stack_trace", "from_node"):
            node.meta.pop(name, None)
    # Given a path, torch would write the name of the temporary file into the archive.
    buffer = io.BytesIO()
    torch.export.save(program, buffer, extra_files=notes)
    with atomic(out) as temporary:
        temporary.write_bytes(buffer.getbuffer())
