"""Loops on JAX: one trip as a function that lax.scan or lax.while_loop traces once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from meshlib.core.errors import ProgramError
from meshlib.core.opdef import Kind
from meshlib.jax.context import Array, Reported, Stack, TraceContext, passed_checks
from meshlib.jax.placing import in_rows
from meshlib.jax.table import row_of
from meshlib.program.instructions import Compute, Instruction, Loop, Value
from meshlib.program.records import Program

RunBody = Callable[[Program, Mapping[Value, Array], TraceContext], dict[Value, Array]]
State = tuple[list[Array], dict[str, Array]]


class LoopTrip:
    """One trip of a loop: (carries, rewritten stacks), (trip number, slices) -> new ones, (stacked values, reports).

    Stacks that the body rewrites are carries of the scan, because slices and stacked results of a scan never alias.
    """

    def __init__(self, i: Loop, inputs: Sequence[Array], context: TraceContext, run: RunBody) -> None:
        body = i.body
        self.instruction, self.body, self.context, self.run = i, body, context, run
        self.given = dict(zip(body.inputs.values(), inputs, strict=True))
        self.begin = [self.given[body.inputs[name]] for name, _ in i.carries]
        self.sliced = {name: (self.given.pop(body.inputs[name]), i.slice_axis(name)) for name in i.slices}
        self.in_place = i.rewritten
        self.rewritten = {end: self.sliced.pop(start)[0] for end, start in self.in_place.items()}
        self.updates = _single_updates(body, self.in_place)
        self.of_variables = {
            name
            for name, x in zip(body.inputs, i.inputs, strict=True)
            if x.tensor.operation.opdef.kind is Kind.VARIABLE and context.platform == "tpu"
        }
        self.inside = Reported()  # what the body reports, once it is traced

    def __call__(self, state: State, scanned: tuple[Array, Mapping[str, Array]]) -> tuple[State, Any]:
        (carries, stacks), (number, slices) = state, scanned
        i, outputs, self.inside = self.instruction, self.body.outputs, Reported()
        updated: dict[Instruction, Stack] = {
            self.updates[end]: Stack(x, number) for end, x in stacks.items() if end in self.updates
        }
        here = replace(self.context.in_trip(number), reported=self.inside, stacks=updated)
        values = self.run(self.body, self._given(carries, stacks, number, slices), here)
        stacks = {
            end: updated[self.updates[end]].array
            if end in self.updates and updated[self.updates[end]].array is not x
            else lax.dynamic_update_index_in_dim(x, values[outputs[end]], number, 0)
            for end, x in stacks.items()
        }
        stacked = {name: values[outputs[name]] for name in i.stacks if name not in stacks}
        ends = [values[outputs[end]] for _, end in i.carries]
        return (ends, stacks), (stacked, (self.inside.checks, self.inside.prints))

    def _given(
        self, carries: Sequence[Array], stacks: Mapping[str, Array], number: Array, slices: Mapping[str, Array]
    ) -> dict[Value, Array]:
        """The inputs of the body in one trip."""
        inputs = self.body.inputs
        values = dict(self.given)
        values.update({inputs[begin]: x for (begin, _), x in zip(self.instruction.carries, carries, strict=True)})
        for name, (x, axis) in self.sliced.items():
            block = lax.dynamic_index_in_dim(x, number, axis, keepdims=False) if axis else slices[name]
            values[inputs[name]] = in_rows(block) if name in self.of_variables else block
        for end, x in stacks.items():
            values[inputs[self.in_place[end]]] = lax.dynamic_index_in_dim(x, number, 0, keepdims=False)
        return values

    def run_all(self) -> list[Array]:
        """All trips of a loop without a condition, in one lax.scan."""
        i, reported = self.instruction, self.context.reported
        first = {name: x for name, (x, axis) in self.sliced.items() if axis == 0}
        numbers = jnp.arange(i.trips, dtype=jnp.int32)
        (finals, written), (stacks, (checks, prints)) = lax.scan(
            self, (self.begin, self.rewritten), (numbers, first), reverse=i.trip_order.step < 0
        )
        stacks |= written
        reported.add(self.inside.checked, [jnp.stack([c[:, 0].max(), c[:, 1].min()]) for c in checks])
        if prints:
            reported.prints.append(prints)
        return [*finals, *(stacks[name] for name in i.stacks)]

    def run_while(self) -> list[Array]:
        """Trips while a carry is true, in one lax.while_loop, which also carries failed checks of all trips."""
        i = self.instruction
        going = [name for name, _ in i.carries].index(i.going or "")
        none = jnp.zeros((), jnp.int32)
        _, (stacks, (checks, prints)) = jax.eval_shape(lambda: self((self.begin, {}), (none, {})))
        if stacks or prints:
            what = "shows values" if prints else "stacks values"
            raise ProgramError(f"{i.operation}: a loop with a condition that {what} does not run on JAX")

        def another(state: tuple[Array, list[Array], list[Array]]) -> tuple[Array, list[Array], list[Array]]:
            number, carries, before = state
            (after, _), (_, (wrong, _)) = self((carries, {}), (number, {}))
            merged = [
                jnp.stack([jnp.maximum(a[0], b[0]), jnp.minimum(a[1], b[1])])
                for a, b in zip(before, wrong, strict=True)
            ]
            return number + 1, after, merged

        _, finals, checks = lax.while_loop(
            lambda state: jnp.logical_and(state[0] < i.trips, state[1][going]),
            another,
            (none, self.begin, passed_checks(len(checks))),
        )
        self.context.reported.add(self.inside.checked, checks)
        return list(finals)


def _single_updates(body: Program, in_place: Mapping[str, str]) -> dict[str, Compute]:
    """Results of a body that update part of a slice of a stack -> the instruction, which writes to the stack."""
    makers = {y: i for i in body.instructions for y in i.outputs}
    updates: dict[str, Compute] = {}
    for end, start in in_place.items():
        v = body.outputs[end]
        i = makers.get(v)
        if not isinstance(i, Compute) or i.inputs[0] is not body.inputs[start] or i.exchanges or v.margins:
            continue
        if row_of(i.operation).stacks:
            updates[end] = i
    return updates
