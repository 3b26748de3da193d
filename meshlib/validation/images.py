"""Published ResNet training runs as plain data: network, machine, batch and work, from the fields of their rows.

Missing fields are filled in by common practice, and reported in `assumed`: batch norm statistics over at least
`NORM_IMAGES` images, of one core or of as many neighbours as needed; an unknown batch is that of the same network on
the same machine in another row; evaluation uses the training batch.

Where a row has the time of its evaluation, the time beyond its images is the start of a loop on the devices (loading
the program, filling the input pipeline). The time of such a row includes one start of training as well.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hardware.chips import Chip, get_chip
from hardware.slices import Slice
from layouts import Dimension
from meshlib.core.text import counted
from meshlib.models.images.presets import IMAGE_PRESETS
from meshlib.models.images.resnet import ResNetConfig
from meshlib.validation.hosts import Host, host_of
from meshlib.validation.machine import slice_of, stated_sizes
from meshlib.validation.policies import NotExpressed
from meshlib.validation.runs import ROWS

Row = Mapping[str, Any]

# distributed_group_size in run_and_time.sh of mlcommons/training_results v0.6 to v1.1, Google: 8 cores of 8 images, 4
# of 16, 1 of 64 or 128.
NORM_IMAGES = 64
IMAGENET = 1_281_167  # training images: Russakovsky et al., arXiv:1409.0575
_BATCHES = ("global_examples", "global_batch_size", "global_images", "images")
REPLICAS = "replicas"


@dataclass(frozen=True)
class ImageRun:
    """A published training run of a residual network.

    Attributes:
      name, family, chip: what tables group by.
      config: the network; batch: images of a step, padding for all devices included.
      slice: where it ran; norm_cores: devices that share statistics of a batch norm.
      optimizer: "lars" or "momentum".
      steps, evaluated: training steps and evaluated images in the measured time; measured_seconds: of both.
      evaluation_seconds: seconds of one evaluation; 0 if the row does not give it.
      host: host work per step, if the measured time includes it.
      apart: why the row does not measure the model, or ""; assumed: assumptions on what the row left open.
    """

    name: str
    family: str
    chip: str
    config: ResNetConfig
    batch: int
    slice: Slice
    norm_cores: int
    optimizer: str
    steps: int
    evaluated: int
    measured_seconds: float
    evaluation_seconds: float = 0.0
    host: Host | None = None
    apart: str = ""
    assumed: tuple[str, ...] = ()

    @property
    def dims(self) -> tuple[Dimension, Dimension]:
        """Dims of the examples: groups with statistics of their own, and images in each."""
        groups = self.slice.devices // self.norm_cores
        return Dimension(REPLICAS, groups), Dimension("batch", self.batch // groups)


def is_of_images(row: Row) -> bool:
    """True if a row is a run of an image network."""
    model = row.get("model")
    if not isinstance(model, Mapping) or model.get("op"):
        return False
    return "cnn" in str(model.get("arch", "")).lower() or "image" in model or "patch" in model


def image_run_of(row: Row) -> ImageRun:
    """The ResNet training run that a row describes.

    Raises: NotExpressed, with the reason, for other networks and for what the row leaves open.
    """
    model = row["model"]
    config = _config(model, str(row.get("precision", "")))
    chip = get_chip(str(row["chip"]))
    slice_, assumed = slice_of(row, chip)
    _data_parallel(row, slice_)
    batch, of_batch = _batch(row, chip)
    steps, evaluated, seconds, notes = _measured(row, batch, slice_)
    padded = -(-batch // slice_.devices) * slice_.devices
    left = () if padded == batch else (f"{counted(batch, 'image')} padded to {padded}",)
    each = padded // slice_.devices
    cores = min(slice_.devices, 2 ** math.ceil(math.log2(max(1, NORM_IMAGES / each))))
    while slice_.devices % cores:
        cores //= 2
    shared = (f"batch norm of {cores} devices with {counted(each, 'image')} each",) if cores > 1 else ()
    host, why, apart = host_of(row)
    return ImageRun(
        name=str(row.get("id", "?")),
        family=f"{row.get('kind') or row.get('family') or 'run'} images",
        chip=chip.name,
        config=config,
        batch=padded,
        slice=slice_,
        norm_cores=cores,
        optimizer="lars" if "lars" in str(row.get("optimizer", "")).lower() else "momentum",
        steps=steps,
        evaluated=evaluated,
        measured_seconds=seconds,
        evaluation_seconds=float((row.get("measured") or {}).get("eval_seconds") or 0.0),
        host=host,
        apart=apart or ("the row itself is marked as of little use" if _is_poor(row) else ""),
        assumed=(*of_batch, *assumed, *left, *notes, *shared, *why),
    )


def resnet_name(text: str) -> str:
    """The preset that a name refers to; "" if none.

    >>> resnet_name("ResNet-50 v1.5"), resnet_name("ResNet-50-v2 (pre-activation)"), resnet_name("resnet_101 v1")
    ('resnet-50', 'resnet-50-v2', 'resnet-101-v1')
    >>> resnet_name("UNet3D"), resnet_name("RetinaNet, ResNet-50 FPN"), resnet_name("ResNet-7")
    ('', '', '')
    """
    match = re.match(r"resnet[- _]?(\d+)(?:[- _,]*v\s?(1\.5|1|2)(?![\d.]))?", text.strip().lower())
    if match is None:
        return ""
    name = f"resnet-{match[1]}" + (f"-v{match[2]}" if match[2] in ("1", "2") else "")
    return name if name in IMAGE_PRESETS else ""


def _config(model: Mapping[str, Any], precision: str) -> ResNetConfig:
    name = str(model.get("name") or "")
    known = resnet_name(name)
    if not known:
        if any(network in name.lower() for network in ("retinanet", "biggan")):
            raise NotExpressed("it states no seconds of a step; `meshlib validate --talks` compares its whole duration")
        raise NotExpressed(f"the library has no model such as {name[:40]!r}")
    config = IMAGE_PRESETS[known]
    assert isinstance(config, ResNetConfig)
    size = model.get("image") or config.height
    if isinstance(size, bool) or not float(size).is_integer() or size < 32:
        raise NotExpressed(f"its images are {size!r} wide, which is not a whole number of at least 32")
    wide = "float32" in precision or ("fp32" in precision and "bf16" not in precision)
    if "int8" in precision or "fp8" in precision:
        raise NotExpressed(f"convolutions have no rows in eight bits, and its precision is {precision!r}")
    numerics = config.numerics if not wide else type(config.numerics)("float32", "float32", "float32")
    return config.replace(height=int(size), width=int(size), numerics=numerics)


def _data_parallel(row: Row, slice_: Slice) -> None:
    sizes = {axis: n for axis, n in stated_sizes(row.get("layout")).items() if n != 1}
    other = [axis for axis in sizes if axis not in ("data", "ici_data", "dcn_data", "batch")]
    if other:
        raise NotExpressed(f"axis '{other[0]}' of its layout is not expressed for networks of images yet")
    if sizes and math.prod(sizes.values()) != slice_.devices:
        raise NotExpressed(f"its layout {sizes} does not make {slice_.devices} devices")


def _batch(row: Row, chip: Chip) -> tuple[int, tuple[str, ...]]:
    stated = _stated_batch(row, chip)
    if stated:
        return stated, ()
    if (row.get("batch") or {}).get("grows"):
        raise NotExpressed("its batch grows, and when is not stated")
    default = re.search(r"default ([\d,]*\d)", str(row.get("note", "")))
    if default:
        return int(default[1].replace(",", "")), (f"batch of {default[1]}, the default that the row notes",)
    for other in ROWS:
        same = all(other.get(k) == row.get(k) for k in ("chip", "n_chips")) and is_of_images(other)
        if same and resnet_name(str(other["model"].get("name"))) == resnet_name(str(row["model"].get("name"))):
            stated = _stated_batch(other, chip)
            if stated:
                return stated, (f"batch of {stated:,} as in {other['id']}",)
    raise NotExpressed("its batch is not stated")


def _stated_batch(row: Row, chip: Chip) -> int:
    batch = row.get("batch") or {}
    stated = next((batch[key] for key in _BATCHES if batch.get(key)), None)
    for key, parts in (("per_core", chip.cores_per_chip), ("per_chip", 1)):
        if not stated and batch.get(key) and row.get("n_chips"):
            stated = float(batch[key]) * parts * int(row["n_chips"])
    if stated is not None and (not float(stated).is_integer() or stated < 1):
        raise NotExpressed(f"its batch makes no whole number of images: {float(stated):g}")
    return int(stated or 0)


def _measured(row: Row, batch: int, slice_: Slice) -> tuple[int, int, float, tuple[str, ...]]:
    """(training steps, evaluated images, seconds of both, assumptions)."""
    given, derived = row.get("measured") or {}, row.get("derived") or {}
    block = next((float(given[k]) for k in ("block_s_median", "block_s_mean", "block_s") if given.get(k)), 0.0)
    if block:
        match = re.search(r"([\d,.]*\d) (?:training )?epochs? of ([\d,]*\d)", str(derived.get("block", "")))
        if match is None:
            raise NotExpressed("it gives the time of a block, and not what a block is")
        images = float(match[1].replace(",", "")) * int(match[2].replace(",", ""))
        evaluated = re.search(r"evaluations? of ([\d,]*\d)", str(derived["block"]))
        return math.ceil(images / batch), int(evaluated[1].replace(",", "")) if evaluated else 0, block, ()
    for key, value in given.items():
        epochs = re.fullmatch(r"(train_seconds_per|minutes|seconds|hours)_(\d+)_epochs?", key)
        if epochs and value:
            unit = {"minutes": 60.0, "hours": 3600.0}.get(epochs[1], 1.0)
            images = int(epochs[2]) * IMAGENET
            return math.ceil(images / batch), 0, float(value) * unit, (f"epochs of {IMAGENET:,} images",)
    for where in (given, derived):
        for key, work in (("images_per_s", batch), ("images_per_s_per_chip", batch / slice_.chips)):
            if where.get(key):
                return 1, 0, work / float(where[key]), ()
        for key, unit in (("step_time_s", 1.0), ("step_time_ms", 1e-3)):
            if where.get(key):
                return 1, 0, float(where[key]) * unit, ()
    raise NotExpressed("it gives no time of steps, and no rate from which one follows")


def _is_poor(row: Row) -> bool:
    return str(row.get("usability", "A")).startswith("C")
