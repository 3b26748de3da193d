"""Collectives of any compiled program: axes, bytes, runs, lines and reasons, against plans and counts by hand."""

# ruff: noqa: E402 (whatever needs JAX comes after a look whether it is there)

from __future__ import annotations

import inspect
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

jax = pytest.importorskip("jax", reason="needs JAX: pip install -e '.[jax]'")

import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import meshlib as mtf
from layouts import Mesh
from meshlib.command import main
from meshlib.jax.hlo.collectives import collectives_of
from meshlib.jax.hlo.groups import axes_of, permuted_axes, replica_groups
from meshlib.jax.hlo.loops import trip_count
from meshlib.jax.hlo.text import parse
from tests.effort import some
from tests.jax.models import mlp

LAYERS = 6
REPLICATED = {"w": ((LAYERS, 64, 64), PartitionSpec()), "x": ((32, 64), PartitionSpec("data"))}


@pytest.fixture(params=["shardy", "gspmd"])
def partitioner(request: pytest.FixtureRequest) -> Iterator[str]:
    before = jax.config.jax_use_shardy_partitioner
    jax.config.update("jax_use_shardy_partitioner", request.param == "shardy")
    yield request.param
    jax.config.update("jax_use_shardy_partitioner", before)


def compiled(f: Callable[..., Any], sizes: dict[str, int], **arguments: tuple[tuple[int, ...], PartitionSpec]) -> Any:
    mesh = jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))
    shaped = {
        name: jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec))
        for name, (shape, spec) in arguments.items()
    }
    return jax.jit(f).lower(*shaped.values()).compile()


def stack(w: Any, x: Any) -> Any:
    return jnp.sum(lax.scan(lambda c, wi: (jnp.tanh(c @ wi), None), x, w)[0])


def test_weights_split_over_data_are_gathered_in_each_trip(partitioner: str) -> None:
    w, x = ((LAYERS, 64, 64), PartitionSpec(None, "data")), ((32, 64), PartitionSpec("data"))
    found = mtf.jax.explain(compiled(stack, {"data": 4, "model": 2}, w=w, x=x), "v5e-8")
    (gather,) = (c for c in found.collectives if c.kind == "all_gather")
    assert (gather.axes, gather.count, gather.sent_bytes) == (("data",), LAYERS, 3 * 16 * 64 * 4)
    line = inspect.getsourcelines(stack)[1] + 1
    assert gather.source == f"test_explain.py:{line}"
    assert gather.reason == "argument 'w' is split over data along dim 0; dot_general needs all of it"
    (total,) = (c for c in found.collectives if c.kind == "all_reduce")
    assert (total.axes, total.count, total.payload_bytes, total.sent_bytes) == (("data",), 1, 4, 6.0)
    assert found.sent_bytes == LAYERS * gather.sent_bytes + 6.0
    assert found.seconds > 0
    assert str(found.mesh) == "data:4;model:2"


def test_gradients_of_replicated_weights_are_summed_over_data(partitioner: str) -> None:
    found = mtf.jax.explain(compiled(jax.grad(stack), {"data": 8}, **REPLICATED), "v5e-8")
    assert {c.kind for c in found.collectives} == {"all_reduce"}
    assert found.sent_bytes == LAYERS * 2 * 7 / 8 * 64 * 64 * 4
    assert all(c.axes == ("data",) and c.phase == "backward" for c in found.collectives)
    assert "partial sums of dot_general, which contracts a dim that is split over data" in found.collectives[0].reason


def test_what_a_branch_reads_is_named_with_the_argument(partitioner: str) -> None:
    def f(p: Any, w: Any, x: Any) -> Any:
        return lax.cond(p > 0, lambda: x * 2.0, lambda: x @ w)

    rows = PartitionSpec("data")
    shapes = {"p": ((), PartitionSpec()), "w": ((64, 64), rows), "x": ((32, 64), rows)}
    (gather,) = mtf.jax.explain(compiled(f, {"data": 8}, **shapes), "v5e-8").collectives
    assert gather.reason == "argument 'w' is split over data along dim 0; dot_general needs all of it"


