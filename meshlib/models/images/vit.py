"""ViT: a Transformer over the patches of an image, extracted by `mtf.rearrange`."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType

from layouts import Dimension
from meshlib import layers
from meshlib.core import initializers
from meshlib.core.arguments import at, number
from meshlib.core.errors import GraphError
from meshlib.core.graph import Operation, Tensor, scope
from meshlib.layers.numerics import MIXED, Numerics
from meshlib.models.blocks import StackBlocks
from meshlib.models.config import LayerKind, TransformerConfig
from meshlib.models.config_parts import Config
from meshlib.models.images.tower import BATCH, COLOURS, check_images
from meshlib.ops.control.loops import scan
from meshlib.ops.control.remat import Policy
from meshlib.ops.movement.rearrange import rearrange
from meshlib.ops.movement.runs import concat, slice
from meshlib.ops.movement.shape import broadcast
from meshlib.ops.pointwise.reductions import reduce_sum


@dataclass(frozen=True)
class ViTConfig(Config):
    """Configuration of a ViT; `mtf.models.image_preset("vit-b-16")` and others are published ones.

    Args:
      layers, d_model, heads, d_ff: of the encoder: layer norms before attention and feed-forward, GELU, biases.
      patch: side of a patch in pixels.
      classes, height, width, channels: of logits and images; the patch divides height and width.
      dropout: of residual branches, while training.
      scan: whether the layers are one loop over stacked variables. remat: its policy, as in `mtf.scan`.
      label_smoothing: of the loss.
      numerics: by default float32 variables and bfloat16 activations.
    Raises: GraphError with all faults at once.
    Source: Dosovitskiy et al., arXiv:2010.11929, table 1.
    Example:
      >>> import meshlib as mtf
      >>> mtf.models.image_preset("vit-b-16").parameters
      86567656
    """

    name: str = "vit-b-16"
    layers: int = 12
    d_model: int = 768
    heads: int = 12
    d_ff: int = 3072
    patch: int = 16
    classes: int = 1000
    height: int = 224
    width: int = 224
    channels: int = 3
    dropout: float = 0.0
    scan: bool = True
    remat: Policy = "full"
    label_smoothing: float = 0.0
    numerics: Numerics = MIXED

    def __post_init__(self) -> None:
        what = "ViTConfig"
        sizes = ("layers", "d_model", "heads", "d_ff", "patch", "classes", "height", "width", "channels")
        faults = self.not_positive(*sizes)
        if faults:
            raise GraphError(f"{at(what)}: sizes must be positive, got {', '.join(faults)}")
        for n, divisor in (("height", self.patch), ("width", self.patch), ("d_model", self.heads)):
            if getattr(self, n) % divisor:
                faults.append(f"{n}: {getattr(self, n)} % {divisor} = {getattr(self, n) % divisor}")
        for n in ("dropout", "label_smoothing"):
            if not 0 <= number(getattr(self, n), what, n) < 1:
                faults.append(f"{n}={getattr(self, n)} is not in [0, 1)")
        if faults:
            raise GraphError(
                f"{at(what)}: the patch must divide height and width, the heads d_model: {'; '.join(faults)}"
            )

    @property
    def encoder(self) -> TransformerConfig:
        """Its layers as a `TransformerConfig`."""
        return TransformerConfig(
            name=self.name, kind="encoder", layers=self.layers, d_model=self.d_model, heads=self.heads,
            head_dim=self.d_model // self.heads, d_ff=self.d_ff, vocab=self.classes, bias=True, position="none",
            norm_epsilon=1e-6, activation="gelu_exact", dropout=self.dropout, numerics=self.numerics,
        )  # fmt: skip

    @property
    def length(self) -> int:
        """Number of patches plus the class token."""
        return self.height // self.patch * (self.width // self.patch) + 1

    @property
    def split_dims(self) -> dict[str, int]:
        """The dims that the layout "channels" splits, with their largest numbers of shards."""
        return {"heads": self.heads, "d_ff": self.d_ff}

    @property
    def spatial_split(self) -> int:
        """1: height and width are merged into one sequence, which would gather all patches on every core."""
        return 1

    @property
    def parameters(self) -> int:
        """Trained parameters."""
        d, patch = self.d_model, self.patch**2 * self.channels
        layer = 4 * d * (d + 1) + 2 * d * self.d_ff + d + self.d_ff + 4 * d
        return (patch + 1) * d + d + self.length * d + self.layers * layer + 2 * d + (d + 1) * self.classes

    @property
    def macs(self) -> int:
        """Multiply-adds per image of products with weights and of attention."""
        d, n = self.d_model, self.length
        layer = n * (4 * d * d + 2 * d * self.d_ff) + 2 * n * n * d
        return (n - 1) * self.patch**2 * self.channels * d + self.layers * layer + d * self.classes

    @property
    def flops_per_image(self) -> int:
        """FLOPs per image of a training step: two per multiply-add, in three passes."""
        return 6 * self.macs


def vit(config: ViTConfig, images: Tensor, is_training: bool) -> tuple[Tensor, list[Operation]]:
    """The logits of a ViT, and an empty list of updates.

    Args:
      config: the model.
      images: [batch, height, width, image_channels] with the config's sizes, float; the caller normalises.
      is_training: whether there is dropout.
    Returns: [batch, classes] in float32, and [].
    Raises: GraphError for images with other dims.
    Example:
      >>> import meshlib as mtf
      >>> config = mtf.models.image_preset("vit-b-16")
      >>> with mtf.Graph():
      ...     images = mtf.input("images", "batch:2;height:224;width:224;image_channels:3")
      ...     logits, updates = mtf.models.vit(config, images, is_training=False)
      >>> print(logits.shape, updates)
      [batch:2, classes:1000] []
    """
    check_images(config, images, "vit")
    numerics = config.numerics
    d = Dimension("d_model", config.d_model)
    names = {"rows columns": "length", "p q c": "patch", "b": BATCH, "c": COLOURS}
    pattern = "b (rows p) (columns q) c -> b (rows columns) (p q c)"
    patches = rearrange(numerics.cast(images), pattern, p=config.patch, q=config.patch, names=names)
    x = layers.dense(patches, d, numerics=numerics, name="patches")
    token = numerics.variable("class_token", [d], 0.0, x.dtype)
    batch = x.shape.dim(BATCH)
    x = concat([broadcast(token, [batch, Dimension("length", 1), d]), x], "length")
    x = x + layers.learned_positions(x.shape.dim("length"), d, numerics=numerics)
    blocks = StackBlocks(config.encoder, causal=False, training=is_training)
    kind = LayerKind(None, experts=False)
    if config.scan and config.layers > 1:
        with scope("layers"):
            depth = Dimension("layers", config.layers)
            (x,), _ = scan(
                lambda carry, _: ((blocks.layer(carry[0], kind)[0],), ()), [x], dim=depth,
                stack_variables=True, remat=config.remat,
            )  # fmt: skip
    else:
        for n in range(config.layers):
            with scope(f"layer{n}"):
                x, _ = blocks.layer(x, kind)
    first = reduce_sum(slice(blocks.norm(x, "final_norm"), 0, 1, "length"), reduced_dim=Dimension("length", 1))
    classes = Dimension("classes", config.classes)
    start = initializers.zeros()  # arXiv:2010.11929, section 3.2
    return layers.dense(first, classes, numerics=numerics.wide(first), kernel_initializer=start, name="head"), []


def _presets() -> dict[str, ViTConfig]:
    sizes = {"b": (12, 768, 12, 3072), "l": (24, 1024, 16, 4096)}
    rows = [(f"vit-{size}-{patch}", *numbers, patch) for size, numbers in sizes.items() for patch in (16, 32)]
    return {row[0]: ViTConfig(*row) for row in [*rows, ("vit-h-14", 32, 1280, 16, 5120, 14)]}


VITS: MappingProxyType[str, ViTConfig] = MappingProxyType(_presets())
