"""One loaded model, ready for pictures.

A `Predictor` bundles what is needed to go from a picture to its explanation: the model on its
device, prepared for inference, the names of its classes, and the transform of its training. Every
command, report, page and study starts from one.
"""

import csv
import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bcosvit.attribution import METHODS, Attribution, Method, Top, explain_all, explainers
from bcosvit.attribution.base import resolve_target
from bcosvit.data.images import read_image
from bcosvit.data.transforms import EvalTransform
from bcosvit.messages import and_more
from bcosvit.models.base import AnyModel, load
from bcosvit.models.hub import DEFAULT, locate
from bcosvit.models.registry import to_dict
from bcosvit.models.weights import CLASSES_KEY, IDS_KEY, class_names, read_metadata, run_notes
from bcosvit.nn import prepared_view

__all__ = ["Explanation", "Predictor", "choose_device", "confidence", "log_odds"]


def confidence(model: AnyModel, logits: Tensor) -> Tensor:
    """Computes the confidence in every class.

    B-cos models are trained with one sigmoid per class, conventional models with a softmax over all
    classes, and the confidence is the model's own activation.

    Args:
        model: The model that predicted.
        logits: Its logits [..., K].

    Returns:
        Probabilities [..., K] in float64.
    """
    logits = logits.double()
    return logits.sigmoid() if model.config.activation == "sigmoid" else logits.softmax(-1)


def log_odds(model: AnyModel, logits: Tensor, labels: Tensor) -> Tensor:
    """Computes log p/(1−p) of one class per image, where p is its `confidence`.

    It orders images even where the confidence itself is rounded to 1.

    Args:
        model: The model that predicted.
        logits: Its logits [B, K].
        labels: A class per image [B].

    Returns:
        Log-odds [B] in float64.
    """
    logits, labels = logits.double(), labels.unsqueeze(1)
    own = logits.gather(1, labels).squeeze(1)
    if model.config.activation == "sigmoid":
        return own
    return own - logits.scatter(1, labels, -torch.inf).logsumexp(1)


@dataclass(frozen=True, kw_only=True)
class Sums:
    """Completeness as arithmetic: contributions + residual + bias = logit."""

    contributions: float
    residual: float
    bias: float
    logit: float
    completeness_error: float