def test_what_is_written_is_named_with_the_argument() -> None:
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    both = PartitionSpec(("a", "b"))
    shaped = jax.ShapeDtypeStruct((64, 8), jnp.float32, sharding=NamedSharding(mesh, both))

    def f(x: Any) -> Any:
        y = lax.all_gather(x, "b", tiled=True) + 1
        return lax.ppermute(lax.psum_scatter(y, "a", tiled=True), "a", [(n, (n + 1) % 4) for n in range(4)])

    mapped = jax.shard_map(f, mesh=mesh, in_specs=both, out_specs=PartitionSpec("a"), check_vma=False)
    found = mtf.jax.explain(jax.jit(mapped).lower(shaped).compile(), "v5e-8")
    rows = {c.kind: (c.axes, c.sent_bytes) for c in found.collectives}
    assert rows["all_gather"] == (("b",), 8 * 8 * 4)
    assert rows["reduce_scatter"] == (("a",), 3 / 4 * 16 * 8 * 4)
    assert rows["collective_permute"] == (("a",), 4 * 8 * 4)
    reasons = {c.kind: c.reason for c in found.collectives}
    assert reasons["all_gather"] == "written in the program: lax.all_gather of argument 'x'"


def test_a_ragged_exchange_sends_at_most_all_of_its_rows() -> None:
    """16 rows of 128 floats; the buffer of the result has room for 32. Sizes and offsets are no payload."""
    text = inspect.cleandoc("""HloModule jit_f, num_partitions=4
    ENTRY %main (a: f32[16,128], o: f32[32,128], n: s32[4]) -> f32[32,128] {
      %a = f32[16,128]{1,0} parameter(0)
      %o = f32[32,128]{1,0} parameter(1)
      %n = s32[4]{0} parameter(2)
      ROOT %r = f32[32,128]{1,0} ragged-all-to-all(%a, %o, %n, %n, %n, %n), replica_groups={{0,1,2,3}}
    }""")
    explained = mtf.jax.explain(text, "v5e-4", mesh="x:4")
    (c,) = explained.collectives
    assert (c.kind, c.axes, c.is_ragged, c.payload_bytes, c.sent_bytes) == ("all_to_all", ("x",), True, 8192, 8192.0)
    assert "send at most 8 KiB" in str(explained)
    assert "<= 8 KiB" in str(explained)
    assert explained.as_json()["collectives"][0]["ragged"]
    usual = text.replace("ragged-all-to-all(%a, %o, %n, %n, %n, %n)", "all-to-all(%o)")
    assert "<=" not in str(mtf.jax.explain(usual, "v5e-4", mesh="x:4"))


OWN = {
    "data": ("a:8", "batch:a"),
    "tensor": ("a:2;b:4", "batch:a;hidden:b"),
    "three_axes": ("a:2;b:2;c:2", "batch:c+a;hidden:b"),
    "fsdp": ("a:4;b:2", "batch:a;hidden:b;pixels:a?"),
}


@pytest.mark.parametrize("name", some([*OWN], ["three_axes", "fsdp"]))
def test_own_programs_send_what_they_plan(name: str) -> None:
    program = mlp(*OWN[name])
    found = mtf.jax.explain(mtf.on_jax(program, checked=False).compiled().compiled, "v5e-8", mesh=program.mesh)

    def totals(rows: Any) -> Counter[tuple[str, frozenset[str]]]:
        total: Counter[tuple[str, frozenset[str]]] = Counter()
        for c in rows:
            assert c.count is not None
            total[c.kind, frozenset(c.axes)] += c.count * c.sent_bytes
        return total

    assert totals(found.collectives) == totals(program.collectives)


def test_trips_follow_from_conditions_as_from_what_the_compiler_says() -> None:
    f = compiled(
        jax.grad(stack), {"data": 8}, w=((LAYERS, 64, 64), PartitionSpec()), x=((32, 64), PartitionSpec("data"))
    )
    text = f.as_text()
    bare = re.sub(r'"known_trip_count":\{"n":"\d+"\},?', "", text)
    assert bare != text
    module = parse(bare)
    loops = [
        trip_count(module, holder, i)
        for holder in module.computations.values()
        for i in holder.instructions.values()
        if i.opcode == "while"
    ]
    assert loops == [LAYERS] * 2


