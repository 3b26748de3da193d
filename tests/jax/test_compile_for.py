"""The real compiler's verdict, by the same code on CPUs; its reports and refusals; plans beside what it made."""

# ruff: noqa: E402 (whatever needs JAX comes after a look whether it is there)

from __future__ import annotations

import importlib.util
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax", reason="needs JAX: pip install -e '.[jax]'")

import meshlib as mtf
from hardware.chips import CHIPS
from hardware.slices import Slice
from meshlib.command import main
from meshlib.jax import compiling
from meshlib.jax.collectives import scatter_stages
from meshlib.jax.compiling import process, topologies
from meshlib.jax.compiling.matching import differences_of, kept_moves
from meshlib.jax.compiling.memory import memory_of, refusal_of
from meshlib.jax.compiling.messages import Failed
from meshlib.jax.compiling.topologies import topology_of
from meshlib.jax.explaining import Explained, ExplainedCollective
from tests.jax.models import mlp, mlp_feeds

HAS_TPU_COMPILER = importlib.util.find_spec("libtpu") is not None


@pytest.fixture(scope="module")
def programs() -> list[mtf.Program]:
    layouts = (
        ("data:8", "batch:data"),
        ("rows:2;cols:4", "batch:rows;hidden:cols"),
        ("a:8", "batch:a;pixels:a?;hidden:a?"),
    )
    return [*(mlp(*layout) for layout in layouts), imported()]


def imported() -> mtf.Program:
    """A local function with a rule of its own, and with a kink, whose gradient is a local function too."""

    @jax.custom_vjp
    def rounded(x: Any) -> Any:
        return jax.numpy.round(x)

    rounded.defvjp(lambda x: (rounded(x), x), lambda x, dy: (jax.numpy.where(abs(x) < 1, dy, 0),))
    w, x = (jax.ShapeDtypeStruct(shape, "float32") for shape in [(64, 32), (128, 64)])
    graph = mtf.from_jax(
        lambda w, x: jax.numpy.mean(jax.numpy.maximum(rounded(x @ w), 0.1)), w, x, names={"x": "batch k"}
    )
    with graph:
        updates = mtf.optimize.SgdOptimizer(0.1).minimize(graph.loss)
    return mtf.lower(graph.outputs, updates, mesh="data:8", layout="batch:data")


@pytest.fixture(scope="module")
def compiled(programs: list[mtf.Program]) -> list[mtf.Compiled]:
    before = dict(os.environ)
    made: list[mtf.Compiled] = mtf.compile_for(programs, "v5e-8", backend="cpu")
    assert dict(os.environ) == before
    return made


def test_several_programs_in_one_call(compiled: list[mtf.Compiled], programs: list[mtf.Program]) -> None:
    for c, p, passes in zip(compiled, programs, (6, 6, 6, 1), strict=True):  # of products of float32
        assert c.program is p
        assert c.fits
        assert c.memory is not None
        assert c.work is not None
        exact = p.memory.by_kind
        assert c.memory.argument_bytes == pytest.approx(
            sum(exact[k] for k in ("variables", "slots", "inputs")), abs=256
        )
        assert passes * c.work.flops == p.work.mxu_flops
        assert c.headline.startswith("fits, according to XLA's compiler for CPUs")


def test_every_byte_is_planned_or_named(compiled: list[mtf.Compiled], programs: list[mtf.Program]) -> None:
    for c, p in zip(compiled, programs, strict=True):
        named = sum(d.more_bytes for d in c.differences)
        assert c.sent_bytes == pytest.approx(p.sent_bytes + named, abs=1)
        assert all(d.source for d in c.differences)
    assert not compiled[0].differences
    assert not compiled[1].differences
    assert "sends just what was planned" in str(compiled[0])


