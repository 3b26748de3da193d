"""Train a language model on real text, on simulated TPU cores.

    python examples/text/transformer.py                              # 2x4 cores of a v3-8, batch and heads split
    python examples/text/transformer.py --mesh fsdp:8 --layout fsdp  # fully sharded instead
    python examples/text/transformer.py --on jax --mesh data:1 --layout data # on JAX's devices, as many as the mesh has
    python examples/text/transformer.py --experts 8                  # a mixture of experts, as dear a token
    python examples/text/transformer.py --text ~/books --size base --steps 1000 --folder run

The model is written once, in named dimensions. Mesh and layout say where they are split; the numbers stay the same
up to rounding. The text is by default what every Python installation holds: the sources of its standard library.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

if (ROOT := Path(__file__).resolve().parents[2]).joinpath("meshlib").is_dir():
    sys.path.insert(0, str(ROOT))  # from a checkout, installed or not

import meshlib as mtf
from meshlib.command.scripts import add_device_flags, check_device_flags, check_least, finish, line, runner
from meshlib.data.samples import load_text
from meshlib.data.samples import windows as windows_of

SIZES = {  # layers, d_model, heads of 32, d_ff
    "tiny": (2, 128, 4, 512),
    "small": (2, 256, 8, 1024),
    "base": (6, 512, 16, 2048),
}


def config(size: str, precision: str, experts: int = 0, top_k: int = 2) -> mtf.models.TransformerConfig:
    """A decoder over bytes; with experts, those that a token goes to are together as wide as its feed-forward block."""
    layers, d_model, heads, d_ff = SIZES[size]
    mixture = None
    if experts:
        routing = mtf.layers.Routing(top_k=min(top_k, experts), renormalise=top_k > 1)
        mixture = mtf.models.Experts(count=experts, d_ff=d_ff // routing.top_k, routing=routing)
    return mtf.models.TransformerConfig(
        name=size,
        layers=layers,
        d_model=d_model,
        heads=heads,
        head_dim=32,
        d_ff=d_ff,
        vocab=256,
        norm="rms",
        position="rotary",
        experts=mixture,
        numerics=mtf.Numerics(activation_dtype=precision),
    )


def build(args: argparse.Namespace) -> tuple[mtf.Program, mtf.Program]:
    """The training program, and one that gives the logits of a single text on one core."""
    model = config(args.size, args.precision, args.experts, args.top_k)
    precision = PRECISIONS[args.precision]
    layout = args.layout
    if layout is None:
        layout = "data+expert+tensor" if args.experts else "2d"
    if ":" not in layout and layout:
        layout = mtf.models.layout(layout, model, args.mesh)
    warmup = mtf.optimize.linear_warmup(1.0, min(50, args.steps))
    lr = mtf.optimize.product(warmup, mtf.optimize.cosine_decay(args.lr, args.steps, alpha=0.1))
    with mtf.Graph():
        outputs, updates = mtf.models.train_step(
            model, args.batch, args.length, mtf.optimize.AdamWOptimizer(lr), args.remat, max_norm=1.0
        )
        training = mtf.lower(outputs, updates, mesh=args.mesh, layout=layout, precision=precision)
    with mtf.Graph():
        made = mtf.models.transformer(model, 1, args.length)
        sampling = mtf.lower({"logits": made.logits}, precision=precision)
    return training, sampling


def train(args: argparse.Namespace) -> None:
    """Lower, train, write a sample, and show what the layout made of the program and what a step would take."""
    text = load_text(args.text)
    training, sampling = build(args)
    sim = runner(training, args)
    assert sim.slice is not None
    est = mtf.estimate(training, sim.slice)
    print(f"text: {text.source}; unigram entropy {text.unigram_entropy:.3f} nats a byte")
    print(f"slice: {sim.slice}" if args.on == "simulation" else f"devices: {sim}")
    print(f"mesh: {training.mesh}; layout: {training.layout or '(none)'}; activations: {args.precision}")
    for note in training.notes:
        print(f"note: {note}")
    learn(args, sim, est)
    print(f"\nsample\n{indented(sample(sim, sampling, text.held_out, args))}")
    print("\ncollectives of one training step\n" + mtf.collectives_table(training.collectives))
    print(f"\n{est}")
    if args.on == "jax":
        print(f"\n{sim}")


def examples(args: argparse.Namespace) -> mtf.data.Data:
    """Batches of windows of the text, each byte with the one that follows it."""
    windows = windows_of(load_text(args.text).train, args.length)
    return mtf.data.arrays({"windows": windows}).shuffle(args.seed).batch(args.batch).map(shifted).repeat()


def shifted(batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {"tokens": batch["windows"][:, :-1], "targets": batch["windows"][:, 1:]}


def learn(args: argparse.Namespace, sim: mtf.Simulation, est: mtf.Estimate) -> None:
    """The steps that are left, with a line every `args.every` of them."""
    there = args.batch * args.length / est.step_seconds
    asked = args.batch * args.length * args.top_k * SIZES[args.size][0]  # places that bytes ask for in all layers

    def report(row: dict[str, float]) -> None:
        line(
            f"step {row['step']:>5}  loss {row['loss'] - row.get('auxiliary_loss', 0.0):.4f}  "
            f"{row['examples_per_second'] * args.length:,.0f} tokens/s here, "
            f"{there:,.0f} tokens/s on {est.slice.name} (modelled)"
            + (f"  {row['dropped'] / asked:.1%} dropped" if args.experts else "")
        )

    data, kept = examples(args), None if args.folder is None else args.every
    trained = mtf.train(
        sim, data, args.steps, folder=args.folder, save_every=kept, keep=1, log_every=args.every, report=report
    )
    if trained.stats is not None and not trained.stats.batches:
        print(f"note: --steps {args.steps} counts from the first step; {args.folder} has done {trained.step}")


def sample(sim: mtf.Simulation, program: mtf.Program, prompt: np.ndarray, args: argparse.Namespace) -> str:
    """`args.sample` bytes that the model writes after the first of `prompt`, each drawn from its distribution."""
    rng = np.random.default_rng(args.seed)
    written = list(prompt[: args.length // 2])
    begun = len(written)
    for _ in range(args.sample):
        window = written[-args.length :]
        tokens = np.zeros((1, args.length), np.int32)
        tokens[0, : len(window)] = window  # what comes after does not matter to a causal model
        logits = sim.run(program, tokens=tokens)["logits"][0, len(window) - 1].astype(np.float64) / args.temperature
        chances = np.exp(logits - logits.max())
        written.append(rng.choice(len(chances), p=chances / chances.sum()))
    head, tail = (bytes(part).decode("utf-8", "replace") for part in (written[:begun], written[begun:]))
    return f"{head}|{tail}"


def indented(text: str) -> str:
    """Lines set apart from the program's own."""
    return "\n".join(f"    {line}" for line in text.splitlines())