def test_trips_that_depend_on_data_are_not_known() -> None:
    def f(x: Any) -> Any:
        return lax.while_loop(lambda c: jnp.sum(c) < 100, lambda c: c @ jnp.ones((64, 64)) + jnp.sum(c), x)

    found = mtf.jax.explain(compiled(f, {"data": 8}, x=((32, 64), PartitionSpec("data"))), "v5e-8")
    assert found.collectives
    assert None in {c.count for c in found.collectives}
    assert "trips of a loop depend on data" in str(found)


# As compilers for TPUs write one gather that is spread over three fusions, and a sum of which each keeps a slice.
SPREAD = """HloModule step, is_scheduled=true, num_partitions=4

%start (p: bf16[16,8]) -> (bf16[16,8], bf16[64,8]) {
  %p = bf16[16,8]{1,0:T(8,128)(2,1)S(1)} parameter(0)
  %g.1 = bf16[64,8]{1,0} all-gather(%p), channel_id=1, replica_groups={{0,1,2,3}}, dimensions={0}ASYNC
  ROOT %c = (bf16[16,8]{1,0}, bf16[64,8]{1,0}) custom-call(%g.1), custom_call_target="AsyncCollectiveStart"
}

%on_its_way (p.1: bf16[16,8]) -> bf16[64,8] {
  %p.1 = bf16[16,8]{1,0} parameter(0)
  ROOT %g.2 = bf16[64,8]{1,0} all-gather(%p.1), channel_id=1, replica_groups={{0,1,2,3}}, dimensions={0}ASYNC
}

%all-reduce-scatter (p.2: f32[64,8]) -> f32[16,8] {
  %p.2 = f32[64,8]{1,0} parameter(0)
  %r = f32[64,8]{1,0} all-reduce(%p.2), channel_id=2, replica_groups={{0,1,2,3}}, to_apply=%add
  %n = s32[] constant(0)
  ROOT %s = f32[16,8]{1,0} dynamic-slice(%r, %n, %n), dynamic_slice_sizes={16,8}
}

ENTRY %main (a: bf16[16,8], b: f32[64,8]) -> f32[16,8] {
  %a = bf16[16,8]{1,0} parameter(0)
  %b = f32[64,8]{1,0} parameter(1)
  %f.1 = (bf16[16,8]{1,0}, bf16[64,8]{1,0}) fusion(%a), kind=kCustom, calls=%start
  %f.2 = bf16[64,8]{1,0} fusion(%a), kind=kCustom, calls=%on_its_way
  ROOT %f.3 = f32[16,8]{1,0} fusion(%b), kind=kCustom, calls=%all-reduce-scatter
}
""".replace("ASYNC", ', backend_config={"async_collective_fusion_config":{"flag_start":"2"}}')


def test_a_collective_spread_over_fusions_counts_once_and_a_sliced_sum_is_a_scatter() -> None:
    found = [(c.kind, c.sent_bytes, c.is_async) for c in collectives_of(parse(SPREAD))]
    assert found == [("all_gather", 3 * 16 * 8 * 2.0, True), ("reduce_scatter", 3 / 4 * 64 * 8 * 4, False)]


# A scatter that a compiler cut in two stages and a permute, none of which has a name.
STAGES = """HloModule step, is_scheduled=true, num_partitions=4

ENTRY %main (a: f32[64,8]) -> f32[16,8] {
  %a = f32[64,8]{1,0} parameter(0)
  %w = f32[64,8]{1,0} negate(%a), metadata={op_name="jit(f)/wi/grad/dot_general" source_file="m.py" source_line=3}
  %p = f32[80,8]{1,0} pad(%w, %n), padding=0_16x0_0
  %r.1 = f32[40,8]{1,0} reduce-scatter(%p), channel_id=1, replica_groups={{0,2},{1,3}}, dimensions={0}, to_apply=%add
  %c = f32[40,8]{1,0} copy(%r.1)
  %s = f32[8,8]{1,0} slice(%c), slice={[32:40], [0:8]}
  %q = f32[8,8]{1,0} collective-permute(%s), channel_id=2, source_target_pairs={{0,1},{1,2},{2,3}}
  ROOT %r.2 = f32[20,8]{1,0} reduce-scatter(%c), channel_id=3, replica_groups={{0,1},{2,3}}, dimensions={0}, to_apply=%f
}
"""


