"""Commands typed in a folder with a network, for tests: exit status, output, errors."""

from __future__ import annotations

import pytest

from meshlib.command import main

SMALL = (
    "--set layers=2 --set d_model=64 --set heads=4 --set kv_heads=4 --set head_dim=16 --set d_ff=128 --set vocab=128"
)
BUILD = """
import meshlib as mtf

def build(batch=64, hidden=128):
    b, k, h = mtf.Dimension("batch", batch), mtf.Dimension("k", 32), mtf.Dimension("hidden", hidden)
    y = mtf.relu(mtf.einsum([mtf.input("x", [b, k]), mtf.variable("w", [k, h])], reduced_dims=[k]))
    loss = mtf.reduce_mean(y)
    return {"loss": loss}, mtf.optimize.SgdOptimizer(0.1).minimize(loss)
"""
NET = f"""{BUILD}
def unnamed():
    raise ValueError("a value of mine")
"""


def run_words(argv: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    """Exit status, output, errors."""
    try:
        status = main(argv)
    except SystemExit as end:
        status = int(str(end.code))
    out, err = capsys.readouterr()
    return status, out, err


def run(typed: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    """Exit status, output, errors."""
    return run_words(typed.split(), capsys)
