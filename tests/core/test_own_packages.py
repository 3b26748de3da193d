"""Another distribution that writes into the folders of `meshlib`, `layouts` or `hardware` is named at import."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("meshlib", "layouts", "hardware")


@pytest.mark.parametrize("overwritten", PACKAGES)
@pytest.mark.parametrize("imported", PACKAGES)
def test_an_overwritten_package_is_named_by_each_of_the_others(tmp_path: Path, imported: str, overwritten: str) -> None:
    if imported == overwritten:
        pytest.skip("the other distribution's own file runs")
    for name in PACKAGES:
        (tmp_path / name).mkdir()
        for file in (ROOT / name).glob("*.py") if name != "meshlib" else [ROOT / "meshlib" / "__init__.py"]:
            shutil.copy(file, tmp_path / name)
    (tmp_path / overwritten / "__init__.py").write_text("'''Three-dimensional geometry.'''\n")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import {imported}"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: "), done.stderr
    assert str((tmp_path / overwritten / "__init__.py").resolve()) in last
    assert "install meshlib-tpu in an environment of its own" in last
