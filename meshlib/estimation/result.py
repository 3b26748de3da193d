"""`Estimate`: cost of a step on a slice. Exact figures are counts of the program; modelled ones are times."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from hardware.films import Film
from hardware.placement import DCN, Placement
from hardware.slices import Slice
from meshlib.core.arguments import at, whole
from meshlib.core.compiler import Compiler
from meshlib.core.errors import GraphError, SliceError
from meshlib.core.shown import Shown
from meshlib.core.text import clipped, seconds_text
from meshlib.estimation.memory.device_memory import DeviceMemory, memory_on
from meshlib.estimation.time.attribution import divided
from meshlib.estimation.time.host_input import InputTime
from meshlib.estimation.time.physics import Physics
from meshlib.estimation.time.scheduling import StepSchedule, scheduled
from meshlib.estimation.views.failures import faults_of
from meshlib.estimation.views.profile import Measured, Profile, profile
from meshlib.estimation.views.rows import BOUNDS, Row, rows_of
from meshlib.estimation.views.table import comparison, table
from meshlib.estimation.views.whole_run import WholeRun, whole_run
from meshlib.estimation.work.expert_load import ExpertReport
from meshlib.estimation.work.units import UnitPlan
from meshlib.program.records import Program


@dataclass(frozen=True)
class RooflinePoint:
    """One product or other computation on the roofline of a device.

    `flops` and `hbm_bytes` are exact, `intensity` their ratio in flops per byte; `attainable_flops_per_second` is
    what nominal rates allow at that intensity, `flops_per_second` what the model reaches.
    """

    name: str
    source: str
    flops: int
    hbm_bytes: int
    intensity: float
    attainable_flops_per_second: float
    flops_per_second: float
    bound: str


@dataclass(frozen=True, eq=False, repr=False)
class Estimate(Shown):
    """Time and memory of one step of `program` on `slice`. Created by `mtf.estimate`.

    Modelled: `step_seconds`, its bounds `lower_seconds` (the busiest engine alone) and `upper_seconds` (no overlap of
    anything), `mfu`, `exposed_comm_seconds`, `bubble_seconds`, `bound`, `rows`. Exact: flops, bytes, collectives,
    memory of the order.

    Example:
      >>> import meshlib as mtf
      >>> with mtf.Graph():
      ...     x, w = mtf.input("x", "batch:4096;d:4096"), mtf.input("w", "d:4096;n:4096")
      ...     y = mtf.einsum([x, w], output_shape="batch:4096;n:4096")
      ...     program = mtf.lower({"y": y}, mesh="data:4", layout="batch:data")
      >>> est = mtf.estimate(program, "v5e-4")
      >>> est.fits, est.bound, f"{est.step_seconds * 1e3:.1f} ms", f"{est.mfu:.0%}"
      (True, 'mxu', '0.3 ms', '63%')
    """

    program: Program
    slice: Slice
    compiler: Compiler
    placement: Placement
    physics: Physics
    plan: UnitPlan
    schedule: StepSchedule
    input: InputTime | None = None
    experts: ExpertReport | None = None

    def with_physics(self, physics: Physics) -> Estimate:
        """The estimate of the same program and placement with other constants, without lowering again.

        >>> import meshlib as mtf
        >>> with mtf.Graph():
        ...     x, w = (mtf.input(name, "a:8192;a2:8192", "bfloat16") for name in ("x", "w"))
        ...     est = mtf.estimate(mtf.lower({"y": x + w}), "v5e-1")
        >>> est.with_physics(est.physics.without_losses()).step_seconds <= est.step_seconds
        True
        """
        if not isinstance(physics, Physics):
            raise GraphError(f"{at('with_physics')}: physics must be an mtf.Physics, got {physics!r:.80}")
        if physics == self.physics:
            return self
        if replace(physics, slice_jitter=self.physics.slice_jitter) == self.physics:
            return replace(self, physics=physics)  # jitter is added to a schedule
        return replace(self, physics=physics, schedule=scheduled(self.plan, self.placement, physics, self.compiler))

    # ------------------------------------------------------------ time, modelled

    @property
    def step_overhead_seconds(self) -> float:
        """The compiler's fixed cost of a step on the device. Assumed."""
        return self.compiler.step_overhead_seconds

    @property
    def step_seconds(self) -> float:
        """Seconds per step: on the devices, or of the input if that takes longer. Modelled."""
        return self.device_seconds + self.input_wait_seconds

    @property
    def device_seconds(self) -> float:
        """Seconds per step on the devices. Modelled."""
        return self.schedule.seconds + self.jitter_seconds + self.step_overhead_seconds

    @property
    def input_wait_seconds(self) -> float:
        """Seconds per step that devices wait for input; 0 if no `input` was given. Modelled."""
        return 0.0 if self.input is None else max(0.0, self.input.seconds - self.device_seconds)

    @property
    def jitter_seconds(self) -> float:
        """Seconds per step that slices joined by DCN wait for the slowest of them. Modelled."""
        return self.schedule.seconds * self.physics.jitter(self.slice.slices) * self.compiler.slice_jitter

    @property
    def lower_seconds(self) -> float:
        """Lower bound: the busiest engine alone. Modelled."""
        return max([self._input_seconds, *self.schedule.busy.values()])

    @property
    def upper_seconds(self) -> float:
        """Upper bound: everything in sequence. Modelled."""
        return self.schedule.serial_seconds + self.jitter_seconds + self.step_overhead_seconds + self._input_seconds

    @property
    def _input_seconds(self) -> float:
        return 0.0 if self.input is None else self.input.seconds

    @property
    def exposed_comm_seconds(self) -> float:
        """Seconds of communication during which the core computes nothing. Modelled, with the compiler's overlap."""
        return self.schedule.exposed_seconds

    @property
    def bubble_seconds(self) -> float:
        """Seconds per step that a device spends in pipeline bubbles. Modelled.

        Of each loop over the trips of a pipeline the part in which a stage has no microbatch, which is exact:
        `mtf.layers.schedule`.
        """
        return self.schedule.bubble_seconds

    @property
    def bubble_share(self) -> float:
        """`bubble_seconds` as a share of the step. Modelled."""
        return self.bubble_seconds / self.step_seconds if self.step_seconds else 0.0

    @property
    def compute_seconds(self) -> float:
        """Total seconds of all fusion groups with their launches. Modelled."""
        return sum(r.total_seconds for r in self.rows if r.kind == "compute")

    @property
    def comm_seconds(self) -> float:
        """Total seconds of all collectives, hidden or not. Modelled."""
        return sum(r.total_seconds for r in self.rows if r.kind == "collective")

    @cached_property
    def engine_seconds(self) -> Mapping[str, float]:
        """Busy seconds of each engine: mxu, vpu, hbm, each ICI axis, dcn, "core to core" (between two devices of one
        chip), and copies to and from the host. Modelled."""
        return {engine_name(e): s for e, s in sorted(self.schedule.busy.items(), key=lambda item: str(item[0]))}

    @cached_property
    def bound_seconds(self) -> Mapping[str, float]:
        """The step's seconds by bottleneck (`estimation.time.attribution`).

        Computation goes by each group's bound, exposed communication by that of the collective that is waited for,
        launches and overhead count as latency, waiting for the hosts as input. Modelled.
        """
        totals = dict.fromkeys(BOUNDS, 0.0)
        for _, bound, seconds in divided(self.schedule, self.slice.chip):
            totals[bound] += seconds
        totals["latency"] += self.step_overhead_seconds
        totals["dcn"] += self.jitter_seconds
        totals["input"] += self.input_wait_seconds
        return totals

    @property
    def bound(self) -> str:
        """The bottleneck with the largest share of the step: "mxu", "vpu", "hbm", "ici", "dcn", "pcie", "latency" or
        "input". Modelled."""
        return max(self.bound_seconds, key=lambda name: self.bound_seconds[name])

    @property
    def mfu(self) -> float:
        """Model FLOPs utilisation: useful flops per second over the slice's bf16 peak. Modelled.

        Products that a backward pass computes again (recomputation), and those in the bubbles of a pipeline, count in
        `hfu` only.
        """
        return self._share_of_peak(self.useful_flops)

    @property
    def hfu(self) -> float:
        """Hardware FLOPs utilisation: `mfu` with all flops executed, duplicates and extra passes included. Modelled."""
        return self._share_of_peak(self.flops)

    def _share_of_peak(self, flops: float) -> float:
        if not self.step_seconds:
            return 0.0
        return flops / self.step_seconds / self.slice.peak_flops_per_device

    # ------------------------------------------------------------ counts, exact

    @cached_property
    def rows(self) -> tuple[Row, ...]:
        """One row per fusion group and collective, in program order; free operations have none."""
        return tuple(rows_of(self.schedule, self.slice.chip))

    @property
    def flops(self) -> int:
        """MXU flops executed by one device per step. Exact."""
        return sum(r.mxu_flops * r.count for r in self.rows)

    @property
    def useful_flops(self) -> float:
        """One device's share of the unsharded program's flops. Exact."""
        return sum(r.useful_flops * r.count for r in self.rows)

    @property
    def vpu_ops(self) -> int:
        """Vector operations of one device per step, recomputation included. Exact."""
        return sum(r.vpu_ops * r.count for r in self.rows)

    @property
    def hbm_bytes(self) -> int:
        """Bytes that one device's fusion groups read and write at their boundaries, without padding. Exact for the
        program's groups; `meshlib.estimation.work.stored_values` defines which values are stored."""
        return sum(r.hbm_bytes * r.count for r in self.rows)

    @property
    def sent_bytes(self) -> float:
        """Bytes that one device sends per step. Exact."""
        return self.program.sent_bytes

    # ------------------------------------------------------------ memory

    @cached_property
    def memory(self) -> DeviceMemory:
        """Memory of one device over time in tiles (exact for the program's order), and the compiler's additions."""
        return memory_on(self.program, self.slice, self.compiler)

    @property
    def fits(self) -> bool:
        """True if the compiled step fits a device's HBM; `memory.verdict` also distinguishes "tight"."""
        return self.memory.fits

    # ------------------------------------------------------------ money

    def usd(self, steps: int = 1) -> float:
        """Cost of that many steps at the slice's list price, in US dollars. Modelled time, published price.

        Raises: SliceError for a chip without a price.
        """
        steps = whole(steps, "Estimate.usd", "steps")
        if steps < 0:
            raise GraphError(f"{at('Estimate.usd')}: steps must not be negative, got {steps}")
        price = self.slice.usd_per_hour
        if price is None:
            raise SliceError(
                f"{at('Estimate.usd')}: no list price of {self.slice.chip.name} is published; "
                "give the chip one: replace(chip, usd_per_chip_hour=...)"
            )
        return price * steps * self.step_seconds / 3600

    def epoch_usd(self, examples: int, batch: int) -> float:
        """Cost of one epoch of `examples` in batches of `batch`, the last one padded, in US dollars. As `usd`."""
        examples = whole(examples, "epoch_usd", "examples", low=1)
        return self.usd(-(-examples // whole(batch, "epoch_usd", "batch", low=1)))

    def run(
        self,
        steps: int | None = None,
        *,
        epochs: float | None = None,
        examples: int | None = None,
        tokens: float | None = None,
        evaluation: Estimate | None = None,
        evaluation_examples: int | None = None,
        evaluate_every: int | None = None,
        checkpoint_every: int | None = None,
        checkpoint_seconds: float = 0.0,
        start_seconds: float = 0.0,
        mean_time_between_failures: float | None = None,
        restart_seconds: float | None = None,
        spare_slices: int | None = None,
        repair_seconds: float | None = None,
    ) -> WholeRun:
        """Hours and dollars of a whole run of this many steps, epochs or tokens.

        Args:
          steps, epochs, tokens: length of the run; exactly one of them. The inputs' dims "batch" and "length" define
            the size of a step. Epochs may be fractional.
          examples: examples per epoch.
          evaluation: the estimate of one evaluation step; evaluation_examples: examples per evaluation.
          evaluate_every: steps between evaluations; by default one at the end.
          checkpoint_every, checkpoint_seconds: steps between checkpoints, and the stall for each.
          start_seconds: time before the first step.
          mean_time_between_failures: seconds, of the whole machine; each failure costs the steps since the last
            checkpoint. Without `checkpoint_every` the optimal interval is used.
          restart_seconds: from a failure to the first step after it; 0 by default.
          spare_slices, repair_seconds: slices in reserve, which replace a failed one until it is repaired.
        Returns: a `WholeRun`: print it, `.hours`, `.usd`, `.training_seconds`, `.goodput`, `.failures`.
        Raises: GraphError for arguments that do not go together.
        Example:
          >>> import meshlib as mtf
          >>> with mtf.Graph():
          ...     x = mtf.input("x", [mtf.Dimension("batch", 8192), mtf.Dimension("inner", 8192)], "bfloat16")
          ...     program = mtf.lower({"y": mtf.reduce_sum(x)}, mesh="cores:8", layout="batch:cores")
          >>> est = mtf.estimate(program, "v3-8")
          >>> est.run(epochs=2, examples=1_000_000).steps, est.run(steps=10).usd == est.usd(10)
          (245, True)
        """
        faults = faults_of(mean_time_between_failures, restart_seconds, spare_slices, repair_seconds)
        return whole_run(
            self, steps, epochs, examples, tokens, evaluation, evaluation_examples, evaluate_every, checkpoint_every,
            checkpoint_seconds, start_seconds, faults,
        )  # fmt: skip

    # ------------------------------------------------------------ views

    def roofline(self) -> list[RooflinePoint]:
        """Groups with products on the device's roofline, relative to the peak of their dtype."""
        rate = self.slice.hbm_bytes_per_second_per_device
        points = []
        for r in (r for r in self.rows if r.mxu_flops and r.seconds):
            flops, moved = r.mxu_flops, r.hbm_bytes
            intensity = flops / moved if moved else float("inf")
            reachable = min(self.slice.peak_flops(r.mxu_dtype) / self.slice.devices, intensity * rate)
            points.append(
                RooflinePoint(r.name, r.source, flops, moved, intensity, reachable, flops / r.seconds, r.bound)
            )
        return points

    def table(self, rows: int | None = 25) -> str:
        """The estimate as text: totals, then the slowest groups; None shows all.

        Every figure says whether it is exact or modelled.
        """
        return table(self, rows)

    def profile(self, measured: Measured | None = None) -> Profile:
        """Time of the step by bottleneck, by kind of operation and by line of the program.

        Args:
          measured: result of `run.profile(feeds)` of an `mtf.on_jax` run, shown beside the modelled times.
        Returns: a `Profile`: print it, `.seconds`, `.busy_seconds`, `.mxu_share`, `.by("line")`, `.plot(path)`.
        Raises: GraphError where `measured` is something else.
        Example:
          >>> import meshlib as mtf
          >>> with mtf.Graph():
          ...     x = mtf.input("x", [mtf.Dimension("batch", 8192), mtf.Dimension("inner", 8192)], "bfloat16")
          ...     w = mtf.variable("w", [mtf.Dimension("inner", 8192), mtf.Dimension("outer", 8192)], dtype="bfloat16")
          ...     program = mtf.lower({"y": mtf.einsum([x, w])}, mesh="cores:8", layout="batch:cores")
          >>> profile = mtf.estimate(program, "v3-8").profile()
          >>> profile.mxu_share > 0.9, profile.by("kind")[0].name
          (True, 'einsum')
        """
        return profile(self, measured)

    def compare(self, other: Estimate) -> str:
        """Two estimates side by side as text, with the changes."""
        if not isinstance(other, Estimate):
            raise GraphError(
                f"{at('Estimate.compare')}: expected an Estimate, got {type(other).__name__} {other!r:.80}"
            )
        return comparison(self, other)

    def save_trace(self, path: str | Path) -> None:
        """Write the schedule as Chrome-trace JSON, for ui.perfetto.dev: phases, the trips of loops, one track per
        engine, exposed communication, and HBM by kind as counters.

        The file is written atomically, compressed if its name ends in .gz.
        Raises: GraphError where the path cannot be written.
        """
        from meshlib.estimation.views.trace import save_trace

        save_trace(self, path)

    def plot(self, ax: Any = None, what: str = "timeline") -> Any:
        """Draw the estimate; needs matplotlib.

        Args:
          ax: matplotlib Axes, or the path of a file (.png, .svg, .pdf); by default a new figure.
          what: "timeline" of the step by engine, "memory" over the step, "roofline" of products, "torus", the slice
            with its links coloured by load, or "stages", the tasks of a pipeline's stages over time.
        Returns: the Axes.
        Raises: GraphError where matplotlib is missing, the file cannot be written, or for another `what`.
        """
        from meshlib.report.plots import plot_estimate

        return plot_estimate(self, ax, what)

    def film(self, frames: int = 24) -> Film:
        """The step as frames of equal length: the slice's torus with links coloured by load. Modelled.

        Returns: a `hardware.films.Film`: print it, or `.save("step.gif")` (.png and .svg show some of the frames).
        Raises: GraphError unless `frames` is a number of frames.
        Example:
          >>> import meshlib as mtf
          >>> with mtf.Graph():
          ...     x = mtf.input("x", [mtf.Dimension("batch", 8192), mtf.Dimension("inner", 8192)], "bfloat16")
          ...     program = mtf.lower({"y": mtf.reduce_sum(x)}, mesh="cores:4", layout="batch:cores")
          >>> len(mtf.estimate(program, "v5e-4").film(6).frames)
          6
        """
        from meshlib.estimation.views.films import step_film

        return step_film(self, frames)

    def report(self, path: str | Path, title: str = "", compiled: object = None) -> None:
        """Write a self-contained HTML page: the verdict, then mesh, layout, memory, timeline, roofline, collectives.

        It needs no network and works without scripts, in the dark, on a phone and on paper.

        Args:
          path: path of the file, such as "plan.html", which is written atomically.
          title: title of the page; by default mesh and slice.
          compiled: the real compiler's report on the program, if any; its text is shown.
        Raises: GraphError where the path cannot be written.
        Example:
          >>> import tempfile
          >>> from pathlib import Path
          >>> import meshlib as mtf
          >>> with mtf.Graph():
          ...     x = mtf.input("x", [mtf.Dimension("batch", 8192), mtf.Dimension("inner", 8192)], "bfloat16")
          ...     program = mtf.lower({"y": mtf.reduce_sum(x)}, mesh="cores:8", layout="batch:cores")
          >>> path = Path(tempfile.mkdtemp(), "plan.html")
          >>> mtf.estimate(program, "v3-8").report(path)
          >>> "Fits" in path.read_text()
          True
        """
        from meshlib.report.page import page, write_page

        write_page(path, page(self, title, compiled=compiled), "Estimate.report")

    def __str__(self) -> str:
        return self.table()

    def __repr__(self) -> str:
        step = f"{seconds_text(self.step_seconds)}* a step (* modelled), bound by {self.bound}"
        return clipped(f"<Estimate on {self.slice.name}: {step}; mesh {self.program.mesh}>")


def engine_name(engine: str | int) -> str:
    """Name of an engine, such as "mxu" or "ici axis 0"."""
    if isinstance(engine, str):
        return engine
    if engine == DCN:
        return "dcn"
    return "core to core" if engine < 0 else f"ici axis {engine}"