def test_stages_of_a_collective_follow_each_other_and_have_the_name_of_what_they_sum() -> None:
    found = collectives_of(parse(STAGES))
    assert [(c.kind, c.follows) for c in found] == [
        ("reduce_scatter", ()),
        ("collective_permute", ("r.1",)),
        ("reduce_scatter", ("r.1",)),
    ]
    assert {(c.op_name, c.source) for c in found} == {("jit(f)/wi/grad/dot_general", "m.py:3")}


MOVES = {  # instructions; the pairs of devices; whether the devices go on meanwhile; bytes sent
    "send": (
        "(f32[8,8]{1,0}, u32[], token[]) send(%p, %t), channel_id=1, frontend_attributes={PAIRS={{0,1},{1,2}}}",
        ((0, 1), (1, 2)), True, 256,
    ),
    "quoted": (
        '(f32[8,8]{1,0}, u32[], token[]) send(%p, %t), channel_id=1, frontend_attributes={PAIRS="{{0,1},{1,2}}"}',
        ((0, 1), (1, 2)), True, 256,
    ),
    "broadcast": (
        "f32[8,8]{1,0} collective-broadcast(%p), channel_id=1, replica_groups={{0,1,2},{4,5,6}}",
        ((0, 1), (0, 2), (4, 5), (4, 6)), False, 256,
    ),
    "to itself": (
        "f32[8,8]{1,0} collective-permute(%p), channel_id=1, source_target_pairs={{0,0},{1,1}}",
        ((0, 0), (1, 1)), False, 0,
    ),
}  # fmt: skip


@pytest.mark.parametrize("move", MOVES)
def test_blocks_that_a_device_sends_to_others(move: str) -> None:
    moved, pairs, is_async, sent_bytes = MOVES[move]
    moved = moved.replace("PAIRS", "_xla_send_recv_source_target_pairs")
    text = f"HloModule m, num_partitions=8\n\nENTRY %main (p: f32[8,8]) -> f32[8,8] {{\n  ROOT %r = {moved}\n}}\n"
    (parsed,) = collectives_of(parse(text))
    assert (parsed.groups, parsed.is_async) == (pairs, is_async)
    (c,) = mtf.jax.explain(text, "v5e-8", mesh="x:2;y:4").collectives
    assert (c.kind, c.payload_bytes, c.sent_bytes) == ("collective_permute", 256, sent_bytes)
    if sent_bytes:
        assert c.axes == ("y",)


def test_attributes_of_kernels_go_on_in_further_lines() -> None:
    """What is behind such a kernel is not lost, and a text without a ROOT is refused."""
    kernel = """  %k = bf16[16,8]{1,0} custom-call(%a), custom_call_target="x", frontend_attributes={kernel_metadata={
"block": "{512}"
}}, metadata={op_name="jit(f)/kernel"}
"""
    text = SPREAD.replace("  %f.1 = ", kernel + "  %f.1 = ")
    module = parse(text)
    assert module.computations["main"].instructions["k"].op_name == "jit(f)/kernel"
    assert len(collectives_of(module)) == 2
    with pytest.raises(mtf.ProgramError, match="'main' has no ROOT"):
        parse(SPREAD.replace("ROOT %f.3", "%f.3"))


