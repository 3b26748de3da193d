"""Serving on a slice: batch and layout against latency, throughput, memory and cost.

Each point is a real program: `models.decode_step`, lowered and estimated with full caches, and `models.prefill` of one
prompt for each data-parallel group. The batch grows until memory is full, which is found exactly, without trying all.
A load is simulated over the times of these steps (`served_load`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import product
from typing import Any

import numpy as np

from hardware.checks import HardwareError
from hardware.slices import Slice
from layouts import LayoutRules, Mesh
from layouts.mesh import MeshLike
from meshlib.core.arguments import at, choice, flag, items, whole
from meshlib.core.compiler import XLA_TPU, Compiler, require_compiler
from meshlib.core.dtypes import as_dtype
from meshlib.core.errors import GraphError, LayoutError, SliceError
from meshlib.core.graph import Graph
from meshlib.core.wording import argument
from meshlib.estimation import Estimate, balance, estimate
from meshlib.lowering import lower
from meshlib.models import TransformerConfig, decode_step, layout, prefill
from meshlib.models.layouts import largest_power
from meshlib.searching.arrivals import Arrivals
from meshlib.searching.served_load import ServedLoad, StepSeconds, serve_load
from meshlib.searching.serving_result import Serving, ServingPoint

WHAT = "serving"
MOST_BATCH = 1 << 16
FREE_GUESSES = 4  # guesses from the slope of memory that may fail to halve the range before bisection takes over
CONTEXT = 2048  # default positions of caches
TOKENS = 128  # prompts and caches are rounded up to multiples
NARROW = ("int8", "int4", "float8_e4m3fn", "float8_e5m2")  # kernel dtypes that have scales
WEIGHT_DTYPES = ("bfloat16", "float32", *NARROW)
# Names of axes in generated layouts.
_PARTS = {"data": "data", "expert": "expert", "tensor": "tensor", "cache": "tensor", "features": "features"}


def serving(
    config: TransformerConfig,
    slice: str | Slice,
    context: int | None = None,
    prompt: int | None = None,
    batches: Sequence[int] | None = None,
    layouts: Sequence[tuple[MeshLike, object]] | None = None,
    encoder_length: int | None = None,
    cache_dtype: str | None = None,
    compiler: Compiler = XLA_TPU,
    group_size: int | None = None,
    weight_dtype: str | None = None,
    arrivals: Arrivals | None = None,
    chunk: int | None = None,
    separate: bool = False,
) -> Serving:
    """Sweep batch and layout of decoding on a slice.

    Args:
      config: a decoder or an encoder-decoder.
      slice: a name or a `hardware.Slice`.
      context: positions in the caches, all full; by default 2,048. prompt: tokens of a prefill; by default half the
        context (1 for an encoder-decoder, which also encodes `encoder_length` tokens).
      batches: batches to try under each layout, where they fit and divide; by default 1, 2, 4, ... per data-parallel
        group, and last the largest that fits.
      layouts: (mesh, layout) pairs; by default all splits of batch, heads and features of weights by powers of two that
        divide them, of caches by positions where heads are fewer, and of experts over axes of the batch.
      cache_dtype: as in `mtf.models.prefill`.
      compiler: the compiler for which programs are lowered and scheduled.
      group_size: as in `mtf.models.decode_step`, for a model with experts: the most sequences of a data-parallel group
        that are routed together; a divisor is used. By default every expert computes every token.
      weight_dtype: dtype of stored weights: "bfloat16" or "float32", or "int8", "int4", "float8_e4m3fn" or
        "float8_e5m2" for kernels of products, with a scale per channel, and bfloat16 for others. By default that of
        the config's numerics, or bfloat16 where that is wider.
      arrivals: a load (`Arrivals`) under which each layout is simulated with its largest batch. The default context is
        then what its longest request needs, and prompts have its lengths.
      chunk: prompt tokens to prefill between decoding steps of running sequences; by default the whole prompt.
      separate: whether prefill runs on a second slice of the same kind, which sends the caches over DCN.
    Returns: a `Serving`: print it, `.frontier`, `.largest`, `.within(0.02)`, `.loads`, `.load_within(1.0, 0.05)`,
      `.plot()`.
    Raises: SliceError for an unknown slice; GraphError for other bad arguments; LayoutError where no layout is legal.
    Example:
      >>> import meshlib as mtf
      >>> served = mtf.serving(mtf.models.preset("gpt2"), "v5e-1", batches=[8, 64], context=1024)
      >>> fastest, cheapest = served.frontier[0], served.frontier[-1]
      >>> fastest.batch, cheapest.batch, fastest.token_seconds < cheapest.token_seconds
      (8, 64, True)

    Source of the trade: Pope et al., arXiv:2211.05102, figure 1.
    """
    served = _served(TransformerConfig.checked(config, WHAT), weight_dtype)
    try:
        slice_ = slice if isinstance(slice, Slice) else Slice(slice)
    except HardwareError as fault:
        raise SliceError(f"{at(WHAT)}: {fault}") from None
    longest = _checked_load(arrivals, chunk, separate, config)
    asked = 0 if arrivals is None else arrivals.longest
    held = _context_of(served, asked) if context is None else whole(context, WHAT, "context", low=1)
    if held < asked:
        raise GraphError(f"{at(WHAT)}: context {held} is less than the longest request, {asked} tokens")
    if longest is not None and prompt is None:
        prompt = min(held, longest)
    read = (1 if config.encoder_decoder else max(1, held // 2)) if prompt is None else whole(prompt, WHAT, "prompt")
    if not 1 <= read <= held:
        raise GraphError(f"{at(WHAT)}: prompt must be in 1 to {held}, the context, got {read}")
    given = None if batches is None else [whole(b, WHAT, "each batch") for b in items(batches, WHAT, "batches")]
    if given is not None and (not given or min(given) < 1):
        raise GraphError(f"{at(WHAT)}: batches must be a non-empty list of numbers of at least 1, got {given}")
    if group_size is not None:
        whole(group_size, WHAT, "group_size", low=1)
    sweep = _Sweep(
        served, slice_, held, read, encoder_length, cache_dtype, require_compiler(compiler, WHAT), group_size,
        None if arrivals is None else Load(arrivals, chunk, separate),
    )  # fmt: skip
    return sweep.run(given, layouts)


def _context_of(config: TransformerConfig, longest: int) -> int:
    """Cache positions for the longest request, in whole blocks if the model has as many; 0 without a load."""
    rounded = -(-longest // TOKENS) * TOKENS or CONTEXT
    most = config.max_length if config.position == "learned" else None
    return most if longest and most is not None and longest <= most < rounded else rounded


def _checked_load(arrivals: object, chunk: object, separate: object, config: TransformerConfig) -> int | None:
    """The longest prompt of a load, in whole blocks of tokens."""
    if arrivals is None:
        given = [name for name, value in (("chunk", chunk), ("separate", separate)) if value]
        if given:
            raise GraphError(f"{at(WHAT)}: {given[0]} is for a load; give arrivals=mtf.Arrivals(rate=...)")
        return None
    if not isinstance(arrivals, Arrivals):
        raise GraphError(f"{at(WHAT)}: arrivals must be an mtf.Arrivals, got {arrivals!r:.80}")
    if config.encoder_decoder:
        raise GraphError(f"{at(WHAT)}: arrivals are for decoders; {config.name} has an encoder")
    if chunk is not None:
        whole(chunk, WHAT, "chunk", low=1)
    flag(separate, WHAT, "separate")
    return -(-int(arrivals.prompts_drawn.max()) // TOKENS) * TOKENS


def weight_dtype_of(config: TransformerConfig) -> str:
    """Stored dtype of a model's kernels."""
    n = config.numerics
    return n.kernel_dtype or n.slice_dtype or n.variable_dtype


