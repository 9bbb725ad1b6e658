"""One loaded model, ready for pictures.

A `Predictor` bundles what is needed to go from a picture to its explanation: the model on its
device, prepared for inference, the names of its classes, and the transform of its training. Every
command, report, page and study starts from one.
"""

import csv
import difflib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from bcosvit.attribution import METHODS, Attribution, Method, Top, explain_all, explainers
from bcosvit.attribution.base import Target, incompleteness, resolve_target
from bcosvit.data.images import list_images, read_image, upright_rgb
from bcosvit.data.labeled import LabeledImages, labeled_images
from bcosvit.data.sources import Source
from bcosvit.data.transforms import EvalTransform
from bcosvit.messages import and_more
from bcosvit.models.base import AnyModel, load
from bcosvit.models.registry import to_dict
from bcosvit.nn import prepared_view
from bcosvit.nn.views import unwrapped
from bcosvit.shipped import DEFAULT

__all__ = ["Explanation", "Predictor", "choose_device", "confidence", "find_class", "log_odds"]


UNLIKE = "Unlike anything this model was trained on: do not rely on its classes."
"""What is said of pictures that are unlike the training photographs."""


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
    unlike: float | None = None
    """How unlike the model's training photographs the picture is, from 0 to 1; None where the
    weights bring no such score (`bcosvit.models.unknown`)."""
    is_unlike: bool = False
    """Whether this is more than for 95 % of the pictures of known kinds."""

    @property
    def unlike_note(self) -> str:
        """Says that the picture is unlike what the model knows; empty where it is not."""
        if not self.is_unlike:
            return ""
        return UNLIKE

    @property
    def exact(self) -> Attribution | None:
        """The first attribution that adds up to the logit, if there is one."""
        return next((a for a in self.attributions.values() if a.residual is not None), None)

    @property
    def incompleteness(self) -> str | None:
        """A sentence where contributions miss the logit beyond rounding."""
        return None if self.exact is None else incompleteness(self.exact)

    @property
    def notes(self) -> list[str]:
        """What whoever looks at the explanation must know first."""
        return [note for note in (self.unlike_note, self.incompleteness) if note]

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
        return cls.of(load(weights).to(choose_device(device)), weights=str(weights))

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
            class_names: One name per class; by default the model's own, else classes are numbered.
            class_ids: Short names of the classes, such as WordNet IDs, that data may use; by
                default the model's own.
            crop: The share of a picture's short side that the model sees; by default that of its
                training, else the paper's.
            weights: What to call the model in reports.

        Returns:
            The predictor. Training ``model`` further does not change it.

        Raises:
            ValueError: If there are more or fewer names than classes.
        """
        names = names_of(model) if class_names is None else tuple(class_names)
        if len(names) != (count := model.config.num_classes):
            raise ValueError(f"The model has {count} classes, not {len(names)}: give their names.")
        transform = unwrapped(model).transform
        return cls(
            model=prepared_view(model),
            class_names=names,
            has_class_names=class_names is not None or unwrapped(model).classes is not None,
            class_ids=unwrapped(model).class_ids if class_ids is None else tuple(class_ids),
            transform=transform if crop is None else replace(transform, crop_fraction=crop),
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

    def __call__(self, images: Any, top_k: int = 5) -> Any:
        """Classifies pictures, as an image-classification pipeline of Hugging Face does.

        Args:
            images: One picture, or a list of them: paths, PIL images, arrays or tensors.
            top_k: How many classes are returned for each.

        Returns:
            For one picture a list of ``{"label": ..., "score": ...}``, the most confident class
            first; for several a list of such lists. Scores of B-cos models are independent of each
            other: they do not sum to 1.

        Examples:
            >>> predictor = Predictor.load()
            >>> predictor("photo.jpg", top_k=1)[0].keys()
            dict_keys(['label', 'score'])
        """
        if top_k < 1:
            raise ValueError(f"top_k = {top_k} is not allowed: give an integer >= 1.")
        batch = prepare_images(self.model, images, self.transform)
        with torch.no_grad():
            probabilities = confidence(self.model, self.model(batch.images))
        scores, found = probabilities.topk(min(top_k, len(self.class_names)), 1)
        listed = [
            [
                {"label": self.class_names[label], "score": score}
                for label, score in zip(labels, values, strict=True)
            ]
            for labels, values in zip(found.tolist(), scores.tolist(), strict=True)
        ]
        return listed[0] if batch.single else listed

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
        found = dict.fromkeys(
            find_class(self.class_names, name.strip()) for name in wanted if name.strip()
        )
        if not found:
            raise ValueError(f"{names!r} names no class; give some, e.g. {self.class_names[0]!r}.")
        return list(found)

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

    def labeled(
        self, source: Source, split: str = "val", *, limit: int | None = None, seed: int = 0
    ) -> LabeledImages:
        """Returns the pictures of a data set as the model's input, with its labels.

        Args:
            source: The data set, from `bcosvit.data.open_source`.
            split: ``"val"``, ``"train"`` or ``"all"``.
            limit: How many pictures are chosen at random; None stands for all.
            seed: Of that choice.

        Raises:
            ValueError: If the data have classes that the model does not know (by their names, IDs
                or numbers), or an argument is not allowed.
        """
        pictures = labeled_images(
            source,
            split,
            self.class_names if self.has_class_names else None,
            self.transform,
            num_classes=len(self.class_names),
            class_ids=self.class_ids,
        )
        return pictures if limit is None else pictures.limit(limit, seed)

    def explain(
        self,
        image: Tensor,
        classes: Sequence[int] | None = None,
        *,
        top: int = 1,
        methods: Sequence[Method] | None = None,
        name: str = "",
        strict: bool = False,
    ) -> Explanation:
        """Predicts one picture and explains the prediction.

        Args:
            image: The model's input [3, H, W], e.g. from `read`.
            classes: The classes to explain; None for the ``top`` most confident ones.
            top: How many classes to explain where ``classes`` is None.
            methods: Explanation methods; by default the first that applies to the model. An empty
                sequence predicts and explains nothing.
            name: What to call the picture.
            strict: Whether contributions that miss the logit beyond rounding are an error; by
                default they are a `bcosvit.attribution.CompletenessWarning`.

        Returns:
            The explanation, with all tensors on the CPU.

        Raises:
            ValueError: Contributions miss the logit, and ``strict`` is set.
        """
        chosen = None if classes is None else [classes]
        (found,) = self.explain_batch([image], chosen, top=top, methods=methods, strict=strict)
        return replace(found, name=name)

    def explain_batch(
        self,
        images: Sequence[Tensor],
        classes: Sequence[Sequence[int]] | None = None,
        *,
        top: int = 1,
        methods: Sequence[Method] | None = None,
        strict: bool = False,
    ) -> list[Explanation]:
        """Predicts and explains several pictures of one size in one pass.

        Args:
            images: The model's inputs [3, H, W].
            classes: For each picture the classes to explain, as many for each; None for the ``top``
                most confident ones.
            top: As for `explain`, and so are the arguments after it.

        Returns:
            One explanation per picture, equal to that of `explain` up to rounding.

        Raises:
            ValueError: Contributions miss a logit, and ``strict`` is set.
        """
        for each in images:
            if not isinstance(each, Tensor):
                raise ValueError(
                    f"A {type(each).__name__} is no input of the model: give what `Predictor.read` "
                    f"returns, or call bcosvit.explain, which takes pictures of any form."
                )
        batch = torch.stack(tuple(images)).to(next(self.model.parameters()))
        target: Target = Top(top)
        if classes is not None:
            try:
                target = torch.tensor([list(each) for each in classes], device=self.device)
            except (TypeError, ValueError) as error:
                raise ValueError(
                    f"classes = {classes!r} are not numbers, as many for each picture; "
                    f"`Predictor.find_classes` finds those of names."
                ) from error
        chosen = self.methods() if methods is None else methods
        found = explain_all(self.model, batch, target, chosen, strict=strict)
        first = next(iter(found.values()), None)
        if first is None or first.logits is None:
            with torch.no_grad():
                logits = self.model(batch)
        else:
            logits = first.logits
        unlike = unwrapped(self.model).unlike
        targets = resolve_target(target, logits)
        explanations = []
        for row, image in enumerate(images):
            score = None if unlike is None else unlike(logits[row]).item()
            explanations.append(
                Explanation(
                    image=image,
                    logits=logits[row].cpu(),
                    probabilities=confidence(self.model, logits[row]).cpu(),
                    target=targets[row].cpu(),
                    attributions={name: part_of(each, row) for name, each in found.items()},
                    unlike=score,
                    is_unlike=score is not None and unlike is not None and score > unlike.threshold,
                )
            )
        return explanations


def names_of(model: AnyModel) -> tuple[str, ...]:
    """Returns the names of a model's classes, or numbers where its weights bring none."""
    own = unwrapped(model)
    return own.classes or tuple(f"class {number}" for number in range(own.config.num_classes))


