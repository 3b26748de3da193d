"""Decoder caches: keys and values of past tokens per layer, as variables updated in place.

A layer without a window caches all positions, up to `cache_length`; one with a window of w caches the last w, as a ring
buffer: position p is in slot p mod w, so that a new token overwrites one outside the window. The slots of both are the
dim `cache_length`, which layouts may split, like `source_length`, the slots of an encoder's sequence. For latent
attention the cache has the latents, concatenated with the shared key. Each sequence has its own position.

In eight bits (int8, fp8) each token has a float32 scale per head for keys and for values, and the kernel dequantises on
read.

In a running batch every layer caches all positions, even with a window: tokens of a chunk may see positions that a ring
would have overwritten. Either each row of the batch has its own slots, or all share pages: a page is `page_size`
consecutive slots of the dim `pages`, and a table has the pages of each sequence, in order. Sequences may share the
pages of a common prefix.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from layouts import Dimension, Shape
from meshlib.core.graph import Operation, Tensor, scope
from meshlib.layers.attention import Cache, Held
from meshlib.ops.contraction.quantized import quantize
from meshlib.ops.control.sources import variable
from meshlib.ops.control.state import assign
from meshlib.ops.movement.dynamic_slices import update_rows, update_slice
from meshlib.ops.movement.indexing import gather
from meshlib.ops.movement.indexing import range as positions_of
from meshlib.ops.movement.shape import broadcast, rename_dimension, transpose
from meshlib.ops.pointwise.arithmetic import floordiv, greater, less, less_equal, logical_and, mod, where
from meshlib.ops.pointwise.casts import cast

SLOTS, SOURCE = "cache_length", "source_length"
CACHE_DTYPES = ("float32", "bfloat16", "float64", "int8", "float8_e4m3fn", "float8_e5m2")
_SCALED = CACHE_DTYPES[3:]
TOKEN = "token"  # the dim of the single decoded token
LENGTHS = ("memory_length", f"memory_{TOKEN}", SOURCE)
PAGES = "pages"


@dataclass(eq=False)
class Caches:
    """The caches of a stack of layers while a step is built.

    Args:
      length: positions cached by layers without a window.
      positions: int32 [batch] (and beams): position of the decoded token, or for a prefill the number of tokens.
      decoding: whether one token is added, instead of a prompt.
      dtype: dtype of the caches; by default that of keys and values.
      beams: hypotheses per sequence; a prefill writes the same to all.
      parents: int32 [batch, beams]: the hypothesis whose cache each one continues.
      sources: int32 [batch]: number of tokens of the encoder's sequence, for an encoder-decoder.
    """

    length: int
    positions: Tensor
    decoding: bool
    dtype: str | None = None
    beams: Dimension | None = None
    parents: Tensor | None = None
    sources: Tensor | None = None
    updates: list[Operation] = field(default_factory=list)
    _written: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # variable, new value
    _masks: dict[str, Tensor] = field(default_factory=dict)

    # ------------------------------------------------------------ used by layers

    def of(self, window: int | None) -> Cache:
        """The cache of a layer's self-attention."""
        ring = window is not None and window <= self.length
        slots = Dimension(SLOTS, window if window is not None and ring else self.length)
        return lambda k, v: self._held(k, v, slots, ring)

    def of_sources(self, k: Tensor, v: Tensor) -> None:
        """Write keys and values of the encoder's sequence to the cache of a cross-attention."""
        for name, x in (("keys", k), ("values", v)):
            length = length_of(x)
            held = CachedArray.new(name, rename_dimension(x, length.name, SOURCE), Dimension(SOURCE, length.size), self)
            self._written += held.replaced(rename_dimension(x, length.name, SOURCE))

    def held_sources(self, like: Tensor, dims: Sequence[Dimension], length: int) -> Held:
        """The cached keys and values of the encoder's sequence, with these dims, in the dtype of `like`."""
        slots = Dimension(SOURCE, length)
        shape = [*dims[:-1], slots, dims[-1]]
        keys, values = (CachedArray.declared(n, shape, like.dtype.name, self).read() for n in ("keys", "values"))
        return Held(keys, values, SOURCE, self.mask(slots))

    def mask(self, slots: Dimension) -> Tensor:
        """Bool mask of the slots that the token sees; created once, outside loops."""
        key = str(slots)
        if key not in self._masks:
            if slots.name == SOURCE:
                assert self.sources is not None
                with self.sources.graph:
                    self._masks[key] = less(positions_of(slots), self.sources)
            else:
                with self.positions.graph:
                    # The token is already in its slot. A ring is full once its size is reached, and all of it is
                    # visible.
                    self._masks[key] = less_equal(positions_of(slots), self.positions)
        return self._masks[key]

    # ------------------------------------------------------------ used by the builder

    def take(self) -> list[tuple[Tensor, Tensor]]:
        """The variables written since the last call, with their new values."""
        written, self._written = self._written, []
        return written

    def commit(self, written: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Assign the new values at the end of the step."""
        self.updates += [assign(_variable_of(held), value) for held, value in written]

    def _held(self, k: Tensor, v: Tensor, slots: Dimension, ring: bool) -> Held | None:
        parts = [("keys", k)] if k is v else [("keys", k), ("values", v)]
        seen = []
        for name, x in parts:
            stored = CachedArray.new(name, x, slots, self)
            if self.decoding:
                written = stored.with_token(x, ring)
                seen.append(stored.read([value for _, value in written]))
            else:
                written = stored.with_prompt(x)
            self._written += written
        return Held(seen[0], seen[-1], slots.name, self.mask(slots)) if self.decoding else None


@dataclass(frozen=True)
class CachedArray:
    """One cached array: its variable, and in eight bits the variable of its scales."""

    slots: Dimension
    channels: Dimension
    dtype: object  # dtype after reading
    caches: Caches
    variables: tuple[Tensor, ...]

    @classmethod
    def new(cls, name: str, x: Tensor, slots: Dimension, caches: Caches) -> CachedArray:
        """New variables for tensors like x, [batch, ..., length, heads ..., channels]: [batch, ..., heads ..., slots,
        channels]."""
        length = length_of(x)
        dims = [d for d in x.shape if d != length]
        if caches.beams is not None and slots.name != SOURCE and caches.beams not in dims:
            dims.insert(1, caches.beams)
        return cls.declared(name, [*dims[:-1], slots, dims[-1]], x.dtype.name, caches)

    @classmethod
    def declared(cls, name: str, shape: Sequence[Dimension], dtype: str, caches: Caches) -> CachedArray:
        """Its variables in the current scope."""
        stored_dtype = dtype if caches.dtype is None else caches.dtype
        with scope("cache"):
            held = [variable(name, shape, 0, stored_dtype, trainable=False)]
            if stored_dtype in _SCALED:
                held.append(variable(f"{name}_scale", shape[:-1], 0.0, "float32", trainable=False))
        return cls(shape[-2], shape[-1], dtype, caches, tuple(held))

    def with_token(self, x: Tensor, ring: bool) -> list[tuple[Tensor, Tensor]]:
        """New values of the variables with one token in its slot, and caches of hypotheses reordered by parents.

        A ring wraps around; past the last slot of any other cache the step raises FeedError.
        """
        place = mod(self.caches.positions, self.slots.size) if ring else self.caches.positions
        updated = []
        for held, part in self.parts(x):
            before = held if self.caches.parents is None else _reordered(held, self.caches.parents)
            updated.append((held, update_slice(before, part, self.slots, place)))
        return updated

    def with_prompt(self, x: Tensor) -> list[tuple[Tensor, Tensor]]:
        """New values of the variables with the tokens of a prompt; slots past its end are never read."""
        if length_of(x).size <= self.slots.size:
            return [(held, update_slice(held, part, self.slots, 0)) for held, part in self.parts(x)]
        return self.replaced(self._last(x))

    def replaced(self, x: Tensor) -> list[tuple[Tensor, Tensor]]:
        """New values of the variables from x, which has all slots."""
        return [(held, transpose(part, held.shape)) for held, part in self.parts(x)]

    def read(self, values: Sequence[Tensor] | None = None) -> Tensor:
        """The variables, or their new values, dequantised for the kernel."""
        held, *scales = self.variables if values is None else values
        if held.dtype.name == self.dtype:
            return held
        wide = cast(held, self.dtype)
        return wide * cast(scales[0], self.dtype) if scales else wide

    def _last(self, x: Tensor) -> Tensor:
        """The last tokens of each sequence in ring order: slot s has the last position that is s mod w."""
        length, lengths = length_of(x), self.caches.positions
        s = positions_of(self.slots)
        behind = floordiv(lengths - 1 - s, self.slots.size)
        return gather(x, behind * self.slots.size + s, length, out_of_range="zero")

    def parts(self, x: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Each variable with the part of x, or its scales, to write into it."""
        scaled = len(self.variables) == 2
        parts = quantize(x, self.channels, self.variables[0].dtype) if scaled else (x,)
        spread = []
        for held, new_part in zip(self.variables, parts, strict=True):
            part = cast(new_part, held.dtype)
            missing = [d for d in held.shape if d not in part.shape and d == self.caches.beams]
            wide = broadcast(part, Shape([part.shape[0], *missing, *part.shape[1:]])) if missing else part
            spread.append((held, wide))
        return spread


def length_of(x: Tensor) -> Dimension:
    """The dim of the tokens that are cached."""
    (length,) = (d for d in x.shape if d.name in LENGTHS)
    return length


def _reordered(x: Tensor, parents: Tensor) -> Tensor:
    """x with each hypothesis replaced by its parent."""
    beams = parents.shape[-1]
    chosen = rename_dimension(parents, beams.name, f"{beams.name}_next")
    chosen_beams = gather(x, chosen, x.shape.dim(beams.name))
    return transpose(rename_dimension(chosen_beams, f"{beams.name}_next", beams.name), x.shape)


def _variable_of(value: Tensor) -> Tensor:
    """The variable of which this is the slice in a loop body."""
    while (outer := value.graph.outer_of(value)) is not None:
        value = outer
    return value


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