def test_estimates_price_what_the_compiler_kept(compiled: list[mtf.Compiled], programs: list[mtf.Program]) -> None:
    """Nothing changed costs the same; all_reduces in place of scatters cost more; nothing at all costs nothing."""
    same = mtf.estimate(programs[0], "v5e-8", compiled=compiled[0])
    assert same.step_seconds == pytest.approx(mtf.estimate(programs[0], "v5e-8").step_seconds, rel=1e-6)
    program = sharded()
    planned = mtf.estimate(program, "v5e-8")
    rows = [row(c.kind, [("f32[]", c.payload_bytes)], c.count, c.axes) for c in program.collectives]
    scatter = next(n for n, c in enumerate(program.collectives) if c.kind == "reduce_scatter")
    assert estimated(program, *rows).step_seconds == pytest.approx(planned.step_seconds, rel=1e-6)
    heavy = [*rows]
    heavy[scatter] = replace(rows[scatter], kind="all_reduce", sent_bytes=2 * rows[scatter].sent_bytes)
    assert estimated(program, *heavy).step_seconds > planned.step_seconds * 1.01
    assert estimated(program).exposed_comm_seconds == 0
    with pytest.raises(mtf.GraphError, match="compiled is of another program"):
        mtf.estimate(programs[1], "v5e-8", compiled=compiled[0])
    with pytest.raises(mtf.GraphError, match=r"what mtf\.compile_for returned, got 3"):
        mtf.estimate(programs[1], "v5e-8", compiled=3)


def sharded() -> mtf.Program:
    """A sum that is scattered and a value that is gathered, large enough that bytes decide."""
    with mtf.Graph():
        x, w = mtf.input("x", "batch:4096;k:1024"), mtf.variable("w", "k:1024;h:1024")
        y = mtf.einsum([x, w], output_shape="batch:4096;h:1024")
        return mtf.lower({"y": mtf.rename_dimension(y, "batch", "rows")}, mesh="m:8", layout="k:m;rows:m")


def estimated(program: mtf.Program, *rows: Any) -> mtf.Estimate:
    made = Explained("m", program.mesh, Slice("v5e-8"), rows, mtf.estimate(program, "v5e-8").placement)

    class Made:
        def __init__(self) -> None:
            self.program = program

        def kept_moves(self) -> Any:
            return kept_moves(program, made)

    return mtf.estimate(program, "v5e-8", compiled=Made())


def test_a_saved_step_runs_where_the_devices_are(
    compiled: list[mtf.Compiled], programs: list[mtf.Program], tmp_path: Path
) -> None:
    path = tmp_path / "step"
    compiled[0].save(path)
    loaded = mtf.on_jax(programs[0], checked=False, executable=path)
    own = mtf.on_jax(programs[0], checked=False)
    for feeds in mlp_feeds():
        np.testing.assert_allclose(loaded.step(feeds)["loss"], own.step(feeds)["loss"], rtol=1e-6)
    with pytest.raises(mtf.ProgramError, match="the step of another program"):
        mtf.on_jax(programs[1], checked=False, executable=path).step(mlp_feeds()[0])
    with pytest.raises(mtf.GraphError, match="checked=False"):
        mtf.on_jax(programs[0], executable=path)
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(mtf.ProgramError, match="not a whole file of a compiled step"):
        mtf.on_jax(programs[0], checked=False, executable=path).step(mlp_feeds()[0])


def test_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "net.py"
    file.write_text(
        "import meshlib as mtf\ndef build():\n"
        "    x = mtf.input('x', 'batch:16;k:8')\n    w = mtf.variable('w', 'k:8;h:8')\n"
        "    loss = mtf.reduce_mean(mtf.square(mtf.einsum([x, w], output_shape='batch:16;h:8')))\n"
        "    return {'loss': loss}, mtf.optimize.SgdOptimizer(0.1).minimize(loss)\n"
    )
    layout = ["--layout", "batch:data@data:8", "--slice", "v5e-8", "--compile", "--backend", "cpu"]
    assert main(["plan", str(file), *layout, "--json"]) == 0
    out, err = capsys.readouterr()
    assert "CPU s" in err
    found = json.loads(out)
    assert found["compiled"]["fits"]
    assert found["compiled"]["sent_bytes"] == found["plans"][0]["sent_bytes"]
    assert main(["check", str(file), "--layout", "batch:data@data:8", "--compile"]) == 2
    assert "--compile needs --slice" in capsys.readouterr().err


