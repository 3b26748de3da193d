"""Memory of one device over time, in whole tiles, whether it fits, and what would help where it does not.

The liveness is that of `meshlib.lower.memory` over the same order; here each buffer takes the tiles that its block
fills. Both figures are given: without padding exact, with padding exact for dims in their named order (a compiler
may choose a denser order).

Sources: `hardware.memory` for tiles; `meshlib.lower.memory` for who is live when.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from hardware.slices import Slice
from meshlib.estimate.kernels import padded_value_bytes
from meshlib.lower.memory import KINDS, Live, Liveness
from meshlib.lower.program import Program, Value, bytes_text


@dataclass(frozen=True)
class Remedy:
    """Something that would lower the peak: what to do, and the bytes of the peak that it would save (at most)."""

    what: str
    gain_bytes: int

    def __str__(self) -> str:
        return f"{self.what}: saves up to {bytes_text(self.gain_bytes)}"


@dataclass(frozen=True)
class DeviceMemory:
    """Memory of one device in one step. Bytes are exact for the order and the dims as named.

    Attributes:
      capacity_bytes: HBM of the device.
      peak_bytes: with tile padding; exact_peak_bytes: without, the `program.memory.peak_bytes`.
      by_kind: padded bytes at the peak; timeline_bytes: padded, one figure per instruction; timeline_by_kind: the
        same, divided.
      live: the buffers at the peak with their source lines, `bytes` padded, largest first.
      at: where the peak is.
      remedies: what would lower it, best first.
    """

    slice_name: str
    capacity_bytes: int
    peak_bytes: int
    exact_peak_bytes: int
    by_kind: dict[str, int]
    live: tuple[Live, ...]
    at: str
    timeline_bytes: tuple[int, ...] = field(repr=False)
    timeline_by_kind: tuple[tuple[int, ...], ...] = field(repr=False)
    remedies: tuple[Remedy, ...]

    @property
    def fits(self) -> bool:
        """Whether the peak, padding included, is no more than the HBM of the device."""
        return self.peak_bytes <= self.capacity_bytes

    @property
    def message(self) -> str:
        """One line where it fits; otherwise both sizes, the largest tensors and what would help."""
        peak, capacity = bytes_text(self.peak_bytes), bytes_text(self.capacity_bytes)
        share = f"{self.peak_bytes / self.capacity_bytes:.1%}"
        if self.fits:
            return f"fits: peak {peak} of {capacity} on each device of {self.slice_name} ({share}; exact)"
        over = bytes_text(self.peak_bytes - self.capacity_bytes)
        lines = [
            f"does not fit: each device of {self.slice_name} has {capacity} ({self.capacity_bytes} bytes), "
            f"the peak takes {peak} ({self.peak_bytes} bytes, {share}; exact), {over} too much, at {self.at}",
            "  largest tensors:",
            *(f"    {v}" for v in self.live[:5]),
        ]
        if self.remedies:
            lines += ["  what would help (gains are bounds, each alone):", *(f"    {r}" for r in self.remedies)]
        return "\n".join(lines)

    def __str__(self) -> str:
        lines = [
            self.message,
            f"peak per device at {self.at}: {self.peak_bytes} bytes in tiles, {self.exact_peak_bytes} without padding "
            "(both exact)",
        ]
        lines += [f"  {kind:<18} {bytes_text(n):>10}" for kind, n in self.by_kind.items() if n]
        return "\n".join(lines)


def memory_on(program: Program, slice_: Slice) -> DeviceMemory:
    """The memory of one device of `slice_` that runs `program`."""
    walk = _PaddedWalk(program)
    walk.trace()
    live = tuple(sorted((walk.shown(*pair) for pair in walk.peak_live), key=lambda v: -v.bytes))
    inside = walk.peak - sum(v.bytes for v in live)
    if inside:
        live = (*live, Live(walk.at, "inside the loop", "temporaries", inside, walk.at))
    by_kind = {k: sum(v.bytes for v in live if v.kind == k) for k in KINDS}
    return DeviceMemory(
        slice_.name,
        slice_.hbm_bytes_per_device,
        walk.peak,
        walk.exact_peak,
        by_kind,
        live,
        walk.at,
        tuple(walk.timeline),
        tuple(walk.by_kind_timeline),
        tuple(_remedies(program, [value for _, value in walk.peak_live], walk)),
    )


class _PaddedWalk(Liveness):
    """The walk of the liveness, counting tiles, and what is live by kind after each instruction."""

    def __init__(self, program: Program) -> None:
        super().__init__(program)
        self.padded = 0
        self.kinds: dict[Value, int] = {}  # owner -> index of the kind that it counts as
        self.sums = [0] * len(KINDS)
        self.peak = self.exact_peak = 0
        self.at = "the start"
        self.peak_live: list[tuple[Value, Value]] = []
        self.timeline: list[int] = []
        self.by_kind_timeline: list[tuple[int, ...]] = []

    def trace(self) -> None:
        """As `run`, with padding."""
        for v in self.resident:
            self._allocate(v)
        self._note("the start", 0, 0)
        for n, i in enumerate(self.program.instructions):
            if i.opcode not in ("input", "variable"):
                for k, y in enumerate(i.outputs):
                    if y not in self.inside:
                        self._place(n, i, y, i.inputs[k] if i.is_collective else None)
            inner = exact_inner = 0
            if i.body is not None:
                body = _PaddedWalk(i.body)
                body.trace()
                inner = body.peak - sum(padded_value_bytes(v) for v in set(i.body.inputs.values()))
                exact_inner = body.exact_peak - sum(v.local_bytes for v in set(i.body.inputs.values()))
            self._note(f"{i.opcode} '{i.operation.name}' ({i.operation.source})", inner, exact_inner)
            self.timeline.append(self.padded + inner)
            sums = list(self.sums)
            sums[KINDS.index("temporaries")] += inner
            self.by_kind_timeline.append(tuple(sums))
            for v in self.ends.get(n, ()):
                self._release(v)

    def shown(self, owner: Value, value: Value) -> Live:
        """A buffer as a user sees it, with the tiles that it takes."""
        found = self._live(owner, value)
        return Live(found.name, found.type, found.kind, padded_value_bytes(owner), found.source)

    def _note(self, at: str, inner: int, exact_inner: int) -> None:
        self.exact_peak = max(self.exact_peak, self.now + exact_inner)
        if self.padded + inner > self.peak:
            self.peak, self.at, self.peak_live = self.padded + inner, at, list(self.owned.items())

    def _allocate(self, v: Value) -> None:
        super()._allocate(v)
        self.padded += padded_value_bytes(v)
        self._count(v, v)

    def _share(self, v: Value, owner: Value) -> None:
        super()._share(v, owner)
        if self.owned.get(owner) is v:
            self._count(owner, v)

    def _release(self, v: Value) -> None:
        owner = self.buffer.get(v)
        super()._release(v)
        if owner is not None and owner not in self.owned and owner in self.kinds:
            size = padded_value_bytes(owner)
            self.padded -= size
            self.sums[self.kinds.pop(owner)] -= size

    def _count(self, owner: Value, shown: Value) -> None:
        size, kind = padded_value_bytes(owner), KINDS.index(self._kind(shown))
        if owner in self.kinds:
            self.sums[self.kinds[owner]] -= size
        self.kinds[owner] = kind
        self.sums[kind] += size


def _remedies(program: Program, live: list[Value], walk: _PaddedWalk) -> Iterable[Remedy]:
    """What would lower the peak, from what is live there; gains assume that the peak stays where it is."""
    found: list[Remedy] = []
    for axis in program.mesh.axes:
        split = sum(padded_value_bytes(v) for v in live if any(axis in axes for axes in v.sharding.axes))
        size = program.mesh.axis_size(axis)
        found.append(Remedy(f"twice the devices on mesh axis '{axis}' ({size} -> {2 * size})", split // 2))
    kinds = {v: walk._kind(v) for v in live}
    whole, slots = (
        sum(_spread_gain(program, v) for v in live if kinds[v] in wanted)
        for wanted in (("variables", "slots", "gradients"), ("slots", "gradients"))
    )
    found.append(Remedy("fully-sharded variables, slots and gradients (optional rules such as 'd_model:data?')", whole))
    found.append(
        Remedy("ZeRO-1: slots and gradients sharded over the axes that repeat them ('slots/...' rules)", slots)
    )
    kept = [padded_value_bytes(v) for v in live if kinds[v] == "activations"]
    if len(kept) > 1:
        found.append(Remedy("recompute (mtf.recompute_grad) what the forward pass keeps", sum(kept) - max(kept)))
    return sorted((r for r in found if r.gain_bytes > 0), key=lambda r: -r.gain_bytes)


def _spread_gain(program: Program, v: Value) -> int:
    """Bytes saved by splitting a value over the mesh axes that repeat it, as far as one of its dims divides."""
    split = {axis for axes in v.sharding.axes for axis in axes} | set(v.sharding.pending_axes)
    ways = 1
    for axis in program.mesh.axes:
        size = program.mesh.axis_size(axis)
        if axis not in split and any(n % (ways * size) == 0 for n in v.local.shape.sizes):
            ways *= size
    return padded_value_bytes(v) - padded_value_bytes(v) // ways
