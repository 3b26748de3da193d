"""How much a run of the tests takes on: a sample by default, all of it under `--hypothesis-profile=deep`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from hypothesis import settings

T = TypeVar("T")

DEEP_EXAMPLES = 10_000


def deep() -> bool:
    """Whether this run was asked to try everything."""
    return settings.default is not None and settings.default.max_examples >= DEEP_EXAMPLES


def draws(default: int, in_depth: int) -> int:
    """How many random draws a test makes."""
    return in_depth if deep() else default


def some(rows: Sequence[T], default: Sequence[T]) -> Sequence[T]:
    """The rows of a table that a run goes through: those of `default`, or all."""
    assert all(row in rows for row in default)
    return rows if deep() else default
