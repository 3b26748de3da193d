"""What bounds leave out, against what lowerings choose: splits that duplicate work, and collectives that others spare.

Bounds argue from a lowering's optimality, so each choice here is proved.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from functools import cache

import pytest

import meshlib as mtf
from hardware.slices import Slice
from layouts import LayoutRules
from meshlib.estimation.time.physics import CALIBRATED
from meshlib.program.instructions import Compute, Value
from meshlib.program.records import Program, walk
from meshlib.searching.bounds.core_time import NodeTimes
from meshlib.searching.bounds.dataflow import Flow, Split
from meshlib.searching.bounds.needless_collectives import NeedlessCollectives
from meshlib.searching.bounds.shared_splits import GATHERS, Batch
from meshlib.searching.programs import SearchProblem, problem_of
from meshlib.searching.space import Candidate, laid
from tests.effort import draws
from tests.searching.test_bounds import Build, attending, network, space_of


def flows(flow: Flow) -> Iterator[Flow]:
    """A dataflow, and those of its loops."""
    yield flow
    for node in flow.nodes:
        if node.loop is not None:
            yield from flows(node.loop)


def dim_of(v: Value, axis: str) -> str | None:
    """The dim along which a mesh axis splits a value."""
    return next((d for d in v.tensor.shape.names if axis in v.sharding.of(d)), None)


def chosen_split(i: Compute, splits: Sequence[Split | None], axis: str) -> int | None:
    """The option that a lowering has chosen for an operation over a mesh axis; None if it is none of them."""
    operands = tuple(dim_of(x, axis) for x in i.inputs)
    for n, s in enumerate(splits):
        if (s.operands if s is not None else (None,) * len(operands)) == operands:
            return n
    return None


def left_out(problem: SearchProblem, c: Candidate) -> tuple[int, int]:
    """Numbers of options that a bound leaves out, and of gathers; none of them is what the lowering chooses."""
    program: Program = problem.session.lower(c.mesh, c.layout, compiler=problem.compiler)
    if program.choice.gap:
        return 0, 0
    lowered = {i.operation: i for i, _, _ in walk(program) if isinstance(i, Compute)}
    batch = Batch([c], problem.bounds.passages, CALIBRATED, problem.compiler)
    options = gathers = 0
    for flow in flows(problem.bounds.flow):
        seconds = {n: own for n in range(len(flow.nodes)) if (own := batch.seconds(flow, n)) is not None}
        usable = {n: NodeTimes.of(own).usable for n, own in seconds.items()}
        for narrowed in (NeedlessCollectives.without_sums, NeedlessCollectives.without_gathers):
            usable = dict(narrowed(NeedlessCollectives(batch, flow, usable)))
        for axis, (name, _, _) in enumerate(batch.splits[0].axes):
            chosen: dict[int, int] = {}
            for n in usable:
                product, possible = flow.nodes[n].product, batch.options_of(flow.nodes[n])[1][0, axis]
                if product is None or product.instruction.operation not in lowered:
                    continue
                i = lowered[product.instruction.operation]
                split = chosen_split(i, batch.splits_of(flow, n), name)
                options += int((possible & ~usable[n][axis][0]).sum())
                if split is not None and possible[split] and not any(x.sharding.pending for x in i.inputs):
                    assert usable[n][axis][0, split], (str(c), str(i.operation), name)
                    chosen[n] = split
            for edges in flow.apart:
                needless = NeedlessCollectives(batch, flow, usable).gathers(edges, axis)[0]
                for edge in edges:
                    if edge.source in chosen and edge.target in chosen and edge.home is None:
                        kinds = batch.kinds(flow, edge, axis)[0]
                        gathers += int((needless[:, None] & (kinds == GATHERS)).sum())
                        at = chosen[edge.source], chosen[edge.target]
                        assert not (needless[at[0]] and kinds[at] == GATHERS), (str(c), str(edge.value), name)
    return options, gathers


def counted(build: Build, name: str, most: int, rng: random.Random) -> int:
    """The number of options that bounds of some candidates leave out."""
    problem = problem_of(build, (), (), ())
    space = space_of(problem, name)
    return sum(left_out(problem, c)[0] for c in rng.sample(space, min(most, len(space))))


def test_a_lowering_chooses_nothing_that_bounds_leave_out() -> None:
    """Random programs and layouts, small ones and large ones; in the model below, gathers are left out, too."""
    options = 0
    drawn = [(seed, random.Random(seed).choice([1, 64])) for seed in range(draws(0, 300))]
    for seed, scale in ((7, 1), (8, 64), *drawn):
        rng = random.Random(seed)
        options += counted(network(seed, scale), rng.choice(["v6e-8", "v5e-16", "v5p-8"]), 4, rng)
        if seed % 3 == 1:
            options += counted(attending(seed), rng.choice(["v5e-4", "v5e-16"]), 3, rng)
    assert options


@cache
def two_layers() -> SearchProblem:
    config = mtf.models.preset("llama3.1-8b").replace(layers=2, vocab=256)
    return problem_of(lambda: mtf.models.train_step(config, 32, 2048, remat="full"), (), (), ())


@pytest.mark.parametrize(("mesh", "rules"), [
    ("data:2;fsdp:4;model:2", "batch:data+fsdp;d_model:fsdp?;vocab:model;d_ff:model;length:model?"),
    ("fsdp:4;length:4", "batch:fsdp;d_model:fsdp?;length:length;d_model:length?"),
])  # fmt: skip
def test_a_lowering_of_a_model_chooses_nothing_that_bounds_leave_out(mesh: str, rules: str) -> None:
    problem = two_layers()
    c = laid((), Slice("v5e-16"), mtf.Mesh(mesh), LayoutRules(rules), problem.named)
    assert min(left_out(problem, c)) > 0
