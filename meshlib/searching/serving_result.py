"""Result of `mtf.serving`: points of batch and layout, their frontier, and results under a load."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from hardware.slices import Slice
from meshlib.core.compiler import Compiler
from meshlib.core.drawing import plotted
from meshlib.core.shown import Shown
from meshlib.core.slices import assumed_figures
from meshlib.core.text import bytes_text, clipped, counted, grid, seconds_text, usd_text
from meshlib.estimation import Estimate
from meshlib.models import TransformerConfig
from meshlib.searching.served_load import ServedLoad

MOST_SLICES = 1024


@dataclass(frozen=True)
class ServingPoint:
    """One batch size under one layout.

    Attributes:
      name: of the layout, as a table shows it; batch: sequences that are decoded together.
      decode: the estimate of a step, with caches of `context` positions.
      prefill: the estimate of reading `prompts` prompts at once, one for each data-parallel group.
    """

    name: str
    batch: int
    decode: Estimate
    prefill: Estimate
    prompts: int

    @property
    def token_seconds(self) -> float:
        """Time between two tokens of a sequence. Modelled."""
        return self.decode.step_seconds

    @property
    def tokens_per_second(self) -> float:
        """Output tokens per second of all sequences. Modelled."""
        return self.batch / self.decode.step_seconds

    @property
    def prefill_seconds(self) -> float:
        """Time to first token of a prompt without a queue. Modelled."""
        return self.prefill.step_seconds

    @property
    def usd_per_million_tokens(self) -> float | None:
        """Cost of a million output tokens at the slice's list price; None if none is published. Modelled."""
        price = self.decode.slice.usd_per_hour
        return None if price is None else price / 3600 / self.tokens_per_second * 1e6

    @property
    def peak_bytes(self) -> int:
        """Peak bytes of a device with tile padding: the larger of decoding and prefill. Exact."""
        return max(self.decode.memory.peak_bytes, self.prefill.memory.peak_bytes)

    @property
    def needed_bytes(self) -> int:
        """Memory that a device needs: the larger of decoding and prefill, compiled. Modelled."""
        return max(self.decode.memory.needed_bytes, self.prefill.memory.needed_bytes)

    @property
    def fits(self) -> bool:
        """True if both fit the memory of a device."""
        return self.decode.fits and self.prefill.fits


@dataclass(frozen=True)
class Fleet:
    """Slices that serve a load together.

    Attributes:
      slice: their kind; slices: their number, including those for prefill alone.
      load: result under the share of each. Modelled.
    """

    slice: Slice
    slices: int
    load: ServedLoad

    @property
    def chips(self) -> int:
        """Chips in all slices."""
        return self.slices * self.slice.chips

    @property
    def usd_per_hour(self) -> float | None:
        """At list price; None if none is published."""
        price = self.slice.usd_per_hour
        return None if price is None else price * self.slices

    def __str__(self) -> str:
        price = "" if self.usd_per_hour is None else f", {usd_text(self.usd_per_hour)} an hour"
        return f"{self.slices} x {self.slice.name} = {counted(self.chips, 'chip')}{price}, each with {self.load.name}"


