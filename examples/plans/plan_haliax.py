"""Plan a run of a Haliax model, unchanged, as its trainer is configured: mesh, dtypes and optimizer from the config.

    python examples/plans/plan_haliax.py                          # 1.9 B parameters on a v5e-64
    python examples/plans/plan_haliax.py --config run.json --slice v5p-128
    meshlib dims examples/plans/plan_haliax.py:loss               # the axes of Haliax are the dims of layouts

The model is a Llama written in Haliax: its axes have names, and `mtf.from_jax` takes these for dims, so that nothing is
named twice. The config has the keys of Levanter's trainer: `fsdp_axis` says by which axis parameters are stored,
`tensor_parallel_axes` which axes are split over `model_axis_size` devices, `mp` in which dtypes parameters are kept and
computed with. With Levanter installed, the same `plan` takes the loss of any of its models.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if (ROOT := Path(__file__).resolve().parents[2]).joinpath("meshlib").is_dir():
    sys.path.insert(0, str(ROOT))  # from a checkout, installed or not

import meshlib as mtf
from hardware.slices import Slice
from meshlib.command.scripts import finish
from meshlib.core.text import bytes_text

RUN: dict[str, Any] = {
    "model": {
        "seq_len": 4096, "hidden_dim": 2048, "intermediate_dim": 8192, "num_layers": 28, "num_heads": 16,
        "num_kv_heads": 8, "vocab_size": 32768,
    },
    "trainer": {
        "train_batch_size": 256, "mp": "p=f32,c=bfloat16", "model_axis_size": 1, "fsdp_axis": "embed",
        "tensor_parallel_axes": ["mlp", "kv_head"], "batch_axis": "batch",
    },
    "optimizer": {"learning_rate": 3e-4, "weight_decay": 0.1, "beta1": 0.9, "beta2": 0.95, "epsilon": 1e-8},
}  # fmt: skip
DTYPES = {"f32": "float32", "float32": "float32", "bf16": "bfloat16", "bfloat16": "bfloat16"}


# ------------------------------------------------------------ somebody's model, in Haliax


def model(config: Mapping[str, Any]) -> tuple[Callable[..., Any], Any, dict[str, Any]]:
    """A Llama: its loss of parameters and tokens, the shapes of its parameters, and its axes by name."""
    import equinox as eqx
    import haliax as hax
    import haliax.nn as hnn
    import jax
    import jax.numpy as jnp

    sizes = {
        "position": config["seq_len"], "embed": config["hidden_dim"], "mlp": config["intermediate_dim"],
        "layers": config["num_layers"], "kv_head": config["num_kv_heads"], "vocab": config["vocab_size"],
        "q_heads_per_group": config["num_heads"] // config["num_kv_heads"],
        "head_size": config["hidden_dim"] // config["num_heads"],
    }  # fmt: skip
    axes = {name: hax.Axis(name, size) for name, size in sizes.items()}
    embed, mlp, vocab, position = (axes[n] for n in ("embed", "mlp", "vocab", "position"))
    keys_of = (axes["kv_head"], axes["head_size"])
    queries_of = (axes["kv_head"], axes["q_heads_per_group"], axes["head_size"])

    class Block(eqx.Module):  # type: ignore[misc, unused-ignore]
        q: Any
        k: Any
        v: Any
        o: Any
        gate: Any
        up: Any
        down: Any
        norms: Any

        @staticmethod
        def init(key: Any) -> Any:
            keys = iter(jax.random.split(key, 7))
            shapes = [(embed, queries_of), (embed, keys_of), (embed, keys_of), (queries_of, embed)]
            shapes += [(embed, mlp), (embed, mlp), (mlp, embed)]
            linears = [hnn.Linear.init(a, b, key=next(keys), use_bias=False) for a, b in shapes]
            return Block(*linears, [hnn.RmsNorm.init(embed, use_bias=False) for _ in range(2)])  # type: ignore[call-arg, unused-ignore]

        def __call__(self, x: Any) -> Any:
            h, other = self.norms[0](x), {"position": "key_position"}
            q, k, v = self.q(h), self.k(h).rename(other), self.v(h).rename(other)
            mask = hnn.attention.causal_mask(position, position.alias("key_position"))
            x = x + self.o(hnn.attention.dot_product_attention("key_position", "head_size", q, k, v, mask=mask))
            h = self.norms[1](x)
            return x + self.down(hnn.silu(self.gate(h)) * self.up(h))

    class Llama(eqx.Module):  # type: ignore[misc, unused-ignore]
        embeddings: Any
        layers: Any
        norm: Any
        head: Any

        def __call__(self, tokens: Any) -> Any:
            return self.head(self.norm(self.layers.fold(self.embeddings(tokens))))

    def build() -> Any:
        key = jax.random.key(0)
        stacked = hnn.Stacked.init(axes["layers"], Block, gradient_checkpointing=True)
        layers = stacked(key=jax.random.split(key, config["num_layers"]))
        norm, head = hnn.RmsNorm.init(embed, use_bias=False), hnn.Linear.init(embed, vocab, key=key, use_bias=False)
        return Llama(hnn.Embedding.init(vocab, embed, key=key), layers, norm, head)

    shapes, still = eqx.partition(eqx.filter_eval_shape(build), lambda x: isinstance(x, jax.ShapeDtypeStruct))

    def loss(params: Any, tokens: Any) -> Any:
        logits = eqx.combine(params, still)(tokens).astype("float32")
        following = hax.roll(tokens, -1, "position")
        last = 1 - hnn.one_hot(position.size - 1, position, dtype=jnp.float32)
        hot = hnn.one_hot(following, vocab)
        return hnn.cross_entropy_loss(logits, vocab, hot, reduction=hax.mean, where=last > 0).scalar()

    return loss, shapes, axes


# ------------------------------------------------------------ its run


@dataclass(frozen=True)
class Policy:
    """Dtypes of a mixed-precision policy such as "p=f32,c=bfloat16": of parameters, and of what is computed."""

    parameters: str
    compute: str

    @staticmethod
    def of(text: str) -> Policy:
        """Read one.

        Raises: GraphError for a dtype that there is not.
        """
        given = dict(part.split("=") for part in text.split(",")) if "=" in text else {"p": text, "c": text}
        unknown = [d for d in given.values() if d not in DTYPES]
        if unknown:
            raise mtf.GraphError(f"mp: no dtype {unknown[0]!r} in {text!r}; there are {', '.join(DTYPES)}")
        parameters = DTYPES[given.get("p", "f32")]
        return Policy(parameters, DTYPES[given.get("c", given.get("p", "f32"))])


def in_policy(loss: Callable[..., Any], shapes: Any, policy: Policy) -> tuple[Callable[..., Any], Any]:
    """A loss whose parameters are kept in one dtype and computed with in another."""
    import jax

    kept = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, policy.parameters), shapes)
    return lambda params, tokens: loss(jax.tree.map(lambda x: x.astype(policy.compute), params), tokens), kept


def layout_of(trainer: Mapping[str, Any], devices: int) -> tuple[str, str]:
    """Mesh and rules of a trainer's config."""
    width = int(trainer.get("model_axis_size", 1))
    if width < 1 or devices % width:
        raise mtf.GraphError(f"model_axis_size {width} does not divide {devices} devices")
    rules = [f"{trainer['batch_axis']}:data", f"variables/{trainer['fsdp_axis']}:data"]
    rules += [f"{axis}:model" for axis in trainer["tensor_parallel_axes"]] if width > 1 else []
    return f"data:{devices // width}" + (f";model:{width}" if width > 1 else ""), ";".join(rules)


