"""Step time, efficiency and memory over slices, tabulated and plotted."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any

from hardware.checks import HardwareError
from hardware.slices import Slice
from meshlib.core.arguments import choice, items
from meshlib.core.compiler import Compiler
from meshlib.core.drawing import plotted
from meshlib.core.errors import GraphError, SliceError
from meshlib.core.executors import Tasks, executor_of
from meshlib.core.slices import assumed_figures
from meshlib.core.text import bytes_text, grid, seconds_text, usd_text
from meshlib.estimation import Estimate, HostInput, estimate
from meshlib.estimation.views.profile import UNIT_OF
from meshlib.estimation.views.rows import BOUNDS
from meshlib.program.records import Program


@dataclass(frozen=True)
class Scaling:
    """Estimates of one program over slices, in the order given.

    `efficiency` compares useful flops per second and share of the peak with the first slice: 1 is perfect scaling,
    whether the batch grows with the slice or not. Modelled.

    Example:
      >>> import meshlib as mtf
      >>> def build(slice):
      ...     with mtf.Graph():
      ...         x, w = mtf.input("x", f"batch:{4096 * slice.devices};d:1024"), mtf.variable("w", "d:1024;n:1024")
      ...         return mtf.lower({"y": mtf.einsum([x, w])}, mesh=f"data:{slice.devices}", layout="batch:data")
      >>> scaling = mtf.scaling(build, ["v5e-4", "v5e-16"])
      >>> [e.slice.devices for e in scaling.estimates], [round(e, 1) for e in scaling.efficiency]
      ([4, 16], [1.0, 1.0])
    """

    estimates: tuple[Estimate, ...]

    @property
    def efficiency(self) -> tuple[float, ...]:
        """MFU of each slice over that of the first. Modelled; 0 if the first has no products."""
        first = self.estimates[0].mfu
        return tuple(e.mfu / first if first else 0.0 for e in self.estimates)

    @property
    def speedup(self) -> tuple[float, ...]:
        """Useful flops per second of each slice over those of the first. Modelled."""
        rates = [e.useful_flops * e.slice.devices / e.step_seconds if e.step_seconds else 0.0 for e in self.estimates]
        return tuple(r / rates[0] if rates[0] else 0.0 for r in rates)

    def __str__(self) -> str:
        head = ("slice", "devices", "mesh", "step*", "exposed comm*", "MFU*", "speed-up*", "efficiency*", "bound*",
                "1,000 steps*", "needs*", "fits")  # fmt: skip
        cells: list[tuple[str, ...]] = [head]
        for e, speed, share in zip(self.estimates, self.speedup, self.efficiency, strict=True):
            cost = "-" if e.slice.usd_per_hour is None else usd_text(e.usd(1000))
            cells.append(
                (
                    e.slice.name, str(e.slice.devices), str(e.program.mesh), seconds_text(e.step_seconds),
                    seconds_text(e.exposed_comm_seconds), f"{e.mfu:.1%}", f"{speed:.4g}x", f"{share:.1%}", e.bound,
                    cost,
                    bytes_text(e.memory.needed_bytes), "yes" if e.fits else "no",
                )
            )  # fmt: skip
        compilers = ", ".join(dict.fromkeys(str(e.compiler) for e in self.estimates))
        notes = ["* modelled; all others exact", f"compiler: {compilers}"]
        notes += [f"chip {line}" for line in assumed_figures(e.slice for e in self.estimates)]
        return "\n".join([*grid(cells, right=(1, 3, 4, 5, 6, 7, 9, 10)), *notes])

    def plot(self, ax: Any = None, what: str = "time") -> Any:
        """Draw step time by bottleneck, efficiency, and memory needed beside HBM, one bar per slice.

        Args:
          ax: matplotlib Axes for one of the three, or the path of a file (.png, .svg, .pdf) for all; by default a new
            figure of all.
          what: on Axes that are given: "time", "efficiency" or "memory".
        Returns: the Axes, of a whole figure three.
        Raises: GraphError where matplotlib is not installed, the file cannot be written, or for another `what`.
        """
        draw = {"time": self._draw_times, "efficiency": self._draw_efficiency, "memory": self._draw_memory}
        first = choice(what, "Scaling.plot", "what", tuple(draw))
        panels = [self._panel(draw[name]) for name in dict.fromkeys((first, *draw))]
        if not hasattr(ax, "add_patch"):
            panels = [self._panel(panel) for panel in draw.values()]
        return plotted("Scaling.plot", ax, panels, (max(13.0, 4 + 2.4 * len(self.estimates)), 4.2))

    def _panel(self, draw: Callable[[Any], None]) -> Callable[[Any], None]:
        """A panel with one bar per slice, labelled below."""

        def panel(axes: Any) -> None:
            draw(axes)
            axes.set_xticks(range(len(self.estimates)), [self._tick(e) for e in self.estimates])
            axes.set_xlabel("slice, devices")
            axes.set_xlim(-0.6, len(self.estimates) - 0.4)
            axes.spines[["top", "right"]].set_visible(False)

        return panel

    @staticmethod
    def _tick(e: Estimate) -> str:
        return f"{e.slice.name}\n{e.slice.devices:,}"

    def _draw_times(self, axes: Any) -> None:
        """Stacked bars of step time by bottleneck."""
        from meshlib.report.plots import SECONDS, colour, unit_of

        unit, size = unit_of(max(e.step_seconds for e in self.estimates), SECONDS)
        bottom = [0.0] * len(self.estimates)
        for name in BOUNDS:
            parts = [e.bound_seconds[name] / size for e in self.estimates]
            if any(parts):
                axes.bar(range(len(parts)), parts, 0.7, bottom, label=name, color=colour(f"u-{UNIT_OF[name].lower()}"))
                bottom = [a + b for a, b in zip(bottom, parts, strict=True)]
        for n, height in enumerate(bottom):
            axes.annotate(f"{height:.3g} {unit}", (n, height), ha="center", va="bottom")
        axes.set(title="step time by bound (modelled)", ylabel=unit)
        axes.margins(y=0.25)
        axes.legend(ncols=3, frameon=False, loc="upper center")

    def _draw_efficiency(self, axes: Any) -> None:
        axes.axhline(100, color="0.6", linestyle="--", linewidth=1, zorder=0)
        shares = [100 * share for share in self.efficiency]
        axes.bar(range(len(shares)), shares, 0.7, color="tab:blue")
        for n, (share, e) in enumerate(zip(shares, self.estimates, strict=True)):
            about = f"{share:.0f} %\nMFU\n{100 * e.mfu:.1f} %"
            axes.annotate(about, (n, share / 2), ha="center", va="center", color="white")
        axes.set(title=f"efficiency against {self.estimates[0].slice.name} (modelled)", ylabel="%")
        axes.set_ylim(0, 1.05 * max(100.0, *shares))

    def _draw_memory(self, axes: Any) -> None:
        gib = 2**30
        needed = [e.memory.needed_bytes / gib for e in self.estimates]
        colours = ["tab:blue" if e.fits else "tab:red" for e in self.estimates]
        axes.bar(range(len(needed)), needed, 0.7, color=colours)
        for n, e in enumerate(self.estimates):
            capacity = e.memory.capacity_bytes / gib
            axes.plot([n - 0.42, n + 0.42], [capacity, capacity], color="black", label="HBM" if n == 0 else None)
            axes.annotate(bytes_text(e.memory.needed_bytes), (n, needed[n]), ha="center", va="bottom")
        axes.set(title="memory that a device needs (modelled)", ylabel="GiB")
        axes.margins(y=0.15)
        axes.legend(frameon=False)


def scaling(
    program_builder: Callable[[Slice], Program],
    slices: Iterable[str | Slice],
    compiler: Compiler | None = None,
    input: HostInput | None = None,
    workers: Executor | None = None,
) -> Scaling:
    """Estimates of a program over slices.

    Args:
      program_builder: takes a `hardware.Slice` and returns the program lowered for a mesh of its `devices`.
      slices: names or Slices, at least one; the first is what the others are compared with.
      compiler, input: as of `mtf.estimate`.
      workers: a `concurrent.futures.Executor` that estimates slices in parallel, such as a ProcessPoolExecutor or
        Dask's `client.get_executor()`; it stays open, and `program_builder` must be picklable. By default slices are
        estimated one after the other.
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
      >>> result = mtf.scaling(build, ["v3-8", "v3-32"])
      >>> [e.slice.devices for e in result.estimates], result.efficiency[0]
      ([8, 32], 1.0)
    """
    if not callable(program_builder):
        raise GraphError(f"scaling: program_builder must take a Slice, got {program_builder!r:.80}")
    if workers is not None and executor_of(workers) is None:
        raise GraphError(f"scaling: workers must be a concurrent.futures.Executor, got {workers!r:.80}")
    named = []
    for name in items(slices, "scaling", "slices"):
        try:
            named.append(name if isinstance(name, Slice) else Slice(name))
        except HardwareError as fault:
            raise SliceError(f"scaling: {fault}") from None
    if not named:
        raise GraphError("scaling: slices is empty; name at least one, such as 'v3-8'")
    job = (program_builder, tuple(named), compiler, input)
    numbers = range(len(named))
    if workers is None:
        return Scaling(tuple(_estimate(job, n) for n in numbers))
    return Scaling(tuple(Tasks("scaling", workers, job).answers(_estimate, numbers).values()))


def _estimate(
    job: tuple[Callable[[Slice], Program], Sequence[Slice], Compiler | None, HostInput | None], n: int
) -> Estimate:
    """The estimate of the program for slice number `n`."""
    program_builder, slices, compiler, input = job
    return estimate(program_builder(slices[n]), slices[n], compiler, input=input)
