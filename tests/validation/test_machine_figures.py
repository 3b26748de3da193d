"""Published figures of machines beside the model's."""

import json
from functools import cache

import pytest

from meshlib.command import main
from meshlib.validation.machine_figures import machine_figures
from meshlib.validation.runs import ROWS


@cache
def figures():
    return machine_figures()


def test_every_figure_is_near_the_published_one():
    for row in figures().rows:
        assert abs(row.error) < 0.05, row
        assert row.source != "not given"
    names = " ".join(row.name for row in figures().rows)
    for piece in ("MLP0", "bisection", "all_to_all on 4x8x8, twisted", "99.0% of hosts up"):
        assert piece in names
    assert f"{len(figures().rows)} figures; largest error" in str(figures())


def test_the_command(capsys):
    assert main(["validate", "--machine", "--quiet", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {row["name"]: row["predicted"] for row in rows} == {r.name: r.predicted for r in figures().rows}


def test_rows_of_runs_are_json_too(capsys, tmp_path):
    """Rows hold programs, of which JSON has nothing."""
    file = tmp_path / "rows.json"
    file.write_text(json.dumps([row for row in ROWS if row["id"] in ("inf-62b-ll-decode", "ext-resnet-v3-512")]))
    assert main(["validate", "--file", str(file), "--quiet", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {row["name"] for row in rows} == {"inf-62b-ll-decode", "ext-resnet-v3-512"}
    assert all(row["predicted_seconds_modelled"] > 0 for row in rows)


@pytest.mark.parametrize("others", [["--refit"], ["--talks"]], ids=["refit", "talks"])
def test_the_command_refuses_what_does_not_go_together(others, capsys):
    assert main(["validate", "--machine", *others]) == 2
    assert "has figures of its own; leave out" in capsys.readouterr().err