def find_class(class_names: Sequence[str], name: str) -> int:
    """Finds a class by its name, whatever its case, or by its number.

    Args:
        class_names: The names of all classes.
        name: A name or a number.

    Returns:
        The class's index.

    Raises:
        ValueError: There is no such class; the message suggests similar names.

    Examples:
        >>> find_class(["golf_ball", "tench"], "Golf ball")
        0
        >>> find_class(["tabby", "tiger cat"], "tabby cat")
        Traceback (most recent call last):
        ValueError: There is no class 'tabby cat'; did you mean 'tabby' or 'tiger cat'?
    """
    if name in class_names:
        return class_names.index(name)
    if name.isdecimal() and int(name) < len(class_names):
        return int(name)
    plain = [_plain(each) for each in class_names]
    meant = _plain(name)
    if plain.count(meant) == 1:
        return plain.index(meant)
    near = [plain.index(each) for each in _similar(meant, plain)]
    hint = (
        f"did you mean {' or '.join(repr(class_names[index]) for index in near)}?"
        if near
        else f"the model knows {and_more(class_names, 10)}; numbers from 0 to "
        f"{len(class_names) - 1} are allowed too."
    )
    raise ValueError(f"There is no class {name!r}; {hint}")


def _similar(meant: str, plain: Sequence[str]) -> list[str]:
    """Up to three names that are spelled alike, or like one of the words, or share a word."""
    words = meant.split()
    found = difflib.get_close_matches(meant, plain, n=2, cutoff=0.8)
    for word in words:
        found += difflib.get_close_matches(word, plain, n=2, cutoff=0.8)
    shared = [each for each in plain if set(words) & set(each.split())]
    found += difflib.get_close_matches(meant, shared, n=3, cutoff=0.0)
    found += difflib.get_close_matches(meant, plain, n=3, cutoff=0.6)
    return list(dict.fromkeys(found))[:3]


