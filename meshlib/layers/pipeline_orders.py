"""The order of tasks of each pipeline stage in a training step: forwards, backwards, weight gradients.

A backward can be split into the gradient of the stage's input, which the previous stage waits for, and the gradients of
its weights, which no stage waits for and which fill idle time (zero bubble).

Sources: Narayanan et al., arXiv:2104.04473, section 2.2 (1F1B, interleaved); Qi et al., "Zero Bubble Pipeline
Parallelism", arXiv:2401.10241, section 2 (ZB-H1, ZB-H2).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType

from meshlib.core.arguments import at
from meshlib.core.errors import GraphError
from meshlib.core.loop_record import StageTask

FORWARD, BACKWARD, WEIGHTS = "forward", "backward", "weights"


Order = tuple[StageTask, ...]
Key = tuple[str, int, int, int]  # kind, microbatch, repeat, stage


def gpipe(stages: int, microbatches: int, repeats: int) -> list[Order]:
    """All forwards, then all backwards, last microbatch first. With repeats, groups of microbatches take turns."""
    forwards = [StageTask(FORWARD, m, r) for m, r in _rounds(stages, microbatches, repeats)]
    backwards = [StageTask(BACKWARD, t.microbatch, t.repeat) for t in reversed(forwards)]
    return [(*forwards, *backwards)] * stages


def one_forward_one_backward(stages: int, microbatches: int, repeats: int) -> list[Order]:
    """1F1B: forwards until the first backward arrives, then one backward after each forward."""
    if repeats > 1 and microbatches % stages:
        raise GraphError(
            f"{at('schedule')}: interleaved 1F1B needs a multiple of the stages as microbatches, got {microbatches} "
            f"microbatches on {stages} stages: {microbatches} % {stages} = {microbatches % stages}; use "
            f"{-(-microbatches // stages) * stages} microbatches, or repeats=1"
        )
    forwards = [StageTask(FORWARD, m, r) for m, r in _rounds(stages, microbatches, repeats)]
    backwards = [StageTask(BACKWARD, m, repeats - 1 - r) for m, r in _rounds(stages, microbatches, repeats)]
    orders = []
    for stage in range(stages):
        warmup = stages - 1 - stage if repeats == 1 else 2 * (stages - 1 - stage) + (repeats - 1) * stages
        warmup = min(warmup, len(forwards))
        steady = [t for pair in zip(forwards[warmup:], backwards, strict=False) for t in pair]
        orders.append((*forwards[:warmup], *steady, *backwards[len(forwards) - warmup :]))
    return orders


def zero_bubble(stages: int, microbatches: int, repeats: int, ahead: Callable[[int], int], held: int) -> list[Order]:
    """Backwards as early as possible, then forwards, and weight gradients when neither is possible.

    Args:
      ahead: maximal number of microbatches between the forwards and the backwards of a stage.
      held: maximal number of microbatches for which a stage keeps operands of weight gradients.
    """
    if repeats > 1:
        raise GraphError(f"{at('schedule')}: zero-bubble schedules have repeats=1, got {repeats}")
    counts = [{FORWARD: 0, BACKWARD: 0, WEIGHTS: 0} for _ in range(stages)]
    orders: list[list[StageTask]] = [[] for _ in range(stages)]
    while any(c[WEIGHTS] < microbatches for c in counts):
        before = [dict(c) for c in counts]
        for stage, (was, count) in enumerate(zip(before, counts, strict=True)):
            kind = _next_kind(stage, stages, microbatches, before, ahead(stage), held)
            if kind is not None:
                orders[stage].append(StageTask(kind, was[kind]))
                count[kind] += 1
    return [tuple(order) for order in orders]


def _next_kind(
    stage: int, stages: int, microbatches: int, counts: Sequence[Mapping[str, int]], ahead: int, held: int
) -> str | None:
    """The next task kind of a stage, given the number of tasks of each kind that all stages have run."""
    mine = counts[stage]
    forwards, backwards, weights = mine[FORWARD], mine[BACKWARD], mine[WEIGHTS]
    above = counts[stage + 1][BACKWARD] if stage + 1 < stages else forwards
    below = counts[stage - 1][FORWARD] if stage else microbatches
    if forwards < microbatches and forwards - backwards < ahead:
        if forwards - weights >= held and weights < backwards:
            return WEIGHTS  # frees memory for the next forward
        if forwards < below and forwards - weights < held:
            return FORWARD
    if backwards < min(above, forwards):
        return BACKWARD
    return WEIGHTS if weights < backwards else None


def _rounds(stages: int, microbatches: int, repeats: int) -> Iterator[tuple[int, int]]:
    """(microbatch, repeat) in order: groups of `stages` microbatches, each with all its repeats."""
    for begin in range(0, microbatches, stages):
        for repeat in range(repeats):
            for microbatch in range(begin, min(begin + stages, microbatches)):
                yield microbatch, repeat


Orders = Callable[[int, int, int], list[Order]]
KINDS: Mapping[str, Orders] = MappingProxyType(
    {
        "gpipe": gpipe,
        "1f1b": one_forward_one_backward,
        "zb-h1": lambda p, m, v: zero_bubble(p, m, v, lambda stage: p - stage, p),
        "zb-h2": lambda p, m, v: zero_bubble(p, m, v, lambda stage: 2 * (p - stage) - 1, 2 * p - 1),
    }
)


def waits_for(task: StageTask, stage: int, stages: int, repeats: int) -> list[Key]:
    """The tasks, with their stages, that a task depends on."""
    kind, microbatch, repeat = task
    if kind == WEIGHTS:
        return [(BACKWARD, microbatch, repeat, stage)]
    if kind == FORWARD:
        if stage:
            return [(FORWARD, microbatch, repeat, stage - 1)]
        return [(FORWARD, microbatch, repeat - 1, stages - 1)] if repeat else []
    own = (FORWARD, microbatch, repeat, stage)
    if stage + 1 < stages:
        return [own, (BACKWARD, microbatch, repeat, stage + 1)]
    return [own, (BACKWARD, microbatch, repeat + 1, 0)] if repeat + 1 < repeats else [own]
