"""Figures of --json by name, in bytes, seconds and counts; README.md has the schema."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from hardware.slices import Slice
from meshlib.estimation import Estimate
from meshlib.estimation.views.profile import Profile
from meshlib.program.records import Program
from meshlib.verification import Verification


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
    m = est.memory
    return {
        "slice": est.slice.name,
        "mesh": str(est.program.mesh),
        "layout": str(est.program.layout),
        "compiler": str(est.compiler),
        "fits": est.fits,
        "peak_bytes": m.peak_bytes,
        "capacity_bytes": m.capacity_bytes,
        "peak_bytes_by_kind": dict(m.by_kind),
        "sent_bytes": est.sent_bytes,
        "hbm_bytes": est.hbm_bytes,
        "flops": est.flops,
        "step_seconds_modelled": est.step_seconds,
        "mfu_modelled": est.mfu,
        "exposed_comm_seconds_modelled": est.exposed_comm_seconds,
        "bound_modelled": est.bound,
        "bound_seconds_modelled": dict(est.bound_seconds),
        "usd_per_step_modelled": None if est.slice.usd_per_hour is None else est.usd(),
        "notes": list(est.program.notes),
    }


def of_rows(est: Estimate) -> dict[str, Any]:
    """Figures of an estimate with its rows; seconds of rows are modelled, bytes and flops exact."""
    return {**of_estimate(est), "rows": [asdict(row) for row in est.rows]}


def of_profile(profile: Profile) -> dict[str, Any]:
    """Figures of a profile; all seconds are modelled."""
    return {
        "title": profile.title,
        "step_seconds_modelled": profile.step_seconds,
        "mxu_share_modelled": profile.mxu_share,
        "seconds_modelled": dict(profile.seconds),
        "busy_seconds_modelled": dict(profile.busy_seconds),
        "parts": [asdict(part) for part in profile.parts],
    }


def of_slice(slice_: Slice) -> dict[str, Any]:
    """Figures of a slice."""
    return {
        "name": slice_.name,
        "chips": slice_.chips,
        "devices": slice_.devices,
        "hosts": slice_.hosts,
        "torus_shape": list(slice_.torus_shape),
        "wrap": list(slice_.wrap),
        "twisted": slice_.twisted,
        "hbm_bytes_per_device": slice_.usable_hbm_bytes_per_device,
        "peak_flops_per_device": slice_.peak_flops_per_device,
        "usd_per_hour": slice_.usd_per_hour,
    }


def of_verification(result: Verification) -> dict[str, Any]:
    """Figures of a verification; errors are relative to the largest magnitude of an array."""
    return {
        "ok": result.ok,
        "compared": list(result.compared),
        "rows": [
            {
                "mesh": row.mesh, "layout": row.layout, "ok": row.ok, "error": row.error, "allowed": row.allowed,
                "worst": row.worst, "sent_bytes": row.sent_bytes, "fault": row.fault,
            }
            for row in result.rows
        ],
    }  # fmt: skip