def _plain(name: str) -> str:
    return " ".join(name.casefold().replace("_", " ").replace("-", " ").split())


@dataclass(frozen=True, kw_only=True, eq=False)
class Batch:
    """Pictures as the input of a model."""

    images: Tensor
    """[B, 3, H, W], on the model's device."""
    names: tuple[str, ...]
    """One per picture: the file's name, or an empty text."""
    single: bool
    """Whether one picture was given, not a list or a batch of one."""


def prepare_images(model: AnyModel, given: Any, transform: EvalTransform | None = None) -> Batch:
    """Makes pictures of any form the input of a model.

    Args:
        model: The model.
        given: A path, a PIL image, an array [H, W, 3] (bytes, or floats from 0 to 1), or a list,
            an array or a folder of several; these are resized and cropped. Tensors [3, H, W] and
            [B, 3, H, W] are inputs already, and are taken as they are.
        transform: How pictures become inputs; by default the model's own transform.

    Returns:
        The batch.

    Raises:
        ValueError: A picture cannot be read, or is of no known form.
    """
    if isinstance(given, Tensor):
        if given.ndim not in (3, 4):
            raise ValueError(
                f"images is a tensor of shape {list(given.shape)}; give [3, H, W] or [B, 3, H, W], "
                f"RGB in [0, 1]."
            )
        computed = next(model.parameters())
        if given.device.type == "meta" != computed.device.type:
            raise ValueError("images is a tensor without values (device meta); give pictures.")
        if given.dtype == torch.float64 != computed.dtype:
            raise ValueError(
                f"images has dtype torch.float64, and the model {computed.dtype}; give "
                f"images.to({computed.dtype}), or take model.double()."
            )
        batch = given if given.ndim == 4 else given[None]
        return Batch(images=batch, names=("",) * len(batch), single=given.ndim == 3)
    transform = transform or unwrapped(model).transform
    single = True
    each: list[Any] = [given]
    if isinstance(given, str | Path) and Path(given).is_dir():
        each, single = list(list_images(given)), False
    elif isinstance(given, list | tuple) or (isinstance(given, np.ndarray) and given.ndim == 4):
        each, single = list(given), False
    if not each:
        raise ValueError(f"{given!r} contains no pictures; give at least one.")
    inputs = [_input(picture, transform) for picture in each]
    if len({each.shape for each in inputs}) > 1:
        raise ValueError("The tensors are not of one shape; resize them, or give PIL images.")
    names = tuple(Path(one).name if isinstance(one, str | Path) else "" for one in each)
    images = torch.stack(inputs).to(next(model.parameters()))
    return Batch(images=images, names=names, single=single)


