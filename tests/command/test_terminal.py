"""Commands in terminals and pipes: every width, JSON, colours, interrupts, what they write."""

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
from tests.command.typed import NET, SMALL, run
from tests.effort import deep, each
from tests.paths import ROOT

pytestmark = pytest.mark.usefixtures("folder")

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


def test_figures_are_equal_whoever_prints_them(capsys: pytest.CaptureFixture[str]) -> None:
    typed = f"plan gpt2 --slice v5e-8 --layout fsdp@fsdp:8 --remat full {SMALL}"
    _, out, _ = run(typed, capsys)
    _, data, _ = run(f"{typed} --json", capsys)
    assert {key for key in keys_of(json.loads(data)) if f"`{key}`" not in PAGE} == set()
    mfu = json.loads(data)["plans"][0]["mfu_modelled"]
    assert f"MFU {mfu:.1%}*" in out
    _, data, _ = run(f"estimate gpt2 --slice v5e-8 --layout fsdp@fsdp:8 --remat full {SMALL} --json", capsys)
    (est,) = json.loads(data)
    assert est["mfu_modelled"] == mfu
    sizes = sorted(((size, kind) for kind, size in est["peak_bytes_by_kind"].items()), reverse=True)
    largest = " ".join(out.partition("most of it ")[2].partition("  step")[0].split())
    assert [part.split(" ", 2)[2] for part in largest.split(", ")] == [kind for _, kind in sizes[:3]]


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


def test_the_default_length_is_of_whole_tiles(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    opt = {"model_type": "opt", "ffn_dim": 256, "hidden_size": 128, "max_position_embeddings": 2048, "vocab_size": 512}
    file = tmp_path / "opt.json"
    file.write_text(json.dumps({**opt, "num_attention_heads": 8, "num_hidden_layers": 2}))
    _, out, _ = run(f"dims {file}", capsys)
    assert re.search(r"^length +2,048 ", out, re.MULTILINE), "of 2,050 positions, which no axis of a mesh divides"


def test_layouts_that_cannot_fit_are_bounded(capsys: pytest.CaptureFixture[str]) -> None:
    typed = "plan llama3.1-8b --slice v5e-64 --json"
    best, *others = json.loads(run(typed, capsys)[1])["plans"]
    excluded = {(p["name"], p["remat"]): p for p in others if "least_bytes_modelled" in p}
    assert best["fits"]
    assert {("fsdp", "matmuls"), ("fsdp+tensor", "full")} <= excluded.keys()
    for (name, remat), plan in excluded.items():
        _, out, _ = run(f"{typed} --layout {name}@{plan['mesh']} --remat {remat}", capsys)
        (exact,) = json.loads(out)["plans"]
        assert plan["fits"] is exact["fits"] is False
        assert exact["capacity_bytes"] < plan["least_bytes_modelled"] <= exact["needed_bytes_modelled"]


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
        in results_of(written, file, other)["test_its_dims_collectives_and_memory_are_as_they_were"]
    )
    if deep():
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(file)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
        assert "4 passed" in done.stdout, done.stdout


