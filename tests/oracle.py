"""What the generic tests judge by, written apart from the library: legality, layouts, differences, random words."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import pytest

from layouts import Shape
from meshlib.core.graph import Operation, Tensor
from meshlib.program.records import Program
from meshlib.simulation import chains, simulate

Array = np.ndarray[Any, Any]

UNSHARDED = "p:1"  # rows may name axis p themselves, in mtf.constrain
AXES = ("p", "q", "r")
LENGTHS = (1, 2, 2, 2, 3, 4)
MAX_DEVICES = 16


# ---------------------------------------------------------------- layouts


@dataclass(frozen=True)
class Layout:
    """A mesh and rules (dim, axes, optional), in the order in which they are written."""

    mesh: tuple[tuple[str, int], ...]
    rules: tuple[tuple[str, tuple[str, ...], bool], ...]

    @property
    def mesh_text(self) -> str:
        """As `mtf.lower(mesh=...)` takes it."""
        return ";".join(f"{axis}:{size}" for axis, size in self.mesh)

    @property
    def rules_text(self) -> str:
        """As `mtf.lower(layout=...)` takes it."""
        return ";".join(f"{dim}:{'+'.join(axes)}{'?' if optional else ''}" for dim, axes, optional in self.rules)

    def __str__(self) -> str:
        return f"mesh {self.mesh_text} layout {self.rules_text!r}"

    def allows(self, shapes: Iterable[Shape]) -> bool:
        """Whether every tensor can be laid out: required axes are free, and all sizes divide."""
        sizes = dict(self.mesh)
        for shape in shapes:
            taken: set[str] = set()
            for wanted in (False, True):
                for dim, axes, optional in self.rules:
                    if optional is not wanted or dim not in shape:
                        continue
                    free = [a for a in axes if a not in taken]
                    if not optional and len(free) < len(axes):
                        return False
                    if shape.dim(dim).size % prod(sizes[a] for a in free):
                        return False
                    taken.update(free)
        return True


def draw_layout(rng: np.random.Generator, dims: Sequence[str]) -> Layout:
    """A random mesh of 1 to 3 axes and random rules, legal or not: several axes per dim, optional rules, clashes."""
    while True:
        sizes = [LENGTHS[rng.integers(len(LENGTHS))] for _ in range(rng.integers(1, 4))]
        if 1 < prod(sizes) <= MAX_DEVICES:
            break
    axes = AXES[: len(sizes)]
    chosen: dict[str, list[str]] = {}
    for axis in rng.permutation(axes):
        if len(dims) and rng.random() < 0.85:
            chosen.setdefault(dims[rng.integers(len(dims))], []).append(str(axis))
    rules = [(dim, tuple(entry), bool(rng.random() < 0.2)) for dim, entry in chosen.items()]
    others = [d for d in dims if d not in chosen]
    if others and rng.random() < 0.4:  # a second claim on axes, mostly an optional one
        entry = tuple(str(a) for a in rng.permutation(axes)[: rng.integers(1, len(axes) + 1)])
        rules.append((others[rng.integers(len(others))], entry, bool(rng.random() < 0.7)))
    order = rng.permutation(len(rules))
    return Layout(tuple(zip(axes, sizes, strict=True)), tuple(rules[i] for i in order))


def needed(roots: Iterable[Tensor | Operation]) -> list[Tensor]:
    """Every tensor that the roots depend on, themselves included; those in bodies of loops too."""
    stack = [r if isinstance(r, Operation) else r.operation for r in roots]
    seen: dict[Operation, None] = {}
    while stack:
        op = stack.pop()
        if op not in seen:
            seen[op] = None
            inside = () if op.loop is None else (*op.loop.results, *op.loop.made.saved)
            stack += [x.operation for x in (*op.inputs, *inside)]
    return [y for op in seen for y in op.public_outputs]


# ---------------------------------------------------------------- running and comparing


@contextmanager
def computed_by_part(elements: int = 3) -> Iterator[None]:
    """The fast executor computes chains of elementwise operations in parts of so many elements."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chains, "PART", elements)
        patch.setattr(chains, "LARGE", 2 * elements)
        yield


def run(
    program: Program,
    feeds: Mapping[str, Array],
    executor: str = "exact",
    steps: int = 1,
    seed: int = 0,
    state: Mapping[str, Array] | None = None,
) -> list[dict[str, Array]]:
    """Per step the fetched outputs, and under "new NAME" the updated variables."""
    sim = simulate(program, executor=executor, seed=seed)
    for name, value in (state or {}).items():
        if name in sim.state:
            sim.state[name] = value
    fed = {name: feeds[name] for name in program.inputs}
    results = []
    for _ in range(steps):
        out = sim.step(fed)
        results.append({**out, **{f"new {name}": sim.state[name] for name in program.updates}})
    return results


