"""U-Net: an encoder and a decoder of convolutions with skip connections; per-pixel classification."""

from __future__ import annotations

from dataclasses import dataclass

from layouts import Dimension
from meshlib import layers
from meshlib.core.arguments import at
from meshlib.core.errors import GraphError
from meshlib.core.graph import Operation, Tensor, scope
from meshlib.layers.numerics import MIXED, Numerics
from meshlib.layers.set_norms import Groups
from meshlib.models.config_parts import Config
from meshlib.models.images.tower import CHANNELS, Tower, check_images, spatial
from meshlib.ops.images.pooling import pool
from meshlib.ops.movement.rearrange import repeat
from meshlib.ops.movement.runs import concat


@dataclass(frozen=True)
class UNetConfig(Config):
    """Configuration of a U-Net: `levels` resolutions with two convolutions each on the way down and up, with skip
    connections.

    Args:
      levels: number of halvings of height and width; 2^levels must divide them.
      features: channels of the first level, doubled at each further one.
      classes, height, width, channels: of the logits of each pixel, and of images.
      groups: of batch norm.
      numerics: by default float32 variables and bfloat16 activations.
    Upsampling is nearest-neighbour repetition followed by a convolution with SAME padding, so that logits have the size
      of images (Odena et al., "Deconvolution and checkerboard artifacts", 2016).
    Raises: GraphError with all faults at once.
    Source: Ronneberger et al., arXiv:1505.04597.
    Example:
      >>> import meshlib as mtf
      >>> mtf.models.UNetConfig(levels=2, features=8, height=32, width=32).parameters
      32858
    """

    name: str = "u-net"
    levels: int = 4
    features: int = 64
    classes: int = 2
    height: int = 256
    width: int = 256
    channels: int = 3
    groups: Groups = 1
    numerics: Numerics = MIXED

    def __post_init__(self) -> None:
        what = "UNetConfig"
        faults = self.not_positive("levels", "features", "classes", "height", "width", "channels")
        if faults:
            raise GraphError(f"{at(what)}: sizes must be positive, got {', '.join(faults)}")
        shrunk = 2**self.levels
        for n in ("height", "width"):
            if getattr(self, n) % shrunk:
                faults.append(f"{n}: {getattr(self, n)} % {shrunk} = {getattr(self, n) % shrunk}")
        if faults:
            raise GraphError(f"{at(what)}: 2^levels = {shrunk} must divide height and width: {'; '.join(faults)}")

    @property
    def split_dims(self) -> dict[str, int]:
        """The dims that the layout "channels" splits, with their largest numbers of shards."""
        return {CHANNELS: self.features}

    @property
    def spatial_split(self) -> int:
        """Largest number of shards of height and width: the size of the smallest features."""
        smallest = (self.height >> self.levels, self.width >> self.levels)
        return next(n for n in range(min(smallest), 0, -1) if not any(side % n for side in smallest))

    @property
    def parameters(self) -> int:
        """Trained parameters: kernels, two per channel of a norm, and the head with its bias."""
        f, total, given = self.features, 0, self.channels
        for level in range(self.levels + 1):
            features_out = f << level
            total += 9 * (given * features_out + features_out * features_out) + 4 * features_out
            given = features_out
        for level in reversed(range(self.levels)):
            features_out = f << level
            total += 9 * (2 * features_out * features_out) + 2 * features_out  # the convolution after upsampling
            total += 9 * (2 * features_out * features_out + features_out * features_out) + 4 * features_out
        return total + (f + 1) * self.classes


def unet(config: UNetConfig, images: Tensor, is_training: bool) -> tuple[Tensor, list[Operation]]:
    """The logits of a U-Net per pixel, and the updates of moving averages.

    Args:
      config: the model.
      images: [batch, height, width, image_channels] with the config's sizes, float.
      is_training: whether batch norm uses statistics of the batch and returns updates.
    Returns: [batch, height, width, classes] in float32.
    Raises: GraphError for images with other dims.
    Example:
      >>> import meshlib as mtf
      >>> config = mtf.models.UNetConfig(levels=2, features=8, height=32, width=32)
      >>> with mtf.Graph():
      ...     images = mtf.input("images", f"batch:2;height:32;width:32;image_channels:{config.channels}")
      ...     logits, updates = mtf.models.unet(config, images, is_training=False)
      >>> print(logits.shape)
      [batch:2, height:32, width:32, classes:2]
    """
    check_images(config, images, "unet")
    tower = Tower(is_training, config.numerics, config.groups)

    def twice(x: Tensor, channels: int) -> Tensor:
        for n in (1, 2):
            x = tower.active(tower.conv(x, channels, name=f"conv{n}"), f"norm{n}")
        return x

    x, past = tower.numerics.cast(images), []
    for level in range(config.levels + 1):
        with scope(f"down{level}"):
            x = twice(x, config.features << level)
        if level < config.levels:
            past.append(x)
            x = pool(x, {d.name: 2 for d in spatial(x)})
    for level in reversed(range(config.levels)):
        channels = config.features << level
        with scope(f"up{level}"):
            names = {"height 2": "height", "width 2": "width"}
            x = repeat(x, "batch height width channels -> batch (height 2) (width 2) channels", names=names)
            x = tower.active(tower.conv(x, channels, name="grown"), "grown_norm")
            x = twice(concat([past[level], x], CHANNELS), channels)
    classes = Dimension("classes", config.classes)
    return layers.conv(x, classes, 1, numerics=config.numerics.wide(x), name="head"), tower.updates
