"""Parsing of "name:value" texts, with a caret under the fault.

Mesh TensorFlow writes shapes, meshes and layouts alike: pairs joined by a colon and separated by any of
`;` `,` `.` or white space. One parser serves all three.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Mapping
from operator import index
from typing import Any, TypeGuard

from layouts.errors import LayoutError

_PAIR = re.compile(r"[^;,.\s]+")


def caret(text: str, position: int) -> str:
    """`text` with a caret under `position`, as a detail of an error.

    >>> print(caret("batch:rows;hidden", 11))
    batch:rows;hidden
               ^
    """
    shown = re.sub(r"\s", " ", text)  # one character each, so that caret positions stay right
    return f"{shown}\n{' ' * position}^"


def read_pairs(text: str) -> list[tuple[str, str, int]]:
    """The (left, right, position) of every pair in `text`; blanks around the colon are ignored.

    >>> read_pairs("batch:rows; hidden : cols")
    [('batch', 'rows', 0), ('hidden', 'cols', 12)]
    """
    pairs = []
    for word, start in _words(text):
        left, colon, right = word.partition(":")
        if not colon:
            several = "; several axes are joined by '+', as in batch:rows+cols" if "(" in text else ""
            raise LayoutError(f"{word!r} has no ':'; write pairs as name:value{several}", caret(text, start))
        if ":" in right:
            at = start + len(left) + 1 + right.index(":")
            raise LayoutError(f"{word!r} has two ':'; separate pairs by ';'", caret(text, at))
        pairs.append((left, right, start))
    return pairs


def _words(text: str) -> list[tuple[str, int]]:
    """The words of a text with their positions; a colon joins its neighbours to one word."""
    words: list[tuple[str, int]] = []
    end = 0
    for match in _PAIR.finditer(text):
        word, blank = match.group(), text[end : match.start()].isspace()
        before = words[-1][0] if words else ""
        if (
            blank
            and (before.endswith(":") != word.startswith(":"))
            and ":" not in (before.rstrip(":") + word.lstrip(":"))
        ):
            words[-1] = (before + word, words[-1][1])
        else:
            words.append((word, match.start()))
        end = match.end()
    return words


def is_iterable(source: object) -> TypeGuard[Iterable[Any]]:
    """True if `for x in source` works; arrays without dims only appear to be iterable."""
    try:
        iter(source)  # type: ignore[call-overload]
    except TypeError:
        return False
    return True


def checked_name(name: object, what: str) -> str:
    """`name`, which must be an identifier in the form to which Python brings its own: two spellings would look alike.

    >>> checked_name("d_model", "dimension")
    'd_model'
    """
    if not isinstance(name, str) or not name.isidentifier():
        raise LayoutError(f"{what} name {name!r} is not an identifier (letters, digits and _)")
    if not name.isascii() and (form := unicodedata.normalize("NFKC", name)) != name:
        raise LayoutError(f"{what} name {name!a} is not in Unicode's NFKC form; write {form!a}")
    return name


def checked_size(size: object, name: str, what: str) -> int:
    """`size` as an int of at least 1; NumPy integers are accepted, bools and floats are not.

    >>> checked_size(512, "batch", "dimension")
    512
    """
    try:
        if isinstance(size, bool):
            raise TypeError
        number = index(size)  # type: ignore[arg-type]
    except TypeError:
        raise LayoutError(
            f"{what} {name!r}: the size must be an integer, not {size!r} ({type(size).__name__})"
        ) from None
    if number < 1:
        raise LayoutError(f"{what} {name!r}: the size must be at least 1, not {number}")
    return number


def named_sizes(source: object, what: str) -> list[tuple[str, int]]:
    """Checked (name, size) pairs from a text, a mapping, or an iterable of pairs or of objects with name and size.

    >>> named_sizes("rows:2;cols:4", "axis")
    [('rows', 2), ('cols', 4)]
    >>> named_sizes({"rows": 2}, "axis")
    [('rows', 2)]
    """
    if isinstance(source, str):
        return [_sized(*pair, source, what) for pair in read_pairs(source)]
    if isinstance(source, Mapping):
        source = list(source.items())
    if not is_iterable(source):
        raise LayoutError(f"expected (name, size) pairs or text like 'a:2;b:4', not {source!r:.80}; each is one {what}")
    pairs: list[tuple[str, int]] = []
    for item in source:
        if hasattr(item, "name") and hasattr(item, "size"):
            item = (item.name, item.size)
        if not isinstance(item, tuple | list) or len(item) != 2:
            raise LayoutError(f"expected a (name, size) pair for each {what}, not {item!r:.80}")
        name = checked_name(item[0], what)
        pairs.append((name, checked_size(item[1], name, what)))
    return pairs


def _sized(name: str, size: str, position: int, text: str, what: str) -> tuple[str, int]:
    if not name.isidentifier():
        raise LayoutError(f"{what} name {name!r} is not an identifier", caret(text, position))
    if not re.fullmatch("[0-9]+", size) or int(size) < 1:
        at = position + len(name) + 1
        hint = (
            "; is this a layout? A mesh is text like 'rows:2;cols:4'" if what == "axis" and size.isidentifier() else ""
        )
        raise LayoutError(f"{what} {name!r}: size {size!r} is not an integer >= 1{hint}", caret(text, at))
    return checked_name(name, what), int(size)