@pytest.mark.skipif(HAS_TPU_COMPILER, reason="libtpu is installed")
def test_without_the_tpu_compiler_one_line_says_what_to_install(programs: list[mtf.Program]) -> None:
    with pytest.raises(mtf.MissingError, match=r"pip install libtpu .*own\s+terms") as caught:
        mtf.compile_for(programs[0], "v5e-8")
    assert "\n" not in str(caught.value)


@pytest.mark.skipif(not HAS_TPU_COMPILER, reason="needs the TPU compiler: pip install libtpu")
@pytest.mark.parametrize("slice", ["v5e-8", "v4-2x2x2", "v6e-8", "2*v5e-4"])
def test_the_tpu_compiler(slice: str) -> None:
    program = mlp("data:8", "batch:data")
    made = mtf.compile_for(program, slice)
    assert made.fits
    assert made.sent_bytes == pytest.approx(program.sent_bytes + sum(d.more_bytes for d in made.differences), abs=1)


@pytest.mark.parametrize(
    ("program", "slice", "more", "message"),
    [
        ([], "v5e-8", {}, "give a program"),
        (3, "v5e-8", {}, "expected a program from mtf.lower, got int 3"),
        (None, "v5e-16", {}, "8 positions, but slice v5e-16 has 16 devices"),
        (None, "v5e-8", {"backend": "gpu"}, "backend must be 'tpu' or 'cpu', got 'gpu'"),
        (None, "v5e-8", {"timeout_seconds": 0, "backend": "cpu"}, "timeout_seconds must be positive, got 0"),
    ],
    ids=["none", "type", "size", "backend", "timeout"],
)
def test_mistakes_get_one_line(
    programs: list[mtf.Program], program: Any, slice: str, more: dict[str, Any], message: str
) -> None:
    with pytest.raises(mtf.MeshlibError) as caught:
        mtf.compile_for(programs[0] if program is None else program, slice, **more)
    assert message in str(caught.value)


