"""Every kind of step is complete: planner, checker, bytes, executors, JAX, hardware, prices and words know it."""

from __future__ import annotations

import ast
import re
from string import Formatter

import numpy as np
import pytest

from hardware.collective_kinds import COLLECTIVE_KINDS
from hardware.collectives import ring_sent_bytes
from hardware.network import best_placement, collective_cost
from hardware.slices import Slice
from layouts import LayoutError, Mesh, Sharding, reshard
from layouts.plan import Step
from layouts.step_kinds import COLLECTIVES, STEP_KINDS, Place, StepKind
from meshlib.core.dtypes import as_dtype
from meshlib.jax.hlo.collectives import BETWEEN, KINDS
from meshlib.simulation.exact import move
from tests.paths import ROOT

MESH = Mesh("a:2;b:4")
SHAPE = "d:16;e:8"
EVERYWHERE = {"axes", "rules", "dim", "to_dim"}
OF_REDUCTIONS = EVERYWHERE | {"maker", "reduces", "dims", "noun", "gradient"}
OF_OTHERS = EVERYWHERE | {"user", "tensor", "before", "after"}


def sample(kind: StepKind, reduction: str = "sum") -> Step:
    """A step of a kind over both axes of the mesh, on dim d, and to dim e."""
    if kind.permutes:
        before, after = (Sharding(SHAPE, MESH, [axes, ()]) for axes in (("a", "b"), ("b", "a")))
        return Step(kind.name, ("a", "b"), None, None, before, after, 64, kind.sent_bytes(64, 8))
    ends = []
    for place, dim in ((kind.takes, 0), (kind.puts, 1 if kind.takes is Place.SPLIT else 0)):
        axes = [("a", "b") if place is Place.SPLIT and n == dim else () for n in (0, 1)]
        ends.append(Sharding(SHAPE, MESH, axes, dict.fromkeys("ab", reduction) if place is Place.PENDING else {}))
    payload = ends[0].local_size * 4
    dim = "d" if Place.SPLIT in (kind.takes, kind.puts) else None
    to_dim = "e" if kind.exchanges else None
    return Step(kind.name, ("a", "b"), dim, to_dim, ends[0], ends[1], payload, kind.sent_bytes(payload, 8))


def operands(step: Step) -> tuple[np.ndarray, list[np.ndarray]]:
    """A value and what each device has of it before a step."""
    rng = np.random.default_rng(0)
    value = rng.integers(-9, 9, step.before.shape.sizes).astype(np.float32)
    blocks = [value[step.before.slices(c)].copy() for c in MESH.coordinates()]
    if step.before.pending:
        parts = [rng.integers(-9, 9, value.shape).astype(np.float32) for _ in blocks[1:]]
        blocks = [value - sum(parts), *parts]
    return value, blocks


def assert_holds(value: np.ndarray, step: Step, blocks: list[np.ndarray]) -> None:
    """That the blocks after a step are those of the value."""
    for group in MESH.groups(step.after.pending_axes):
        for device in group:
            wanted = value[step.after.slices(MESH.coordinates()[device])]
            np.testing.assert_array_equal(sum(blocks[d] for d in group), wanted)


@pytest.mark.parametrize("kind", STEP_KINDS.values(), ids=STEP_KINDS)
def test_the_exact_executor_runs_it(kind: StepKind) -> None:
    step = sample(kind)
    value, blocks = operands(step)
    assert_holds(value, step, move(step, blocks, as_dtype("float32")))


@pytest.mark.parametrize("kind", STEP_KINDS.values(), ids=STEP_KINDS)
def test_jax_runs_it(kind: StepKind) -> None:
    jax = pytest.importorskip("jax")
    from jax.sharding import PartitionSpec

    from meshlib.jax import collectives
    from meshlib.jax.context import Reported, TraceContext

    assert set(collectives.EMITTED) == set(STEP_KINDS)
    step = sample(kind)
    value, blocks = operands(step)
    context = TraceContext(MESH, "cpu", True, jax.numpy.int32(0), {}, Reported())
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:8]).reshape(2, 4), ("a", "b"))
    spec = PartitionSpec(("a", "b"))
    run = jax.shard_map(
        lambda x: collectives.move(step, x[0], context)[None],
        mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False,
    )  # fmt: skip
    run = jax.jit(run)  # not one operation after the other, each compiled
    assert_holds(value, step, list(np.asarray(run(np.stack(blocks)))))


