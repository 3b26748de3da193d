"""A second opinion on resharding, written without a look at `layouts.resharding`.

`Exhaustive` decides for each pair of states whether one legal step leads from the first to the second, by
comparing the two, and then takes the min-plus closure of that table: the cheapest of all step sequences
of any length. `execute` runs a plan on NumPy blocks, device by device.

A state is (axes per dim, pending axes), both tuples. Costs are elements sent per device, times the number
of devices to make them integers, times `SCALE`, plus 1 per collective: one number that compares bytes first
and collectives second.
"""

from __future__ import annotations

from itertools import combinations, pairwise, permutations
from math import prod

import numpy as np

from layouts import Plan, Sharding, Step, permute_pairs

SCALE = 10_000
NEVER = 1 << 50


def all_states(sizes, axes):
    """Every state in which no axis is used twice and everything divides."""
    found = []
    names = sorted(axes)
    for n in range(len(names) + 1):
        for split in combinations(names, n):
            rest = [a for a in names if a not in split]
            for order in permutations(split):
                for cuts in combinations(range(n + len(sizes) - 1), len(sizes) - 1):
                    # stars and bars: the cuts part the ordered axes into one entry per dim
                    bounds = [-1, *cuts, n + len(sizes) - 1]
                    entries, at = [], 0
                    for low, high in pairwise(bounds):
                        entries.append(order[at : at + high - low - 1])
                        at += high - low - 1
                    if all(s % prod(axes[a] for a in e) == 0 for s, e in zip(sizes, entries, strict=True)):
                        for m in range(len(rest) + 1):
                            found += [(tuple(entries), p) for p in combinations(rest, m)]
    return found


class Exhaustive:
    """Cheapest costs between all states over a set of axes {name: size}."""

    def __init__(self, sizes, axes, summing=True):
        self.sizes, self.axes, self.summing = sizes, axes, summing
        self.states = all_states(sizes, axes)
        self.number = {state: i for i, state in enumerate(self.states)}
        table = np.array([[self.step(s, t) for t in self.states] for s in self.states], np.int64)
        np.fill_diagonal(table, 0)
        while True:
            shorter = np.stack([(row[:, None] + table).min(axis=0) for row in table])
            if (shorter == table).all():
                break
            table = shorter
        self.table = table

    def cost(self, source, target):
        """(elements sent times number of devices, collectives) of the cheapest sequence."""
        return divmod(int(self.table[self.number[source], self.number[target]]), SCALE)

    def step(self, source, target):
        """Cost of the cheapest single step between two states, or NEVER."""
        (old, was), (new, will) = source, target
        if not set(will) <= set(was):
            return NEVER
        size = lambda names: prod(self.axes[a] for a in names)  # noqa: E731
        block = prod(self.sizes) // prod(size(e) for e in old) * prod(self.axes.values())
        done = set(was) - set(will)
        k = size(done)
        changed = [d for d in range(len(old)) if old[d] != new[d]]
        grown = [d for d in changed if new[d][: len(old[d])] == old[d]]
        shrunk = [d for d in changed if old[d][: len(new[d])] == new[d]]
        if done:
            if not changed:
                return SCALE * 2 * (k - 1) * block // k + 1  # all_reduce
            if changed == grown and len(changed) == 1 and self.summing:
                d = changed[0]
                if set(new[d][len(old[d]) :]) == done:
                    return SCALE * (k - 1) * block // k + 1  # reduce_scatter
            return NEVER
        if changed == grown and len(changed) == 1:
            return 0  # slice; axes of `will` cannot be among the new ones, states use no axis twice
        if changed == shrunk and len(changed) == 1:
            d = changed[0]
            return SCALE * (size(old[d][len(new[d]) :]) - 1) * block + 1  # all_gather
        best = NEVER
        if len(changed) == 2 and len(grown) == 1 and len(shrunk) == 1:
            to, out = grown[0], shrunk[0]
            moved = old[out][len(new[out]) :]
            if new[to][len(old[to]) :] == moved:
                best = SCALE * (size(moved) - 1) * block // size(moved) + 1  # all_to_all
        if [size(e) for e in old] == [size(e) for e in new]:
            best = min(best, SCALE * block + 1)  # collective_permute
        return best


