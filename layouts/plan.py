"""Reshard plans: their steps, and the (source, destination) devices of a permute."""

from __future__ import annotations

from dataclasses import dataclass

from layouts.errors import LayoutError
from layouts.sharding import Axes, Sharding
from layouts.step_kinds import STEP_KINDS


@dataclass(frozen=True, slots=True)
class Step:
    """A collective, local slice or mask: `layouts.step_kinds.STEP_KINDS[kind]` is the record of its kind.

    A collective runs separately in each group of `before.mesh.groups(axes)`.

        all_gather          removes the minor-most `axes` of `dim`, or of several dims: see `gathered_axes`
        reduce_scatter      reduces pending sums over `axes`, which become minor-most on `dim`
        all_reduce          reduces pending reductions over `axes`
        all_to_all          moves the minor-most `axes` of `dim` to the minor-most position of `to_dim`
        collective_permute  sends blocks along `permute_pairs(before, after)`; sent bytes are the busiest sender's
        slice               keeps a part on each device; `axes` become minor-most on `dim`
        mask                makes a replicated value a pending sum over `axes`: the first device of each group keeps
                            its block, the others set it to zero

    Example:
      >>> from layouts import Sharding, reshard
      >>> split = Sharding("batch:8", "data:4", [("data",)])
      >>> step = reshard(split, split.with_axes([()]), 4).steps[0]
      >>> step.kind, step.axes, str(step.before), str(step.after)
      ('all_gather', ('data',), '[batch:8@data]', '[batch:8]')
    """

    kind: str
    axes: Axes  # major first
    dim: str | None
    to_dim: str | None
    before: Sharding
    after: Sharding
    payload_bytes: int  # the operand on one device
    sent_bytes: int | float

    @property
    def is_local(self) -> bool:
        """True if devices do not communicate."""
        return STEP_KINDS[self.kind].is_local

    def __str__(self) -> str:
        where = f" {self.dim}" if self.dim else ""
        to = f" -> {self.to_dim}" if self.to_dim else ""
        return f"{self.kind} over {'+'.join(self.axes)}{where}{to}: {self.sent_bytes} bytes sent"


@dataclass(frozen=True, slots=True)
class Plan:
    """Steps from one sharding to another.

    Example:
      >>> from layouts import Sharding, reshard
      >>> by_batch = Sharding("batch:8;d:8", "data:4", [("data",), ()])
      >>> plan = reshard(by_batch, by_batch.with_axes([(), ("data",)]), 4)
      >>> [step.kind for step in plan.steps]
      ['all_to_all']
    """

    steps: tuple[Step, ...]
    sent_bytes: int | float
    collectives: int

    def __str__(self) -> str:
        return "\n".join(map(str, self.steps)) or "nothing to do"


def gathered_axes(step: Step) -> tuple[tuple[str, Axes], ...]:
    """The axes that an all_gather removes, per dim.

    >>> before, after = (Sharding("b:8;d:8", "x:2;y:2", axes) for axes in ([("x",), ("y",)], [(), ()]))
    >>> gathered_axes(Step("all_gather", ("x", "y"), None, None, before, after, 64, 192))
    (('b', ('x',)), ('d', ('y',)))
    """
    pairs = zip(step.before.shape, step.before.axes, step.after.axes, strict=True)
    return tuple((d.name, had[len(has) :]) for d, had, has in pairs if len(had) > len(has))


def permute_pairs(before: Sharding, after: Sharding) -> tuple[tuple[int, int], ...]:
    """The (source, destination) devices of a permute from `before` to `after`, one pair per device.

    Blocks are only sent along axes that split a dim before or after, not along pending ones. A device that already
    has its block keeps it.

    >>> from layouts import Sharding, permute_pairs
    >>> mesh = "a:2;b:2"
    >>> permute_pairs(Sharding("n:8", mesh, [("a",)]), Sharding("n:8", mesh, [("b",)]))
    ((0, 0), (1, 2), (2, 1), (3, 3))
    """
    blocks, wanted = ((s.shape, s.mesh, s.pending, s.block_counts) for s in (before, after))
    if blocks != wanted:
        raise LayoutError(f"a permute cannot turn {before} into {after}: blocks or pending axes differ")
    mesh = before.mesh
    moving = before.split_axes | after.split_axes
    fixed = [i for i, axis in enumerate(mesh.axes) if axis not in moving]
    pairs: list[tuple[int, int]] = []
    senders: dict[object, list[int]] = {}
    receivers: list[tuple[int, object]] = []
    for device, point in enumerate(mesh.coordinates()):
        apart = tuple(point[i] for i in fixed)
        has, wants = before.block_index(point), after.block_index(point)
        if has == wants:
            pairs.append((device, device))
        else:
            senders.setdefault((apart, has), []).append(device)
            receivers.append((device, (apart, wants)))
    pairs += [(senders[key].pop(0), device) for device, key in receivers]
    return tuple(sorted(pairs))
