"""`bcosvit.explain`: from pictures of any form to explanations that draw themselves."""

import base64
import html
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, overload

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from bcosvit.attribution import Attribution, Explainer, Method, Target, explain_all, explainers
from bcosvit.attribution import explain as explain_tensors
from bcosvit.attribution.base import get_explainer, method_name, method_title
from bcosvit.files import atomic
from bcosvit.messages import percent
from bcosvit.models.base import AnyModel
from bcosvit.nn.views import unwrapped
from bcosvit.predictor import (
    UNLIKE,
    Batch,
    Explanation,
    Predictor,
    confidence,
    find_class,
    names_of,
    part_of,
    prepare_images,
)
from bcosvit.report.explain import sheet_rows
from bcosvit.report.images import panel, png_bytes

Target_ = Target | str | Sequence[str | int] | NDArray[Any] | np.integer[Any]
_CELL = 224
_CALL = 'bcosvit.explain(bcosvit.load(), "photo.jpg")'


class _Drawn:
    """What draws itself; a notebook shows it where it is the last value of a cell."""

    @property
    def _maps(self) -> "Mapping[str, ImageAttribution]":
        """By method."""
        raise NotImplementedError

    def plot(self, *, size: int | None = None) -> Image.Image:
        """Draws the picture, each method's map, the first map on the picture and W(x), one row per
        class.

        Args:
            size: The side of a tile in pixels; by default 224, or the images' size if it is larger.

        Returns:
            A PIL image, which a notebook shows.
        """
        return _plot(self._maps, size)

    def show(self) -> None:
        """Shows the plot: in the notebook, or in the system's viewer of pictures."""
        try:
            from IPython.core.getipython import get_ipython
            from IPython.display import display
        except ModuleNotFoundError:
            get_ipython = None  # type: ignore[assignment]
        if get_ipython is not None and get_ipython() is not None:
            display(self)  # type: ignore[no-untyped-call]
        else:
            self.plot().show()

    def save(self, path: str | Path) -> None:
        """Writes the plot (``.png``, ``.jpg``, ``.webp``, ``.pdf``) or all arrays (``.npz``).

        Args:
            path: The file.

        Raises:
            ValueError: There is no such kind of file.
        """
        ending = Path(path).suffix.lower()
        kinds = Image.registered_extensions()
        if ending != ".npz" and kinds.get(ending) not in Image.SAVE:
            raise ValueError(
                f"{path} does not end in .png, .jpg, .webp, .pdf (a picture) or .npz (arrays); "
                f"give one of these endings."
            )
        with atomic(path) as temporary:
            if ending == ".npz":
                np.savez_compressed(temporary, **_arrays(self._maps))
            else:
                self.plot().save(temporary, format=kinds[ending])

    def _repr_html_(self) -> str:
        data = base64.b64encode(png_bytes(np.asarray(self.plot()))).decode("ascii")
        text = html.escape(_describe(next(iter(self._maps.values()))))
        return (
            f'<img alt="{text}" style="max-width: 100%" src="data:image/png;base64,{data}">'
            f"<div>{text}</div>"
        )


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class ImageAttribution(_Drawn, Attribution):
    """An attribution that knows its images and class names, and draws itself."""

    images: Tensor
    """[B, 3, H, W]: what was explained, as the model saw it."""
    class_names: tuple[str, ...]
    """The names of all classes."""
    method: str
    """The name of the method."""
    names: tuple[str, ...]
    """The names of the pictures, empty where they have none."""
    probabilities: Tensor | None = None
    """[B, K]: one independent sigmoid per class or a softmax, as the model was trained."""
    unlike: Tensor | None = None
    """[B]: how unlike the model's training photographs each picture is, from 0 to 1; None where the
    weights bring no such score (`bcosvit.models.unknown`)."""
    is_unlike: Tensor | None = None
    """[B]: whether this is more than for 95 % of the pictures of known kinds."""
    versus: Tensor | None = None
    """[B]: where the map is what speaks for ``target`` rather than another class, the latter."""

    @property
    def labels(self) -> list[Any]:
        """The names of the explained classes: one per image, or a list of them."""
        names = self.class_names
        return [
            [names[label] for label in each] if isinstance(each, list) else names[each]
            for each in self.target.tolist()
        ]

    @property
    def _maps(self) -> "Mapping[str, ImageAttribution]":
        return {self.method: self}

    def __repr__(self) -> str:
        return f"ImageAttribution({_describe(self)})"


