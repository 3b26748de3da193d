"""Peak memory per device, derived by hand."""

from __future__ import annotations

import meshlib as mtf

D = mtf.Dimension
F32 = 4


def product() -> tuple[mtf.Tensor, mtf.Tensor]:
    """x[4, 8] and x w with w[8, 6]."""
    x = mtf.input("x", [D("b", 4), D("k", 8)])
    return x, mtf.einsum([x, mtf.variable("w", [D("k", 8), D("n", 6)])], [D("b", 4), D("n", 6)])


def test_a_fused_value_takes_no_memory() -> None:
    with mtf.Graph():
        program = mtf.lower({"y": mtf.relu(product()[1])})
    # x, w, and relu's result; the product stays inside the matmul's fusion group.
    assert program.memory.peak_bytes == (4 * 8 + 8 * 6 + 4 * 6) * F32
    assert program.memory.by_kind["variables"] == 8 * 6 * F32
    assert program.memory.by_kind["inputs"] == 4 * 8 * F32
    assert program.memory.by_kind["activations"] == 4 * 6 * F32


def test_all_reduce_and_elementwise_work_in_place() -> None:
    with mtf.Graph():
        program = mtf.lower({"y": mtf.relu(product()[1])}, mesh="m:2", layout="k:m")
    # Half of x and of w; one buffer of y's size serves the partial sum, the sum and relu's result.
    assert program.memory.peak_bytes == (4 * 4 + 4 * 6 + 4 * 6) * F32
    assert [c.kind for c in program.collectives] == ["all_reduce"]


def test_a_gathered_weight_is_a_collective_buffer_and_freed_after_its_last_use() -> None:
    with mtf.Graph():
        x = mtf.input("x", [D("b", 64), D("k", 8)])
        w = mtf.variable("w", [D("k", 8), D("n", 6)])
        v = mtf.variable("v", [D("n", 6), D("o", 2)])
        y = mtf.einsum([mtf.einsum([x, w], [D("b", 64), D("n", 6)]), v], [D("b", 64), D("o", 2)])
        program = mtf.lower({"y": y}, mesh="m:2", layout="b:m;k:m?;n:m?;o:m?")
    resident = (32 * 8 + 4 * 6 + 3 * 2) * F32
    hidden, result = 32 * 6 * F32, 32 * 2 * F32
    whole_w, whole_v = 8 * 6 * F32, 6 * 2 * F32
    # Once w is whole until the hidden values are there, once v is whole until the result is there.
    assert program.memory.peak_bytes == resident + max(whole_w + hidden, hidden + whole_v + result)
    assert max(whole_w + hidden, hidden + whole_v + result) == hidden + whole_v + result
    assert program.memory.by_kind["collective buffers"] == whole_v
    assert "einsum" in program.memory.at


def test_new_values_take_the_place_of_the_old() -> None:
    with mtf.Graph():
        w = mtf.variable("w", [D("d", 1000)])
        train = mtf.optimize.MomentumOptimizer(0.1).minimize(mtf.reduce_sum(mtf.square(mtf.sin(w))))
        program = mtf.lower(updates=train)
    memory = program.memory
    assert memory.by_kind["variables"] == memory.by_kind["slots"] == 1000 * F32
    # The gradient, then the new momentum in its slot; the new weights in the old ones' place.
    assert memory.peak_bytes <= 4 * 1000 * F32 + 64
    assert memory.timeline_bytes[-1] <= 2 * 1000 * F32 + 64


def test_a_new_value_needs_room_while_the_old_one_is_read() -> None:
    with mtf.Graph():
        a, b = mtf.variable("a", [D("d", 100)]), mtf.variable("b", [D("d", 100)])
        program = mtf.lower(updates=[mtf.assign(a, b * 2.0), mtf.assign(b, a * 3.0)])
    # Both new values are made from old ones: one of them has to wait beside the variables.
    assert program.memory.peak_bytes == 3 * 100 * F32


def test_parts_add_up_and_the_report_names_lines() -> None:
    with mtf.Graph():
        memory = mtf.lower({"y": mtf.relu(product()[1])}, mesh="m:2", layout="b:m").memory
    assert sum(memory.by_kind.values()) == memory.peak_bytes == sum(v.bytes for v in memory.live)
    assert max(memory.timeline_bytes) == memory.peak_bytes
    text = str(memory)
    assert f"{memory.peak_bytes} bytes, exact" in text
    assert "test_memory.py:" in text
    assert "f32[b:4@m, k:8]" in text


def test_memory_does_not_depend_on_devices_that_hold_copies() -> None:
    with mtf.Graph():
        y = mtf.relu(product()[1])
        peaks = [mtf.lower({"y": y}, mesh=f"m:2;idle:{n}", layout="k:m").memory.peak_bytes for n in (1, 64)]
    assert peaks[0] == peaks[1]


def test_slots_do_not_hold_back_the_backward_pass() -> None:
    """Eight layers in bfloat16, each with a float32 copy that is declared with its update: one cotangent at a time."""
    rows, inner, outer = D("t", 4096), D("k", 64), D("n", 64)
    with mtf.Graph():
        x = mtf.input("x", [rows, inner], "bfloat16")
        for n in range(8):
            w = mtf.variable(f"w{n}", [inner, outer], dtype="bfloat16")
            x = mtf.rename_dimension(mtf.einsum([x, w], [rows, outer]), "n", "k")
        loss = mtf.reduce_mean(mtf.square(x))
        program = mtf.lower({"loss": loss}, mtf.optimize.SgdOptimizer(0.1).minimize(loss))
    one = 4096 * 64 * 2
    kinds = program.memory.by_kind
    # What the layers after the first take, and the last result, over which the first cotangent is written.
    assert 8 * one <= kinds["activations"] + kinds["temporaries"] < 8.1 * one
