"""Published throughputs of servers beside the model's."""

import json

import pytest

from meshlib.command import main
from meshlib.validation.served import RUNS, served_figures
from tests.effort import some


@pytest.mark.parametrize("run", some(RUNS, [RUNS[2], RUNS[-1]]), ids=lambda run: f"{run.name} {run.lengths}")
def test_a_server_decodes_less_than_the_model_and_more_than_half(run):
    """The model knows neither the host nor padded prompts: it is above all of them, by at most 61 %."""
    (row,) = served_figures((run,)).rows
    assert 0 < row.error < 0.61
    assert row.source != "not given"


def test_the_command(capsys, monkeypatch):
    monkeypatch.setattr("meshlib.command.validated.served_figures", lambda: served_figures(RUNS[-1:]))
    assert main(["validate", "--served", "--quiet", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["name"] == "llama3.1-8b v6e-1 bfloat16 full"
    assert main(["validate", "--served", "--quiet"]) == 0
    assert "GPT-J in int8 on v5e-4, 9.81 samples/s" in capsys.readouterr().out


def test_the_command_refuses_what_does_not_go_together(capsys):
    assert main(["validate", "--served", "--machine"]) == 2
    assert "has figures of its own; leave out" in capsys.readouterr().err
