"""Predicted beside published: errors within the targets, rows that cannot be expressed listed, none dropped."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import meshlib as mtf
from meshlib.__main__ import main
from meshlib.estimate.published import ROWS
from meshlib.estimate.validate import check_row, percentile, validate

FILE = Path(__file__).resolve().parents[3] / "shared" / "reference" / "published_results.json"


def test_the_packages_rows_are_within_the_target():
    found = validate()
    assert len(found.rows) == len(ROWS)
    assert all(r.error is not None for r in found.rows)
    assert found.median_error <= 0.08
    for family in {r.family for r in found.rows}:
        assert percentile(found.errors(family), 0.5) <= 0.08, family
    assert percentile(found.errors(), 0.9) <= 0.16


def test_no_row_is_dropped_and_every_reason_is_given():
    if not FILE.exists():
        pytest.skip(f"{FILE.name} is not beside this checkout ({FILE.parent})")
    rows = json.loads(FILE.read_text())["rows"]
    found = validate(FILE)
    assert [r.name for r in found.rows] == [r["id"] for r in rows]
    expressed = [r for r in found.rows if r.error is not None]
    assert len(expressed) >= 13
    assert found.median_error <= 0.08
    for r in found.rows:
        assert (r.error is None) == bool(r.why_not)
        assert r.error is not None or f"  {r.name}: {r.why_not}" in str(found)
    # What the package ships is what the file says.
    by_name = {r["id"]: r for r in rows}
    for row in ROWS:
        kept = {k: v for k, v in by_name[row["id"]]["measured"].items() if k in row["measured"]}
        assert kept == row["measured"]


def test_nothing_depends_on_a_rows_name():
    row = ROWS[0]
    assert check_row({**row, "id": "other"}).predicted_seconds == check_row(row).predicted_seconds


@pytest.mark.parametrize(
    ("op", "model"),
    [
        ("psum over a group of 4 devices, f32", {"input_elements": 2**20}),
        ("reduce_scatter over a group of 4 devices, f32", {"input_elements": 2**20}),
        ("all_to_all over a group of 4 devices, f32", {"input_elements": 2**20}),
    ],
)
def test_other_collectives_are_programs_too(op, model):
    row = {"id": "x", "family": "f", "chip": "v5e", "slice": {"topology": "4x4"}, "model": {"op": op, **model},
           "measured": {"time_us": 100}}  # fmt: skip
    found = check_row(row)
    assert found.why_not == ""
    assert found.predicted_seconds is not None
    # 4 MiB on a line of four at 45 GB/s: tens to hundreds of microseconds.
    assert 3e-5 < found.predicted_seconds < 4e-4


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ({"id": "a"}, "no program"),
        ({"id": "a", "model": {"params_b": 3}}, "whole training runs"),
        ({"id": "a", "chip": "v9", "model": {"op": "matmul", "n": 8}, "measured": {"time_us": 1}}, "unknown chip 'v9'"),
        ({"id": "a", "chip": "v5e", "model": {"op": "matmul", "n": 8}, "measured": {}}, "no time"),
        ({"id": "a", "chip": "v5e", "model": {"op": "matmul"}, "measured": {"time_us": 1}}, "make no program"),
        (
            {"id": "a", "chip": "v5e", "model": {"op": "all_gather", "output_bytes": 8}, "measured": {"time_us": 1}},
            "topology or the size",
        ),
    ],
)
def test_rows_that_make_no_program_say_why(row, why):
    found = check_row(row)
    assert found.error is None
    assert why in found.why_not


def test_command(capsys, tmp_path):
    assert main(["validate"]) == 0
    out = capsys.readouterr().out
    assert "90th percentile" in out
    assert "mb-v7-gemm-1024" in out
    assert main(["validate", "--file", str(tmp_path / "none.json")]) == 2
    assert "cannot read" in capsys.readouterr().err
    (tmp_path / "bad.json").write_text("[3]")
    assert main(["validate", "--file", str(tmp_path / "bad.json")]) == 2
    assert "holds no rows" in capsys.readouterr().err
    (tmp_path / "one.json").write_text(json.dumps([ROWS[0]]))
    assert main(["validate", "--file", str(tmp_path / "one.json")]) == 0
    assert "all: 1 rows" in capsys.readouterr().out
    with pytest.raises(mtf.MeshlibError):
        validate(tmp_path)
