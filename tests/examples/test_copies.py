"""Every example is one file that can be copied out and run on its own, beside an installed meshlib."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.effort import some
from tests.paths import ROOT

EXAMPLES = sorted(path for path in (ROOT / "examples").rglob("*.py") if path.name != "__init__.py")
EXTRAS = ["jax", "matplotlib", "PIL"]
RUN = [ROOT / "examples" / "mnist.py", ROOT / "examples" / "machine" / "systolic.py"]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_imports_no_other(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        assert not [name for name in names if name.split(".")[0] in ("examples", "tests")], path


@pytest.mark.parametrize("path", some(EXAMPLES, RUN), ids=lambda path: path.stem)
def test_a_copy_runs(path: Path, tmp_path: Path) -> None:
    """Without any extra: JAX, matplotlib and Pillow are not there."""
    copy = shutil.copy(path, tmp_path)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    code = f"import runpy, sys; sys.argv = [{copy!r}, '--help']; sys.modules |= dict.fromkeys({EXTRAS})"
    done = subprocess.run(
        [sys.executable, "-c", f"{code}; runpy.run_path({copy!r}, run_name='__main__')"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "usage" in done.stdout


def test_the_page_of_the_examples_has_them_all() -> None:
    page = (ROOT / "examples" / "README.md").read_text()
    assert [path.name for path in EXAMPLES if f"`{path.relative_to(ROOT).as_posix()}`" not in page] == []
