"""What every model of the library is, and how one is made, saved and loaded."""

import json
import os
import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, TypeVar

import torch
from torch import Tensor, nn

from bcosvit.files import atomic
from bcosvit.guesses import MODEL_GUESSES
from bcosvit.models.card import model_card
from bcosvit.models.config import Config
from bcosvit.models.hub import HUB_FILE, hub_file, is_file, locate, upload_folder
from bcosvit.models.registry import KINDS, kind_of, to_dict
from bcosvit.models.unknown import Unlike
from bcosvit.models.weights import (
    CLASSES_KEY,
    IDS_KEY,
    RUN_KEY,
    UNLIKE_KEY,
    class_names_of,
    current_key,
    load_state,
    named_config,
    read_metadata,
    read_weights,
    run_notes,
    save_state,
)
from bcosvit.nn.encoding import Encoding
from bcosvit.nn.views import DynamicModule, unwrapped
from bcosvit.ops.dispatch import wide
from bcosvit.shipped import DEFAULT, shipped

if TYPE_CHECKING:
    from bcosvit.data.transforms import EvalTransform

C = TypeVar("C", bound=Config)
S = TypeVar("S", bound="Classifier[Any]")


class LogitLayer(DynamicModule):
    """scale·x + bias, both fixed; the bias is the logit before any evidence."""

    is_end = True

    def __init__(self, scale: float, bias: float) -> None:
        super().__init__()
        self.scale = scale
        self.bias = bias

    def forward(self, x: Tensor) -> Tensor:
        # Half precision has too few digits for a small difference between logits near the bias.
        return self.scale * wide(x) + self.bias

    def extra_repr(self) -> str:
        return f"scale={self.scale:g}, bias={self.bias:g}"


