"""Images of any origin: reading them, data sets, transforms, and data sets that are drawn."""

from bcosvit.data.dataset import SourceError, Split
from bcosvit.data.folder import FolderReader
from bcosvit.data.hub import HubReader
from bcosvit.data.images import ImageError, list_images, read_image, to_tensor
from bcosvit.data.labeled import LabeledImages, labeled_images, match_classes
from bcosvit.data.scenes import Scene, Scenes
from bcosvit.data.shards import ShardReader
from bcosvit.data.sources import Source, check_source, open_source, register_source
from bcosvit.data.transforms import EvalTransform, TrainTransform

__all__ = [
    "EvalTransform",
    "FolderReader",
    "HubReader",
    "ImageError",
    "LabeledImages",
    "Scene",
    "Scenes",
    "ShardReader",
    "Source",
    "SourceError",
    "Split",
    "TrainTransform",
    "check_source",
    "labeled_images",
    "list_images",
    "match_classes",
    "open_source",
    "read_image",
    "register_source",
    "to_tensor",
]
