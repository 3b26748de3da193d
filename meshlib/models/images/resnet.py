"""ResNet: residual networks of convolutions and batch norm, versions 1, 1.5 and 2."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType

from layouts import Dimension
from meshlib import layers
from meshlib.core.arguments import at, choice, number, whole
from meshlib.core.errors import GraphError
from meshlib.core.graph import Operation, Tensor, scope
from meshlib.layers.numerics import MIXED, Numerics
from meshlib.layers.set_norms import Groups
from meshlib.models.config_parts import Config
from meshlib.models.images.tower import CHANNELS, Tower, check_images, late, spatial
from meshlib.ops.images.pooling import max_pool
from meshlib.ops.pointwise.arithmetic import relu
from meshlib.ops.pointwise.reductions import reduce_mean

# Blocks of the four stages, and whether a block is a bottleneck: He et al., arXiv:1512.03385, table 1.
DEPTHS: MappingProxyType[int, tuple[tuple[int, ...], bool]] = MappingProxyType(
    {
        18: ((2, 2, 2, 2), False),
        34: ((3, 4, 6, 3), False),
        50: ((3, 4, 6, 3), True),
        101: ((3, 4, 23, 3), True),
        152: ((3, 8, 36, 3), True),
    }
)


@dataclass(frozen=True)
class ConvolutionSizes:
    """Window, input and output channels, stride, and output rows and columns of a convolution."""

    size: int
    given: int
    made: int
    stride: int
    places: tuple[int, int]

    @property
    def parameters(self) -> int:
        """Parameters of the kernel; there is no bias."""
        return self.size**2 * self.given * self.made

    @property
    def macs(self) -> int:
        """Multiply-adds per image."""
        return self.parameters * self.places[0] * self.places[1]


@dataclass(frozen=True)
class ResidualBlock:
    """The convolutions of a residual block, and the one on its shortcut, if any."""

    steps: tuple[ConvolutionSizes, ...]
    shortcut: ConvolutionSizes | None

    @property
    def convolutions(self) -> tuple[ConvolutionSizes, ...]:
        """All convolutions, including the shortcut's."""
        return self.steps if self.shortcut is None else (*self.steps, self.shortcut)


EXPANSION = 4  # output channels of a bottleneck block relative to those of its 3x3 convolution
VERSIONS, STEMS = ("1", "1.5", "2"), ("imagenet", "small")


