"""Plan the training of somebody's JAX model, unchanged: a Transformer in Flax on a v5e-256, under three layouts.

    python examples/plans/plan_jax.py                       # the Flax model; the same in plain JAX where Flax is absent
    python examples/plans/plan_jax.py --plain --layers 8 --slice v5e-64 --batch 64

The model below knows nothing of meshlib. `mtf.from_jax` traces its loss, without making an array; a few of its axes are
given names, and layouts speak of these. The optimizer is the library's. For each layout: does it fit, how long does a
step take, and which collectives are there, with the lines of the model that they come from.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

if (ROOT := Path(__file__).resolve().parents[2]).joinpath("meshlib").is_dir():
    sys.path.insert(0, str(ROOT))  # from a checkout, installed or not

import meshlib as mtf
from hardware.slices import Slice
from meshlib.command.scripts import finish
from meshlib.core.text import bytes_text

# Names for the axes of a few arguments; the others follow from what the model computes.
NAMES = {
    "tokens": "batch length",
    "targets": "batch length",
    "params*embedding": "vocab d_model",
    "params*query*": "layers d_model heads head_dim",
    "params*up*": "layers d_model d_ff",
    "params*head*": "d_model vocab",
}
Model = tuple[Callable[..., Any], Any]  # the loss, and the shapes of its parameters


def shape(*sizes: int, dtype: str = "float32") -> Any:
    """An array that is not there."""
    import jax

    return jax.ShapeDtypeStruct(sizes, dtype)  # type: ignore[no-untyped-call, unused-ignore]


# ------------------------------------------------------------ somebody's model, in Flax


def flax_model(args: argparse.Namespace) -> Model:
    """A decoder-only Transformer as one writes it in Flax: layers scanned and rematerialised."""
    import flax.linen as nn
    import jax
    import jax.numpy as jnp

    class Block(nn.Module):  # type: ignore[misc, unused-ignore]
        @nn.compact  # type: ignore[untyped-decorator, unused-ignore]
        def __call__(self, x: Any, mask: Any) -> tuple[Any, None]:
            h = nn.RMSNorm(dtype=jnp.bfloat16)(x)
            q, k, v = (
                nn.DenseGeneral((args.heads, args.head_dim), use_bias=False, dtype=jnp.bfloat16, name=name)(h)
                for name in ("query", "key", "value")
            )
            h = nn.dot_product_attention(q, k, v, mask=mask, force_fp32_for_softmax=True)
            x = x + nn.DenseGeneral(args.d_model, (-2, -1), use_bias=False, dtype=jnp.bfloat16, name="out")(h)
            h = nn.RMSNorm(dtype=jnp.bfloat16)(x)
            h = nn.gelu(nn.Dense(args.d_ff, use_bias=False, dtype=jnp.bfloat16, name="up")(h))
            return x + nn.Dense(args.d_model, use_bias=False, dtype=jnp.bfloat16, name="down")(h), None

    class Transformer(nn.Module):  # type: ignore[misc, unused-ignore]
        @nn.compact  # type: ignore[untyped-decorator, unused-ignore]
        def __call__(self, tokens: Any) -> Any:
            x = nn.Embed(args.vocab, args.d_model, dtype=jnp.bfloat16, name="embed")(tokens)
            layers = nn.scan(
                nn.remat(Block, prevent_cse=False),
                variable_axes={"params": 0},
                split_rngs={"params": True},
                in_axes=nn.broadcast,
                length=args.layers,
            )
            x, _ = layers(name="layers")(x, nn.make_causal_mask(tokens))
            x = nn.RMSNorm(dtype=jnp.bfloat16)(x)
            return nn.Dense(args.vocab, use_bias=False, dtype=jnp.bfloat16, name="head")(x)

    model = Transformer()

    def loss(params: Any, tokens: Any, targets: Any) -> Any:
        logits = model.apply(params, tokens).astype(jnp.float32)
        logs = jax.nn.log_softmax(logits)
        return -jnp.mean(jnp.take_along_axis(logs, targets[..., None], axis=-1))

    return loss, jax.eval_shape(model.init, jax.random.key(0), shape(args.batch, args.length, dtype="int32"))


# ------------------------------------------------------------ the same in plain JAX


def plain_model(args: argparse.Namespace) -> Model:
    """The same Transformer without a library."""
    import jax
    import jax.numpy as jnp

    def norm(x: Any, scale: Any) -> Any:
        wide = x.astype(jnp.float32)
        return (wide * jax.lax.rsqrt(jnp.mean(wide**2, -1, keepdims=True) + 1e-6) * scale).astype(jnp.bfloat16)

    def block(x: Any, p: Any) -> tuple[Any, None]:
        p = jax.tree.map(lambda w: w.astype(jnp.bfloat16), p)
        h = norm(x, p["norm1"])
        q, k, v = (jnp.einsum("bld,dhk->blhk", h, p[name]) for name in ("query", "key", "value"))
        scores = jnp.einsum("bqhk,bmhk->bhqm", q * q.shape[-1] ** -0.5, k).astype(jnp.float32)
        causal = jnp.tril(jnp.ones(scores.shape[-2:], bool))
        weights = jax.nn.softmax(jnp.where(causal, scores, -1e30)).astype(x.dtype)
        x = x + jnp.einsum("bhqm,bmhk,hkd->bqd", weights, v, p["out"])
        return x + jax.nn.gelu(norm(x, p["norm2"]) @ p["up"]) @ p["down"], None

    def loss(params: Any, tokens: Any, targets: Any) -> Any:
        x = params["embedding"].astype(jnp.bfloat16)[tokens]
        x, _ = jax.lax.scan(jax.checkpoint(block), x, params["layers"])
        logits = (norm(x, params["norm"]) @ params["head"].astype(jnp.bfloat16)).astype(jnp.float32)
        return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], axis=-1))

    d, n, heads = args.d_model, args.layers, (args.heads, args.head_dim)
    layers = {name: shape(n, d, *heads) for name in ("query", "key", "value")} | {"out": shape(n, *heads, d)}
    layers |= {"up": shape(n, d, args.d_ff), "down": shape(n, args.d_ff, d), "norm1": shape(n, d), "norm2": shape(n, d)}
    return loss, {"embedding": shape(args.vocab, d), "layers": layers, "norm": shape(d), "head": shape(d, args.vocab)}


# ------------------------------------------------------------ its plan


def layouts(devices: int) -> dict[str, tuple[str, str]]:
    """Three layouts that people train such models with: name -> mesh and rules."""
    tensor = min(8, devices)
    split = "heads:tensor;d_ff:tensor;vocab:tensor"
    both = f"fsdp:{devices // tensor};tensor:{tensor}"
    return {
        "data parallel": (f"data:{devices}", "batch:data"),
        "fully sharded": (f"fsdp:{devices}", "batch:fsdp;d_model:fsdp?"),
        "sharded and tensor parallel": (both, f"batch:fsdp;d_model:fsdp?;{split}"),
    }


def report(program: mtf.Program, est: mtf.Estimate, most: int) -> list[str]:
    """The verdict, and the collectives that send most; `*` marks what is modelled."""
    memory = est.memory
    lines = [
        f"  {'fits' if est.fits else 'DOES NOT FIT'}: needs* {bytes_text(memory.needed_bytes)} of "
        f"{bytes_text(memory.capacity_bytes)} a device",
        f"  step* {est.step_seconds:.3f} s, MFU* {est.mfu:.1%}, of it waiting for collectives* "
        f"{est.exposed_comm_seconds:.3f} s",
        f"  {len(program.collectives)} collectives send {bytes_text(program.sent_bytes)} a device; the largest:",
    ]
    for c in sorted(program.collectives, key=lambda c: -c.sent_bytes * c.count)[:most]:
        sent = bytes_text(c.sent_bytes * c.count)
        lines.append(f"    {c.kind} over {'+'.join(c.axes)}, {sent}, {c.phase}, {c.source}")
        lines.append(f"      because {c.reason}")
    return lines


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The flags."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plain", action="store_true", help="the model in plain JAX, whether Flax is there or not")
    parser.add_argument("--slice", default="v5e-256", help="default: %(default)s")
    sizes = {"layers": 24, "d_model": 2048, "heads": 16, "head_dim": 128, "d_ff": 8192, "vocab": 32768}
    for name, size in {**sizes, "batch": 256, "length": 2048, "most": 3}.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=size, help="default: %(default)s")
    return parser.parse_args(argv)


def plan(args: argparse.Namespace) -> None:
    """Import the model, and plan it."""
    if importlib.util.find_spec("jax") is None:
        print("This example needs JAX: pip install jax")
        return
    plain = args.plain or importlib.util.find_spec("flax") is None
    if plain and not args.plain:
        print("Flax is not installed (pip install flax): the same model in plain JAX.\n")
    devices = Slice(args.slice).devices
    loss, params = (plain_model if plain else flax_model)(args)
    tokens = shape(args.batch, args.length, dtype="int32")
    begun = time.perf_counter()
    graph = mtf.from_jax(loss, params, tokens, tokens, names=NAMES)
    count = sum(x.shape.size for x in graph.trainable_variables)
    print(f"{count / 1e9:.2f} B parameters, imported in {time.perf_counter() - begun:.1f} s")
    with graph:
        updates = mtf.optimize.AdamWOptimizer(1e-3).minimize(graph.loss)
    session = mtf.Session(graph.outputs, updates)
    for name, (mesh, rules) in layouts(devices).items():
        program = session.lower(mesh, rules)
        print(f"\n{name}: mesh {mesh}, layout {rules}")
        print("\n".join(report(program, mtf.estimate(program, args.slice), args.most)))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the example; 2 and one clear message where the flags are wrong."""
    return finish("plan_jax.py", lambda: plan(parse(argv)))


if __name__ == "__main__":
    sys.exit(main())