# As a compiler writes one of two slices: a sum inside, and its host transfer to the other slice.
TWO_SLICES = """HloModule step, is_scheduled=true, num_partitions=4

%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %z = f32[] add(%x, %y)
}

ENTRY %main (p: f32[8,128]) -> f32[8,128] {
  %p = f32[8,128]{1,0} parameter(0)
  %r = f32[8,128]{1,0} all-reduce(%p), channel_id=1, replica_groups={{0,1},{2,3}}, to_apply=%add
  %t = token[] after-all()
  %s = (f32[8,128]{1,0}, u32[], token[]) send(%r, %t), is_host_transfer=true, frontend_attributes={_xla_megascale_transfer_type="ALL_REDUCE"}
  %v = (f32[8,128]{1,0}, u32[], token[]) recv(%t), is_host_transfer=true, frontend_attributes={_xla_megascale_transfer_type="ALL_REDUCE"}
  %d = (f32[8,128]{1,0}, token[]) recv-done(%v), is_host_transfer=true
  ROOT %g = f32[8,128]{1,0} get-tuple-element(%d), index=0
}
"""  # noqa: E501


def test_transfers_between_slices_are_collectives_over_the_first_axis() -> None:
    found = mtf.jax.explain(TWO_SLICES, "2*v5e-4", mesh="data:2;x:2;y:2")
    assert [(c.kind, c.axes, c.sent_bytes) for c in found.collectives] == [
        ("all_reduce", ("y",), 4096.0),
        ("all_reduce", ("data",), 4096.0),
    ]
    by_devices = mtf.jax.explain(TWO_SLICES, "2*v5e-4")
    assert [c.axes for c in by_devices.collectives] == [("devices:(4)2",), ("devices:(1)2",)]
    inside, between = found.collectives
    assert inside.seconds is not None
    assert between.seconds is not None
    with pytest.raises(mtf.ProgramError, match="join along the first axis"):
        mtf.jax.explain(TWO_SLICES, "2*v5e-4", mesh="x:1;data:2;y:4")


# Instructions without a name, as compilers add them: sliced copies that are joined, sums of several values, fusions.
NAMELESS = """HloModule step, is_scheduled=true, num_partitions=4

%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %z = f32[] add(%x, %y)
}

%scatter (a: f32[8,8]) -> f32[4,8] {
  %a = f32[8,8]{1,0} parameter(0)
  %pad = f32[8,8]{1,0} pad(%a, %a), padding=0_0x0_0
  ROOT %rs = f32[4,8]{1,0} reduce-scatter(%pad), channel_id=1, replica_groups={{0,1},{2,3}}, dimensions={0}, to_apply=%add, metadata={op_name="jit(f)/psum_scatter"}
}

%both (b: f32[8,8]) -> (f32[8,8], f32[8,8]) {
  %b = f32[8,8]{1,0} parameter(0)
  %n = f32[8,8]{1,0} negate(%b)
  ROOT %two = (f32[8,8]{1,0}, f32[8,8]{1,0}) tuple(%n, %b)
}

ENTRY %main (w: f32[8,8]) -> f32[4,8] {
  %w = f32[8,8]{1,0} parameter(0), metadata={op_name="w"}
  %h = f32[8,8]{1,0} tanh(%w), metadata={op_name="jit(f)/tanh"}
  %f = (f32[8,8]{1,0}, f32[8,8]{1,0}) fusion(%OPERAND), kind=kLoop, calls=%both
  %g = f32[8,8]{1,0} get-tuple-element(%f), index=ELEMENT
  %sums = (f32[8,8]{1,0}, f32[8,8]{1,0}) all-reduce(%w, %g), channel_id=2, replica_groups={}, to_apply=%add
  %sum = f32[8,8]{1,0} get-tuple-element(%sums), index=1
  %joined = f32[8,8]{1,0} custom-call(%sum), custom_call_target="ConcatBitcast"
  %start = ((f32[8,8]{1,0}), f32[4,8]{1,0}) async-start(%joined), calls=%scatter
  ROOT %done = f32[4,8]{1,0} async-done(%start)
}
"""  # noqa: E501


@pytest.mark.parametrize(
    ("operand", "element", "origin"),
    [("w", 0, "argument 'w'"), ("w", 1, "argument 'w'"), ("h", 1, "the result of tanh")],
)
def test_instructions_that_the_compiler_added_have_the_name_of_what_they_read(
    operand: str, element: int, origin: str
) -> None:
    text = NAMELESS.replace("OPERAND", operand).replace("ELEMENT", str(element))
    (reason,) = (c.reason for c in mtf.jax.explain(text, "v5e-4").collectives if c.kind == "reduce_scatter")
    assert reason == f"written in the program: lax.psum_scatter of {origin}"


