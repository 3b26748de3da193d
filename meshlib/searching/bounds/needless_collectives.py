"""Collectives over an axis that no lowering has, because other splits of some products send fewer bytes.

A lowering sends the fewest bytes. So it has no product whose split could be exchanged for one that saves more than all
that is sent to convert its operands and its result:

* a pending sum, where the same product split along a dim of the result has a complete one;
* a gather of a value that an axis splits where it is computed, if all users of the value can be split along that dim,
  as the value is.

Bytes are counted over the axis in question, and compared under the worst splits over the others, which stay the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from meshlib.program.instructions import Value
from meshlib.searching.bounds.dataflow import Edge, Flow, Split, ValueUse
from meshlib.searching.bounds.node_splits import FREE, WHOLE
from meshlib.searching.bounds.shared_splits import GATHERS, NOT_SPLIT, Batch, Bools, Floats, Usable

CERTAIN = 0.9  # of what is saved: what else must be sent, at most


@dataclass(frozen=True, eq=False)
class NeedlessCollectives:
    """Needless collectives in one dataflow, for a batch of candidates; `usable`: the options of products."""

    batch: Batch
    flow: Flow
    usable: Usable

    def without_sums(self) -> Usable:
        """The options of products under which they have no needless sum."""
        axes = range(self.batch.count)
        return {
            n: [able & ~self._needless_sums(n, axis) for axis, able in zip(axes, own, strict=True)]
            if self._reduces(n) else own
            for n, own in self.usable.items()
        }  # fmt: skip

    def without_gathers(self) -> Usable:
        """The options of products under which no operand needs a needless gather, whatever the split of its source."""
        left = {n: [*own] for n, own in self.usable.items()}
        for edges in self.flow.apart:
            for axis in range(self.batch.count) if not edges[0].beside else ():
                needless = self.gathers(edges, axis)
                for edge in edges if needless.any() else ():
                    if edge.home is None and edge.target in left:
                        kinds = self.batch.kinds(self.flow, edge, axis)
                        only = (kinds == GATHERS) & needless[:, :, None]
                        if edge.source in self.usable:
                            only |= ~self.usable[edge.source][axis][:, :, None]
                        left[edge.target][axis] = left[edge.target][axis] & ~only.all(axis=1)
        return left

    # ------------------------------------------------------------ sums

    def _reduces(self, number: int) -> bool:
        """True if sums of a product are reduced before another node or a result of the program takes them."""
        node = self.flow.nodes[number]
        if node.product is None or not self.batch.is_plain(node):
            return False
        for v in self._summed(number):
            uses = self.flow.uses_of([v])
            brought = any(use.home is not None and use.node is not None for use in uses)
            for use in uses:
                if use.home is None and use.node not in self.usable:
                    return False
                if use.home is not None and use.node is None and not brought:
                    return False
        return True

    def _summed(self, number: int) -> set[Value]:
        """The values that may be a pending sum of a product."""
        product = self.flow.nodes[number].product
        assert product is not None
        return self.flow.computed_from(product.instruction.outputs, True)

    def _needless_sums(self, number: int, axis: int) -> Bools:
        """Whether another split sends less, for [candidate, option]."""
        splits, parts = self.batch.splits_of(self.flow, number), self.batch.sizes[:, axis]
        able = self.usable[number][axis]
        needless = np.zeros(able.shape, bool)
        product = self.flow.nodes[number].product
        assert product is not None
        sums = [n for n, s in enumerate(splits) if s is not None and s.output is None and able[:, n].any()]
        if not sums or self._passes_on(number, axis):
            return needless
        least_bytes = min(v.local_bytes for v in self._summed(number))
        result = product.instruction.outputs[0].local_bytes / least_bytes
        taken = {s.output: self._is_taken_as(number, axis, s.output) for s in splits if s is not None and s.output}
        for n in sums:
            old = splits[n]
            assert old is not None
            for k, new in enumerate(splits):
                if new is None or new.output is None:
                    continue
                sent = sum(
                    x.local_bytes / least_bytes * self._scale(number, axis, None, operand)
                    * self._operand_sent(number, axis, operand, old, new)
                    for operand, x in enumerate(product.instruction.inputs[:2])
                )  # fmt: skip
                saved = 1 - 1 / parts
                or_whole, alone = taken[new.output]
                exchanged, whole = np.where(or_whole, 0.0, result * 2 / parts), np.where(alone, 0.0, result)
                less = (sent + exchanged < CERTAIN * saved) & (sent + whole < CERTAIN * 2 * saved)
                needless[:, n] |= less & self._is_possible(number, axis, k)
        return needless

    def _operand_sent(self, number: int, axis: int, operand: int, old: Split, new: Split) -> Floats:
        """The most that is sent for an operand under another split, relative to its size: little where the axis splits
        all large values that it is computed from in that way already."""
        parts, form = self.batch.sizes[:, axis], new.operands[operand]
        sent = _most_sent(old.operands[operand], form, parts)
        edges = [edge for edge in self.flow.edges[number] if edge.operand == operand]
        largest = max((edge.least_bytes for edge in edges), default=0.0)
        if form is None or not largest:
            return sent
        others = np.zeros(len(parts))
        for edge in edges:
            others += np.where(self._is_split(edge.source, axis, form), 0.0, edge.least_bytes / largest)
        return np.minimum(sent, others)

    def _is_split(self, source: int, axis: int, form: str) -> Bools:
        """For each candidate, whether an axis splits the result of a node along a dim under all usable options."""
        if self.flow.nodes[source].placed is None and source not in self.usable:
            return np.zeros(len(self.batch.candidates), bool)
        forms, at = self.batch.results(self.flow, source, axis)
        split = (np.array(forms) == form)[at]
        able = self.usable[source][axis] if source in self.usable else np.ones(at.shape, bool)
        certain: Bools = (split | ~able).all(axis=1)
        return certain

    def _is_taken_as(self, number: int, axis: int, form: str) -> tuple[Bools, Bools]:
        """For each candidate, whether an axis must split a product's result along a dim wherever it is used: or not at
        all; always."""
        product = self.flow.nodes[number].product
        assert product is not None
        or_whole, always = np.ones((2, len(self.batch.candidates)), bool)
        for use in self.flow.uses_of(self.flow.computed_from(product.instruction.outputs)):
            if use.home is not None:
                homes, at = self.batch.homes(use.home, axis)
                always &= np.array(homes)[at] == form
                or_whole &= np.isin(np.array(homes)[at], (form, WHOLE))
            elif use.node is None or use.node not in self.usable:
                return np.zeros_like(always), np.zeros_like(always)
            else:
                splits = self.batch.splits_of(self.flow, use.node)
                forms = [WHOLE if s is None else FREE if s.free else s.operands[use.operand] or WHOLE for s in splits]
                unusable = ~self.usable[use.node][axis]
                always &= (np.isin(forms, (form,)) | unusable).all(axis=1)
                or_whole &= (np.isin(forms, (form, WHOLE)) | unusable).all(axis=1)
        return or_whole, always

    def _passes_on(self, number: int, axis: int) -> bool:
        """True if another product may take a pending sum, because an axis may leave it unsplit."""
        for use in self.flow.uses_of(self._summed(number)):
            if use.home is None and use.node is not None:
                taken = [e.taken for e in self.flow.edges[use.node] if e.operand == use.operand]
                splits = self.batch.splits_of(self.flow, use.node)
                passes = any(taken or [True])
                unsplit = [passes if s is None else s.free for s in splits]
                if (self.usable[use.node][axis] & np.array(unsplit)).any():
                    return True
        return False

    # ------------------------------------------------------------ gathers

    def gathers(self, edges: Sequence[Edge], axis: int) -> Bools:
        """Whether a gather over an axis of the value on some edges from one source is needless, for [candidate, option
        of the source]."""
        source = edges[0].source
        forms, at = self.batch.results(self.flow, source, axis)
        uses = self.flow.uses_along(edges)
        gathered_bytes = min(edge.least_bytes for edge in edges)
        by_form = [self._spares(uses, source, axis, form, gathered_bytes) for form in forms]
        needless: Bools = np.array(by_form)[at, np.arange(len(at))[:, None]]
        return needless

    def _spares(self, uses: Sequence[ValueUse], source: int, axis: int, form: str, gathered_bytes: float) -> Bools:
        """For each candidate, whether it is cheaper to split all users along the dim `form` of the value."""
        total = np.zeros(len(self.batch.candidates))
        if form in NOT_SPLIT or gathered_bytes <= 0:
            return total > 0
        for use in uses:
            if use.home is not None:
                homes, at = self.batch.homes(use.home, axis)
                total += np.where(np.array(homes)[at] == form, 0.0, np.inf)
            else:
                total += self._sent(use, source, axis, form, gathered_bytes)
            if not np.isfinite(total).any():
                break
        return total < CERTAIN

    def _sent(self, use: ValueUse, source: int, axis: int, form: str, gathered_bytes: float) -> Floats:
        """The most that a product sends to be split along a dim of an operand, relative to the operand's gather."""
        batch, nothing = self.batch, np.full(len(self.batch.candidates), np.inf)
        if use.node is None or use.node not in self.usable:
            return nothing
        node = self.flow.nodes[use.node]
        if node.product is None or not batch.is_plain(node):
            return nothing
        splits = batch.splits_of(self.flow, use.node)
        number = next((n for n, s in enumerate(splits) if s is not None and s.operands[use.operand] == form), None)
        new = None if number is None else splits[number]
        if number is None or new is None:
            return nothing
        parts, able, other = batch.sizes[:, axis], self.usable[use.node][axis], 1 - use.operand
        instruction = node.product.instruction
        of_other = instruction.inputs[other].local_bytes * self._scale(use.node, axis, use.operand, other)
        of_result = instruction.outputs[0].local_bytes * self._scale(use.node, axis, use.operand, None)
        most = np.zeros(len(parts))
        for n, old in enumerate(splits):
            if n == number:
                continue
            sent = nothing
            if old is not None:
                operand_sent = _most_sent(old.operands[other], new.operands[other], parts)
                sent = of_other * operand_sent + of_result * _result_sent(old, new, parts)
            most = np.maximum(most, np.where(able[:, n], sent, 0.0))
        moved = self._reordered(use, source, axis, form) / (parts - 1)
        relative = most / gathered_bytes * parts / (parts - 1) + moved
        return np.where(self._is_possible(use.node, axis, number), relative, np.inf)

    def _reordered(self, use: ValueUse, source: int, axis: int, form: str) -> Floats:
        """For each candidate, 1 if the blocks of the value may be in another order than those that a product takes,
        since a further axis may split the dim at only one of both; 0 if not."""
        assert use.node is not None
        differs = np.zeros(len(self.batch.candidates), bool)
        for beside in (n for n in range(self.batch.count) if n != axis):
            forms, at = self.batch.results(self.flow, source, beside)
            able = self.usable[source][beside] if source in self.usable else np.ones(at.shape, bool)
            here = np.array([f == form for f in forms])[at]
            splits = self.batch.splits_of(self.flow, use.node)
            there = np.array([s is not None and s.operands[use.operand] == form for s in splits])
            used = self.usable[use.node][beside]
            always = (here | ~able).all(axis=1) & (there | ~used).all(axis=1)
            differs |= (used & there).any(axis=1) & ~always
        return np.where(differs, 1.0, 0.0)

    # ------------------------------------------------------------ both

    def _is_possible(self, number: int, axis: int, option: int) -> Bools:
        """For each candidate, whether a lowering certainly considers an option of a product over an axis: a rule names
        one of its dims, and it divides whatever the other axes split."""
        split = self.batch.splits_of(self.flow, number)[option]
        assert split is not None
        named = np.array([not dims.isdisjoint(split.operands) for dims in self.batch.rule_dims(axis)])
        divides = np.array([split.size % c.slice.devices == 0 for c in self.batch.candidates])
        possible: Bools = self.usable[number][axis][:, option] & named & divides
        return possible

    def _scale(self, number: int, axis: int, value: int | None, of: int | None) -> Floats:
        """By how much an operand, or the result (None), may be larger on a device, relative to the operand `value`,
        than on one device, because other axes split that alone. Without a value: relative to one that all axes split.
        """
        scale = np.ones(len(self.batch.candidates))
        splits = self.batch.splits_of(self.flow, number)
        for beside in (n for n in range(self.batch.count) if n != axis):
            size, most = self.batch.sizes[:, beside], np.zeros(len(scale))
            for n, s in enumerate(splits):
                is_split = value is None or (s is not None and s.operands[value] is not None)
                own = s is not None and (s.output if of is None else s.operands[of]) is not None
                factor = size if is_split and not own else 1 / size if own and not is_split else 1.0
                most = np.maximum(most, np.where(self.usable[number][beside][:, n], factor, 0.0))
            scale *= most
        return scale


def _most_sent(old: str | None, new: str | None, parts: Floats) -> Floats:
    """Upper bound on what is sent to convert a value, relative to its size if the axis does not split it: also if its
    blocks, or those of further axes, must be put in another order."""
    if old is None or old == new:
        return np.zeros(len(parts))
    return np.ones(len(parts)) if new is None else 2 / parts


def _result_sent(old: Split, new: Split, parts: Floats) -> Floats:
    """Upper bound on what is sent to convert the result of the new split into that of the old one."""
    if new.output is None:
        return np.zeros(len(parts)) if old.output is None else np.ones(len(parts))
    return np.full(len(parts), np.inf) if old.output is None else _most_sent(new.output, old.output, parts)