@dataclass(frozen=True)
class ResNetConfig(Config):
    """Configuration of a ResNet; `mtf.models.image_preset("resnet-50")` and others are published ones.

    Args:
      blocks: blocks per stage; every stage but the first halves height and width and doubles the channels.
      bottleneck: blocks of 1x1, 3x3 and 1x1 convolutions, or of two 3x3.
      version: "1": a bottleneck's stride is in its first 1x1; "1.5": in its 3x3; "2": norm and ReLU come before each
        convolution instead of after it, the stride is in the 3x3.
      stem: "imagenet": 7x7 with stride 2, then 3x3 max pooling with stride 2; "small": 3x3, for images of 64 and less.
      classes, height, width, channels: of logits and images.
      features: channels of the first stage's 3x3 convolutions.
      zero_last: whether the last norm of each block is initialised to 0 (versions 1 and 1.5), making it the identity.
      groups, decay, epsilon: of batch norm.
      spatial_split: number of shards of height and width. From the first stage that it does not divide they are named
        late_height, late_width, for which there may be other rules.
      label_smoothing: of the loss.
      numerics: by default float32 variables and bfloat16 activations.
    Raises: GraphError with all faults at once.
    Source: He et al., arXiv:1512.03385; version 2: arXiv:1603.05027; 1.5: MLPerf's reference, and torchvision's.
    Example:
      >>> import meshlib as mtf
      >>> config = mtf.models.image_preset("resnet-50")
      >>> config.parameters, round(config.macs / 1e9, 2)
      (25557032, 4.09)
    """

    name: str = "resnet-50"
    blocks: tuple[int, ...] = (3, 4, 6, 3)
    bottleneck: bool = True
    version: str = "1.5"
    stem: str = "imagenet"
    classes: int = 1000
    height: int = 224
    width: int = 224
    channels: int = 3
    features: int = 64
    zero_last: bool = True
    groups: Groups = 1
    decay: float = 0.9
    epsilon: float = 1e-5
    spatial_split: int = 2
    label_smoothing: float = 0.1
    numerics: Numerics = MIXED

    def __post_init__(self) -> None:
        what = "ResNetConfig"
        choice(self.version, what, "version", VERSIONS)
        choice(self.stem, what, "stem", STEMS)
        faults = self.not_positive("classes", "height", "width", "channels", "features", "spatial_split")
        if not self.blocks or min(whole(n, what, "each of blocks") for n in self.blocks) < 1:
            faults.append(f"blocks={self.blocks}")
        if not 0 <= number(self.label_smoothing, what, "label_smoothing") < 1:
            faults.append(f"label_smoothing={self.label_smoothing}")
        if faults:
            raise GraphError(f"{at(what)}: sizes must be positive, label_smoothing in [0, 1), got {', '.join(faults)}")

    @property
    def split_dims(self) -> dict[str, int]:
        """The dims that the layout "channels" splits, with their largest numbers of shards."""
        return {CHANNELS: self.features}

    @property
    def stages(self) -> list[list[ResidualBlock]]:
        """The blocks of each stage."""
        return _stages(self)

    @property
    def convolutions(self) -> list[ConvolutionSizes]:
        """All convolutions, in the order of the network."""
        own = [c for stage in self.stages for block in stage for c in block.convolutions]
        return [_stem_convolution(self), *own]

    @property
    def parameters(self) -> int:
        """Trained parameters: kernels, two per channel of a norm, and the head with its bias."""
        return self.backbone_parameters + (self.stages[-1][-1].steps[-1].made + 1) * self.classes

    @property
    def backbone_parameters(self) -> int:
        """Trained parameters without the head."""
        blocks = [block for stage in self.stages for block in stage]
        last = blocks[-1].steps[-1].made
        if self.version == "2":
            normed = sum(c.given for block in blocks for c in block.steps) + last
        else:
            normed = sum(c.made for c in self.convolutions)
        return sum(c.parameters for c in self.convolutions) + 2 * normed

    @property
    def macs(self) -> int:
        """Multiply-adds per image of convolutions and head; windows over padding count, as published."""
        return sum(c.macs for c in self.convolutions) + self.stages[-1][-1].steps[-1].made * self.classes

    @property
    def flops_per_image(self) -> int:
        """FLOPs per image of a training step: two per multiply-add, in three passes."""
        return 6 * self.macs


def resnet(config: ResNetConfig, images: Tensor, is_training: bool) -> tuple[Tensor, list[Operation]]:
    """The logits of a ResNet, and the updates of its moving averages.

    Args:
      config: the model.
      images: [batch, height, width, image_channels] with the config's sizes, float; the caller normalises. Other dims
        may precede the batch.
      is_training: whether batch norm uses statistics of the batch and returns updates.
    Returns: [batch, classes] in float32 (float64 if the numerics are).
    Raises: GraphError for images with other dims.
    Example:
      >>> import meshlib as mtf
      >>> config = mtf.models.image_preset("resnet-18").replace(classes=10)
      >>> with mtf.Graph():
      ...     images = mtf.input("images", "batch:8;height:224;width:224;image_channels:3")
      ...     logits, updates = mtf.models.resnet(config, images, is_training=True)
      >>> print(logits.shape, len(updates))  # mean and variance of 20 norms
      [batch:8, classes:10] 40
    """
    check_images(config, images, "resnet")
    tower = Tower(is_training, config.numerics, config.groups, config.decay, config.epsilon)
    x = features(tower, config, images)[-1]
    pooled = reduce_mean(x, reduced_dim=spatial(x))
    classes = Dimension("classes", config.classes)
    return layers.dense(pooled, classes, numerics=config.numerics.wide(pooled), name="head"), tower.updates


