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


if __name__ == "__main__":
    main()
