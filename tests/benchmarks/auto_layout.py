"""Mesh TensorFlow's auto layout beside a search for the least memory, on the models of its paper.

    .venv/bin/python tests/benchmarks/auto_layout.py [--seconds 60] [--only 4.9b]

Auto layout (tensorflow/mesh, `mesh_tensorflow/auto_mtf`) takes a mesh as given and lays dims of the program on its
axes, each dim on at most one, no two dims of a tensor on the same axis, so that the peak of memory is least. Here the
best such layout is found by trying all of them, in the order of what they must hold, on `rows:16;cols:32`, the mesh of
the paper's largest model: so it is at least as good as what auto layout chooses by its estimate of memory. Beside it
stands what `mtf.search(objective="memory")` finds on the same slice, which has optional and scoped rules and any mesh.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from itertools import product

import meshlib as mtf
from hardware.slices import Slice
from layouts import LayoutRules, Mesh
from meshlib.core.errors import LayoutError
from meshlib.core.text import bytes_text, grid
from meshlib.models.train import transformer_builder
from meshlib.searching.programs import SearchProblem, problem_of
from meshlib.searching.roles import roles_of
from meshlib.searching.space import Candidate, laid

SLICE, ROWS, COLS = "v2-512", 16, 32
BATCH, LENGTH = 256, 256
MODELS = ("0.14b", "0.37b", "1.28b", "4.9b")


def plain(problem: SearchProblem) -> Iterator[Candidate]:
    """All layouts of the mesh that auto layout can say."""
    bases = [(), *(role.base for role in roles_of(problem.tensors, problem.dims, problem.batch) if not role.beside)]
    where, mesh = Slice(SLICE), Mesh(f"rows:{ROWS};cols:{COLS}")
    for rows, cols in product(bases, bases):
        if set(rows) & set(cols):
            continue
        sizes = problem.tensors.sizes
        if all(sizes[d] % ROWS == 0 for d in rows) and all(sizes[d] % COLS == 0 for d in cols):
            rules = LayoutRules([*((d, "rows") for d in rows), *((d, "cols") for d in cols)])
            yield laid(problem.choices, where, mesh, rules, ())


def best_plain(problem: SearchProblem, seconds: float) -> tuple[Candidate, float, bool]:
    """The one of the least peak, its bytes, and whether all were accounted for."""
    held = []
    for c in plain(problem):
        try:
            held.append((problem.bounds.held_bytes(c), len(held), c))
        except LayoutError:  # a tensor that does not divide
            continue
    begun, best, found = time.process_time(), float("inf"), None
    for least, _, c in sorted(held, key=lambda entry: entry[:2]):
        if least >= best:
            break
        if found is not None and time.process_time() - begun > seconds:
            return found, best, False
        peak = problem.estimate(c).memory.peak_bytes
        if peak < best:
            best, found = peak, c
    assert found is not None
    return found, best, True


def main() -> None:
    """The table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--only", default="")
    args = parser.parse_args()
    cells = [("model", "auto layout at best", "of each core", "searched", "of each core", "less")]
    for name in (n for n in MODELS if args.only in n):
        config = mtf.models.preset(f"mtf-lm-{name}")
        build = transformer_builder(config, BATCH, LENGTH)
        problem = problem_of(build, (("remat", "none"),), (), ())
        auto, peak, whole = best_plain(problem, args.seconds)
        known = [(auto.mesh, auto.layout)]
        found = mtf.search(
            config, SLICE, batch=BATCH, length=LENGTH, choices={"remat": ["none"]}, objective="memory", also=known,
            seconds=args.seconds,
        )  # fmt: skip
        best = found.best
        cells.append(
            (
                name, f"{auto.layout}{'' if whole else ' (time ran out)'}", bytes_text(peak),
                f"{best.candidate.mesh} {best.candidate.layout}", bytes_text(best.value),
                f"{1 - best.value / peak:.0%}",
            )
        )  # fmt: skip
        print("  ".join(cells[-1]), flush=True)
    print("\n".join(grid(cells)))


if __name__ == "__main__":
    main()
