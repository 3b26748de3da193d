"""`meshlib` at the command line: its answers, its exit status, and what it says to mistakes."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import meshlib as mtf
from tests.command.typed import BUILD, SMALL, run_words
from tests.effort import each
from tests.paths import ROOT

FILE = f"""{BUILD}
def wrong():
    return 3

def broken():
    return missing

number = 4
"""


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "net.py"
    path.write_text(FILE)
    return str(path)


def run(*argv: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    """Exit status, output, errors."""
    return run_words([*argv], capsys)


def test_report_writes_the_page_of_the_plan(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    path = tmp_path / "plan.html"
    status, out, err = run("report", "gpt2", "--slice", "v5e-8", "--out", str(path), capsys=capsys)
    assert (status, err) == (0, "")
    assert " ".join(out.split()).startswith(f"{path}: Fits: ")
    html = path.read_text()
    assert "gpt2 on v5e-8" in html
    assert html.count('id="alternative-') >= 3


def test_plan_says_the_verdict_first_in_80_columns(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run("plan", "gpt2", "--slice", "v5e-8", "--remat", "full", capsys=capsys)
    assert (status, err) == (0, "")
    assert out.splitlines()[0] == "gpt2 on v5e-8: fits"
    assert max(map(len, out.splitlines())) <= 80
    assert "tokens/s*" in out
    assert "* modelled; all others exact" in out


@pytest.mark.parametrize("model", [["gpt2", *SMALL.split(), "--length", "128"], ["resnet-18"]])
def test_one_example_on_one_chip_is_in_the_singular(model: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run("plan", *model, "--slice", "v5e-1", "--batch", "1", "--layout", "data@data:1", capsys=capsys)
    shown = ["on each of 1 device\n", "1 image: " if model == ["resnet-18"] else "1 sequence of 128 tokens: "]
    assert [text for text in shown if text not in out] == []
    assert re.findall(r"\b1 (?:chips|devices|images|sequences|values|rows)\b", out) == []


def test_plan_that_does_not_fit_says_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(
        "plan", "llama2-70b", "--slice", "v5e-16", "--batch", "16", "--layout", "fsdp@fsdp:16", capsys=capsys
    )
    assert status == 1
    assert out.startswith("llama2-70b on v5e-16: DOES NOT FIT, ")
    assert "\n  do         " in out


def test_plan_agrees_with_the_library(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--slice", "v5e-8", "--batch", "8", "--length", "64", "--layout", "fsdp@fsdp:8", "--remat", "full"]
    _, out, _ = run("plan", "gpt2", *argv, "--json", capsys=capsys)
    (plan,) = json.loads(out)["plans"]
    config = mtf.models.preset("gpt2")
    with mtf.Graph():
        outputs, updates = mtf.models.train_step(config, 8, 64)
        program = mtf.lower(outputs, updates, "fsdp:8", mtf.models.layout("fsdp", config, "fsdp:8"))
    est = mtf.estimate(program, "v5e-8")
    assert plan["step_seconds_modelled"] == est.step_seconds
    assert (plan["peak_bytes"], plan["sent_bytes"], plan["fits"]) == (est.memory.peak_bytes, est.sent_bytes, est.fits)


def test_the_other_commands(file: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    layout = ["--layout", "batch:data@data:8"]
    two = [*layout, "--layout", "hidden:model@model:8"]
    trace = tmp_path / "trace.json"
    plan = ["plan", file, "--slice", "v3-8", *layout]
    rows: list[tuple[list[str], int, str]] = [
        (["explain", file, *layout], 0, "because"),
        (["explain", "gpt2", "--batch", "8", "--length", "16", "--layout", "data", "--mesh", "data:8"], 0, "data:8"),
        (["estimate", file, "--slice", "v3-8", *layout], 0, "step time"),
        (["compare", file, "--slice", "v3-8", *two], 0, "ratio"),
        (["check", file, *layout], 0, "good"),
        (["check", file, "--layout", "batch:data@data:7"], 1, "1 fault\n"),
        (["check", "gpt2", "--layout", "fsdp@fsdp:7"], 1, "768 % 7"),
        (["check", "gpt2", "--mesh", "model:16"], 0, "  rules batch:model;d_model:model?;d_ff:model?\n"),
        (["verify", file, "--set", "batch=8", *layout], 0, "ok"),
        (f"verify llama2-7b {SMALL} --batch 2 --length 8 --layout tensor@tensor:2".split(), 0, "ok"),
        (["trace", file, "--slice", "v3-8", *layout, "--out", str(trace)], 0, "perfetto"),
        (["profile", file, "--slice", "v3-8", *two], 0, "the MXU works"),
        (["profile", file, "--slice", "v3-8", *layout, "--rows", "-1"], 2, "0 for all of them, got '-1'"),
        ([*plan, "--epochs", "2", "--examples", "640"], 0, "20 steps of 64 examples"),
        ([*plan, "--evaluate-every", "9"], 2, "give its length by --tokens"),
        ([*plan, "--steps", "9", "--evaluation-examples", "9"], 2, "only models have evaluations"),
        ([*plan, "--tokens", "1e9"], 2, "has a dim 'length'"),
        (["slices", "v5e"], 0, "v5e-256"),
        (["search", file, "--slice", "v5e-4", "--axes", "1", "--seconds", "600"], 0, "All are accounted for"),
        (["search", file, "--slice", "v5e-4", "--axes", "1", "--seconds", "600", "--json"], 0, '"exact": true'),
        (["plan", file, "--slice", "v5e-4", "--axes", "1"], 2, "no option --axes"),
        (["plan", file, "--slice", "v3-8", *two], 0, "net.py:build on v3-8: fits"),
        (["plan", file, "--slice", "v5e-1", "--seconds", "600"], 0, "best: mesh device:1"),
        (["plan", file, "--slice", "v5e-1", "--set", "batch=1_000_000_000"], 1, "nothing fits; every layout"),
    ]  # fmt: skip
    for argv, wanted, text in rows:
        status, out, err = run(*argv, capsys=capsys)
        assert status == wanted, (argv, out, err)
        assert text in out + err, (argv, out, err)
    assert json.loads(trace.read_text())["traceEvents"]


# What is typed (FILE stands for a file as above), and what the answer has to say.
MISTAKES: list[tuple[str, str]] = [
    ("", "required: COMMAND"),
    ("pln gpt2", "no command 'pln'; did you mean 'plan'?"),
    ("plan", "required: program, --slice"),
    ("plan gpt2", "required: --slice"),
    ("plan gpt-2 --slice v5e-8", "did you mean 'gpt2'"),
    ("plan nothing --slice v5e-8", "no model 'nothing'"),
    ("plan gpt2 --slice v5e-7", "the nearest are v5e-1, v5e-4, v5e-8"),
    ("plan gpt2 --slice v9-8", "v9"),
    ("plan gpt2 --slice 8xH100", "8xH100"),
    ("plan gpt2 --slice 8", "'8'"),
    ("plan gpt2 --slice v5e-8 --batch 0", "at least 1"),
    ("plan gpt2 --slice v5e-8 --batch x", "a whole number of at least 1, got 'x'"),
    ("plan gpt2 --slice v5e-8 --length -1", "at least 1"),
    ("plan gpt2 --slice v5e-8 --remat some", "no choice 'some'; there are full, matmuls, none"),
    ("plan gpt2 --slice v5e-8 --set layers", "NAME=VALUE"),
    ("plan gpt2 --slice v5e-8 --set layer=3", "layer"),
    ("plan gpt2 --slice v5e-8 --set layers=x", "layers"),
    ("plan gpt2 --slice v5e-8 --set layers=0", "layers"),
    ("plan gpt2 --slice v5e-8 --layout fsdp", "on which mesh"),
    ("plan gpt2 --slice v5e-8 --layout fsdp@fsdp:8 --mesh fsdp:8", "leave out --mesh"),
    ("plan gpt2 --slice v5e-8 --length 4096", "1024"),
    ("plan missing.py --slice v5e-8", "no file missing.py"),
    ("plan FILE:nothing --slice v5e-8", "no function 'nothing'; it has build, wrong, broken"),
    ("plan FILE:number --slice v5e-8", "no function 'number'"),
    ("plan FILE:wrong --slice v5e-8", "must return (outputs, updates)"),
    ("plan FILE:broken --slice v5e-8", "NameError: name 'missing' is not defined (net.py:14)"),
    ("plan FILE --slice v5e-8 --batch 3", "--set batch=..."),
    ("plan FILE --slice v5e-8 --remat full", "is for models"),
    ("plan FILE --slice v5e-8 --set nothing=3", "unexpected keyword argument 'nothing'"),
    ("plan FILE --slice v5e-8 --seconds 0", "a positive number"),
    ("plan FILE --slice v5e-8 --workers 0", "a whole number of at least 1, got '0'"),
    ("plan FILE --slice v5e-8 --steps few", "a whole number of at least 1, got 'few'"),
    ("plan FILE --slice v5e-8 --tokens=-1e9", "a positive number, got '-1e9'"),
    ("plan FILE --slice v5e-8 --tokens many", "a positive number, got 'many'"),
    ("plan FILE --slice v5e-8 --epochs nan --examples 640", "a positive number, got 'nan'"),
    ("search gpt2", "required: --slice"),
    ("search FILE --slice v5e-8 --objective speed", "objective must be"),
    ("search FILE --slice v5e-8 --fix batch", "batch"),
    ("search FILE --slice v5e-8 --fix batch:data --sizes rows:2", "no rule of --fix"),
    ("search FILE --slice v5e-8 --fix bach:data", "did you mean 'batch'"),
    ("search FILE --slice v5e-8 --fix batch:data --sizes data:3", "sizes take 3 devices"),
    ("search FILE --slice v5e-8 --resume /", "/ can't be read: it is a folder"),
    ("search FILE --slice v5e-8 --forbid bach", "has dim 'bach', which the program does not have"),
    ("search FILE --slice v5e-8 --axes -1", "at least 1"),
    ("search FILE --slice v5e-8 --try batch", "--try must be NAME=VALUE,VALUE"),
    ("search FILE --slice v5e-8 --try size=3", "unexpected keyword argument 'size'"),
    ("search FILE --slice v5e-8 --layout batch:data@data:4", "has 4 devices; v5e-8 has 8"),
    ("plan gpt2 --slice v5e-8 --length 64 --search --try stage=2", "did you mean 'stages'"),
    ("search FILE --slice v5e-8 --resume /dev/null/kept.json --axes 1", "/dev/null"),
    ("explain gpt2", "--layout LAYOUT@MESH"),
    ("explain FILE", "--layout LAYOUT@MESH"),
    ("explain FILE --slice v5e-8", "--layout RULES@MESH"),
    ("explain FILE --layout batch:rows@cols:2", "no axis 'rows' in mesh cols:2"),
    ("explain FILE --layout bach:rows@rows:2", "bach"),
    ("explain FILE --layout batch:rows@rows", "rows"),
    ("explain FILE --layout batch:rows@rows:0", "rows"),
    ("explain FILE --layout batch:rows@rows:3", "64 % 3 = 1"),
    ("explain gpt2 --layout fdsp@fsdp:8", "did you mean 'fsdp'"),
    ("explain gpt2 --layout @fsdp:8", "no layout before the @"),
    ("plan gpt2 --slice v5e-8 --epochs 3", "--epochs and --examples"),
    ("explain gpt2 --layout fsdp@rows:2;cols:4", "needs an axis"),
    ("estimate FILE --layout batch:data@data:8", "required: --slice"),
    ("estimate FILE --slice v3-8 --layout batch:data@data:4", "4"),
    ("estimate FILE --slice v3-8 --layout batch:data@data:8 --rows -3", "rows"),
    ("compare FILE --slice v3-8 --layout batch:data@data:8", "at least two"),
    ("check FILE", "--layout LAYOUT@MESH"),
    ("verify gpt2 --layout tensor@tensor:2", "make it small"),
    ("trace FILE --slice v3-8 --layout batch:data@data:8", "required: --out"),
    ("trace FILE --slice v3-8 --layout batch:data@data:8 --out /dev/null/t.json", "/dev/null/t.json can't be written"),
    ("trace FILE --slice v3-8 --layout batch:data@data:8 --layout k:data@data:8 --out t.json", "one --layout"),
    ("slices h100", "h100"),
    ("slices v5e v5p", "unexpected argument 'v5p'"),
    ("validate --file /nowhere/rows.json", "/nowhere"),
    ("validate --file", "expected one argument"),
]


@each("typed, text", {typed: (typed, text) for typed, text in MISTAKES})
def test_mistakes_get_one_clear_message_and_exit_status_2(
    typed: str, text: str, file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, err = run(*typed.replace("FILE", file).split(), capsys=capsys)
    assert (status, out) == (2, ""), err
    assert text in err, err
    assert "Traceback" not in err
    assert "unknown line" not in err
    first, *rest = err.splitlines()
    command = (typed.split() or [""])[0]
    assert first.startswith(("meshlib: ", f"meshlib {command}: ")), first
    assert len(first) < 500, first
    assert not any(line.startswith("usage:") for line in rest[1:])  # the usage is one line, behind the fault


def test_closed_pipes_and_plain_terminals_are_quiet() -> None:
    line = f"PYTHONIOENCODING=ascii '{sys.executable}' -m meshlib slices | head -1"
    piped = subprocess.run(line, shell=True, cwd=ROOT, capture_output=True, text=True, check=True)
    assert len(piped.stdout.splitlines()) == 1
    assert piped.stderr == ""
    closed = subprocess.run(f"'{sys.executable}' -m meshlib slices >&-", shell=True, cwd=ROOT, capture_output=True)
    assert (closed.returncode, closed.stdout, closed.stderr) == (0, b"", b"")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_an_answer_that_cannot_be_written_is_one_line() -> None:
    with open("/dev/full", "w") as full:
        found = subprocess.run(
            [sys.executable, "-m", "meshlib", "slices"], cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert found.returncode == 2
    assert found.stderr == "meshlib slices: the answer can't be written: No space left on device\n"
