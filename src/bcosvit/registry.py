"""Things that exist in several kinds (models, explainers, metrics), each found by its name.

A registry is filled by decorators, so that adding a kind means adding one file. Other packages add
their own in the same way, and announce the module that does so as an entry point:

    [project.entry-points."bcosvit.explainers"]
    mine = "my_package.my_explainer"
"""

import warnings
from collections.abc import Callable, Iterator
from importlib.metadata import entry_points
from typing import Generic, TypeVar

from bcosvit.messages import pick, unknown

T = TypeVar("T")
R = TypeVar("R")


class Registry(Generic[T]):
    """A mapping from names to items in the order in which they were registered.

    Iterating gives the names, as with a ``dict``. The entry points of ``group`` are loaded when the
    registry is read for the first time, so that importing bcosvit stays cheap.

    Args:
        kind: What an item is called in error messages, in the singular.
        group: The entry-point group whose modules register further items, if there is one.

    Examples:
        >>> colors = Registry[str](kind="color")
        >>> _ = colors.register("red")("#f00")
        >>> colors.names()
        ('red',)
        >>> colors.get("read")
        Traceback (most recent call last):
        ValueError: There is no color 'read'; did you mean 'red'?
    """

    def __init__(self, kind: str, group: str | None = None) -> None:
        self.kind = kind
        self.group = group
        self._items: dict[str, T] = {}
        self._origins: dict[str, object] = {}
        self._loaded = group is None

    def register(self, name: str, *, origin: object = None) -> Callable[[R], R]:
        """Returns a decorator that registers what it decorates, and changes nothing about it.

        Args:
            name: The name under which the item is found. Only a newer definition of the same class
                or function, as after reloading its module, may take a name again.
            origin: The class or function that an item stands for, where it is neither itself.

        Returns:
            The decorator.

        Raises:
            ValueError: The name is taken, or is not one that ``pick`` could find.
        """
        if not name or name == "all" or "," in name or name != name.strip():
            raise ValueError(
                f"{name!r} cannot be the name of a {self.kind}; give a name without commas or "
                f"spaces around it that is not 'all'."
            )

        def decorate(item: R) -> R:
            where = _qualified_name(item if origin is None else origin)
            if self._origins.setdefault(name, where) != where:
                raise ValueError(f"There is a {self.kind} {name!r} already; give another name.")
            self._items[name] = item  # type: ignore[assignment]
            return item

        return decorate

    def names(self) -> tuple[str, ...]:
        """All names, in the order in which the items were registered."""
        return tuple(self._all())

    def get(self, name: str) -> T:
        """The item of this name.

        Raises:
            ValueError: There is no such item; the message suggests similar names.
        """
        items = self._all()
        if name not in items:
            raise ValueError(unknown(self.kind, name, items))
        return items[name]

    def items(self) -> tuple[tuple[str, T], ...]:
        """All names with their items."""
        return tuple(self._all().items())

    def pick(self, names: str) -> dict[str, T]:
        """The items that a comma-separated list names, in its order; ``"all"`` picks every item.

        Raises:
            ValueError: A name does not exist, or the list is empty.

        Examples:
            >>> digits = Registry[int](kind="digit")
            >>> for number, name in enumerate(("zero", "one", "two")):
            ...     _ = digits.register(name)(number)
            >>> digits.pick("two, one")
            {'two': 2, 'one': 1}
        """
        return {name: self.get(name) for name in pick(names, self.names(), self.kind)}

    def __contains__(self, name: object) -> bool:
        return name in self._all()

    def __iter__(self) -> Iterator[str]:
        return iter(self.names())

    def __len__(self) -> int:
        return len(self._all())

    def _all(self) -> dict[str, T]:
        if not self._loaded:
            # Before loading, because what is loaded may read the registry itself.
            self._loaded = True
            for point in entry_points(group=self.group or ""):
                try:
                    point.load()
                except Exception as error:
                    warnings.warn(
                        f"The {self.kind} {point.name!r} of the entry point {point.value!r} could "
                        f"not be loaded and is left out: {error}",
                        stacklevel=3,
                    )
        return self._items


def _qualified_name(item: object) -> object:
    """Where an item was defined; built-in values are their own origin."""
    named = item if hasattr(item, "__qualname__") else type(item)
    where = getattr(named, "__module__", None), getattr(named, "__qualname__", None)
    return where if where[0] not in (None, "builtins") else item
