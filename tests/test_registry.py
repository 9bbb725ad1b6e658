"""Names in a registry: their order, suggestions, lists, and what other packages add."""

import sys
from importlib.metadata import EntryPoint
from types import ModuleType

import pytest

import bcosvit.registry
from bcosvit.messages import and_more, require, unknown
from bcosvit.registry import Registry


@pytest.fixture
def shapes() -> Registry[type]:
    registry = Registry[type](kind="shape")
    registry.register("square")(int)
    registry.register("circle")(float)
    return registry


def test_names_keep_the_order_of_registration(shapes: Registry[type]) -> None:
    assert shapes.names() == tuple(shapes) == ("square", "circle")
    assert shapes.items() == (("square", int), ("circle", float))
    assert len(shapes) == 2 and "circle" in shapes and "Circle" not in shapes


def test_the_decorator_returns_what_it_decorates(shapes: Registry[type]) -> None:
    class Star:
        pass

    assert shapes.register("star")(Star) is Star
    assert shapes.get("star") is Star


@pytest.mark.parametrize("wrong", ["Circle", "cirle"])
def test_a_wrong_name_is_answered_with_similar_ones(shapes: Registry[type], wrong: str) -> None:
    with pytest.raises(ValueError, match=f"{wrong}.*did you mean 'circle'"):
        shapes.get(wrong)
    with pytest.raises(ValueError, match="square, circle"):
        shapes.get("hexagon")


def test_lists_are_picked_in_their_order(shapes: Registry[type]) -> None:
    assert list(shapes.pick("circle, square")) == ["circle", "square"]
    assert list(shapes.pick("all")) == ["square", "circle"]
    for wrong in ("", ",", "circle,star"):
        with pytest.raises(ValueError, match="shape"):
            shapes.pick(wrong)


@pytest.mark.parametrize("name", ["", "all", "a,b", " a"])
def test_names_that_no_list_could_hold_are_refused(shapes: Registry[type], name: str) -> None:
    with pytest.raises(ValueError, match="cannot be the name"):
        shapes.register(name)


def test_a_taken_name_is_refused_but_a_module_may_be_reloaded(shapes: Registry[type]) -> None:
    def make() -> type:
        class Star:
            pass

        return Star

    shapes.register("star")(make())
    newer = shapes.register("star")(make())
    assert shapes.get("star") is newer
    with pytest.raises(ValueError, match="already"):
        shapes.register("star")(str)
    with pytest.raises(ValueError, match="already"):
        shapes.register("square")(bool)


def test_entry_points_are_loaded_once_and_a_broken_one_is_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    registry = Registry[type](kind="shape", group="shapes")
    loads = []

    class Module(ModuleType):
        def __getattr__(self, name: str) -> type:
            loads.append(name)
            return registry.register(name)(int)

    monkeypatch.setitem(sys.modules, "shapes_from_outside", Module("shapes_from_outside"))
    points = [
        EntryPoint("star", "shapes_from_outside:star", "shapes"),
        EntryPoint("broken", "no_such_module", "shapes"),
    ]
    monkeypatch.setattr(bcosvit.registry, "entry_points", lambda group: points)
    registry.register("square")(float)
    assert not loads
    with pytest.warns(UserWarning, match="broken.*left out"):
        assert registry.names() == ("square", "star")
    assert registry.names() == ("square", "star")
    assert loads == ["star"]


def test_long_lists_are_shortened() -> None:
    assert and_more(range(3), most=3) == "0, 1, 2"
    assert and_more(range(4), most=3) == "0, 1, 2 and 1 more"


def test_suggestions_ignore_case_and_hyphens() -> None:
    assert "'Bcos_ViT'" in unknown("model", "bcos-vit", ["Bcos_ViT", "bcos_vid"])


def test_a_missing_library_is_named_with_the_extra_that_has_it() -> None:
    with pytest.raises(ValueError, match=r"Drawing needs no_such_library.*bcosvit\[web\]"):
        require("no_such_library.part", extra="web", purpose="Drawing")
    # A module of our own that does not exist is a mistake of ours, not a missing extra.
    with pytest.raises(ModuleNotFoundError):
        require("bcosvit.no_such_module", extra="web")
