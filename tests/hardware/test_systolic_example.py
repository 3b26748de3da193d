"""The example prints what the array does, refuses what does not fit, and writes frames where it can."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from examples import systolic

ROOT = Path(__file__).resolve().parents[2]


def test_default_shows_every_register_of_the_first_cycles(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    assert systolic.main([]) == 0
    text = capsys.readouterr().out
    assert "vector 0: W [1, 2, 3] = [14, 32, 50]" in text
    assert "7 cycles" in text
    first = text[text.index("cycle 1:") : text.index("cycle 2:")]
    for piece in ("3 of 9 processing elements busy", "x0[1] = -1 >", "p -1 v", "p 4 v", "p 5 v", "w 8"):
        assert piece in first
    assert "y0[0]=14" in text[text.index("cycle 2:") : text.index("cycle 3:")]


def test_other_sizes_and_loading(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    assert systolic.main(["--size", "2x4", "--batch", "5", "--mode", "shadow"]) == 0
    text = capsys.readouterr().out
    assert "11 cycles" in text  # 2 + 5 + 2 + 4 - 2
    assert "(w " in text


def test_too_wide_and_senseless(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert systolic.main(["--size", "8"]) == 2
    assert "8x8 needs 111 columns of text, the terminal has 80; use at most 5" in capsys.readouterr().err
    assert systolic.main(["--batch", "0"]) == 2
    assert systolic.main(["--save", "x.txt"]) == 2
    assert "writes .gif or .png, not 'x.txt'" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        systolic.main(["--size", "big"])


def test_save_without_matplotlib_says_so(capsys, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert systolic.main(["--save", str(tmp_path / "x.gif")]) == 2
    assert "needs matplotlib" in capsys.readouterr().err


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="matplotlib is an extra")
@pytest.mark.filterwarnings("ignore")
def test_save(tmp_path, capsys):
    assert systolic.main(["--save", str(tmp_path / "all.gif")]) == 0
    assert (tmp_path / "all.gif").read_bytes()[:4] == b"GIF8"
    assert systolic.main(["--save", str(tmp_path / "frames" / "f.png")]) == 0
    assert len(list((tmp_path / "frames").glob("f-*.png"))) == 7


def test_runs_as_a_script():
    command = [sys.executable, "-m", "examples.systolic", "--size", "1", "--batch", "1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0
    assert "1 cycles" in done.stdout