class Comparison(_Drawn, Mapping[str, ImageAttribution]):
    """Explanations of the same images and classes by several methods, side by side.

    Examples:
        >>> import torch, bcosvit
        >>> stem = bcosvit.StemConfig(widths=(8,))
        >>> config = bcosvit.ModelConfig(width=12, depth=1, image_size=16, backbone=stem)
        >>> model = bcosvit.create_model(config).eval()
        >>> found = bcosvit.explain(model, torch.rand(3, 16, 16), method=["inherent", "ixg"])
        >>> list(found), found["ixg"].map.shape
        (['inherent', 'ixg'], torch.Size([1, 16, 16]))
    """

    def __init__(self, found: Mapping[str, ImageAttribution]) -> None:
        self._found = dict(found)

    def __getitem__(self, method: str) -> ImageAttribution:
        return self._found[method]

    def __iter__(self) -> Iterator[str]:
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)

    @property
    def _maps(self) -> Mapping[str, ImageAttribution]:
        return self._found

    def __repr__(self) -> str:
        first = next(iter(self._found.values()))
        return f"Comparison({', '.join(self._found)}: {_describe(first)})"


@overload
def explain(
    model: AnyModel | Predictor,
    images: Any,
    target: Target_ = None,
    method: Method = "inherent",
    *,
    versus: Target_ = None,
    strict: bool = False,
) -> ImageAttribution: ...


@overload
def explain(
    model: AnyModel | Predictor,
    images: Any,
    target: Target_,
    method: list[Method] | tuple[Method, ...],
    *,
    versus: Target_ = None,
    strict: bool = False,
) -> Comparison: ...


@overload
def explain(
    model: AnyModel | Predictor,
    images: Any,
    target: Target_ = None,
    *,
    method: list[Method] | tuple[Method, ...],
    versus: Target_ = None,
    strict: bool = False,
) -> Comparison: ...


def explain(
    model: AnyModel | Predictor,
    images: Any = None,
    target: Target_ = None,
    method: Method | Sequence[Method] = "inherent",
    *,
    versus: Target_ = None,
    strict: bool = False,
) -> Any:
    """Explains how much each pixel contributes to the logit of a class.

    The model is explained as it predicts in evaluation mode, and is left untouched.

    Args:
        model: A model of this library, or a `Predictor`.
        images: One picture or several: paths, PIL images or arrays [H, W, 3], which go through the
            model's transform; or tensors [3, H, W] or [B, 3, H, W], RGB in [0, 1], which are taken
            as they are.
        target: The class to explain: a name or a number, or one for each image; None is the
            predicted class. A tensor [B, C], ``Top(C)`` or, for one picture, a list are several
            classes, and ``"all"`` is every class: a class axis then follows B in the results.
        method: One of `explainers`, or an explainer with other hyperparameters, e.g.
            ``Rollout(start=1)``; a list of them, or ``"all"`` that apply, for a `Comparison`.
        versus: Another class, as ``target``: the result is what speaks for the target rather than
            for this class, which is exactly the difference of two rows of W(x), and its
            contributions sum to the difference of the logits.
        strict: Whether contributions that miss the logit beyond rounding are an error. By default
            they are a `CompletenessWarning`.

    Returns:
        The attribution, or for several methods a `Comparison`. Both have ``plot()``, ``show()`` and
        ``save(path)``.

    Raises:
        ValueError: If a picture, the target or the method does not exist, or the method does not
            apply; or contributions miss the logit, and ``strict`` is set or the model has modules
            of others that may compute something that cannot be frozen.

    Examples:
        >>> import bcosvit
        >>> model = bcosvit.load()
        >>> a = bcosvit.explain(model, "photo.jpg", "tabby")
        >>> a.map.shape, a.labels
        (torch.Size([1, 224, 224]), ['tabby'])
        >>> bool((a.completeness_error() < 1e-4).all())
        True
        >>> a.save("explained.png")
    """
    transform = None
    if isinstance(model, Predictor):
        predictor = model
        model, transform, names = predictor.model, predictor.transform, predictor.class_names
    else:
        names = names_of(_checked(model))
    if images is None:
        raise ValueError(f"There is nothing to explain: give images after the model, {_CALL}.")
    batch = prepare_images(model, images, transform)
    classes = _classes(target, names, batch)
    if isinstance(method, str) and method == "all":
        method = explainers(model)
    if isinstance(method, Sequence) and not isinstance(method, str):
        if not method:
            raise ValueError(f"No method is given; choose from {', '.join(explainers(model))}.")
        if versus is not None:
            raise ValueError("versus compares two classes by one method; give one method.")
        several = explain_all(model, batch.images, classes, method, strict=strict)
        return Comparison(
            {name: _drawable(model, each, name, batch, names) for name, each in several.items()}
        )
    if versus is not None:
        return _rather(model, batch, names, classes, versus, method, strict)
    one = explain_tensors(model, batch.images, classes, method, strict=strict)
    return _drawable(model, one, method_name(method), batch, names)