PRECISIONS = {"bfloat16": "default", "float32": "highest"}


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The flags."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--text", default=None, help="a file or a folder; default: the standard library's sources")
    parser.add_argument("--size", choices=SIZES, default="small", help="layers, d_model, heads and d_ff")
    parser.add_argument("--length", type=int, default=128, help="bytes in one example")
    parser.add_argument("--batch", type=int, default=16, help="examples in one step, all cores together")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--mesh", default="data:2;tensor:4", help="axes and sizes of the logical mesh")
    parser.add_argument(
        "--layout",
        default=None,
        help="a name, parts joined by +, or dim:axis rules; 2d, or data+expert+tensor, unless given; names: "
        + ", ".join(mtf.models.LAYOUTS),
    )
    parser.add_argument("--experts", type=int, default=0, help="experts in place of each feed-forward block; 0: none")
    parser.add_argument("--top-k", type=int, default=2, help="experts that each byte goes to")
    parser.add_argument("--precision", choices=PRECISIONS, default="bfloat16", help="of activations and of products")
    parser.add_argument("--remat", default="none", help="what the backward pass recomputes: none, matmuls, full")
    parser.add_argument("--lr", type=float, default=2e-3, help="highest learning rate of AdamW")
    parser.add_argument("--folder", default=None, help="of checkpoints and the history; a run continues from them")
    parser.add_argument("--every", type=int, default=20, help="steps between lines and checkpoints")
    parser.add_argument("--sample", type=int, default=200, help="bytes to write at the end")
    parser.add_argument("--temperature", type=float, default=0.7, help="of the sample: lower is more certain")
    parser.add_argument("--seed", type=int, default=0)
    add_device_flags(parser)
    args = parser.parse_args(argv)
    check_device_flags(parser, args)
    check_least(parser, args, length=2, batch=1, steps=1, every=1, sample=0, seed=0, experts=0, top_k=1)
    if args.experts and args.top_k > max(2, args.experts):  # 2, unless given, of one expert too
        parser.error(f"--top-k {args.top_k} is more than --experts {args.experts}")
    if not args.temperature > 0:
        parser.error(f"--temperature must be positive, got {args.temperature}")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Run the example; 2 and one clear message where the flags or the text are wrong."""
    return finish("transformer.py", lambda: train(parse(argv)))


if __name__ == "__main__":
    sys.exit(main())
