"""The bounds of a search are below what is estimated: over random programs, layouts and rates of links.

With slow links nearly all of a step is collectives, so that a single one charged too much is seen.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

import meshlib as mtf
from hardware.slices import Slice
from layouts import LayoutRules
from meshlib.core.graph import Operation, Tensor
from meshlib.estimation import estimate
from meshlib.program.instructions import Loop, Move
from meshlib.program.records import walk
from meshlib.searching.bounds.elements import leading
from meshlib.searching.bounds.min_sum import Table
from meshlib.searching.bounds.shared_times import FlowCollectives
from meshlib.searching.programs import SearchProblem, problem_of
from meshlib.searching.roles import roles_of
from meshlib.searching.space import Candidate, Fixed, candidates, laid
from tests.compilers import INDEPENDENT
from tests.effort import draws, each
from tests.lowering.minima_tables import ROWS

D = mtf.Dimension
Build = Callable[[], tuple[Mapping[str, Tensor], Sequence[Operation]]]
SLOW = 1e-5


def network(seed: int, scale: int = 1) -> Build:
    """A random one: branches that meet, factors, shared and stacked weights, norms, softmax, tied tables.

    With a `scale` its dims are so much larger, and what products read of HBM counts.
    """

    def build() -> tuple[Mapping[str, Tensor], Sequence[Operation]]:
        rng = random.Random(seed)
        sizes = [scale * size for size in (8, 16, 64, 256)]
        batch, dtype = D("batch", scale * rng.choice([16, 256, 4096])), rng.choice(["float32", "bfloat16"])
        wide = [D(f"d{n}", rng.choice(sizes)) for n in range(3)]
        x = mtf.input("x", [batch, wide[0]], dtype)
        kept, shared = [x], {}
        for n in range(rng.randint(2, 6)):
            here = x.shape[-1]
            what = rng.choice(["product", "product", "again", "branch", "norm", "softmax", "factor", "scan", "relu"])
            if what == "product":
                there = rng.choice([d for d in wide if d != here])
                w = mtf.variable(f"w{n}", [here, there], dtype=dtype)
                shared[here, there] = w
                x = mtf.einsum([x, w], [batch, there])
            elif what == "again" and shared:
                (a, b), w = rng.choice(list(shared.items()))
                if here in (a, b):
                    x = mtf.einsum([x, w], [batch, b if here == a else a])
            elif what == "branch":
                same = [y for y in kept if y.shape == x.shape]
                x = x + rng.choice(same) if same else x * 2.0
            elif what == "norm":
                x = x * mtf.rsqrt(mtf.reduce_mean(mtf.square(x), reduced_dim=here) + 1e-6)
            elif what == "softmax":
                x = mtf.softmax(x, here)
            elif what == "factor":
                x = x * mtf.variable(f"f{n}", [rng.choice([here, batch])], dtype=dtype)
            elif what == "scan":
                x = _layers(x, n, rng)
            else:
                x = mtf.relu(x)
            kept.append(x)
        loss = mtf.reduce_mean(x if rng.random() < 0.3 else mtf.square(x))
        outputs: dict[str, Tensor] = {"loss": loss}
        if rng.random() < 0.3:
            outputs["x"] = x
        optimizer = rng.choice([mtf.optimize.SgdOptimizer(0.1), mtf.optimize.AdamOptimizer(0.1), None])
        train = optimizer is not None and any(op.opdef.name == "variable" for op in loss.graph.operations)
        return outputs, optimizer.minimize(loss) if train and optimizer else []

    return build


def _layers(x: Tensor, n: int, rng: random.Random) -> Tensor:
    """Some layers in a loop, with a residual or without."""
    batch, here = x.shape
    layers, inner = D(f"layers{n}", rng.choice([2, 4])), D(f"inner{n}", rng.choice([16, 64]))
    up = mtf.variable(f"up{n}", [layers, here, inner], dtype=x.dtype)
    down = mtf.variable(f"down{n}", [layers, inner, here], dtype=x.dtype)
    residual, remat = rng.random() < 0.6, rng.choice(["none", "full"])

    def layer(carries: Any, slices: Any) -> tuple[Any, Any]:
        h = mtf.relu(mtf.einsum([carries[0], slices[0]], [batch, inner]))
        y = mtf.einsum([h, slices[1]], [batch, here])
        return (carries[0] + y if residual else mtf.tanh(y),), ()

    (y,), _ = mtf.scan(layer, [x], [up, down], layers, remat=remat)
    return y


def attending(seed: int) -> Build:
    """Random attention: queries, keys and values that are products, of groups of heads, through a window or not."""

    def build() -> tuple[Mapping[str, Tensor], Sequence[Operation]]:
        rng = random.Random(seed)
        batch, length, model = D("batch", rng.choice([4, 16])), D("length", rng.choice([16, 64])), D("model", 32)
        heads, group, key = D("heads", rng.choice([2, 4])), D("group", rng.choice([1, 2])), D("key", 8)
        memory = D("memory_length", length.size)
        x = mtf.input("x", [batch, length, model], "bfloat16")
        wq = mtf.variable("wq", [model, heads, group, key], dtype="bfloat16")
        wk, wv = (mtf.variable(name, [model, heads, key], dtype="bfloat16") for name in ("wk", "wv"))
        q = mtf.einsum([x, wq], [batch, length, heads, group, key])
        k, v = (
            mtf.rename_dimension(mtf.einsum([x, w], [batch, length, heads, key]), "length", "memory_length")
            for w in (wk, wv)
        )
        window = rng.choice([None, None, 8])
        y = mtf.attention(q, k, v, length, memory, key, causal=window is not None or rng.random() < 0.5, window=window)
        if rng.random() < 0.7:
            y = mtf.einsum(
                [y, mtf.variable("wo", [heads, group, key, model], dtype="bfloat16")], [batch, length, model]
            )
        loss = mtf.reduce_mean(mtf.square(y))
        return {"loss": loss}, mtf.optimize.AdamOptimizer(0.1).minimize(loss) if rng.random() < 0.8 else []

    return build


def slowed(name: str, links: float) -> Slice:
    """A slice with links of another rate."""
    chip = Slice(name).chip
    return Slice(name, replace(chip, ici_bytes_per_second=chip.ici_bytes_per_second * links))


def tried(problem: SearchProblem, space: Sequence[Candidate], most: int, rng: random.Random) -> int:
    """Bounds of some candidates against their estimates."""
    count = 0
    for c in rng.sample(list(space), min(most, len(space))):
        try:
            program = problem.session.lower(c.mesh, c.layout, compiler=problem.compiler)
        except mtf.LayoutError:
            continue
        for links in (1.0, SLOW):
            c = replace(c, slice=slowed(c.slice.name, links))
            step = estimate(program, c.slice).step_seconds
            for bounds in {problem.bounds, problem.bounds_under(c)}:
                assert bounds.seconds(c) <= step * (1 + 1e-9), (str(c), links)
                assert bounds.critical_path_seconds(c) <= step * (1 + 1e-9), (str(c), links)
                assert bounds.core_time_seconds([c])[0] <= step * (1 + 1e-9), (str(c), links)
        count += 1
    return count


def space_of(problem: SearchProblem, name: str) -> list[Candidate]:
    roles = roles_of(problem.tensors, problem.dims, problem.batch)
    given = Fixed(LayoutRules(""), {}, problem.named)
    return [*candidates(problem.choices, Slice(name), roles, problem.tensors.sizes, given, 3)]


def test_nothing_is_below_its_bound_over_random_networks() -> None:
    count = 0
    for seed in (112, 160, 273, *range(draws(0, 1000))):
        rng = random.Random(seed)
        problem = problem_of(network(seed), (), (), ())
        count += tried(problem, space_of(problem, rng.choice(["v5e-4", "v3-8", "v4-16"])), draws(2, 4), rng)
    assert count > 2


def test_nothing_is_below_its_bound_over_wide_networks() -> None:
    """Chips whose products wait for HBM, and all compilers."""
    count = 0
    for seed in range(draws(1, 300)):
        rng = random.Random(seed)
        problem = problem_of(network(seed, 64), (), (), (), rng.choice([*mtf.COMPILERS.values()]))
        count += tried(problem, space_of(problem, rng.choice(["v6e-8", "v5e-4", "v5p-8"])), draws(2, 4), rng)
    assert count


def test_a_bound_knows_what_pieces_beside_products_hide() -> None:
    """A sum as long as its product: all but one piece of it; random programs, in depth, with pieces of many sizes."""

    def build() -> tuple[Any, Any]:
        model = D("model", 16384)
        x = mtf.input("x", [D("batch", 2**15), model], "bfloat16")
        for n in range(6):
            inner = D(f"inner{n}", 16384)
            shapes = {"up": [model, inner], "down": [inner, model]}
            up, down = (mtf.variable(f"{name}{n}", shape, dtype="bfloat16") for name, shape in shapes.items())
            x = mtf.relu(mtf.einsum([mtf.einsum([x, up], [*x.shape[:1], inner]), down], x.shape))
        return {"x": x}, []

    problem = problem_of(build, (), (), ())
    layout = LayoutRules(";".join(f"inner{n}:model" for n in range(6)))
    c = laid((), slowed("v5p-16", 1.2), mtf.Mesh("model:8"), layout, ())
    step = problem.estimate(c).step_seconds
    assert 0.95 * step < problem.bounds.core_time_seconds([c])[0] <= step
    for seed in range(draws(0, 300)):
        rng = random.Random(seed)
        compiler = replace(mtf.XLA_TPU, windowed_einsum_bytes=rng.choice([0, 2**20, 2**22, 2**24, 2**26]))
        problem = problem_of(network(seed, 64), (), (), (), compiler)
        tried(problem, space_of(problem, rng.choice(["v6e-8", "v5e-4", "v5p-8"])), 4, rng)


@cache
def four_layers() -> SearchProblem:
    config = mtf.models.preset("llama3.1-8b").replace(layers=4, vocab=256)
    return problem_of(lambda: mtf.models.train_step(config, 64, 4096, remat="full"), (), (), ())


@pytest.mark.parametrize(("mesh", "rules", "least"), [
    # gradients are summed over three axes; activations would be split along d_model for more bytes than weights take
    ("data:2;fsdp:8;model:4", "batch:data+fsdp;d_model:fsdp?;length:model?", 0.78),
    ("data:8;fsdp:8", "batch:data+fsdp;d_model:fsdp?", 0.81),
    # no other axis splits the weights that one gathers
    ("fsdp:4;length:16", "batch:fsdp;d_model:fsdp?;length:length;slots/d_model:length?;slots/d_model:fsdp?", 0.635),
    # updated weights are gathered after the last product, in whole; rules for slots split few products
    ("zero1:64", "batch:zero1;slots/d_model:zero1?", 0.87),
    # keys and values, gathered for attention, take turns on the links of one axis
    ("data:2;fsdp:4;model:8", "batch:data+fsdp;d_model:fsdp?;d_ff:model;length:model?", 0.755),
])  # fmt: skip
def test_a_bound_knows_what_no_other_split_spares(mesh: str, rules: str, least: float) -> None:
    problem = four_layers()
    c = laid((), Slice("v5e-64"), mtf.Mesh(mesh), LayoutRules(rules), problem.named)
    step = problem.estimate(c).step_seconds
    assert least * step < problem.bounds.core_time_seconds([c])[0] <= step


def test_a_narrow_product_is_not_slowed_down_as_a_wide_one() -> None:
    """Of few columns, it streams while the next weights shift in: nearly all of this step are two of them."""
    problem = problem_of(network(27, 64), (), (), ())
    (c,) = (c for c in space_of(problem, "v5e-4") if str(c.mesh) == "fsdp:2;model:2"
            and str(c.layout) == "batch:fsdp;d2:fsdp?;d2:model")  # fmt: skip
    step = problem.estimate(c).step_seconds
    assert 0.9 * step < problem.bounds.seconds(c) <= step
    assert tried(problem, [c], 1, random.Random(0)) == 1


def test_a_bound_knows_what_element_wise_work_moves() -> None:
    """Between two products something reads and writes all rows; where nothing is sent the bound is the step, nearly."""

    def build() -> tuple[Any, Any]:
        batch, inner = D("batch", 2**18), D("inner", 1024)
        x, v, w = mtf.input("x", [batch, inner], "bfloat16"), *(
            mtf.variable(name, [inner, D(f"{name}_out", 1024)], dtype="bfloat16") for name in ("v", "w")
        )  # fmt: skip
        h, gate = (mtf.einsum([x, y], [batch, y.shape[-1]]) for y in (v, w))
        h = mtf.softmax(h, h.shape[-1])
        return {"y": mtf.rename_dimension(h, "v_out", "w_out") * gate}, []

    problem = problem_of(build, (), (), ())
    c = laid((), Slice("v5e-4"), mtf.Mesh("data:4"), LayoutRules("batch:data"), ())
    step, bound = problem.estimate(c).step_seconds, problem.bounds.seconds(c)
    nothing = dict.fromkeys(problem.bounds.elements, 0)
    without = replace(problem.bounds, elements=nothing, _times={}, _seconds_of={})
    assert without.seconds(c) < 0.95 * bound <= 0.95 * step


@pytest.mark.parametrize(("layout", "most"), [
    ("batch:axis", 0.975),  # a kernel reads what both products before it compute
    ("inner:axis", 0.955),  # and writes a whole sum on each device
])  # fmt: skip
def test_a_bound_knows_what_kernels_of_products_move(layout: str, most: float) -> None:
    """A gated product waits for HBM on v6e; a bound that misses one of both is lower."""

    def build() -> tuple[Any, Any]:
        model, inner = D("model", 8192), D("inner", 28672)
        x = mtf.input("x", [D("batch", 2**15), model], "bfloat16")
        up, gate, down = (
            mtf.variable(name, shape, dtype="bfloat16")
            for name, shape in (("up", [model, inner]), ("gate", [model, inner]), ("down", [inner, model]))
        )
        wide = [x.shape[0], inner]
        h = mtf.einsum([x, up], wide) * mtf.silu(mtf.einsum([x, gate], wide))
        return {"y": mtf.einsum([mtf.tanh(mtf.einsum([h, down], x.shape)), up], wide)}, []

    problem = problem_of(build, (), (), ())
    c = laid((), Slice("v6e-4"), mtf.Mesh("axis:4"), LayoutRules(layout), ())
    step = problem.estimate(c).step_seconds
    assert most * step < problem.bounds.core_time_seconds([c])[0] <= step


def test_nothing_is_below_its_bound_over_random_attention() -> None:
    count = 0
    for seed in range(draws(1, 300)):
        rng = random.Random(seed)
        problem = problem_of(attending(seed), (), (), ())
        count += tried(problem, space_of(problem, rng.choice(["v5e-4", "v3-8", "v4-16"])), draws(2, 4), rng)
    assert count


def test_a_sum_may_be_pending_over_more_axes_than_its_product_is_split_over() -> None:
    """Then both are summed at once, over more links than one of them alone has."""
    problem = problem_of(network(751), (), (), ())
    (c,) = (c for c in space_of(problem, "v4-16") if str(c.layout) == "d2:model+model2;batch:model2?"
            and str(c.mesh) == "model:4;model2:2")  # fmt: skip
    assert tried(problem, [c], 1, random.Random(0)) == 1


def test_a_bound_knows_what_a_product_waits_for_over_hbm() -> None:
    """Of a small network most of a step is HBM, launches and latency."""

    def build() -> tuple[Any, Any]:
        batch, pixels, hidden, classes = (
            D(*d) for d in (("batch", 512), ("pixels", 784), ("hidden", 1024), ("classes", 10))
        )
        images, labels = mtf.input("images", [batch, pixels]), mtf.input("labels", [batch], dtype="int32")
        h = mtf.relu(mtf.einsum([images, mtf.variable("w1", [pixels, hidden])], [batch, hidden]))
        logits = mtf.einsum([h, mtf.variable("w2", [hidden, classes])], [batch, classes])
        losses = mtf.layers.softmax_cross_entropy_with_logits(logits, mtf.one_hot(labels, classes), classes)
        loss = mtf.reduce_mean(losses)
        return {"loss": loss}, mtf.optimize.SgdOptimizer(0.1).minimize(loss)

    problem = problem_of(build, (), (), (), INDEPENDENT)
    c = laid((), Slice("v3-8"), mtf.Mesh("model:8"), LayoutRules("hidden:model"), ())
    step = problem.estimate(c).step_seconds
    assert problem.bounds.seconds(c) < 0.4 * step
    assert 0.9 * step < problem.bounds.critical_path_seconds(c) <= step


@pytest.mark.parametrize("name", ["class_of_the_first_token", *random.Random(5).sample(sorted(ROWS), draws(12, 200))])
def test_what_a_bound_asks_for_is_no_more_than_what_experts_send(name: str) -> None:
    """Programs in which sums follow from others, and slices move less than all: nothing may be charged for those."""
    with mtf.Graph():
        case = ROWS[name]("float32")
    outputs = case.outputs or {}
    problem = problem_of(lambda: (outputs, case.updates), (), (), ())
    mesh = mtf.Mesh(case.mesh)
    where = slowed(f"v5e-{mesh.size}" if mesh.size > 2 else "v4-4", SLOW)
    c = laid((), where, mesh, LayoutRules(case.layout), problem.named)
    step = estimate(problem.session.lower(c.mesh, c.layout), where).step_seconds
    assert problem.bounds.critical_path_seconds(c) <= step * (1 + 1e-9)
    assert problem.bounds.core_time_seconds([c])[0] <= step * (1 + 1e-9)


def test_a_sum_of_tables_has_no_lesser_sum() -> None:
    """Exact where tables are small, from below where they would be too large."""
    rng = np.random.default_rng(0)
    for count in range(2, 8):
        table, whole = Table(2), np.zeros([2, *[3] * count])
        for _ in range(2 * count):
            scope = sorted(rng.choice(count, size=min(count, 3), replace=False).tolist())
            values = rng.uniform(0, 9, [2, *[3] * len(scope)])
            table.add(scope, values)
            whole = whole + values.reshape([2, *(3 if n in scope else 1 for n in range(count))])
        assert table.least() == pytest.approx(whole.reshape(2, -1).min(axis=1))


def test_a_product_with_a_repeated_operand_may_be_a_smaller_one() -> None:
    """A gradient that is repeated along a dim is summed up before the product, where that sends less."""
    problem = problem_of(network(9011, 64), (), (), ())
    (c,) = (c for c in space_of(problem, "v5p-8") if str(c.mesh) == "model:2;model2:2"
            and str(c.layout) == "batch:model;slots/d0:model?;slots/d0:model2;d0:model2")  # fmt: skip
    assert tried(problem, [c], 1, random.Random(0)) == 1


def test_sizes_that_follow_from_a_layout_are_no_limit_of_the_space_and_no_bound() -> None:
    """Grouped experts: until a layout is known, tokens and experts are one block each."""
    config = mtf.models.preset("mixtral-8x7b").replace(layers=1, vocab=256, d_model=256)
    problem = problem_of(lambda: mtf.models.train_step(config, 16, 64), (), (), ())
    assert problem.batch == "batch"
    assert {"batch": 16, "length": 64, "experts": 8}.items() <= problem.tensors.sizes.items()
    rng, space = random.Random(0), space_of(problem, "v5e-4")
    split = [c for c in space if "experts" in c.layout.dims and "batch" in c.layout.dims]
    assert tried(problem, split, draws(1, 40), rng) + tried(problem, space, draws(0, 1), rng) > 0


def test_a_bound_counts_products_of_experts() -> None:
    """Any axis may split their tokens, but none does more than one part of them. With the sizes that follow from a
    layout, short runs of a split sequence fill tiles in part, and an axis that a rule gives to tokens beside other dims
    splits neither them nor the experts that are chosen for them."""
    config = mtf.models.preset("mixtral-8x7b").replace(layers=1, vocab=256)
    problem = problem_of(lambda: mtf.models.train_step(config, 64, 1024), (), (), ())
    whole, *others = (
        laid((), Slice("v5p-8"), mtf.Mesh("data:4"), LayoutRules(rules), problem.named)
        for rules in ("batch:data", "length:data", "vocab:data;batch:data?")
    )
    step = problem.estimate(whole).step_seconds
    assert 0.7 * step < problem.bounds.core_time_seconds([whole])[0] <= step
    for c in others:
        step = problem.estimate(c).step_seconds
        assert problem.bounds.seconds(c) < 0.4 * step
        bounds = problem.bounds_under(c)
        for bound in (bounds.seconds(c), bounds.critical_path_seconds(c), bounds.core_time_seconds([c])[0]):
            assert 0.9 * step < bound <= step


@pytest.mark.parametrize("sizes", [(8192, 8, 4096), (1024, 256, 512)], ids=["full tiles", "short tiles"])
@each("rules", ["experts:data", "rows:data", "d:data", "f:data", ""])
def test_a_bound_counts_the_tiles_that_groups_share_on_a_device(rules: str, sizes: tuple[int, int, int]) -> None:
    """A device with one of eight groups of sorted rows has an eighth of the rows, but none of the shared tiles; one
    with an eighth of the rows of all groups has most of these tiles, and smaller ones of few rows."""
    rows, experts, d = (mtf.Dimension(*of) for of in zip(("rows", "experts", "d"), sizes, strict=True))
    f = mtf.Dimension("f", d.size)

    def build() -> tuple[dict[str, mtf.Tensor], list[mtf.Operation]]:
        x, ends = mtf.input("x", [rows, d], dtype="bfloat16"), mtf.input("sizes", [experts], dtype="int32")
        weights = [mtf.variable(f"w{n}", [experts, d, f], dtype="bfloat16") for n in range(3)]
        sums = [mtf.reduce_sum(mtf.ragged_dot(x, w, ends, rows, experts)) for w in weights]
        return {"total": mtf.add_n(sums)}, []

    problem = problem_of(build, (), (), ())
    c = laid((), Slice("v5p-16"), mtf.Mesh("data:8"), LayoutRules(rules), problem.named)
    step = problem.estimate(c).step_seconds
    for bounds in (problem.bounds, problem.bounds_under(c)):
        assert max(bounds.seconds(c), bounds.critical_path_seconds(c), *bounds.core_time_seconds([c])) <= step
        if rules == "rows:data" and rows.size > 1024:
            assert bounds.seconds(c) > 0.9 * step


def test_a_bound_reads_rows_of_two_experts_once() -> None:
    """Short runs of experts share tiles: most rows are computed several times, but each is read once."""
    sizes = {"d_model": 384, "d_ff": 512, "heads": 16, "kv_heads": 16, "head_dim": 64}
    config = mtf.models.preset("mixtral-8x7b").replace(layers=1, vocab=256, **sizes)
    problem = problem_of(lambda: mtf.models.train_step(config, 48, 1536, remat="full"), (), (), ())
    mesh, layout = mtf.Mesh("data:2;length:4;model:2"), LayoutRules("batch:data;length:length;vocab:model")
    c = laid((), Slice("v6e-16"), mesh, layout, problem.named)
    step, bounds = problem.estimate(c).step_seconds, problem.bounds_under(c)
    assert 0.78 * step < max(bounds.seconds(c), *bounds.core_time_seconds([c])) <= step


def test_a_bound_on_memory_knows_how_carries_lie() -> None:
    """A loop that computes its layers again stacks its carries, which a second rule for their batch does not split."""
    config = mtf.models.preset("llama3.1-8b").replace(layers=8, vocab=256, d_model=512, d_ff=512)
    problem = problem_of(lambda: mtf.models.train_step(config, 64, 1024, remat="full"), (), (), ())
    held = []
    for rules in ("", ";batch:model?", ";length:model?"):
        layout = LayoutRules(f"batch:data;d_ff:model;vocab:model{rules}")
        c = laid((), Slice("v5p-8"), mtf.Mesh("data:2;model:2"), layout, problem.named)
        held.append(problem.bounds.held_bytes(c))
        assert problem.bounds.placed_bytes(c) <= held[-1] <= problem.estimate(c).memory.peak_bytes
    whole = 8 * 64 * 1024 * 512 * 2  # layers, batch, length, d_model, bytes
    assert held[0] == held[1] == pytest.approx(held[2] + whole / 2 - whole / 4, abs=whole / 1000)  # and inputs


def test_a_bound_counts_products_of_what_has_got_other_names() -> None:
    """Such as experts, which take tokens under other names: no smaller product can stand in their place."""

    def build() -> tuple[Any, Any]:
        batch, inner, outer = D("batch", 2**15), D("inner", 4096), D("outer", 8192)
        w, v = (
            mtf.variable(name, shape, dtype="bfloat16")
            for name, shape in (("w", [inner, outer]), ("v", [outer, inner]))
        )
        x = mtf.rename_dimension(mtf.input("x", [batch, inner], "bfloat16"), "batch", "rows")
        h = mtf.rename_dimension(mtf.relu(mtf.einsum([x, w])), "rows", "lines")
        return {"y": mtf.einsum([h, v])}, []

    problem = problem_of(build, (), (), ())
    assert not any(node.smaller for node, *_ in problem.bounds.flow.products)
    c = laid((), Slice("v5p-8"), mtf.Mesh("data:4"), LayoutRules("batch:data"), problem.named)
    step = problem.estimate(c).step_seconds
    assert 0.7 * step < problem.bounds.seconds(c) <= step


def test_a_bound_knows_what_products_read_again() -> None:
    """On v6e products of many rows take longer over HBM than on the array."""

    def build() -> tuple[Any, Any]:
        x, w = mtf.input("x", [D("batch", 2**15), D("inner", 8192)], "bfloat16"), D("outer", 28672)
        h = mtf.relu(mtf.einsum([x, mtf.variable("w", [D("inner", 8192), w], dtype="bfloat16")]))
        return {"y": mtf.einsum([h, mtf.variable("v", [w, D("last", 8192)], dtype="bfloat16")])}, []

    problem = problem_of(build, (), (), ())
    c = laid((), Slice("v6e-4"), mtf.Mesh("m:4"), LayoutRules("batch:m"), ())
    est = problem.estimate(c)
    assert est.bound == "hbm"
    assert 0.9 * est.step_seconds < problem.bounds.seconds(c) <= est.step_seconds
    assert 0.9 * est.step_seconds < problem.bounds.core_time_seconds([c])[0] <= est.step_seconds


@pytest.mark.parametrize(("seed", "compiler", "name", "mesh", "layout"), [
    # rows computed from an input and a few temporaries that are still on the chip: no block is read again
    (2139, replace(mtf.XLA_TPU, windowed_einsum_bytes=2**20), "v5p-8", "zero1:4", "batch:zero1;slots/d1:zero1?"),
    # unrolled loops: what a trip sends after its last product may end in the next trip
    (20000, mtf.IDEAL, "v6e-4", "model:2;model2:2", "d0:model;inner2:model?;inner2:model2;inner3:model2"),
])  # fmt: skip
def test_a_bound_charges_for_nothing_that_may_be_spared(
    seed: int, compiler: mtf.Compiler, name: str, mesh: str, layout: str
) -> None:
    problem = problem_of(network(seed, 64), (), (), (), compiler)
    c = laid((), Slice(name), mtf.Mesh(mesh), LayoutRules(layout), problem.named)
    assert tried(problem, [c], 1, random.Random(0)) == 1


def test_a_bound_knows_what_a_layout_must_send() -> None:
    """Gradients of a split batch; a product whose contracted dim is split; weights that are gathered, or rows."""
    batch, inner, outer = D("batch", 2**17), D("inner", 4096), D("outer", 4096)

    def build() -> tuple[Any, Any]:
        w, v = mtf.variable("w", [inner, outer]), mtf.variable("v", [outer, inner])
        h = mtf.relu(mtf.einsum([mtf.input("x", [batch, inner]), w], [batch, outer]))
        loss = mtf.reduce_mean(mtf.square(mtf.einsum([h, v], [batch, inner])))
        return {"loss": loss}, mtf.optimize.SgdOptimizer(0.1).minimize(loss)

    problem = problem_of(build, (), (), ())
    where = slowed("v5e-4", SLOW)
    for layout in ("batch:m", "batch:m;inner:m?", "inner:m", "batch:m;outer:m?"):
        c = laid((), where, mtf.Mesh("m:4"), LayoutRules(layout), ())
        step = problem.estimate(c).step_seconds
        assert problem.bounds.seconds(c) < 0.01 * step, layout
        assert problem.bounds.critical_path_seconds(c) > 0.2 * step, layout


def test_a_bound_knows_what_collectives_take_of_the_core() -> None:
    """Weights that are gathered, gradients that are summed, and activations that move to weights."""

    def build() -> tuple[Any, Any]:
        batch, inner, outer, layers = D("batch", 2**15), D("inner", 4096), D("outer", 8192), D("layers", 4)
        up = mtf.variable("up", [layers, inner, outer], dtype="bfloat16")
        down = mtf.variable("down", [layers, outer, inner], dtype="bfloat16")

        def layer(carries: Any, slices: Any) -> tuple[Any, Any]:
            h = mtf.relu(mtf.einsum([carries[0], slices[0]], [batch, outer]))
            return (carries[0] + mtf.einsum([h, slices[1]], [batch, inner]),), ()

        (y,), _ = mtf.scan(layer, [mtf.input("x", [batch, inner], "bfloat16")], [up, down], layers, remat="full")
        loss = mtf.reduce_mean(mtf.square(y))
        return {"loss": loss}, mtf.optimize.SgdOptimizer(0.1).minimize(loss)

    problem = problem_of(build, (), (), ())
    least = {  # share of the step that the bound accounts for, and that without collectives
        ("fsdp:4", "batch:fsdp;inner:fsdp?"): (0.89, 0.88),
        ("data:4", "batch:data"): (0.93, 0.89),
        ("model:4", "inner:model;batch:model?"): (0.7, 0.62),
    }
    for (mesh, layout), (share, without) in least.items():
        c = laid((), Slice("v5e-4"), mtf.Mesh(mesh), LayoutRules(layout), ())
        step = problem.estimate(c).step_seconds
        assert problem.bounds.seconds(c) < without * step
        assert share * step < problem.bounds.core_time_seconds([c])[0] <= step


def residuals() -> tuple[Any, Any]:
    """Layers of two branches, each a product that is split along its sum, and an addition to the carry."""
    batch, inner, outer, layers = D("batch", 2**17), D("inner", 4096), D("outer", 8192), D("layers", 4)
    shapes = {"up": [layers, inner, outer], "down": [layers, outer, inner]}
    weights = [mtf.variable(f"{name}{n}", shapes[name], dtype="bfloat16") for n in range(2) for name in shapes]

    def layer(carries: Any, slices: Any) -> tuple[Any, Any]:
        (x,) = carries
        for up, down in (slices[:2], slices[2:]):
            x = x + mtf.einsum([mtf.relu(mtf.einsum([x, up], [batch, outer])), down], [batch, inner])
        return (x,), ()

    (y,), _ = mtf.scan(layer, [mtf.input("x", [batch, inner], "bfloat16")], weights, layers)
    return {"y": y}, []


@pytest.mark.parametrize(("mesh", "rules", "in_parts"), [
    ("data:2;model:4", "batch:data;outer:model;batch:model?", True),
    ("model:4;data:2", "batch:data;outer:model;batch:model?", False),  # its blocks are not within those of the data
    ("model:8", "outer:model", False),  # nothing else may be split
])  # fmt: skip
def test_a_sum_that_ends_a_trip_is_scattered_and_gathered_where_a_bound_says_so(
    monkeypatch: pytest.MonkeyPatch, mesh: str, rules: str, in_parts: bool
) -> None:
    """As many bytes as an all_reduce sends, and no addition is done twice."""
    said = []
    gathers = FlowCollectives.gathers_parts

    def recorded(collectives: FlowCollectives, edge: Any, axis: int) -> Any:
        said.append(gathers(collectives, edge, axis)[0])
        return gathers(collectives, edge, axis)

    problem = problem_of(residuals, (), (), ())
    c = laid((), Slice("v5e-8"), mtf.Mesh(mesh), LayoutRules(rules), ())
    program = problem.session.lower(c.mesh, c.layout, compiler=problem.compiler)
    sent = [
        i.step_kind.name for i, body, _ in walk(program) if isinstance(i, Move) and i.is_collective and body.is_body
    ]
    assert ("all_reduce" in sent) is not in_parts
    step = estimate(program, c.slice).step_seconds
    monkeypatch.setattr(FlowCollectives, "gathers_parts", recorded)
    bound = problem.bounds.core_time_seconds([c])[0]
    assert any(said) is in_parts
    assert bound <= step


def test_kernels_that_trail_a_trip_are_told_apart() -> None:
    """Those that neither a product nor the carry waits for may run beside what the trip ends with."""

    def build() -> tuple[Any, Any]:
        batch, inner, layers = D("batch", 1024), D("inner", 256), D("layers", 4)
        w = mtf.variable("w", [layers, inner, D("outer", 256)], dtype="bfloat16")

        def layer(carries: Any, slices: Any) -> tuple[Any, Any]:
            (x,) = carries
            y = mtf.rename_dimension(mtf.einsum([x, slices[0]], [batch, w.shape[-1]]), "outer", "inner")
            return (mtf.tanh(x + y),), (mtf.softmax(mtf.exp(x), inner),)

        (y,), (stack,) = mtf.scan(layer, [mtf.input("x", [batch, inner], "bfloat16")], [w], layers)
        return {"y": y, "stack": stack}, []

    program = problem_of(build, (), (), ()).session.lower("device:1")
    (loop,) = (i for i in program.instructions if isinstance(i, Loop))
    first = leading(loop.body, loop)
    names = {i.operation.opdef.name: first.isdisjoint(i.outputs) for i in loop.body.instructions if i.outputs}
    assert [names[name] for name in ("einsum", "tanh", "exp")] == [False, False, True]


def test_a_bound_knows_that_nothing_hides_what_ends_a_trip() -> None:
    """The carry, gathered after the last product, and its gradient."""
    config = mtf.models.preset("llama3.1-8b").replace(layers=4, vocab=256)
    problem = problem_of(lambda: mtf.models.train_step(config, 64, 4096, remat="full"), (), (), ())
    layout = LayoutRules("batch:fsdp;d_model:fsdp?;d_ff:model;batch:model?")
    c = laid((), Slice("v5e-64"), mtf.Mesh("fsdp:8;model:8"), layout, problem.named)
    step = problem.estimate(c).step_seconds
    assert 0.775 * step < problem.bounds.core_time_seconds([c])[0] <= step


def test_a_bound_knows_how_large_collectives_are_that_run_beside_products() -> None:
    """Rows are split by another axis: 128 MiB are too few to run in pieces, and of 256 MiB a piece is waited for."""
    config = mtf.models.preset("llama3.1-8b").replace(layers=2)
    problem = problem_of(lambda: mtf.models.train_step(config, 32, 4096), (), (), ())
    layout = LayoutRules("batch:fsdp;d_model:fsdp?;vocab:model;heads:model;d_ff:model;length:model?")
    for mesh, share in {"fsdp:8;model:2": 0.82, "fsdp:4;model:4": 0.8}.items():
        c = laid((), Slice("v5e-16"), mtf.Mesh(mesh), layout, ())
        step = problem.estimate(c).step_seconds
        assert share * step < problem.bounds.core_time_seconds([c])[0] <= step


def test_bounds_of_many_candidates_are_those_of_each() -> None:
    problem = problem_of(network(27, 64), (), (), ())
    space = random.Random(0).sample(space_of(problem, "v5e-4"), 12)
    together = problem.bounds.core_time_seconds(space)
    assert together == pytest.approx([problem.bounds.core_time_seconds([c])[0] for c in space], rel=1e-12)
