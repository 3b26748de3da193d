"""The chain from a source to batches: `source.shuffle(seed).map(fn).batch(128).repeat().prefetch(2)`.

Each stage returns a new `Data` and does not change the old one. A `Data` is a plan, executed by an iterator. A batch is
determined by the number of its first draw (`order`), and the content of a batcher by draw numbers: these are the whole
state of an iterator.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hardware.unknown_names import Attributes
from meshlib.core.arguments import at
from meshlib.core.errors import DataError, FeedError, nearest
from meshlib.core.text import counted
from meshlib.data.batching import SOURCES, TARGETS, TOO_LONG, Batching, Example
from meshlib.data.execution import KINDS, pickled
from meshlib.data.feed import Feed
from meshlib.data.sources import Source, SourceSlice

REMAINDERS = ("drop", "pad")


@dataclass(frozen=True)
class Map:
    """A function over examples, or over batches; `filters`: a predicate of examples to keep."""

    function: Callable[..., Any]
    seed: int | None = None
    filters: bool = False

    @property
    def name(self) -> str:
        return getattr(self.function, "__qualname__", type(self.function).__name__)

    def __str__(self) -> str:
        seeded = "" if self.seed is None else f", seed={self.seed}"
        return f"{'filter' if self.filters else 'map'}({self.name}{seeded})"

    def __call__(self, example: Example, draw: int, stage: int, what: Callable[[], str]) -> Example | None:
        """The mapped example; None if it is filtered out."""
        try:
            if self.seed is None:
                mapped = self.function(example)
            else:
                counter = np.array([0, 0, 0, stage], np.uint64)
                random = np.random.Philox(key=np.array([self.seed, draw], np.uint64), counter=counter)
                mapped = self.function(example, np.random.Generator(random))
        except (Exception, SystemExit) as fault:  # which would end a worker, or the program, without a message
            raise DataError(
                f"data: {self} failed at {what()}: {type(fault).__name__}: {fault}; see its traceback above"
            ) from fault
        if self.filters:
            return example if mapped else None
        if not isinstance(mapped, dict):
            raise DataError(f"data: {self} must return a dict of fields, returned {type(mapped).__name__} at {what()}")
        return mapped


@dataclass(frozen=True, eq=False)
class Data(Attributes):
    """Examples and the stages applied to them; created by `mtf.data.arrays`, `records`, `idx`, `text` and `folder`.

    Iterate over it, `for batch in data`, or keep the iterator, `feed = iter(data)`, which has a `state()`.

    Example:
      >>> import numpy as np
      >>> import meshlib as mtf
      >>> data = mtf.data.arrays({"x": np.arange(6)}).shuffle(seed=0).batch(3)
      >>> [batch["x"].shape for batch in data], len(mtf.data.arrays({"x": np.arange(6)}))
      ([(3,), (3,)], 6)
    """

    source: Source
    seed: int | None = None
    buffer: int | None = None
    maps: tuple[Map, ...] = ()
    workers: int = 0
    kind: str = "threads"  # kind of workers
    batching: Batching | None = None
    of_batches: tuple[Map, ...] = ()
    epochs: int | None = 1
    joined: bool = False  # whether batches continue across the end of an epoch
    ahead: int = 0

    def __repr__(self) -> str:
        return f"<Data: {counted(len(self.source), 'example')} from {type(self.source).__name__}>"

    # ------------------------------------------------------------ stages

    def take(self, count: int) -> Data:
        """Only the first `count` examples of the source, before shuffling: to hold some out."""
        return self._part("take", 0, whole_number("take", "count", count, 1))

    def skip(self, count: int) -> Data:
        """All but the first `count` examples of the source."""
        return self._part("skip", whole_number("skip", "count", count, 0), len(self.source))

    def shuffle(self, seed: int, buffer: int | None = None) -> Data:
        """Shuffle each epoch, in an order determined by seed and epoch alone.

        Args:
          seed: from 0 to 2**64 - 1.
          buffer: shuffle within runs of this many examples, for files with slow random access, as on remote disks;
            required for compressed ones. By default all examples of an epoch are shuffled.
        """
        _once("shuffle", self.seed is not None)
        _before("shuffle", self.batching)
        if whole_number("shuffle", "seed", seed, 0) >= 2**64:
            raise FeedError(f"{at('data.shuffle')}: seed must be less than 2**64, got {seed}")
        if buffer is not None:
            whole_number("shuffle", "buffer", buffer, 1)
        elif self.source.sequential:
            raise FeedError(
                f"{at('data.shuffle')}: {self.source.name} is compressed, so it is read from its beginning; "
                "say within how many neighbours to shuffle, as in buffer=10_000, all of which are held in memory"
            )
        return replace(self, seed=int(seed), buffer=buffer)

    def map(self, function: Callable[..., Example], *, workers: int | None = None, seed: int | None = None) -> Data:
        """Map each example to `function(example)`; after `batch`, each batch.

        Args:
          function: from a dict of fields to a dict of fields.
          workers: number of workers that read and map, by default 0; the order is the same. See `parallel`.
          seed: the function also gets a random generator, `function(example, rng)`, determined by seed, epoch and
            position: resumed runs draw the same numbers.
        """
        return self._mapped("map", Map(_function("map", function), _seed("map", seed)), workers)

    def filter(self, function: Callable[..., bool], *, workers: int | None = None) -> Data:
        """Keep only examples for which `function(example)` is true."""
        _before("filter", self.batching)
        return self._mapped("filter", Map(_function("filter", function), filters=True), workers)

    def batch(
        self,
        size: int,
        remainder: str = "drop",
        *,
        mask: str = "mask",
        pad: Mapping[str, int] | None = None,
        pack: Mapping[str, int] | None = None,
        buckets: Mapping[str, Sequence[int]] | None = None,
        too_long: str = "error",
        segments: Mapping[str, tuple[str, str]] | None = None,
    ) -> Data:
        """Batches of static shape: `size` rows, with fields stacked.

        Args:
          size: rows per batch, over all cores.
          remainder: for an epoch's last examples, "drop", or "pad": fill the batch, and add to every batch the float32
            array `mask`, 1 for valid rows.
          pad: sequence fields, with the length to which they are zero-padded.
          pack: the same, with several short examples per row.
          buckets: fields with several ascending lengths: each batch has examples of one bucket, and needs a program
            lowered for its length.
          too_long: treatment of longer sequences: "error", "cut" or "drop".
          segments: for a padded or packed field the names of two additional int32 arrays: the number of the example in
            its row from 1 on, 0 for padding, and positions in each. By default "segment_ids" and "segment_positions"
            for the first field, "source_segment_ids" and "source_positions" for "sources": the inputs of models.
        Raises: FeedError for invalid arguments; DataError for an example that does not fit, when it is read.
        """
        _once("batch", self.batching is not None)
        what = "batch"
        whole_number(what, "size", size, 1)
        _choice(what, "remainder", remainder, REMAINDERS)
        _choice(what, "too_long", too_long, TOO_LONG)
        given = [(n, v) for n, v in (("pad", pad), ("pack", pack), ("buckets", buckets)) if v is not None]
        if len(given) > 1:
            raise FeedError(
                f"{at('data.batch')}: give one of pad, pack and buckets, got {' and '.join(n for n, _ in given)}"
            )
        lengths = _lengths(*given[0]) if given else None
        if lengths is not None and segments is None:
            segments = _segments_of(lengths)
        if not isinstance(mask, str) or not mask:
            raise FeedError(f"{at('data.batch')}: mask must be the name of an array, got {mask!r:.80}")
        if not _names_segments(segments, lengths):
            raise FeedError(
                f"{at('data.batch')}: segments are of fields of pad, pack or buckets the names of two arrays, as in "
                f"{{'tokens': ('segment_ids', 'segment_positions')}}, got {segments!r:.80}"
            )
        batching = Batching(int(size), remainder, mask, lengths, pack is not None, too_long, segments)
        if not self.joined and remainder == "drop" and lengths is None and len(self.source) < size:
            raise FeedError(
                f"{at('data.batch')}: a batch of {size} is larger than the {len(self.source)} examples of "
                f"{self.source.name}, and 'drop' would leave nothing; use a smaller size, or remainder='pad'"
            )
        return replace(self, batching=batching)

    def repeat(self, epochs: int | None = None) -> Data:
        """Repeat for `epochs`, by default for ever. Before `batch`, batches continue across the end of an epoch."""
        if epochs is not None:
            whole_number("repeat", "epochs", epochs, 1)
        return replace(self, epochs=epochs, joined=self.joined or self.batching is None)

    def parallel(self, workers: int, kind: str = "threads") -> Data:
        """Workers that read, decode and map examples; the batches are the same.

        Args:
          workers: number of workers.
          kind: "threads" help if functions wait or release Python's lock; "processes" always, but each imports the
            library and loads the data at its start, functions must be defined at module level, and a script needs
            `if __name__ == "__main__":`.
        """
        _choice("parallel", "kind", kind, KINDS)
        parallel_data = replace(self, workers=whole_number("parallel", "workers", workers, 0), kind=kind)
        if kind == "processes":
            pickled(parallel_data)
        return parallel_data

    def prefetch(self, count: int = 2) -> Data:
        """Prepare this many batches ahead in a thread."""
        return replace(self, ahead=whole_number("prefetch", "count", count, 0))

    # ------------------------------------------------------------ properties

    def __len__(self) -> int:
        """The number of examples per epoch, including those that a filter or a fault drops."""
        return len(self.source)

    @property
    def mask(self) -> str | None:
        """The name of the array that is 1 for valid rows; None if batches are not padded."""
        return self.batching.mask if self.batching is not None and self.batching.remainder != "drop" else None

    @property
    def per_epoch(self) -> int:
        """Batches per epoch, if known in advance: one example per row, none dropped."""
        batching = self.batching
        if batching is None or batching.lengths is not None or any(m.filters for m in self.maps):
            raise FeedError(
                f"{at('data.per_epoch')}: how many batches {self} makes of an epoch depends on the examples"
            )
        return len(self) // batching.size if batching.remainder == "drop" else -(-len(self) // batching.size)

    def __str__(self) -> str:
        stages = [f"{self.source.name}: {counted(len(self.source), 'example')}"]
        if self.seed is not None:
            stages.append(f"shuffle({self.seed}{'' if self.buffer is None else f', buffer={self.buffer}'})")
        stages += map(str, self.maps)
        stages += ["repeat"] * self.joined
        if self.batching is not None:
            stages.append(str(self.batching))
        stages += map(str, self.of_batches)
        return ", ".join(stages)

    def __iter__(self) -> Feed:
        return Feed(self)

    def _part(self, what: str, begin: int, end: int) -> Data:
        if self.seed is not None or self.maps:
            raise FeedError(f"{at(f'data.{what}')}: it applies to the source; write it before shuffle and map")
        _before(what, self.batching)
        end = min(end, len(self.source))
        if begin >= end:
            total, name = len(self.source), self.source.name
            raise FeedError(
                f"{at(f'data.{what}')}: count must be less than the {total} examples of {name}, got {begin}"
            )
        return replace(self, source=SourceSlice(self.source, begin, end))

    def _mapped(self, what: str, map_: Map, workers: int | None) -> Data:
        if workers is not None:
            whole_number(what, "workers", workers, 0)
        if self.batching is not None:
            if workers:
                raise FeedError(f"{at(f'data.{what}')}: workers map examples; write the map before batch")
            return replace(self, of_batches=(*self.of_batches, map_))
        return replace(self, maps=(*self.maps, map_), workers=max(self.workers, workers or 0))

    def examples(self, draws: Sequence[int], numbers: Sequence[int]) -> list[Example | None]:
        """The examples of these draws, read and mapped; None for dropped ones."""
        drawn = self.source.read(numbers)
        for k, (draw, number) in enumerate(zip(draws, numbers, strict=True)):
            example = drawn[k]
            for stage, mapped in enumerate(self.maps):
                if example is None:
                    break
                example = mapped(example, draw, stage, lambda number=number: self.source.where(number))  # type: ignore[misc]
            if example is not None and self.batching is not None:
                example = self.batching.fitting(draw, example)
            drawn[k] = example
        return drawn


# ---------------------------------------------------------------- checks


def whole_number(what: str, name: str, value: object, least: int) -> int:
    """`value` as an int of at least `least`; `what` is a function of `mtf.data`."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or int(value) < least:
        raise FeedError(f"{at(f'data.{what}')}: {name} must be an integer >= {least}, got {value!r:.80}")
    return int(value)


