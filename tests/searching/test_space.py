"""The space of a search is what it says: an independent brute force over rules never beats a search with gap 0."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import combinations, pairwise, permutations, product
from typing import Any

import pytest

import meshlib as mtf
from hardware.slices import Slice
from layouts import LayoutRules
from meshlib.searching.programs import SearchProblem, problem_of
from meshlib.searching.roles import roles_of
from meshlib.searching.space import Fixed, candidates
from tests.effort import draws

Build = Callable[[], tuple[Any, Any]]
NAMES = ("batch", "pixels", "hidden", "hidden2", "classes")


def perceptron(*sizes: int, wide: str = "float32") -> Build:
    """Layers of these sizes, the first one the batch, trained by Adam."""

    def build() -> tuple[Any, Any]:
        batch, *dims = (mtf.Dimension(*d) for d in zip(NAMES, sizes, strict=False))
        x = mtf.input("x", [batch, dims[0]], wide)
        for n, (a, b) in enumerate(pairwise(dims)):
            x = mtf.relu(mtf.einsum([x, mtf.variable(f"w{n}", [a, b], dtype=wide)], reduced_dims=[a]))
        loss = mtf.reduce_mean(mtf.square(x))
        return {"loss": loss}, mtf.optimize.AdamOptimizer(0.1).minimize(loss)

    return build


def shapes(problem: SearchProblem) -> list[frozenset[str]]:
    return [frozenset(shape.names) for shape, _ in problem.tensors.counts]


def rules_of_an_axis(dims: Sequence[str], tensors: Sequence[frozenset[str]], axis: str) -> Iterator[str]:
    """Every set of dims of which no two share a tensor, required; alone, or with one other dim, optional."""
    for count in range(1, len(dims) + 1):
        for base in combinations(dims, count):
            if any(len(names & set(base)) > 1 for names in tensors):
                continue
            required = ";".join(f"{dim}:{axis}" for dim in base)
            yield required
            for scope, dim in product(("", "slots/"), dims):
                if dim not in base:
                    yield f"{required};{scope}{dim}:{axis}?"


def priorities(dims: Sequence[str], axis: str) -> Iterator[str]:
    """Every order in which dims may claim an axis, any number of them: one is required, others optional."""
    for count in range(1, len(dims) + 1):
        for first, *others in permutations(dims, count):
            yield ";".join([f"{first}:{axis}", *(f"{dim}:{axis}?" for dim in others)])


def least(build: Build, name: str, mesh: str, layouts: Iterator[str]) -> tuple[float, str]:
    """The fastest of some layouts, lowered by a session of their own and estimated, and its rules."""
    with mtf.Graph():
        session = mtf.Session(*build())
    best = float("inf"), ""
    for layout in layouts:
        try:
            est = mtf.estimate(session.lower(mesh, layout), name)
        except mtf.LayoutError:
            continue
        if est.fits:
            best = min(best, (est.step_seconds, layout))
    return best


PROGRAMS = [(64, 1024, 256, 1024), (512, 784, 1024), (2048, 64, 4096, 64), (2048, 512, 1024, 512, 64)]


@pytest.mark.parametrize("sizes", PROGRAMS[: draws(1, len(PROGRAMS))])
def test_no_rules_of_one_axis_beat_a_search(sizes: Sequence[int]) -> None:
    build = perceptron(*sizes)
    problem = problem_of(build, (), (), ())
    found = mtf.search(build, "v5e-4", axes=1, seconds=None, workers=1)
    assert found.gap == 0
    seconds, layout = least(build, "v5e-4", "m:4", rules_of_an_axis(problem.dims, shapes(problem), "m"))
    assert found.fastest.value <= seconds * (1 + 1e-9), layout


@pytest.mark.parametrize("sizes", PROGRAMS[1:3] if draws(0, 1) else [])
def test_no_rules_of_two_axes_beat_a_search(sizes: Sequence[int]) -> None:
    build = perceptron(*sizes)
    problem = problem_of(build, (), (), ())
    found = mtf.search(build, "v5e-4", axes=2, seconds=None, workers=1)
    assert found.gap == 0
    first, second = (list(rules_of_an_axis(problem.dims, shapes(problem), axis)) for axis in "mn")
    pairs = (f"{a};{b}" for a, b in product(first, second))
    seconds, layout = least(build, "v5e-4", "m:2;n:2", pairs)
    assert found.fastest.value <= seconds * (1 + 1e-9), layout


def test_companions_come_from_all_tensors() -> None:
    """A dim of variables beside another one: a wide perceptron's best layout."""
    problem = problem_of(perceptron(2048, 4096, 8192, 4096, 512), (), (), ())
    roles = roles_of(problem.tensors, problem.dims, problem.batch)
    assert "hidden:model;hidden2:model?" in map(str, roles)
    space = candidates((), Slice("v3-8"), roles, problem.tensors.sizes, Fixed(LayoutRules(""), {}), 1)
    assert any(str(c.layout) == "hidden:model;hidden2:model?" for c in space)
