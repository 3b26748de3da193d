"""The figures of the talks as text, in 100 columns."""

from __future__ import annotations

from meshlib.core.text import grid, seconds_text, usd_text
from meshlib.validation.runs import ROWS
from meshlib.validation.talks import Talks


def report(talks: Talks) -> str:
    """`str` of Talks."""
    return "\n".join(
        [*_epochs(talks), "", *_rows(talks), "", *_detectors(talks), "", *_durations(talks), "", *_prices()]
    )


def _epochs(talks: Talks) -> list[str]:
    head = ("devices", "batch", "step, chips*", "step, with hosts*", "90 epochs*", "stated", "error", "cost*")
    cells = [head]
    for e in talks.epochs:
        error = f"{e.minutes / e.stated_minutes - 1:+.1%}"
        cost = "-" if e.usd is None else usd_text(e.usd)
        cells.append(
            (
                str(e.devices), f"{e.batch:,}", seconds_text(e.device_seconds), seconds_text(e.step_seconds),
                f"{e.minutes:,.1f} min", f"{e.stated_minutes:,.1f} min", error, cost,
            )
        )  # fmt: skip
    grown = next((r for r in ROWS if (r.get("batch") or {}).get("grows")), None)
    lines = [
        "ResNet-50 v2 to 90 epochs on devices of four chips v2 (ImageNet is the new MNIST, 2018)",
        *grid(cells, right=tuple(range(8))),
        "* modelled. The stated times are those of whole runs: hosts bound them, not chips. Each is predicted by what",
        f"  the other rows say of hosts. By all rows a host takes {talks.host}",
    ]
    if grown is not None:
        first, last = grown["batch"]["grows"]
        ends = [e for e in talks.epochs if e.devices == grown["n_chips"] // 4 and e.batch in (first, last)]
        if len(ends) == 2:
            most, least = (e.minutes for e in ends)
            lines.append(
                f"  batch {first:,}, later {last:,}: {grown['measured']['minutes_90_epochs']} min stated; between "
                f"{least:.1f} and {most:.1f} min by when it grows, which is not stated"
            )
    return lines


def _rows(talks: Talks) -> list[str]:
    cells = [("ResNet-50 in MLPerf", "chip", "predicted*", "measured", "error")]
    for r in talks.rows:
        assert r.predicted_seconds is not None
        assert r.measured_seconds is not None
        times = seconds_text(r.predicted_seconds), seconds_text(r.measured_seconds)
        cells.append((r.name, r.chip, *times, "-" if r.error is None else f"{r.error:+.1%}"))
    return grid(cells, right=(2, 3, 4))


def _detectors(talks: Talks) -> list[str]:
    head = ("image", "v2-8, chips*", "v3-8, chips*", "v3/v2", "v2-8, fed*", "v3-8, fed*", "v3/v2")
    cells = [head]
    for s in talks.detectors:
        alone, fed = s.chips[1] / s.chips[0], s.fed[1] / s.fed[0]
        speeds = (f"{s.chips[0]:,.0f}/s", f"{s.chips[1]:,.0f}/s", f"{alone:.2f}")
        cells.append((f"{s.size} px", *speeds, f"{s.fed[0]:,.0f}/s", f"{s.fed[1]:,.0f}/s", f"{fed:.2f}"))
    return [
        "RetinaNet-50, images per second (TPU pods and Mesh TensorFlow, 2019)",
        *grid(cells, right=tuple(range(7))),
        'stated: at 256 pixels "a little bump, nowhere near double", at 640 "close to the theoretical x2 factor"',
        "fed: each has one host, that of the table above, which decodes as many pixels a second: images of 640x480",
        "  (assumed) take it longer than ImageNet's",
    ]


def _durations(talks: Talks) -> list[str]:
    cells = [("run", "slice", "predicted*", "stated", "cost*", "assumed")]
    for d in talks.durations:
        unit, size = ("min", 1 / 60) if d.most < 2 else ("h", 1.0)
        stated = f"{d.least / size:.0f} {unit}" if d.least == d.most else f"{d.least:.0f} to {d.most:.0f} {unit}"
        cost = "-" if d.usd is None else usd_text(d.usd)
        cells.append((d.name, d.slice, f"{d.hours / size:.1f} {unit}", stated, cost, d.note))
    return grid(cells, right=(2, 3, 4))


def _prices() -> list[str]:
    row = next((r for r in ROWS if "v2-32_usd_per_h" in (r.get("measured") or {})), None)
    if row is None:
        return []
    stated = [f"{key.split('_')[0]} ${value} an hour" for key, value in row["measured"].items()]
    return [f"prices stated in 2019: {', '.join(stated)}; costs above are at list prices (hardware.chip_figures)"]
