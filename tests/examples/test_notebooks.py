"""Notebooks run from top to bottom, and what they hold is what they give."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from tests.examples.notebooks import LARGEST_HTML, NOTEBOOKS, code_cells, run, told
from tests.paths import ROOT

LARGEST_FILE = 130_000


def test_there_is_one_for_each_kind_of_user() -> None:
    page = (ROOT / "examples/README.md").read_text()
    assert len(NOTEBOOKS) == 4
    for path in NOTEBOOKS:
        assert path.relative_to(ROOT).as_posix() in page


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_gives_what_it_shows(path: Path) -> None:
    assert path.stat().st_size < LARGEST_FILE
    notebook = json.loads(path.read_text())
    begun = time.process_time()
    computed = run(notebook)
    assert time.process_time() - begun < 6  # on a busy machine; 1 or 2 on an idle one
    for cell, outputs in zip(code_cells(notebook), computed, strict=True):
        assert told(cell["outputs"]) == told(outputs), "".join(cell["source"])
        for out in outputs:
            html = "".join(out.get("data", {}).get("text/html", ""))
            assert not html or html.startswith(("<div", "<p", "<table")), html[:80]
            assert "<script" not in html
        for out in cell["outputs"]:
            assert len("".join(out.get("data", {}).get("text/html", ""))) <= LARGEST_HTML