def _choice(what: str, name: str, value: object, options: tuple[str, ...]) -> None:
    if not isinstance(value, str) or value not in options:
        words = " or ".join(map(repr, options))
        raise FeedError(f"{at(f'data.{what}')}: {name} must be {words}, got {value!r:.80}{nearest(value, options)}")


def _names_segments(segments: object, lengths: Mapping[str, tuple[int, ...]] | None) -> bool:
    if segments is None:
        return True
    return isinstance(segments, Mapping) and all(
        field_name in (lengths or {})
        and isinstance(names, tuple | list)
        and len(names) == 2
        and all(isinstance(n, str) for n in names)
        for field_name, names in segments.items()
    )


def _once(what: str, there: bool) -> None:
    if there:
        raise FeedError(f"{at(f'data.{what}')}: the data have a {what} already; start from the data without it")


def _before(what: str, batching: Batching | None) -> None:
    if batching is not None:
        raise FeedError(f"{at(f'data.{what}')}: it applies to examples; write it before batch")


def _function(what: str, value: object) -> Callable[..., Any]:
    if not callable(value):
        raise FeedError(f"{at(f'data.{what}')}: expected a function of an example, got {value!r:.80}")
    return value


def _seed(what: str, value: int | None) -> int | None:
    if value is not None and whole_number(what, "seed", value, 0) >= 2**64:
        raise FeedError(f"{at(f'data.{what}')}: seed must be less than 2**64, got {value}")
    return None if value is None else int(value)


def _lengths(name: str, value: object) -> dict[str, tuple[int, ...]]:
    """The lengths of each field in `pad`, `pack` or `buckets`: equally many, ascending."""
    lengths = {} if not isinstance(value, Mapping) else {
        str(f): tuple(v) if isinstance(v, Sequence) else (v,) for f, v in value.items()
    }  # fmt: skip
    for field_name, sizes in lengths.items():
        for n in sizes:
            whole_number("batch", f"{name}['{field_name}']", n, 1)
    wrong = not lengths or len({len(v) for v in lengths.values()}) > 1 or not all(lengths.values())
    if wrong or any(list(v) != sorted(set(v)) for v in lengths.values()):
        raise FeedError(
            f"{at('data.batch')}: {name} names fields and their lengths, as many ascending ones of each, "
            f"got {value!r:.80}"
        )
    return lengths


def _segments_of(lengths: Mapping[str, object]) -> dict[str, tuple[str, str]]:
    """The default names of segment arrays: those of models, for the first field and for sources."""
    first = next((n for n in lengths if n != "sources"), None)
    segments = {first: TARGETS} if first else {}
    return {**segments, **({"sources": SOURCES} if "sources" in lengths else {})}
