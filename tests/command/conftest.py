"""A folder with what commands are tried on."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.command.typed import NET


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "net.py").write_text(NET)
    (tmp_path / "config.json").write_text('{"model_type": "lama"}')
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "bad.py").write_text("def build(:\n")
    (tmp_path / "run.sh").write_text("train --num-layers 2\n")
    (tmp_path / "other.yaml").write_text("hidden: 64\nheads: 4\nsteps: 10\n")
    (tmp_path / "empty").mkdir()
    (tmp_path / "folder.py").mkdir()
    (tmp_path / "empty.json").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    return tmp_path
