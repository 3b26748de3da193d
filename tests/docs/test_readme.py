"""What the README promises: two set-up commands, and a first program that does what the text shows."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import meshlib as mtf
from tests.paths import ROOT

README = (ROOT / "README.md").read_text()


def test_exactly_two_setup_commands_of_one_line() -> None:
    commands = [line for line in README.splitlines() if "pip install" in line]
    assert len(commands) == 2
    assert all(line.startswith("python3 -m venv .venv && ") for line in commands)
    assert commands[0].endswith("examples/mnist.py")
    assert commands[1].endswith("-m pytest -n auto --dist worksteal")


def run_blocks(text: str, count: int | None = None) -> dict[str, object]:
    """The names that the README's first Python blocks leave behind, run one after the other."""
    space: dict[str, object] = {}
    for code in re.findall(r"```python\n(.*?)```", text, re.S)[:count]:
        exec(compile(code.replace("print(", "str("), "model.py", "exec"), space)
    return space


def test_all_python_blocks_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("jax", reason="a block runs on JAX: the extra 'jax'")
    monkeypatch.chdir(tmp_path)  # one of them writes a trace
    smaller = README  # the first program at its own size is below
    for large, small in (
        ('"batch", 512', '"batch", 64'),
        ('image_preset("resnet-50")\nrate', 'image_preset("resnet-18").replace(blocks=(1, 1), features=4)\nrate'),
        ('"pixels", 784', '"pixels", 64'),
        ('"hidden", 1024', '"hidden", 64'),
        ("rand(512, 784), np.arange(512)", "rand(64, 64), np.arange(64)"),
    ):
        assert large in smaller
        smaller = smaller.replace(large, small)
    space = run_blocks(smaller)
    assert space["report"].ok


def test_first_program_runs_and_sends_what_the_readme_shows() -> None:
    space = run_blocks(README, 1)
    program = space["program"]
    assert isinstance(program, mtf.Program)
    table = mtf.collectives_table(program.collectives)
    shown = re.search(r"```text\n(phase.*?)```", README, re.S)
    assert shown is not None
    for line in shown.group(1).splitlines():
        if line.strip() != "...":
            assert line in table, line


def test_links_point_to_files() -> None:
    for path in re.findall(r"`((?:examples|tests)/[\w/]+\.py)", README):
        assert (ROOT / path).is_file(), path


def test_nothing_is_left_to_fill_in() -> None:
    assert not re.search(r"^[A-Z]+_[A-Z]+$|Error: \.\.\.", README, re.M)
