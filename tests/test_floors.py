"""The house: imports point down only, and a stray module on the path is named."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import hardware
import layouts
import meshlib
from tests.public import public_names

ROOT = Path(__file__).resolve().parent.parent
OWN = ("meshlib", "layouts", "hardware")
BELOW = {"meshlib": {"layouts", "hardware"}, "layouts": set(), "hardware": set()}
REQUIRED = {"numpy", "ml_dtypes", "einops"}
FILES = [path for floor in OWN for path in sorted((ROOT / floor).rglob("*.py"))]


def imported(nodes: Iterator[ast.AST] | list[ast.stmt]) -> Iterator[tuple[str, int]]:
    """The top-level packages of import statements, with their lines."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from ((alias.name.partition(".")[0], node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"line {node.lineno}: imports are absolute, so that floors can be read off them"
            yield (node.module or "").partition(".")[0], node.lineno


def at_module_level(tree: ast.Module) -> Iterator[ast.AST]:
    """Statements that run when the module is imported; `if TYPE_CHECKING:` does not."""
    waiting: list[ast.AST] = list(tree.body)
    while waiting:
        node = waiting.pop()
        yield node
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            waiting += node.orelse
            continue
        waiting += ast.iter_child_nodes(node)


def test_the_floors_are_there():
    assert {path.relative_to(ROOT).parts[0] for path in FILES} == set(OWN)
    assert len(FILES) > 40


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_point_down(path):
    floor = path.relative_to(ROOT).parts[0]
    tree = ast.parse(path.read_text())
    for name, line in imported(ast.walk(tree)):
        if name in OWN and name != floor:
            assert name in BELOW[floor], f"{path}:{line}: {floor} must not know {name}"
    for name, line in imported(at_module_level(tree)):
        fine = name in {*sys.stdlib_module_names, *REQUIRED, *OWN}
        assert fine, f"{path}:{line}: {name} is no requirement of the core; import it where it is used"


def test_the_walk_sees_what_it_should():
    tree = ast.parse(
        "from typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n    import jax\nelse:\n    import einops\n"
        "try:\n    import numpy\nexcept ImportError:\n    import scipy\n"
        "class A:\n    import json\n    def f(self):\n        import matplotlib\n"
    )
    assert {name for name, _ in imported(at_module_level(tree))} == {"typing", "einops", "numpy", "scipy", "json"}


def run(code: str, *path: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:0] = {[str(p) for p in path]!r}\n{code}"],
        cwd=path[0],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize("package", ["hardware", "layouts"])
@pytest.mark.parametrize("kind", ["module", "package"])
def test_a_shadowing_module_is_named(tmp_path, package, kind):
    stray = tmp_path / f"{package}.py" if kind == "module" else tmp_path / package / "__init__.py"
    stray.parent.mkdir(exist_ok=True)
    stray.write_text("x = 1\n")
    done = run("import meshlib", tmp_path, ROOT)
    assert done.returncode != 0
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: meshlib needs its own package"), done.stderr
    assert f"'{package}'" in last
    assert str(stray.resolve()) in last
    assert "rename that file or take its folder off the path" in last


def test_the_lower_floors_stand_alone(tmp_path):
    code = "import hardware.slices, layouts, sys\nprint(sorted(set(sys.modules) & {'meshlib', 'jax', 'matplotlib'}))"
    done = run(code, tmp_path, ROOT)
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr


def test_importing_meshlib_brings_nothing_heavy(tmp_path):
    heavy = ("jax", "torch", "tensorflow", "matplotlib", "scipy", "pandas")
    done = run(f"import meshlib, sys\nprint([m for m in {heavy} if m in sys.modules])", tmp_path, ROOT)
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr


@pytest.mark.parametrize("package", [meshlib, meshlib.layers, meshlib.models, meshlib.optimize, layouts, hardware])
def test_public_names_are_listed_once_and_there(package):
    names = public_names(package)
    assert len(names) > 8
    assert all(hasattr(package, name) for name in names)