def test_a_process_that_dies_is_told_with_its_last_line(
    programs: list[mtf.Program], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    dying = tmp_path / "python"
    dying.write_text("#!/bin/sh\necho out of luck >&2\nexit 7\n")
    dying.chmod(0o755)
    monkeypatch.setattr(process.sys, "executable", str(dying))
    with pytest.raises(mtf.ProgramError, match="ended with status 7: out of luck"):
        mtf.compile_for(programs[0], "v5e-8", backend="cpu")
    dying.write_text("#!/bin/sh\nexec sleep 60\n")
    with pytest.raises(mtf.ProgramError, match=r"more than the 0\.1 s given"):
        mtf.compile_for(programs[0], "v5e-8", backend="cpu", timeout_seconds=0.1)


# ---------------------------------------------------------------- slices, memory, refusals


@pytest.mark.parametrize(
    ("slice", "name", "options"),
    [
        ("v5e-16", "v5e:4x4", {}),
        ("v4-64", "v4:2x4x4", {"chip_config_name": "megacore"}),
        ("v5p-4x4x8", "v5p:4x4x8", {}),
        ("v6e-1", "v6e:1x1", {"chips_per_host_bounds": (1, 1, 1)}),
        ("2*v5e-256", "v5e:16x16", {"num_slices": 2}),
    ],
)
def test_slices_as_topologies(slice: str, name: str, options: dict[str, Any]) -> None:
    found = topology_of(Slice(slice))
    assert (found.name, found.options) == (name, options)


def test_a_chip_of_your_own_has_no_compiler() -> None:
    own = replace(CHIPS["v5e"], hbm_bytes=1 << 30)
    with pytest.raises(mtf.SliceError, match="not chip 'v5e' with these figures"):
        topology_of(Slice("v5e-4", own))


REPORT = """Memory Space: default (color=0)
Total bytes: 4096 (4.0KiB)
  cumulative_size;       size;       offset; used_by_n_values; shapes_list
  ------------------------------------------------------------
    1.00KiB( 50%);    1.00KiB;            0;                2; 2xf32[16,16]
    1.50KiB( 75%);       512B;         1024;                1; f32[128]

Memory Space: vmem (color=1)
Total bytes: 65536 (64.0KiB)
"""


# CPU seconds and bytes of compiling steps of two layers with libtpu 0.0.42.1, each in a process of its own.
COSTS = {
    ("llama3-8b", "fsdp:4", "fsdp", False): (45.1, 1183 << 20),
    ("mixtral-8x7b", "fsdp:2;expert:2", "fsdp+expert", False): (33.4, 1379 << 20),
    ("mixtral-8x7b", "expert:4", "expert", True): (2.4, 508 << 20),
    ("llama3-8b", "data:2;tensor:2", "data+tensor", True): (1.3, 446 << 20),
}


@pytest.mark.parametrize("step", COSTS)
def test_expected_cost_of_compiling(step: tuple[str, str, str, bool]) -> None:
    preset, mesh, layout, decodes = step
    config = mtf.models.preset(preset)
    experts = config.experts and replace(config.experts, count=4, d_ff=1024)
    config = replace(config, layers=2, d_model=512, heads=4, kv_heads=2, d_ff=1024, vocab=4096, experts=experts)
    with mtf.Graph():
        if decodes:
            built = mtf.models.decode_step(config, 32, 512)
        else:
            built = mtf.models.train_step(config, 16, 256 if experts else 512)
    program = mtf.lower(*built, mesh, mtf.models.layout(layout, config, mesh))
    for expected, measured in zip(compiling.expected_cost(program), COSTS[step], strict=True):
        assert 1 / 3.5 < expected / measured < 3.5


def test_memory_of_a_report() -> None:
    sizes = {"argument": 1024, "output": 600, "alias": 512, "temp": 9999, "generated_code": 32, "peak": 70000}
    found = memory_of(sizes, REPORT)
    assert (found.total_bytes, found.temporary_bytes) == (4096, 4096 - 1024 - 88)
    assert found.largest == ((1024, "2xf32[16,16]"), (512, "f32[128]"))
    assert memory_of(sizes, "").total_bytes == 70000


def test_a_refusal_is_an_answer(programs: list[mtf.Program], monkeypatch: pytest.MonkeyPatch) -> None:
    said = (
        "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space hbm. Used 17.05G of "
        "15.75G hbm. Exceeded hbm capacity by 1.30G.\n\nTotal hbm usage >= 17.30G"
    )
    monkeypatch.setattr(compiling, "answers", lambda *_: [Failed(0, "XlaRuntimeError", said, 3.0)])
    found = mtf.compile_for(programs[0], "v5e-8", backend="cpu")
    assert not found.fits
    assert found.headline == "does not fit, by 1.3 GiB: needs 17.05 GiB of 15.75 GiB, according to the compiler"
    with pytest.raises(mtf.ProgramError, match="there is no executable"):
        found.save("nowhere")
    said = (
        "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries (34.00G) exceeds "
        "available HBM (15.75G)."
    )
    found = mtf.compile_for(programs[0], "v5e-8", backend="cpu")
    assert not found.fits
    assert found.headline == (
        "does not fit, by at least 18.25 GiB: temporaries alone need 34 GiB of 15.75 GiB, according to the compiler"
    )
    assert refusal_of("Mosaic failed to compile") is None
    monkeypatch.setattr(compiling, "answers", lambda *_: [Failed(0, "XlaRuntimeError", "Mosaic failed", 3.0)])
    with pytest.raises(
        mtf.ProgramError, match="the compiler refuses the program on v5e-8: XlaRuntimeError: Mosaic failed"
    ):
        mtf.compile_for(programs[0], "v5e-8", backend="cpu")


def test_the_topology_module_needs_libtpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topologies, "find_spec", lambda name: None)
    with pytest.raises(mtf.MissingError, match="pip install libtpu"):
        topologies.require_tpu_compiler()


# ---------------------------------------------------------------- what compilers do to collectives


