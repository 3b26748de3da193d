"""The notebooks of the examples: run as Jupyter runs them, without it.

`python -m tests.examples.notebooks` runs all and writes their outputs again, without the tooltips of pictures. HTML
larger than `LARGEST_HTML` is not kept in the file: there the text of the value stands for it.
"""

from __future__ import annotations

import ast
import contextlib
import io
import json
import os
import re
import tempfile
from pathlib import Path
from typing import Any

from tests.paths import ROOT

LARGEST_HTML = 60_000
NOTEBOOKS = sorted((ROOT / "examples").rglob("*.ipynb"))


def code_cells(notebook: dict[str, Any]) -> list[dict[str, Any]]:
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def run(notebook: dict[str, Any]) -> list[list[dict[str, Any]]]:
    """The outputs of each code cell, as the file holds them; run in an empty folder."""
    outputs, names = [], {"__name__": "__main__"}
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            for cell in code_cells(notebook):
                outputs.append(_run_cell("".join(cell["source"]), names))
        finally:
            os.chdir(before)
    return outputs


def _run_cell(source: str, names: dict[str, Any]) -> list[dict[str, Any]]:
    tree = ast.parse(source)
    last = tree.body[-1] if tree.body else None
    shown = isinstance(last, ast.Expr)
    printed, value = io.StringIO(), None
    with contextlib.redirect_stdout(printed):
        exec(compile(ast.Module(tree.body[:-1] if shown else tree.body, []), "cell.py", "exec"), names)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), "cell.py", "eval"), names)
    outputs: list[dict[str, Any]] = []
    if printed.getvalue():
        outputs.append({"output_type": "stream", "name": "stdout", "text": _lines(printed.getvalue())})
    if value is not None:
        data = {"text/plain": _lines(repr(value))}
        html = value._repr_html_() if hasattr(value, "_repr_html_") else ""
        data |= {"text/html": _lines(html)} if html else {}
        outputs.append({"output_type": "execute_result", "execution_count": None, "metadata": {}, "data": data})
    return outputs


def _lines(text: str) -> list[str]:
    return text.splitlines(keepends=True)


def told(outputs: list[dict[str, Any]]) -> str:
    """The text of outputs, without modelled figures, which follow the constants of the model."""
    parts = [out.get("text") or out["data"]["text/plain"] for out in outputs]
    return re.sub(r"[$\d.,]+( [a-zA-Z]+)?%?(?=\*)", "#", "\n".join(map("".join, parts)))


def write(path: Path) -> None:
    """Run a notebook and keep its outputs in the file."""
    notebook = json.loads(path.read_text())
    for n, (cell, outputs) in enumerate(zip(code_cells(notebook), run(notebook), strict=True), start=1):
        for out in outputs:
            html = re.sub("<title>.*?</title>", "", "".join(out.get("data", {}).pop("text/html", [])))
            if 0 < len(html) <= LARGEST_HTML:
                out["data"]["text/html"] = _lines(html)
            if out["output_type"] == "execute_result":
                out["execution_count"] = n
        cell |= {"outputs": outputs, "execution_count": n}
    path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    for name in NOTEBOOKS:
        write(name)
        print(f"{name.relative_to(ROOT)}: {name.stat().st_size:,} bytes")