def optimizer_of(config: Mapping[str, Any]) -> mtf.optimize.Optimizer:
    """AdamW, as the trainer's optimizer is configured."""
    return mtf.optimize.AdamWOptimizer(
        config["learning_rate"], config["weight_decay"], config["beta1"], config["beta2"], config["epsilon"]
    )


def imported(run: Mapping[str, Any]) -> Any:
    """The loss of a run as a graph."""
    arguments, function = loss_of(run)
    return mtf.from_jax(function, *arguments)


def loss_of(run: Mapping[str, Any]) -> tuple[tuple[Any, Any], Callable[..., Any]]:
    """Shapes of the arguments of a run's loss, and the loss."""
    import haliax as hax
    import jax

    loss, shapes, axes = model(run["model"])
    function, kept = in_policy(loss, shapes, Policy.of(run["trainer"]["mp"]))
    batch = hax.Axis(run["trainer"]["batch_axis"], run["trainer"]["train_batch_size"])
    tokens = jax.ShapeDtypeStruct((batch.size, axes["position"].size), "int32")
    return (kept, hax.NamedArray(tokens, (batch, axes["position"]))), function


@functools.cache
def _own_loss() -> tuple[tuple[Any, Any], Callable[..., Any]]:
    return loss_of(RUN)  # once: a second call would define the model's classes again