@pytest.mark.parametrize("kind", STEP_KINDS.values(), ids=STEP_KINDS)
def test_the_check_takes_its_effect_alone(kind: StepKind) -> None:
    step = sample(kind)
    kind.check(step.before, step.after, step.axes, step.dim, step.to_dim)
    with pytest.raises(LayoutError, match=kind.name):
        kind.check(step.before, Sharding(SHAPE, MESH, [("b",), ("a",)]), step.axes, step.dim, step.to_dim)
    if not kind.permutes:
        with pytest.raises(LayoutError, match=kind.name):
            kind.check(step.after, step.after, step.axes, step.dim, step.to_dim)


@pytest.mark.parametrize("kind", STEP_KINDS.values(), ids=STEP_KINDS)
def test_the_planner_takes_it_or_its_like(kind: StepKind) -> None:
    step = sample(kind)
    (planned,) = reshard(step.before, step.after, 4).steps
    like = STEP_KINDS[planned.kind]
    assert (like.takes, like.puts, planned.axes) == (kind.takes, kind.puts, step.axes)
    assert planned.sent_bytes <= kind.sent_bytes(planned.payload_bytes, 8)


@pytest.mark.parametrize("name", COLLECTIVES)
def test_hardware_prices_it_and_sends_as_many_bytes(name: str) -> None:
    kind, size = STEP_KINDS[name], 2**20 * 3 * 5 * 7
    for n in range(1, 9):
        if n > 1 or not kind.permutes:
            larger = kind.larger_bytes(size, n)
            assert kind.sent_bytes(size, n) == pytest.approx(ring_sent_bytes(name, larger, n))
    placement, _ = best_placement(Slice("v5e-16"), {"a": 4, "b": 4})
    small, large = (collective_cost(placement, name, ["a"], bytes_).seconds for bytes_ in (2.0**20, 2.0**24))
    assert 0 < small < large
    assert COLLECTIVE_KINDS[name].hbm_passes >= 2


@pytest.mark.parametrize("kind", STEP_KINDS.values(), ids=STEP_KINDS)
def test_its_reasons_name_what_is_known(kind: StepKind) -> None:
    names = OF_REDUCTIONS if kind.reduces else OF_OTHERS
    wordings = [kind.wording] if kind.optional_wording is None else [kind.wording, kind.optional_wording]
    for text in (text for wording in wordings for text in (wording.why, wording.avoid)):
        assert text
        assert {name for _, name, _, _ in Formatter().parse(text) if name is not None} <= names
    if kind.is_local:
        return
    compiled = {"sums", "maker", "reduces"} if kind.reduces else {"tensor", "user", "along"}
    assert {name for _, name, _, _ in Formatter().parse(kind.compiled_why) if name is not None} <= {"axes"} | compiled
    assert kind.compiled_why
    assert KINDS[kind.name.replace("_", "-")] is BETWEEN[kind.name.upper()] is kind


def test_nothing_else_compares_with_the_names_of_kinds() -> None:
    literal = re.compile(rf"""["']({"|".join(COLLECTIVES)})["']""")
    places = []
    for path in (p for room in ("layouts", "hardware", "meshlib") for p in sorted((ROOT / room).rglob("*.py"))):
        if not literal.search(text := path.read_text()) or "maxtext" in path.parts:  # whose options have such values
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Compare | ast.MatchValue):
                names = {n.value for n in ast.walk(node) if isinstance(n, ast.Constant)}
                places += [f"{path.relative_to(ROOT)}:{node.lineno}" for name in names if name in COLLECTIVES]
    assert not places, "branches on the name of a kind; give its record a field: " + ", ".join(places)


# What a device of a group of 4 sends of an operand of 10 bytes; written by hand from the forms of rings.
BYTES = {"all_gather": 30, "reduce_scatter": 7.5, "all_reduce": 15, "all_to_all": 7.5, "collective_permute": 10}


def test_bytes_are_exact() -> None:
    assert {name: STEP_KINDS[name].sent_bytes(10, 4) for name in COLLECTIVES} == BYTES
    assert not any(STEP_KINDS[name].sent_bytes(10, 1) for name in BYTES if not STEP_KINDS[name].permutes)
