"""Shapes of slices: which exist, and which of their axes wrap around.

* 2-D kinds (v2, v3, v5e, v6e): both sides powers of two, one at most twice the other (v5e-2 and such
  do not exist), up to the pod. An axis wraps only where it has the full pod length (16, or 32 on v3).
* 3-D kinds (v4, v5p, v7): 2x2x1, 2x2x2, 2x2x4, 2x4x4 without wrap, or sides that are multiples of 4, every
  axis wrapped, within the pod (v4 16x16x16, v5p 16x20x28, v7 16x24x24) in some order of its axes, and longer
  boxes that are in use: v4 12x12x24, v5p 12x24x24. A number alone means the most compact such shape. On v5p
  everything up to the whole pod of 8960 chips is a slice here (v5p-17920); what is offered for rent ends at
  6144 (v5p-12288). On v4 and v5p, shapes k x k x 2k and k x 2k x 2k may be twisted: then only the long axes close to
  rings of their own.
* A chip of your own, or a published one with another `pod_shape`, follows the rule of its `wrap_cube`;
  otherwise any shape within its pod is legal, and numbers alone mean powers of two. So a multipod of
  2020 is `Slice("v3-128x32", replace(CHIPS["v3"], pod_shape=(128, 32), max_slice_chips=4096))`.

Sources: docs.cloud.google.com/tpu/docs (v3, v4, v5e, v5p, v6e); jax-ml/scaling-book tpus.md;
Kumar et al., arXiv:1909.09756 and arXiv:2011.03641 for v3 shapes.
"""

from __future__ import annotations

import math
from functools import lru_cache

from hardware.chips import CHIPS, Chip

_CUBE_PARTS = ((1, 2, 2), (2, 2, 2), (2, 2, 4), (2, 4, 4))


def wrap_of(chip: Chip, shape: tuple[int, ...]) -> tuple[bool, ...]:
    """Which axes of a slice of `shape` have wrap-around links.

    Example:
      >>> wrap_of(CHIPS["v4"], (4, 4, 8)), wrap_of(CHIPS["v4"], (2, 2, 4)), wrap_of(CHIPS["v6e"], (4, 8))
      ((True, True, True), (False, False, False), (False, False))
    """
    if chip.wrap_cube is not None:
        whole_cubes = all(size % chip.wrap_cube == 0 for size in shape)
        return (whole_cubes,) * len(shape)
    return tuple(chip.wrap_axis is not None and size == chip.wrap_axis for size in shape)


def is_legal(chip: Chip, shape: tuple[int, ...]) -> bool:
    """True if slices of that chip are offered in that shape, in this order of its sides.

    >>> is_legal(CHIPS["v5e"], (16, 8)), is_legal(CHIPS["v5e"], (16, 4))
    (True, False)
    """
    if len(shape) != len(chip.pod_shape) or min(shape) < 1 or math.prod(shape) > chip.max_slice_chips:
        return False
    ordered = tuple(sorted(shape))
    if chip.wrap_cube is not None:
        if all(side % chip.wrap_cube == 0 for side in shape):
            return _is_box(chip, shape)
        return chip.wrap_cube == 4 and len(shape) == 3 and ordered in _CUBE_PARTS
    published = CHIPS.get(chip.name)
    if published is None or published.pod_shape != chip.pod_shape:
        return all(side <= limit for side, limit in zip(ordered, sorted(chip.pod_shape), strict=True))
    return ordered in {tuple(sorted(legal)) for legal in shapes_of(chip).values()}


@lru_cache(maxsize=64)
def shapes_of(chip: Chip) -> dict[int, tuple[int, ...]]:
    """Number of chips -> the shape that the number alone means."""
    if chip.wrap_cube is not None and len(chip.pod_shape) == 3:
        return _cube_shapes(chip)
    if len(chip.pod_shape) == 1:
        return {n: (n,) for n in range(1, chip.pod_shape[0] + 1)}
    least = 1 if chip.name_counts == "chips" else 4  # a v2 or v3 device is a board of four chips
    shapes = {}
    for power in range(chip.max_slice_chips.bit_length()):
        sides = [2 ** (power // len(chip.pod_shape)) for _ in chip.pod_shape]
        for i in range(power % len(sides)):
            sides[-1 - i] *= 2
        fits = all(side <= limit for side, limit in zip(sorted(sides), sorted(chip.pod_shape), strict=True))
        if fits and least <= math.prod(sides) <= chip.max_slice_chips:
            shapes[math.prod(sides)] = tuple(sides)
    for chips in chip.not_offered_chips:
        shapes.pop(chips, None)
    return shapes


def _cube_shapes(chip: Chip) -> dict[int, tuple[int, ...]]:
    """The most compact box of whole cubes for every number of cubes, and the parts of one cube."""
    edge = chip.wrap_cube
    assert edge is not None
    shapes: dict[int, tuple[int, ...]] = {4: (2, 2, 1), 8: (2, 2, 2), 16: (2, 2, 4), 32: (2, 4, 4)} if edge == 4 else {}
    cubes = chip.max_slice_chips // edge**3
    for a in range(1, round(cubes ** (1 / 3)) + 2):
        for b in range(a, math.isqrt(cubes // a) + 1):
            for c in range(b, cubes // (a * b) + 1):
                sides = (a * edge, b * edge, c * edge)
                chips = math.prod(sides)
                if _is_box(chip, sides) and sum(sides) < sum(shapes.get(chips, (chip.max_slice_chips,) * 3)):
                    shapes[chips] = sides
    return shapes


def _is_box(chip: Chip, sides: tuple[int, ...]) -> bool:
    """True if whole cubes form a slice with these sides."""
    longer = tuple(sorted(sides)) in chip.longer_boxes and math.prod(sides) <= math.prod(chip.pod_shape)
    return longer or _within(sides, chip.pod_shape)


def _within(sides: tuple[int, ...], pod: tuple[int, ...]) -> bool:
    return all(side <= limit for side, limit in zip(sorted(sides), sorted(pod), strict=True))
