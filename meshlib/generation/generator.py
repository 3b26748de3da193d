"""Completion of prompts: a prefill, then a decoding step per token, controlled by the host.

The loop over tokens runs on the host, as in servers: all steps run one program, sequences can join and leave between
steps, and none waits for the longest. `mtf.while_loop` with a condition runs whole completions in one program instead,
if all sequences start together.

Tokens are sampled on the devices, so that only they are fetched; random numbers depend on seed, step and position in
the batch, not on the mesh: the same tokens are drawn under every layout.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from math import lcm
from typing import Any, cast

import numpy as np

from hardware import Slice
from layouts import Dimension, LayoutRules, Mesh
from layouts.mesh import MeshLike
from layouts.rules import SCOPES, RulesLike
from meshlib.core.arguments import at, bounded, shape_faults, whole
from meshlib.core.errors import GraphError, nearest
from meshlib.core.graph import Graph, Tensor, scope
from meshlib.generation.sampling import Beams
from meshlib.generation.tokens import WHAT, ByteTokenizer, Stops, Tokenizer, encoded
from meshlib.layers.norms import widened
from meshlib.lowering import Program, lower
from meshlib.models.caches import SLOTS
from meshlib.models.config import TransformerConfig
from meshlib.models.narrow import quantized_kernels
from meshlib.models.serving import decode_step, prefill
from meshlib.ops.movement.indexing import gather
from meshlib.ops.movement.indexing import range as positions_of
from meshlib.ops.movement.ranking import top_k as largest
from meshlib.ops.pointwise.arithmetic import less, where
from meshlib.ops.pointwise.random import sample_with_temperature
from meshlib.ops.pointwise.reductions import log_softmax
from meshlib.simulation import Simulation, simulate
from meshlib.storage.checkpoint import load

Array = np.ndarray[Any, Any]
Progress = Callable[[int, int], object]
NEVER = -1e30  # a logit with probability zero
State = Mapping[str, Any] | Simulation | str | os.PathLike[str]


@dataclass(frozen=True)
class Generated:
    """Completions, in the order of the prompts.

    Attributes:
      tokens: tokens of each completion, without the stop sequence.
      texts: the completions as text; empty without a tokenizer.
      scores: the score for beam search, otherwise the sum of the log-probabilities of all drawn tokens.
      ended: whether a stop sequence ended it, instead of the limit of tokens.
      steps: largest number of tokens decoded after the prefill in a sequence.
      dropped: for a model with experts, the number of dropped choices in all layers: those of prompts, and with
        `group_size` those of all steps, including finished and empty rows.
    Example:
      >>> import meshlib as mtf
      >>> tiny = mtf.models.preset("gpt2").reduced()
      >>> with mtf.Graph():
      ...     trained = mtf.simulate(mtf.lower(*mtf.models.train_step(tiny, batch=1, length=4)), seed=0)
      >>> completions = mtf.generate(tiny, [[1, 2, 3]], trained, max_tokens=2)
      >>> len(completions.tokens[0]), completions.ended, completions.steps
      (2, (False,), 1)
    """

    tokens: tuple[tuple[int, ...], ...]
    texts: tuple[str, ...]
    scores: tuple[float, ...]
    ended: tuple[bool, ...]
    steps: int
    dropped: int = 0

    @property
    def text(self) -> str:
        """The text of the only completion. Raises: GraphError if there are several, or none."""
        if len(self.texts) != 1:
            raise GraphError(f"generate: there are {len(self.texts)} texts, not one; see .texts and .tokens")
        return self.texts[0]


@dataclass
class Generator:
    """A model prepared for completing prompts: programs lowered once, parameters loaded.

    Args:
      config: a decoder or an encoder-decoder.
      state: its parameters: arrays by name, a simulation that has trained them, or the path of a checkpoint, with any
        mesh and layout. Float kernels are quantised if `config.numerics` has a `kernel_dtype`.
      batch, length: largest number of prompts, and of tokens in each; for an encoder-decoder of the encoder's input.
      max_tokens: largest number of tokens of a completion.
      mesh, layout, slice: of the programs.
      temperature, top_k, top_p: see `mtf.sample_with_temperature`; temperature 0 is greedy, and excludes top_k and
        top_p.
      beams, alpha: beam search with this many hypotheses, see `meshlib.generation.sampling`; 1: none.
      stop: tokens, or texts, that end a completion.
      tokenizer: the tokenizer; by default bytes, if the vocabulary is large enough. Tokens beyond the `size` of a
        tokenizer such as `mtf.BytePairs` are never sampled: vocabularies of models are often padded.
      start_token: first input of the decoder of an encoder-decoder.
      cache_dtype: as in `mtf.models.prefill`.
      group_size: as in `mtf.models.decode_step`: dropped choices are counted, and a completion depends on the other
        prompts of its group.
      precision, executor: as in `mtf.lower` and `mtf.simulate`.
      run: creates a run of a program in place of `mtf.simulate`, such as `mtf.on_jax` for real devices.
      seed: seed of sampling.
    Raises: GraphError for invalid arguments, and for parameters that are missing or have another shape.
    Example:
      >>> import meshlib as mtf
      >>> tiny = mtf.models.preset("gpt2").reduced()
      >>> with mtf.Graph():
      ...     trained = mtf.simulate(mtf.lower(*mtf.models.train_step(tiny, batch=1, length=4)), seed=0)
      >>> complete = mtf.Generator(tiny, trained, batch=2, length=4, max_tokens=3)
      >>> [len(tokens) for tokens in complete([[1, 2], [3]]).tokens]
      [3, 3]
    """

    config: TransformerConfig
    state: State
    batch: int
    length: int
    max_tokens: int = 64
    mesh: MeshLike = "device:1"
    layout: object = ""
    slice: str | Slice | None = None
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    beams: int = 1
    alpha: float = 0.6
    stop: object = ()
    tokenizer: Tokenizer | None = None
    start_token: int = 0
    cache_dtype: str | None = None
    group_size: int | None = None
    precision: str = "default"
    executor: str = "fast"
    seed: int = 0
    run: Callable[[Program], Simulation] | None = None
    prefill: Program = field(init=False)
    decode: Program = field(init=False)
    sim: Simulation = field(init=False)

    def __post_init__(self) -> None:
        c = TransformerConfig.checked(self.config, WHAT)
        self._check_numbers(c)
        self._take_tokenizer(c)
        self.stops = Stops.of(self.stop, self.tokenizer, c.vocab)
        if self.beams > 1 and self.stops.texts:
            raise GraphError(f"{at(WHAT)}: beam search ends at tokens; stop has the text {self.stops.texts[0]!r}")
        self.prefill, self.decode = self._lowered(decoding=False), self._lowered(decoding=True)
        if self.run is not None and not callable(self.run):
            raise GraphError(f"{at(WHAT)}: run must map a program to a run, as mtf.on_jax does, got {self.run!r:.80}")
        self.sim = self.run(self.prefill) if self.run else simulate(self.prefill, self.slice, self.seed, self.executor)
        give_parameters(WHAT, self.sim, (self.prefill, self.decode), c, self.state)

    def _check_numbers(self, c: TransformerConfig) -> None:
        """Check sizes and sampling options."""
        for name in ("batch", "length", "max_tokens", "beams"):
            whole(getattr(self, name), WHAT, name, low=1)
        bounded(self.alpha, WHAT, "alpha")
        if not 0 <= whole(self.start_token, WHAT, "start_token") < c.vocab:
            raise GraphError(f"{at(WHAT)}: start_token must be in 0 to {c.vocab - 1}, got {self.start_token}")
        narrowed = [name for name in ("top_k", "top_p") if getattr(self, name) is not None]
        if self.beams > 1 and (self.temperature or narrowed):
            raise GraphError(
                f"{at(WHAT)}: beam search draws no samples: leave temperature, top_k and top_p unset, or beams=1"
            )
        if narrowed and self.temperature == 0:
            raise GraphError(
                f"{at(WHAT)}: at temperature 0 the likeliest token is taken, whatever {' and '.join(narrowed)}; "
                "give a temperature, as temperature=1.0"
            )
        reads = 1 if c.encoder_decoder else self.length
        if c.position == "learned" and c.max_length and reads + self.max_tokens > c.max_length:
            raise GraphError(
                f"{at(WHAT)}: {c.name} has {c.max_length} positions, but prompts of {reads} tokens and max_tokens "
                f"{self.max_tokens} need {reads + self.max_tokens}"
            )

    def _take_tokenizer(self, c: TransformerConfig) -> None:
        """Set the tokenizer, and the number of tokens that may be sampled."""
        if self.tokenizer is None and c.vocab >= 256:
            self.tokenizer = ByteTokenizer()
        if self.tokenizer is not None and not isinstance(self.tokenizer, Tokenizer):
            raise GraphError(f"{at(WHAT)}: tokenizer must have encode and decode, got {self.tokenizer!r:.80}")
        self.known = c.vocab  # tokens that may be sampled
        size = getattr(self.tokenizer, "size", None)
        if isinstance(size, int | np.integer) and not isinstance(size, bool):
            self.known = int(size)
            if not 0 < self.known <= c.vocab:
                raise GraphError(
                    f"{at(WHAT)}: the tokenizer has {size} tokens, the model {c.vocab}; it belongs to another model"
                )

    # ------------------------------------------------------------ programs and parameters

    def _lowered(self, decoding: bool) -> Program:
        """The program of a step, with outputs of the sampled tokens, or of the best extensions of each hypothesis."""
        c = self.config
        searched = self.beams if self.beams > 1 else None
        reads = 1 if c.encoder_decoder else self.length
        more: dict[str, Any] = {"beams": searched, "cache_dtype": self.cache_dtype}
        more["encoder_length"] = self.length if c.encoder_decoder else None
        room = self._cache_length(reads + self.max_tokens)
        with Graph():
            if decoding:
                outputs, updates = decode_step(c, self.batch, room, group_size=self.group_size, **more)
            else:
                outputs, updates = prefill(c, self.batch, reads, room, **more)
            with scope("choice"):
                fetched = {**self._chosen(outputs.pop("logits")), **outputs}
            return lower(fetched, updates, mesh=self.mesh, layout=self.layout, precision=self.precision)

    def _cache_length(self, positions: int) -> int:
        """Positions of the caches: those needed, padded so that the layout divides them."""
        room = divided(positions, SLOTS, self.mesh, self.layout)
        most = self.config.max_length if self.config.position == "learned" else None
        return positions if most and room > most else room

    def _chosen(self, logits: Tensor) -> dict[str, Tensor]:
        vocab = logits.shape.dim("vocab")
        if self.known < vocab.size:
            logits = where(less(positions_of(vocab), self.known), logits, NEVER)
        log_probs = log_softmax(widened(logits), vocab)  # bfloat16 would have eight bits
        if self.beams > 1:
            best = Dimension("candidates", min(2 * self.beams, self.known))
            best_log_probs, tokens = largest(log_probs, vocab, best)
            return {"tokens": tokens, "log_probs": best_log_probs}
        tokens = sample_with_temperature(logits, vocab, self.temperature, None, self.top_k, self.top_p)
        return {"tokens": tokens, "log_probs": gather(log_probs, tokens, vocab)}

    # ------------------------------------------------------------ completion

    def __call__(self, prompts: object, progress: Progress | None = None) -> Generated:
        """Complete prompts: a text, a list of tokens, or a list of these.

        Args:
          prompts: at most `batch` of them, of at most `length` tokens.
          progress: called with (tokens so far, max_tokens) after each step.
        Raises: GraphError for invalid prompts.
        """
        if progress is not None and not callable(progress):
            raise GraphError(
                f"{at(WHAT)}: progress must be a function of (tokens so far, max_tokens), got {progress!r:.80}"
            )
        given = encoded(prompts, self.tokenizer, self.config.vocab)
        if len(given) > self.batch or max(map(len, given)) > self.length:
            raise GraphError(
                f"{at(WHAT)}: room for {self.batch} prompts of {self.length} tokens, "
                f"got {len(given)} of up to {max(map(len, given))}"
            )
        outputs = self.sim.run(self.prefill, self._feeds(given))
        self.dropped = int(outputs.get("dropped", 0))
        if self.beams > 1:
            return self._searched(len(given), outputs, progress)
        completions: list[list[int]] = [[] for _ in given]
        scores, ended, steps = [0.0] * len(given), [False] * len(given), 0
        while True:
            for n, tokens in enumerate(completions):
                if not ended[n]:
                    tokens.append(int(outputs["tokens"][n]))
                    scores[n] += float(outputs["log_probs"][n])
                    *_, ended[n] = self.stops.cut(tokens)
            if progress is not None:
                progress(steps + 1, self.max_tokens)
            steps += 1
            if all(ended) or steps == self.max_tokens:
                break
            live = np.array([n < len(given) and not ended[n] for n in range(self.batch)])
            outputs = self._step(live, tokens=outputs["tokens"])
        return self._generated(completions, scores, steps - 1)

    def _feeds(self, given: Sequence[Sequence[int]]) -> dict[str, Array]:
        rows, lengths = np.zeros((self.batch, self.length), np.int32), np.ones(self.batch, np.int32)
        for n, prompt in enumerate(given):
            rows[n, : len(prompt)], lengths[n] = prompt, len(prompt)
        if not self.config.encoder_decoder:
            return {"tokens": rows, "lengths": lengths}
        start = np.full((self.batch, 1), self.start_token, np.int32)
        return {"tokens": start, "lengths": np.ones_like(lengths), "sources": rows, "source_lengths": lengths}

    def _searched(self, count: int, outputs: Mapping[str, Array], progress: Progress | None) -> Generated:
        """Beam search. The prompt is one hypothesis, whose cache all hypotheses share."""
        searches = [Beams(self.beams, self.stops.tokens, self.alpha, self.max_tokens) for _ in range(self.batch)]
        log_probs, tokens = outputs["log_probs"][:, None], outputs["tokens"][:, None]
        for steps in range(self.max_tokens):
            going = [one.extend(log_probs[n], tokens[n]) for n, one in enumerate(searches)]
            if progress is not None:
                progress(steps + 1, self.max_tokens)
            if all(one.done for one in searches[:count]):
                break
            parents, last = (np.array([[pair[k] for pair in row] for row in going], np.int32) for k in (0, 1))
            # After the prefill all hypotheses equal the first.
            live = np.array([n < count and not one.done for n, one in enumerate(searches)])
            outputs = self._step(live, tokens=last, parents=parents)
            log_probs, tokens = outputs["log_probs"], outputs["tokens"]
        best = [one.best()[0] for one in searches[:count]]
        return self._generated([h.tokens for h in best], [h.score for h in best], steps)

    def _step(self, live: Array, **feeds: Array) -> dict[str, Array]:
        """One token of each sequence; sequences that are not `live` take no capacity of experts."""
        outputs = self.sim.run(self.decode, **feeds, **({} if self.group_size is None else {"live": live}))
        self.dropped += int(outputs.get("dropped", 0))
        return outputs

    def _generated(self, sequences: Sequence[Sequence[int]], scores: Sequence[float], steps: int) -> Generated:
        cut = [self.stops.cut(tokens) for tokens in sequences]
        texts = () if self.tokenizer is None else tuple(text for _, text, _ in cut)
        completions = tuple(tuple(tokens) for tokens, _, _ in cut)
        return Generated(completions, texts, tuple(scores), tuple(ended for *_, ended in cut), steps, self.dropped)


def divided(size: int, dim: str, mesh: MeshLike, layout: object) -> int:
    """The smallest size of a dim, from `size` on, that a layout divides into equal blocks."""
    rules, axes = LayoutRules(cast(RulesLike, layout)), Mesh(mesh)
    splits = [rule for scope in SCOPES for rule in rules.for_dim(dim, scope)]
    blocks = lcm(*(axes.group_size([a for a in rule.axes if a in axes]) for rule in splits))
    return -(-size // blocks) * blocks


def check_options(options: Mapping[str, Any], own: tuple[str, ...], what: str) -> None:
    """Raise GraphError for names that are not arguments of `Generator`, or that the caller sets itself (`own`)."""
    known = [f.name for f in fields(Generator) if f.init and f.name not in own]
    for name in options:
        if name not in known:
            raise GraphError(
                f"{at(what)}: there is no option '{name}'{nearest(name, known)}; known: {', '.join(known)}"
            )


def is_own(name: str) -> bool:
    """True for a variable of serving: a cache, a position, the step."""
    return name == "step" or name.startswith("serving/") or "/cache/" in name


def give_parameters(
    what: str, sim: Simulation, programs: Sequence[Program], config: TransformerConfig, state: State
) -> None:
    """Load the parameters of programs into a simulation. Raises: GraphError for missing ones, or other shapes."""
    wanted = {
        name: v.tensor.shape.sizes for program in programs for name, v in program.variables.items() if not is_own(name)
    }
    given = _given(what, config, state, programs[0])
    faults = shape_faults(given, wanted)
    if faults:
        raise GraphError.listing(f"{at(what)}: the state is not that of {config.name}", faults)
    for name in wanted:
        sim.state[name] = given[name]


def _given(what: str, config: TransformerConfig, state: State, program: Program) -> Mapping[str, Any]:
    """Parameters by name, quantised if the config requires it."""
    if isinstance(state, Simulation):
        state = {name: state.state[name] for name in state.state}
    if isinstance(state, str | os.PathLike):
        state = _loaded(config, state)
    if not isinstance(state, Mapping):
        raise GraphError(
            f"{at(what)}: state must be arrays by name, a simulation or the path of a checkpoint, "
            f"got {type(state).__name__} {state!r:.80}"
        )
    return quantized_kernels(state, program) if config.numerics.kernel_dtype else state


def _loaded(config: TransformerConfig, path: str | os.PathLike[str]) -> Mapping[str, Array]:
    """The parameters in a checkpoint, without quantised kernels."""
    trained = config.replace(numerics=replace(config.numerics, kernel_dtype=None))
    more = {"encoder_length": 1} if config.encoder_decoder else {}
    with Graph():
        outputs, updates = prefill(trained, 1, 1, 1, **more)  # type: ignore[arg-type]
        sim = simulate(lower(outputs, updates))
    load(path, sim, only=[name for name in sim.state if not is_own(name)])
    return {name: sim.state[name] for name in sim.state if not is_own(name)}


def generate(
    config: TransformerConfig,
    prompts: object,
    state: State,
    max_tokens: int = 64,
    progress: Progress | None = None,
    **options: Any,
) -> Generated:
    """Complete prompts with a trained model.

    If the layout does not divide the batch, empty rows are added: three prompts over two devices are four rows.

    Args:
      config: the model.
      prompts: a text or tokens, or a list of these, of any lengths.
      state: its parameters: arrays by name, a simulation, or the path of a checkpoint, trained on any mesh.
      max_tokens: largest number of tokens of a completion.
      progress: called with (tokens so far, max_tokens) after each step.
      options: further arguments of `Generator`: mesh, layout, temperature, top_k, top_p, beams, alpha, stop, tokenizer,
      ...
    Returns: a `Generated`: tokens, texts, scores.
    Raises: GraphError for invalid arguments; CheckpointError for a file without the model's parameters.
    Example:
      >>> import meshlib as mtf
      >>> tiny = mtf.models.preset("gpt2").reduced()
      >>> with mtf.Graph():
      ...     outputs, updates = mtf.models.train_step(tiny, batch=2, length=8)
      ...     trained = mtf.simulate(mtf.lower(outputs, updates))
      >>> made = mtf.generate(tiny, [[1, 2, 3], [4, 5]], trained, max_tokens=4, mesh="tensor:2", layout="heads:tensor")
      >>> [len(tokens) for tokens in made.tokens]
      [4, 4]
    """
    check_options(options, ("config", "state", "batch", "length"), WHAT)
    tokenizer = options.get("tokenizer")
    if isinstance(config, TransformerConfig) and tokenizer is None and config.vocab >= 256:
        tokenizer = ByteTokenizer()
    vocab = config.vocab if isinstance(config, TransformerConfig) else 1
    given = encoded(prompts, tokenizer, vocab) if isinstance(config, TransformerConfig) else [[0]]
    rows = divided(len(given), "batch", options.get("mesh", "device:1"), options.get("layout", ""))
    return Generator(config, state, rows, max(map(len, given)), max_tokens, **options)(given, progress)
