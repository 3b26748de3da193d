"""Moving averages of weights, for evaluation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from meshlib.core import initializers
from meshlib.core.arguments import FRACTION, at, bounded, items, whole
from meshlib.core.errors import GraphError
from meshlib.core.graph import UPDATE, Operation, Tensor, absolute_scope, region
from meshlib.core.public_calls import public
from meshlib.ops.control.sources import make_variable, step
from meshlib.ops.control.state import ASSIGN, assign
from meshlib.ops.pointwise.arithmetic import less, where
from meshlib.ops.pointwise.casts import cast
from meshlib.optimize.base import compute_dtype

SLOT = "moving_average"


@public
def moving_averages(updates: Iterable[Operation], decay: float = 0.9999, start_step: int = 0) -> list[Operation]:
    """Updates of a moving average of each trained variable, in a slot.

    average <- decay average + (1 - decay) new value; up to and including step `start_step` it is the new value itself.

    Args:
      updates: the updates returned by an optimizer.
      decay: in [0, 1).
      start_step: number of steps after the first in which the averages copy the variables.
    Returns: the updates of the averages, for `mtf.lower` with the others; `averaged` extracts them from a state.
    Slots: `moving_average`, float32, sharded like other slots.
    Raises: GraphError if no update is of a trainable variable.
    Source: Polyak and Juditsky 1992; decay 0.9999 from step 20,000 on: Brock et al. (BigGAN), arXiv:1809.11096.
    Example:
      >>> import meshlib as mtf
      >>> with mtf.Graph():
      ...     w = mtf.variable("w", [], 0.0)
      ...     train = mtf.optimize.SgdOptimizer(1.0).apply_grads([mtf.constant(-1.0)], [w])
      ...     averages = mtf.optimize.moving_averages(train, 0.5)
      >>> sim = mtf.simulate(mtf.lower(updates=train + averages))
      >>> for _ in range(3):
      ...     _ = sim.step()
      >>> float(sim.state["w"]), float(mtf.optimize.averaged(sim.state)["w"])  # 3, (1/2 1 + 1/2 2) / 2 + 3 / 2
      (3.0, 2.25)
    """
    what = "moving_averages"
    decay_rate, first = bounded(decay, what, "decay", FRACTION), whole(start_step, what, "start_step", low=0)
    updates_of_averages = []
    for update in items(updates, what, "updates"):
        if not isinstance(update, Operation) or update.opdef is not ASSIGN:
            raise GraphError(f"{at(what)}: updates must be those returned by an optimizer, got {update!r:.80}")
        owner = update.graph.root.variables[update.attrs["variable"]]
        if owner.attrs["trainable"]:
            updates_of_averages.append(_average_update(owner, update.inputs[0], decay_rate, first))
    if not updates_of_averages:
        raise GraphError(f"{at(what)}: none of the updates is of a trainable variable")
    return updates_of_averages


def _average_update(owner: Operation, new: Tensor, decay: float, first: int) -> Operation:
    dtype = compute_dtype(owner.output.dtype)
    with owner.graph, absolute_scope(owner.name), region(UPDATE, owner):
        slot = make_variable(SLOT, owner.output.shape, initializers.zeros(), dtype, trainable=False, slot_of=owner.name)
        value = cast(new, dtype)
        copied = less(step(), first + 1)
        return assign(slot, where(copied, value, slot * decay + value * (1 - decay)))


def averaged(state: Mapping[str, Any]) -> dict[str, np.ndarray[Any, Any]]:
    """The averages of a state under the names of their variables, for evaluation:
    `evaluation.state.update(mtf.optimize.averaged(sim.state))`.

    Raises: GraphError if there are none, or the argument is not a state.
    Example:
      >>> import meshlib as mtf
      >>> with mtf.Graph():
      ...     w = mtf.variable("w", [], 0.0)
      ...     train = mtf.optimize.SgdOptimizer(1.0).apply_grads([mtf.constant(-1.0)], [w])
      ...     program = mtf.lower(updates=train + mtf.optimize.moving_averages(train, 0.9))
      >>> sim = mtf.simulate(program)
      >>> _ = [sim.step() for _ in range(2)]
      >>> mtf.optimize.averaged(sim.state), sim.state["w"].item()  # 0.9 * 1 + 0.1 * 2
      ({'w': array(1.1, dtype=float32)}, 2.0)
    """
    if not isinstance(state, Mapping):
        raise GraphError(f"{at('averaged')}: expected a state, as sim.state, got {type(state).__name__} {state!r:.80}")
    averages = {n.removesuffix(f"/{SLOT}"): state[n] for n in state if isinstance(n, str) and n.endswith(f"/{SLOT}")}
    if not averages:
        raise GraphError(f"{at('averaged')}: the state has no moving averages; see mtf.optimize.moving_averages")
    return averages
