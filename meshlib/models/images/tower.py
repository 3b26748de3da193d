"""Shared layers of image models, which know the dims and collect moving averages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from layouts import Dimension
from meshlib import layers
from meshlib.core.arguments import at
from meshlib.core.errors import GraphError
from meshlib.core.graph import Operation, Tensor, find_dim
from meshlib.core.initializers import Initializer
from meshlib.layers.numerics import MIXED, Numerics
from meshlib.layers.projection import projection
from meshlib.layers.set_norms import Groups
from meshlib.ops.building import floats
from meshlib.ops.movement.shape import rename_dimension
from meshlib.ops.pointwise.arithmetic import relu

BATCH, HEIGHT, WIDTH, CHANNELS = "batch", "height", "width", "channels"
COLOURS = "image_channels"  # named differently, so that a rule for channels does not split the three of an image
LATE = "late_"


@dataclass
class Tower:
    """The layers of one model in one graph.

    Args:
      is_training: whether batch norm uses statistics of the batch, with moving averages in `updates`.
      numerics: of all layers.
      groups, decay, epsilon: of batch norm.
      spectral: whether kernels have spectral norm, whose vectors are in `updates` too.
    """

    is_training: bool
    numerics: Numerics = MIXED
    groups: Groups = 1
    decay: float = 0.9
    epsilon: float = 1e-5
    spectral: bool = False
    updates: list[Operation] = field(default_factory=list)

    def conv(
        self,
        x: Tensor,
        channels: int,
        size: int = 3,
        stride: int = 1,
        use_bias: bool = False,
        initializer: Initializer | None = None,
        name: str = "conv",
    ) -> Tensor:
        """A convolution over height and width that divides the size by the stride."""
        places = spatial(x)
        padding: str | Sequence[int] = "SAME" if stride == 1 else [(size - 1) // 2] * len(places)
        return layers.conv(
            x,
            Dimension(CHANNELS, channels),
            size,
            stride,
            padding,
            use_bias=use_bias,
            spatial=places,
            kernel_initializer=initializer,
            kernel_transform=self.normed_kernel if self.spectral else None,
            numerics=self.numerics,
            name=name,
        )

    def dense(self, x: Tensor, dims: Sequence[Dimension], name: str) -> Tensor:
        """A dense layer over the last dim, with bias."""
        transform = self.normed_kernel if self.spectral else None
        return projection(x, dims, None, True, None, self.numerics, name, name, transform)

    def attention(self, x: Tensor) -> Tensor:
        """Features plus attention over all positions: see `image_attention`."""
        transform = self.normed_kernel if self.spectral else None
        places, channels = spatial(x), x.shape.dim(CHANNELS)
        return layers.image_attention(x, places, channels, kernel_transform=transform, numerics=self.numerics)

    def normed_kernel(self, kernel: Tensor) -> Tensor:
        """A kernel with spectral norm."""
        columns = [d for d in kernel.shape.dims[1:] if d.name in (HEIGHT, WIDTH)] + [kernel.shape[-1]]
        y, updates = layers.spectral_norm(kernel, columns, self.is_training)
        self.updates += updates
        return y

    def conditional_norm(self, x: Tensor, condition: Tensor, name: str) -> Tensor:
        """Batch norm with scale and bias from a vector per example."""
        y, updates = layers.conditional_batch_norm(
            x,
            x.shape.dim(CHANNELS),
            condition,
            condition.shape[-1],
            self.is_training,
            self.groups,
            self.decay,
            self.epsilon,
            self.normed_kernel if self.spectral else None,
            self.numerics,
            name,
            use_fast_variance=True,  # as these models were trained
        )
        self.updates += updates
        return y

    def norm(self, x: Tensor, scale: float = 1.0, name: str = "norm") -> Tensor:
        """Batch norm over all dims except the channels; `scale` is the initial value of its factor."""
        y, updates = layers.batch_norm(
            x,
            x.shape.dim(CHANNELS),
            self.is_training,
            self.groups,
            self.decay,
            self.epsilon,
            scale_initializer=scale,
            numerics=self.numerics,
            name=name,
            use_fast_variance=True,  # as these models were trained
        )
        self.updates += updates
        return y

    def active(self, x: Tensor, name: str = "norm") -> Tensor:
        """Batch norm followed by ReLU."""
        return relu(self.norm(x, name=name))


class Images(Protocol):
    """The sizes of images in a config."""

    @property
    def height(self) -> int: ...
    @property
    def width(self) -> int: ...
    @property
    def channels(self) -> int: ...


def image_dims(config: Images) -> list[Dimension]:
    """Height, width and channels of a model's images."""
    return [Dimension(HEIGHT, config.height), Dimension(WIDTH, config.width), Dimension(COLOURS, config.channels)]


def check_images(config: Images, images: Tensor, what: str) -> None:
    """Raise GraphError unless the images are [..., batch, height, width, image_channels] with the config's sizes."""
    for d in image_dims(config):
        find_dim(floats(images, what), d, what)
    if images.shape.names[-4:] != (BATCH, HEIGHT, WIDTH, COLOURS):
        raise GraphError(f"{at(what)}: images must have the dims {BATCH}, {HEIGHT}, {WIDTH}, {COLOURS}, got {images}")


def spatial(x: Tensor) -> list[Dimension]:
    """The dims of height and width, also if named late_height and late_width."""
    return [d for d in x.shape if d.name.removeprefix(LATE) in (HEIGHT, WIDTH)]


def late(x: Tensor, rows: Sequence[int], split: int) -> Tensor:
    """`x` with its spatial dims named late_height, late_width unless `split` divides all of `rows`.

    Few rows can't be split over many cores: under these names, rules for height and width do not apply.
    """
    advice = "Give the model spatial_split={blocks} (on the command line --set spatial_split={blocks})"
    x.graph.around[-1].remedies.update({d.name: advice for d in spatial(x)})
    if all(n % split == 0 for n in rows):
        return x
    for d in spatial(x):
        x = x if d.name.startswith(LATE) else rename_dimension(x, d.name, LATE + d.name)
    return x
