"""Graphs on disk, as ONNX or as torch's own, with what a user of the file must know inside it."""

import json
import warnings
from pathlib import Path
from typing import Any, Literal

import torch
from torch.export import ExportedProgram

from bcosvit.export.graph import inputs, outputs
from bcosvit.files import atomic
from bcosvit.messages import require
from bcosvit.models.weights import CLASSES_KEY, CONFIG_KEY
from bcosvit.predictor import Predictor
from bcosvit.report.provenance import versions

Format = Literal["onnx", "torch-export"]
INPUT_KEY, VERSIONS_KEY = "bcosvit.input", "bcosvit.versions"


def notes_on(predictor: Predictor) -> dict[str, str]:
    """JSON by key: class names, how a picture becomes the input, config, logits' bias, versions."""
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
    }


def check_onnx() -> None:
    """Raises ``ValueError`` where what ONNX files need is not installed."""
    for name in ("onnx", "onnxscript", "onnxruntime"):
        require(name, extra="export", purpose="Writing ONNX files")


def write_onnx(
    program: ExportedProgram, out: str | Path, notes: dict[str, str], *, explanation: bool
) -> None:
    """One ONNX file; the notes are its metadata."""
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
    """A file for ``torch.export.load``; the notes are its extra files."""
    for node in program.graph.nodes:
        node.meta.pop("stack_trace", None)
    with atomic(out) as temporary:
        torch.export.save(program, temporary, extra_files=notes)
