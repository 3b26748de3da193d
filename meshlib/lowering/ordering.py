"""The final order: fusion groups scheduled so that memory is freed as early as possible.

Recomputed values come right before their first user, and so do variables stored on the host. A user of a value in
flight waits for a product, if there is one, that hides the transfer; a user that leads to no product (the update of a
weight by a gradient being reduced) waits until about as much has been computed as the transfer takes. Then groups that
run row by row are joined, and collectives are issued one product early if they do not depend on it (the weights of the
next layer arrive while this one computes), and no earlier, because what arrives takes memory. This is *the* order: the
executors, the buffers and the estimate all use it.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from meshlib.core.opdef import ON_MXU, Kind
from meshlib.lowering.fusion import fusion_groups, join_rows, kinds_of, numbered
from meshlib.program.analysis.work import local_work
from meshlib.program.instructions import Compute, Instruction, Loop, Move, Resident, Value
from meshlib.program.records import Program, walk

Group: TypeAlias = Sequence[Instruction]

_FIRST, _NEXT, _LAST = range(3)
# Nominal computation during a collective: at 100 Tflop/s, 50 GB/s, and 20 us for its start.
FLOPS_PER_SENT_BYTE = 2_000
FLOPS_PER_START = 2_000_000_000


@dataclass(eq=False)
class _Scheduler:
    """List scheduling: groups that free more memory than they take go first, others in their original order.

    Users of a collective are not first while it is in flight: until the next product if they lead to one, otherwise
    until nominally enough flops have been computed.
    """

    program: Program
    groups: Sequence[Group]

    def run(self) -> list[Group]:
        self._analyse()
        self._note_lasting()
        ready: list[tuple[int, int]] = []
        sent: set[Value] = set()  # by collectives since the last product
        arrives: dict[Value, float] = {}  # nominal flops completed when a collective's result arrives
        flops = 0.0
        waiting: list[int] = []  # groups that use values in flight
        done = [False] * len(self.groups)
        for g, count in enumerate(self.unmet):
            if count == 0:
                there = isinstance(self.groups[g][0], Resident)  # resident in memory, so nothing waits for it
                heapq.heappush(ready, (_FIRST if there else self._priority(g, late=False), g))
        order: list[Group] = []
        while ready:
            _, g = heapq.heappop(ready)
            if done[g]:
                continue
            done[g] = True
            order.append(self.groups[g])
            for i in self.groups[g]:
                if i.is_collective:
                    sent.update(i.outputs)
                    wire_flops = FLOPS_PER_START + FLOPS_PER_SENT_BYTE * i.sent_bytes
                    arrives.update(dict.fromkeys(i.outputs, flops + wire_flops))
            touched = self._finish(g)
            if self.hidden_flops[g]:
                flops += self.hidden_flops[g]
                sent.clear()
                touched, waiting = sorted({*touched, *waiting}), []
            for user in touched:
                if self.unmet[user] == 0 and not done[user]:
                    if self.leads_on[user]:
                        late = not sent.isdisjoint(self.inputs[user])
                    else:
                        late = any(arrives.get(x, 0) > flops for x in self.inputs[user])
                    heapq.heappush(ready, (self._priority(user, late), user))
                    if late:
                        waiting.append(user)
        assert len(order) == len(self.groups)
        return order

    def _priority(self, g: int, late: bool) -> int:
        """Priority of a group; `late`: one of its operands is still in flight."""
        if not any(self.users.get(y) for i in self.groups[g] for y in i.outputs):
            numbers = all(x.sharding.local_size == 1 for x in self.inputs[g])
            if numbers:
                return _LAST  # nothing depends on a loss
        if late and not self.leads_on[g]:
            return _LAST  # or on a new weight
        return _FIRST if self._frees(g) and not late else _NEXT

    def _analyse(self) -> None:
        """Determine producers and users of the values that leave their group."""
        self.made_in = {y: g for g, group in enumerate(self.groups) for i in group for y in i.outputs}
        self.inputs = [
            {x for i in group for x in i.inputs if self.made_in[x] != g} for g, group in enumerate(self.groups)
        ]
        self.users: dict[Value, set[int]] = {}
        for g, inputs in enumerate(self.inputs):
            for x in inputs:
                self.users.setdefault(x, set()).add(g)
        self.left = {x: len(users) for x, users in self.users.items()}
        self.unmet = [len(xs) for xs in self.inputs]
        self.hidden_flops = [sum([hidden_flops(self.program, i) for i in group]) for group in self.groups]
        self.leads_on = [bool(flops) for flops in self.hidden_flops]  # to a product or loop
        for g in reversed(range(len(self.groups))):
            users = {u for i in self.groups[g] for y in i.outputs for u in self.users.get(y, ())}
            self.leads_on[g] |= any(self.leads_on[u] for u in users)

    def _note_lasting(self) -> None:
        """Determine the values that no reader frees, and the updates that replace their variable."""
        program = self.program
        self.lasting = {*program.outputs.values(), *program.inputs.values(), *program.variables.values()}
        # A variable's new value replaces the old one once that has no other readers.
        self.replaces = {
            v: program.variables[name]
            for name, v in program.updates.items()
            if name in program.variables and v not in self.lasting
        }

    def _frees(self, g: int) -> bool:
        freed = sum(_device_bytes(x) for x in self.inputs[g] if self.left[x] == 1 and x not in self.lasting)
        taken = 0
        for i in self.groups[g]:
            for y in i.outputs:
                if not (self.users.get(y) or y in self.lasting) or isinstance(i, Resident):
                    continue
                old = self.replaces.get(y)
                in_place = old is not None and self.left.get(old, 0) == (old in self.inputs[g])
                taken += 0 if in_place else _device_bytes(y)
        return freed > taken

    def _finish(self, g: int) -> list[int]:
        """Update the state after running `g`; returns groups that may have become ready, or of higher priority."""
        touched: set[int] = set()
        for x in self.inputs[g]:
            self.left[x] -= 1
            if self.left[x] == 1:
                touched |= self.users[x]
        for i in self.groups[g]:
            for y in i.outputs:
                for user in self.users.get(y, ()):
                    self.unmet[user] -= 1
                    touched.add(user)
        return sorted(touched)


def _device_bytes(v: Value) -> int:
    return 0 if v.tensor.on_host else v.local_bytes


def _hides(i: Instruction) -> bool:
    """True if an instruction computes long enough to hide a collective."""
    return isinstance(i, Loop) or _computes(i, (Kind.CONTRACTION,))


def hidden_flops(program: Program, i: Instruction) -> float:
    """Flops of an instruction that can hide a collective."""
    if isinstance(i, Loop):
        inside = [times * local_work(p, j).mxu_flops for j, p, times in walk(i.body) if _computes(j, ON_MXU)]
        return max(1.0, i.trips * sum(inside))  # a loop without products hides something, too
    return float(local_work(program, i).mxu_flops) if _hides(i) else 0.0


def _computes(i: Instruction, kinds: Container[Kind]) -> bool:
    return isinstance(i, Compute) and i.operation.opdef.kind in kinds


def order_and_fuse(program: Program) -> Program:
    """The program in its final order, every instruction with its fusion group."""
    kinds = kinds_of(program)
    scheduled = _Scheduler(program, _on_demand(fusion_groups(program, kinds), _is_recomputed)).run()
    if any(v.tensor.on_host for v in program.variables.values()):
        scheduled = _on_demand(scheduled, _is_from_host)
    return program.with_instructions(numbered(issue_early(join_rows(scheduled, kinds))))


def _is_recomputed(group: Group) -> bool:
    """True if the group is a recomputation in the backward pass."""
    return all(i.operation in i.operation.graph.again for i in group)


def _is_from_host(group: Group) -> bool:
    """True if the group copies values from host memory."""
    return all(i.operation.opdef.kind is Kind.COPY and not i.outputs[0].tensor.on_host for i in group)


def _on_demand(groups: Sequence[Group], delayed: Callable[[Group], bool]) -> list[Group]:
    """The groups, with each delayed one right before its first user."""
    maker = {y: g for g, group in enumerate(groups) for i in group for y in i.outputs}
    needs = [{maker[x] for i in group for x in i.inputs} - {g} for g, group in enumerate(groups)]
    wanted = set().union(*needs)
    again = [g in wanted and delayed(group) for g, group in enumerate(groups)]
    order: list[Group] = []
    written: set[int] = set()
    for g in range(len(groups)):
        waiting = [] if again[g] else [g]
        while waiting:
            missing = needs[waiting[-1]] - written
            if missing:
                waiting += sorted(missing, reverse=True)
                continue
            last = waiting.pop()
            if last not in written:
                written.add(last)
                order.append(groups[last])
    return order


def issue_early(groups: Sequence[Group]) -> list[Group]:
    """Move collectives, with the casts that prepare them, before the last product that they do not depend on."""
    order: list[Group] = []
    depth: dict[Value, int] = {}  # number of products up to and including a value
    waiting: list[Group] = []  # groups since the last product, that product first
    products = 0
    for group in groups:
        behind = max([depth[x] for i in group for x in i.inputs if x in depth], default=0)
        if any(_hides(i) for i in group):
            order += waiting
            waiting = []
            products += 1
            behind = products
        first = group[0]
        if isinstance(first, Move) and first.is_collective and behind < products:
            order += [*_take_producers(waiting, first.inputs), [replace(first, early=True)]]
        else:
            waiting.append(group)
        for i in group:
            for y in i.outputs:
                depth[y] = behind
    return [*order, *waiting]


def _take_producers(waiting: list[Group], wanted: Sequence[Value]) -> list[Group]:
    """Remove from `waiting` the groups that `wanted` values depend on; returns them in order."""
    needed, chosen = set(wanted), []
    for group in reversed(waiting):
        if any(y in needed for i in group for y in i.outputs):
            needed.update(x for i in group for x in i.inputs)
            chosen.append(group)
    waiting[:] = [group for group in waiting if not any(group is other for other in chosen)]
    return chosen[::-1]
