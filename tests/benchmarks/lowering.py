"""Lowering against the number of operations and of devices: a Transformer training step with Adam.

    python tests/benchmarks/lowering.py [--layers 2,5,10,20]

Printed: operations of the graph, seconds to lower (best of three), seconds per thousand operations, instructions.
"""

from __future__ import annotations

import argparse
import time

import meshlib as mtf

D = mtf.Dimension


def transformer(layers: int) -> tuple[mtf.Graph, mtf.Tensor, list[mtf.Operation]]:
    """Loss and updates of a small Transformer with full attention, layers written out."""
    batch, length, memory = D("batch", 4096), D("length", 128), D("memory_length", 128)
    d_model, heads, d_k, d_ff = D("d_model", 512), D("heads", 8), D("d_k", 64), D("d_ff", 2048)

    def norm(x: mtf.Tensor, name: str) -> mtf.Tensor:
        scale = mtf.variable(name, [d_model], 1.0)
        return x * mtf.rsqrt(mtf.reduce_mean(mtf.square(x), reduced_dim=d_model) + 1e-6) * scale

    with mtf.Graph() as graph:
        x = mtf.input("x", [batch, length, d_model])
        for n in range(layers):
            with mtf.scope(f"layer_{n}"):
                y = norm(x, "norm_1")
                z = mtf.rename_dimension(y, "length", "memory_length")
                q = mtf.einsum([y, mtf.variable("q", [d_model, heads, d_k])], [batch, heads, length, d_k])
                k = mtf.einsum([z, mtf.variable("k", [d_model, heads, d_k])], [batch, heads, memory, d_k])
                v = mtf.einsum([z, mtf.variable("v", [d_model, heads, d_k])], [batch, heads, memory, d_k])
                weights = mtf.softmax(mtf.einsum([q, k], [batch, heads, length, memory]) * 0.125, memory)
                mixed = mtf.einsum([weights, v], [batch, heads, length, d_k])
                x = x + mtf.einsum([mixed, mtf.variable("o", [heads, d_k, d_model])], [batch, length, d_model])
                h = mtf.relu(
                    mtf.einsum([norm(x, "norm_2"), mtf.variable("wi", [d_model, d_ff])], [batch, length, d_ff])
                )
                x = x + mtf.einsum([h, mtf.variable("wo", [d_ff, d_model])], [batch, length, d_model])
        loss = mtf.reduce_mean(mtf.square(x))
        return graph, loss, mtf.optimize.AdamOptimizer(1e-3).minimize(loss)


LAYOUTS = {
    "data": ("data:{0}", "batch:data", (8, 2048)),
    "data + tensor": ("data:{0};model:8", "batch:data;heads:model;d_ff:model", (4, 256)),
    "data + fsdp + tensor": (
        "data:{0};fsdp:2;model:8",
        "batch:data+fsdp;heads:model;d_ff:model;d_model:fsdp?",
        (4, 128),
    ),
}


def many_axes(axes: int) -> tuple[mtf.Tensor, list[mtf.Operation], str, str]:
    """A feed-forward block with everything split on a mesh of up to six axes."""
    batch, seq, d_model, d_ff = D("batch", 64), D("seq", 64), D("d_model", 64), D("d_ff", 128)
    with mtf.Graph():
        x = mtf.input("x", [batch, seq, d_model])
        w, v = mtf.variable("w", [d_model, d_ff]), mtf.variable("v", [d_ff, d_model])
        h = mtf.relu(mtf.einsum([x, w], [batch, seq, d_ff]))
        loss = mtf.reduce_mean(mtf.square(mtf.einsum([h, v], [batch, seq, d_model])))
        train = mtf.optimize.SgdOptimizer(0.1).minimize(loss)
    names = ("data", "fsdp", "model", "seq", "pod", "expert")[:axes]
    batch_axes = "+".join(n for n in ("pod", "data", "fsdp") if n in names)
    layout = f"batch:{batch_axes};variables/d_model:{batch_axes};d_ff:model{'+expert' if 'expert' in names else ''}"
    return loss, train, ";".join(f"{n}:2" for n in names), layout + (";seq:seq" if "seq" in names else "")


def accumulated(count: int) -> mtf.Tensor:
    """A long sum of reductions: each waits for the end of the chain."""
    with mtf.Graph():
        x, total = mtf.input("x", [D("batch", 8), D("k", 8)]), mtf.constant(0.0)
        for n in range(count // 3):
            total = total + mtf.reduce_sum(mtf.sin(x * float(n)))
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", default="2,5,10,20")
    args = parser.parse_args()
    print(f"{'operations':>10}  {'layout':<22}{'devices':>8}{'seconds':>9}{'per 1000':>9}{'instructions':>13}")
    for layers in map(int, args.layers.split(",")):
        graph, loss, train = transformer(layers)
        count = len(graph.operations)
        for name, (mesh, layout, sizes) in LAYOUTS.items():
            for size in sizes:
                best = float("inf")
                for _ in range(3):
                    start = time.perf_counter()
                    program = mtf.lower({"loss": loss}, train, mesh=mesh.format(size), layout=layout)
                    best = min(best, time.perf_counter() - start)
                each = best / count * 1000
                devices, made = program.mesh.size, len(program.instructions)
                print(f"{count:>10}  {name:<22}{devices:>8}{best:>9.2f}{each:>9.3f}{made:>13}", flush=True)
    for axes in (3, 4, 5, 6):
        loss, train, mesh, layout = many_axes(axes)
        start = time.perf_counter()
        mtf.lower({"loss": loss}, train, mesh=mesh, layout=layout)
        print(f"{'block':>10}  {axes} axes, all split {time.perf_counter() - start:>21.2f}")
    for count in (500, 2000, 8000):
        total = accumulated(count)
        start = time.perf_counter()
        mtf.lower({"total": total}, mesh="m:4", layout="batch:m")
        print(f"{count:>10}  accumulated reductions {time.perf_counter() - start:>16.2f}")


if __name__ == "__main__":
    main()
