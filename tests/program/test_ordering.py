"""The order of instructions: what waits for a collective lets a product pass that hides it."""

from __future__ import annotations

import meshlib as mtf

D = mtf.Dimension


def trained(layers: int = 4, batch: int = 64) -> mtf.Program:
    """A data-parallel step of a chain of products under plain gradient descent."""
    rows, inner, outer = D("rows", batch), D("inner", 1024), D("outer", 1024)
    with mtf.Graph():
        x = mtf.input("x", [rows, inner])
        for n in range(layers):
            y = mtf.einsum([x, mtf.variable(f"w{n}", [inner, outer])], [rows, outer], name=f"mm{n}")
            x = mtf.rename_dimension(mtf.sin(y), "outer", "inner")
        loss = mtf.reduce_mean(mtf.square(x))
        return mtf.lower({"loss": loss}, mtf.optimize.SgdOptimizer(0.1).minimize(loss), mesh="m:2", layout="rows:m")


def positions(program: mtf.Program, wanted: str) -> list[int]:
    return [n for n, i in enumerate(program.instructions) if f"{i.opcode} {i.operation.name}" == wanted]


def products_between(program: mtf.Program, first: int, last: int) -> int:
    return sum(i.opcode == "einsum" for i in program.instructions[first:last])


def test_a_loss_holds_nobody_back() -> None:
    program = trained()
    sums = [n for n, i in enumerate(program.instructions) if i.opcode == "all_reduce"]
    (sent,) = (n for n in sums if program.instructions[n].inputs[0].local_bytes == 4)
    used = min(n for n, i in enumerate(program.instructions) if program.instructions[sent].outputs[0] in i.inputs)
    assert products_between(program, sent, used) >= 4


def test_an_update_lets_a_product_pass() -> None:
    program = trained()
    passed = []
    for n, i in enumerate(program.instructions):
        if i.opcode == "all_reduce" and i.inputs[0].local_bytes > 4:
            used = min(k for k, j in enumerate(program.instructions) if i.outputs[0] in j.inputs)
            passed.append(products_between(program, n, used))
    assert passed
    assert all(passed[:-1]), passed


def test_an_update_waits_for_as_much_work_as_its_gradient_travels() -> None:
    """4 MiB to a second core, at 2,000 flops a byte and 2 Gflop for the start: 10.4 Gflop, five products of 2.1."""
    program, passed = trained(layers=8, batch=2048), []
    for n, i in enumerate(program.instructions):
        if i.opcode == "all_reduce" and i.inputs[0].local_bytes > 4:
            used = min(k for k, j in enumerate(program.instructions) if i.outputs[0] in j.inputs)
            passed.append(products_between(program, n, used))
    assert min(passed[:4]) >= 5, passed
