"""Train a small BigGAN on digits or drawn shapes, on simulated TPU cores.

    python examples/images/gan.py --picture samples.png           # shapes drawn by the program
    python examples/images/gan.py --data FOLDER                   # MNIST's IDX files, or class/name.png
    python examples/images/gan.py --load gan.safetensors --steps 0 --truncation 0.5 --picture samples.png

The picture has a row of samples for each class, by moving averages of the generator's weights; its last row goes from
one sample to another. Both players learn in one program, each with an optimizer of its own.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import einops
import numpy as np

if (ROOT := Path(__file__).resolve().parents[2]).joinpath("meshlib").is_dir():
    sys.path.insert(0, str(ROOT))  # from a checkout, installed or not

import meshlib as mtf
from meshlib.command.scripts import add_device_flags, check_device_flags, check_least, finish, line, runner
from meshlib.data.samples import ImageData, grid, load_images, write_png

COLUMNS = 10


def shrunk(data: ImageData, side: int) -> np.ndarray:
    """Training images in -1..1, brought to side x side: cut in the middle or padded, and means of 2 x 2 pixels."""
    images = data.train_images
    while images.shape[1] >= 2 * side - side // 4:
        even = images[:, : images.shape[1] // 2 * 2, : images.shape[2] // 2 * 2]
        images = einops.reduce(even, "n (h 2) (w 2) c -> n h w c", "mean")
    missing = max(side - images.shape[1], 0)
    images = np.pad(images, ((0, 0), *2 * ((missing // 2, missing - missing // 2),), (0, 0)), mode="edge")
    cut = (images.shape[1] - side) // 2
    found: np.ndarray = images[:, cut : cut + side, cut : cut + side] * np.float32(2) - np.float32(1)
    return found


def model(args: argparse.Namespace, data: ImageData) -> mtf.models.BigGANConfig:
    """A small BigGAN for these images."""
    channels, parts = (
        data.train_images.shape[-1],
        len(mtf.models.BigGANConfig("", args.side, z=840, attention=0).widths),
    )
    return mtf.models.BigGANConfig(
        "small", args.side, channels, len(data.classes), args.features, 16 * parts, 32, args.side // 2
    )


def train(args: argparse.Namespace) -> None:
    """Train, and draw samples of each class."""
    data = load_images(args.data, args.side, args.seed)
    line(f"data: {data.source}")
    config = model(args, data)
    layout = mtf.models.image_layout(args.layout, config, args.mesh)
    where = {"mesh": args.mesh, "layout": layout}
    with mtf.Graph():
        players = [mtf.optimize.AdamOptimizer(lr, 0.0, 0.99) for lr in (args.lr, args.judge_lr)]
        step = mtf.models.gan_step(config, args.batch, players[0], players[1], args.average, args.steps // 10)
        training = mtf.lower(*step, **where)
    rows = len(data.classes) + 1
    with mtf.Graph():
        sampling = mtf.lower(mtf.models.gan_samples(config, rows * COLUMNS))
    sim = runner(training, args)
    if args.load:
        mtf.load(args.load, sim)
    line(f"generator {config.generator_parameters:,} parameters, discriminator {config.discriminator_parameters:,}, "
         f"mesh {training.mesh}, layout {layout}")  # fmt: skip
    examples = {"images": shrunk(data, args.side), "labels": data.train_labels}
    begun = time.perf_counter()

    def report(row: dict[str, float]) -> None:
        text = "  ".join(f"{name.replace('_', ' ')} {row[name]:.3f}" for name in step[0])
        line(f"step {row['step']:>5}  {text}  ({time.perf_counter() - begun:.0f} s)")

    batches = mtf.Batches(examples, args.batch, shuffle_seed=args.seed)
    if args.steps:
        mtf.train(sim, batches, args.steps, log_every=args.every, report=report)
    if args.save:
        mtf.save(sim, args.save)
    if args.picture:
        images = samples(sim, sampling, config, rows, args)
        write_png(args.picture, grid(images, rows, max(64 // args.side, 1)))
        line(f"wrote {args.picture}: a row for each of {', '.join(data.classes)}; the last from one to another")
    print("\nthe largest collectives of one step\n" + mtf.collectives_table(training.collectives[:8]))


def samples(
    sim: mtf.Simulation, program: mtf.Program, config: mtf.models.BigGANConfig, rows: int, args: argparse.Namespace
) -> np.ndarray:
    """Images in 0..1: a row for each class, and one whose noise goes from its first to its last."""
    noise = config.noise(rows * COLUMNS, args.truncation or None, args.seed)
    labels = np.repeat(np.arange(rows), COLUMNS)
    share = np.linspace(0, 1, COLUMNS, dtype=np.float32)[:, None]
    noise[-COLUMNS:] = noise[-COLUMNS] * (1 - share) + noise[-1] * share
    labels[-COLUMNS:] = args.seed % (rows - 1)
    made = mtf.simulate(program, seed=args.seed)
    kept = {name: sim.state[name] for name in made.state if name in sim.state and name != "step"}
    made.state.update(kept | mtf.optimize.averaged(sim.state))
    images: np.ndarray = made.step(z=noise, labels=labels)["images"]
    return images * np.float32(0.5) + np.float32(0.5)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The flags."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--data", default=None, help="folder of classes, or of IDX files; else drawn shapes")
    parser.add_argument("--side", type=int, choices=(16, 32, 64), default=16, help="pixels along a side of made images")
    parser.add_argument("--features", type=int, default=8, help="channels that all widths are multiples of")
    parser.add_argument("--batch", type=int, default=32, help="real examples in one step, and made ones, of all cores")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--every", type=int, default=100, help="steps between lines")
    parser.add_argument("--lr", type=float, default=1e-3, help="of the generator")
    parser.add_argument("--judge-lr", type=float, default=2e-3, help="of the discriminator")
    parser.add_argument("--average", type=float, default=0.99, help="decay of the averages of the generator's weights")
    parser.add_argument("--truncation", type=float, default=0.0, help="of the noise of samples; 0: none")
    parser.add_argument("--mesh", default="data:8", help="axes and sizes of the logical mesh")
    parser.add_argument("--layout", default="data", help="data, spatial, channels, zero1, or several joined by +")
    parser.add_argument("--save", default=None, help="write a checkpoint at the end")
    parser.add_argument("--load", default=None, help="begin with a checkpoint")
    parser.add_argument("--picture", default=None, metavar="PNG", help="write samples of each class")
    parser.add_argument("--seed", type=int, default=0)
    add_device_flags(parser)
    args = parser.parse_args(argv)
    check_device_flags(parser, args)
    check_least(parser, args, features=1, batch=1, steps=0, every=1, seed=0)
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Run the example; 2 and one clear message where the flags or the data are wrong."""
    return finish("gan.py", lambda: train(parse(argv)))


if __name__ == "__main__":
    sys.exit(main())
