"""Ring collectives step by step: against NumPy, the ring's own order of addition, and messages over links."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from hardware import HardwareError, Links, Torus, ring_plans
from hardware.numerics import ring_reduce_scatter
from hardware.ring_steps import KINDS, ring_steps
from tests.effort import each
from tests.hardware.ring_reduction import ring_reduce

NODES = (2, 3, 4, 7)


def draw(nodes: int, size: int) -> list[np.ndarray]:
    return list(np.random.default_rng(nodes * 100 + size).standard_normal((nodes, size)).astype(np.float32))


@each("nodes, size", {f"{n} nodes, {s} elements": (n, s) for n in NODES for s in (n, 3 * n + 1, 2)})
def test_results_are_those_of_the_collective(nodes: int, size: int) -> None:
    data = draw(nodes, size)
    for result in ring_steps("all_gather", data).results:
        np.testing.assert_array_equal(result, np.stack(data))
    for result in ring_steps("all_reduce", data).results:
        np.testing.assert_array_equal(result, ring_reduce(data))  # in every bit
    for result, wanted in zip(ring_steps("reduce_scatter", data).results, ring_reduce_scatter(data, 0), strict=True):
        np.testing.assert_array_equal(result, wanted)
    pieces = [np.array_split(part, nodes) for part in data]
    for node, result in enumerate(ring_steps("all_to_all", data).results):
        np.testing.assert_array_equal(result, np.concatenate([pieces[source][node] for source in range(nodes)]))


@each("kind", KINDS)
def test_steps_send_what_the_ring_sends(kind: str) -> None:
    """Every node sends one block in each step, and as often as messages over the links of a ring take."""
    data = draw(4, 8)
    run = ring_steps(kind, data)
    for before, step in zip(run.steps, run.steps[1:], strict=False):
        assert sorted(t.sender for t in step.transfers) == list(range(4))
        assert sorted(t.receiver for t in step.transfers) == list(range(4))
        for t in step.transfers:
            assert t.receiver == (t.sender + t.links) % 4
            if kind != "all_to_all":
                np.testing.assert_array_equal(before.held[t.sender][t.block], t.value)
    if kind in ("all_gather", "all_reduce"):
        plan = getattr(ring_plans, kind)(Torus((4,)), data, algorithm="oneway")
        block_bytes = data[0].nbytes / (4 if kind == "all_reduce" else 1)
        assert plan.run(Links(1.0, 0.0)).seconds == pytest.approx((len(run.steps) - 1) * block_bytes)
        for ours, theirs in zip(run.results, plan.results, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-6)


def test_text_and_cells_name_what_arrived() -> None:
    run = ring_steps("all_reduce", [[1, 2, 3], [10, 20, 30], [100, 200, 300]])
    assert repr(run) == "<all_reduce of 3 nodes: 4 steps>"
    second = str(run.steps[2])
    assert "add blocks: 0 > 1: block 1, 1 > 2: block 2, 2 > 0: block 0" in " ".join(second.split())
    assert "node 0   111*" in second
    assert run._repr_html_().count("<table") == 5
    assert "ffb703" in run._repr_html_()


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: ring_steps("all_red", [1, 2]), "unknown kind 'all_red'"),
        (lambda: ring_steps("all_gather", [1]), "at least 2 nodes, got 1"),
        (lambda: ring_steps("all_gather", 3), "one array per node, got 3"),
        (lambda: ring_steps("all_gather", [[1], [1, 2]]), r"int64\[1\], int64\[2\]"),
        (lambda: ring_steps("all_gather", ["a", "b"]), "must be numbers"),
    ],
)
def test_mistakes(call, text: str) -> None:
    with pytest.raises(HardwareError, match=text):
        call()


def test_frames(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="pictures need the extra 'plot'")
    run = ring_steps("reduce_scatter", draw(3, 3))
    axes = run.plot(1)
    assert "step 1 of 2, reduce_scatter" in axes.get_title()
    assert len(axes.patches) == 9
    with pytest.raises(HardwareError, match="step 3 is not one of the 3"):
        run.plot(3)
    with pytest.raises(HardwareError, match="matplotlib Axes, got int 3"):
        run.plot(0, 3)
    with pytest.raises(HardwareError, match=r"writes a \.gif"):
        run.save(tmp_path / "ring.png")
    pytest.importorskip("PIL", reason="animations need Pillow")
    run.save(tmp_path / "ring.gif")
    assert (tmp_path / "ring.gif").read_bytes()[:4] == b"GIF8"


@pytest.mark.parametrize("nodes", [2, 4, 5])
def test_printed_steps_fit_a_terminal(nodes: int) -> None:
    numbers = np.random.default_rng(0).normal(size=(nodes, 4 * nodes)).astype(np.float32)
    text = str(ring_steps("all_reduce", list(numbers)))
    assert max(map(len, text.splitlines())) <= 80
    assert text.count("step ") == 2 * (nodes - 1)
