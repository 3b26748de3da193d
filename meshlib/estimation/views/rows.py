"""Rows of an estimate: one per fusion group, collective and loop, with exact and modelled figures."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hardware.chips import Chip
from hardware.memory import PCIE_EFFICIENCY, hbm_rate
from hardware.network import Cost
from hardware.placement import CORES, DCN
from meshlib.core.graph import FORWARD
from meshlib.core.shown import Brief
from meshlib.estimation.time.kernel_times import KernelTime
from meshlib.estimation.time.scheduling import Event, StepSchedule
from meshlib.estimation.work.communication import launch_seconds

BOUNDS = ("mxu", "vpu", "hbm", "ici", "dcn", "pcie", "latency", "input")


@dataclass(frozen=True, slots=True, repr=False)
class Row(Brief):
    """One fusion group, collective or copy to or from the host.

    `hidden_seconds` is the part of a kernel that ran ahead: operands prefetched during other kernels.
    `launch_seconds` is the part of `latency_seconds` that starting it takes; the rest is hops.

    Exact, for one run on one device: `mxu_flops` executed, `useful_flops` of them not repeated elsewhere
    (on average over the trips of a pipeline, none of those in a bubble),
    `vpu_ops`, `hbm_bytes` at the group's boundary without padding, `payload_bytes` and `sent_bytes` of a collective,
    and `count`, its runs in a step. Modelled: everything in seconds, `traffic_bytes` over HBM (padding and what a
    product reads again), `bound`, `utilisation`: the share of the bounding engine's nominal rate that is reached (0
    where latency bounds).
    """

    name: str
    opcode: str
    kind: str  # "compute", "collective" or "copy" (to or from the host)
    phase: str
    source: str
    count: int
    group: int
    seconds: float
    bound: str
    utilisation: float
    mxu_seconds: float = 0.0
    vpu_seconds: float = 0.0
    hbm_seconds: float = 0.0
    ici_seconds: float = 0.0
    dcn_seconds: float = 0.0
    latency_seconds: float = 0.0
    launch_seconds: float = 0.0
    hidden_seconds: float = 0.0
    mxu_flops: int = 0
    useful_flops: float = 0.0
    vpu_ops: int = 0
    hbm_bytes: int = 0
    traffic_bytes: float = 0.0
    payload_bytes: int = 0
    sent_bytes: float = 0.0
    axes: tuple[str, ...] = ()
    mxu_dtype: str = ""  # of its product: "bf16", "int8", "fp8"

    @property
    def total_seconds(self) -> float:
        """Seconds of all runs in a step."""
        return self.seconds * self.count


def rows_of(schedule: StepSchedule, chip: Chip, count: int = 1, active: float = 1.0) -> Iterator[Row]:
    """The rows of a schedule in order; the rows of a loop's body replace the loop, with their total count.

    `active` is the share of these runs outside pipeline bubbles.
    """
    for event in schedule.events:
        if event.loop is not None:
            yield from rows_of(event.loop, chip, event.runs(count), active * event.active)
        elif event.move is not None:
            yield _collective_row(event, chip, count)
        elif event.copy is not None:
            yield _copy_row(event, event.copy, count)
        else:
            yield _compute_row(event, chip, count, active)


def names_of_forward(schedule: StepSchedule) -> frozenset[str]:
    """Event names of the forward pass, by which later events with the same name are recognised as recomputation."""
    names = {e.name for e in schedule.events if e.region == FORWARD and e.loop is None}
    return frozenset(names.union(*(names_of_forward(e.loop) for e in schedule.events if e.loop is not None)))


def kernel_bound(time: KernelTime) -> str:
    """The unit on which a kernel takes longest; "latency" if its launch takes longer."""
    parts = {"mxu": time.mxu_seconds, "vpu": time.vpu_seconds, "hbm": time.hbm_seconds, "latency": time.launch_seconds}
    return max(parts, key=lambda name: parts[name])


def kernel_latency(time: KernelTime) -> float:
    """Launch seconds of a kernel that prefetching does not compensate."""
    return max(0.0, time.launch_seconds - time.hidden_seconds)


def _compute_row(event: Event, chip: Chip, count: int, active: float) -> Row:
    kernel, time = event.kernel, event.time
    assert kernel is not None
    assert time is not None
    bound = kernel_bound(time)
    dtype = kernel.matmuls[0][0].dtype if kernel.matmuls else "bf16" if chip.peak_bf16_flops else "int8"
    peak = chip.peak_flops(dtype) / chip.devices_per_chip
    # Utilisation counts useful work: the vector unit's time without padding, and HBM traffic beyond VMEM. Where
    # attention computes both gradients at once, one reuses the other's scores: the MXU does less than counted.
    whole = kernel.vpu_ops / kernel.padded_vpu_ops if kernel.padded_vpu_ops and kernel.attention is None else 1.0
    reached = {
        "mxu": min(kernel.mxu_flops / peak, time.mxu_seconds),
        "vpu": time.vpu_seconds * whole,
        "hbm": min(kernel.hbm_bytes / hbm_rate(chip), time.hbm_seconds),
    }
    own = time.seconds
    alone = own + time.hidden_seconds
    share = reached[bound] / alone if bound in reached and alone else 0.0
    return Row(
        kernel.name, kernel.opcode, "compute", kernel.region, kernel.source, count, event.first, own, bound, share,
        mxu_seconds=time.mxu_seconds, vpu_seconds=time.vpu_seconds, hbm_seconds=time.hbm_seconds,
        latency_seconds=kernel_latency(time), launch_seconds=time.launch_seconds,
        hidden_seconds=time.hidden_seconds, mxu_flops=kernel.mxu_flops, useful_flops=active * kernel.useful_flops,
        vpu_ops=kernel.vpu_ops, hbm_bytes=kernel.hbm_bytes, traffic_bytes=time.traffic_bytes, mxu_dtype=dtype,
    )  # fmt: skip


def network_parts(cost: Cost, chip: Chip) -> tuple[float, float, float]:
    """(ici, dcn, latency) seconds of a collective: its busiest link within a slice, its NIC, and the rest."""
    dcn = sum(seconds for place, seconds in cost.busy_seconds if place == DCN)
    cores = sum(seconds for place, seconds in cost.busy_seconds if place == CORES)
    links = max((seconds for place, seconds in cost.busy_seconds if place >= 0), default=0.0)
    ici = min(cores + links, cost.seconds - dcn)
    return ici, dcn, max(0.0, cost.seconds - ici - dcn) + launch_seconds(cost, chip)


def _collective_row(event: Event, chip: Chip, count: int) -> Row:
    move, cost = event.move, event.cost
    assert move is not None
    assert cost is not None
    ici, dcn, latency = network_parts(cost, chip)
    launch = launch_seconds(cost, chip)
    own = cost.seconds + launch
    parts = {"ici": ici, "dcn": dcn, "latency": latency}
    bound = max(parts, key=lambda name: parts[name])
    share = {"ici": ici * chip.ici_efficiency, "dcn": dcn}.get(bound, 0.0) / (own or 1.0)
    return Row(
        move.name, move.kind, "collective", event.region, event.source, count, event.first, own, bound, share,
        ici_seconds=ici, dcn_seconds=dcn, latency_seconds=latency, launch_seconds=launch,
        payload_bytes=move.payload_bytes, sent_bytes=move.sent_bytes, axes=move.axes,
    )  # fmt: skip


def _copy_row(event: Event, copy: tuple[str, int], count: int) -> Row:
    opcode, size = copy
    return Row(
        event.name, opcode, "copy", event.region, event.source, count, event.first, event.seconds, "pcie",
        PCIE_EFFICIENCY,
        payload_bytes=size,
    )  # fmt: skip
