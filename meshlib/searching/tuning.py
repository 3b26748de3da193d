"""Tuning of a MaxText run: mesh, recomputation, optimizer state, batch and accumulation, at fixed tokens per step.

Greedy coordinate search: from the given run, each knob in turn is set to the fastest value that fits, until no knob
gains; the time limit is divided among knobs. Changes made superfluous by later ones are reverted. The gain of a change
is marginal: the step without it against the step with it, in the order of discovery.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from hardware.slices import Slice
from meshlib.core.compiler import XLA_TPU, Compiler
from meshlib.core.errors import GraphError, MeshlibError
from meshlib.core.text import bytes_text, grid, seconds_text
from meshlib.estimation import estimate
from meshlib.models.maxtext.emission import value_text
from meshlib.models.maxtext.keys import AXES, PARTS, REMAT_KEYS
from meshlib.models.maxtext.remat import POLICIES
from meshlib.models.maxtext.run import MaxTextRun
from meshlib.models.maxtext.settings import OVERRIDES, Settings

Progress = Callable[[int, int, str], None]
GAIN = 0.002  # of a step: smaller gains are not reported
MOST_BATCHES = 3  # microbatch sizes tried on either side
# Placements that `custom` adds to the named policies: layer inputs on the host, products where they pay off.
CUSTOM: tuple[Mapping[str, str], ...] = (
    {"decoder_layer_input": "offload"},
    {"decoder_layer_input": "offload", "query_proj": "device", "key_proj": "device", "value_proj": "device"},
    {"decoder_layer_input": "offload", "query_proj": "offload", "key_proj": "offload", "value_proj": "offload"},
    {**dict.fromkeys(("decoder_layer_input", "query_proj", "key_proj", "value_proj", "out_proj"), "offload")},
    {"decoder_layer_input": "offload", "mlpwo": "offload"},
    {"decoder_layer_input": "device", "context": "device"},
    {"decoder_layer_input": "device", "out_proj": "device", "mlpwo": "device"},
    {"decoder_layer_input": "offload", "context": "device", "out_proj": "device"},
)
# Policies whose memory may fit once the optimizer state is offloaded.
STATE_POLICIES = ("save_qkv_proj", "save_dot_except_mlpwi", "minimal", "minimal_with_context", "none")


@dataclass(frozen=True)
class Tried:
    """A configuration with its figures; `fault` if it cannot run."""

    run: MaxTextRun
    step_seconds: float = float("inf")
    needed_bytes: float = float("inf")
    fits: bool = False
    fault: str = ""

    @property
    def order(self) -> tuple[bool, float]:
        """Sort key: configurations that fit first, by time; then the others by memory."""
        return (not self.fits, self.step_seconds if self.fits else self.needed_bytes)


@dataclass(frozen=True)
class TunedKeys:
    """Keys that were changed, with figures before and after."""

    keys: Mapping[str, Any]
    before: Tried
    after: Tried

    def __str__(self) -> str:
        text = " ".join(f"{key}={value_text(value)}" for key, value in self.keys.items())
        share = self.after.step_seconds / self.before.step_seconds - 1
        more = self.after.needed_bytes - self.before.needed_bytes
        sign = "+" if more >= 0 else "-"
        gain = "now fits" if self.after.fits and not self.before.fits else f"{share:+.1%} step*".replace("%", " %")
        return f"{text}: {gain}, {sign}{bytes_text(abs(more))}*"


@dataclass(frozen=True)
class Tuned:
    """Result of `tune`: the run as given, the best one, and the changes between them."""

    slice: Slice
    given: Tried
    best: Tried
    changes: tuple[TunedKeys, ...]
    tried: int
    seconds: float
    refused: Mapping[str, str] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """The result as JSON."""
        figures = {
            name: {"step_seconds_modelled": t.step_seconds, "needed_bytes_modelled": t.needed_bytes, "fits": t.fits}
            for name, t in (("given", self.given), ("best", self.best))
        }
        changes = [{"keys": dict(c.keys), "text": str(c)} for c in self.changes]
        return {"slice": self.slice.name, **figures, "changes": changes, "tried": self.tried}

    def __str__(self) -> str:
        rows = [("", "step*", "needs*", "fits", "mesh")]
        for name, one in (("given", self.given), ("best", self.best)):
            shown = (
                ("-", "-", "no") if one.fault
                else (seconds_text(one.step_seconds), bytes_text(one.needed_bytes), "yes" if one.fits else "NO")
            )  # fmt: skip
            rows.append((name, *shown, str(one.run.mesh(self.slice))))
        head = f"{self.best.run.config.name} on {self.slice.name}, {self._tokens:,} tokens a step"
        lines = [head, *grid(rows, right=(1, 2))]
        lines += [f"as given it can't run: {self.given.fault}"] if self.given.fault else []
        lines += [
            "",
            "change, and its effect:" if self.changes else "no change gains anything",
            *map(str, self.changes),
        ]
        tried = f"{self.tried} configurations tried"
        return "\n".join([*lines, "", f"{tried}; a search of one key at a time, no proof that none is better"])

    @property
    def _tokens(self) -> int:
        run = self.best.run
        return run.batch(self.slice) * run.length


def tune(
    run: MaxTextRun,
    where: Slice,
    seconds: float = 60.0,
    compiler: Compiler = XLA_TPU,
    progress: Progress | None = None,
) -> Tuned:
    """The fastest configuration that fits, by changes of a given run.

    Args:
      run: as `mtf.models.read_maxtext` returns it. where: the slice. seconds: to search at most.
    Returns: a `Tuned`: `.best`, `.changes` with what each gains, as text for people.
    Raises: GraphError for a run that can't be built on the slice, whatever is changed.
    """
    start, seen = time.monotonic(), dict[str, Tried]()
    sequences = _sequences(run, where)

    def look(one: MaxTextRun) -> Tried:
        key = repr(sorted((k, repr(v)) for k, v in one.settings.values.items()))
        if key not in seen:
            seen[key] = _tried(one, where, compiler)
            if progress is not None:
                progress(len(seen), len(seen) + 1, _name(min(seen.values(), key=lambda t: t.order)))
        return seen[key]

    given = best = look(run)
    changes: list[TunedKeys] = []
    again = True
    while again and time.monotonic() - start < seconds:
        again = False
        for left, knob in zip(range(len(KNOBS), 0, -1), KNOBS, strict=True):
            now = time.monotonic()
            until = now + (start + seconds - now) / left  # the remaining time is divided by the remaining knobs
            options = []
            for keys in knob(best.run, where, sequences):
                if time.monotonic() > until:
                    again = True  # the next round continues with untried values
                    break
                options.append((keys, look(changed(best.run, keys))))
            if not options:
                continue
            keys, after = min(options, key=lambda option: option[1].order)
            better = after.order < best.order and (not best.fits or after.step_seconds < best.step_seconds * (1 - GAIN))
            if better:
                changes.append(TunedKeys(keys, best, after))
                best, again = after, True
    if best.fault:
        raise GraphError(f"tune: {best.fault}")
    best, changes = _needed(given, changes, best, look)
    faults = {_name(t): t.fault for t in seen.values() if t.fault}
    return Tuned(where, given, best, tuple(changes), len(seen), time.monotonic() - start, faults)


def _needed(
    given: Tried, changes: list[TunedKeys], best: Tried, look: Callable[[MaxTextRun], Tried]
) -> tuple[Tried, list[TunedKeys]]:
    """The best run without redundant changes, and the gain of each remaining change."""
    left = [change.keys for change in changes]
    for keys in [change.keys for change in changes]:
        rest = [other for other in left if other is not keys]
        without = look(changed(given.run, {key: value for other in rest for key, value in other.items()}))
        if without.order <= best.order:
            best, left = without, rest
    if len(left) == len(changes):
        return best, changes
    gains, before = [], given
    for keys in left:
        after = look(changed(before.run, keys))
        gains.append(TunedKeys(keys, before, after))
        before = after
    return best, gains


def changed(run: MaxTextRun, keys: Mapping[str, Any]) -> MaxTextRun:
    """The run with other values of some keys."""
    s = run.settings
    sources = {**s.sources, **dict.fromkeys(keys, OVERRIDES)}
    return MaxTextRun(Settings(s.path, {**s.values, **keys}, sources, s.rules))


def _tried(run: MaxTextRun, where: Slice, compiler: Compiler) -> Tried:
    try:
        est = estimate(run.program(where, compiler), run.slice(where), placement=run.placement(where))
    except MeshlibError as fault:
        return Tried(run, fault=str(fault).splitlines()[0])
    return Tried(run, est.step_seconds, est.memory.needed_bytes, est.fits)


def _sequences(run: MaxTextRun, where: Slice) -> int:
    """Sequences of a step, whether the mesh can split them or not."""
    s = run.settings
    return round(where.devices * s.number("per_device_batch_size") + 1e-9) * run.accumulation


def _name(tried: Tried) -> str:
    return seconds_text(tried.step_seconds) if tried.fits else "nothing fits yet"


# ------------------------------------------------------------ knobs


_EXCLUSIVE = {"tensor": "tensor_sequence", "tensor_sequence": "tensor"}  # axes of which one alone has a size


def _divisors(sizes: Sequence[int], *numbers: int) -> list[int]:
    """The sizes that divide all of the numbers."""
    return [n for n in sizes if not any(number % n for number in numbers)]


def _meshes(run: MaxTextRun, where: Slice, sequences: int) -> Iterator[dict[str, Any]]:
    """ICI sizes: fully sharded with tensor or sequence parallelism, transposed weights, experts, context, data."""
    per_slice, config = where.devices // where.slices, run.config
    heads = min(config.attention_of(window).memory for window in config.windows)
    tensors = _divisors((1, 2, 4, 8, 16), max(heads, 1), config.d_ff, per_slice)
    count = 1 if config.experts is None else config.experts.count
    experts = _divisors((1, 2, 4, 8, 16, 32, 64), count, per_slice)
    axes = ("tensor", "tensor_sequence", "expert", "context", "data", "fsdp_transpose")
    here = {key: run.settings.size(key, -1) for key in _keys_of(axes)}
    for axis, sizes in (
        ("tensor", tensors), ("tensor_sequence", tensors), ("expert", experts), ("context", (1, 2, 4, 8)),
        ("data", (1, 2, 4, 8)), ("fsdp_transpose", (1, 4, 16)),
    ):  # fmt: skip
        if axis not in run.settings["mesh_axes"]:
            continue
        for size in sizes:
            keys = {"ici_fsdp_parallelism": -1, **{k: (1 if v == -1 else v) for k, v in here.items()}}
            keys[f"ici_{axis}_parallelism"] = size
            if axis in _EXCLUSIVE:
                keys[f"ici_{_EXCLUSIVE[axis]}_parallelism"] = 1
            changes = {k: v for k, v in keys.items() if v != run.settings[k]}
            if changes:
                yield changes


def _keys_of(axes: tuple[str, ...]) -> list[str]:
    return [f"ici_{PARTS[axis]}_parallelism" for axis in axes if axis in AXES]


def _policies(run: MaxTextRun, where: Slice, sequences: int) -> Iterator[dict[str, Any]]:
    """Policies by name, and custom ones that offload values to host memory."""
    for name in (*POLICIES, "none"):
        if name not in (run.settings["remat_policy"], "minimal_flash"):
            yield {"remat_policy": name}
    plain = dict.fromkeys(REMAT_KEYS, "remat") | {"decoder_layer_input": "device"}
    for places in CUSTOM:
        keys: dict[str, Any] = {"remat_policy": "custom", **plain, **places}
        changes = {key: value for key, value in keys.items() if value != run.settings[key]}
        if changes:
            yield {"remat_policy": "custom", **changes}


def _states(run: MaxTextRun, where: Slice, sequences: int) -> Iterator[dict[str, Any]]:
    """Optimizer state on the host or on the devices, alone and with policies that keep more values."""
    state = {"optimizer_memory_host_offload": not run.settings["optimizer_memory_host_offload"]}
    yield state
    for name in STATE_POLICIES:
        if name != run.settings["remat_policy"]:
            yield {**state, "remat_policy": name}


def _batches(run: MaxTextRun, where: Slice, sequences: int) -> Iterator[dict[str, Any]]:
    """Batch and accumulation with the same number of sequences per step."""
    for steps in sorted({n for a, n in product(range(MOST_BATCHES + 1), (1, 2, 4, 8, 16)) if sequences % n == 0}):
        micro = sequences // steps
        each = micro / where.devices
        if steps != run.accumulation and each * 64 == int(each * 64):
            yield {
                "per_device_batch_size": int(each) if each.is_integer() else each,
                "gradient_accumulation_steps": steps,
            }


KNOBS = (_meshes, _policies, _states, _batches)