def test_the_check_of_a_tight_plan_takes_it_as_tight(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    typed = "init llama2-7b --slice v5e-8 --batch 4 --remat full --layout"
    verdicts = {
        "sequence@tensor:8": ("tight=True", "tight: a whole run may not fit"),
        "data+tensor@data:2;tensor:4": ("", "fails: the"),
    }
    for layout, (argument, said) in verdicts.items():
        status, out, _ = run(f"{typed} {layout} --force", capsys)
        assert (status, said in " ".join(out.split())) == (int(not argument), True), out
        written = (folder / "test_plan.py").read_text()
        assert ("tight=True" in written) == bool(argument)
    names = names_of(written, folder / "test_plan.py")
    assert "does not fit" in results_of(written, folder / "test_plan.py", names["program"]())["test_it_fits"]


def test_compare_names_the_step_of_each(capsys: pytest.CaptureFixture[str]) -> None:
    typed = f"compare gpt2 --slice v5e-8 --layout fsdp@fsdp:8 --layout data@data:8 {SMALL} --length 64"
    for more, said in (("", "512 sequences"), ("--batch 8 --remat none", "8 sequences")):
        _, out, _ = run(f"{typed} {more}", capsys)
        each = [line for line in out.splitlines() if line.startswith("each:")]
        assert each == [f"each:   {said} of 64 tokens, remat {'none' if more else 'full'} (--remat)"]


def test_a_search_of_a_model_begins_with_what_plan_gives(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from meshlib import searching

    begun: dict[str, Any] = {}

    def search(*args: Any, also: Any = (), **options: Any) -> None:
        begun.update(also=also, batch=options["batch"])
        raise KeyboardInterrupt

    monkeypatch.setattr(searching, "search", search)
    status, out, err = run("plan llama2-70b --slice v5e-256 --search --remat full --set layers=104", capsys)
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
        r"hidden:a on a:8 is [\d.]+% (slower|faster)\* \(.* to .*\) and needs .* memory, because .*\.", sentence
    ), sentence


def test_compare_takes_other_options_and_models_after_dashes(capsys: pytest.CaptureFixture[str]) -> None:
    shared = "--slice v5e-8 --layout data@data:8 --batch 8 --length 64 --set layers=2 --set vocab=512"
    changes = ("--batch 16", "--set vocab=1024 --remat none", "gpt2-medium --set heads=16", "--slice v5e-4 --batch 4")
    _, out, _ = run(f"compare gpt2 {shared} --json -- {' -- '.join(changes)} --layout data@data:4", capsys)
    data = json.loads(out)
    sentences = [other["sentence"] for other in data["others"]]
    assert [sentence.partition(" is ")[0] for sentence in sentences] == [
        *changes[:3], f"{changes[3]} --layout data@data:4 of v5e-4"[: -len(" of v5e-4")]
    ]  # fmt: skip
    assert [" for 512 tokens" in sentence for sentence in sentences] == [True, False, False, True]
    alone = json.loads(
        run(f"estimate gpt2 {shared} --set d_ff=3072 --remat none --json".replace("512", "1024"), capsys)[1]
    )
    steps = [other["second"]["step_seconds_modelled"] for other in data["others"]]
    assert steps[1] == alone[0]["step_seconds_modelled"], "the other settings stay"
    assert steps[3] < data["first"]["step_seconds_modelled"] < steps[0]


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


def test_ctrl_c_while_modules_load_is_quiet(folder: Path) -> None:
    (folder / "sitecustomize.py").write_text(
        "import sys\n"
        "class Interrupting:\n"
        "    def find_spec(self, name, *rest):\n"
        "        if name == 'meshlib.command':\n"
        "            raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Interrupting())\n"
    )
    environment = {**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"}
    command = [sys.executable, "-m", "meshlib", "slices"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


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


def test_ctrl_c_is_caught_before_anything_large_loads() -> None:
    large = "{'numpy', 'layouts', 'hardware', 'dataclasses'}"
    code = f"import sys, meshlib.__main__; print(*{large} & set(sys.modules))"
    said = subprocess.run([sys.executable, "-S", "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert said.stdout.split() == []


def test_numbers_of_tokens_have_suffixes(capsys: pytest.CaptureFixture[str]) -> None:
    plan = f"plan gpt2 --slice v5e-8 --layout fsdp@fsdp:8 --remat full {SMALL} --tokens"
    runs = [run(f"{plan} {text}", capsys)[1] for text in ("2e10", "20B")]
    assert runs[0] == runs[1]
    assert "610,352 steps of 32.77 k tokens" in runs[0]


def test_a_near_tie_of_engines_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run("plan llama2-70b --slice v6e-64 --layout fsdp@fsdp:64 --remat full", capsys)
    assert "  bound by   hbm " in out
    at_work = r"at work hbm \d\d%\*, mxu \d\d%\* of the step; \d\d%\* of HBM traffic is operands that products"
    assert re.search(at_work, " ".join(out.split()))
    _, out, _ = run("plan llama2-70b --slice v5p-128 --layout fsdp@fsdp:64 --remat full", capsys)
    assert "at work" not in out


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
    first, second, *others = [part for part in err.split("\r\033[K") if part]
    assert re.search(r"\] 1 of \d layouts, .*; fits: fsdp\s*$", first), err
    assert re.search(r"\] 1 of \d layouts, .*; fits: fsdp, [\d.]+ m?s", second), err
    assert others
