"""Serving steps of a decoder: `prefill` and `decode_step` of a batch, and `extend_step` of a running one.

All are programs on the variables of the trained model and of its caches (`meshlib.models.caches`), so that a simulation
runs one after the other, each with its own mesh and layout.

In `extend_step` prefill of a prompt, whole or in chunks, decoding a token and verifying drafts are one program: rows
differ in the number of tokens that they add, and in their positions. The host assigns sequences to rows, and pages to
sequences, from step to step (`meshlib.generation.server`).
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from layouts import Dimension, Shape
from meshlib.core.arguments import at, choice, flag, whole
from meshlib.core.errors import GraphError
from meshlib.core.graph import Operation, Tensor, scope
from meshlib.core.wording import argument
from meshlib.models.caches import CACHE_DTYPES, TOKEN, Caches, RowCaches
from meshlib.models.config import TransformerConfig
from meshlib.models.model import Builder, check_positions
from meshlib.ops.control.sources import input, variable
from meshlib.ops.control.state import assign, assign_add
from meshlib.ops.movement.indexing import gather
from meshlib.ops.movement.indexing import range as positions_of
from meshlib.ops.movement.shape import broadcast, rename_dimension, reshape
from meshlib.ops.pointwise.arithmetic import add_n, less, maximum, where
from meshlib.ops.pointwise.reductions import reduce_sum

Step = tuple[dict[str, Tensor], list[Operation]]
WHAT = "extend_step"


def prefill(
    config: TransformerConfig,
    batch: int,
    length: int,
    cache_length: int,
    encoder_length: int | None = None,
    beams: int | None = None,
    cache_dtype: str | None = None,
    scan: bool = True,
) -> Step:
    """The step that reads prompts: writes their keys and values to the caches and returns the last token's logits.

    Inputs: "tokens" int32 [batch, length], left-aligned prompts, padded with any tokens, which have no effect and are
    routed to no expert; "lengths" int32 [batch], the number of tokens of each, at least 1. For an encoder-decoder
    "tokens" are the decoder's prompt, and "sources" [batch, encoder_length] with "source_lengths" [batch] the encoder's
    input.

    Args:
      config: a decoder or an encoder-decoder.
      batch, length: number of prompts, and their maximal length.
      cache_length: positions of the caches, for prompt and completion together.
      encoder_length: maximal length of the encoder's input, for an encoder-decoder.
      beams: hypotheses per sequence, whose caches are filled alike. None: one, without a dim.
      cache_dtype: dtype of the caches: a float type, "int8", "float8_e4m3fn" or "float8_e5m2", the latter three with a
        scale per token and head; by default that of the activations. Layout rules may split the dim `cache_length`
        (also that of ring buffers), and `source_length` of the encoder's sequence: useful if there are fewer key heads
        than devices, which would otherwise replicate the caches.
      scan: as in `transformer`.
    Returns: ({"logits": [batch, vocab]}, updates) for `mtf.lower`. The updates write the caches and the positions. For
      a model with experts also "dropped", the number of dropped choices in all layers: prompts have the capacity of
      `Routing.capacity_factor_eval`.
    Raises: GraphError for a config that does not decode, sizes that do not fit, and an invalid cache_dtype.
    Example:
      >>> import numpy as np
      >>> import meshlib as mtf
      >>> tiny = mtf.models.preset("llama2-7b").reduced()
      >>> with mtf.Graph():
      ...     read = mtf.lower(*mtf.models.prefill(tiny, batch=2, length=4, cache_length=8))
      >>> with mtf.Graph():
      ...     add = mtf.lower(*mtf.models.decode_step(tiny, batch=2, cache_length=8))
      >>> sim = mtf.simulate(read)
      >>> logits = sim.step(tokens=np.array([[3, 1, 4, 1], [5, 9, 0, 0]]), lengths=[4, 2])["logits"]
      >>> sim.run(add, tokens=logits.argmax(axis=-1))["logits"].shape, sim.state["serving/positions"].tolist()
      ((2, 64), [5, 3])
    """
    serving = _Serving("prefill", config, batch, cache_length, encoder_length, beams, cache_dtype, scan)
    return serving.prefill(whole(length, "prefill", "length", low=1))


def decode_step(
    config: TransformerConfig,
    batch: int,
    cache_length: int,
    encoder_length: int | None = None,
    beams: int | None = None,
    cache_dtype: str | None = None,
    scan: bool = True,
    group_size: int | None = None,
) -> Step:
    """The step that adds the next token of each sequence: updates the caches and returns logits.

    Inputs: "tokens" int32 [batch], the token at each sequence's position, which a prefill sets to the end of the prompt
    and each step increments. With `beams`, "tokens" and "parents" [batch, beams], the hypothesis that each one
    continues; caches and positions are reordered first.

    With `group_size` also "live" bool [batch]: rows with an unfinished sequence. Tokens of other rows take no capacity
    of experts.

    Args: as in `prefill`, with the same values; and
      group_size: for experts with capacity, the number of sequences (or beams of one) that are routed together, with
        the capacity of `Routing.capacity_factor_eval`; ideally those of one device. By default each token is a group:
        nothing is dropped, but every expert computes every token. Experts of form "grouped" have no capacity, and
        compute only the tokens routed to them.
    Returns: ({"logits": [batch, vocab]}, updates) for `mtf.lower`, or [batch, beams, vocab]; with `group_size` also
      "dropped", the number of dropped choices in all layers.
    Cost: on one device it reads weights and caches once and writes a token's keys and values in place.
    Raises: as in `prefill`.
    Example:
      >>> import meshlib as mtf
      >>> tiny = mtf.models.preset("llama2-7b").reduced()
      >>> with mtf.Graph():
      ...     program = mtf.lower(*mtf.models.decode_step(tiny, batch=2, cache_length=8))
      >>> mtf.simulate(program).step(tokens=[3, 5])["logits"].shape
      (2, 64)
    """
    serving = _Serving("decode_step", config, batch, cache_length, encoder_length, beams, cache_dtype, scan, group_size)
    return serving.decode()


@dataclass
class _Serving:
    """Builder of one of the two steps."""

    what: str
    config: TransformerConfig
    batch: int
    cache_length: int
    encoder_length: int | None
    beams: int | None
    cache_dtype: str | None
    scan: bool
    group_size: int | None = None  # number of tokens that are routed together

    def __post_init__(self) -> None:
        what, c = self.what, TransformerConfig.checked(self.config, self.what)
        if c.kind == "encoder":
            raise GraphError(f"{at(what)}: {c.name} is an encoder, which predicts no next token")
        for name in ("batch", "cache_length"):
            whole(getattr(self, name), what, name, low=1)
        for name in ("encoder_length", "beams"):
            if getattr(self, name) is not None:
                whole(getattr(self, name), what, name, low=1)
        flag(self.scan, what, "scan")
        if self.cache_dtype is not None:
            choice(self.cache_dtype, what, argument("cache_dtype"), CACHE_DTYPES)
        if c.encoder_decoder != (self.encoder_length is not None):
            wanted = "needs encoder_length" if c.encoder_decoder else "has no encoder, and no encoder_length"
            raise GraphError(f"{at(what)}: {c.name} is of kind {c.kind!r} and {wanted}, got {self.encoder_length}")
        check_positions(c, what, "cache_length", self.cache_length)
        if c.position == "relative" and any(w is not None and w < self.cache_length for w in c.windows):
            raise GraphError(
                f"{at(what)}: {c.name} has windows {c.windows} and relative positions, which caches of windows lack"
            )
        self.sequences = Dimension("batch", self.batch)
        self.hypotheses = None if self.beams is None else Dimension("beams", self.beams)
        if self.group_size is not None:
            c = self._grouped(c, whole(self.group_size, what, "group_size", low=1))
        self.builder = Builder(c, self.sequences, "full", self.scan, training=False)

    def _grouped(self, c: TransformerConfig, size: int) -> TransformerConfig:
        """The config with experts that route this many sequences together."""
        if c.experts is None:
            raise GraphError(f"{at(self.what)}: group_size is for models with experts; {c.name} has none")
        if c.experts.form == "grouped":
            raise GraphError(
                f"{at(self.what)}: group_size is for experts with a capacity; those of {c.name} drop no tokens "
                "(form 'grouped'): leave it out"
            )
        name, count = ("batch", self.batch) if self.beams is None else ("beams", self.beams)
        if count % size:
            raise GraphError(
                f"{at(self.what)}: group_size {size} does not divide {name} {count}: {count} % {size} = {count % size}"
            )
        return c.replace(group_size=size)

    def prefill(self, length: int) -> Step:
        """Build the prefill step."""
        if length > self.cache_length:
            raise GraphError(
                f"{at(self.what)}: length {length} is longer than cache_length {self.cache_length}; "
                f"caches also hold the prompt: use cache_length={length} or more"
            )
        dim = Dimension("length", length)
        tokens, lengths = self._input("tokens", dim), self._input("lengths")
        caches = Caches(self.cache_length, lengths, False, self.cache_dtype, self.hypotheses)
        real = self._prompt_mask(dim, lengths)
        if self.encoder_length is None:
            x = self._decoder(tokens, caches, nonpadding=real)
        else:
            source = Dimension("length", self.encoder_length)
            sources, source_lengths = self._input("sources", source), self._input("source_lengths")
            seen = less(positions_of(Dimension("memory_length", source.size)), source_lengths)
            of_source = self._prompt_mask(source, source_lengths)
            with scope("encoder"):
                memory = self.builder.stack(sources, self.config.encoder_layers, False, mask=seen, nonpadding=of_source)
            x = self._decoder(tokens, caches, memory=memory, memory_mask=seen, nonpadding=real)
            caches.updates.append(assign(self._state("source_lengths"), source_lengths))
        last = gather(x, lengths - 1, dim, name="last")
        begin = lengths if self.hypotheses is None else broadcast(lengths, Shape([self.sequences, self.hypotheses]))
        positions = assign(self._state("positions", self.hypotheses), begin)
        outputs = {"logits": self.builder.logits(last), **self._dropped()}
        return outputs, [*caches.updates, positions]

    def decode(self) -> Step:
        """Build the decode step."""
        token = Dimension(TOKEN, 1)
        dims = [d for d in (self.hypotheses,) if d is not None]
        tokens, parents = self._input("tokens", *dims), self._input("parents", *dims) if dims else None
        held = self._state("positions", *dims)
        positions = held if parents is None else self._of_parents(held, parents)
        caches = Caches(self.cache_length, positions, True, self.cache_dtype, self.hypotheses, parents)
        if self.encoder_length is not None:
            caches.sources = self._state("source_lengths")
        here = reshape(positions, [*positions.shape, token])
        x = self._decoder(
            reshape(tokens, [*tokens.shape, token]),
            caches,
            positions=here,
            source_length=self.encoder_length,
            nonpadding=self._live_mask(here.shape),
        )
        x = reshape(x, [d for d in x.shape if d != token])
        moved = assign_add(held, 1) if parents is None else assign(held, positions + 1)
        outputs = {"logits": self.builder.logits(x)}
        if self.group_size is not None:
            outputs |= self._dropped()
        return outputs, [*caches.updates, moved]

    def _input(self, name: str, *dims: Dimension) -> Tensor:
        return input(name, [self.sequences, *dims], "int32")

    def _dropped(self) -> dict[str, Tensor]:
        """The output "dropped", the number of dropped choices, of a model with experts."""
        if not self.builder.expert_stats:
            return {}
        return {"dropped": add_n([reduce_sum(stats.dropped) for stats in self.builder.expert_stats.values()])}

    def _prompt_mask(self, length: Dimension, lengths: Tensor) -> Tensor | None:
        """Mask of the tokens of prompts, for experts, if there are any."""
        if self.config.experts is None:
            return None
        return less(positions_of(length), lengths, [self.sequences, length])

    def _live_mask(self, tokens: Shape) -> Tensor | None:
        """Mask of the tokens of unfinished sequences, if experts have a capacity."""
        if self.group_size is None:
            return None
        return broadcast(input("live", [self.sequences], "bool"), tokens)

    def _state(self, name: str, *dims: Dimension | None) -> Tensor:
        with scope("serving"):
            return variable(name, [self.sequences, *(d for d in dims if d is not None)], 0, "int32", trainable=False)

    def _of_parents(self, x: Tensor, parents: Tensor) -> Tensor:
        beams = parents.shape[-1]
        of_parents = gather(x, rename_dimension(parents, beams.name, "beams_next"), beams)
        return rename_dimension(of_parents, "beams_next", beams.name)

    def _decoder(self, tokens: Tensor, caches: Caches, **more: Any) -> Tensor:
        with scope("decoder") if self.config.encoder_decoder else nullcontext():
            return self.builder.stack(tokens, self.config.layers, True, caches=caches, **more)


def extend_step(
    config: TransformerConfig,
    batch: int,
    length: int,
    cache_length: int,
    page_size: int | None = None,
    pages: int | None = None,
    cache_dtype: str | None = None,
    each: bool = False,
    scan: bool = True,
) -> tuple[dict[str, Tensor], list[Operation]]:
    """The step that adds up to `length` tokens to each sequence of a running batch.

    Inputs: "tokens" int32 [batch, length], the new tokens of each row, left-aligned; "positions" int32 [batch], the
    position of the first one; "counts" int32 [batch], their number, 0 for an unused row. With pages also "table" int32
    [batch, cache_length / page_size]: the pages of each row's sequence, in order.

    Args:
      config: a decoder without relative positions.
      batch: rows. length: most tokens that a row may add.
      cache_length: positions of a sequence.
      page_size, pages: slots per page, and number of pages, which all rows share, as dim `pages` of
        `pages * page_size` slots. By default each row has its own slots. Rows may share pages of a common prefix, to
        which none of them adds tokens.
      cache_dtype: as in `mtf.models.prefill`.
      each: whether to return the logits of all new tokens instead of the last one of each row.
      scan: as in `transformer`.
    Returns: ({"logits": [batch, vocab]}, updates) for `mtf.lower`, or [batch, length, vocab]; for a model with experts
      also "dropped". Logits of rows without tokens are meaningless.
    Raises: GraphError for an unsupported config, and sizes that do not fit.
    Example:
      >>> import meshlib as mtf
      >>> tiny = mtf.models.preset("llama2-7b").reduced()
      >>> with mtf.Graph():
      ...     step = mtf.lower(*mtf.models.extend_step(tiny, batch=2, length=4, cache_length=8))
      >>> sim = mtf.simulate(step)
      >>> first = sim.step(tokens=[[3, 1, 4, 0], [0] * 4], positions=[0, 0], counts=[3, 0])
      >>> second = sim.step(tokens=[[1, 0, 0, 0], [5, 9, 2, 6]], positions=[3, 0], counts=[1, 4])
      >>> second["logits"].shape
      (2, 64)
    """
    c = TransformerConfig.checked(config, WHAT)
    sizes = {"batch": batch, "length": length, "cache_length": cache_length}
    for name, size in sizes.items():
        whole(size, WHAT, name, low=1)
    if c.kind != "decoder" or c.position == "relative":
        kind = "has relative positions" if c.kind == "decoder" else f"is of kind {c.kind!r}"
        raise GraphError(f"{at(WHAT)}: a running batch needs a decoder without relative positions; {c.name} {kind}")
    check_positions(c, WHAT, "cache_length", cache_length)
    if length > cache_length:
        raise GraphError(f"{at(WHAT)}: length {length} is more than cache_length {cache_length}")
    if cache_dtype is not None:
        choice(cache_dtype, WHAT, argument("cache_dtype"), CACHE_DTYPES)
    flag(each, WHAT, "each"), flag(scan, WHAT, "scan")
    rows, tokens_dim = Dimension("batch", batch), Dimension("length", length)
    tokens = input("tokens", [rows, tokens_dim], "int32")
    positions, counts = (input(name, [rows], "int32") for name in ("positions", "counts"))
    paged: dict[str, Any] = {}
    if _has_pages(page_size, pages, cache_length):
        assert page_size is not None
        blocks = Dimension("blocks", cache_length // page_size)
        paged = {"table": input("table", [rows, blocks], "int32"), "pages": pages, "page_size": page_size}
    caches = RowCaches(cache_length, positions, True, cache_dtype, counts=counts, tokens=tokens_dim, **paged)
    real, here = less(positions_of(tokens_dim), counts, [rows, tokens_dim]), caches.here()
    if c.position == "learned":
        here = where(real, here, 0)  # the table of positions may end before the padding of a chunk does
    builder = Builder(c, rows, "full", scan, training=False)
    nonpadding = None if c.experts is None else real
    x = builder.stack(tokens, c.layers, True, caches=caches, positions=here, nonpadding=nonpadding)
    if not each:
        x = gather(x, maximum(counts - 1, 0), tokens_dim, name="last")
    outputs = {"logits": builder.logits(x)}
    if builder.expert_stats:
        outputs["dropped"] = add_n(
            [reduce_sum(stats.dropped, output_shape=Shape([])) for stats in builder.expert_stats.values()]
        )
    return outputs, caches.updates


def _has_pages(page_size: int | None, pages: int | None, cache_length: int) -> bool:
    """True if rows share pages. Raises: GraphError for sizes that do not fit."""
    if (page_size is None) != (pages is None):
        raise GraphError(f"{at(WHAT)}: give page_size and pages, or neither; got {page_size} and {pages}")
    if page_size is None or pages is None:
        return False
    whole(page_size, WHAT, "page_size", low=1), whole(pages, WHAT, "pages", low=1)
    if cache_length % page_size:
        rest = cache_length % page_size
        raise GraphError(
            f"{at(WHAT)}: page_size must divide cache_length: {cache_length} % {page_size} = {rest}; "
            f"use cache_length={cache_length - rest + page_size}"
        )
    return True
