"""Caches of a running batch: each sequence has its own position, and adds any number of tokens.

Every layer caches all positions, even with a window: tokens of a chunk may see positions that a ring would have
overwritten. Either each row of the batch has its own slots, or all share pages: a page is `page_size` consecutive slots
of the dim `pages`, and a table has the pages of each sequence, in order. Sequences may share the pages of a common
prefix.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from layouts import Dimension
from meshlib.core.graph import Tensor
from meshlib.layers.attention import Cache, Held
from meshlib.models.caches import SLOTS, CachedArray, Caches, length_of
from meshlib.ops.movement.dynamic_slices import update_rows, update_slice
from meshlib.ops.movement.indexing import gather
from meshlib.ops.movement.indexing import range as positions_of
from meshlib.ops.movement.shape import broadcast, rename_dimension, transpose
from meshlib.ops.pointwise.binary import floordiv, greater, less, less_equal, logical_and, mod
from meshlib.ops.pointwise.selection import where

PAGES = "pages"


@dataclass(eq=False)
class RowCaches(Caches):
    """Caches whose rows are written from different positions.

    Args:
      counts: int32 [batch]: number of tokens that each row adds, from `positions` on; may be 0.
      tokens: the dim of the new tokens.
      table: int32 [batch, blocks]: the pages of each sequence; pages, page_size: number of pages, and slots per page.
    """

    counts: Tensor | None = None
    tokens: Dimension | None = None
    table: Tensor | None = None
    pages: int = 0
    page_size: int = 0
    _windows: dict[int | None, Tensor] = field(default_factory=dict)
    _indices: dict[str, Tensor] = field(default_factory=dict)

    def of(self, window: int | None) -> Cache:
        """The cache of a layer's self-attention."""
        return lambda k, v: self._rows(k, v, window)

    @property
    def slots(self) -> Dimension:
        """The dim of the positions of a sequence."""
        return Dimension(SLOTS, self.length)

    def here(self) -> Tensor:
        """int32 [batch, tokens]: the position of each new token."""
        assert self.tokens is not None
        with self.positions.graph:
            return self.positions + positions_of(self.tokens)

    def _rows(self, k: Tensor, v: Tensor, window: int | None) -> Held:
        parts = [("keys", k)] if k is v else [("keys", k), ("values", v)]
        seen = []
        for name, x in parts:
            stored = CachedArray.new(name, x, self.slots, self) if self.table is None else self._paged(name, x)
            written = [(held, self._with_rows(held, part)) for held, part in stored.parts(x)]
            self._written += written
            seen.append(stored.read([self._in_order(value) for _, value in written]))
        return Held(seen[0], seen[-1], SLOTS, self._visible_slots(window))

    def _paged(self, name: str, x: Tensor) -> CachedArray:
        """New variables for tensors like x, [batch, ..., length, heads ..., channels]: [pages, heads ..., channels]."""
        dims = [d for d in x.shape if d not in (length_of(x), x.shape[0])]
        pages = Dimension(PAGES, self.pages * self.page_size)
        return CachedArray.declared(name, [*dims[:-1], pages, dims[-1]], x.dtype.name, self)

    def _with_rows(self, held: Tensor, part: Tensor) -> Tensor:
        """New values of a variable with all rows' new tokens; slots behind a row's last one are not visible."""
        if self.table is None:
            return update_slice(held, part, self.slots, self._first_slots(), out_of_range="drop")
        length = length_of(part)
        batch = rename_dimension(rename_dimension(part, length.name, "new_tokens"), part.shape[0].name, "new_rows")
        return update_rows(held, batch, self._written_at(), PAGES, out_of_range="drop")

    def _first_slots(self) -> Tensor:
        """int32 [batch]: the slot of each row's first new token, out of range if there is none."""
        if "begin" not in self._indices:
            assert self.counts is not None
            with self.positions.graph:
                self._indices["begin"] = where(greater(self.counts, 0), self.positions, self.length)
        return self._indices["begin"]

    def _written_at(self) -> Tensor:
        """int32 [new_rows, new_tokens]: the slot of each new token, out of range for tokens not to be written."""
        if "written" not in self._indices:
            here = self.here()
            assert self.counts is not None
            assert self.tokens is not None
            with here.graph:
                real = less(positions_of(self.tokens), self.counts, here.shape)
            at_slot = where(real, self._slot(here), self.pages * self.page_size, here.shape)
            batch, tokens = here.shape
            at_slot = rename_dimension(rename_dimension(at_slot, tokens.name, "new_tokens"), batch.name, "new_rows")
            self._indices["written"] = at_slot
        return self._indices["written"]

    def _slot(self, position: Tensor) -> Tensor:
        """The slot of a position of each sequence."""
        assert self.table is not None
        blocks = self.table.shape[-1]
        page = gather(self.table, floordiv(position, self.page_size), blocks, out_of_range="zero")
        return transpose(page, position.shape) * self.page_size + mod(position, self.page_size)

    def _in_order(self, value: Tensor) -> Tensor:
        """The cache of each sequence, with slots ordered by position."""
        if self.table is None:
            return value
        if "read" not in self._indices:
            with self.table.graph:
                all_slots = broadcast(positions_of(self.slots), [self.table.shape[0], self.slots])
            self._indices["read"] = self._slot(all_slots)
        return gather(value, self._indices["read"], value.shape.dim(PAGES), out_of_range="zero")

    def _visible_slots(self, window: int | None) -> Tensor:
        """bool [batch, tokens, slots]: mask of the slots that each new token sees; created once, outside loops."""
        if window not in self._windows:
            here = self.here()
            with here.graph:
                slot = positions_of(self.slots)
                shape = [*here.shape, self.slots]
                seen = less_equal(slot, here, shape)
                if window is not None:
                    seen = logical_and(seen, greater(slot, here - window, shape))
            self._windows[window] = seen
        return self._windows[window]
