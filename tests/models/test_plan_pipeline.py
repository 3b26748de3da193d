"""The planning example for pipelines: its table, and what it refuses."""

from __future__ import annotations

import pytest

from examples.plans import plan_pipeline


def test_pipelines_stand_beside_the_step_without(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--model", "gpt2", "--slice", "2*v5e-16", "--batch", "64", "--length", "128", "--microbatches", "4"]
    assert plan_pipeline.main([*flags, "--schedule"]) == 0
    shown = capsys.readouterr().out
    assert "12 layers in 2 stages" in shown
    assert "no pipeline" in shown
    assert "2 stages, 4 microbatches: 5 trips, 1 of them idle, 25.0% of the work" in shown
    (idle,) = [line for line in shown.splitlines() if line.startswith("idle in the pipeline")]
    assert idle.split()[4:7] == ["0.00", "s,", "0%"]


@pytest.mark.parametrize("flags", [["--microbatches", "0"], ["--repeats", "a"], ["--batch", "0"]])
def test_bad_flags_end_with_one_message(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        plan_pipeline.main(flags)
    assert "expected numbers" in capsys.readouterr().err or flags[0] == "--batch"
