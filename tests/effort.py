"""How much a run of the tests takes on: a sample by default, all of it under `--hypothesis-profile=deep`; tables."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import pytest
from hypothesis import settings

T = TypeVar("T")
Check = TypeVar("Check", bound=Callable[..., None])

DEEP_EXAMPLES = 10_000
ROWS = "rows_of_each"  # attribute of a test: the names of its rows, and in how many parts they run


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


def each(names: str, rows: Mapping[str, object] | Sequence[object], parts: int = 1) -> Callable[[Check], Check]:
    """A test of a whole table: it runs for all rows, one after the other, and tells of all that fail.

    A test of its own costs milliseconds for each row, which tables of thousands of quick rows feel. `names` are those
    of the parameters that a row fills, as for `pytest.mark.parametrize`; all others are fixtures. The rows are cut into
    `parts` tests, which may run beside each other. With `-k`, or a test named with its row in brackets, each row is a
    test of its own, whose id is the name of the row: see `parametrize_rows`.
    """
    filled = [name.strip() for name in names.split(",")]
    named = rows.items() if isinstance(rows, Mapping) else ((row, row) for row in rows)
    table = [(_row_name(key), row) for key, row in named]

    def decorated(check: Check) -> Check:
        def run(rows: slice, **fixtures: object) -> None:
            faults, skipped, own = [], [], table[rows]
            for name, row in own:
                try:
                    check(**dict(zip(filled, (row,) if len(filled) == 1 else row, strict=True)), **fixtures)
                except pytest.skip.Exception as reason:
                    skipped.append(str(reason))
                except (Exception, pytest.fail.Exception) as fault:
                    fault.add_note(f"row {name}")
                    faults.append(fault)
            if faults:
                raise BaseExceptionGroup(f"{len(faults)} of {len(own)} rows fail", faults)
            if own and len(skipped) == len(own):
                pytest.skip(skipped[0])

        signature = inspect.signature(check)
        others = [p.replace(kind=p.KEYWORD_ONLY) for n, p in signature.parameters.items() if n not in filled]
        rows = inspect.Parameter("rows", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        run.__signature__ = signature.replace(parameters=[rows, *others])
        for attribute in ("__name__", "__qualname__", "__doc__", "__module__"):
            setattr(run, attribute, getattr(check, attribute))
        run.__dict__[ROWS] = ([name for name, _ in table], parts)
        return run

    return decorated


def _row_name(key: object) -> str:
    """The name of a row, the same in every process: without addresses of functions."""
    return re.sub(r" at 0x[0-9a-f]+", "", " ".join(map(str, key)) if isinstance(key, tuple) else str(key))


def parametrize_rows(metafunc: pytest.Metafunc) -> None:
    """Makes the tests of a table: `parts` of them, or one for each row where rows are selected by name."""
    names, parts = getattr(metafunc.function, ROWS, ((), 0))
    config = metafunc.config
    if parts and (config.option.keyword or any("[" in argument for argument in config.args)):
        metafunc.parametrize("rows", [slice(n, n + 1) for n in range(len(names))], ids=[name[:100] for name in names])
    elif parts:
        metafunc.parametrize("rows", [slice(n, None, parts) for n in range(parts)], ids=[str(n) for n in range(parts)])
