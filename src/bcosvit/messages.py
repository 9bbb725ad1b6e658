"""What messages of all packages have in common: shortened lists, suggestions, missing extras."""

import difflib
import importlib
from collections.abc import Iterable, Sequence
from types import ModuleType
from unicodedata import category


def and_more(items: Iterable[object], most: int = 5) -> str:
    """Lists items in a sentence, and counts those beyond ``most``, which would make it too long.

    Examples:
        >>> and_more(["cat", "dog", "fox"], most=2)
        'cat, dog and 1 more'
    """
    names = [str(item) for item in items]
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + rest


def counted(number: int, noun: str) -> str:
    """Writes a number with its noun, which is given in the singular.

    Examples:
        >>> counted(1, "picture"), counted(2, "picture")
        ('1 picture', '2 pictures')
    """
    return f"{number} {noun}{'' if number == 1 else 's'}"


def printable(text: str, most: int = 200) -> str:
    """Returns text of others with escapes instead of control characters, cut after ``most``
    characters.

    Examples:
        >>> printable("cat\\x1b[2J")
        'cat\\\\x1b[2J'
        >>> printable("a" * 8, most=5)
        'aaaaa…'
    """
    shown = text[:most] + ("…" if len(text) > most else "")
    return "".join(
        each if each.isprintable() else each.encode("unicode_escape").decode() for each in shown
    )


def for_terminal(text: str) -> str:
    """Returns a line that may name files, with escapes instead of control characters, which a
    terminal obeys, and of what is not valid Unicode.

    Examples:
        >>> for_terminal("ünder\\x1b[2J")
        'ünder\\\\x1b[2J'
    """
    odd = ("Cc", "Cs", "Zl", "Zp")
    return "".join(
        each.encode("unicode_escape").decode() if category(each) in odd else each for each in text
    )


def unknown(kind: str, name: str, allowed: Iterable[str]) -> str:
    """Writes the error message for a name that does not exist, with those that are spelled
    similarly, or else with all that do.

    Args:
        kind: What the name should have been a name of, in the singular.
        name: The name that was given.
        allowed: All names that exist.

    Examples:
        >>> unknown("method", "roll-out", ["rollout", "gradcam"])
        "There is no method 'roll-out'; did you mean 'rollout'?"
        >>> unknown("method", "shap", ["rollout", "gradcam"])
        "There is no method 'shap'; choose from rollout, gradcam."
    """
    allowed = list(allowed)
    folded = {each.casefold().replace("-", "_"): each for each in allowed}
    meant = name.casefold().replace("-", "_")
    close = difflib.get_close_matches(meant, folded, n=3, cutoff=0.8)
    near = [folded[each] for each in ([meant] if meant in close else close)]
    if near:
        return f"There is no {kind} {name!r}; did you mean {' or '.join(map(repr, near))}?"
    return f"There is no {kind} {name!r}; choose from {', '.join(allowed)}."


def require(module: str, *, extra: str, purpose: str = "This") -> ModuleType:
    """Imports a module that only an optional part of the installation has.

    Args:
        module: The module's full name. It may be a module of bcosvit that imports the optional
            library itself.
        extra: The extra of bcosvit that installs what is missing.
        purpose: What needs the module, as the subject of the error message.

    Returns:
        The imported module.

    Raises:
        ValueError: The module, or one that it imports, is not installed.

    Examples:
        >>> require("json", extra="web", purpose="The web page").dumps([1])
        '[1]'
        >>> require("no_such_library", extra="web", purpose="The web page")
        Traceback (most recent call last):
        ValueError: The web page needs no_such_library, which is not installed: pip install \
'bcosvit[web]'.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as missing:
        if missing.name is None or missing.name.partition(".")[0] == "bcosvit":
            raise
        raise ValueError(
            f"{purpose} needs {missing.name}, which is not installed: "
            f"pip install 'bcosvit[{extra}]'."
        ) from missing


def pick(names: str, allowed: Sequence[str], kind: str) -> tuple[str, ...]:
    """Splits a comma-separated list of names, and checks that each is allowed; ``"all"`` stands for
    all.

    Args:
        names: The list.
        allowed: The names that exist.
        kind: What a name is a name of, in the singular.

    Returns:
        The names, each once, in the order given.

    Raises:
        ValueError: If a name does not exist, or the list is empty.

    Examples:
        >>> pick("s, ti", ["ti", "s", "b"], "size")
        ('s', 'ti')
    """
    if names.strip() == "all":
        return tuple(allowed)
    words = tuple(dict.fromkeys(word.strip() for word in names.split(",") if word.strip()))
    for word in words:
        if word not in allowed:
            raise ValueError(unknown(kind, word, allowed))
    if not words:
        raise ValueError(f"No {kind} is named in {names!r}; choose from {', '.join(allowed)}.")
    return words


def percent(share: float) -> str:
    """Formats a share as a percentage, and small shares not as zero.

    Example:
        >>> percent(0.9312), percent(0.0001), percent(-0.25)
        ('93.1 %', '< 0.1 %', '−25.0 %')
    """
    if 0 < abs(share) < 0.0005:
        return "< 0.1 %" if share > 0 else "> −0.1 %"
    return f"{100 * share + 0.0:.1f} %".replace("-", "−")
