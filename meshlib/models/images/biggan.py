"""BigGAN: a class-conditional generator of images, and a discriminator of real and generated ones."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import pairwise
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from layouts import Dimension
from meshlib import layers
from meshlib.core import initializers
from meshlib.core.arguments import at, number, whole
from meshlib.core.errors import GraphError
from meshlib.core.graph import Operation, Tensor, find_dim, scope
from meshlib.layers.norms import widened
from meshlib.layers.numerics import MIXED, Numerics
from meshlib.layers.set_norms import Groups
from meshlib.models.config_parts import Config
from meshlib.models.images.tower import BATCH, CHANNELS, COLOURS, HEIGHT, WIDTH, Tower, image_dims, spatial
from meshlib.ops.control.sources import input as given
from meshlib.ops.images.pooling import pool
from meshlib.ops.movement.indexing import gather
from meshlib.ops.movement.rearrange import repeat
from meshlib.ops.movement.runs import concat, split
from meshlib.ops.movement.shape import rename_dimension, stack, unstack
from meshlib.ops.pointwise.arithmetic import floor, relu, tanh
from meshlib.ops.pointwise.casts import cast
from meshlib.ops.pointwise.random import random_normal, random_uniform
from meshlib.ops.pointwise.reductions import reduce_mean, reduce_sum
from meshlib.optimize.averages import moving_averages
from meshlib.optimize.base import Optimizer

SMALLEST = 4  # pixels along the sides of the first features
# Channels after the first features and after each block, over `features`, by the side of images: Brock et al., tables 4
# to 6; of 32 and less as the authors' later code has them.
WIDTHS: MappingProxyType[int, tuple[int, ...]] = MappingProxyType(
    {
        16: (4, 4, 4),
        32: (4, 4, 4, 4),
        64: (16, 16, 8, 4, 2),
        128: (16, 16, 8, 4, 2, 1),
        256: (16, 16, 8, 8, 4, 2, 1),
        512: (16, 16, 8, 8, 4, 2, 1, 1),
    }
)


@dataclass(frozen=True)
class BigGANConfig(Config):
    """Configuration of a BigGAN: residual blocks with spectral norm, conditional batch norm, attention, a projection
    discriminator.

    Args:
      side: height and width of images, one of `WIDTHS`: 16 to 512.
      channels, classes: channels and classes of images.
      features: base number of channels, of which all others are multiples.
      z: size of the noise, divided evenly among the first features and each block.
      shared: size of the class embedding shared by the generator's norms.
      attention: side of the features with self-attention; 0: none.
      groups, decay, epsilon: of the generator's batch norm.
      numerics: by default float32 variables and bfloat16 activations.
    Raises: GraphError with all faults at once.
    Source: Brock, Donahue, Simonyan, arXiv:1809.11096, appendix B.
    Example:
      >>> import meshlib as mtf
      >>> config = mtf.models.BigGANConfig()
      >>> config.generator_parameters, config.discriminator_parameters
      (70433988, 87982370)
    """

    name: str = "biggan-128"
    side: int = 128
    channels: int = 3
    classes: int = 1000
    features: int = 96
    z: int = 120
    shared: int = 128
    attention: int = 64
    groups: Groups = 1
    decay: float = 0.9
    epsilon: float = 1e-4
    numerics: Numerics = MIXED

    def __post_init__(self) -> None:
        what = "BigGANConfig"
        faults = (
            [f"side={self.side}, which is none of {', '.join(map(str, WIDTHS))}"] if self.side not in WIDTHS else []
        )
        faults += self.not_positive("channels", "classes", "features", "z", "shared")
        parts = len(WIDTHS.get(self.side, (1,)))
        if not faults and self.z % parts:
            faults.append(f"z={self.z}, which its {parts} parts do not divide: {self.z} % {parts} = {self.z % parts}")
        sides = [SMALLEST * 2**n for n in range(1, parts)]
        if whole(self.attention, what, "attention") not in (0, *sides):
            faults.append(
                f"attention={self.attention}, which is not a side of features: {', '.join(map(str, sides))}, or 0"
            )
        if faults:
            raise GraphError(f"{at(what)}: {'; '.join(faults)}")

    @property
    def height(self) -> int:
        """Height of images."""
        return self.side

    @property
    def width(self) -> int:
        """Width of images."""
        return self.side

    @property
    def spatial_split(self) -> int:
        """Largest number of shards of height and width."""
        return SMALLEST

    @property
    def split_dims(self) -> dict[str, int]:
        """The dims that the layout "channels" splits, with their largest numbers of shards."""
        return {CHANNELS: self.features}

    @property
    def widths(self) -> list[int]:
        """Channels of the generator's features, from the smallest to the largest."""
        return [m * self.features for m in WIDTHS[self.side]]

    @property
    def discriminated(self) -> list[tuple[int, int, bool]]:
        """(input channels, output channels, True if it downsamples) of each block of the discriminator."""
        widths = [*self.widths[:0:-1], self.widths[0]]
        if len(set(widths)) == 1:  # small images: two downsampling blocks, two others (Miyato et al. 2018, table 4)
            halves = [n < 2 for n in range(len(widths))]
        else:
            halves = [n < len(widths) - 1 for n in range(len(widths))]
        return list(zip([self.channels, *widths], widths, halves, strict=False))

    @property
    def generator_parameters(self) -> int:
        """Trained parameters of the generator, including the class embedding."""
        w, part = self.widths, self.z // len(self.widths)
        condition = self.shared + part
        total = self.classes * self.shared + (part + 1) * w[0] * SMALLEST**2
        for n, (a, b) in enumerate(pairwise(w), start=1):
            total += 2 * condition * (a + b) + 9 * b * (a + b) + 2 * b + (a + 1) * b
            total += _attention(b) if SMALLEST * 2**n == self.attention else 0
        return total + 2 * w[-1] + (9 * w[-1] + 1) * self.channels

    @property
    def discriminator_parameters(self) -> int:
        """Trained parameters of the discriminator."""
        total, side = 0, self.side
        for a, b, halves in self.discriminated:
            side //= 2 if halves else 1
            total += 9 * b * (a + b) + 2 * b + ((a + 1) * b if halves or a != b else 0)
            total += _attention(b) if side == self.attention and halves else 0
        last = self.discriminated[-1][1]
        return total + last + 1 + self.classes * last

    def noise(self, count: int, truncation: float | None = None, seed: int = 0) -> NDArray[np.float32]:
        """Normal numbers [count, z]; with `truncation`, numbers further from 0 are drawn again.

        Smaller values give more typical but less varied images: Brock et al., section 3.1.
        Raises: GraphError for a truncation that is not positive.
        """
        limit = math.inf if truncation is None else number(truncation, "noise", "truncation")
        if limit <= 0:
            raise GraphError(f"{at('noise')}: truncation must be positive, got {truncation}")
        rng = np.random.default_rng(seed)
        values = rng.normal(size=(whole(count, "noise", "count"), self.z))
        while (far := np.abs(values) > limit).any():
            values[far] = rng.normal(size=int(far.sum()))
        return values.astype(np.float32)