def _checked(model: Any) -> AnyModel:
    if hasattr(unwrapped(model), "config") and hasattr(unwrapped(model), "encoding"):
        return model
    if isinstance(model, str | Path | Image.Image | np.ndarray | Tensor):
        raise ValueError(f"The model is the first argument, and images are the second: {_CALL}.")
    raise ValueError(
        f"{type(model).__name__} is no model of bcosvit; give what bcosvit.load or "
        f"bcosvit.create_model returns, or convert it with bcosvit.bcosify."
    )


def _classes(given: Target_, names: Sequence[str], batch: Batch) -> Target:
    """The target as numbers, where it is names."""
    if isinstance(given, np.ndarray):
        return torch.as_tensor(given)
    if isinstance(given, np.integer):
        return int(given)
    if isinstance(given, str) and given != "all":
        return find_class(names, given)
    if not isinstance(given, list | tuple):
        return given  # type: ignore[return-value]
    found = [find_class(names, each) if isinstance(each, str) else each for each in given]
    try:
        tensor = torch.as_tensor(np.array(found), device=batch.images.device)
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(
            f"target = {given!r} is no list of classes; give numbers from 0 to {len(names) - 1}, "
            f"or names."
        ) from error
    return tensor[None] if batch.single else tensor


def _drawable(
    model: AnyModel, found: Attribution, method: str, batch: Batch, names: tuple[str, ...]
) -> ImageAttribution:
    logits, unlike = found.logits, unwrapped(model).unlike
    score = None if unlike is None or logits is None else unlike(logits.detach())
    return ImageAttribution(
        **{each.name: getattr(found, each.name) for each in fields(Attribution)},
        images=batch.images.detach(),
        class_names=names,
        method=method,
        names=batch.names,
        probabilities=None if logits is None else confidence(model, logits.detach()),
        unlike=score,
        is_unlike=None if score is None or unlike is None else score > unlike.threshold,
    )


