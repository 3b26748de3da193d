"""Reshard plans: their steps, and the (source, destination) devices of a permute."""

from __future__ import annotations

from dataclasses import dataclass

from layouts.errors import LayoutError
from layouts.sharding import Axes, Sharding
from layouts.step_kinds import STEP_KINDS


@dataclass(frozen=True, slots=True)
class Step:
    """One local slice or mask, or one collective: `layouts.step_kinds.STEP_KINDS[kind]` is the record of its kind.

    A collective runs apart in each group of `before.mesh.groups(axes)`.

        all_gather          the minor-most `axes` of `dim` go; without a dim, those of several dims: see `gathered_axes`
        reduce_scatter      pending sums over `axes` are taken, `axes` go minor-most on `dim`
        all_reduce          pending reductions over `axes` are taken
        all_to_all          the minor-most `axes` of `dim` go minor-most on `to_dim`
        collective_permute  the pairs are `permute_pairs(before, after)`; sent is what the busiest sender sends
        slice               each device keeps its part; `axes` go minor-most on `dim`
        mask                a whole value becomes a pending sum over `axes`: the first device of each group keeps its
                            block, the others hold zeros

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
        """Whether each device works on its own block."""
        return STEP_KINDS[self.kind].is_local

    def __str__(self) -> str:
        where = f" {self.dim}" if self.dim else ""
        to = f" -> {self.to_dim}" if self.to_dim else ""
        return f"{self.kind} over {'+'.join(self.axes)}{where}{to}: {self.sent_bytes} bytes sent"


@dataclass(frozen=True, slots=True)
class Plan:
    """Steps that lead from one sharding to another.

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
    """Per dim that an all_gather makes less split, the axes that go.

    >>> before, after = (Sharding("b:8;d:8", "x:2;y:2", axes) for axes in ([("x",), ("y",)], [(), ()]))
    >>> gathered_axes(Step("all_gather", ("x", "y"), None, None, before, after, 64, 192))
    (('b', ('x',)), ('d', ('y',)))
    """
    pairs = zip(step.before.shape, step.before.axes, step.after.axes, strict=True)
    return tuple((d.name, had[len(has) :]) for d, had, has in pairs if len(had) > len(has))


def permute_pairs(before: Sharding, after: Sharding) -> tuple[tuple[int, int], ...]:
    """(source, destination) devices that turn `before` into `after`, one pair for each device.

    Only axes that split something before or after are crossed; pending ones, for instance, are not. A
    device that already holds its block keeps it.

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
