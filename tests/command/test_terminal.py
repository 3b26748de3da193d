"""Commands in terminals and pipes: forty mistakes, every width, JSON, colours, interrupts, what they write."""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import meshlib as mtf
from meshlib.command import main
from meshlib.command.arguments import parser
from meshlib.command.output import folded
from meshlib.command.terminal import Progress, bar
from tests.effort import deep, each
from tests.paths import ROOT

SMALL = (
    "--set layers=2 --set d_model=64 --set heads=4 --set kv_heads=4 --set head_dim=16 --set d_ff=128 --set vocab=128"
)
NET = """
import meshlib as mtf

def build(batch=64, hidden=128):
    b, k, h = mtf.Dimension("batch", batch), mtf.Dimension("k", 32), mtf.Dimension("hidden", hidden)
    y = mtf.relu(mtf.einsum([mtf.input("x", [b, k]), mtf.variable("w", [k, h])], reduced_dims=[k]))
    loss = mtf.reduce_mean(y)
    return {"loss": loss}, mtf.optimize.SgdOptimizer(0.1).minimize(loss)

def unnamed():
    raise ValueError("a value of mine")
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "net.py").write_text(NET)
    (tmp_path / "config.json").write_text('{"model_type": "lama"}')
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "bad.py").write_text("def build(:\n")
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    return tmp_path


def run_words(argv: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    """Exit status, output, errors."""
    try:
        status = main(argv)
    except SystemExit as end:
        status = int(str(end.code))
    out, err = capsys.readouterr()
    return status, out, err


def run(typed: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    """Exit status, output, errors."""
    return run_words(typed.split(), capsys)


# What is typed, and what the one line says: the name, and what to do.
FORTY = {
    "no command": ("", "required: COMMAND"),
    "a command misspelt": ("serch gpt2 --slice v5e-8", "no command 'serch'; did you mean 'search'?"),
    "a command of another tool": ("train gpt2", "no command 'train'"),
    "an option without a command misspelt": ("--verison", "no option --verison; did you mean '--version'?"),
    "an option misspelt": ("plan gpt2 --slce v5e-8", "no option --slce; did you mean '--slice'?"),
    "an option of another command": ("plan gpt2 --slice v5e-8 --objective usd", "no option --objective"),
    "an option far from any": ("plan gpt2 --slice v5e-8 --zzz", "no option --zzz"),
    "two programs": ("plan gpt2 palm-540b --slice v5e-8", "unexpected argument 'palm-540b'"),
    "a model misspelt": ("plan lama2-70b --slice v5e-8", "no model 'lama2-70b'; did you mean 'llama2-70b'?"),
    "a model of images misspelt": ("plan resnet50 --slice v5e-8", "did you mean 'resnet-50'?"),
    "a model of a known family": ("plan qwen3-8b --slice v5e-8", "another is a config.json"),
    "an option cut short": ("serve gpt2 --slice v5e-8 --out page.html", "no option --out; did you mean '--outputs'?"),
    "a step too large to verify": (
        "verify gpt2 --set layers=1 --set d_model=64 --set heads=4 --set head_dim=16 --set d_ff=64 --batch 512 --mesh "
        "data:2",
        "flops a step: make it small",
    ),
    "layers without end": ("plan gpt2 --slice v5e-8 --set layers=1_000_000_000", "layers must be at most 100,000"),
    "a dim in two Unicode forms": ("plan net.py --slice v5e-8 --layout bate\u0301:data@data:8", "write 'bat\\xe9'"),
    "a schedule without stages": ("plan gpt2 --slice v5e-8 --set schedule=1f1b", "give its stages, too"),
    "stages that do not divide devices": ("plan gpt2 --slice v5e-8 --set stages=3", "12 microbatches"),
    "a model that is none": ("plan qqqqqq --slice v5e-8", "meshlib models lists them"),
    "a slice misspelt": ("plan gpt2 --slice v5-256", "unknown chip 'v5'; known chips are"),
    "a slice of a wrong size": ("plan gpt2 --slice v5e-7", "v5e-7"),
    "no slice": ("serve gpt2", "required: --slice"),
    "a chip misspelt": ("slices v5x", "no chip 'v5x'; did you mean"),
    "a chip that is none": ("slices h100", "no chip 'h100'; there are"),
    "a setting misspelt": ("plan gpt2 --slice v5e-8 --set layer=3", "layers"),
    "a setting far from any": ("plan gpt2 --slice v5e-8 --set zzz=3", "there are name, layers, d_model, heads"),
    "a setting of a function misspelt": ("plan net.py --slice v5e-8 --set hiden=3", "hiden"),
    "a setting without a value": ("plan gpt2 --slice v5e-8 --set layers", "--set must be NAME=VALUE"),
    "microbatches that do not divide": ("plan gpt2 --slice v5e-8 --set accumulation=3", "32 % 3 = 2"),
    "slots nowhere": ("plan gpt2 --slice v5e-8 --set slots_on_host=2", "slots_on_host must be True or False"),
    "an optimizer misspelt": ("plan gpt2 --slice v5e-8 --set optimizer=adamm", "did you mean 'adam'?"),
    "a training step of images": ("plan resnet-50 --slice v3-8 --set accumulation=2", "no field 'accumulation'"),
    "a setting of images misspelt": ("plan resnet-50 --slice v3-8 --set clases=10", "classes"),
    "remat of images": ("plan resnet-50 --slice v3-8 --remat full", "--remat is for Transformers"),
    "a length of images": ("plan resnet-50 --slice v3-8 --length 8", "--length is for Transformers"),
    "a layout misspelt": ("plan gpt2 --slice v5e-8 --layout fdsp@fsdp:8", "did you mean 'fsdp'"),
    "an option of a command before it": ("--json plan gpt2 --slice v5e-8", "options of a command come after it"),
    "a command for help": ("help plan", "write meshlib COMMAND --help"),
    "a mesh that is a number": ("plan gpt2 --slice v5e-8 --mesh 8", "--mesh: '8' has no ':'; a mesh is AXIS:SIZE"),
    "a layout of nothing": ("plan gpt2 --slice v5e-8 --layout=", "--layout: nothing given; write LAYOUT@MESH"),
    "a setting of another type": (
        "plan gpt2 --slice v5e-8 --set layers=two",
        "TransformerConfig: layers must be an integer, got str 'two'",
    ),
    "a layout misspelt, without a mesh": ("plan gpt2 --slice v5e-8 --layout fsdpp", "did you mean 'fsdp'"),
    "a layout of a function by name": ("explain net.py --layout fsdp@data:8", "give rules, such as batch:data"),
    "a layout of images misspelt": ("plan resnet-50 --slice v3-8 --layout dta@data:8", "did you mean 'data'"),
    "a dim misspelt": ("explain net.py --layout bach:data@data:8", "did you mean 'batch'"),
    "an axis misspelt": ("explain net.py --layout batch:dta@data:8", "dta"),
    "a layout without a mesh": ("plan gpt2 --slice v5e-8 --layout fsdp", "say on which mesh"),
    "no name of a file": ("report gpt2 --slice v5e-8 --out=", "--out is empty; name a file"),
    "a mesh of another size": ("plan gpt2 --slice v5e-8 --layout fsdp@fsdp:4", "4"),
    "a mesh without a layout of a function": ("plan net.py --slice v5e-8 --mesh data:8", "give --layout RULES"),
    "a mesh that no layout takes": ("plan gpt2 --slice v5e-8 --mesh rows:2;cols:4", "without --layout"),
    "a mesh for a search": ("plan gpt2 --slice v5e-8 --search --mesh data:8", "--sizes"),
    "a choice misspelt": ("plan gpt2 --slice v5e-8 --remat fulll", "no choice 'fulll'; did you mean 'full'?"),
    "a compiler misspelt": ("plan gpt2 --slice v5e-8 --compiler xla", "no choice 'xla'"),
    "a batch that is no number": ("plan gpt2 --slice v5e-8 --batch many", "a whole number of at least 1, got 'many'"),
    "a file that is missing": ("plan missing.py --slice v5e-8", "no file missing.py"),
    "a file misspelt": ("plan nett.py --slice v5e-8", "no file nett.py; did you mean 'net.py'?"),
    "the end of a file misspelt": ("plan broken.jsn --slice v5e-8", "did you mean 'broken.json'?"),
    "an option unlike any": ("plan gpt2 --slice v5e-8 --price 3", "no option --price\n"),
    "a value of a switch": ("plan gpt2 --slice v5e-8 --json=yes", "--json takes no value, got 'yes': write --json"),
    "an option before the command, misspelt": ("--jsno plan gpt2", "no option --jsno; did you mean '--json'?"),
    "a mesh of another size, without a layout": ("plan gpt2 --slice v5e-8 --mesh data:3", "use data:8"),
    "more than the positions": ("plan gpt2 --slice v5e-8 --length 2048", "or use --set max_length=2048"),
    "no axes": ("search gpt2 --slice v5e-8 --axes 0", "--axes: must be a whole number of at least 1, got '0'"),
    "a config that is missing": ("plan missing.json --slice v5e-8", "missing.json"),
    "a config of another model": ("plan config.json --slice v5e-8", "lama"),
    "a config that is not JSON": ("plan broken.json --slice v5e-8", "broken.json"),
    "a function that is missing": ("plan net.py:bild --slice v5e-8", "no function 'bild'"),
    "a file that is not Python": ("plan bad.py --slice v5e-8", "SyntaxError"),
    "a function that raises": ("plan net.py:unnamed --slice v5e-8", "ValueError: a value of mine (net.py:11)"),
    "a trace below a file": ("trace gpt2 --slice v5e-1 --out net.py/trace.json", "net.py is a file"),
    "a report below a file": ("report gpt2 --slice v5e-1 --out net.py/plan.html", "net.py is a file"),
    "a slice given twice": (
        "plan gpt2 --slice v5e-8 --slice v6e-8",
        "--slice: given twice, 'v5e-8' and 'v6e-8'; a run takes one",
    ),
    "a batch given twice": (
        "plan gpt2 --slice v5e-8 --batch 8 --batch 4",
        "--batch: given twice, 8 and 4; a run takes",
    ),
    "a setting given twice": (
        "plan gpt2 --slice v5e-8 --set layers=2 --set layers=3",
        "layers is given twice, 2 and 3",
    ),
    "an option without its value": ("plan gpt2 --slice", "expected one argument: the slice, such as v5e-256"),
    "a folder without a config": ("plan empty --slice v5e-8", "the folder empty has no config.json"),
    "an array for a model": ("plan gpt2 --slice v5e-8 --arg x=f32[3]", "--arg is for JAX functions"),
    "an optimizer for a model": ("plan gpt2 --slice v5e-8 --optimizer sgd", "--optimizer is for JAX functions"),
    "names for a function": (
        "plan net.py --slice v5e-8 --names x=batch",
        "leave it out for net.py:build, or give them",
    ),
    "model files for a model": ("plan gpt2 --slice v5e-8 --models .", "--models is for MaxText configurations"),
    "rows that are no number": ("estimate gpt2 --slice v5e-8 --rows x", "0 for all of them, got 'x'"),
    "a report that is not a page": ("report gpt2 --slice v5e-1 --out plan.pdf", "must end in .html"),
    "a check that is not Python": ("init gpt2 --slice v5e-1 --out plan.txt", "must end in .py"),
    "values without a search": ("plan gpt2 --slice v5e-8 --try batch=1,2", "--try is for a search; add --search"),
    "a time without a search": ("plan gpt2 --slice v5e-8 --seconds 5", "--seconds is for a search; add --search"),
    "a length for serving": ("serve gpt2 --slice v5e-1 --length 64", "serving has --context and --prompt"),
    "a check that is there": ("init gpt2 --slice v5e-1 --out net.py", "net.py exists already"),
    "serving a model of images": ("serve resnet-50 --slice v3-8", "serve takes a Transformer"),
    "serving too long a context": ("serve gpt2 --slice v5e-1 --context 4096", "1024"),
    "a plot of another kind": (f"serve gpt2 --slice v5e-1 --context 64 --batch 1 {SMALL} --plot a.nope", "a.nope"),
    "a mesh of another size than the slice's": ("check gpt2 --slice v5e-4 --layout fsdp@fsdp:8", "use fsdp:4"),
    "a listing on another slice": ("explain gpt2 --slice v5e-8 --layout fsdp@fsdp:16", "use fsdp:8"),
    "a mesh of a search": ("search net.py --slice v5e-8 --mesh data:8", "meshlib search --sizes"),
    "a rank of no target": ("plan gpt2 --slice v5e-8 --rank 2", "--rank goes with --emit"),
    "a backend of no compiler": ("plan gpt2 --slice v5e-8 --backend cpu", "--backend goes with --compile"),
    "an option as a setting": ("plan gpt2 --slice v5e-8 --set remat=full", "as an option, --remat full"),
    "a batch as a setting": ("plan gpt2 --slice v5e-8 --set batch=8", "as an option, --batch 8"),
    "a chip in other letters": ("slices V5E", "no chip 'V5E'; did you mean 'v5e'?"),
    "a model by its public name": ("plan meta-llama/Meta-Llama-3-8B --slice v5e-8", "did you mean 'llama3-8b'?"),
    "a model without its size": ("dims mixtral", "did you mean 'mixtral-8x7b'?"),
    "serving an encoder": ("serve bert-base --slice v5e-1", "serve takes decoders, and bert-base is an encoder"),
    "serving an encoder-decoder": ("serve t5-small --slice v5e-4 --context 64", "t5-small is an encoder-decoder"),
    "a dim that is none": ("explain net.py --layout zzz:data@data:8", "there are batch, k, hidden"),
    "a compiled program that is missing": ("explain step.hlo.txt --slice v5e-8", "no file step.hlo.txt; name"),
    "a layout that does not divide": (
        "explain gpt2 --set d_ff=3070 --layout tensor@tensor:16",
        "use --set d_ff=3072",
    ),
    "a report on two slices": ("report gpt2 --slice v5e-8,v6e-8 --out a.html", "is not a slice name; write a TPU"),
    "a report without an end": ("report gpt2 --slice v5e-8 --out plan", "name it plan.html"),
    "a check in no file": ("init gpt2 --slice v5e-8 --out tests", "name it tests.py"),
    "one layout beside none": ("compare gpt2 --slice v5e-8 --layout fsdp@fsdp:8", "at least two --layout"),
    "a load without its rate": ("serve gpt2 --slice v5e-8 --prompts 20 --outputs 10", "give --rate or --trace"),
    "a load in words": ("serve gpt2 --slice v5e-8 --rate 20 --prompts x --outputs 20", '"100-2000" (all alike)'),
    "a trace into a folder": ("trace net.py --slice v5e-8 --layout batch:a@a:8 --out .", ". is a folder; name a file"),
    "a size with a point": ("dims net.py --set hidden=1.5", "the size must be an integer, not 1.5"),
    "a size below one": ("dims net.py --set hidden=-5", "the size must be at least 1, not -5"),
    "a layout in other signs": ("explain gpt2 --layout fsdp@fsdp=8", "a mesh is AXIS:SIZE"),
    "a dim on two axes": ("explain net.py --layout batch:a;batch:b@a:4;b:2", "join their axes with '+'"),
    "a slice with a comma": ("plan gpt2 --slice v5e-8,v5e-9", "the nearest are v5e-4, v5e-8, v5e-16"),
    "no slices": ("plan gpt2 --slice 0*v5e-8", "the number of slices must be at least 1, not 0"),
    "a run of two lengths": ("plan gpt2 --slice v5e-8 --tokens 1e9 --steps 5", "not allowed with argument --tokens"),
    "rows that are none": ("validate --file empty", "empty"),
    "figures of two kinds": ("validate --talks --machine", "leave out --machine"),
    "records of nothing": ("records missing out", "expected a folder or a file, found none at 'missing'"),
    "records in another form": ("records empty out --compression zip", "did you mean 'gzip'?"),
    "a plan for another library": ("plan gpt2 --slice v5e-8 --emit jax", "there are maxtext, flax"),
    "an objective of two": ("search net.py --slice v5e-8 --objective usd,step", "objective must be 'step_seconds'"),
    "a search of no time": ("search net.py --slice v5e-8 --seconds -3", "must be a positive number, got '-3'"),
    "a search continued from code": ("search net.py --slice v5e-8 --resume net.py", "is not a file of estimates"),
    "microbatches of a pipeline": ("plan gpt2 --slice v5e-8 --set stages=4 --set microbatches=3", "use 2 or 4"),
    "a plot without a name": ("profile net.py --slice v5e-8 --layout batch:a@a:8 --plot", "expected one argument"),
    "options of two commands": ("verify net.py --layout batch:a@a:4 --seed 3", "no option --seed"),
    "a latency of nothing": ("serve gpt2 --slice v5e-1 --within 0", "a positive number, got '0'"),
}


@each("typed, wanted", FORTY, parts=2)
def test_forty_mistakes_get_one_line_that_says_what_to_do(
    typed: str, wanted: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if "--plot" in typed:
        pytest.importorskip("matplotlib", reason="a picture needs the extra 'plot'")
    status, out, err = run(typed, capsys)
    assert status == 2, (out, err)
    assert wanted in err, err
    lines = err.splitlines()
    assert lines[0].startswith("meshlib"), err
    assert "Traceback" not in err
    assert len([line for line in lines if line.startswith("usage: ")]) <= 1
    assert not lines[0].startswith("usage"), "the fault comes first"
    assert len(lines[0]) < 400


def test_there_are_forty() -> None:
    assert len(FORTY) >= 40


# ------------------------------------------------------------ width, JSON, colours

COMMANDS = {
    "plan": f"plan gpt2 --slice v5e-8 --layout fsdp@fsdp:8 --remat full {SMALL}",
    "plan of images": "plan resnet-18 --slice v3-8 --set height=32 --set width=32 --set stem='small' --set classes=10",
    "search": "search net.py --slice v5e-4 --axes 1 --workers 1",
    "report": "report net.py --slice v3-8 --layout batch:a@a:8 --out new/plan.html",
    "init": "init net.py --slice v3-8 --layout batch:a@a:8 --out new/ci/test_plan.py",
    "serve": f"serve gpt2 --slice v5e-4 --context 64 --batch 8 {SMALL}",
    "explain": "explain net.py --layout batch:data@data:8",
    "estimate": "estimate net.py --slice v3-8 --layout batch:a@a:8",
    "profile": "profile net.py --slice v3-8 --layout batch:a@a:8",
    "compare": "compare net.py --slice v3-8 --layout batch:a@a:8 --layout hidden:a@a:8",
    "check": "check net.py --layout batch:a@a:8;b:1",
    "verify": "verify net.py --layout batch:a@a:4",
    "trace": "trace net.py --slice v3-8 --layout batch:a@a:8 --out new/trace.json",
    "dims": "dims net.py",
    "slices": "slices v5e",
    "models": "models",
}


PAGE = (ROOT / "meshlib/command/README.md").read_text()
SLOW = ("plan", "serve")
BY_NAME = ("models", "slices")  # dicts whose keys are data
KEYED = {"peak_bytes_by_kind", "bound_seconds_modelled", "seconds_modelled", "busy_seconds_modelled", "rows",
         "collectives_modelled"}  # fmt: skip


def keys_of(data: Any) -> set[str]:
    """The names in JSON, without those of dicts that are keyed by data, or that the page names together."""
    if isinstance(data, list):
        return set().union(*map(keys_of, data))
    if not isinstance(data, dict):
        return set()
    return {*data}.union(*(keys_of(value) for name, value in data.items() if name not in KEYED))


@each("typed", COMMANDS, parts=2)
def test_every_command_fits_its_terminal_and_prints_json(
    typed: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for width in (80, 60) if deep() else (60,):
        monkeypatch.setenv("COLUMNS", str(width))
        status, out, err = run(f"{typed} --force" if typed.startswith("init") else typed, capsys)
        assert status == 0, (out, err)
        assert err == ""
        assert out.strip()
        assert "\033" not in out
        assert max(len(line) for line in out.splitlines()) <= width, out
    if typed.split()[0] in SLOW and not deep():  # JSON of these is read by tests of their own
        return
    again = f"{typed} --force" if typed.startswith("init") else typed
    status, out, err = run(f"{again} --json", capsys)
    assert (status, err) == (0, "")
    data: Any = json.loads(out)
    assert data
    names = keys_of([*data.values()] if typed.split()[0] in BY_NAME else data)
    assert {name for name in names if f"`{name}`" not in PAGE} == set()


def test_one_mfu_whoever_prints_it(capsys: pytest.CaptureFixture[str]) -> None:
    typed = f"plan gpt2 --slice v5e-8 --layout fsdp@fsdp:8 --remat full {SMALL}"
    _, out, _ = run(typed, capsys)
    _, data, _ = run(f"{typed} --json", capsys)
    assert {key for key in keys_of(json.loads(data)) if f"`{key}`" not in PAGE} == set()
    mfu = json.loads(data)["plans"][0]["mfu_modelled"]
    assert f"MFU {mfu:.1%}*" in out
    _, data, _ = run(f"estimate gpt2 --slice v5e-8 --layout fsdp@fsdp:8 --remat full {SMALL} --json", capsys)
    assert json.loads(data)[0]["mfu_modelled"] == mfu


def test_a_plan_names_the_largest_collective_of_a_group_and_lines_of_the_model(
    capsys: pytest.CaptureFixture[str],
) -> None:
    _, out, _ = run("plan llama2-7b --slice v5e-8 --layout fsdp@fsdp:8 --remat full --set layers=2 --batch 8", capsys)
    gathers = next(line for line in out.splitlines() if "all_gather over fsdp" in line)
    assert "kernel" in gathers, gathers
    _, out, _ = run(f"explain gpt2 --slice v5e-8 {SMALL}", capsys)
    assert "models/blocks.py:" in out
    assert "unknown line" not in out


def test_a_mesh_without_a_layout_is_completed(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run(f"plan gpt2 --slice v5e-8 --mesh fsdp:2;tensor:4 --remat full {SMALL}", capsys)
    assert (status, err) == (0, "")
    assert "fsdp:2;tensor:4" in out
    assert "fsdp+sequence" in out


def test_plan_prints_notes_and_ends_with_what_to_run_next(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(f"plan gpt2 --slice v5e-8 --layout fsdp@data:2;fsdp:4 --remat full {SMALL}", capsys)
    assert "note: axis 'data' splits nothing" in out
    assert "2 groups of 4 devices do the same work" in out
    assert re.search(r"--layout 'data\+fsdp@data:2;fsdp:4' uses all axes: [^\n]*\* instead of", " ".join(out.split()))
    last = out.splitlines()[out.splitlines().index("next:") + 1 :]
    shell = "\n".join(last).replace("\\\n", " ").splitlines()
    assert [shlex.split(line)[:2] for line in shell] == [["meshlib", name] for name in ("report", "init", "search")]
    again = parser().parse_args(shlex.split(shell[0])[1:])
    assert (again.layout, again.remat, again.out) == (["fsdp@data:2;fsdp:4"], "full", "plan.html")
    status, quiet, _ = run(f"plan gpt2 --slice v5e-8 --layout fsdp@fsdp:8 --remat full --quiet {SMALL}", capsys)
    assert status == 0
    assert "next:" not in quiet


def test_the_default_batch_gives_every_device_a_sequence(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run("plan llama3.1-8b --slice v5e-64 --set layers=2 --remat full --json", capsys)
    found = json.loads(out)
    assert found["batch"] == 64
    assert found["plans"][0]["name"] == "fsdp"


def test_layouts_that_cannot_fit_are_bounded(capsys: pytest.CaptureFixture[str]) -> None:
    typed = "plan llama3.1-8b --slice v5e-64 --json"
    best, *others = json.loads(run(typed, capsys)[1])["plans"]
    excluded = {(p["name"], p["remat"]): p for p in others if "least_bytes" in p}
    assert best["fits"]
    assert {("fsdp", "matmuls"), ("fsdp+tensor", "full")} <= excluded.keys()
    for (name, remat), plan in excluded.items():
        _, out, _ = run(f"{typed} --layout {name}@{plan['mesh']} --remat {remat}", capsys)
        (exact,) = json.loads(out)["plans"]
        assert plan["fits"] is exact["fits"] is False
        assert exact["capacity_bytes"] < plan["least_bytes"] <= exact["peak_bytes"]


def names_of(written: str, file: Path) -> dict[str, Any]:
    """What a file that init has written defines, if it is at a path."""
    names: dict[str, Any] = {"__file__": str(file)}
    exec(compile(written.replace('@pytest.fixture(scope="module")\n', ""), "test_plan.py", "exec"), names)
    return names


def results_of(written: str, file: Path, program: mtf.Program) -> dict[str, str]:
    """What the tests of a file that init has written say of a program: "" or the failure."""
    names, results = names_of(written, file), {}
    for name in [name for name in names if name.startswith("test_")]:
        try:
            names[name](program)
            results[name] = ""
        except AssertionError as fault:
            results[name] = str(fault) or "failed"
    return results


LLAMA = {
    **{"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 128},
    **{"intermediate_size": 128, "num_key_value_heads": 4, "max_position_embeddings": 128},
}
STEP = "--remat offload --set accumulation=2 --set slots_on_host=True"
CHECKED = {
    "a preset": f"init gpt2 --slice v5e-8 --layout fsdp@fsdp:8 {SMALL} --batch 16 --length 64 {STEP}",
    "a function": "init net.py --slice v3-8 --layout batch:a@a:8",
    "another compiler": f"init gpt2 --slice v5e-8 --layout fsdp@fsdp:8 {SMALL} --batch 8 --compiler gspmd --remat full",
    "MaxText": "init base.yml base_num_decoder_layers=2 base_emb_dim=64 vocab_size=256 --slice 2*v5e-16",
    "a config.json": "init llama/config.json --slice v5e-8 --layout fsdp@fsdp:8 --remat full --batch 8 --length 64",
}


def test_notes_on_layouts_that_are_not_the_best_name_their_rows(capsys: pytest.CaptureFixture[str]) -> None:
    small = SMALL.replace("kv_heads=4", "kv_heads=2").split()
    command = ["plan", "mixtral-8x7b", "--slice", "v5e-16", "--length", "64", "--remat", "full", *small]
    assert main([*command, "--layout", "fsdp@fsdp:16", "--layout", "fsdp+expert@fsdp:2;expert:8"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert re.search(r" 2 \S+ ms \S+ \S+ [GM]iB full fsdp\+expert fsdp:2;expert:8 note on 2: each of 8 shards", out)
    assert main([*command, "--layout", "fsdp+expert@fsdp:2;expert:8", "--set", "shard_factor=2.0"]) == 0
    assert "worst case" not in capsys.readouterr().out


def test_a_plan_in_microbatches_is_emitted_as_python_and_for_maxtext(capsys: pytest.CaptureFixture[str]) -> None:
    plan = f"plan gpt2 --slice v5e-8 --layout fsdp@fsdp:8 {SMALL} --batch 32 --length 64 {STEP}"
    _, source, _ = run(f"{plan} --emit python", capsys)
    exec(source, names := dict[str, Any]())
    assert "accumulation=2, slots_on_host=True" in source
    capsys.readouterr()  # what the source prints
    _, text, _ = run(f"{plan} --json", capsys)
    planned = json.loads(text)
    assert planned["step"] == {"accumulation": 2, "slots_on_host": True}
    assert planned["plans"][0]["sent_bytes"] == names["program"].sent_bytes
    _, keys, _ = run(f"{plan} --emit maxtext", capsys)
    expected = {"per_device_batch_size=2", "gradient_accumulation_steps=2", "optimizer_memory_host_offload=true"}
    assert expected <= set(keys.splitlines())


@each("typed", CHECKED if deep() else {name: typed for name, typed in CHECKED.items() if name != "another compiler"})
def test_the_check_that_init_writes_passes_and_fails_when_the_plan_changes(
    typed: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """After it was moved with the files that it reads, too, as into another checkout."""
    if "base.yml" in typed:
        pytest.importorskip("yaml", reason="configurations need PyYAML")
    project, moved = folder / "project", folder / "moved"
    for path in (project, moved):
        shutil.rmtree(path, ignore_errors=True)
    (project / "checks").mkdir(parents=True)
    (project / "llama").mkdir()
    (project / "net.py").write_text(NET)
    (project / "base.yml").write_text("run_name: ''\n")
    (project / "llama/config.json").write_text(json.dumps(LLAMA))
    os.chdir(project)
    assert run(f"{typed} --out checks/test_plan.py", capsys)[0] == 0
    os.chdir(folder)
    project.rename(moved)
    file = moved / "checks/test_plan.py"
    written = file.read_text()
    assert str(folder) not in written
    program = names_of(written, file)["program"]()
    results = results_of(written, file, program)
    assert len(results) == 4
    assert not any(results.values()), results
    changed = {"SENT_BYTES = ": "SENT_BYTES = 0 * ", "USD_PER_1000_STEPS = ": "USD_PER_1000_STEPS = 0 * "}
    for old, new in changed.items():
        assert any(results_of(written.replace(old, new, 1), file, program).values()), old
    with mtf.Graph():
        other = mtf.lower({"y": mtf.reduce_sum(mtf.input("x", "a:64"))}, mesh=program.mesh)
    assert (
        "the program is not as in"
        in results_of(written, file, other)["test_its_collectives_and_memory_are_as_they_were"]
    )
    if deep():
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(file)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
        assert "4 passed" in done.stdout, done.stdout


def test_a_search_of_a_model_begins_with_what_plan_gives(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from meshlib import searching

    begun: dict[str, Any] = {}

    def search(*args: Any, also: Any = (), **options: Any) -> None:
        begun.update(also=also, batch=options["batch"])
        raise KeyboardInterrupt

    monkeypatch.setattr(searching, "search", search)
    status, out, err = run("plan llama2-70b --slice v5e-256 --search --remat full --set layers=64", capsys)
    assert (status, err) == (130, "\n")
    assert re.fullmatch(r"best so far: fsdp\S* on \S+, [\d.]+ s\* a step, as by plan\n", out), out
    assert begun["batch"] < 256  # which doesn't fit
    assert ("fsdp:32;tensor:8", "tensor") in [
        (mesh, rule.axes[0]) for mesh, rules in begun["also"] for rule in rules.rules
    ]


def test_a_report_has_what_the_compiler_said(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    pytest.importorskip("jax", reason="compilers are asked by JAX")
    from meshlib.command import compiled

    asked: list[Any] = []
    monkeypatch.setattr(compiled, "compiled_for", lambda programs, *rest: asked.extend(programs) or ["kept it all"])
    status, _, _ = run("report net.py --slice v3-8 --layout batch:a@a:8 --compile --backend cpu --out c.html", capsys)
    assert (status, len(asked)) == (0, 1)
    assert "kept it all" in (folder / "c.html").read_text()


def test_compare_says_in_a_sentence_what_changed_and_why(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run("compare net.py --slice v3-8 --layout batch:a@a:8 --layout hidden:a@a:8", capsys)
    sentence = " ".join(line.strip() for line in out.partition("\n\n")[0].splitlines())
    assert re.fullmatch(
        r"hidden:a on a:8 is [\d.]+% (slower|faster)\* \(.* to .*\) and takes .* memory, because .*\.", sentence
    ), sentence


def test_a_plan_on_several_slices_names_the_cheapest_and_the_fastest(capsys: pytest.CaptureFixture[str]) -> None:
    shared = "--batch 16 --length 128 --remat full --layout data@data:4"
    status, out, err = run(f"plan gpt2 --slice v5e-4,v6e-4 {shared}", capsys)
    assert (status, err) == (0, "")
    rows = [line.split() for line in out.splitlines() if line.startswith(("v5e-4 ", "v6e-4 "))]
    assert max(map(len, out.splitlines())) <= 80
    _, text, _ = run(f"plan gpt2 --slice v5e-4,v6e-4 {shared} --json", capsys)
    plans = {plan["slice"]: plan["plans"][0] for plan in json.loads(text)}
    by_price = sorted(plans, key=lambda name: plans[name]["usd_per_step_modelled"])
    assert [row[0] for row in rows] == list(plans) == by_price
    fastest = min(plans, key=lambda name: plans[name]["step_seconds_modelled"])
    assert out.startswith(f"gpt2 on 2 slices: cheapest on {by_price[0]}, fastest on {fastest}\n")
    assert run("plan gpt2 --slice v5e-4,v6e-4 --emit maxtext", capsys)[0] == 2


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--version", capsys) == (0, f"meshlib {mtf.__version__}\n", "")


def test_colours_are_for_terminals_without_no_color(monkeypatch: pytest.MonkeyPatch) -> None:
    from meshlib.command import output

    terminal = io.StringIO()
    terminal.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr(output.sys, "stdout", terminal)
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    output.say_verdict("fits", True)
    monkeypatch.setenv("NO_COLOR", "1")
    output.say_verdict("fits", True)
    assert terminal.getvalue() == "\033[32;1mfits\033[0m\nfits\n"


@pytest.mark.parametrize("line", ["a" * 200, "  layout  " + "a:b;" * 60, "words " * 50, "x " + "path/" * 50, ""])
def test_lines_are_cut_without_losing_a_letter(line: str) -> None:
    parts = list(folded(line, 40))
    assert all(len(part) <= 40 for part in parts)
    assert "".join("".join(parts).split()) == "".join(line.split())


def test_progress_has_units_and_the_time_that_is_left(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bar(98, 280, "layouts; best: model:32, 36.7 us", 10) == (
        "[#######.............] 98 of 280 layouts, about 19 s left; best: model:32, 36.7 us"
    )
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(Progress, "DELAY", 0.0)
    with Progress() as shown:
        shown(1, 2, "rows")
    assert "1 of 2" in capsys.readouterr().err
    with Progress(quiet=True) as hidden:
        hidden(1, 2, "rows")
    assert capsys.readouterr().err == ""


def test_an_interrupted_search_prints_the_best_so_far(folder: Path) -> None:
    code = (
        "import sys, meshlib.searching.exploration as e, meshlib.command\n"
        "old, count = e.Search._learn, [0]\n"
        "def learn(self, chosen):\n"
        "    old(self, chosen)\n"
        "    count[0] += 1\n"
        "    if count[0] == 1: raise KeyboardInterrupt\n"
        "e.Search._learn = learn\n"
        "sys.exit(meshlib.command.main(['search', 'net.py', '--slice', 'v5e-16', '--workers', '1']))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True,
        text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 130, done.stderr
    assert done.stdout.startswith("best: mesh")
    assert "Interrupted" in done.stdout
    assert "Traceback" not in done.stderr


def test_ctrl_c_elsewhere_is_quiet(folder: Path) -> None:
    (folder / "slow.py").write_text(
        "import signal, time\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)  # also where the tests themselves ignore it\n"
        "print('begun', flush=True)\n"
        "time.sleep(60)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "meshlib", "plan", "slow.py", "--slice", "v5e-8"], cwd=folder, stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)}, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == 130
    assert err.strip() == ""


def test_a_reduced_batch_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run("plan llama3-8b --slice v5e-8 --remat full", capsys)
    assert "note: the usual batch here, 8 sequences, does not fit: reduced to 4, which do" in out
    assert "no batch fits" not in out


def test_devices_share_long_sequences(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run("plan llama3.1-8b --slice v5e-64 --length 131072 --remat full --json", capsys)
    assert (status, json.loads(out)["batch"]) == (0, 8)


@pytest.mark.parametrize(
    ("command", "why"),
    {
        "llama3-8b --slice v5e-4": "no batch fits; they need 8 devices",
        "t5-large --slice v2-8 --layout data@data:8": "no batch fits this layout; split over all 8 devices",
    }.items(),
)
def test_no_smaller_batch_is_tried_where_variables_slots_and_gradients_do_not_fit(
    command: str, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    _, out, _ = run(f"plan {command} --remat full", capsys)
    assert f"GiB variables, slots and gradients: {why}" in " ".join(out.split())
    assert "reduced" not in out


def test_the_first_verdict_shows_while_other_layouts_are_tried(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    _, _, err = run("plan maxtext-16b --set layers=2 --slice v5e-16 --remat full", capsys)
    first, *others = [part for part in err.split("\r\033[K") if part]
    assert re.search(r"\] 1 of \d layouts, .*; (fits|none fits): fsdp, [\d.]+ m?s", first), err
    assert others