def row(
    kind: str, operands: list[tuple[str, int]], count: int = 1, axes: tuple[str, ...] = ("data",), op: str = ""
) -> Any:
    payload, n = sum(size for _, size in operands), 8
    sent = payload * (n - 1) / n * {"all_reduce": 2, "all_gather": n}.get(kind, 1)
    names, sizes = zip(*operands, strict=True)
    return ExplainedCollective(
        kind, axes, names, sizes, payload, sent, count, 0.0, "", op, "x.py:1", "why", "name", False, False, False
    )


def changed(program: mtf.Program, *rows: Any) -> list[str]:
    made = Explained("m", program.mesh, Slice("v5e-8"), rows, mtf.estimate(program, "v5e-8").placement)
    found = differences_of(program, made)
    assert made.sent_bytes == pytest.approx(program.sent_bytes + sum(d.more_bytes for d in found))
    return [d.what for d in found]


def test_names_of_differences() -> None:
    """A gradient of 24x32 and one of 32x8 scattered over data, by hand."""
    with mtf.Graph():
        x, w = mtf.input("x", "batch:16;k:32"), mtf.variable("w", "k:32;h:64")
        y = mtf.einsum([x, w], output_shape="batch:16;h:64")
        gradient = mtf.gradients([mtf.reduce_sum(mtf.square(y))], [w])[0]
        assert gradient is not None
        program = mtf.lower({"g": gradient}, mesh="data:8", layout="batch:data")
    (planned,) = program.collectives
    size = planned.payload_bytes
    assert (planned.kind, size) == ("all_reduce", 32 * 64 * 4)
    assert changed(program, row("all_reduce", [("f32[32,64]", size)])) == []
    name = f"all_reduce of '{planned.tensor}' over data"
    assert changed(program) == [f"removed: {name}: the compiler sends nothing for it"]
    assert changed(program, row("all_reduce", [("bf16[32,64]", size // 2)])) == [
        f"{name}: sent as bf16, 2 bytes an element instead of 4"
    ]
    more = changed(program, row("all_reduce", [("f32[32,64]", size), ("f32[8]", 32)]))
    assert more == ["added: all_reduce of f32, 32 B, over data: why"]
    moved = changed(program, row("all_reduce", [("f32[16,64]", size // 2)], count=2))
    assert moved == [f"{name}: in pieces, 2 runs instead of 1"]
    first, rest = row("all_reduce", [("f32[32,64]", size)]), row("collective_permute", [("f32[8]", 32)])
    evened = changed(program, first, replace(rest, follows=(first.name,)))
    assert evened == [f"{name}: goes in 2 parts (all_reduce over data, collective_permute over data)"]
    padded = changed(program, row("all_reduce", [("f32[33,64]", 33 * 64 * 4)]))
    assert padded == [f"{name}: padded by 256 B"]


@pytest.mark.parametrize(
    ("mesh", "axes"), [("x:8", ("x",)), ("x:2;y:4", ("x", "y")), ("x:2;y:4", ("y", "x")), ("x:12", ("x",))]
)
def test_scatters_in_stages_give_each_device_its_block(mesh: str, axes: tuple[str, ...]) -> None:
    """Against NumPy: each stage sums over its groups and keeps a slice, in the order of positions."""
    m = mtf.Mesh(mesh)
    n = m.group_size(axes)
    rng = np.random.default_rng(0)
    blocks = rng.integers(-9, 9, (m.size, 2 * n))
    wanted = blocks.sum(0).reshape(n, 2)
    held = [blocks[d] for d in range(m.size)]
    for over, groups in scatter_stages(m, axes):
        place = {}
        for group in m.groups(over):
            for members in groups or [list(range(len(group)))]:
                for position, member in enumerate(members):
                    place[group[member]] = ([group[k] for k in members], position)
        held = [
            np.split(sum(held[k] for k in members), len(members))[position]
            for members, position in (place[d] for d in range(m.size))
        ]
    for group in m.groups(axes):
        for position, device in enumerate(group):
            np.testing.assert_array_equal(held[device], wanted[position])
