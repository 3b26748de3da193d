"""Values that are live while an operation runs: on programs whose memory is known, and on models as lowered."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import meshlib as mtf
from hardware.slices import Slice
from meshlib.core.graph import Operation
from meshlib.core.loop_record import Active
from meshlib.estimation.memory.device_memory import memory_on
from meshlib.lowering.simplification import simplify
from meshlib.models.serving import Step
from meshlib.ops.control.branches import branch
from meshlib.program.instructions import Loop
from meshlib.searching.bounds.least_memory import LeastMemory
from meshlib.searching.bounds.live_values import _Flow, whole_bytes
from tests.effort import deep, each, some
from tests.lowering.pairs import pair

SIDE = 64
BLOCK = 4 * SIDE * SIDE  # bytes of each tensor below
D = [mtf.Dimension(name, SIDE) for name in "abcd"]


def product(x: mtf.Tensor, name: str) -> mtf.Tensor:
    """x times a weight of its own."""
    w = mtf.variable(f"{name}/w", [D[1], D[2]])
    return mtf.rename_dimension(mtf.einsum([x, w], [D[0], D[2]], name=name), "c", "b")


def read_again(x: mtf.Tensor) -> mtf.Tensor:
    """The first product is live during the second one, since the third and fourth come after it."""
    first = product(x, "first")
    second = product(mtf.relu(first), "second")
    return mtf.einsum([first, second], [D[0]], name="third")


def written_over(x: mtf.Tensor) -> mtf.Tensor:
    """The third product may be written over the first one, to which it is added; it reads the second one."""
    first = product(x, "first")
    second = product(mtf.relu(first), "second")
    total = mtf.sin(product(mtf.relu(second), "third") + first)
    return mtf.einsum([total, mtf.variable("row", [D[1]])], [D[0]], name="fourth")


def aliases(x: mtf.Tensor) -> mtf.Tensor:
    """A tensor and its new name take memory once."""
    first = product(x, "first")
    other = mtf.rename_dimension(first, "a", "d")
    second = product(mtf.relu(first), "second")
    return mtf.reduce_sum(mtf.einsum([other, second], [D[0], D[3]], name="third") + mtf.einsum([first, second], []))


def summed(x: mtf.Tensor) -> mtf.Tensor:
    """Of two products and their sum, only the sum has to be in memory during the third one."""
    total = mtf.sin(product(x, "first") + product(x, "other"))
    second = product(mtf.relu(total), "second")
    return mtf.einsum([total, second], [D[0]], name="third")


def in_loop(x: mtf.Tensor, captured: mtf.Tensor) -> mtf.Tensor:
    """A loop all of whose trips read `captured`."""

    def trip(carries: Any, _: Any) -> tuple[Any, Any]:
        return (mtf.sin(carries[0] + captured),), ()

    (y,), _ = mtf.scan(trip, [x], [], mtf.Dimension("trips", 2))
    return y


def renamed_for_loops(x: mtf.Tensor) -> mtf.Tensor:
    """A tensor and its new name, both read by loops before and after the second product, take memory once."""
    first = product(x, "first")
    other = mtf.rename_dimension(first, "a", "d")
    before = mtf.rename_dimension(in_loop(mtf.rename_dimension(x, "a", "d"), other), "d", "a")
    after = in_loop(product(before, "second"), first)
    total = in_loop(mtf.rename_dimension(after, "a", "d"), other)
    return mtf.einsum([total, mtf.variable("row", [D[1]])], [D[3]])


def carried(x: mtf.Tensor) -> mtf.Tensor:
    """Of two carries, the one that begins with a product is written over it, the one with zeros in new memory."""

    def trip(carries: Any, _: Any) -> tuple[Any, Any]:
        return (mtf.sin(carries[0]), carries[1] + carries[0]), ()

    begin = product(x, "first")
    (y, z), _ = mtf.scan(trip, [begin, mtf.zeros(begin.shape)], [], mtf.Dimension("trips", 2))
    return mtf.einsum([y, mtf.variable("row", [D[1]])], [D[0]]) + mtf.reduce_sum(z, output_shape=[D[0]])


def computed_again(x: mtf.Tensor) -> mtf.Tensor:
    """A mask of positions, which each loop may compute again, is not in memory between loops."""
    mask = mtf.cast(mtf.less(mtf.range(D[0]) * SIDE, mtf.range(D[1])), "float32")
    total = in_loop(product(in_loop(x, mask), "second"), mask)
    return mtf.einsum([total, mtf.variable("row", [D[1]])], [D[0]])


@pytest.mark.parametrize(
    ("build", "blocks", "exact"),
    [
        (read_again, 2, 2), (written_over, 2, 3), (aliases, 2, 3), (summed, 2, 2), (renamed_for_loops, 2, 3),
        (computed_again, 1, 3), (carried, 2, 3),
    ],
)  # fmt: skip
def test_live_blocks(build: Callable[[mtf.Tensor], mtf.Tensor], blocks: int, exact: int) -> None:
    with mtf.Graph():
        total = build(mtf.input("x", [D[0], D[1]]))
        program = mtf.lower({"total": total}, mesh="device:1")
    least = LeastMemory.of([total], [])
    state = least.state_bytes(mtf.LayoutRules(""), mtf.Mesh("device:1"))
    live = (least.peak_bytes(mtf.LayoutRules(""), mtf.Mesh("device:1")) - state) / BLOCK
    assert live == blocks
    assert (program.memory.peak_bytes - state) // BLOCK == exact


def half_of(x: mtf.Tensor) -> mtf.Tensor:
    """The first half of the rows."""
    return mtf.rename_dimension(mtf.slice(x, 0, SIDE // 2, "a"), "a", "half")


def test_a_variable_that_is_updated_in_two_parts_is_in_memory_once() -> None:
    with mtf.Graph():
        cache = mtf.variable("cache", [D[0], D[1]], trainable=False)
        once = mtf.update_slice(cache, half_of(product(mtf.input("x", [D[0], D[1]]), "first")), D[0], 0)
        second = product(mtf.relu(once), "second")
        third = product(mtf.relu(second), "third")
        updates = [mtf.assign(cache, mtf.update_slice(once, half_of(third), D[0], SIDE // 2))]
        total = mtf.reduce_sum(second)
        program = mtf.lower({"total": total}, updates, mesh="device:1")
    bound = LeastMemory.of([total], updates).peak_bytes(mtf.LayoutRules(""), mtf.Mesh("device:1"))
    assert 0 < program.memory.peak_bytes - bound < BLOCK


def test_branches_in_sequence_update_a_carry_in_its_memory() -> None:
    stage = mtf.Dimension("stage", 1)
    active = Active("stage", ((0,), (0,)), 1)

    def half_updated(given: Any) -> Any:
        return [mtf.update_slice(given[0], half_of(mtf.sin(given[0])), D[0], 0)], []

    def trip(carries: Any, _: Any) -> tuple[Any, Any]:
        mask = mtf.less(mtf.range(stage), 1)
        once = branch("one", half_updated, carries, mask, active)
        return branch("other", half_updated, once.carries, mask, active).carries, ()

    with mtf.Graph():
        (y,), _ = mtf.scan(trip, [product(mtf.input("x", [D[0], D[1]]), "first")], [], mtf.Dimension("trips", 2))
        total = mtf.einsum([y, mtf.variable("row", [D[1]])], [D[0]])
        program = mtf.lower({"total": total}, mesh="device:1")
    least = LeastMemory.of([total], [])
    state = least.state_bytes(mtf.LayoutRules(""), mtf.Mesh("device:1"))
    assert least.peak_bytes(mtf.LayoutRules(""), mtf.Mesh("device:1")) - state == BLOCK
    assert BLOCK < program.memory.peak_bytes - state < 2 * BLOCK


def test_scores_of_all_layers_of_a_trip_are_live_where_they_are_computed_again() -> None:
    """Those of two layers with a bias: of self-attention and of attention to the encoder."""
    config = mtf.models.preset("switch-base-8").replace(layers=2)
    with mtf.Graph():
        session = mtf.Session(*mtf.models.train_step(config, 2, 1024, remat="full"))
    outputs, updates = session.asked
    least = LeastMemory.of([*outputs.values()], updates)
    outer, inside = (least.peak_bytes(mtf.LayoutRules(""), mtf.Mesh("device:1"), inside=i) for i in (False, True))
    scores = 2 * 12 * 1024 * 1024 * 2
    assert inside - outer > 3 * scores
    assert inside <= session.lower().memory.peak_bytes


def training() -> Step:
    """Gradients of weights, which a loop writes into their stack."""
    return mtf.models.train_step(mtf.models.preset("mtf-lm-2.48b").replace(layers=2), 2, 128, remat="none")


def decoding() -> Step:
    """Caches, which are updated in place."""
    return mtf.models.decode_step(mtf.models.preset("gpt2").replace(layers=2), 64, 1024, scan=False)


@pytest.mark.parametrize("build", [training, decoding])
def test_what_is_written_in_place_counts_once(build: Callable[[], Step]) -> None:
    """On one device, next to nothing else is live beside the state and what is written into it or into stacks."""
    with mtf.Graph():
        session = mtf.Session(*build())
    outputs, updates = session.asked
    least = LeastMemory.of([*outputs.values()], updates)
    layout, mesh, program = mtf.LayoutRules(""), mtf.Mesh("device:1"), session.lower()
    bound, needed = least.peak_bytes(layout, mesh), least.needed_bytes(layout, mesh, program.compiler)
    assert 0.98 * program.memory.peak_bytes < bound <= program.memory.peak_bytes
    assert bound < needed <= memory_on(program, Slice("v5e-1")).needed_bytes


def test_live_bytes_of_all_operations_at_once_are_those_of_each() -> None:
    config = mtf.models.preset("t5-small").replace(layers=2)
    with mtf.Graph() as graph:
        outputs, updates = mtf.models.train_step(config, 2, 128, scan=False)
    flow = _Flow(simplify(graph, [*outputs.values()], updates), set(), {})
    several = flow.live_bytes(range(0, len(flow.operations), 7))
    for n, live_bytes in several.items():
        sizes = (next((size for path, size in flow.starts[y] if flow._crosses(path, n)), 0.0) for y in flow._before(n))
        assert live_bytes == pytest.approx(sum(sizes) + sum(map(whole_bytes, flow.operations[n].outputs)))


@each("number", range(200) if deep() else (6, 26, 36, 46, 116))
def test_sums_that_follow_from_others_are_not_counted(number: int) -> None:
    """Of random programs: 26 and 116 multiply, after their sum over a dim, what is written as a product before it."""
    drawn = pair(number)
    session = mtf.Session(drawn.outputs, drawn.updates)
    least = LeastMemory.of([*drawn.outputs.values()], drawn.updates)
    bound = least.peak_bytes(mtf.LayoutRules(drawn.layout), mtf.Mesh(drawn.mesh))
    assert bound <= session.lower(drawn.mesh, drawn.layout).memory.peak_bytes


@pytest.mark.parametrize(("rows", "gathered"), [(512, SIDE), (8, 8)])
def test_a_product_gathers_the_smaller_of_two_operands_that_an_axis_splits(rows: int, gathered: int) -> None:
    """The axis splits rows of one in memory, columns of the other: one factor of the product."""
    wide = mtf.Dimension("rows", rows)
    with mtf.Graph():
        total = mtf.einsum([mtf.input("x", [wide, D[1]]), mtf.variable("w", [D[1], D[2]])], [wide, D[2]])
        program = mtf.lower({"total": total}, mesh="axis:8", layout="rows:axis;c:axis?")
    least, layout, mesh = LeastMemory.of([total], []), mtf.LayoutRules("rows:axis;c:axis?"), mtf.Mesh("axis:8")
    live = least.peak_bytes(layout, mesh) - least.state_bytes(layout, mesh)
    assert live == 4 * gathered * SIDE
    assert live <= program.memory.peak_bytes - least.state_bytes(layout, mesh)


def test_what_experts_are_sent_is_bounded_with_the_sizes_of_the_layout() -> None:
    """The number of tokens follows from the layout; without one, they count for nothing."""
    config, mesh = mtf.models.preset("gpt-oss-20b").replace(layers=2), "fsdp:2;expert:4"
    with mtf.Graph():
        session = mtf.Session(*mtf.models.train_step(config, 8, 512, remat="full"))
    rules = mtf.models.layout("fsdp+expert", config, mesh)
    peaks = []
    for own in (session, session.under(mtf.Mesh(mesh), rules)):
        outputs, updates = own.asked
        least = LeastMemory.of([*outputs.values()], updates)
        peaks.append(least.peak_bytes(rules, mtf.Mesh(mesh)))
    assert peaks[0] < peaks[1] <= session.lower(mesh, rules).memory.peak_bytes


@each("name", ["gpt2", "t5-small", "mixtral-8x7b"])
def test_memory_is_bounded_from_the_graph(name: str) -> None:
    """For a model's usual layouts, whatever its rematerialisation: no more than the peak, and more inside of loops."""
    config = mtf.models.preset(name).replace(layers=2)
    for remat in some(("full", "none"), ("none",) if name == "t5-small" else ("full",)):
        with mtf.Graph():
            session = mtf.Session(*mtf.models.train_step(config, 16, 512, remat=remat))
        outputs, updates = session.asked
        least = LeastMemory.of([*outputs.values()], updates)
        for layout, mesh in mtf.models.usual_layouts(config, 16, 16):
            rules = mtf.models.layout(layout, config, mesh)
            program = session.lower(mesh, rules)
            memory, needed = program.memory, memory_on(program, Slice("v5e-16")).needed_bytes
            outer, bound = (least.peak_bytes(rules, mtf.Mesh(mesh), inside=i) for i in (False, True))
            assert 0 < least.state_bytes(rules, mtf.Mesh(mesh)) < outer <= bound <= memory.peak_bytes
            assert bound < least.needed_bytes(rules, mtf.Mesh(mesh), program.compiler) <= needed
            assert bound > 0.2 * memory.peak_bytes


@pytest.mark.parametrize(
    ("name", "batch", "length", "layout", "mesh", "before_share", "after_share"),
    [
        # All devices have the whole position biases.
        ("switch-base-8", 4, 4096, "expert", "expert:4", 0.6, 0.8),
        ("llama2-7b", 8, 2048, "fsdp", "fsdp:2", 0.95, 0.9999),
    ],
)
def test_lowered_loops_bound_memory_more_closely(
    name: str, batch: int, length: int, layout: str, mesh: str, before_share: float, after_share: float
) -> None:
    config = mtf.models.preset(name).replace(layers=2)
    with mtf.Graph():
        session = mtf.Session(*mtf.models.train_step(config, batch, length, remat="full"))
    rules = mtf.models.layout(layout, config, mesh)
    outputs, updates = session.asked
    least, loops = LeastMemory.of([*outputs.values()], updates), dict[Operation, Loop]()
    peak_bytes = session.lower(mesh, rules, told=lambda loop: loops.setdefault(loop.operation, loop)).memory.peak_bytes
    before, after = (least.peak_bytes(rules, mtf.Mesh(mesh), lowered=each) for each in ({}, loops))
    assert before < before_share * peak_bytes
    assert after_share * peak_bytes < after <= peak_bytes
