"""Published throughputs of servers beside what `mtf.serving` predicts: `python -m meshlib validate --served`.

Each server was given all requests at once, so that its batch is always full: the figure is its decoded tokens per
second, with the time of prompts included. The model has neither host time between steps nor prompts padded to the next
power of two, both of which these servers have: it is an upper bound, and the distance is what a better server can gain.

Lengths are those stated by a run; the runs of JetStream on ShareGPT state none, so they have the means of another run
of the same benchmark (1,780 requests, 214,914 tokens in, 415,416 out: JetStream, pull request 83).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from meshlib.models import preset
from meshlib.searching.arrivals import Arrivals
from meshlib.searching.serving import serving
from meshlib.validation.machine_figures import ComparedFigures, Figure

_AT_ONCE, _REQUESTS = 1e4, 600  # requests per second: all arrive within a few steps
_SHAREGPT = (121, 233)
_PYTORCH = "jetstream-pytorch"  # github.com/AI-Hypercomputer/jetstream-pytorch: benchmarks/summary.md
_LEFT_OUT = (
    "left out: GPT-J in int8 on v5e-4, 9.81 samples/s offline (MLPerf Inference v3.1): four beams share the cache of "
    "their prompt there"
)


@dataclass(frozen=True)
class ServedRun:
    """A measured server.

    Attributes:
      model, slice: their names.
      dtype: of weights and caches.
      batch: sequences decoded together; None: as many as fit.
      lengths: mean tokens of a prompt and of an output.
      tokens_per_second: measured decoded tokens.
      source: where it was published.
      chunk: tokens of a prompt that are read at once; None: all.
    """

    model: str
    slice: str
    dtype: str
    batch: int | None
    lengths: tuple[int, int]
    tokens_per_second: float
    source: str
    chunk: int | None = None

    @property
    def name(self) -> str:
        """Model, slice, dtype and batch.

        >>> RUNS[0].name
        'llama3-8b v5e-8 bfloat16 x128'
        """
        rows = "full" if self.batch is None else f"x{self.batch}"
        return f"{self.model} {self.slice} {self.dtype} {rows}"

    def predicted(self) -> float:
        """Predicted tokens per second: caches of 2,048 positions, heads and d_ff split over all devices."""
        devices = int(self.slice.rpartition("-")[2])
        prompts, outputs = self.lengths
        result = serving(
            preset(self.model), self.slice, context=2048, weight_dtype=self.dtype,
            cache_dtype="int8" if self.dtype == "int8" else None, chunk=self.chunk,
            batches=None if self.batch is None else [self.batch // 2, self.batch],
            layouts=None if devices == 1 else [(f"tensor:{devices}", "tensor")],
            arrivals=Arrivals(rate=_AT_ONCE, prompts=prompts, outputs=outputs, requests=_REQUESTS),
        )  # fmt: skip
        return max(load.tokens_per_second for load in result.loads)


RUNS = (
    ServedRun("llama3-8b", "v5e-8", "bfloat16", 128, _SHAREGPT, 8249.0, _PYTORCH),
    ServedRun("llama3-8b", "v5e-8", "int8", 256, _SHAREGPT, 10873.0, _PYTORCH),
    ServedRun("llama2-7b", "v5e-8", "bfloat16", 96, _SHAREGPT, 3663.0, _PYTORCH),
    ServedRun("llama2-7b", "v5e-8", "int8", 96, _SHAREGPT, 4783.0, _PYTORCH),
    ServedRun("llama2-13b", "v5e-8", "bfloat16", 48, _SHAREGPT, 2056.0, _PYTORCH),
    ServedRun("llama2-13b", "v5e-8", "int8", 96, _SHAREGPT, 3458.0, _PYTORCH),
    # 995 requests, 217,011 tokens in, 934,964 out; 11 rows for each device, of which 8 are assumed.
    ServedRun(
        "llama2-7b", "v5e-8", "bfloat16", 88, (218, 940), 3061.78,
        "tpu-recipes",  # github.com/AI-Hypercomputer/tpu-recipes: inference/v5e/JetStream-Maxtext
    ),
    # github.com/vllm-project/vllm, pull request 16458: 8.37 requests/s of 1,800 tokens and 120 out; 512 tokens a step.
    ServedRun(
        "llama3.1-8b", "v6e-1", "bfloat16", None, (1800, 120), 8.37 * 120, "vllm 16458", chunk=512
    ),
)  # fmt: skip


@cache
def served_figures(runs: tuple[ServedRun, ...] = RUNS) -> ComparedFigures:
    """Each published throughput beside the predicted one.

    Example:
      >>> (row,) = served_figures(RUNS[-1:]).rows
      >>> 0 < row.error < 0.5
      True
    """
    rows = (Figure(run.name, run.tokens_per_second, run.predicted(), "/s", run.source) for run in runs)
    return ComparedFigures(tuple(rows), "tokens decoded", (_LEFT_OUT,))