def test_what_another_slice_sends_is_named_so() -> None:
    text = TWO_SLICES.replace("ROOT %g", "%g")
    end = text.rindex("}")
    gather = "  ROOT %a = f32[16,128]{1,0} all-gather(%g), channel_id=3, replica_groups={{0,1},{2,3}}, dimensions={0}\n"
    found = mtf.jax.explain(text[:end] + gather + text[end:], "2*v5e-4")
    (gathered,) = (c for c in found.collectives if c.kind == "all_gather")
    assert gathered.reason.startswith("a value from another slice is split over devices:(4)2 along dim 0")


@pytest.mark.parametrize(
    ("attributes", "wanted"),
    [
        ("replica_groups={{0,1},{2,3},{4,5},{6,7}}", "y"),
        ("replica_groups=[4,2]<=[8]", "y"),
        ("replica_groups=[2,4]<=[4,2]T(1,0)", "x"),
        ("replica_groups={}", "x y"),
        ("replica_groups=mesh['p'=4,'q'=2] {'q'}", "y"),
        ("replica_groups=mesh['p'=8] {'p':(2)2}", "x:(2)2"),
        ("replica_groups=[4,2]<=[2,4]T(1,0)", "x:(1)2"),
        ("replica_groups={{0,3},{1,2},{4,7},{5,6}}", None),
    ],
)
def test_notations_of_groups(attributes: str, wanted: str | None) -> None:
    parts = axes_of(replica_groups(attributes + ", dimensions={0}", 8), Mesh("x:4;y:2"))
    assert (None if parts is None else " ".join(map(str, parts))) == wanted


def test_random_axes_are_recognised() -> None:
    mesh = Mesh("a:2;b:3;c:4")
    for axes in (["a"], ["b"], ["c"], ["a", "b"], ["a", "c"], ["b", "c"], ["a", "b", "c"]):
        groups = tuple(map(tuple, mesh.groups(axes)))
        parts = axes_of(groups, mesh)
        assert parts is not None
        assert [str(p) for p in parts] == axes
    pairs = tuple((mesh.device((0, n, 0)), mesh.device((0, (n + 1) % 3, 0))) for n in range(3))
    assert [str(p) for p in permuted_axes(pairs, mesh)] == ["b"]


@pytest.mark.parametrize(
    ("text", "slice", "mesh", "message"),
    [
        ("module @jit_f { stablehlo.add }", "v5e-8", None, "StableHLO"),
        ("hello", "v5e-8", None, "begins with 'hello', not with 'HloModule'"),
        (SPREAD[:200], "v5e-4", None, "cut off"),
        (SPREAD, "v5e-8", "x:8", "compiled for 4 devices, but mesh x:8 has 8"),
        (SPREAD, "v5e-8", "x:4", "4 positions, but slice v5e-8 has 8 devices"),
        (SPREAD, "v9-4", None, "unknown chip 'v9'"),
        (3, "v5e-4", "x:4", "explain: give a compiled program"),
    ],
    ids=["stablehlo", "no_hlo", "cut_off", "mesh", "slice_size", "slice", "type"],
)
def test_mistakes_get_one_line(text: Any, slice: str, mesh: str | None, message: str) -> None:
    with pytest.raises(mtf.MeshlibError) as caught:
        mtf.jax.explain(text, slice, mesh=mesh)
    assert message in str(caught.value)


def test_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "step.hlo.txt"
    file.write_text(SPREAD)
    assert main(["explain", str(file), "--slice", "v5e-4", "--mesh", "data:4"]) == 0
    out = capsys.readouterr().out
    assert "2 runs of 2 collectives send 2.25 KiB" in out
    assert main(["explain", str(file), "--slice", "v5e-4", "--mesh", "data:4", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["sent_bytes"] == 2304
    assert main(["explain", str(file)]) != 0
    assert "--slice" in capsys.readouterr().err
