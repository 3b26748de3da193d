"""`extend_step`: the step of a running batch, which adds any number of tokens to each of its sequences.

Prefill of a prompt, whole or in chunks, decoding a token and verifying drafts are one program: rows differ in the
number of tokens that they add, and in their positions. The host assigns sequences to rows, and pages to sequences, from
step to step (`meshlib.generation.server`).
"""

from __future__ import annotations

from typing import Any

from layouts import Dimension, Shape
from meshlib.core.arguments import at, choice, flag, whole
from meshlib.core.errors import GraphError
from meshlib.core.graph import Operation, Tensor
from meshlib.models.caches import CACHE_DTYPES
from meshlib.models.config import TransformerConfig
from meshlib.models.model import Builder
from meshlib.models.row_caches import RowCaches
from meshlib.ops.control.sources import input
from meshlib.ops.movement.indexing import gather
from meshlib.ops.movement.indexing import range as positions_of
from meshlib.ops.pointwise.binary import add_n, less, maximum
from meshlib.ops.pointwise.reductions import reduce_sum
from meshlib.ops.pointwise.selection import where

WHAT = "extend_step"


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
    if c.position == "learned" and c.max_length and cache_length > c.max_length:
        raise GraphError(f"{at(WHAT)}: {c.name} has {c.max_length} positions, but cache_length is {cache_length}")
    if length > cache_length:
        raise GraphError(f"{at(WHAT)}: length {length} is more than cache_length {cache_length}")
    if cache_dtype is not None:
        choice(cache_dtype, WHAT, "cache_dtype", CACHE_DTYPES)
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
