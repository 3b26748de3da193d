"""What tests of whole tables tell."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest

from tests.effort import each, parametrize_rows


def test_all_rows_that_fail_are_told() -> None:
    @each("number, square", {"one": (1, 1), "two": (2, 5), "three": (3, 9), "four": (4, 15)})
    def check(number: int, square: int, offset: int) -> None:
        if number == 4:
            with pytest.raises(ValueError, match="none"):
                pass
        assert number**2 + offset == square

    assert list(inspect.signature(check).parameters) == ["rows", "offset"]
    with pytest.raises(BaseExceptionGroup, match="2 of 4 rows fail") as found:
        check(slice(None), offset=0)
    assert [fault.__notes__ for fault in found.value.exceptions] == [["row two"], ["row four"]]


def test_parts_are_the_table() -> None:
    seen = []

    @each("row", [*"abcde"], parts=2)
    def check(row: str) -> None:
        seen.append(row)

    check(slice(0, None, 2))
    assert seen == ["a", "c", "e"]
    check(slice(1, None, 2))
    assert sorted(seen) == [*"abcde"]


def test_only_a_table_of_skips_is_a_skip() -> None:
    @each("row", [1, 2], parts=2)
    def check(row: int) -> None:
        if row == 2:
            pytest.skip("not here")

    check(slice(0, None, 2))
    with pytest.raises(pytest.skip.Exception, match="not here"):
        check(slice(1, None, 2))


@pytest.mark.parametrize(
    ("keyword", "arguments", "ids"),
    [
        ("", ["tests"], ["0", "1"]),
        ("one", ["tests"], ["one", "two", "three"]),
        ("", ["tests/test_it.py::test_it[two]"], ["one", "two", "three"]),
    ],
)
def test_selected_rows_are_tests_of_their_own(keyword: str, arguments: list[str], ids: list[str]) -> None:
    seen = []

    @each("number", {"one": 1, "two": 2, "three": 3}, parts=2)
    def check(number: int) -> None:
        seen.append(number)

    made: dict[str, list[Any]] = {}
    config = SimpleNamespace(option=SimpleNamespace(keyword=keyword), args=arguments)
    parametrize = lambda name, values, ids: made.update({"values": values, "ids": ids})  # noqa: E731
    parametrize_rows(SimpleNamespace(function=check, config=config, parametrize=parametrize))
    assert made["ids"] == ids
    for rows in made["values"]:
        check(rows)
    assert sorted(seen) == [1, 2, 3]
