"""What a server takes from strangers, in one place."""

from dataclasses import dataclass, fields


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Bounds on what one user can send and on what all users together can occupy."""

    megabytes: int = 20
    """Of one uploaded file."""
    pixels: int = 50_000_000
    """Of one picture, read from its header before anything is decoded."""
    pictures: int = 16
    """At once, in one page or one request."""
    queue: int = 100
    """Requests that may wait; further ones are refused until there is room."""
    concurrency: int = 2
    """Requests that use the model at the same time."""
    seconds: int = 3600
    """That uploads and made files are kept."""
    cached: int = 64
    """Explanations that are remembered, of all users together."""

    def __post_init__(self) -> None:
        for field in fields(self):
            if getattr(self, field.name) < 1:
                raise ValueError(
                    f"The limit {field.name} = {getattr(self, field.name)} lets nothing through: "
                    f"give an integer >= 1."
                )