@dataclass(frozen=True, kw_only=True, eq=False)
class Explanation:
    """A picture, the prediction, and attributions for some classes C; all tensors on the CPU."""

    image: Tensor
    """[3, H, W], as the model saw it."""
    logits: Tensor
    """[K]"""
    probabilities: Tensor
    """[K]: sigmoid (B-cos) or softmax (conventional)."""
    target: Tensor
    """[C]: the classes that are explained, the most confident first unless they were given."""
    attributions: dict[str, Attribution]
    """By method: maps [C, H, W] and so on."""
    name: str = ""
    """Of the picture."""

    @property
    def exact(self) -> Attribution | None:
        """The first attribution that adds up to the logit, if there is one."""
        return next((a for a in self.attributions.values() if a.residual is not None), None)

    def top(self, count: int) -> list[int]:
        """Returns the ``count`` classes with the highest logits."""
        return self.logits.topk(min(count, len(self.logits))).indices.tolist()

    def entry(self, label: int, class_names: Sequence[str]) -> dict[str, Any]:
        """Returns what is predicted for a class, fit for JSON."""
        return {
            "class": class_names[label],
            "index": label,
            "probability": self.probabilities[label].item(),
            "logit": self.logits[label].item(),
        }

    def sums(self, row: int) -> Sums:
        """Returns the terms that show the explanation of class ``target[row]`` to be complete."""
        own = self.exact
        assert own is not None and own.residual is not None and own.logit is not None
        return Sums(
            contributions=own.map[row].double().sum().item(),
            residual=own.residual[row].item(),
            bias=own.bias,
            logit=own.logit[row].item(),
            completeness_error=own.completeness_error()[row].item(),
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class Predictor:
    """A loaded model with its class names, its transform and its device.

    Examples:
        >>> import torch, bcosvit
        >>> stem = bcosvit.StemConfig(widths=(8,))
        >>> config = bcosvit.ModelConfig(
        ...     width=12, depth=1, image_size=16, num_classes=2, backbone=stem
        ... )
        >>> predictor = bcosvit.Predictor.of(bcosvit.create_model(config), ["cat", "dog"])
        >>> found = predictor.explain(torch.rand(3, 16, 16))
        >>> found.attributions["inherent"].map.shape
        torch.Size([1, 16, 16])
    """

    model: AnyModel
    """In evaluation mode, with weights that are normalized once (`bcosvit.nn.prepared_view`)."""
    class_names: tuple[str, ...]
    """Of all classes; numbers where the weights file brings none."""
    has_class_names: bool = True
    """Whether the weights file brings names."""
    class_ids: tuple[str, ...] | None = None
    """Short names of all classes, such as WordNet IDs, where the weights file brings some."""
    transform: EvalTransform
    """How pictures become the model's input: as in training, else the paper's crop."""
    weights: str = ""
    """As given: a path, a shipped model's name or an address."""

    @classmethod
    def load(cls, weights: str | Path = DEFAULT, device: str = "auto") -> "Predictor":
        """Loads a model for inference.

        Args:
            weights: A shipped model's name, or anything else that `bcosvit.load` takes.
            device: A device by name; ``"auto"`` is the accelerator where there is one.

        Returns:
            The predictor.

        Raises:
            ValueError: If the weights cannot be read or the device cannot be used.
        """
        # Once: what was downloaded is verified each time it is looked for.
        path = locate(weights)
        metadata = read_metadata(path)
        model = load(path).to(choose_device(device))
        return cls.of(
            model,
            _class_names(path, metadata, model.config.num_classes),
            class_ids=_class_names(path, metadata, model.config.num_classes, IDS_KEY),
            crop=run_notes(metadata, path).get("eval_crop"),
            weights=str(weights),
        )

    @classmethod
    def of(
        cls,
        model: AnyModel,
        class_names: Sequence[str] | None = None,
        *,
        class_ids: Sequence[str] | None = None,
        crop: float | None = None,
        weights: str = "",
    ) -> "Predictor":
        """Makes a predictor of a model that is in memory already.

        Args:
            model: The model, on its device.
            class_names: One name per class; without, classes are numbered.
            class_ids: Short names of the classes, such as WordNet IDs, that data may use.
            crop: The share of a picture's short side that the model sees; the paper's by default.
            weights: What to call the model in reports.

        Returns:
            The predictor. Training ``model`` further does not change it.
        """
        height, width = model.config.image_size
        if height != width:
            raise ValueError(
                f"The model takes pictures of {width}×{height} pixels, but only squares are "
                f"supported here; give it a square size with bcosvit.resize_prior."
            )
        count = model.config.num_classes
        return cls(
            model=prepared_view(model),
            class_names=tuple(class_names or (f"class {number}" for number in range(count))),
            has_class_names=class_names is not None,
            class_ids=None if class_ids is None else tuple(class_ids),
            transform=EvalTransform(height, crop or EvalTransform.crop_fraction),
            weights=weights,
        )

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return next(self.model.parameters()).device

    @property
    def config(self) -> dict[str, Any]:
        """The model's config, fit for JSON."""
        return to_dict(self.model.config)

    def describe(self) -> str:
        """Describes the model in words: family, kind, classes and input."""
        return self.model.config.describe()

    def methods(self, names: str | None = None) -> tuple[str, ...]:
        """Chooses explanation methods for this model.

        Args:
            names: Comma-separated names, or "all" that apply to the model. None is the first that
                applies: inherent for B-cos models, input × gradient for others.

        Returns:
            The names.

        Raises:
            ValueError: If a method does not exist or does not apply.
        """
        able = explainers(self.model)
        if names is None:
            return able[:1]
        if names.strip() == "all":
            return able
        for name, explainer in METHODS.pick(names).items():
            if name not in able:
                raise ValueError(
                    f"{explainer.title} ({name}) does not apply to this model; choose all, or some "
                    f"of {', '.join(able)}."
                )
        return tuple(METHODS.pick(names))

    def find_classes(self, names: str) -> list[int]:
        """Finds classes by name or number.

        Args:
            names: Comma-separated: ``cat,dog``, ``3,17``. A name that contains commas is written in
                double quotes: ``"tench, Tinca tinca",dog``.

        Returns:
            The classes' indices, in the order given.

        Raises:
            ValueError: If a class does not exist; the message suggests similar names.
        """
        wanted = next(csv.reader([names], skipinitialspace=True), [])
        found = dict.fromkeys(self._find(name.strip()) for name in wanted if name.strip())
        if not found:
            raise ValueError(f"{names!r} names no class; give some, e.g. {self.class_names[0]!r}.")
        return list(found)

    def _find(self, name: str) -> int:
        names = self.class_names
        if name in names:
            return names.index(name)
        if name.isdecimal() and int(name) < len(names):
            return int(name)
        folded = [each.casefold() for each in names]
        close = difflib.get_close_matches(name.casefold(), folded, n=3, cutoff=0.6)
        near = [names[folded.index(match)] for match in close]
        hint = (
            f"did you mean {' or '.join(map(repr, near))}?"
            if near
            else f"the model knows {and_more(names, 10)}; numbers from 0 to {len(names) - 1} are "
            f"allowed too."
        )
        raise ValueError(f"There is no class {name!r}; {hint}")

    def read(self, path: str | Path) -> Tensor:
        """Reads a picture file as the model's input.

        Args:
            path: The file.

        Returns:
            The image [3, H, W].

        Raises:
            ImageError: If the file is not a picture that can be read safely.
        """
        return self.transform(read_image(path, at_least=self.transform.at_least))

    def explain(
        self,
        image: Tensor,
        classes: Sequence[int] | None = None,
        *,
        top: int = 1,
        methods: Sequence[Method] | None = None,
        name: str = "",
    ) -> Explanation:
        """Predicts one picture and explains the prediction.

        Args:
            image: The model's input [3, H, W], e.g. from `read`.
            classes: The classes to explain; None for the ``top`` most confident ones.
            top: How many classes to explain where ``classes`` is None.
            methods: Explanation methods; by default the first that applies to the model. An empty
                sequence predicts and explains nothing.
            name: What to call the picture.

        Returns:
            The explanation, with all tensors on the CPU.
        """
        images = image[None].to(next(self.model.parameters()))
        target = Top(top) if classes is None else torch.tensor([list(classes)], device=self.device)
        found = explain_all(
            self.model, images, target, self.methods() if methods is None else methods
        )
        first = next(iter(found.values()), None)
        if first is None or first.logits is None:
            with torch.no_grad():
                logits = self.model(images)
        else:
            logits = first.logits
        return Explanation(
            image=image,
            logits=logits[0].cpu(),
            probabilities=confidence(self.model, logits[0]).cpu(),
            target=resolve_target(target, logits)[0].cpu(),
            attributions={method: _of_image(each) for method, each in found.items()},
            name=name,
        )


def choose_device(device: str) -> torch.device:
    """Finds a device by name.

    Args:
        device: The name; ``"auto"`` is the accelerator where there is one.

    Returns:
        The device.

    Raises:
        ValueError: If the device cannot be used.
    """
    if device == "auto":
        found = torch.accelerator.current_accelerator(check_available=True)
        return found or torch.device("cpu")
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0].rstrip(".")
        raise ValueError(
            f"The device {device!r} cannot be used ({reason}); give auto, cpu or cuda."
        ) from error


def _class_names(
    path: Path, metadata: dict[str, str], count: int, key: str = CLASSES_KEY
) -> tuple[str, ...] | None:
    names = class_names(metadata, path, key)
    if names is not None and len(names) != count:
        raise ValueError(
            f"{path} names {len(names)} classes, but its model has {count}; "
            f"save it again with a name for each."
        )
    return names


def _of_image(found: Attribution) -> Attribution:
    """The attribution of the only image of a batch, on the CPU."""

    def only(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor[0].detach().cpu()

    return Attribution(
        map=found.map[0].detach().cpu(),
        target=found.target[0].cpu(),
        logits=only(found.logits),
        weights=only(found.weights),
        residual=only(found.residual),
        logit=only(found.logit),
        bias=found.bias,
    )
