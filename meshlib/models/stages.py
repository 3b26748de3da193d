"""Division of a model's layers into pipeline stages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

from layouts import Dimension
from meshlib import layers
from meshlib.core.arguments import at, choice, divisors_near, whole
from meshlib.core.dtypes import FLOAT32
from meshlib.core.errors import GraphError
from meshlib.core.graph import Tensor
from meshlib.core.wording import setting
from meshlib.layers.pipeline_task_schedule import KINDS
from meshlib.models.config import TransformerConfig
from meshlib.ops.control.remat import Policy, checked_policy
from meshlib.ops.movement.indexing import one_hot
from meshlib.ops.movement.shape import reshape, transpose
from meshlib.ops.pointwise.arithmetic import multiply
from meshlib.ops.pointwise.casts import cast
from meshlib.ops.pointwise.reductions import reduce_sum

MICROBATCH, STAGE = "microbatch", "stage"
STACKED = ("layers",)  # dims of layers that are trips of a loop in a stage
StageFn = Callable[..., Tensor | tuple[Tensor, list[Tensor]]]


def stacks(config: TransformerConfig) -> list[tuple[str, int]]:
    """The fields of a config with the numbers of layers that are divided into stages."""
    names = ["layers", *(["encoder_layers"] if config.encoder_decoder else [])]
    return [(name, getattr(config, name)) for name in names]


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """Pipeline options of `mtf.models.transformer` and `train_step`: `pipeline=mtf.models.Pipeline(...)`.

    The layers of the model become stages, dim `stage`, and the batch is cut into microbatches, dim `microbatch`, from
    the embeddings to the loss; `mtf.models.layout("pipeline+...")` splits both over the axis `pipe`. Variables of
    layers are those of the scanned model, with their first dim split: [layers] is [repeat, stage, layers], in this
    order. For an encoder-decoder both stacks are pipelines, one after the other on the same stages; each stage of the
    decoder reads the encoder's output for its microbatch.

    Args:
      stages: number of stages, which work in parallel.
      microbatches: number of microbatches; idle time is (stages - 1) / (repeats * microbatches).
      repeats: groups of layers per stage; each microbatch passes all stages once per repeat.
      remat: policy for the values of each microbatch in a stage besides its input, as in `mtf.layers.pipeline`: "none"
        keeps those that the layers' own `remat` keeps, for all microbatches; "full" keeps nothing and recomputes each
        stage, with the layers' values of one microbatch at a time.
      schedule: "gpipe", all forwards before the first backward; or "1f1b", "zb-h1", "zb-h2", of
        `mtf.layers.pipeline_training_step`, for decoders without experts. Then stages may have different numbers of
        layers: the embedding and the head count as one each (`mtf.layers.split_layers`), and variables of layers are
        allocated for the largest stage.
    Raises: GraphError for numbers below 1, and an unknown policy or schedule.
    Example:
      >>> import meshlib as mtf
      >>> tiny = mtf.models.preset("gpt2").reduced()
      >>> with mtf.Graph():
      ...     stages = mtf.models.Pipeline(stages=2, microbatches=4)
      ...     step = mtf.models.train_step(tiny, batch=4, length=8, pipeline=stages)
      ...     program = mtf.lower(*step, mesh="pipe:2", layout="stage:pipe")
      >>> sorted({c.kind for c in program.collectives})
      ['all_reduce', 'collective_permute']
    """

    stages: int
    microbatches: int
    repeats: int = 1
    remat: Policy = "none"
    schedule: str = "gpipe"

    def __post_init__(self) -> None:
        choice(self.schedule, "Pipeline", "schedule", tuple(KINDS))
        for name in ("stages", "microbatches", "repeats"):
            whole(getattr(self, name), "Pipeline", name, low=1)
        checked_policy(self.remat, "Pipeline")

    def check(self, config: TransformerConfig, batch: int) -> None:
        """Raise GraphError if the layers of a stack or the batch do not divide, with sizes that do."""
        faults = [fault for name, count in stacks(config) for fault in self._faults_of(config, name, count)]
        if self.by_tasks and self.repeats == 1:
            faults = self._uneven_faults(config)
        if batch % self.microbatches:
            faults.append(
                f"a batch of {batch} can't be cut into {self.microbatches} microbatches: {batch} % "
                f"{self.microbatches} = {batch % self.microbatches}; use {divisors_near(batch, self.microbatches)}"
            )
        if faults:
            raise GraphError.listing(f"{at('transformer')}: {config.name} as a pipeline", faults)

    def _faults_of(self, config: TransformerConfig, name: str, count: int) -> list[str]:
        """Reasons why a stack, whose layers are the config's field `name`, can't be a pipeline."""
        runs, period, front = self.stages * self.repeats, config.period, config.dense_front
        count -= front
        if count and count % (runs * period) == 0:
            return []
        which = "layers of the encoder" if name == "encoder_layers" else "layers"
        which += f" in patterns of {period}" if period > 1 else ""
        which += f" behind {front} dense ones" if front else ""
        fitting = [n for n in range(1, count // period + 1) if count // period % n == 0]
        plain = config.kind == "decoder" and config.experts is None and self.repeats == 1
        uneven = ", or schedule='1f1b', whose stages may differ" if plain and not count % period else ""
        some = "" if count % period else f"; stages * repeats may be {', '.join(map(str, fitting))}"
        return [
            f"{count} {which} can't be cut into {self.stages} stages * {self.repeats} repeats: "
            f"{count} % {runs * period} = {count % (runs * period)}{some}. Or use "
            f"{setting(name, front + max(1, -(-count // (runs * period))) * runs * period)}{uneven}"
        ]

    @property
    def by_tasks(self) -> bool:
        """True if forwards and backwards of different microbatches run at the same time."""
        return self.schedule != "gpipe"

    def split(self, config: TransformerConfig) -> tuple[int, ...]:
        """With a task schedule, the number of layer patterns per stage."""
        patterns = (config.layers - config.dense_front) // config.period
        if patterns % self.stages == 0:
            return (patterns // self.stages,) * self.stages
        ends = int((patterns + 2) // self.stages > 1)  # cost of embedding and head in layers, if all stages have some
        return layers.split_layers(patterns, self.stages, ends, ends)

    def _uneven_faults(self, config: TransformerConfig) -> list[str]:
        """Reasons why the layers can't be divided into stages of different sizes."""
        count, period = config.layers - config.dense_front, config.period
        if count % period:
            return [f"{count} layers do not divide into patterns of {period}: {count} % {period} = {count % period}"]
        if count // period < self.stages:
            return [f"{count // period} layers, or patterns of them, are fewer than {self.stages} stages; use fewer"]
        return []

    def layers_of(self, count: int) -> int:
        """Layers per group, for a stack of `count` layers."""
        return count // (self.stages * self.repeats)

    def cut(self, x: Tensor) -> Tensor:
        """[batch, ...] as [microbatch, batch, ...], with microbatches the minor part: nothing is sent for a split
        batch."""
        batch, *rest = x.shape
        micro = Dimension(MICROBATCH, self.microbatches)
        small = Dimension(batch.name, batch.size // micro.size)
        return transpose(reshape(x, [small, micro, *rest]), [micro, small, *rest])

    def run(self, stage_fn: StageFn, x: Tensor, beside: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """All stages applied to microbatches x, with `beside` cut as well; returns y and the stages' sums."""
        micro = x.shape.dim(MICROBATCH)
        stage = Dimension(STAGE, self.stages)
        results = layers.pipeline(stage_fn, x, stage, micro, self.repeats, beside, remat=self.remat)
        return (results, []) if isinstance(results, Tensor) else results

    def sums(self, loss: Tensor, dropped: Tensor, load: Tensor) -> list[Tensor]:
        """Statistics of a stage's experts for one microbatch, as floats: per stage the mean loss of a group of tokens,
        summed over layers, and the number of dropped choices; per layer and expert the number of tokens.

        With repeats, loads are those of the current group of layers.
        """
        bodies = [g.loop_body for g in loss.graph.around if g.loop_body is not None]
        chosen = next((body.chosen for body in bodies if body.chosen is not None), None)
        stage = loss.shape.dim(STAGE)
        groups = prod(d.size for d in loss.shape if d.name not in (STAGE, *STACKED))
        layer_dims = [d for d in load.shape if d.name in STACKED]
        count = reduce_sum(cast(load, FLOAT32), output_shape=[stage, *layer_dims, load.shape[-1]])
        if chosen is not None:
            repeat, turns = chosen
            count = multiply(one_hot(turns, repeat, dtype=FLOAT32), count, [repeat, *count.shape])
        return [
            reduce_sum(loss, output_shape=[stage]) * (1 / groups),
            reduce_sum(cast(dropped, FLOAT32), output_shape=[stage]),
            count,
        ]
