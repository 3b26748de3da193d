"""The hardware floor stands on its own: it imports numpy, ml_dtypes, the standard library and itself.

Functions that draw import matplotlib, an extra, where they use it.
"""

import ast
import sys
from pathlib import Path

import pytest

import hardware

FOLDER = Path(hardware.__file__).parent
ALLOWED = {"numpy", "ml_dtypes", "hardware"}
INSIDE_FUNCTIONS = {"matplotlib"}


@pytest.mark.parametrize("file", sorted(FOLDER.glob("*.py")), ids=lambda file: file.name)
def test_imports(file):
    tree = ast.parse(file.read_text())
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    inside = {id(node) for function in functions for node in ast.walk(function)}
    for node in ast.walk(tree):
        names = []
        allowed = ALLOWED | INSIDE_FUNCTIONS if id(node) in inside else ALLOWED
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            names = [node.module]
        for name in names:
            root = name.split(".")[0]
            assert root in allowed or root in sys.stdlib_module_names, f"{file.name} imports {name}"


@pytest.mark.parametrize("file", sorted(FOLDER.glob("*.py")), ids=lambda file: file.name)
def test_one_idea_per_file(file):
    lines = file.read_text().splitlines()
    assert len(lines) <= 400 or file.name == "chip_figures.py"  # a table, of about 40 lines a chip
    assert ast.get_docstring(ast.parse(file.read_text()))
