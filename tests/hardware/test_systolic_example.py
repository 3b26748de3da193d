"""The example prints what the array does, refuses what does not fit, and writes frames where it can."""

import importlib.util
import subprocess
import sys
import types

import pytest

from examples.machine import systolic
from tests.paths import ROOT


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


@pytest.mark.parametrize("mode", ["noload", "serial", "shadow", "shadow_unskewed"])
def test_boxes_keep_their_height_and_show_shadow_registers_where_there_are_any(mode, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    assert systolic.main(["--mode", mode, "--size", "2x3"]) == 0
    frames = [frame.split("\n\n")[0] for frame in capsys.readouterr().out.split("\ncycle ")[1:]]
    assert len({frame.count("\n") + (frame[-1] == "+") for frame in frames}) <= 2  # the line of outputs may be empty
    assert len({sum("|" in line for line in frame.splitlines()) for frame in frames}) == 1
    assert all(("(w" in frame) == (mode != "noload") for frame in frames)
    if mode != "noload":  # cycle 0: the last row of weights enters, nothing is in use yet
        assert "(w 0)" in frames[0]
        assert any(f"(w {w})" in frames[0] for w in range(-9, 10) if w)


def test_a_saved_frame_has_the_shadow_registers(monkeypatch):
    texts = []

    class Axes:
        """What `State.plot` needs of matplotlib's axes."""

        def text(self, x, y, text, **style):
            texts.append(text)

        def __getattr__(self, name):
            return lambda *args, **options: None

    weights, vectors = systolic.operands(3, 3, 3, 0)
    run = systolic.MXU(3, 3).run(weights.T, vectors, "shadow", states=True)
    patches = types.SimpleNamespace(Rectangle=lambda *place, **style: None)
    monkeypatch.setitem(sys.modules, "matplotlib", types.SimpleNamespace(patches=patches))
    monkeypatch.setitem(sys.modules, "matplotlib.patches", patches)
    run.states[1].plot(Axes(), shadow=True)
    assert [text for text in texts if text != "w 0\n(w 0)"] == ["w 0\n(w 2)", "w 0\n(w 6)", "w 0\n(w 3)"]


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--delay", "-1"], "must be seconds from 0 to 3600, not '-1'"),
        (["--delay", "inf"], "not 'inf'"),
        (["--seed", "-1"], "must be a whole number from 0 to 999999999, not '-1'"),
        (["--batch", "-1"], "not '-1'"),
        (["--size", "3²"], "not '3²'"),
    ],
)
def test_arguments_out_of_range(arguments, part, capsys):
    with pytest.raises(SystemExit):
        systolic.main(arguments)
    assert part in capsys.readouterr().err


def test_runs_too_long_to_watch(capsys):
    assert systolic.main(["--batch", "999999999"]) == 2
    assert "takes 1000000003 cycles; at most 2000 are shown" in capsys.readouterr().err
    assert systolic.main(["--size", "40", "--save", "x.png"]) == 2
    assert "at most 24 rows and columns, not 40x40" in capsys.readouterr().err


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


def test_runs_as_a_script_from_anywhere(tmp_path):
    command = [sys.executable, str(ROOT / "examples" / "machine" / "systolic.py"), "--size", "1", "--batch", "1"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0
    assert "1 cycles" in done.stdout


def test_a_closed_pipe_is_no_fault():
    command = [sys.executable, str(ROOT / "examples" / "machine" / "systolic.py"), "--mode", "serial", "--batch", "500"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline().startswith("y = W x")
        process.stdout.close()
        assert process.stderr.read() == ""
        assert process.wait() == 0
