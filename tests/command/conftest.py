"""A folder with what commands are tried on; sessions of models and the parser, which tests share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from meshlib.command import arguments
from meshlib.command.subject import Subject
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


@pytest.fixture(autouse=True, scope="package")
def _shared() -> Iterator[None]:
    """One parser, and one session for each model, batch and length: most tests plan the same few small ones.

    What a session lowered before changes none of its programs: `tests/lowering/test_sessions.py`.
    """
    initialise, parser, kept = Subject.__init__, arguments.parser(), {}

    def of_shared_sessions(self: Subject, *args: Any, **fields: Any) -> None:
        initialise(self, *args, **fields)
        if self.config is not None or self.image is not None:
            key = (self.config, self.image, repr((self.sizes, self.arguments)))
            self._sessions, self._least_memory = kept.setdefault(key, ({}, {}))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Subject, "__init__", of_shared_sessions)
        patch.setattr(arguments, "parser", lambda: parser)
        yield