def block_of(sharding: Sharding, device: int) -> tuple[slice, ...]:
    """What a device holds, from the definition in words: the first axis is the major one."""
    point = dict(zip(sharding.mesh.axes, np.unravel_index(device, sharding.mesh.sizes), strict=True))
    cut = []
    for dim, entry in zip(sharding.shape, sharding.axes, strict=True):
        sizes = [sharding.mesh.axis_size(a) for a in entry]
        index = int(np.ravel_multi_index([point[a] for a in entry], sizes)) if entry else 0
        width = dim.size // prod(sizes)
        cut.append(slice(index * width, (index + 1) * width))
    return tuple(cut)


def spread(sharding: Sharding, seed: int = 0) -> tuple[list[np.ndarray], np.ndarray]:
    """Blocks on all devices that hold, with the pending reductions, the returned global array."""
    rng = np.random.default_rng(seed)
    mesh, pending = sharding.mesh, sharding.pending_axes
    sizes = [mesh.axis_size(a) for a in pending]
    parts = rng.integers(-999, 999, [*sizes, *sharding.shape.sizes])
    where = [mesh.index(a) for a in pending]
    blocks = []
    for device in range(mesh.size):
        point = np.unravel_index(device, mesh.sizes)
        blocks.append(parts[tuple(point[i] for i in where)][block_of(sharding, device)])
    return blocks, parts


def reduced(parts: np.ndarray, source: Sharding, axes: tuple[str, ...]) -> np.ndarray:
    """The parts of `spread` with the reductions over `axes` taken."""
    for i in reversed(range(len(source.pending))):
        axis, kind = source.pending[i]
        if axis in axes:
            parts = getattr(np, kind)(parts, axis=i)
    return parts


def execute(plan: Plan, blocks: list[np.ndarray]) -> list[np.ndarray]:
    """Run a plan on the blocks of all devices."""
    for step in plan.steps:
        assert all(b.shape == step.before.local_shape.sizes for b in blocks)
        blocks = _run(step, blocks)
        assert all(b.shape == step.after.local_shape.sizes for b in blocks)
    return blocks


def _run(step: Step, blocks: list[np.ndarray]) -> list[np.ndarray]:
    dims = step.before.shape.names
    at = dims.index(step.dim) if step.dim else -1
    result: list[np.ndarray] = [None] * len(blocks)  # type: ignore[list-item]
    if step.kind == "collective_permute":
        pairs = permute_pairs(step.before, step.after)
        assert sorted(s for s, _ in pairs) == sorted(d for _, d in pairs) == list(range(len(blocks)))
        for source, destination in pairs:
            result[destination] = blocks[source]
        groups = step.before.mesh.groups(step.axes)
        assert all(any(s in g and d in g for g in groups) for s, d in pairs)
        return result
    for group in step.before.mesh.groups(step.axes):
        k = len(group)
        mine = [blocks[device] for device in group]
        if step.kind in ("all_reduce", "reduce_scatter"):
            kind = dict(step.before.pending)[step.axes[0]]
            total = getattr(np, kind)(np.stack(mine), axis=0)
            out = [total] * k if step.kind == "all_reduce" else np.split(total, k, axis=at)
        elif step.kind == "all_gather":
            out = [np.concatenate(mine, axis=at)] * k
        elif step.kind == "slice":
            out = [np.split(block, k, axis=at)[i] for i, block in enumerate(mine)]
        elif step.kind == "mask":
            out = [block * (i == 0) for i, block in enumerate(mine)]
        elif step.kind == "all_to_all":
            to = dims.index(step.to_dim)
            cut = [np.split(block, k, axis=to) for block in mine]
            out = [np.concatenate([cut[j][i] for j in range(k)], axis=at) for i in range(k)]
        else:
            raise AssertionError(step.kind)
        for device, block in zip(group, out, strict=True):
            result[device] = block
    return result
