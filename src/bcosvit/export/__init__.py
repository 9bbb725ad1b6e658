"""Models as files that need no Python: logits and contributions in one graph."""

from bcosvit.export.repository import export_repository
from bcosvit.export.run import export_weights

__all__ = ["export_repository", "export_weights"]
