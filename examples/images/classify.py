"""Train a residual network on images, on simulated TPU cores.

    python examples/images/classify.py                                # shapes drawn by the program, 2x4 cores of a v3-8
    python examples/images/classify.py --data FOLDER                  # class/name.png or .jpg, or MNIST's IDX files
    python examples/images/classify.py --layout "batch:rows;height:cols"      # rows of the images split, too
    python examples/images/classify.py --batches 64,256,1024          # the same epochs at other batches, as a table
    python examples/images/classify.py --load model.safetensors --predict cat.png

The learning rate is scaled to the batch, after a warm-up; nothing else changes with the batch, the mesh or the layout.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

if (ROOT := Path(__file__).resolve().parents[2]).joinpath("meshlib").is_dir():
    sys.path.insert(0, str(ROOT))  # from a checkout, installed or not

import meshlib as mtf
from hardware import Slice, legal_slices
from meshlib.command.scripts import (
    Lines,
    add_device_flags,
    check_device_flags,
    check_least,
    counts,
    finish,
    line,
    runner,
)
from meshlib.data.samples import ImageData, load_images, read_image

PRECISIONS = {"bfloat16": "bfloat16", "float32": "float32"}
BASE_BATCH = 128  # for which --lr is meant


def model(args: argparse.Namespace, data: ImageData) -> Any:
    """The network for these images."""
    height, width, channels = data.train_images.shape[1:]
    numerics = mtf.Numerics(
        activation_dtype=args.precision, precision="highest" if args.precision == "float32" else "default"
    )
    found: dict[str, Any] = {"height": height, "width": width, "channels": channels, "classes": len(data.classes)}
    if args.model != "small":
        stem = "imagenet" if min(height, width) > 64 else "small"
        preset = mtf.models.image_preset(args.model)
        return preset.replace(numerics=numerics, **found, **({"stem": stem} if args.model.startswith("resnet") else {}))
    return mtf.models.ResNetConfig(
        "small", tuple(args.blocks), False, stem="small", features=args.features, numerics=numerics,
        zero_last=False, spatial_split=args.spatial_split, groups=args.groups, **found,
    )  # fmt: skip


def build(args: argparse.Namespace, config: Any, examples: int, batch: int) -> list[mtf.Program]:
    """The training program, and the evaluation program on the same variables."""
    where = {"mesh": args.mesh, "layout": args.layout}
    per_epoch = examples / batch
    warm = min(args.warmup, args.epochs / 4)
    rate = mtf.optimize.product(
        mtf.optimize.linear_scaling(args.lr, batch, per_epoch, warm, (), base_batch=BASE_BATCH),
        mtf.optimize.cosine_decay(1.0, max(int(per_epoch * args.epochs), 1)),
    )
    plain = mtf.optimize.NORMS_AND_BIASES
    optimizer: mtf.optimize.Optimizer
    if args.optimizer == "lars":
        scaled = mtf.optimize.product(rate, 30.0)  # of a trust ratio of a thousandth
        optimizer = mtf.optimize.LarsOptimizer(scaled, weight_decay=args.decay, exclude=plain)
    else:
        optimizer = mtf.optimize.MomentumOptimizer(rate, 0.9, True, args.decay, plain)
    with mtf.Graph():
        outputs, updates = mtf.models.image_step(config, batch, optimizer)
        training = mtf.lower(outputs, updates, **where)
    with mtf.Graph():
        evaluation = mtf.lower(mtf.models.image_evaluation(config, args.eval_batch), **where)
    return [training, evaluation]


def moved(most: int) -> Callable[[dict[str, Any], np.random.Generator], dict[str, Any]]:
    """What becomes of a training image: moved by up to `most` pixels each way, its border repeated."""

    def made(example: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
        image = example["images"]
        height, width = image.shape[:2]
        y, x = rng.integers(0, 2 * most + 1, 2)
        padded = np.pad(image, ((most, most), (most, most), (0, 0)), mode="edge")
        return {**example, "images": padded[y : y + height, x : x + width]}

    return made


def train(args: argparse.Namespace, data: ImageData, batch: int) -> tuple[mtf.Simulation, mtf.Program, float]:
    """Train for the epochs; the simulation, the evaluation program and the last accuracy."""
    config = model(args, data)
    training, evaluation = build(args, config, len(data.train_images), batch)
    sim = runner(training, args)
    if args.load:
        mtf.load(args.load, sim)
    for note in training.notes:
        line(f"note: {note}")
    line(f"{config.name}: {config.parameters:,} parameters, batch {batch} on mesh {training.mesh}, "
         f"layout {training.layout or '(none)'}")  # fmt: skip
    of_training = mtf.data.arrays({"images": data.normalised(data.train_images), "labels": data.train_labels})
    of_training = of_training.shuffle(args.seed)
    if args.shift:
        of_training = of_training.map(moved(args.shift), seed=args.seed)
    of_training = of_training.batch(batch).repeat().prefetch(2)
    test = {"images": data.normalised(data.test_images), "labels": data.test_labels}
    lines = Lines(of_training.per_epoch)

    def report(row: dict[str, Any]) -> None:
        lines(row)
        if args.save and "eval_accuracy" in row:
            mtf.save(sim, args.save)

    trained = mtf.train(
        sim,
        of_training,
        args.epochs * of_training.per_epoch,
        evaluation=mtf.Evaluation(
            program=evaluation,
            data=mtf.data.arrays(test).batch(args.eval_batch, "pad"),
            every=of_training.per_epoch,
            measure=lambda found, _: {"accuracy": found["right"], "loss": found["loss"], "count": found["count"]},
        ),
        log_every=of_training.per_epoch,
        report=report,
    )
    return sim, evaluation, trained.history.column("eval_accuracy")[1][-1]


def predict(args: argparse.Namespace, data: ImageData) -> None:
    """The classes of one picture, the likeliest first."""
    config = model(args, data)
    picture = read_image(args.predict, config.height, config.channels)
    with mtf.Graph():
        shape = [
            mtf.Dimension(n, s)
            for n, s in zip(("batch", "height", "width", "image_channels"), (1, *picture.shape), strict=True)
        ]
        classify = mtf.models.resnet if isinstance(config, mtf.models.ResNetConfig) else mtf.models.vit
        logits, _ = classify(config, mtf.input("images", shape), is_training=False)
        program = mtf.lower({"p": mtf.softmax(logits, logits.shape[-1])})
    sim = mtf.simulate(program)
    mtf.load(args.load, sim, strict=False)  # the file holds the optimizer's slots, too
    likely = sim.step(images=data.normalised(picture[None]))["p"][0]
    for n in np.argsort(-likely)[:5]:
        line(f"{likely[n]:>7.2%}  {data.classes[n]}")


def table(args: argparse.Namespace, data: ImageData) -> None:
    """The same epochs at several batches, as many more cores as the batch is larger: predicted time, accuracy."""
    rows = []
    for batch in args.batches:
        _, _, right = train(args, data, batch)
        slice_ = grown(args.slice, batch / min(args.batches))
        config = model(args, data)
        where = argparse.Namespace(**{**vars(args), "mesh": f"data:{slice_.devices}", "layout": "batch:data"})
        training, _ = build(where, config, len(data.train_images), batch)
        est = mtf.estimate(training, slice_)
        steps = args.epochs * (len(data.train_images) // batch)
        rows.append((batch, slice_.name, slice_.devices, est.step_seconds * 1e3, steps * est.step_seconds, right))
    line("\nbatch  slice    devices  step*      training*   test accuracy")
    for batch, name, count, step, total, right in rows:
        line(f"{batch:>5}  {name:<8} {count:>6}  {step:7.3f} ms {total:9.2f} s  {right:>9.2%}")
    line("* modelled, the batch split over all devices, without input and evaluation")


def grown(name: str, times: float) -> Slice:
    """The slice on offer with about this many times the chips of another."""
    first = Slice(name)
    offered = map(Slice, legal_slices(first.chip))
    return min(offered, key=lambda s: abs(math.log(s.chips / (first.chips * times))))


def run(args: argparse.Namespace) -> None:
    """Run the task that the flags select."""
    data = load_images(args.data, args.side, args.seed, args.examples)
    line(f"data: {data.source}")
    if args.predict:
        predict(args, data)
    elif args.batches:
        table(args, data)
    else:
        sim, _, _ = train(args, data, args.batch)
        print("\ncollectives of one training step\n" + mtf.collectives_table(sim.program.collectives))
        print(f"\n{sim.program.memory}")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The flags."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--data", default=None, help="folder of classes, or of IDX files; else drawn shapes")
    parser.add_argument(
        "--side", type=int, default=32, help="pixels along a side of drawn images, or those of a folder"
    )
    parser.add_argument("--examples", type=int, default=None, help="drawn images to train on; 8,000 unless given")
    parser.add_argument("--model", default="small", choices=("small", *mtf.models.IMAGE_PRESETS))
    parser.add_argument("--blocks", type=int, nargs="+", default=[1, 1, 1], help="of the stages of the small model")
    parser.add_argument("--features", type=int, default=16, help="channels of its first stage")
    parser.add_argument(
        "--groups", type=int, default=1, help="parts of the batch with batch norm statistics of their own"
    )
    parser.add_argument("--spatial-split", type=int, default=2, help="how often layouts may split height and width")
    parser.add_argument("--batch", type=int, default=64, help="examples in one step, all cores together")
    parser.add_argument(
        "--batches", type=counts, default=None, metavar="N,N,...", help="train at each of these, and print a table"
    )
    parser.add_argument("--eval-batch", type=int, default=256)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--warmup", type=float, default=2.0, help="epochs; at most a quarter of all")
    parser.add_argument("--optimizer", choices=("momentum", "lars"), default="momentum")
    parser.add_argument("--lr", type=float, default=0.2, help=f"learning rate for a batch of {BASE_BATCH}")
    parser.add_argument("--decay", type=float, default=5e-4, help="weight decay, of all but norms and biases")
    parser.add_argument("--shift", type=int, default=2, help="pixels by which training images are moved at random")
    parser.add_argument("--mesh", default="rows:2;cols:4", help="axes and sizes of the logical mesh")
    parser.add_argument("--layout", default="batch:rows+cols", help="dim:axis rules")
    parser.add_argument("--precision", choices=PRECISIONS, default="bfloat16")
    parser.add_argument("--save", default=None, help="write a checkpoint after each epoch")
    parser.add_argument("--load", default=None, help="begin with a checkpoint")
    parser.add_argument("--predict", default=None, metavar="IMAGE", help="classify one picture, with --load")
    parser.add_argument("--seed", type=int, default=0)
    add_device_flags(parser)
    args = parser.parse_args(argv)
    check_device_flags(parser, args)
    check_least(parser, args, batch=1, epochs=1, side=8, seed=0, shift=0, features=1, eval_batch=1, groups=1)
    if args.predict and not args.load:
        parser.error("--predict needs a trained model: --load CHECKPOINT")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Run the example; 2 and one clear message where the flags or the data are wrong."""
    return finish("classify.py", lambda: run(parse(argv)))


if __name__ == "__main__":
    sys.exit(main())