@dataclass(frozen=True, repr=False)
class Serving(Shown):
    """Result of `mtf.serving`.

    `points` by layout and batch; `largest`, per layout the largest batch that fits, 0 where none does; `skipped`, the
    layouts over which the model does not divide, with the reason; `weights` and `caches`, the dtypes of both;
    `compiler`, that of all estimates; `loads`, the results under each layout, if a load was given.

    Example:
      >>> import meshlib as mtf
      >>> served = mtf.serving(mtf.models.preset("gpt2").reduced(), "v5e-1", batches=[8], context=16)
      >>> [(p.batch, p.token_seconds > 0) for p in served.points], served.weights
      ([(8, True)], 'bfloat16')
    """

    config: TransformerConfig
    slice: Slice
    context: int
    prompt: int
    weights: str
    caches: str
    points: tuple[ServingPoint, ...]
    largest: Mapping[str, int]
    skipped: Mapping[str, str]
    compiler: Compiler
    loads: tuple[ServedLoad, ...] = ()

    @cached_property
    def frontier(self) -> tuple[ServingPoint, ...]:
        """The points on the frontier of latency and cost, fastest first. Modelled."""
        best_points: list[ServingPoint] = []
        for p in sorted(self.points, key=lambda p: (p.token_seconds, -p.tokens_per_second)):
            if not best_points or p.tokens_per_second > best_points[-1].tokens_per_second:
                best_points.append(p)
        return tuple(best_points)

    def within(self, token_seconds: float) -> ServingPoint | None:
        """The point of highest throughput within a limit on time per token. Modelled."""
        return next((p for p in reversed(self.frontier) if p.token_seconds <= token_seconds), None)

    def load_within(
        self, first_token_seconds: float | None = None, token_seconds: float | None = None
    ) -> ServedLoad | None:
        """The layout under which requests complete soonest on the mean, of those that keep up and meet the limits.

        99 % of requests must meet them.

        Args:
          first_token_seconds: limit on the first token. token_seconds: limit on the mean of a request's other tokens.
        Returns: the load under that layout; None if there is none.
          Modelled.
        """
        return _soonest(self.loads, first_token_seconds, token_seconds)

    def fleet(self, first_token_seconds: float | None = None, token_seconds: float | None = None) -> Fleet | None:
        """The fewest slices that serve the load in equal shares within the limits of `load_within`.

        Returns: a `Fleet`; None where not even a thousandth of the load is served so fast. Modelled.
        """
        tried: dict[int, ServedLoad | None] = {}

        def served(count: int) -> ServedLoad | None:
            if count not in tried:
                shares = (load.scaled(1 / count) for load in self.loads)
                tried[count] = _soonest(shares, first_token_seconds, token_seconds)
            return tried[count]

        high = 1
        while self.loads and served(high) is None and high < MOST_SLICES:
            high *= 2
        low = high // 2  # too few
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if served(middle) is not None else (middle, high)
        load = served(high) if self.loads else None
        return None if load is None else Fleet(self.slice, high * load.slices, load)

    def __repr__(self) -> str:
        return clipped(f"<Serving: {len(self.points)} points; {self._title}>")

    def __str__(self) -> str:
        figures = ("a token*", "tokens/s*", "a chip*", "1 M tokens*", "prefill*", "bound*", "needs*")
        cells: list[tuple[str, ...]] = [("", "layout", "batch", *figures)]
        for p in self.points:
            cost = p.usd_per_million_tokens
            cells.append(
                (
                    "->" if p in self.frontier else "", p.name, str(p.batch), seconds_text(p.token_seconds),
                    f"{p.tokens_per_second:,.0f}", f"{p.tokens_per_second / self.slice.chips:,.1f}",
                    "-" if cost is None else usd_text(cost), seconds_text(p.prefill_seconds), p.decode.bound,
                    bytes_text(p.needed_bytes),
                )
            )  # fmt: skip
        lines = [
            f"{self._title}, prompts of {self.prompt} tokens",
            *grid(cells, right=(2, 3, 4, 5, 6, 7, 9), spare=(5, 8, 7)),
        ]
        shown = {p.name for p in self.points}
        for name, most in self.largest.items():
            if name not in shown:
                lines.append(f"{name}: fits with no batch" if not most else _fits_none(name, most))
        notes = ["-> on the frontier of latency and throughput", "* modelled; all others exact"]
        notes += [f"compiler: {self.compiler}", *(f"chip {line}" for line in assumed_figures([self.slice]))]
        return "\n".join([*lines, *self._load_lines(), *notes])

    def _load_lines(self) -> list[str]:
        """The table of loads, with layouts that keep up first."""
        if not self.loads:
            return []
        head = (
            "layout",
            "slots",
            "first token*",
            "99 %*",
            "a token*",
            "99 %*",
            "tokens/s*",
            "queue*",
            "read*",
            "decode*",
        )
        cells: list[tuple[str, ...]] = [head]
        ordered = sorted(self.loads, key=lambda load: (not load.keeps_up, load.first_token_seconds(99)))
        for load in ordered:
            read, decode = load.utilisation
            cells.append(
                (
                    load.name, str(load.slots),
                    *(seconds_text(load.first_token_seconds(p)) for p in (50, 99)),
                    *(seconds_text(load.token_seconds(p)) for p in (50, 99)),
                    f"{load.tokens_per_second:,.0f}", f"{load.queue_length:,.1f}" if load.keeps_up else "grows",
                    f"{read:.0%}", f"{decode:.0%}",
                )
            )  # fmt: skip
        where = "on two slices, one reads and one decodes" if self.loads[0].slices > 1 else "on one slice"
        return ["", f"{self.loads[0].arrivals}, {where}", *grid(cells, right=range(1, len(head)), spare=(6, 9, 8))]

    @property
    def _title(self) -> str:
        """The model, the slice, and the dtypes that every figure depends on."""
        return (
            f"{self.config.name} on {self.slice.name}: weights in {self.weights}, "
            f"{self.context} positions of cache in {self.caches}"
        )

    def plot(self, ax: Any = None) -> Any:
        """Draw throughput over latency, one line per layout, with the frontier; needs matplotlib.

        Args:
          ax: matplotlib Axes, or the path of a file (.png, .svg, .pdf); by default a new figure.
        Returns: the Axes.
        Raises: GraphError where matplotlib is not installed, or the file cannot be written.
        """
        return plotted("Serving.plot", ax, [self._draw], (8, 5))

    def _draw(self, axes: Any) -> None:
        for name in dict.fromkeys(p.name for p in self.points):
            line = [p for p in self.points if p.name == name]
            axes.plot(*self._coordinates(line), marker="o", markersize=3, linewidth=1, label=name)
        x, y = self._coordinates(self.frontier)
        axes.plot(x, y, color="black", linewidth=2, zorder=0, label="frontier")
        for p, left, up in zip(self.frontier, x, y, strict=True):
            axes.annotate(str(p.batch), (left, up), textcoords="offset points", xytext=(4, -10), fontsize=7)
        axes.set(
            title="\n".join([*self._title.split(": "), "(modelled), batches beside the frontier"]),
            xlabel="ms a token",
            ylabel="tokens/s a chip",
            xscale="log",
            yscale="log",
        )
        for axis in (axes.xaxis, axes.yaxis):  # print 20, not 2 x 10^1
            axis.set_major_formatter("{x:g}")
            axis.set_minor_formatter("{x:g}")
        axes.tick_params(which="minor", labelsize=6)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(fontsize=7, frameon=False)

    def _coordinates(self, points: Sequence[ServingPoint]) -> tuple[list[float], list[float]]:
        chips = self.slice.chips
        return [1e3 * p.token_seconds for p in points], [p.tokens_per_second / chips for p in points]


def _soonest(
    loads: Iterable[ServedLoad], first_token_seconds: float | None, token_seconds: float | None
) -> ServedLoad | None:
    """Of the loads within the limits, the one whose requests complete soonest on the mean; None if there is none."""
    good = [load for load in loads if load.within(first_token_seconds, token_seconds)]
    return min(good, key=lambda load: load.request_seconds, default=None)


def _fits_none(name: str, most: int) -> str:
    return f"{name}: none of the batches fits and divides; the largest that does is {most}"
