"""The language-model example: it learns, continues from a checkpoint exactly, and answers wrong flags in one line."""

from __future__ import annotations

import re
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

import meshlib as mtf
from examples.text import transformer
from tests.effort import some

TINY = ["--size", "tiny", "--length", "16", "--batch", "8", "--sample", "5", "--every", "2"]


@pytest.fixture
def text(tmp_path: Path) -> Path:
    file = tmp_path / "text.txt"
    file.write_bytes(b"to be or not to be, that is the question: " * 200)
    return file


def losses(out: str) -> list[float]:
    return [float(x) for x in re.findall(r"^step +\d+ +loss (\S+)", out, flags=re.M)]


def test_it_learns_and_shows_what_it_did(text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert transformer.main([*TINY, "--text", str(text), "--steps", "12", "--every", "4", "--lr", "0.02"]) == 0
    out = capsys.readouterr().out
    found = losses(out)
    assert len(found) == 3
    assert found[-1] < 0.6 * found[0]
    for shown in ("unigram entropy", "tokens/s on v3-8 (modelled)", "sample", "all_reduce  tensor", "MFU"):
        assert shown in out


def test_experts_learn_too_and_what_they_drop_is_shown(text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = [*TINY, "--text", str(text), "--steps", "8", "--every", "4", "--lr", "0.01", "--experts", "4"]
    assert transformer.main(flags) == 0
    out = capsys.readouterr().out
    first, last = losses(out)
    assert last < first
    assert re.search(r"^step +8 .*\d% dropped$", out, flags=re.M)
    assert "all_to_all" in out
    assert "note:" not in out


def test_a_run_goes_on_from_its_folder(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = [*TINY, "--text", str(text), "--steps", "4"]
    programs = transformer.build(transformer.parse(flags))
    monkeypatch.setattr(transformer, "build", lambda args: programs)  # which do not depend on the checkpoint
    for steps, shown in (("2", ["2"]), ("4", ["4"])):
        assert transformer.main([*flags[:-1], steps, "--folder", str(tmp_path / "run")]) == 0
        assert re.findall(r"^step +(\d+)", capsys.readouterr().out, flags=re.M) == shown
        kept = sorted(p.name for p in (tmp_path / "run").iterdir())
        assert kept == ["history.csv", "history.jsonl", f"step_00000000{steps}.safetensors"]
    assert transformer.main([*flags, "--folder", str(tmp_path / "run")]) == 0
    assert "note: --steps 4 counts from the first step" in capsys.readouterr().out


def curve(mesh: str, layout: str, text: Path) -> np.ndarray:
    flags = ["--text", str(text), "--mesh", mesh, "--layout", layout, "--precision", "float32", "--steps", "2"]
    args = transformer.parse([*TINY, *flags])
    sim = mtf.simulate(transformer.build(args)[0], seed=0)
    return np.array([float(sim.step(batch)["loss"]) for batch in islice(transformer.examples(args), 2)])


def test_layouts_do_not_change_the_loss(text: Path) -> None:
    wanted = curve("one:1", "", text)
    meshes = {
        "data": "data:4",
        "zero1": "data:4",
        "fsdp": "fsdp:4",
        "tensor": "tensor:4",
        "sequence": "tensor:4",
        "batch:rows;d_ff:cols": "rows:2;cols:2",
    }
    for layout, mesh in some([*meshes.items()], [("batch:rows;d_ff:cols", "rows:2;cols:2")]):
        np.testing.assert_allclose(curve(mesh, layout, text), wanted, rtol=1e-4, err_msg=layout)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--mesh", "data:2;tensor:2"], r"has 4 positions, but slice v3-8 has 8 devices"),
        (["--layout", "2e"], r"no layout '2e'"),
        (["--mesh", "data:1;tensor:8"], r"4 % 8 = 4"),
        (["--text", "/nonexistent"], r"no such file or folder"),
        (["--remat", "ful"], r"ful"),
        (["--slice", "v3-9"], r"v3-8"),
        (["--batch", "5"], r"5 % 2 = 1"),
    ],
)
def test_wrong_flags_give_one_message(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert transformer.main([*TINY, *flags]) == 2
    err = capsys.readouterr().err
    assert err.startswith("transformer.py: ")
    assert re.search(message, err)
    assert "Traceback" not in err


def test_more_choices_than_experts_are_a_mistake(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        transformer.parse(["--experts", "8", "--top-k", "9"])
    assert "--top-k 9 is more than --experts 8" in capsys.readouterr().err
    assert transformer.parse(["--experts", "1"]).top_k == 2  # unless given, of one expert too