class Classifier(nn.Module, Generic[C]):
    """The base class of all models: images [B, 3, H, W], RGB in [0, 1], to logits [B, K].

    A subclass sets ``config``, ``encoding`` and ``logit``, and defines ``from_encoded``; the other
    methods that raise ``NotImplementedError`` are needed for feature maps alone. The methods for
    folders and repositories are those of huggingface_hub's mixin, which is not inherited from
    because that library is optional.
    """

    head_name: ClassVar[str] = "head"
    """The attribute that is the last layer with weights."""

    config: C
    encoding: Encoding
    logit: LogitLayer
    classes: tuple[str, ...] | None = None
    """The names of the classes, where the weights bring them; they are saved with the model."""
    class_ids: tuple[str, ...] | None = None
    """Short names of the classes, such as WordNet IDs, where the weights bring them."""
    unlike: Unlike | None = None
    """How unlike the training photographs a picture is, where the weights bring such a score."""
    eval_crop: float | None = None
    """The share of a picture's short side that training validated on; None is the paper's."""
    eval_size: int | None = None
    """The side of the pictures that training validated on, where the model takes any size; None is
    that of the config."""

    @property
    def transform(self) -> "EvalTransform":
        """What turns a PIL image into the model's input: resizing and cropping as in training.

        Examples:
            >>> from PIL import Image
            >>> model = create_model("bcos_vit_ti_38", depth=1)
            >>> model.transform(Image.open("photo.jpg")).shape
            torch.Size([3, 224, 224])
        """
        # Reading pictures needs Pillow, which a model does not.
        from bcosvit.data.transforms import EvalTransform

        height, width = self.config.image_size
        if height != width:
            raise ValueError(
                f"The model takes pictures of {width}×{height} pixels, but only squares are "
                f"supported here; give it a square size with bcosvit.resize_prior."
            )
        crop = self.eval_crop or EvalTransform.crop_fraction
        return EvalTransform(self.eval_size or height, crop)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError as error:
            if name in MODEL_GUESSES:
                raise AttributeError(f"A model has no {name}; {MODEL_GUESSES[name]}.") from error
            raise

    def forward(self, images: Tensor) -> Tensor:
        return self.from_encoded(self.encoding(images))

    def from_encoded(self, encoded: Tensor) -> Tensor:
        """Logits from what ``encoding`` returns: the function that explanations are about."""
        raise NotImplementedError

    def forward_features(self, images: Tensor) -> Tensor:
        """What the head averages: tokens [n, t, d] of a transformer, else maps [n, c, h, w]."""
        raise NotImplementedError

    def feature_maps(self, images: Tensor) -> list[Tensor]:
        """The map [n, c, h, w] at the end of every stage that ``config.feature_info`` lists."""
        raise NotImplementedError

    def head_inputs(self, encoded: Tensor) -> Tensor:
        """What the head takes: all that depends on other weights than the head's own."""
        raise ValueError(f"A {self.config.noun} does not say what its head takes.")

    def from_head_inputs(self, inputs: Tensor) -> Tensor:
        """Logits from what `head_inputs` returns."""
        raise ValueError(f"A {self.config.noun} does not say what its head takes.")

    def get_classifier(self) -> nn.Module:
        """The head."""
        return getattr(self, self.head_name)

    def reset_classifier(self, num_classes: int) -> None:
        """Puts a new, untrained head for ``num_classes`` classes in place of the old one.

        Class names and the score of unknown kinds, which belonged to the old head, are dropped.
        """
        self._replace_head(num_classes)
        self.classes = self.class_ids = self.unlike = None

    def _replace_head(self, num_classes: int) -> None:
        # A new model's head is right by construction: its layer, its scale and its start.
        make: Any = type(self)
        fresh: Classifier[C] = make(self.config.replace(num_classes=num_classes))
        head = fresh.get_classifier().to(next(self.parameters())).train(self.training)
        setattr(self, self.head_name, head)
        self.logit, self.config = fresh.logit, fresh.config

    def start_from(self, trunk: "AnyModel") -> None:
        """Takes over the weights of the model that was given as ``backbone``."""
        raise ValueError(f"A {self.config.noun} has no backbone; leave it out.")

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **options: Any) -> Any:
        """As in PyTorch; keys of version 0.1 and of published checkpoints are accepted too."""
        own = self.state_dict().keys()
        state = {key if key in own else current_key(key): t for key, t in state_dict.items()}
        return super().load_state_dict(state, *args, **options)

    def save_pretrained(
        self,
        folder: str | Path,
        *,
        metadata: Mapping[str, str] | None = None,
        pictures: Mapping[str, bytes] | None = None,
        push_to_hub: bool = False,
        repo_id: str | None = None,
        **options: Any,
    ) -> None:
        """Writes weights, config and model card to a folder.

        Args:
            folder: Gets ``model.safetensors``, which alone is enough for ``bcosvit.load``,
                ``config.json``, ``preprocessor_config.json`` and ``README.md``.
            metadata: As for :func:`save`; class names and training results appear in the card.
            pictures: Image files by name, which the card shows.
            push_to_hub: Whether the folder is uploaded to the Hugging Face hub afterwards.
            repo_id: The repository, by default of the folder's name.
            options: Those of :meth:`push_to_hub`.

        Raises:
            ValueError: huggingface_hub is needed and not installed.
        """
        folder, pictures = Path(folder), pictures or {}
        metadata = {**own_metadata(self), **(metadata or {})}
        save(self, folder / HUB_FILE, metadata=metadata)
        config = {"library_name": "bcosvit", "config": to_dict(self.config)} | _labels(metadata)
        where = f"hf://{repo_id}" if repo_id else HUB_FILE
        card = model_card(self.config, metadata, weights=where, pictures=tuple(pictures))
        texts = {"config.json": json.dumps(config, indent=2) + "\n", "README.md": card}
        if self.config.image_size[0] == self.config.image_size[1]:
            processor = json.dumps(_image_processor(self), indent=2) + "\n"
            texts["preprocessor_config.json"] = processor
        for name, content in ({k: t.encode() for k, t in texts.items()} | dict(pictures)).items():
            with atomic(folder / name) as temporary:
                temporary.write_bytes(content)
        if push_to_hub:
            upload_folder(folder, repo_id or folder.name, **options)

    def push_to_hub(
        self,
        repo_id: str,
        *,
        metadata: Mapping[str, str] | None = None,
        pictures: Mapping[str, bytes] | None = None,
        **options: Any,
    ) -> str:
        """Uploads the model to a repository of the Hugging Face hub, which is created if need be.

        Args:
            repo_id: The repository, ``OWNER/NAME`` or ``NAME``.
            metadata: As for :meth:`save_pretrained`.
            pictures: As for :meth:`save_pretrained`.
            options: ``commit_message``, ``private``, ``token``, ``branch`` and ``create_pr``, as in
                huggingface_hub.

        Returns:
            The address of the commit.

        Raises:
            ValueError: huggingface_hub is not installed.
        """
        with tempfile.TemporaryDirectory() as folder:
            self.save_pretrained(folder, metadata=metadata, pictures=pictures, repo_id=repo_id)
            return upload_folder(Path(folder), repo_id, **options)

    @classmethod
    def from_pretrained(
        cls: type[S],
        where: str | Path,
        *,
        revision: str | None = None,
        token: str | bool | None = None,
    ) -> S:
        """Loads a model, in evaluation mode.

        Args:
            where: A folder, a repository ``OWNER/NAME``, or anything that :func:`load` takes.
            revision: A revision of the repository.
            token: An access token of the hub.

        Returns:
            The model.

        Raises:
            ValueError: There is no such file, or it holds a model of another class.
        """
        if isinstance(where, str) and where.count("/") == 1 and not os.path.exists(where):
            path = hub_file(where, HUB_FILE, revision=revision, token=token)
        elif revision is not None:
            raise ValueError(f"{where} is no repository, so it has no revision; leave it out.")
        else:
            path = locate(where)
        config, state = read_weights(path)
        model = create_model(config)
        if not isinstance(model, cls):
            raise ValueError(
                f"{where} holds a {type(model).__name__}, not a {cls.__name__}; "
                f"load it with bcosvit.load."
            )
        load_state(model, state, source=str(path))
        metadata = read_metadata(path)
        model.classes = class_names_of(path, metadata, config.num_classes)
        model.class_ids = class_names_of(path, metadata, config.num_classes, IDS_KEY)
        if UNLIKE_KEY in metadata:
            model.unlike = Unlike.loads(metadata[UNLIKE_KEY], config.num_classes)
        notes = run_notes(metadata, path)
        model.eval_crop = notes.get("eval_crop")
        if "image_size" not in config.fields():
            model.eval_size = notes.get("image_size")
        return model.eval()


