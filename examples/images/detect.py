"""Train a RetinaNet to find shapes in drawn scenes, on simulated TPU cores.

    python examples/images/detect.py                          # until the objects are found; a picture with boxes
    python examples/images/detect.py --mesh "data:4;spatial:2" --layout data+spatial

Prints the mean average precision on scenes it has not seen, and with --picture writes some of them with the boxes that
it found (in the colour of the class) and the true ones (white).
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
from meshlib.command.scripts import add_device_flags, check_device_flags, check_least, finish, line, progress, runner
from meshlib.data.samples import CLASSES, Scenes, draw_scenes, frame, grid, write_png
from meshlib.models.images.detection import Objects, mean_average_precision

COLOURS = np.array(
    [
        (1, 0, 0),
        (0, 1, 0),
        (0, 0, 1),
        (1, 1, 0),
        (1, 0, 1),
        (0, 1, 1),
        (1, 0.5, 0),
        (0.5, 0, 1),
        (0, 0.5, 0.5),
        (0, 0, 0),
    ]
)


def model(args: argparse.Namespace) -> mtf.models.RetinaNetConfig:
    """A small one: places 4 and 8 pixels apart, anchors of 12 to 38 pixels for scenes of 64."""
    backbone = mtf.models.ResNetConfig(
        "small", (1, 1, 1, 1), False, stem="small", height=args.side, width=args.side, features=args.features,
        zero_last=False,
    )  # fmt: skip
    scales = (0.75, 1.1, 1.6)
    return mtf.models.RetinaNetConfig(
        "small", backbone, args.classes, (2, 3), 4 * args.features, 2, scales, (0.7, 1.0, 1.4), 3.0
    )


def truth(scenes: Scenes, chosen: Sequence[int] | np.ndarray) -> list[Objects]:
    """The objects of some of the scenes."""
    return [Objects(scenes.boxes[n], scenes.classes[n]) for n in chosen]


def precision(
    sim: mtf.Simulation, program: mtf.Program, config: mtf.models.RetinaNetConfig, scenes: Scenes
) -> tuple[float, list[Objects]]:
    """The mean average precision at an overlap of a half, and what was found."""
    size = program.inputs["images"].tensor.shape.dim("batch").size
    found: list[Objects] = []
    for batch in mtf.Batches({"images": normalised(scenes.images)}, size, remainder="pad", epochs=1):
        kept = int(batch["mask"].sum())
        found += config.found(sim.run(program, images=batch["images"]))[:kept]
    return mean_average_precision(found, truth(scenes, range(len(scenes.images)))), found


def normalised(images: np.ndarray) -> np.ndarray:
    """Around 0, of about unit deviation."""
    return (images - np.float32(0.5)) * np.float32(4)


def train(args: argparse.Namespace) -> None:
    """Train, tell how well it finds what it has not seen, and draw it."""
    config = model(args)
    rate = mtf.optimize.product(
        args.lr, mtf.optimize.linear_warmup(1.0, max(args.steps // 20, 1)), mtf.optimize.cosine_decay(1.0, args.steps)
    )
    optimizer = mtf.optimize.AdamWOptimizer(
        rate, weight_decay=args.decay, exclude_from_weight_decay=mtf.optimize.NORMS_AND_BIASES
    )
    layout = mtf.models.image_layout(args.layout, config, args.mesh) if args.layout else ""
    with mtf.Graph():
        outputs, updates = mtf.models.detection_step(config, args.batch, optimizer, max_norm=10.0)
        training = mtf.lower(outputs, updates, mesh=args.mesh, layout=layout)
    with mtf.Graph():
        finding = mtf.lower(mtf.models.detection_outputs(config, args.batch), mesh=args.mesh, layout=layout)
    sim = runner(training, args)
    scenes = draw_scenes(args.scenes, args.side, args.seed, kinds=args.classes)
    unseen = draw_scenes(args.unseen, args.side, args.seed + 1, kinds=args.classes)
    line(
        f"{config.parameters:,} parameters, {len(config.anchors.boxes)} anchors, mesh {training.mesh}, layout {layout}"
    )
    rng, begun = np.random.default_rng(args.seed), time.perf_counter()
    losses: list[float] = []
    for step in range(1, args.steps + 1):
        chosen = rng.choice(args.scenes, args.batch, replace=False)
        out = sim.step(config.feeds(normalised(scenes.images[chosen]), truth(scenes, chosen)))
        losses.append(float(out["loss"]))
        progress(step, args.steps, f"loss {losses[-1]:.3f}")
        if step % args.every == 0 or step == args.steps:
            score, found = precision(sim, finding, config, unseen)
            seconds = time.perf_counter() - begun
            line(f"step {step:>5}  loss {np.mean(losses[-args.every :]):.3f}  mAP {score:.1%}  ({seconds:.0f} s)")
    if args.picture:
        write_png(args.picture, drawn(unseen, found, 16))
        line(f"wrote {args.picture}")
    print("\ncollectives of one training step\n" + mtf.collectives_table(training.collectives[:12]))


def drawn(scenes: Scenes, found: Sequence[Objects], count: int, grow: int = 3) -> np.ndarray:
    """A grid of scenes: true boxes white, found ones of a score of at least 0.4 in the colour of their class."""
    pictures = []
    for image, boxes, objects in zip(scenes.images[:count], scenes.boxes, found, strict=False):
        picture = einops.repeat(image, "h w c -> (h a) (w b) c", a=grow, b=grow).copy()
        for box in boxes:
            frame(picture, box * grow, np.ones(3))
        for box, kind, score in zip(objects.boxes, objects.classes, objects.scores, strict=True):
            if score >= 0.4:
                frame(picture, box * grow + (1, 1, -1, -1), COLOURS[kind])
        pictures.append(picture)
    return grid(np.stack(pictures), int(np.sqrt(count)))


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The flags."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--side", type=int, default=64, help="pixels along a side of a scene; a multiple of 8")
    parser.add_argument("--classes", type=int, default=4, help=f"how many of {', '.join(CLASSES)}")
    parser.add_argument("--scenes", type=int, default=2048, help="to train on")
    parser.add_argument("--unseen", type=int, default=128, help="to test on")
    parser.add_argument("--features", type=int, default=8, help="channels of the backbone's first stage")
    parser.add_argument("--batch", type=int, default=16, help="scenes in one step, all cores together")
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--every", type=int, default=200, help="steps between looks at unseen scenes")
    parser.add_argument("--lr", type=float, default=3e-3, help="learning rate at its highest")
    parser.add_argument("--decay", type=float, default=1e-3, help="weight decay, of all but norms and biases")
    parser.add_argument("--mesh", default="data:8", help="axes and sizes of the logical mesh")
    parser.add_argument("--layout", default="data", help="data, spatial, channels, zero1, or several joined by +")
    parser.add_argument("--picture", default=None, metavar="PNG", help="write unseen scenes with boxes")
    parser.add_argument("--seed", type=int, default=0)
    add_device_flags(parser)
    args = parser.parse_args(argv)
    check_device_flags(parser, args)
    check_least(parser, args, classes=1, scenes=args.batch, unseen=1, batch=1, steps=1, every=1, seed=0)
    if args.classes > len(CLASSES) or args.side % 8 or args.side < 32:
        parser.error(f"--classes is at most {len(CLASSES)}, --side a multiple of 8 from 32 on")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Run the example; 2 and one clear message where the flags are wrong."""
    return finish("detect.py", lambda: train(parse(argv)))


if __name__ == "__main__":
    sys.exit(main())
