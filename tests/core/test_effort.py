"""What tests of whole tables tell."""

from __future__ import annotations

import inspect

import pytest

from tests.effort import each


def test_all_rows_that_fail_are_told() -> None:
    @each("number, square", {"one": (1, 1), "two": (2, 5), "three": (3, 9), "four": (4, 15)})
    def check(number: int, square: int, offset: int) -> None:
        if number == 4:
            with pytest.raises(ValueError, match="none"):
                pass
        assert number**2 + offset == square

    assert list(inspect.signature(check).parameters) == ["part", "offset"]
    with pytest.raises(BaseExceptionGroup, match="2 of 4 rows fail") as found:
        check(0, offset=0)
    assert [fault.__notes__ for fault in found.value.exceptions] == [["row two"], ["row four"]]


def test_parts_are_the_table() -> None:
    seen = []

    @each("row", [*"abcde"], parts=2)
    def check(row: str) -> None:
        seen.append(row)

    check(0)
    assert seen == ["a", "c", "e"]
    check(1)
    assert sorted(seen) == [*"abcde"]


def test_only_a_table_of_skips_is_a_skip() -> None:
    @each("row", [1, 2], parts=2)
    def check(row: int) -> None:
        if row == 2:
            pytest.skip("not here")

    check(0)
    with pytest.raises(pytest.skip.Exception, match="not here"):
        check(1)
