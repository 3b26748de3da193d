"""Figures from talks about image training beside predictions: `python -m meshlib validate --talks`.

    epochs      ResNet-50 to 90 epochs on 1 to 64 devices of four chips, and the share of hosts in that time
    detectors   images per second of RetinaNet on v2-8 and v3-8, by image size
    durations   RetinaNet on 128 and on 32 cores, BigGAN on 512, in minutes or hours
    (MLPerf's ResNet rows are part of `validate`.)

Facts are rows of kind "talk" of `published_results.json`, with their sources. Times are those of whole runs. What hosts
take is fitted to the other rows of the table of epochs (`hosts`), and to all of them for the hosts that feed RetinaNet,
by the pixels that they decode.

Sources: ImageNet is the new MNIST, 2018; TPU pods and Mesh TensorFlow, 2019 (talks).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from hardware.slices import Slice
from meshlib.core.graph import Graph
from meshlib.estimation import CALIBRATED, Estimate, HostInput, estimate
from meshlib.lowering import lower
from meshlib.models.images.biggan import BigGANConfig, gan_step
from meshlib.models.images.resnet import ResNetConfig
from meshlib.models.images.retinanet import RetinaNetConfig, detection_step
from meshlib.optimize import AdamWOptimizer, MomentumOptimizer
from meshlib.validation.hosts import Host, fitted_host, includes_input, table_of
from meshlib.validation.image_training import prepare_images
from meshlib.validation.images import image_run_of, is_of_images, resnet_name
from meshlib.validation.policies import NotExpressed
from meshlib.validation.runs import ROWS
from meshlib.validation.validating import Checked, check_row

SIZES = (256, 384, 512, 640)  # pixels per side of RetinaNet's images
# images per step of RetinaNet on 8 cores: train_batch_size of tensorflow/tpu models/official/retinanet
BOARD_IMAGES = 64
IMAGENET_PIXELS = 469 * 387  # mean size of an ImageNet image (from memory)
DETECTION_PIXELS = 640 * 480  # size of a COCO image; the talk's data set is not described: assumed


@dataclass(frozen=True)
class Epochs:
    """Training of ResNet-50 on `devices` of four chips each: stated and predicted minutes of a run.

    `device_seconds`: a step on the chips alone; `step_seconds`: with hosts.
    """

    devices: int
    batch: int
    stated_minutes: float
    minutes: float
    device_seconds: float
    step_seconds: float
    usd: float | None


@dataclass(frozen=True)
class Speed:
    """Images per second of RetinaNet on v2-8 and v3-8: chips alone, and fed by their host."""

    size: int
    chips: tuple[float, float]
    fed: tuple[float, float]


@dataclass(frozen=True)
class Duration:
    """A run: stated to take `least` to `most` hours, predicted `hours`; `note`: assumptions."""

    name: str
    slice: str
    least: float
    most: float
    hours: float
    usd: float | None
    note: str


@dataclass(frozen=True)
class Talks:
    """All figures of the talks. `str` prints the tables."""

    host: Host
    epochs: tuple[Epochs, ...]
    rows: tuple[Checked, ...]
    detectors: tuple[Speed, ...]
    durations: tuple[Duration, ...]

    def __str__(self) -> str:
        from meshlib.validation.talks_report import report

        return report(self)


def talks() -> Talks:
    """Predict the figures of the talks; takes about two minutes."""
    host = talk_host()
    mlperf = [row for row in ROWS if row.get("kind") != "talk" and is_of_images(row)]
    checked = [c for c in map(check_row, mlperf) if c.images is not None]
    rows = (replace(c, predicted_seconds=prepare_images(c.images).seconds(CALIBRATED)) for c in checked if c.images)
    return Talks(host, epochs(), tuple(rows), detectors(SIZES, host), durations())


def talk_host() -> Host:
    """The host fitted to the whole table of epochs."""
    host = fitted_host(table_of(next(row for row in ROWS if includes_input(row))))
    assert host is not None
    return host


def epochs(rows: Sequence[Any] | None = None) -> tuple[Epochs, ...]:
    """The table of epochs by devices and batch; of the given rows, or of all."""
    predictions = []
    for row in ROWS if rows is None else rows:
        if not includes_input(row) or not is_of_images(row) or not resnet_name(str(row["model"].get("name"))):
            continue
        try:
            run = image_run_of(row)
        except NotExpressed:  # a batch that grows during training
            continue
        prepared = prepare_images(run)
        seconds = prepared.seconds(CALIBRATED)
        price = run.slice.usd_per_hour
        predictions.append(
            Epochs(
                run.slice.chips // 4, run.batch, run.measured_seconds / 60, seconds / 60,
                prepared.step.with_physics(CALIBRATED).step_seconds, prepared.step_seconds(CALIBRATED),
                None if price is None else price * seconds / 3600,
            )
        )  # fmt: skip
    return tuple(sorted(predictions, key=lambda e: (e.devices, e.batch)))


def detectors(sizes: Sequence[int], host: Host) -> tuple[Speed, ...]:
    """RetinaNet on v2-8 and v3-8, one host each, by the size of images."""
    rate = HostInput(examples_per_second=host.examples_per_second * IMAGENET_PIXELS / DETECTION_PIXELS)
    speeds = []
    for size in sizes:
        alone, fed = [], []
        for name in ("v2-8", "v3-8"):
            alone.append(BOARD_IMAGES / _detector(size, name, None).step_seconds)
            fed.append(BOARD_IMAGES / _detector(size, name, rate).step_seconds)
        speeds.append(Speed(size, (alone[0], alone[1]), (fed[0], fed[1])))
    return tuple(speeds)


def durations() -> tuple[Duration, ...]:
    """RetinaNet and BigGAN on slices."""
    by_name = {row["id"]: row for row in ROWS}
    return (
        *(_detection_time(by_name[name], by_name["talk-retinanet-v3-128"]) for name in _DETECTION),
        _gan_time(by_name["talk-biggan-v3-512"]),
    )


_DETECTION = ("talk-retinanet-v3-128", "talk-retinanet-v2-32")


def _detection_time(row: Any, steps_of: Any) -> Duration:
    name, size = f"{row['chip']}-{row['n_cores']}", row["model"]["image"]
    est = _detector(size, name, None)
    images = steps_of["derived"]["steps"] * BOARD_IMAGES * steps_of["n_cores"] // 8
    hours = est.step_seconds * images / (BOARD_IMAGES * row["n_cores"] // 8) / 3600
    stated = float(re.findall(r"[\d.]+", str(row["measured"]["total_minutes"]))[0]) / 60
    passes = images / steps_of["derived"]["images_in_set"]
    note = f"{BOARD_IMAGES} images for 8 cores; {images / 1e6:.1f} M images of {size}, {passes:.0f} times the set"
    return Duration("RetinaNet-50", name, stated, stated, hours, _usd(est.slice, hours), note)


def _gan_time(row: Any) -> Duration:
    name, side = f"{row['chip']}-{row['n_cores']}", row["model"]["image"]
    config = BigGANConfig(side=side, z=128)
    batch, steps = row["batch"]["global_examples"], row["derived"]["steps"]
    slice_ = Slice(name)
    seconds = sum(_gan(config, batch, slice_, both).step_seconds for both in (True, False))
    hours = steps * seconds / 3600
    least, most = row["measured"]["hours"]
    note = f"{steps:,} steps of batch {batch:,}, two of the discriminator for one of the generator, images of {side}"
    return Duration("BigGAN", name, least, most, hours, _usd(slice_, hours), note)


def _usd(slice_: Slice, hours: float) -> float | None:
    return None if slice_.usd_per_hour is None else slice_.usd_per_hour * hours


def _detector(size: int, name: str, given: HostInput | None) -> Estimate:
    slice_ = Slice(name)
    program = _detection_program(size, slice_.devices)
    return estimate(program, slice_, input=given)


@lru_cache(maxsize=8)
def _detection_program(size: int, devices: int) -> Any:
    config = RetinaNetConfig(backbone=ResNetConfig(height=size, width=size))
    with Graph():
        outputs, updates = detection_step(config, BOARD_IMAGES * devices // 8, MomentumOptimizer(0.1))
        return lower(outputs, updates, f"data:{devices}", "batch:data")


def _gan(config: BigGANConfig, batch: int, slice_: Slice, both: bool) -> Estimate:
    with Graph():
        generator = AdamWOptimizer(5e-5, beta_1=0.0) if both else None
        outputs, updates = gan_step(config, batch, generator, AdamWOptimizer(2e-4, beta_1=0.0))
        program = lower(outputs, updates, f"data:{slice_.devices}", "batch:data")
    return estimate(program, slice_)
