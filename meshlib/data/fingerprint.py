"""Fingerprints of data: an iterator's state belongs to these data and no others.

The examples have a key of their source and of how it is shuffled and batched; from other examples no run goes on. The
functions of `map` and `filter` have another: one that was edited between two runs may be meant, and is a warning.
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
    """What data are: "of", in words; the key of their "examples", and that of their "functions".

    Functions that hold what has no key, such as a lock or an open file, have none: None.
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
