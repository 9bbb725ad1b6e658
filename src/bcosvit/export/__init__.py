"""Models as files that need no Python: logits and contributions in one graph."""

from bcosvit.export.files import export_weights, load_exported
from bcosvit.export.repository import export_repository

__all__ = ["export_repository", "export_weights", "load_exported"]
