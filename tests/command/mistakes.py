"""What a message about a mistake must hold; for tables of mistakes."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

import meshlib as mtf

Mistake = tuple[Callable[[], object], type[Exception], list[str]]  # the code, the class of the error, patterns


def in_graph(build: Callable[[], object]) -> Callable[[], object]:
    """The code, run in a graph of its own."""

    def run() -> object:
        with mtf.Graph():
            return build()

    return run


def assert_explained(mistake: Mistake, name: str) -> str:
    """The code raises an error of exactly this class, whose text has all patterns; the text."""
    code, kind, wanted = mistake
    with pytest.raises(mtf.MeshlibError) as caught:
        code()
    text = told_by(caught.value)
    assert type(caught.value) is kind, f"{type(caught.value).__name__}: {text}"
    for pattern in wanted:
        assert re.search(pattern, text), f"no {pattern!r} in:\n{text}"
    assert caught.value.__cause__ is None or name == "initializer that takes nothing"
    assert caught.value.__context__ is None or caught.value.__suppress_context__ or caught.value.__cause__, text
    assert "axiss" not in text
    assert "<lambda>" not in text or "initializer" in name
    assert len(text) < 1500
    return text


def told_by(fault: BaseException) -> str:
    """What a traceback prints of an error: its message and its notes."""
    return "\n".join([str(fault), *getattr(fault, "__notes__", ())])


# How a message says what is right: a rule, what there is, or what to do.
REMEDY = re.compile(
    r"\b(must|may be|may only|needs?|expected|did you mean|known:|in \S+ to \d+|there (is|are) \w)|>= \d"
    r"|[;:,] (or )?(take|give|write|use|pad|cast|rename|name|make|start|leave|see|say|free|remove|check|make) "
)


def assert_told(code: Callable[[], object], text: str) -> None:
    """The code raises an error of ours that says this in one line, with a remedy; "*" stands for anything."""
    with mtf.Graph(), pytest.raises(mtf.MeshlibError) as caught:
        code()
    said = str(caught.value)
    assert re.search(".*".join(map(re.escape, text.split("*"))), said, re.DOTALL), f"no {text!r} in:\n{said}"
    assert caught.value.__cause__ or caught.value.__suppress_context__ or not caught.value.__context__, said
    assert "\n" not in said, said
    assert REMEDY.search(said), f"no remedy in: {said}"
    assert len(said) < 500