def features(tower: Tower, config: ResNetConfig, images: Tensor) -> list[Tensor]:
    """The features of each stage, [batch, height, width, channels]; normalised after the last one in version 2."""
    with scope("stem"):
        x = _stem(tower, config, tower.numerics.cast(images))
    stage_features = []
    for number_of_stage, stage in enumerate(config.stages, start=1):
        x = late(x, stage[0].steps[-1].places, config.spatial_split)
        with scope(f"stage{number_of_stage}"):
            for n, block in enumerate(stage, start=1):
                with scope(f"block{n}"):
                    x = _block(tower, config, x, block)
        stage_features.append(x)
    if config.version == "2":
        stage_features[-1] = tower.active(x, "last_norm")
    return stage_features


def _stem(tower: Tower, config: ResNetConfig, x: Tensor) -> Tensor:
    large = config.stem == "imagenet"
    x = tower.conv(x, config.features, 7 if large else 3, 2 if large else 1)
    if config.version != "2":
        x = tower.active(x)
    return max_pool(x, {d.name: 3 for d in spatial(x)}, 2, [1, 1]) if large else x


def _block(tower: Tower, config: ResNetConfig, x: Tensor, block: ResidualBlock) -> Tensor:
    def convolved(y: Tensor, c: ConvolutionSizes, name: str) -> Tensor:
        return tower.conv(y, c.made, c.size, c.stride, name=name)

    if config.version == "2":
        y = active = tower.active(x, "norm1")
        for n, c in enumerate(block.steps, start=1):
            y = convolved(y if n == 1 else tower.active(y, f"norm{n}"), c, f"conv{n}")
        return y + (x if block.shortcut is None else convolved(active, block.shortcut, "shortcut"))
    y = x
    for n, c in enumerate(block.steps, start=1):
        last = n == len(block.steps)
        y = tower.norm(convolved(y, c, f"conv{n}"), 0.0 if last and config.zero_last else 1.0, f"norm{n}")
        y = y if last else relu(y)
    if block.shortcut is not None:
        x = tower.norm(convolved(x, block.shortcut, "shortcut"), name="shortcut_norm")
    return relu(y + x)


# ---------------------------------------------------------------- shapes


def _stem_convolution(config: ResNetConfig) -> ConvolutionSizes:
    size, stride = (7, 2) if config.stem == "imagenet" else (3, 1)
    return ConvolutionSizes(
        size, config.channels, config.features, stride, (_half(config.height, stride), _half(config.width, stride))
    )


def _stages(config: ResNetConfig) -> list[list[ResidualBlock]]:
    shrunk = 4 if config.stem == "imagenet" else 1
    sizes = -(-config.height // shrunk), -(-config.width // shrunk)
    given, stages = config.features, []
    for stage, count in enumerate(config.blocks):
        channels, own = config.features * 2**stage, []
        for n in range(count):
            own.append(_shape_of_block(config, given, channels, 2 if n == 0 < stage else 1, sizes))
            given, sizes = own[-1].steps[-1].made, own[-1].steps[-1].places
        stages.append(own)
    return stages


def _shape_of_block(
    config: ResNetConfig, given: int, channels: int, stride: int, sizes: tuple[int, int]
) -> ResidualBlock:
    rows = [(3, channels, stride), (3, channels, 1)]
    if config.bottleneck:
        first, second = (stride, 1) if config.version == "1" else (1, stride)
        rows = [(1, channels, first), (3, channels, second), (1, channels * EXPANSION, 1)]
    steps, inner = [], given
    for size, features_out, step in rows:
        sizes = _half(sizes[0], step), _half(sizes[1], step)
        steps.append(ConvolutionSizes(size, inner, features_out, step, sizes))
        inner = features_out
    projects = stride != 1 or given != inner
    return ResidualBlock(tuple(steps), ConvolutionSizes(1, given, inner, stride, sizes) if projects else None)


def _half(size: int, stride: int) -> int:
    return -(-size // stride)


def _presets() -> dict[str, ResNetConfig]:
    presets = {}
    for depth, (blocks, bottleneck) in DEPTHS.items():
        for version, suffix in (("1.5", ""), ("1", "-v1"), ("2", "-v2")):
            name = f"resnet-{depth}{suffix}"
            presets[name] = ResNetConfig(name, blocks, bottleneck, version)
    return presets


RESNETS: MappingProxyType[str, ResNetConfig] = MappingProxyType(_presets())
