"""Show what a layout makes of a 784-hidden-10 network, and train it on handwritten digits on simulated TPU cores.

    python examples/mnist.py                                       # 60 steps on 2x4 cores, batch and hidden split
    python examples/mnist.py --epochs 10                           # train to the end, on MNIST where it can be had
    python examples/mnist.py --mesh data:8 --layout "batch:data"   # data-parallel instead
    python examples/mnist.py --mesh model:8 --layout "hidden:model" --precision float32
    python examples/mnist.py --on jax --mesh data:1                # on the devices that JAX has, as many as the mesh

The network is written once, in named dimensions. Change the mesh or the layout and the same program is lowered to
other local shapes with other collectives; the numbers stay the same up to rounding.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

if (ROOT := Path(__file__).resolve().parents[1]).joinpath("meshlib").is_dir():
    sys.path.insert(0, str(ROOT))  # from a checkout, installed or not

import meshlib as mtf
from meshlib.command.scripts import Lines, add_device_flags, check_device_flags, check_least, finish, runner
from meshlib.data.samples import load_digits

PIXELS, CLASSES = mtf.Dimension("pixels", 784), mtf.Dimension("classes", 10)


def network(batch_size: int, hidden_size: int) -> tuple[mtf.Tensor, mtf.Tensor]:
    """Loss and logits of the network for one batch; call it inside a graph."""
    batch, hidden = mtf.Dimension("batch", batch_size), mtf.Dimension("hidden", hidden_size)
    images = mtf.input("images", [batch, PIXELS])
    labels = mtf.input("labels", [batch], dtype="int32")
    h = mtf.layers.dense(images, hidden, activation=mtf.relu, name="hidden")
    logits = mtf.layers.dense(h, CLASSES, name="logits")
    losses = mtf.layers.softmax_cross_entropy_with_logits(logits, mtf.one_hot(labels, CLASSES), CLASSES)
    return mtf.reduce_mean(losses, name="loss"), logits


def build(args: argparse.Namespace) -> tuple[mtf.Program, mtf.Program]:
    """The training program, and the evaluation program on the same variables."""
    where = {"mesh": args.mesh, "layout": args.layout, "precision": PRECISIONS[args.precision]}
    with mtf.Graph():
        loss, _ = network(args.batch, args.hidden)
        updates = mtf.optimize.MomentumOptimizer(args.lr, momentum=0.9).minimize(loss)
        training = mtf.lower({"loss": loss}, updates, **where)
    with mtf.Graph():
        _, logits = network(args.batch, args.hidden)
        evaluation = mtf.lower({"logits": logits}, **where)
    return training, evaluation


def right(outputs: dict[str, np.ndarray], batch: dict[str, np.ndarray]) -> dict[str, float]:
    """The number of correct answers; images that pad the last batch do not count."""
    correct = batch["mask"] @ (outputs["logits"].argmax(axis=1) == batch["labels"])
    return {"accuracy": float(correct), "count": float(batch["mask"].sum())}


def train(args: argparse.Namespace) -> None:
    """Lower, show what the layout made of the program, train, and evaluate."""
    training, evaluation = build(args)
    sim = runner(training, args)
    print(f"slice: {sim.slice}" if args.on == "simulation" else f"devices: {sim}")
    print(f"mesh: {training.mesh}; layout: {training.layout or '(none)'}; matmul operands: {args.precision}")
    for note in training.notes:
        print(f"note: {note}")
    print("\ncollectives of one training step\n" + mtf.collectives_table(training.collectives))
    print(f"\n{training.memory}")
    if sim.slice is not None:
        hbm = sim.slice.usable_hbm_bytes_per_device
        print(
            f"HBM of one core of {sim.slice.name}: {hbm} bytes; the peak takes {training.memory.peak_bytes / hbm:.2%}"
        )
    digits = load_digits(args.data, download=args.epochs is not None, seed=args.seed)
    print(f"\ndata: {digits.source}")
    data = mtf.data.arrays({"images": digits.train_images, "labels": digits.train_labels})
    data = data.shuffle(args.seed).batch(args.batch).repeat()
    test = mtf.data.arrays({"images": digits.test_images, "labels": digits.test_labels}).batch(args.batch, "pad")
    steps = args.steps if args.epochs is None else args.epochs * data.per_epoch
    every = min(steps, data.per_epoch)
    trained = mtf.train(
        sim,
        data,
        steps,
        evaluation=mtf.Evaluation(program=evaluation, data=test, every=every, measure=right),
        best="accuracy",
        better="higher",
        log_every=every,
        folder=args.folder,
        report=Lines(data.per_epoch),
    )
    if args.plot:
        trained.history.plot(args.plot)
    if args.on == "jax":
        print(f"\n{sim}")
    if args.epochs is None:
        print("--epochs 10 trains to the end; another --layout changes the collectives, not the results")


PRECISIONS = {"bfloat16": "default", "float32": "highest"}


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The flags."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--hidden", type=int, default=1024, help="size of the hidden layer")
    parser.add_argument("--batch", type=int, default=128, help="examples in one step, all cores together")
    parser.add_argument("--steps", type=int, default=60, help="steps of training, without --epochs")
    parser.add_argument("--epochs", type=int, help="train so many times over all digits, MNIST where it can be had")
    parser.add_argument("--mesh", default="rows:2;cols:4", help="axes and sizes of the logical mesh")
    parser.add_argument("--layout", default="batch:rows;hidden:cols", help="dim:axis rules")
    parser.add_argument(
        "--precision", choices=PRECISIONS, default="bfloat16", help="of the operands of matmuls; sums are float32"
    )
    parser.add_argument("--lr", type=float, default=0.1, help="learning rate")
    parser.add_argument("--data", default=None, help="folder of IDX files; also $MESHLIB_MNIST")
    parser.add_argument("--folder", default=None, help="of checkpoints and the history; a run continues from them")
    parser.add_argument("--plot", default=None, help="draw the curves into this file, such as curves.png")
    parser.add_argument("--seed", type=int, default=0)
    add_device_flags(parser)
    args = parser.parse_args(argv)
    check_device_flags(parser, args)
    check_least(parser, args, hidden=1, batch=1, steps=1, epochs=1, seed=0)
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Run the example; 2 and one clear message where the flags or the data are wrong."""
    return finish("mnist.py", lambda: train(parse(argv)))


if __name__ == "__main__":
    sys.exit(main())
