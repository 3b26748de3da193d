"""Step time, efficiency and memory over slices: one program built for each, estimated, tabulated, plotted."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from hardware.errors import HardwareError
from hardware.slices import Slice
from meshlib.checks import items
from meshlib.errors import GraphError, SliceError
from meshlib.estimate import Estimate, estimate
from meshlib.estimate.table import grid, seconds_text
from meshlib.lower.program import Program, bytes_text


@dataclass(frozen=True)
class Scaling:
    """Estimates of one program over slices, in the order given.

    `efficiency` compares useful flops per second and share of the peak with the first slice: 1 is perfect scaling,
    whether the batch grows with the slice or not. Modelled.
    """

    estimates: tuple[Estimate, ...]

    @property
    def efficiency(self) -> tuple[float, ...]:
        """MFU of each over that of the first. Modelled; 0 where the first does no product."""
        first = self.estimates[0].mfu
        return tuple(e.mfu / first if first else 0.0 for e in self.estimates)

    @property
    def speedup(self) -> tuple[float, ...]:
        """Useful flops per second of all devices, over those of the first. Modelled."""
        rates = [e.useful_flops * e.slice.devices / e.step_seconds if e.step_seconds else 0.0 for e in self.estimates]
        return tuple(r / rates[0] if rates[0] else 0.0 for r in rates)

    def __str__(self) -> str:
        head = ("slice", "devices", "mesh", "step*", "exposed comm*", "MFU*", "speed-up*", "efficiency*", "bound*",
                "peak memory", "fits")  # fmt: skip
        cells: list[tuple[str, ...]] = [head]
        for e, speed, share in zip(self.estimates, self.speedup, self.efficiency, strict=True):
            cells.append(
                (
                    e.slice.name, str(e.slice.devices), str(e.program.mesh), seconds_text(e.step_seconds),
                    seconds_text(e.exposed_comm_seconds), f"{e.mfu:.1%}", f"{speed:.4g}x", f"{share:.1%}", e.bound,
                    bytes_text(e.memory.peak_bytes), "yes" if e.fits else "no",
                )
            )  # fmt: skip
        return "\n".join([*grid(cells, right=(1, 3, 4, 5, 6, 7, 9)), "* modelled; all others exact"])

    def plot(self, path: str | Path) -> None:
        """Draw step time and efficiency over devices into a file; needs matplotlib.

        Raises: GraphError where matplotlib is not installed, or the file cannot be written.
        """
        if not isinstance(path, str | os.PathLike):
            raise GraphError(f"Scaling.plot: expected a path, got {type(path).__name__} {path!r:.80}")
        try:
            from matplotlib.figure import Figure
        except ImportError:
            raise GraphError("Scaling.plot needs matplotlib: pip install matplotlib") from None
        figure = Figure(figsize=(9, 4), layout="constrained")
        times, shares = figure.subplots(1, 2)
        devices = [e.slice.devices for e in self.estimates]
        times.loglog(devices, [e.step_seconds for e in self.estimates], "o-", label="step")
        times.loglog(devices, [e.lower_seconds for e in self.estimates], "--", label="busiest engine")
        times.set(xlabel="devices", ylabel="seconds (modelled)", title="step time")
        times.legend()
        shares.semilogx(devices, self.efficiency, "o-")
        shares.set(xlabel="devices", ylabel="share of the first slice's MFU (modelled)", title="efficiency")
        shares.set_ylim(bottom=0)
        try:
            figure.savefig(path)
        except (OSError, ValueError) as fault:
            raise GraphError(f"Scaling.plot: cannot write {path}: {fault}") from None


def scaling(
    program_builder: Callable[[Slice], Program], slices: Iterable[str | Slice], overlap: str = "independent"
) -> Scaling:
    """Estimates of a program over slices.

    Args:
      program_builder: takes a `hardware.Slice` and returns the program lowered for a mesh of its `devices`.
      slices: names or Slices, at least one; the first is what the others are compared with.
      overlap: as `mtf.estimate`.
    Raises: SliceError for an unknown slice or a program that does not fit one; GraphError for other bad arguments.
    Example:
      >>> import meshlib as mtf
      >>> def build(slice):
      ...     batch, inner = mtf.Dimension("batch", 64 * slice.devices), mtf.Dimension("inner", 1024)
      ...     with mtf.Graph():
      ...         w = mtf.variable("w", [inner, mtf.Dimension("outer", 1024)])
      ...         loss = mtf.reduce_mean(mtf.einsum([mtf.input("x", [batch, inner]), w]))
      ...         train = mtf.optimize.SgdOptimizer(0.1).minimize(loss)
      ...         return mtf.lower({"loss": loss}, train, mesh=f"data:{slice.devices}", layout="batch:data")
      >>> found = mtf.scaling(build, ["v3-8", "v3-32"])
      >>> [e.slice.devices for e in found.estimates], found.efficiency[0]
      ([8, 32], 1.0)
    """
    if not callable(program_builder):
        raise GraphError(f"scaling: program_builder must take a Slice, got {program_builder!r:.80}")
    made = []
    for name in items(slices, "scaling", "slices"):
        try:
            slice_ = name if isinstance(name, Slice) else Slice(name)
        except HardwareError as fault:
            raise SliceError(f"scaling: {fault}") from None
        made.append(estimate(program_builder(slice_), slice_, overlap))
    if not made:
        raise GraphError("scaling: slices is empty; name at least one, such as 'v3-8'")
    return Scaling(tuple(made))