AnyModel = Classifier[Any]


def create_model(
    model: str | Config, pretrained: bool | str | Path = False, **options: Any
) -> AnyModel:
    """Creates a model, with random weights unless it is pretrained.

    Args:
        model: A name of :func:`~bcosvit.list_models`, that of a shipped model, or a config.
        pretrained: Whether the model gets the weights that come with the package (or those of a
            file, of anything that :func:`load` takes). With another ``num_classes`` the head is
            new and untrained, as in timm.
        options: Fields of the config that are to have other values. A logit bias that follows from
            the number of classes follows a new number. The ``backbone`` of a vision transformer may
            also be a model, or anything that :func:`load` takes: then its weights are taken over,
            and ``bcos_vit_ti``, ``bcos_vit_s`` and ``bcos_vit_b`` start as what it computes.

    Returns:
        The model, in training mode, with the dtype and the device of a backbone that is a model.

    Raises:
        ValueError: There is no such name or option, or a value is not allowed.

    Examples:
        >>> model = create_model("bcos_vit_ti_38", num_classes=10, depth=1)
        >>> model(torch.rand(1, 3, 224, 224)).shape
        torch.Size([1, 10])
        >>> create_model("bcos_vit_ti_87", pretrained=True, num_classes=3).config.num_classes
        3
    """
    if pretrained:
        return _pretrained(model, pretrained, options)
    make = partial(named_config, model) if isinstance(model, str) else model.replace
    trunk: Any = options.get("backbone")
    if is_file(trunk):
        trunk = load(trunk)
    if isinstance(trunk, nn.Module):
        trunk = unwrapped(trunk)
        if not isinstance(trunk, Classifier):
            raise ValueError(
                f"backbone = {type(trunk).__name__} is no model of bcosvit; convert it with "
                f"bcosvit.bcosify, and give the result."
            )
        options["backbone"] = trunk.config
    config = make(**options)
    made = KINDS.get(kind_of(config)).model(config)
    assert isinstance(made, Classifier)
    if isinstance(trunk, Classifier):
        made.to(next(trunk.parameters())).start_from(trunk)
    return made


def load(where: str | Path = DEFAULT) -> AnyModel:
    """Loads a model that :func:`save` wrote, in float32 and evaluation mode.

    Args:
        where: The name of a shipped model, a path, ``https://ADDRESS#sha256=SUM`` or
            ``hf://OWNER/REPOSITORY[@REVISION][/FILE]``; by default the shipped default model.

    Returns:
        The model. Its ``classes`` are names where the file brings them, and its ``transform``
        turns a PIL image into its input.

    Raises:
        ValueError: There is no such file, or it was not written by :func:`save`.

    Examples:
        >>> load("bcos_vit_ti_87_imagenette").classes[:2]
        ('cassette_player', 'chain_saw')
    """
    return Classifier.from_pretrained(locate(where))


def from_pretrained(
    where: str | Path = DEFAULT,
    *,
    revision: str | None = None,
    token: str | bool | None = None,
) -> AnyModel:
    """Loads a model of any kind: :meth:`Classifier.from_pretrained`.

    Args:
        where: A folder, a repository ``OWNER/NAME`` of the Hugging Face hub, or anything that
            :func:`load` takes.
        revision: A revision of the repository.
        token: An access token of the hub.

    Returns:
        The model, in evaluation mode.

    Raises:
        ValueError: There is no such file, or it was not written by :func:`save`.
    """
    return Classifier.from_pretrained(where, revision=revision, token=token)


