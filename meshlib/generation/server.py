"""A completion server with continuous batching: sequences join and leave the running batch between steps.

Each step is one run of `mtf.models.extend_step`: a wide one, in which some rows read the next chunk of their prompts
while others decode a token, or a narrow one, in which all decode a token or verify drafts. A completion depends only on
its prompt: not on its row, other sequences, chunks, pages or the layout.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hardware import Slice
from layouts.mesh import MeshLike
from meshlib.core.arguments import at, bounded, number, whole
from meshlib.core.errors import GraphError
from meshlib.core.graph import Graph
from meshlib.core.text import counted
from meshlib.generation.generator import State, give_parameters
from meshlib.generation.sampling import Sampling, repeated
from meshlib.generation.tokens import ByteTokenizer, Stops, Tokenizer, encoded
from meshlib.lowering import Program, lower
from meshlib.models.config import TransformerConfig
from meshlib.models.serving import extend_step
from meshlib.simulation import Simulation, simulate

WHAT = "Server"
Drafts = Callable[[Sequence[int], int], Sequence[int]]


class Pages:
    """Pages allocated to sequences; those of a common prefix are shared.

    Free pages keep their content until they are reused, least recently used first.

    >>> pages = Pages(count=4, size=2)
    >>> first = pages.take([1, 2, 3, 4, 5], positions=6)
    >>> pages.filled(first[0], [1, 2, 3, 4, 5])
    >>> second = pages.take([1, 2, 9], positions=4)
    >>> second[0][:1] == first[0][:1], second[1], pages.free
    (True, 2, 0)
    >>> pages.take([7], positions=2) is None
    True
    """

    def __init__(self, count: int, size: int) -> None:
        self.size = size
        self._users = [0] * count
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(count))
        self._beginning: dict[int, tuple[int, ...]] = {}  # for a full page, all tokens up to its end
        self._holding: dict[tuple[int, ...], int] = {}

    @property
    def free(self) -> int:
        """Free pages."""
        return len(self._free)

    def take(self, prompt: Sequence[int], positions: int) -> tuple[list[int], int] | None:
        """Pages for `positions` of a sequence that begins with `prompt`, or None if too few are free.

        Returns: the pages in order, and the number of prompt tokens already in them; never all of them.
        """
        shared: list[int] = []
        while (end := (len(shared) + 1) * self.size) < len(prompt):
            page = self._holding.get(tuple(prompt[:end]))
            if page is None:
                break
            shared.append(page)
        more = -(-positions // self.size) - len(shared)
        if more > len(self._free) - sum(page in self._free for page in shared):
            return None
        for page in shared:
            self._free.pop(page, None)
            self._users[page] += 1
        own = [self._free.popitem(last=False)[0] for _ in range(more)]
        for page in own:
            self._users[page] = 1
            beginning = self._beginning.pop(page, None)
            if beginning is not None and self._holding.get(beginning) == page:
                del self._holding[beginning]
        return [*shared, *own], len(shared) * self.size

    def filled(self, pages: Sequence[int], tokens: Sequence[int]) -> None:
        """Record that a sequence's pages contain these tokens, for later sequences with the same prefix."""
        for n, page in enumerate(pages[: len(tokens) // self.size]):
            if page not in self._beginning:
                beginning = tuple(tokens[: (n + 1) * self.size])
                self._beginning[page] = beginning
                self._holding.setdefault(beginning, page)

    def give_back(self, pages: Sequence[int]) -> None:
        """Free the pages of a finished sequence."""
        for page in pages:
            self._users[page] -= 1
            if not self._users[page]:
                self._free[page] = None


@dataclass(frozen=True)
class Completion:
    """A server's completion of a prompt.

    Attributes:
      request: its number, from 0 in order of submission.
      tokens, text: the completion without its stop sequence; the text is "" without a tokenizer.
      ended: whether a stop sequence ended it.
      steps: number of server steps since its prompt began to be read.
      shared: number of prompt tokens that were found in shared pages instead of being read.
      accepted: number of accepted drafts.
    Example:
      >>> import meshlib as mtf
      >>> tiny = mtf.models.preset("llama2-7b").reduced()
      >>> with mtf.Graph():
      ...     trained = mtf.simulate(mtf.lower(*mtf.models.train_step(tiny, batch=2, length=8)))
      >>> server = mtf.Server(tiny, trained, batch=1, cache_length=8, chunk=2)
      >>> number = server.submit([1, 2, 3], max_tokens=4)
      >>> (done,) = server.run()
      >>> done.request, len(done.tokens), done.steps  # two chunks, and a step for each token after the first
      (0, 4, 5)
    """

    request: int
    tokens: tuple[int, ...]
    text: str
    ended: bool
    steps: int
    shared: int = 0
    accepted: int = 0


@dataclass(eq=False)
class _Sequence:
    """A running or waiting sequence."""

    request: int
    prompt: list[int]
    most: int
    tokens: list[int] = field(default_factory=list)  # generated tokens
    cached: int = 0  # number of tokens in the caches
    pages: list[int] = field(default_factory=list)
    shared: int = 0
    accepted: int = 0
    begun: int = 0

    @property
    def all(self) -> list[int]:
        return [*self.prompt, *self.tokens]


@dataclass
class Server:
    """A model that serves prompts as they arrive.

    Args:
      config: the config of a decoder.
      state: its parameters, as in `mtf.generate`.
      batch: number of sequences that run together.
      cache_length: number of positions per sequence, for prompt and completion together.
      chunk: number of prompt tokens read per step.
      page_size, pages: slots per page, and number of pages, shared by all sequences; by default each row has its own
        `cache_length` slots. A sequence waits until pages for all of its tokens are free; full pages of common prefixes
        are shared.
      temperature, top_k, top_p, seed: sampling options; each request has its own random stream.
      stop: tokens, or texts, that end a completion.
      draft_tokens: number of drafts verified per step; 0: none.
      drafts: function of the tokens of a sequence and a number, with at most that many drafts; by default prompt
        lookup, see `meshlib.generation.sampling.repeated`. Greedy completions are unchanged, sampled ones have the same
        distribution.
      tokenizer, mesh, layout, slice, cache_dtype, precision, executor: as in `mtf.generate`.
      run_program: as `run` of `mtf.generate`.
    Raises: GraphError for invalid arguments.
    Example:
      >>> import meshlib as mtf
      >>> tiny = mtf.models.preset("llama2-7b").reduced()
      >>> with mtf.Graph():
      ...     trained = mtf.simulate(mtf.lower(*mtf.models.train_step(tiny, batch=2, length=8)))
      >>> server = mtf.Server(tiny, trained, batch=2, cache_length=16, chunk=4, page_size=4, pages=8)
      >>> numbers = [server.submit(prompt, max_tokens=3) for prompt in ([1, 2, 3, 4, 5], [7], [1, 2, 3, 4, 6])]
      >>> [(done.request, len(done.tokens)) for done in server.run()]
      [(0, 3), (1, 3), (2, 3)]

    Source: Yu et al., "Orca", OSDI 2022; Kwon et al., "PagedAttention", arXiv:2309.06180; Leviathan et al.,
      arXiv:2211.17192.
    """

    config: TransformerConfig
    state: State
    batch: int
    cache_length: int
    chunk: int = 64
    page_size: int | None = None
    pages: int | None = None
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    stop: object = ()
    draft_tokens: int = 0
    drafts: Drafts = repeated
    tokenizer: Tokenizer | None = None
    mesh: MeshLike = "device:1"
    layout: object = ""
    slice: str | Slice | None = None
    cache_dtype: str | None = None
    precision: str = "default"
    executor: str = "fast"
    seed: int = 0
    run_program: Callable[[Program], Simulation] | None = None
    steps: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        c = TransformerConfig.checked(self.config, WHAT)
        whole(self.chunk, WHAT, "chunk", low=1), whole(self.draft_tokens, WHAT, "draft_tokens", low=0)
        whole(self.seed, WHAT, "seed", low=0)
        bounded(self.temperature, WHAT, "temperature")
        if self.top_k is not None:
            whole(self.top_k, WHAT, "top_k", low=1)
        if self.top_p is not None and not 0 < number(self.top_p, WHAT, "top_p") <= 1:
            raise GraphError(f"{at(WHAT)}: top_p must be above 0 and at most 1, got {self.top_p}")
        if not callable(self.drafts):
            raise GraphError(f"{at(WHAT)}: drafts must be a function of tokens and a number, got {self.drafts!r:.80}")
        if self.tokenizer is None and c.vocab >= 256:
            self.tokenizer = ByteTokenizer()
        self._known = min(c.vocab, int(getattr(self.tokenizer, "size", c.vocab)))  # tokens that may be sampled
        self._stops = Stops.of(self.stop, self.tokenizer, c.vocab)
        self._sampling = Sampling(self.temperature, self.top_k, self.top_p)
        wide = min(self.chunk, self.cache_length)
        self._narrow = self._lowered(1 + self.draft_tokens, each=self.draft_tokens > 0)
        self._wide = self._lowered(wide, each=False)
        self._width = wide
        self._pages = None if self.pages is None else Pages(self.pages, self.page_size or 1)
        self._sim = self.run_program(self._wide) if self.run_program else self._simulated()
        give_parameters(WHAT, self._sim, (self._wide, self._narrow), c, self.state)
        self._rows: list[_Sequence | None] = [None] * self.batch
        self._waiting: deque[_Sequence] = deque()
        self._submitted = 0
        self._done: list[Completion] = []

    def _simulated(self) -> Simulation:
        return simulate(self._wide, self.slice, self.seed, self.executor)

    def _lowered(self, length: int, each: bool) -> Program:
        with Graph():
            step = extend_step(
                self.config, self.batch, length, self.cache_length, self.page_size, self.pages, self.cache_dtype, each
            )
            return lower(*step, mesh=self.mesh, layout=self.layout, precision=self.precision)

    # ------------------------------------------------------------ requests

    def submit(self, prompt: object, max_tokens: int = 64) -> int:
        """Queue a prompt, a text or tokens; returns the number of the request.

        Raises: GraphError for an invalid prompt, and one that does not fit with its completion.
        """
        (tokens,) = encoded([prompt] if not isinstance(prompt, str) else prompt, self.tokenizer, self.config.vocab)
        whole(max_tokens, WHAT, "max_tokens", low=1)
        wanted = len(tokens) + max_tokens
        if wanted > self.cache_length:
            raise GraphError(
                f"{at(WHAT)}: a prompt of {counted(len(tokens), 'token')} and max_tokens {max_tokens} need {wanted} "
                f"positions, but cache_length is {self.cache_length}"
            )
        if self.pages is not None and -(-wanted // (self.page_size or 1)) > self.pages:
            raise GraphError(
                f"{at(WHAT)}: {wanted} positions take {-(-wanted // (self.page_size or 1))} pages, but there are "
                f"{self.pages}"
            )
        self._waiting.append(_Sequence(self._submitted, tokens, max_tokens))
        self._submitted += 1
        return self._submitted - 1

    def run(self) -> list[Completion]:
        """Run steps until all requests are done; returns completions since the last call, in request order."""
        while self.step():
            pass
        done, self._done = sorted(self._done, key=lambda one: one.request), []
        return done

    @property
    def running(self) -> tuple[int, ...]:
        """The running requests."""
        return tuple(s.request for s in self._rows if s is not None)

    @property
    def waiting(self) -> tuple[int, ...]:
        """The requests that wait for a row or for pages."""
        return tuple(s.request for s in self._waiting)

    # ------------------------------------------------------------ a step

    def step(self) -> bool:
        """Admit waiting requests, run one step, release finished ones; returns False if there was nothing to do."""
        self._admit()
        active = [(row, s) for row, s in enumerate(self._rows) if s is not None]
        if not active:
            return False
        narrow = all(len(s.all) - s.cached == 1 for _, s in active)
        given = {row: self._given(s, narrow) for row, s in active}
        logits = self._run(self._narrow if narrow else self._wide, given)
        self.steps += 1
        for row, s in active:
            self._advance(row, s, given[row], logits[row])
        return True

    def _admit(self) -> None:
        """Assign sequences to free rows in order; one without pages blocks those behind it."""
        for row in range(self.batch):
            if self._rows[row] is None and self._waiting:
                s = self._waiting[0]
                if self._pages is not None:
                    taken = self._pages.take(s.prompt, len(s.prompt) + s.most)
                    if taken is None:
                        return
                    s.pages, s.cached = taken
                    s.shared = s.cached
                s.begun = self.steps
                self._rows[row] = self._waiting.popleft()

    def _given(self, s: _Sequence, narrow: bool) -> list[int]:
        """The tokens that a row adds: those not yet in its caches, or the last token and drafts."""
        new = s.all[s.cached : s.cached + self._width]
        count = min(self.draft_tokens, s.most - len(s.tokens) - 1)
        if not narrow or count <= 0:
            return new
        drafts = [whole(t, WHAT, "each draft") for t in self.drafts(s.all, count)][:count]
        strange = [t for t in drafts if not 0 <= t < self._known]
        if strange:
            raise GraphError(f"{at(WHAT)}: draft {strange[0]} is not in 0 to {self._known - 1}")
        return [*new, *drafts]

    def _run(self, program: Program, given: dict[int, list[int]]) -> Any:
        width = program.inputs["tokens"].tensor.shape.dim("length").size
        tokens = np.zeros((self.batch, width), np.int32)
        positions, counts = np.zeros(self.batch, np.int32), np.zeros(self.batch, np.int32)
        table = np.zeros((self.batch, self.cache_length // (self.page_size or self.cache_length)), np.int32)
        for row, new in given.items():
            s = self._rows[row]
            assert s is not None
            tokens[row, : len(new)], positions[row], counts[row] = new, s.cached, len(new)
            table[row, : len(s.pages)] = s.pages
        feeds = {"tokens": tokens, "positions": positions, "counts": counts, "table": table}
        return self._sim.run(program, {name: feeds[name] for name in program.inputs})["logits"]

    def _advance(self, row: int, s: _Sequence, given: Sequence[int], logits: Any) -> None:
        """Process the results of a step for a sequence."""
        known = len(s.all)
        s.cached = min(s.cached + len(given), known)
        if s.cached == known:
            drafts, rows = (given[1:], logits) if logits.ndim == 2 else ([], logits[None])
            random = np.random.default_rng((self.seed, s.request, len(s.tokens)))
            verified = self._sampling.verified(rows[:, : self._known], drafts, random)
            s.accepted += len(verified) - 1
            s.cached += len(verified) - 1
            s.tokens += verified
        if self._pages is not None:
            self._pages.filled(s.pages, s.all[: s.cached])
        cut_tokens, text, ended = self._stops.cut(s.tokens)
        if ended or len(s.tokens) >= s.most:
            steps = self.steps - s.begun
            self._done.append(Completion(s.request, tuple(cut_tokens), text, ended, steps, s.shared, s.accepted))
            self._rows[row] = None
            if self._pages is not None:
                self._pages.give_back(s.pages)
