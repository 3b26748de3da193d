"""Reading of untrusted JSON files: a whole document, or a one-line error.

A file may be of any size, nested deeply enough to overflow a parser's stack, repeat a key, contain NaN, or have text
where a number is expected. `read_json` bounds the size, `parse_json` the depth; both refuse duplicate keys, of which a
dict would keep the last, and check the types of the fields that a `Schema` names.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, NoReturn, TypeAlias

from meshlib.core.files import open_file
from meshlib.core.garbage import uncollected

Fail: TypeAlias = Callable[[str], NoReturn]
MOST_BYTES = 64 * 2**20  # the vocabularies and indexes of published models have up to a third of it
MOST_DEPTH = 64
_loaded = uncollected(json.loads)  # with the collector running, a large document takes three times as long


@dataclass(frozen=True)
class FieldKind:
    """Type of a JSON field: its description in messages, and a predicate."""

    words: str
    accepts: Callable[[Any], bool]
    required: bool = True

    def optional(self) -> FieldKind:
        """The same type for a field that may be missing or null."""
        return FieldKind(f"{self.words}, or missing", lambda x: x is None or self.accepts(x), required=False)


Schema: TypeAlias = Mapping[str, FieldKind]


def _number(x: Any) -> bool:
    return isinstance(x, int | float) and not isinstance(x, bool) and abs(x) < 1e300 and math.isfinite(x)


def _whole(x: Any, low: int) -> bool:
    return isinstance(x, int) and not isinstance(x, bool) and low <= x < 2**63


SIZE = FieldKind("an integer of at least 1", lambda x: _whole(x, 1))
COUNT = FieldKind("an integer of at least 0", lambda x: _whole(x, 0))
NUMBER = FieldKind("a finite number", _number)
POSITIVE = FieldKind("a positive number", lambda x: _number(x) and x > 0)
FLAG = FieldKind("true or false", lambda x: isinstance(x, bool))
TEXT = FieldKind("text", lambda x: isinstance(x, str))
LIST = FieldKind("a list", lambda x: isinstance(x, list))
RECORD = FieldKind("an object", lambda x: isinstance(x, dict))


def read_json(
    path: object,
    what: str,
    error: type[Exception],
    sound: str,
    schema: Schema | None = None,
    constants: bool = False,
    a_list: bool = False,
) -> tuple[Any, str]:
    """The object in a JSON file, and the file's resolved path.

    Args:
      path, what, error: as in `meshlib.core.files.open_file`.
      sound: the description of a valid file in messages, such as "an index of safetensors files".
      schema: types of its fields; fields without an entry may have any type.
      constants: whether NaN and Infinity are allowed; a_list: whether the document may be a list.
    Raises: `error` for a file that can't be read, exceeds 64 MiB, or breaks the schema.
    """
    with open_file(path, what, error, MOST_BYTES) as (file, target):
        raw = file.read()

    def fail(fault: str) -> NoReturn:
        raise error(f"{what}: {target} is not {sound}: {fault}") from None

    return parse_json(raw, fail, schema, constants, a_list), target


def parse_json(
    raw: bytes | str, fail: Fail, schema: Schema | None = None, constants: bool = False, a_list: bool = False
) -> Any:
    """The object in a JSON text; arguments as in `read_json`."""

    def no_constant(word: str) -> NoReturn:
        fail(f"{word} is not a number in JSON")

    def finite(digits: str) -> float:
        value = float(digits)
        if math.isinf(value):
            fail(f"{digits:.40} is larger than any float64")
        return value

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        entries = dict(pairs)
        if len(entries) != len(pairs):
            names = [name for name, _ in pairs]
            name = next(name for name, first in zip_longest(names, entries) if name != first)  # in file order
            fail(f"the key {name!r:.80} occurs {names.count(name)} times")
        return entries

    try:
        text = raw.decode() if isinstance(raw, bytes) else raw
        document = _loaded(
            text, object_pairs_hook=unique, parse_float=finite, parse_constant=None if constants else no_constant
        )
    except UnicodeDecodeError as fault:
        fail(f"it is not UTF-8: byte {fault.start} of {len(raw)} is 0x{fault.object[fault.start]:02x}")
    except RecursionError:
        fail(f"it is nested deeper than {MOST_DEPTH} levels")
    except ValueError as fault:
        fail(f"it is not valid JSON: {fault!s:.160}" if text.strip() else "it is empty")
    if not isinstance(document, dict) and not (a_list and isinstance(document, list)):
        fail(f"it holds {type(document).__name__} {_shown(document)}, not an object")
    if not _shallow(document, MOST_DEPTH):
        fail(f"it is nested deeper than {MOST_DEPTH} levels")
    if isinstance(document, dict):
        check_fields(document, schema or {}, fail)
    return document


def check_fields(record: Mapping[str, Any], schema: Schema, fail: Fail) -> None:
    """Call `fail` for the first field that is missing or has a type other than the schema's."""
    for name, kind in schema.items():
        if name not in record:
            if kind.required:
                fail(f"it has no '{name}', which must be {kind.words}")
        elif not kind.accepts(record[name]):
            value = record[name]
            limit = " and below 2^63" if type(value) is int and value >= 2**63 else ""
            fail(f"'{name}' must be {kind.words}{limit}, got {type(value).__name__} {_shown(value)}")


def _shallow(document: Any, depth: int) -> bool:
    """True if nesting is at most `depth`; breadth first, since recursion could overflow the stack itself."""
    level = [document]
    while level and depth >= 0:
        depth -= 1
        nested = [x.values() if isinstance(x, dict) else x for x in level if isinstance(x, dict | list)]
        level = [x for group in nested for x in group if isinstance(x, dict | list)]
    return not level


def _shown(value: Any) -> str:
    return f"{value!r:.60}" if _shallow(value, 8) else "nested deeply"