def _attention(channels: int) -> int:
    key, value = max(channels // 8, 1), max(channels // 2, 1)
    return 2 * channels * key + 2 * channels * value + 1


# ---------------------------------------------------------------- networks


def _tower(config: BigGANConfig, is_training: bool) -> Tower:
    return Tower(is_training, config.numerics, config.groups, config.decay, config.epsilon, spectral=True)


def generator(config: BigGANConfig, z: Tensor, labels: Tensor, is_training: bool) -> tuple[Tensor, list[Operation]]:
    """Images in -1..1 from noise and classes, and the updates of moving averages and spectral norms.

    Args:
      config: the model.
      z: [batch, z], normal. labels: int32 [batch].
      is_training: whether norms take statistics of the batch and there are updates.
    Returns: [batch, height, width, image_channels] in float32.
    Raises: GraphError for operands without these dims.
    Example:
      >>> import meshlib as mtf
      >>> config = mtf.models.BigGANConfig("tiny", side=16, classes=3, features=4, z=9, shared=4, attention=0)
      >>> with mtf.Graph():
      ...     z, labels = mtf.input("z", "batch:2;z:9"), mtf.input("labels", "batch:2", "int32")
      ...     images, updates = mtf.models.generator(config, z, labels, is_training=False)
      >>> print(images.shape, updates)
      [batch:2, height:16, width:16, image_channels:3] []
    """
    what = "generator"
    noise = find_dim(z, Dimension("z", config.z), what)
    tower, widths = _tower(config, is_training), config.widths
    with scope(what):
        shared = Dimension("shared", config.shared)
        classes = Dimension("classes", config.classes)
        table = config.numerics.variable("classes", [classes, shared], initializers.random_normal(0.0, 1.0))
        embedded = tower.numerics.cast(gather(table, labels, classes))
        parts = split(tower.numerics.cast(z), noise, len(widths))
        first = [Dimension(HEIGHT, SMALLEST), Dimension(WIDTH, SMALLEST), Dimension(CHANNELS, widths[0])]
        x = tower.dense(parts[0], first, name="first")
        for n, channels in enumerate(widths[1:], start=1):
            condition = concat([rename_dimension(embedded, "shared", "condition"),
                                rename_dimension(parts[n], "z", "condition")], "condition")  # fmt: skip
            with scope(f"block{n}"):
                x = _upsampling_block(tower, x, channels, condition)
                x = tower.attention(x) if SMALLEST * 2**n == config.attention else x
        y = tower.conv(tower.active(x), config.channels, use_bias=True, name="last")
        return tanh(widened(rename_dimension(y, CHANNELS, COLOURS))), tower.updates


def _upsampling_block(tower: Tower, x: Tensor, channels: int, condition: Tensor) -> Tensor:
    """A residual block that doubles height and width."""
    y = _doubled(relu(tower.conditional_norm(x, condition, "norm1")))
    y = relu(tower.conditional_norm(tower.conv(y, channels, use_bias=True, name="conv1"), condition, "norm2"))
    shortcut = tower.conv(x, channels, 1, use_bias=True, name="shortcut")
    return tower.conv(y, channels, use_bias=True, name="conv2") + _doubled(shortcut)


def _doubled(x: Tensor) -> Tensor:
    names = {"height 2": HEIGHT, "width 2": WIDTH}
    return repeat(x, "... height width channels -> ... (height 2) (width 2) channels", names=names)


def discriminator(
    config: BigGANConfig, images: Tensor, labels: Tensor, is_training: bool
) -> tuple[Tensor, list[Operation]]:
    """Logits of images being real, given their classes, and the updates of spectral norms.

    Args:
      config: the model.
      images: [..., batch, height, width, image_channels] in -1..1.
      labels: int32, the dims of images before height.
      is_training: whether there are updates.
    Returns: the dims of labels, float32: positive for images that look real.
    Raises: GraphError for operands without these dims.
    Example:
      >>> import meshlib as mtf
      >>> config = mtf.models.BigGANConfig("tiny", side=16, classes=3, features=4, z=9, shared=4, attention=0)
      >>> with mtf.Graph():
      ...     images = mtf.input("images", "batch:2;height:16;width:16;image_channels:3")
      ...     logits, _ = mtf.models.discriminator(config, images, mtf.input("labels", "batch:2", "int32"), False)
      >>> logits.shape
      Shape('batch:2')
    """
    for d in image_dims(config):
        find_dim(images, d, "discriminator")
    tower, side = _tower(config, is_training), config.side
    with scope("discriminator"):
        x = tower.numerics.cast(images)
        for n, (_, channels, halves) in enumerate(config.discriminated, start=1):
            side //= 2 if halves else 1
            with scope(f"block{n}"):
                x = _downsampling_block(tower, x, channels, halves, begins=n == 1)
                x = tower.attention(x) if side == config.attention and halves else x
        x = relu(x)
        summed = reduce_sum(widened(x), reduced_dim=spatial(x))
        wide = replace(tower, numerics=config.numerics.wide(summed))
        depth = summed.shape.dim(CHANNELS)
        plain = wide.dense(summed, [Dimension("logit", 1)], name="last")
        classes = Dimension("classes", config.classes)
        with scope("projection"):
            table = wide.numerics.variable("classes", [classes, depth], initializers.glorot_uniform())
            table = wide.normed_kernel(table)
        by_class = reduce_sum(gather(table, labels, classes) * summed, reduced_dim=depth)
        return reduce_sum(plain, reduced_dim=Dimension("logit", 1)) + by_class, tower.updates


def _downsampling_block(tower: Tower, x: Tensor, channels: int, halves: bool, begins: bool) -> Tensor:
    """A residual block, which halves height and width if `halves`; the first takes the image without ReLU."""
    y = tower.conv(x if begins else relu(x), channels, use_bias=True, name="conv1")
    y = tower.conv(relu(y), channels, use_bias=True, name="conv2")
    if halves or x.shape[-1].size != channels:
        x = tower.conv(x, channels, 1, use_bias=True, name="shortcut")
    total = y + x
    return pool(total, {d.name: 2 for d in spatial(total)}, "avg") if halves else total


# ---------------------------------------------------------------- training


def gan_step(
    config: BigGANConfig,
    batch: int,
    generator_optimizer: Optimizer | None,
    discriminator_optimizer: Optimizer,
    average: float | None = 0.9999,
    average_from: int = 0,
) -> tuple[dict[str, Tensor], list[Operation]]:
    """The outputs and updates of one training step of generator and discriminator; call it inside a graph.

    Its inputs are images, float32 [batch, height, width, image_channels] in -1..1, and labels, int32 [batch]; noise and
    classes of generated images are drawn in the program. Both updates use the old weights of both networks.

    Args:
      config: the model.
      batch: number of real images of one step, and of generated ones, over all cores.
      generator_optimizer: None: only the discriminator learns (the paper has two such steps for each of the generator).
      discriminator_optimizer: Adam with beta_1 = 0 in the paper, at 2e-4, and 5e-5 for the generator.
      average: decay of moving averages of the generator's weights, see `mtf.optimize.moving_averages`; None: none.
      average_from: the step from which they are averaged.
    Returns: the outputs "generator_loss", "discriminator_loss", and mean logits "real" and "made"; the updates.
    Raises: GraphError for an invalid batch or optimizer.
    Example:
      >>> import meshlib as mtf
      >>> config = mtf.models.BigGANConfig("tiny", side=16, classes=3, features=4, z=9, shared=4, attention=0)
      >>> with mtf.Graph():
      ...     adam = mtf.optimize.AdamOptimizer(2e-4, beta_1=0.0)
      ...     outputs, updates = mtf.models.gan_step(config, 4, adam, adam, average=None)
      >>> sorted(outputs)
      ['discriminator_loss', 'generator_loss', 'made', 'real']

    Source: hinge losses: Lim and Ye, arXiv:1705.02894.
    """
    what = "gan_step"
    BigGANConfig.checked(config, what)
    batch = whole(batch, what, "batch", low=1)
    for one in (generator_optimizer, discriminator_optimizer):
        if not (isinstance(one, Optimizer) or (one is None and one is generator_optimizer)):
            raise GraphError(f"{at(what)}: both optimizers must be of mtf.optimize, got {one!r:.80}")
    examples, pair = Dimension(BATCH, batch), "pair"
    images, labels = given("images", [examples, *image_dims(config)]), given("labels", [examples], "int32")
    z = random_normal([examples, Dimension("z", config.z)], name="noise")
    drawn = cast(floor(random_uniform([examples], 0.0, float(config.classes), name="drawn_classes")), "int32")
    fakes, updates = generator(config, z, drawn, True)
    # Stacked along a new dim instead of concatenated: each core keeps its own examples.
    both = stack([cast(images, fakes.dtype), fakes], pair)
    logits, judged = discriminator(config, both, stack([labels, drawn], pair), True)
    real, fake = unstack(logits, logits.shape.dim(pair))
    judge = reduce_mean(layers.hinge_loss(real, 1.0)) + reduce_mean(layers.hinge_loss(fake, -1.0))
    fool = -reduce_mean(fake)
    variables = images.graph.trainable_variables
    mine = [v for v in variables if v.name.startswith("generator/")]
    theirs = [v for v in variables if v.name.startswith("discriminator/")]
    done = discriminator_optimizer.minimize(judge, theirs) + judged
    if generator_optimizer is not None:
        learnt = generator_optimizer.minimize(fool, mine)
        done += learnt + updates
        done += moving_averages(learnt, average, average_from) if average is not None else []
    outputs = {
        "generator_loss": fool,
        "discriminator_loss": judge,
        "real": reduce_mean(real),
        "made": reduce_mean(fake),
    }
    return outputs, done


def gan_samples(config: BigGANConfig, count: int) -> dict[str, Tensor]:
    """The outputs of a program that generates images; call it inside a separate graph.

    Its inputs are z, float32 [count, z] (`config.noise`), and labels, int32 [count]. Returns: "images" in -1..1.
    Raises: GraphError for an invalid count.
    Example:
      >>> import meshlib as mtf
      >>> config = mtf.models.BigGANConfig("tiny", side=16, classes=3, features=4, z=9, shared=4, attention=0)
      >>> with mtf.Graph():
      ...     program = mtf.lower(mtf.models.gan_samples(config, 4), mesh="data:2", layout="batch:data")
      >>> sim = mtf.simulate(program)
      >>> sim.step(z=config.noise(4), labels=[0, 1, 2, 0])["images"].shape
      (4, 16, 16, 3)
    """
    examples = Dimension(BATCH, whole(count, "gan_samples", "count", low=1))
    z, labels = given("z", [examples, Dimension("z", config.z)]), given("labels", [examples], "int32")
    return {"images": generator(config, z, labels, False)[0]}