def _pretrained(
    model: str | Config, where: str | Path | Literal[True], options: dict[str, Any]
) -> AnyModel:
    if where is True:
        if not isinstance(model, str):
            raise ValueError(
                "pretrained = True needs a name, not a config; give a shipped model's."
            )
        named_config(model)  # An unknown name is an error that suggests others.
        names = [name for name in shipped() if name == model or name.startswith(f"{model}_")]
        if not names:
            raise ValueError(
                f"No weights come with the package for {model}; choose from "
                f"{', '.join(shipped())}, or give a file: pretrained='best.safetensors'."
            )
        where = names[0]
    made = load(where)
    classes = options.pop("num_classes", made.config.num_classes)
    if made.config.replace(**options) != made.config:
        raise ValueError(
            f"{where} has other options than {', '.join(options)} = "
            f"{', '.join(map(str, options.values()))}; leave them out, or create the model "
            f"without pretrained."
        )
    if classes != made.config.num_classes:
        made.reset_classifier(classes)
    return made


def save(
    model: AnyModel,
    path: str | Path,
    *,
    dtype: torch.dtype | None = None,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Writes the weights and the config of a model to one safetensors file.

    The file appears once it is complete; a crash leaves the old one.

    Args:
        model: The model; wrappers such as that of ``torch.compile`` are left out.
        path: The file to write.
        dtype: What floating-point weights are stored as; ``torch.float16`` halves the file.
        metadata: Further text to store, e.g. class names.

    Raises:
        OSError: The file cannot be written.

    Examples:
        >>> import os, tempfile
        >>> model = create_model("bcos_densenet121", blocks=(1, 1), num_classes=2)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save(model, os.path.join(folder, "model.safetensors"))
        ...     load(os.path.join(folder, "model.safetensors")).config == model.config
        True
    """
    model = unwrapped(model)
    metadata = {**own_metadata(model), **(metadata or {})}
    save_state(model.state_dict(), model.config, path, dtype=dtype, metadata=metadata)


def own_metadata(model: AnyModel) -> dict[str, str]:
    """What a model knows about its pictures, as a weights file stores it."""
    found = {}
    if model.classes is not None:
        found[CLASSES_KEY] = json.dumps(model.classes)
    if model.class_ids is not None:
        found[IDS_KEY] = json.dumps(model.class_ids)
    if model.unlike is not None:
        found[UNLIKE_KEY] = model.unlike.dumps()
    run = {"eval_crop": model.eval_crop, "image_size": model.eval_size}
    if known := {key: value for key, value in run.items() if value is not None}:
        found[RUN_KEY] = json.dumps(known)
    return found


def _labels(metadata: Mapping[str, str]) -> dict[str, Any]:
    """The names of the classes under the keys of Hugging Face's configs."""
    names = json.loads(metadata.get(CLASSES_KEY, "[]"))
    if not names:
        return {}
    return {
        "id2label": {str(number): name for number, name in enumerate(names)},
        "label2id": {name: number for number, name in enumerate(names)},
    }


def _image_processor(model: AnyModel) -> dict[str, Any]:
    """The model's transform as the config of an image processor of Hugging Face's transformers."""
    transform = model.transform
    size = transform.image_size
    return {
        "image_processor_type": "BitImageProcessor",
        "do_convert_rgb": True,
        "do_resize": True,
        "size": {"shortest_edge": transform.resize},
        "resample": 2,
        "do_center_crop": True,
        "crop_size": {"height": size, "width": size},
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": False,
    }


class Features(nn.Module):
    """A model as an extractor of feature maps, with the interface of timm's ``features_only``."""

    def __init__(self, model: AnyModel) -> None:
        super().__init__()
        self.model = unwrapped(model)
        self.feature_info = self.model.config.feature_info

    def forward(self, images: Tensor) -> list[Tensor]:
        return self.model.feature_maps(images)


def features(model: AnyModel) -> Features:
    """Makes an extractor of feature maps, for detectors, segmenters and other heads.

    Args:
        model: The model whose maps are wanted; its weights are shared, not copied.

    Returns:
        A module from images [n, 3, H, W] to a list of maps [n, d, h, w], one per block, with the
        maps' channels and reductions in ``feature_info``.

    Raises:
        ValueError: The model is not one of bcosvit's.

    Examples:
        >>> extractor = features(create_model("bcos_densenet121", blocks=(1, 1)))
        >>> [list(each.shape) for each in extractor(torch.rand(1, 3, 64, 64))]
        [[1, 96, 16, 16], [1, 80, 8, 8]]
        >>> extractor.feature_info.channels()
        [96, 80]
    """
    if not isinstance(unwrapped(model), Classifier):
        raise ValueError(
            f"{type(model).__name__} is no model of bcosvit, so its stages are not known; "
            f"give what bcosvit.create_model or bcosvit.load returns."
        )
    return Features(model)
