"""Published figures of machines beside the model's: `python -m meshlib validate --machine`.

They are of chips, pods and networks, not of programs: what follows from `hardware` alone. Where the model has no
freedom (a count of links times a rate), the error is that of the figures; where it has (routing, failures), that of the
model.

Sources stand in each row; "from memory" marks a figure that was recalled from its source and not read again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache

from hardware.chips import CHIPS
from hardware.faults import offered_share
from hardware.mxu import MXU
from hardware.network import best_placement, collective_cost, ici_links
from hardware.slices import Slice
from hardware.twisted import bisection_links
from meshlib.core.text import grid

_DOCS = "docs.cloud.google.com/tpu/docs/"
_V4 = "Jouppi et al. 2023, arXiv:2304.01433"
_V1 = "Jouppi et al. 2017, arXiv:1704.04760"


@dataclass(frozen=True)
class Figure:
    """One published figure of a machine, and the model's figure."""

    name: str
    published: float
    predicted: float
    unit: str
    source: str

    @property
    def error(self) -> float:
        """Predicted over published, less 1."""
        return self.predicted / self.published - 1


@dataclass(frozen=True)
class ComparedFigures:
    """Published figures beside predictions; `print` shows a table. `of`: what the rows are; `notes`: lines below it."""

    rows: tuple[Figure, ...]
    of: str = "machine"
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        cells: list[tuple[str, ...]] = [(self.of, "published", "model", "error", "source")]
        for row in self.rows:
            values = (f"{_digits(value)}{row.unit}" for value in (row.published, row.predicted))
            cells.append((row.name, *values, f"{row.error:+.1%}", row.source))
        worst = max((abs(row.error) for row in self.rows), default=0.0)
        return "\n".join(
            [
                *grid(cells, right=(1, 2, 3), spare=(4, 0)),
                f"{len(self.rows)} figures; largest error {worst:.1%}",
                *self.notes,
            ]
        )


def _digits(value: float) -> str:
    return f"{value:,.0f}" if value >= 9999.5 else f"{value:.4g}"


@cache
def machine_figures() -> ComparedFigures:
    """Every published figure of a machine beside the model's.

    Example:
      >>> figures = machine_figures()
      >>> max(abs(row.error) for row in figures.rows) < 0.12
      True
    """
    return ComparedFigures(tuple(row for rows in _SECTIONS for row in rows()))


def _peaks() -> Iterator[Figure]:
    """Peak rates from geometry times clock; the clocks of v6e and v7 are not published."""
    for name in ("v2", "v3", "v4", "v5e", "v5p"):
        chip = CHIPS[name]
        assert chip.peak_bf16_flops is not None
        array = 2 * chip.mxu_rows * chip.mxu_columns * chip.mxus_per_core * chip.cores_per_chip
        peak = f"{name}: peak, arrays times clock"
        modelled = array * chip.clock_hz / 1e12
        yield Figure(peak, chip.peak_bf16_flops / 1e12, modelled, " TFLOP/s", chip.source("peak_bf16_flops"))


def _systolic() -> Iterator[Figure]:
    counters = MXU(256, 256).counters(200, 25600, 2560, weight_rows_per_cycle=34e9 / 700e6 / 256)
    total = counters.active + counters.shift + counters.stall
    source = _V1 + ", table 3 (from memory)"
    for name, published, cycles in (
        ("active", 12.7 / 82.5, counters.active),
        ("weight stall", 53.9 / 82.5, counters.stall),
        ("weight shift", 15.9 / 82.5, counters.shift),
    ):
        yield Figure(f"v1: MLP0, {name} of matrix cycles", 100 * published, 100 * cycles / total, " %", source)
    ridge = MXU(256, 256).load_cycles(34e9 / 700e6 / 256)
    yield Figure("v1: multiply-adds a byte of weights at the ridge", 1350.0, ridge, "", _V1 + ", section 4")


def _pods() -> Iterator[Figure]:
    """Pod bandwidths from links times nominal rates; published v4 figures are achieved rates."""
    for name, reduce, bisection, source in (
        ("v4-8192", 1100e12, 24e12, "v4"), ("v5e-256", 51.2e12, 1.6e12, "v5e"), ("v6e-256", 102.4e12, 3.2e12, "v6e"),
    ):  # fmt: skip
        slice_ = Slice(name)
        rate = slice_.chip.ici_bytes_per_second if name != "v4-8192" else ici_links(slice_).bytes_per_second
        links = sum(1 for _ in slice_.torus.links())
        pod = slice_.chip.name
        yield Figure(
            f"{pod}: all_reduce bandwidth of a pod", reduce / 1e12, links * rate / 1e12, " TB/s", _DOCS + source
        )
        crossing = bisection_links(slice_.torus) * rate
        yield Figure(f"{pod}: bisection bandwidth of a pod", bisection / 1e12, crossing / 1e12, " TB/s", _DOCS + source)


def _twisted() -> Iterator[Figure]:
    for shape, gain in (("4x4x8", 1.63), ("4x8x8", 1.31)):
        plain, twisted = (
            collective_cost(
                best_placement(f"v4-{shape}{wiring}", {"all": Slice(f"v4-{shape}").devices})[0],
                "all_to_all",
                ["all"],
                1e9,
            ).seconds
            for wiring in ("", "_twisted")
        )
        yield Figure(f"v4: all_to_all on {shape}, twisted over not", gain, plain / twisted, "x", _V4 + ", figure 6")


def _offered() -> Iterator[Figure]:
    for chips, shape, share in ((1024, "8x8x16", 75.0), (2048, "8x16x16", 50.0), (3072, "12x16x16", 75.0)):
        for up in (0.99, 0.995):
            yield Figure(
                f"v4: pod in slices of {chips:,}, {up:.1%} of hosts up", share, 100 * offered_share(f"v4-{shape}", up),
                " %", _V4 + ", figure 4 (from memory)",
            )  # fmt: skip


_SECTIONS: Sequence[Callable[[], Iterator[Figure]]] = (_peaks, _systolic, _pods, _twisted, _offered)