def assert_close(
    found: Mapping[str, Array], wanted: Mapping[str, Array], tolerance: float, about: object, floor: float = 0.0
) -> None:
    """Equal up to `tolerance` of the largest magnitude of each array, or of `floor`; 0 demands every bit."""
    assert found.keys() == wanted.keys(), f"{about}: {sorted(found)} against {sorted(wanted)}"
    for name, b in wanted.items():
        a = found[name]
        assert a.shape == b.shape, f"{about}: '{name}' has shape {a.shape}, not {b.shape}"
        assert a.dtype == b.dtype, f"{about}: '{name}' has dtype {a.dtype}, not {b.dtype}"
        if tolerance == 0:
            assert np.array_equal(a, b), f"{about}: '{name}' differs in some bit\n{a}\n{b}"
            continue
        x, y = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert np.isfinite(y).all(), f"{about}: '{name}' is not finite"
        scale = max(float(np.abs(y).max(initial=0)), floor) or 1.0
        error = float(np.abs(x - y).max(initial=0)) / scale
        assert error <= tolerance, f"{about}: '{name}' is off by {error:.3g} of its scale {scale:.3g}\n{x}\n{y}"


def directions(rng: np.random.Generator, shape: Sequence[int], each_element: bool) -> Array:
    """Of length 1: along every element by itself, or three in which every element counts."""
    if each_element or prod(shape) <= 3:
        return np.eye(prod(shape)).reshape(-1, *shape)
    random = rng.normal(size=(3, *shape))
    return random / np.sqrt(np.sum(random**2, axis=tuple(range(1, random.ndim)), keepdims=True))


def numeric_slope(
    function: Callable[..., Array],
    values: Sequence[Array],
    which: int,
    cotangent: Array,
    direction: Array,
    step: float = 1e-5,
) -> float:
    """d <cotangent, function(values)> / d values[which], along `direction` of length 1, by central differences."""
    sides = []
    for sign in (1, -1):
        moved = [v + sign * step * direction if n == which else v for n, v in enumerate(values)]
        sides.append(np.sum(cotangent * function(*moved)))
    return float(sides[0] - sides[1]) / (2 * step)


# ---------------------------------------------------------------- random numbers, word by word


def threefry(key: tuple[int, int], counter: tuple[int, int]) -> tuple[int, int]:
    """Threefry-2x32, 20 rounds, in Python integers, after Salmon et al. 2011, section 3.3 and table 2."""
    mask = 0xFFFFFFFF
    words = [*key, 0x1BD11BDA ^ key[0] ^ key[1]]
    x = [(counter[0] + words[0]) & mask, (counter[1] + words[1]) & mask]
    for number in range(20):
        turn = (13, 15, 26, 6, 17, 29, 16, 24)[number % 8]
        x[0] = (x[0] + x[1]) & mask
        x[1] = ((x[1] << turn | x[1] >> (32 - turn)) & mask) ^ x[0]
        if number % 4 == 3:
            n = number // 4 + 1
            x = [(x[0] + words[n % 3]) & mask, (x[1] + words[(n + 1) % 3] + n) & mask]
    return x[0], x[1]


def random_words(
    name: str, shape: Sequence[int], seed: int = 0, step: int = 0, trips: Sequence[int] = ()
) -> Iterator[tuple[int, int]]:
    """The words of each element, in row-major order: key from seed and name, under which step and trips are encrypted
    one after the other; counter the global position."""
    digest = hashlib.blake2b(f"{seed}\0{name}".encode(), digest_size=8).digest()
    key = (int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little"))
    for number in (step, *trips):
        key = threefry(key, (0, number))
    return (threefry(key, (n >> 32, n & 0xFFFFFFFF)) for n in range(prod(shape)))


def uniform(name: str, shape: Sequence[int], low: float = 0.0, high: float = 1.0, trips: Sequence[int] = ()) -> Array:
    """24 random bits as a fraction, scaled to [low, high)."""
    fractions = [(x >> 8) / 2**24 for x, _ in random_words(name, shape, trips=trips)]
    return np.array([low + (high - low) * f for f in fractions]).reshape(shape)


def normal(name: str, shape: Sequence[int], mean: float = 0.0, stddev: float = 1.0) -> Array:
    """Box-Muller on two words."""
    values = [
        np.sqrt(-2 * np.log(((x >> 8) + 1) / 2**24)) * np.cos(2 * np.pi * (y >> 8) / 2**24)
        for x, y in random_words(name, shape)
    ]
    return mean + stddev * np.array(values).reshape(shape)
