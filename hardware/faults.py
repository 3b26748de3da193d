"""Slices that a pod still offers when chips fail.

Pods of cubes (v4, v5p, v7) are wired by optical switches: a failed chip costs its cube, and slices are made of any
cubes that are left. Other pods are meshes: a slice is a box at a multiple of its sides, and works if none of its chips
failed.

Source: Jouppi et al., "TPU v4", ISCA 2023 (arXiv:2304.01433), section 2.3 and figure 4.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence

from hardware.checks import HardwareError, amount, wholes
from hardware.slices import Slice, as_slice
from hardware.torus import Coordinates


def slices_left(kind: Slice | str, failed: Iterable[Sequence[int]], pod: Slice | str | None = None) -> int:
    """The number of slices of one kind that a pod still offers at once.

    Args:
      kind: the slice, or its name.
      failed: coordinates of failed chips in the pod.
      pod: the slice that is all of it (default: the chip's `pod_shape`).
    Returns: their number; on meshes that of the best orientation, all alike.
    Raises: HardwareError for coordinates outside the pod, or slices of another chip.
    Example:
      >>> slices_left("v4-8x8x16", [(0, 0, 0), (1, 2, 3), (4, 0, 0)])  # two cubes of 64 are lost
      3
      >>> slices_left("v5e-8x8", [(0, 0), (15, 15)]), slices_left("v5e-8x16", [(0, 0), (15, 0)])
      (2, 1)

    Source: module docstring.
    """
    slice_ = as_slice(kind)
    shape = _pod_shape(slice_, pod)
    broken = {_within(chip, shape) for chip in failed}
    edge = slice_.chip.wrap_cube
    if edge is None:
        return max(_boxes_left(sides, shape, broken) for sides in set(itertools.permutations(slice_.torus_shape)))
    lost = {tuple(c // edge for c in chip) for chip in broken}
    cubes = math.prod(side // edge for side in shape)
    if all(slice_.wrap) or slice_.twisted:
        return (cubes - len(lost)) * edge**3 // math.prod(slice_.torus_shape)
    cube = (edge,) * len(shape)
    inside = [{tuple(c % edge for c in chip) for chip in broken if tuple(c // edge for c in chip) == at} for at in lost]
    turned = set(itertools.permutations(slice_.torus_shape))
    whole = max(_boxes_left(sides, cube, set()) for sides in turned)
    return (cubes - len(lost)) * whole + sum(max(_boxes_left(sides, cube, own) for sides in turned) for own in inside)


def offered_share(kind: Slice | str, host_availability: float, switched: bool | None = None) -> float:
    """Expected share of a pod's chips in slices of one kind, where each host is up with some probability.

    Args:
      kind: the slice, or its name; of whole cubes where `switched`.
      host_availability: the probability, 0 to 1.
      switched: whether slices take any cubes (default: as the chip does), or have fixed places in the pod.
    Raises: HardwareError for a probability outside 0 to 1, or cubes where there are none.
    Example:
      >>> [f"{offered_share('v4-8x8x16', 0.99, switched):.0%}" for switched in (True, False)]
      ['75%', '8%']

    Source: module docstring.
    """
    slice_ = as_slice(kind)
    _pod_shape(slice_, None)
    up = amount("host_availability", host_availability)
    if up > 1:
        raise HardwareError(f"host_availability must be a probability, not {host_availability!r}")
    pod, chips, edge = math.prod(slice_.chip.pod_shape), math.prod(slice_.torus_shape), slice_.chip.wrap_cube
    hosts = math.ceil(chips / slice_.chip.chips_per_host)
    if not (edge is not None if switched is None else switched):
        return pod // chips * chips / pod * up**hosts
    if edge is None or chips % edge**3:
        raise HardwareError(f"{slice_.name} is not made of whole cubes; give switched=False")
    cubes, needed = pod // edge**3, chips // edge**3
    good = up ** (edge**3 // slice_.chip.chips_per_host)
    expected = sum(
        math.comb(cubes, n) * good**n * (1 - good) ** (cubes - n) * (n // needed) for n in range(needed, cubes + 1)
    )
    return expected * needed / cubes


def _pod_shape(slice_: Slice, pod: Slice | str | None) -> tuple[int, ...]:
    if slice_.slices > 1:
        raise HardwareError(f"{slice_.name} joins {slice_.slices} slices; ask for one of them, {slice_.single.name}")
    if slice_.failed or slice_.failed_links:
        raise HardwareError(f"{slice_.name} has failed parts; ask for a whole slice, such as {slice_.single.name}")
    if pod is None:
        return slice_.chip.pod_shape
    whole = as_slice(pod)
    if whole.chip != slice_.chip:
        raise HardwareError(f"{slice_.name} is not a slice of a pod of {whole.chip.name}")
    return whole.torus_shape


def _within(chip: Sequence[int], shape: tuple[int, ...]) -> Coordinates:
    place = wholes("coordinates of a failed chip", chip)
    if len(place) != len(shape) or any(c >= side for c, side in zip(place, shape, strict=True)):
        raise HardwareError(f"failed chip {place} is not in a pod of shape {'x'.join(map(str, shape))}")
    return place


def _boxes_left(sides: Sequence[int], shape: Sequence[int], broken: set[Coordinates]) -> int:
    """Number of aligned boxes of these sides without a broken chip."""
    total = math.prod(size // side for size, side in zip(shape, sides, strict=True))
    hit = {tuple(c // side for c, side in zip(chip, sides, strict=True)) for chip in broken}
    edges = [size // side for size, side in zip(shape, sides, strict=True)]
    return total - sum(all(c < edge for c, edge in zip(box, edges, strict=True)) for box in hit)
