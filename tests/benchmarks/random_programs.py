"""Random sharded programs in the fast executor against the same operations on whole arrays in plain NumPy.

    python tests/benchmarks/random_programs.py [--programs 60] [--scale 16]

Programs come from the writer of `tests/simulation/test_property_programs.py`, with every dim `scale` times as large.
The NumPy side runs each operation of the graph once on whole arrays, allocating as NumPy does. Printed: quantiles of
the ratio.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
from hypothesis import HealthCheck, given, settings

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # for the tests' writer of programs

import meshlib as mtf
from meshlib.core.engine import Engine
from meshlib.core.graph import Graph, Operation, Tensor
from meshlib.core.opdef import Array, Block
from meshlib.lowering.simplification import simplify
from tests.simulation import test_property_programs as writer


def evaluate(operations: list[Operation], inputs: Mapping[Tensor, Array], same: Callable, engine: Engine) -> dict:
    """Each operation on whole arrays."""
    values = dict(inputs)
    for op in operations:
        if op.outputs and op.outputs[0] in values:
            continue
        xs = [values[same(x)] for x in op.inputs]
        if op.opdef.name == "assign":
            continue
        if op.opdef.name == "scan":
            made = loop(op, xs, engine)
        else:
            offsets = {f.name: 0 for f in op.opdef.roles(op)}
            types = tuple(x.type for x in op.inputs)
            block = Block(op, types, op.outputs[0].type, offsets, engine, None, (0,) * len(xs))
            with np.errstate(all="ignore"):
                y = op.opdef.local(block, *xs)
            made = y if isinstance(y, tuple) else (y,)
        values.update(zip(op.outputs, made, strict=False))
    return values


def loop(op: Operation, xs: list[Array], engine: Engine) -> list[Array]:
    """The trips of a scan, one after the other."""
    record = op.loop
    assert record is not None
    carries, slices, rest = record.operands(xs)
    axes = [x.shape.index(record.dim.name) for x in record.operands(op.inputs).slices]
    stacks: list[list[Array]] = [[np.empty(0)] * record.dim.size for _ in record.stacked]
    for t in record.trip_order:
        cut = [np.take(x, t, axis=a) for x, a in zip(slices, axes, strict=True)]
        values = evaluate(
            record.body.operations,
            dict(zip(record.stand_ins, [*carries, *cut, *rest], strict=True)),
            lambda x: x,
            engine.in_trip(t),
        )
        carries = [values[y] for y in record.made.finals]
        for stack, y in zip(stacks, record.stacked, strict=True):
            stack[t] = values[y]
    return [*carries, *(np.stack(s) for s in stacks)]


def seconds(run: Callable[[], object], repeats: int) -> list[float]:
    """Times of single calls."""
    found = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        found.append(time.perf_counter() - start)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--programs", type=int, default=60)
    parser.add_argument("--scale", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    writer.SIZES = {n: s * args.scale for n, s in writer.SIZES.items()}
    writer.MAX_ELEMENTS *= args.scale**2
    writer.MAX_POINTS *= args.scale**3
    ratios: list[float] = []
    times: list[float] = []

    @settings(
        max_examples=args.programs, derandomize=True, deadline=None, database=None,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(writer.programs())
    def measure(p: writer.Written) -> None:
        program = mtf.lower(p.outputs, p.updates, p.mesh, p.layout, "highest")
        sim = mtf.simulate(program, check_nan=False)
        feeds = {n: x for n, x in p.feeds.items() if n in program.inputs}
        simple = simplify(program_graph(p), p.outputs.values(), p.updates)
        engine = Engine(0, 0, True, in_order=False)
        arrays = {}
        for op in simple.operations:
            if op.opdef.name == "input":
                arrays[op.output] = np.asarray(p.feeds[op.name], op.output.dtype.storage)
            elif op.opdef.name == "variable":
                arrays[op.output] = sim.state[op.name] if op.name in sim.state else np.zeros(op.output.shape.sizes)
        sim.step(feeds)
        ours: list[float] = []
        theirs: list[float] = []
        for _ in range(args.repeats):
            theirs += seconds(lambda: evaluate(simple.operations, arrays, simple.of, engine), 1)
            ours += seconds(lambda: sim.step(feeds), 1)
        ratios.append(statistics.median(ours) / statistics.median(theirs))
        times.append(statistics.median(theirs))

    measure()
    quantiles = np.quantile(ratios, [0.1, 0.5, 0.9])
    print(f"{len(ratios)} programs, NumPy {statistics.median(times) * 1e3:.2f} ms in the median")
    print(f"fast / NumPy: 10 % {quantiles[0]:.2f}, median {quantiles[1]:.2f}, 90 % {quantiles[2]:.2f}")


def program_graph(p: writer.Written) -> Graph:
    """The graph of a written program."""
    return next(iter(p.outputs.values())).graph


if __name__ == "__main__":
    main()