def loss_arguments() -> tuple[Any, Any]:
    """What `loss` takes, for `meshlib plan` and `meshlib dims`."""
    return _own_loss()[0]


def loss(params: Any, tokens: Any) -> Any:
    """The loss of the run above."""
    return _own_loss()[1](params, tokens)


def plan(run: Mapping[str, Any], where: str, most: int = 4) -> mtf.Program:
    """Import the model, lower a step of its training, and print its plan."""
    mesh, rules = layout_of(run["trainer"], Slice(where).devices)
    graph = imported(run)
    with graph:
        updates = optimizer_of(run["optimizer"]).minimize(graph.loss)
    program = mtf.lower(graph.outputs, updates=updates, mesh=mesh, layout=rules)
    est = mtf.estimate(program, where)
    count = sum(x.shape.size for x in graph.trainable_variables)
    print(f"{count / 1e9:.2f} B parameters on {where}: mesh {mesh}, layout {rules}")
    needed, capacity = bytes_text(est.memory.needed_bytes), bytes_text(est.memory.capacity_bytes)
    print(f"  {'fits' if est.fits else 'DOES NOT FIT'}: needs* {needed} of {capacity} a device")
    print(f"  step* {est.step_seconds:.3f} s, MFU* {est.mfu:.1%}")
    for c in sorted(program.collectives, key=lambda c: -c.sent_bytes * c.count)[:most]:
        print(f"  {c.kind} over {'+'.join(c.axes)}, {bytes_text(c.sent_bytes * c.count)}, {c.phase}, {c.source}")
    print("* modelled")
    return program


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The flags."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, help="JSON with some of the keys of the run above")
    parser.add_argument("--slice", default="v5e-64", help="default: %(default)s")
    return parser.parse_args(argv)


def configured(path: Path | None) -> dict[str, Any]:
    """The run above with what a file changes of it.

    Raises: GraphError for keys that it does not have.
    """
    run = {part: dict(held) for part, held in RUN.items()}
    for part, held in (json.loads(path.read_text()) if path else {}).items():
        if part not in run:
            raise mtf.GraphError(f"{path}: no part {part!r}; there are {', '.join(run)}")
        for key in held:
            if key not in run[part]:
                raise mtf.GraphError(f"{path}: no {part}.{key}; there are {', '.join(run[part])}")
        run[part] |= held
    return run


def run(args: argparse.Namespace) -> None:
    """Plan the run, where Haliax is installed."""
    if importlib.util.find_spec("haliax") is None:
        print("This example needs Haliax: pip install --pre haliax")
        return
    plan(configured(args.config), args.slice)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the example; 2 and one clear message where flags or the config are wrong."""
    return finish("plan_haliax.py", lambda: run(parse(argv)))


if __name__ == "__main__":
    sys.exit(main())
