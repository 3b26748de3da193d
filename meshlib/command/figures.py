"""Figures of --json by name, in bytes, seconds and counts; README.md has the schema."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from hardware.slices import Slice

if TYPE_CHECKING:  # modules of other commands
    from meshlib.estimation import Estimate
    from meshlib.estimation.views.profile import Profile
    from meshlib.program.records import Program
    from meshlib.searching import Found
    from meshlib.verification import Verification


def picked(record: object, exact: str, modelled: str = "") -> dict[str, Any]:
    """Attributes of a record by their names; names of modelled ones get the suffix `_modelled`.

    >>> picked(Slice("v3-8"), "name chips", "devices")
    {'name': 'v3-8', 'chips': 4, 'devices_modelled': 8}
    """
    return {name: getattr(record, name) for name in exact.split()} | {
        f"{name}_modelled": getattr(record, name) for name in modelled.split()
    }


MODELLED = ("seconds", "mfu", "bound", "utilisation", "traffic_bytes", "usd_per_step", "needed_bytes", "collectives")


def marked(record: Mapping[str, Any]) -> dict[str, Any]:
    """The record with the suffix `_modelled` at the names of modelled figures.

    >>> marked({"step_seconds": 1.0, "measured_seconds": 2.0, "sent_bytes": 3})
    {'step_seconds_modelled': 1.0, 'measured_seconds': 2.0, 'sent_bytes': 3}
    """
    return {
        f"{name}_modelled" if name.endswith(MODELLED) and not name.startswith("measured") else name: value
        for name, value in record.items()
    }


def of_step(est: Estimate) -> dict[str, Any]:
    """The main figures of an estimated step."""
    return {
        "layout": str(est.program.layout),
        **picked(est.memory, "peak_bytes capacity_bytes"),
        **picked(est, "fits sent_bytes flops", "step_seconds mfu exposed_comm_seconds bound"),
        "usd_per_step_modelled": None if est.slice.usd_per_hour is None else est.usd(),
    }


def of_program(program: Program) -> dict[str, Any]:
    """Exact figures of a program."""
    return {
        "mesh": str(program.mesh),
        "layout": str(program.layout),
        "sent_bytes": program.sent_bytes,
        "peak_bytes": program.memory.peak_bytes,
        "mxu_flops": program.work.mxu_flops,
        "choice_gap": program.choice.gap,
        "notes": list(program.notes),
        "collectives": [asdict(c) for c in program.collectives],
    }


def of_estimate(est: Estimate) -> dict[str, Any]:
    """Figures of an estimate without its rows; `_modelled` marks those that are not exact."""
    return {
        "slice": est.slice.name,
        "mesh": str(est.program.mesh),
        "compiler": str(est.compiler),
        **of_step(est),
        "peak_bytes_by_kind": dict(est.memory.by_kind),
        "hbm_bytes": est.hbm_bytes,
        "bound_seconds_modelled": dict(est.bound_seconds),
        "notes": list(est.program.notes),
    }


def of_rows(est: Estimate) -> dict[str, Any]:
    """Figures of an estimate with its rows."""
    return {**of_estimate(est), "rows": [marked(asdict(row)) for row in est.rows]}


def of_profile(profile: Profile) -> dict[str, Any]:
    """Figures of a profile; all seconds are modelled."""
    return {
        "title": profile.title,
        "step_seconds_modelled": profile.step_seconds,
        "mxu_share_modelled": profile.mxu_share,
        "seconds_modelled": dict(profile.seconds),
        "busy_seconds_modelled": dict(profile.busy_seconds),
        "parts": [marked(asdict(part)) for part in profile.parts],
    }


def of_search(result: Found) -> dict[str, Any]:
    """Figures of a search; the memory of its candidates is that of the compiled step, as `needed_bytes` of a plan."""
    data = result.as_json()
    ranking = [{{"peak_bytes": "needed_bytes"}.get(n, n): v for n, v in entry.items()} for entry in data["ranking"]]
    return {**data, "ranking": [marked(entry) for entry in ranking]}


def of_slice(slice_: Slice) -> dict[str, Any]:
    """Figures of a slice."""
    return {
        **picked(slice_, "name chips devices hosts torus_shape wrap twisted peak_flops_per_device usd_per_hour"),
        "hbm_bytes_per_device": slice_.usable_hbm_bytes_per_device,
    }


def of_verification(result: Verification) -> dict[str, Any]:
    """Figures of a verification; errors are relative to the largest magnitude of an array."""
    return {
        "ok": result.ok,
        "compared": list(result.compared),
        "rows": [picked(row, "mesh layout ok error allowed worst sent_bytes fault") for row in result.rows],
    }