def _input(picture: Any, transform: EvalTransform) -> Tensor:
    if isinstance(picture, Tensor) and picture.ndim == 3:
        return picture
    if isinstance(picture, str | Path):
        return transform(read_image(picture, at_least=transform.at_least))
    if isinstance(picture, Image.Image):
        return transform(upright_rgb(picture))
    if isinstance(picture, np.ndarray) and picture.ndim in (2, 3) and picture.size:
        if picture.ndim == 3 and picture.shape[0] == 3 and picture.shape[2] not in (1, 3, 4):
            picture = np.moveaxis(picture, 0, 2)
        if picture.ndim == 3 and picture.shape[2] == 1:
            picture = picture[..., 0]
        if picture.dtype.kind in _FULL and (picture.ndim == 2 or picture.shape[2] <= 4):
            return transform(upright_rgb(Image.fromarray(_as_bytes(picture))))
    shape = ""
    if isinstance(picture, np.ndarray | Tensor):
        shape = f" of shape {list(picture.shape)} and dtype {picture.dtype}"
    raise ValueError(
        f"A {type(picture).__name__}{shape} is no picture; give a path, a PIL image, an array "
        f"[H, W, 3], a tensor [3, H, W], or a list of them."
    )


_FULL = {"b": 1, "f": 1, "u": 255, "i": 255}
"""What full color is in arrays of these kinds."""


def _as_bytes(picture: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    full = _FULL[picture.dtype.kind]
    if not (np.isfinite(picture).all() and picture.min() >= 0 and picture.max() <= full):
        raise ValueError(
            f"An array of {picture.dtype} has values outside [0, {full}]; give floats from 0 to 1 "
            f"or bytes, and do not normalize: the model does."
        )
    return np.rint(255 / full * picture).astype(np.uint8)


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


def part_of(found: Attribution, index: int | list[int], *, logits: bool = True) -> Attribution:
    """Returns one image of a batch, or some classes of an image, on the CPU.

    Args:
        found: The attribution.
        index: Into the first axis of all tensors.
        logits: Whether the logits have this axis, too, as those of a batch have.
    """

    def part(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor[index].detach().cpu()

    own = ("map", "target", "weights", "residual", "logit", *(["logits"] if logits else []))
    parts: dict[str, Any] = {name: part(getattr(found, name)) for name in own}
    return replace(found, **parts)