def _rather(
    model: AnyModel,
    batch: Batch,
    names: tuple[str, ...],
    classes: Target,
    versus: Target_,
    method: Method,
    strict: bool,
) -> ImageAttribution:
    """What speaks for one class rather than another: the difference of two rows of W(x)."""
    explainer = get_explainer(method)
    if isinstance(explainer, Explainer) and not explainer.exact:
        raise ValueError(
            f"versus is not allowed with {explainer.title or method}: only maps that sum to the "
            f"logit can be subtracted; use method='inherent' and a B-cos model."
        )
    if classes is None:
        with torch.no_grad():
            classes = model(batch.images).argmax(1)
    other = _classes(versus, names, batch)
    count = len(batch.images)
    pair = [
        torch.full((count,), each, device=batch.images.device) if isinstance(each, int) else each
        for each in (classes, other)
    ]
    if not all(isinstance(each, Tensor) and each.shape == (count,) for each in pair):
        raise ValueError(
            "versus compares two classes per image: give one target and one versus, or one of each "
            "for every image."
        )
    both = torch.stack([each.to(batch.images.device) for each in pair], 1)  # type: ignore[union-attr]
    two = explain_tensors(model, batch.images, both, method, strict=strict)
    found = _drawable(model, two, method_name(method), batch, names)

    def difference(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor[:, 0] - tensor[:, 1]

    return replace(
        found,
        map=two.map[:, 0] - two.map[:, 1],
        target=both[:, 0],
        versus=both[:, 1],
        weights=difference(two.weights),
        residual=difference(two.residual),
        logit=difference(two.logit),
        bias=0.0,
    )


def _plot(found: Mapping[str, ImageAttribution], size: int | None = None) -> Image.Image:
    if size is not None and size < 1:
        raise ValueError(f"size = {size} is not allowed: give an integer >= 1.")
    first = next(iter(found.values()))
    rows = []
    for index in range(len(first.images)):
        item = _explanation(found, index)
        versus = None if first.versus is None else [int(first.versus[index])]
        rows += sheet_rows(item, first.class_names, versus=versus)
    return panel(rows, cell=size or max(_CELL, *first.images.shape[-2:]))


def _explanation(found: Mapping[str, ImageAttribution], index: int) -> Explanation:
    """One image of the batch, with its classes as rows."""
    first = next(iter(found.values()))
    # Without an axis of classes, an image is a batch of one class.
    rows = index if first.target.ndim == 2 else [index]

    def of_image(each: ImageAttribution) -> Attribution:
        own = {field.name: getattr(each, field.name) for field in fields(Attribution)}
        return part_of(Attribution(**own | {"logits": None}), rows)

    count = len(first.class_names)
    unknown = torch.full((count,), torch.nan)
    return Explanation(
        image=first.images[index].cpu(),
        logits=unknown if first.logits is None else first.logits[index].detach().cpu(),
        probabilities=unknown if first.probabilities is None else first.probabilities[index].cpu(),
        target=of_image(first).target,
        attributions={method: of_image(each) for method, each in found.items()},
        name=first.names[index],
    )


def _arrays(found: Mapping[str, ImageAttribution]) -> dict[str, Any]:
    first = next(iter(found.values()))
    tensors = {"image": first.images, "logits": first.logits, "target": first.target}
    tensors |= {f"map_{name}": each.map for name, each in found.items()}
    for each in found.values():
        if each.residual is not None:
            tensors |= {"weights": each.weights, "residual": each.residual}
            break
    arrays: dict[str, Any] = {
        name: tensor.detach().cpu().numpy()
        for name, tensor in tensors.items()
        if tensor is not None
    }
    return arrays | {"classes": np.array(first.labels)}


def _describe(found: ImageAttribution) -> str:
    count, (height, width) = len(found.images), found.images.shape[-2:]
    pictures = "1 image" if count == 1 else f"{count} images"
    text = f"{method_title(found.method)} of {pictures} of {width}×{height} pixels"
    if count == 1 and found.target.ndim == 1:
        label = int(found.target[0])
        text += f" for {found.class_names[label]}"
        if found.versus is not None:
            text += f" rather than {found.class_names[int(found.versus[0])]}"
        elif found.probabilities is not None:
            text += f", {percent(found.probabilities[0, label].item())}"
    if found.is_unlike is None or not found.is_unlike.any():
        return text
    which = "" if count == 1 else f"{int(found.is_unlike.sum())} of {count}: "
    return f"{text}. {which}{UNLIKE}"
