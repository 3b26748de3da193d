"""Fingerprints of data: an iterator's state belongs to one data set.

One key covers the source, shuffling and batching; a run can't be resumed with other examples. Another covers the
functions of `map` and `filter`: editing one between two runs may be intended, and is only a warning.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from meshlib.core.canonical_keys import key_of
from meshlib.core.errors import GraphError

if TYPE_CHECKING:
    from meshlib.data.pipeline import Data


def identity_of(data: Data) -> dict[str, str | None]:
    """Identity of data: "of", a description; the key of their "examples", and that of their "functions".

    Functions that refer to objects without a key, such as a lock or an open file, have the key None.
    """
    batching = None if data.batching is None else asdict(data.batching)
    return {
        "of": str(data),
        "examples": key_of("data", data.source.fingerprint(), data.seed, data.buffer, data.joined, batching),
        "functions": _key_of_functions([stage.function for stage in (*data.maps, *data.of_batches)]),
    }


def _key_of_functions(functions: list[Callable[..., Any]]) -> str | None:
    try:
        return key_of("data", functions)
    except GraphError:
        return None