def _activations(config: TransformerConfig) -> str:
    """Dtype of keys and values: that of the layers' computation, or of the embedding."""
    n = config.numerics
    return n.activation_dtype or n.slice_dtype or n.variable_dtype


def _served(config: TransformerConfig, weight_dtype: str | None) -> TransformerConfig:
    """The config with its weights in the dtype used for serving."""
    n = config.numerics
    if weight_dtype is not None:
        choice(weight_dtype, WHAT, argument("weight_dtype"), WEIGHT_DTYPES)
    elif n.kernel_dtype is not None or as_dtype(n.slice_dtype or n.variable_dtype).size_bytes(1) <= 2:
        return config
    stored_dtype = weight_dtype or "bfloat16"
    if stored_dtype in NARROW:
        n = replace(n, variable_dtype="bfloat16", slice_dtype=None, kernel_dtype=stored_dtype)
    else:
        n = replace(n, variable_dtype=stored_dtype, slice_dtype=None, kernel_dtype=None)
    return config.replace(numerics=n)


@dataclass(frozen=True)
class Load:
    """A load and its serving policy."""

    arrivals: Arrivals
    chunk: int | None
    separate: bool


@dataclass
class _Sweep:
    """State of one call of `serving`."""

    config: TransformerConfig
    slice: Slice
    context: int
    prompt: int
    encoder_length: int | None
    cache_dtype: str | None
    compiler: Compiler
    group_size: int | None
    load: Load | None = None

    def run(self, batches: Sequence[int] | None, layouts: Sequence[tuple[MeshLike, object]] | None) -> Serving:
        """Estimate all points."""
        points: list[ServingPoint] = []
        largest: dict[str, int] = {}
        skipped: dict[str, str] = {}
        loads: list[ServedLoad] = []
        given = None if layouts is None else [*_pairs(layouts)]
        if given == []:
            raise GraphError(
                f"{at(WHAT)}: layouts must be a non-empty list of (mesh, layout) pairs, got {layouts!r:.80}"
            )
        for mesh, named in self._candidates() if given is None else given:
            name = str(mesh) if layouts is None else f"{mesh} {named}"
            try:
                rules = self._rules(mesh, named)
                group = _groups(mesh, rules)
                first = self._point(name, mesh, rules, group)
            except LayoutError as fault:
                skipped[name] = str(fault)
                continue
            decode = cache(partial(self._decode, mesh, rules))
            largest[name] = self._largest_batch(first, decode, group)
            of_layout = [*self._fitting_points(first, decode, group, batches, largest[name])]
            points += of_layout
            if self.load is not None and of_layout:
                loads.append(self._served(self.load, of_layout, mesh, rules))
        if not largest:
            reasons = [f"{name}: {why.splitlines()[0]}" for name, why in skipped.items()]
            raise LayoutError.listing(
                f"{at(WHAT)}: no layout of {self.config.name} on {self.slice.name} is legal", reasons
            )
        weights, caches = weight_dtype_of(self.config), self.cache_dtype or _activations(self.config)
        return Serving(
            self.config,
            self.slice,
            self.context,
            self.prompt,
            weights,
            caches,
            tuple(points),
            largest,
            skipped,
            self.compiler,
            tuple(loads),
        )

    def _candidates(self) -> Iterator[tuple[Mesh, object]]:
        """Meshes in powers of two over batch, heads and features: data-parallel, and weight-stationary.

        For a model with experts, the batch is also split over as many devices as can have whole experts.
        """
        n = self.slice.devices
        powers = [1 << k for k in range(n.bit_length()) if n % (1 << k) == 0]
        for tensor, features in product(powers, (1, 2, 4)):
            if n % (tensor * features) or (features > 1 and tensor < 2 * features):
                continue  # d_ff takes more devices than d_model: Pope et al., section 3.2.2
            rows, experts = n // (tensor * features), 1
            if self.config.experts is not None and features == 1:
                experts = largest_power(rows, self.config.experts.count)
            for expert in dict.fromkeys((1, experts)):
                sizes = {"data": rows // expert, "expert": expert, "features": features, "tensor": tensor}
                mesh = Mesh({axis: size for axis, size in sizes.items() if size > 1} or {"data": 1})
                parts = [part for part, axis in _PARTS.items() if axis in mesh]
                yield mesh, "+".join(parts)

    def _rules(self, mesh: Mesh, named: object) -> LayoutRules:
        """Rules as given, or those of the sweep's own axes."""
        parts = named.split("+") if isinstance(named, str) else []
        if not parts or not {*parts} <= {*_PARTS}:
            return LayoutRules(named)  # type: ignore[arg-type]
        own = [part for part in parts if part != "features"]
        rules = layout("+".join(own), self.config, mesh) if own else LayoutRules("")
        return LayoutRules([*rules.rules, *LayoutRules("d_model:features" if "features" in parts else "").rules])

    def _fitting_points(
        self,
        first: ServingPoint,
        decode: Callable[[int], Estimate],
        group: int,
        batches: Sequence[int] | None,
        most: int,
    ) -> Iterator[ServingPoint]:
        """The points of a layout that fit."""
        if batches is None:
            tried = [group << k for k in range(MOST_BATCH.bit_length()) if group << k < most]
            tried = [*tried, most] if most else []
        else:
            tried = [b for b in sorted({*batches}) if b % group == 0 and b <= most]
        for batch in tried:
            yield first if batch == group else replace(first, batch=batch, decode=decode(batch))

    def _largest_batch(self, first: ServingPoint, decode: Callable[[int], Estimate], group: int) -> int:
        """The largest multiple of `group` that fits: memory grows almost linearly, so it is guessed and checked."""
        if not first.fits:
            return 0
        low, high = 1, MOST_BATCH // group + 1  # low fits, high does not
        bytes_of = {1: first.decode.memory.needed_bytes}
        count, guessed = 2, True
        while high - low > 1:
            memory = decode(count * group).memory
            bytes_of[count] = memory.needed_bytes
            width = high - low
            low, high = (count, high) if memory.fits else (low, count)
            if guessed and len(bytes_of) > FREE_GUESSES and high - low > width // 2:
                count, guessed = (low + high) // 2, False  # the guess was poor
                continue
            a, b = sorted(bytes_of)[-2:] if memory.fits else (low, count)
            slope = max(1.0, (bytes_of[b] - bytes_of.get(a, bytes_of[1])) / (b - a))
            guess = low + int((memory.capacity_bytes - bytes_of[low]) / slope)
            count, guessed = min(max(guess, low + 1), high - 1), True
        return low * group

    def _point(self, name: str, mesh: Mesh, rules: LayoutRules, group: int) -> ServingPoint:
        read = self._prefill(mesh, rules, group, self.prompt)
        return ServingPoint(name, group, self._decode(mesh, rules, group), read, group)

    def _served(self, load: Load, points: Sequence[ServingPoint], mesh: Mesh, rules: LayoutRules) -> ServedLoad:
        """The load served under one layout, with prefill times from the shortest to the longest prompt."""
        prompts = load.arrivals.prompts_drawn
        lengths = {min(self.context, -(-int(n) // TOKENS) * TOKENS) for n in (prompts.min(), int(np.median(prompts)))}
        reading = {self.prompt: points[0].prefill.step_seconds}
        for length in lengths - {self.prompt}:
            reading[length] = self._prefill(mesh, rules, points[0].prompts, length).step_seconds
        chip = self.slice.chip
        sent = chip.dcn_bytes_per_second * chip.dcn_efficiency * self.slice.chips
        steps = StepSeconds(
            decode=[(p.batch, p.token_seconds) for p in points],
            prefill=sorted(reading.items()),
            together=points[0].prompts,
            transfer=_cache_bytes(points[0].decode) / (points[0].batch * self.context) / sent if load.separate else 0.0,
        )
        return serve_load(points[0].name, steps, load.arrivals, load.chunk, load.separate)

    def _prefill(self, mesh: Mesh, rules: LayoutRules, prompts: int, length: int) -> Estimate:
        with Graph():
            program = prefill(
                self.config, prompts, length, self.context, self.encoder_length, cache_dtype=self.cache_dtype
            )
            return self._estimate(program, mesh, rules)

    def _decode(self, mesh: Mesh, rules: LayoutRules, batch: int) -> Estimate:
        with Graph():
            together = self._together(batch // _groups(mesh, rules))
            decode_program = decode_step(
                self.config, batch, self.context, self.encoder_length, cache_dtype=self.cache_dtype, group_size=together
            )
            return self._estimate(decode_program, mesh, rules)

    def _estimate(self, step: tuple[Any, Any], mesh: Mesh, rules: LayoutRules) -> Estimate:
        """Estimate of a step lowered with the slice's own balance, since launches dominate small collectives."""
        program = lower(*step, mesh=mesh, layout=rules, balance=balance(self.slice, mesh), compiler=self.compiler)
        return estimate(program, self.slice)

    def _together(self, sequences: int) -> int | None:
        """Number of sequences of a data-parallel group that are routed together."""
        if self.group_size is None:
            return None
        return next(n for n in range(min(self.group_size, sequences), 0, -1) if sequences % n == 0)


def _cache_bytes(step: Estimate) -> int:
    """Bytes of all caches, counted once over all devices."""
    held = (v.tensor for name, v in step.program.variables.items() if "/cache/" in name)
    return sum(t.dtype.size_bytes(t.shape.size) for t in held)


def _pairs(layouts: object) -> Iterator[tuple[Mesh, object]]:
    for pair in items(layouts, WHAT, "layouts"):
        if not isinstance(pair, Sequence) or isinstance(pair, str) or len(pair) != 2:
            raise GraphError(f"{at(WHAT)}: layouts must be (mesh, layout) pairs, got {pair!r:.80}")
        mesh, rules = pair
        yield mesh if isinstance(mesh, Mesh) else Mesh(mesh), rules


def _groups(mesh: Mesh, rules: LayoutRules) -> int:
    """Number of devices over which the batch must divide."""
    axes = [axis for rule in rules.rules if rule.dim == "batch" for axis in rule.axes]
    return mesh.group_size(tuple(dict.fromkeys(axes)))
