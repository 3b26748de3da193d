"""The lowered programs of minima_tables.py send what was derived by hand, and compute what one core would."""

from __future__ import annotations

from collections import Counter
from types import ModuleType

import pytest

import meshlib as mtf
from tests.effort import each, some
from tests.lowering.minima.table import DTYPES, Case
from tests.lowering.minima_tables import NOT_YET, ROWS, SAMPLE, THEMES


def built(name: str, dtype: str) -> Case:
    with mtf.Graph():
        return ROWS[name](dtype)


def missed(name: str, dtype: str) -> bool:
    return name in NOT_YET or f"{name}[{dtype}]" in NOT_YET


TYPED = [(name, dtype) for name in ROWS for dtype in DTYPES]
REACHED = [row for row in TYPED if not missed(*row)]


# Those in float32 are tried with fewer devices, below.
@each("name, dtype", some(REACHED, [row for row in REACHED if row[1] == "bfloat16"][::2]), parts=8)
def test_sends_the_minimum(name: str, dtype: str) -> None:
    assert_sends_the_minimum(name, dtype)


@pytest.mark.xfail(strict=True, raises=AssertionError)
@pytest.mark.parametrize(("name", "dtype"), [row for row in TYPED if missed(*row)])
def test_does_not_reach_the_minimum_yet(name: str, dtype: str) -> None:
    assert_sends_the_minimum(name, dtype)


def assert_sends_the_minimum(name: str, dtype: str) -> None:
    case = built(name, dtype)
    program = mtf.lower(case.outputs, case.updates, mesh=case.mesh, layout=case.layout)
    assert program.sent_bytes == case.minimum, mtf.collectives_table(program.collectives)
    if case.kinds is not None:
        assert Counter(c.kind for c in program.collectives) == Counter(case.kinds)


@pytest.mark.parametrize("theme", some(THEMES, THEMES[::2]), ids=lambda m: m.__name__.rpartition(".")[2])
def test_formulas_hold_for_fewer_devices(theme: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are formulas in n, not numbers that are right for one n."""
    monkeypatch.setattr(theme, "N", 2)
    monkeypatch.setattr(theme, "MESH", "m:2")
    tried = 0
    for name, build in ROWS.items():
        if build.__module__ == theme.__name__ and not missed(name, "float32"):
            case = built(name, "float32")
            program = mtf.lower(case.outputs, case.updates, mesh=case.mesh, layout=case.layout)
            assert program.sent_bytes == case.minimum, name
            if case.kinds is not None:
                assert Counter(c.kind for c in program.collectives) == Counter(case.kinds), name
            tried += case.mesh == "m:2"
    assert tried > 5


@pytest.mark.parametrize("name", some(tuple(ROWS), SAMPLE))
def test_numbers_equal_the_unsharded_program(name: str) -> None:
    case = built(name, "float32")
    mtf.verify(case.outputs, case.updates, layouts=[(case.mesh, case.layout)]).raise_for_failures()


def test_the_table_is_large_and_names_only_rows() -> None:
    assert len(ROWS) >= 80
    assert {name.partition("[")[0] for name in NOT_YET} <= ROWS.keys()
