"""What a record says of the function that its operation is: linear, arithmetic, exact, made again, what is read."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout
from io import StringIO
from itertools import combinations, product

import numpy as np

from hardware.numerics import round_to_bfloat16
from layouts import Shape
from meshlib.core.dtypes import BFLOAT16, BOOL, FLOAT32, INT32
from meshlib.core.errors import FeedError
from meshlib.core.opdef import RESIDENT, Combination, Form, Home, Kind, OpDef, PowerProduct, Storage, Total
from tests.cases import Array
from tests.ops.traits.samples import EXCUSED, STRUCTURE, Sample, apply, same, stored

# ---------------------------------------------------------------- linear


def check_linear(record: OpDef, uses: Sequence[Sample]) -> Iterator[str]:
    """f(a + b) = f(a) + f(b) in the operands that are said to be, and in no others."""
    for s in uses if record.kind not in (*RESIDENT, Kind.LOOP) else ():
        said, floats = record.linear(s.op), s.floats()
        if any(x.dtype is s.op.output.dtype is BFLOAT16 for x in s.op.inputs):
            continue  # its rounding hides it
        if s.op.output.dtype.is_float and not set(said.operands) <= set(floats):
            yield f"{s}: linear in {said.operands}, of which some are not floats"
        together = [list(said.operands)] if said.together else [[n] for n in said.operands]
        for operands in together:
            if set(operands) <= set(floats) and operands and not _is_linear(record, s, operands, said=True):
                yield f"{s}: not linear in {operands}"
        if (record.name, "linear") in EXCUSED:
            continue  # what is not whole is not found out
        forgotten = [[n] for n in floats if n not in said.operands]
        if not said.operands:
            forgotten += [list(some) for size in range(2, len(floats) + 1) for some in combinations(floats, size)]
        for operands in forgotten:
            if _is_linear(record, s, operands):
                yield f"{s}: linear in {operands}, and does not say so"


def _is_linear(record: OpDef, s: Sample, operands: Sequence[int], said: bool = False) -> bool:
    rng = s.rng
    a, b = ({n: rng.normal(size=s.arrays[n].shape).astype(s.arrays[n].dtype) for n in operands} for _ in range(2))
    at = [[parts.get(n, x) for n, x in enumerate(s.arrays)] for parts in (a, b, {n: a[n] + b[n] for n in operands})]
    first, second, both = (stored(s.op, apply(record, s.op, arrays)) for arrays in at)
    if not all(np.issubdtype(y.dtype, np.floating) for y in both):
        return False
    single = (said and s.op.output.dtype is FLOAT32) or any(s.arrays[n].dtype == np.float32 for n in operands)
    narrow = single and not s.op.output.dtype.is_rounded
    return same([x + y for x, y in zip(first, second, strict=True)], both, 1e-6 if narrow else 1e-11)


# ---------------------------------------------------------------- arithmetic


def check_form(record: OpDef, uses: Sequence[Sample]) -> Iterator[str]:
    """The result is the product, combination or total that it is said to be; element by element, no other is one."""
    for s in uses:
        form = record.form(s.op)
        arithmetic = s.op.output.dtype.is_float and len(s.floats()) == len(s.op.inputs)
        if form is not None and s.op.output.dtype.is_float and not arithmetic:
            yield f"{s}: is no {form} of operands that are not floats"
        if record.kind in STRUCTURE or not arithmetic:
            continue
        if form is not None and not _is_form(record, s, form):
            yield f"{s}: is no {form}"
        if form is None and record.kind is Kind.ELEMENTWISE and record.home is Home.RULES:
            number = len(s.op.inputs)
            products = [PowerProduct(p, n) for p in product((-1, 1, 2), repeat=number) for n in (1.0, -1.0)]
            sums = [Combination(n) for n in product((-1.0, 1.0), repeat=number) if number > 1]
            yield from (f"{s}: is {f}, and does not say so" for f in (*products, *sums) if _is_form(record, s, f))


def _is_form(record: OpDef, s: Sample, form: Form) -> bool:
    numbers = {PowerProduct: "powers", Combination: "numbers"}.get(type(form))
    if numbers is not None and len(getattr(form, numbers)) != len(s.arrays):
        return False
    rng = s.rng
    arrays = [rng.uniform(0.5, 2.0, x.shape) * rng.choice([-1.0, 1.0], x.shape) for x in s.arrays]
    made = apply(record, s.op, [np.asarray(x, y.dtype) for x, y in zip(arrays, s.arrays, strict=True)])[0]
    dims = [d for x in s.op.inputs for d in x.shape]
    names = list(dict.fromkeys([*(d.name for d in dims), *s.op.output.shape.names]))
    letters = {name: chr(ord("a") + n) for n, name in enumerate(names)}
    out = "".join(letters[n] for n in s.op.output.shape.names)
    terms = ["".join(letters[n] for n in x.shape.names) for x in s.op.inputs]
    whole = np.ones(s.op.output.shape.sizes)
    if isinstance(form, Total):
        wanted = np.einsum(f"{','.join(terms)}->{out}", *arrays)
    elif isinstance(form, PowerProduct):
        if any(letter not in out for letter in "".join(terms)):
            return False
        parts = [np.power(x, n) for x, n in zip(arrays, form.powers, strict=True)]
        wanted = form.number * np.einsum(f"{','.join([*terms, out])}->{out}", *parts, whole)
    else:
        if any(letter not in out for letter in "".join(terms)):
            return False
        parts = [np.einsum(f"{t},{out}->{out}", x, whole) for t, x in zip(terms, arrays, strict=True)]
        wanted = sum(n * x for n, x in zip(form.numbers, parts, strict=True))
    return same([np.asarray(made, np.float64)], [np.asarray(wanted)], 1e-6)


# ---------------------------------------------------------------- made again, rounded, unique


def check_remade(record: OpDef, uses: Sequence[Sample]) -> Iterator[str]:
    """A source that is always the same, or a number in every place, needs nothing that lies elsewhere."""
    numbers = [s for s in uses if s.op.inputs and s.op.output.shape.size > 1 and all(not x.shape for x in s.op.inputs)]
    repeats = [all(bool((apply(record, s.op, s.arrays)[0] == x).all()) for x in s.arrays) for s in numbers]
    source = not any(s.op.inputs for s in uses) and record.kind not in RESIDENT and not record.unique
    wanted = source or (bool(numbers) and all(repeats) and record.storage is Storage.VIEW)
    if record.remade != wanted:
        yield f"{record.name}: remade is {record.remade}, should be {wanted}"


def check_repeated(record: OpDef, uses: Sequence[Sample]) -> Iterator[str]:
    """Casts, scalings and shifts: of one operand or two, affine in the first."""
    simple = record.kind is Kind.ELEMENTWISE and all(len(s.op.inputs) <= 2 for s in uses)
    wanted = simple and (record.home is Home.OPERAND or all(_is_affine(record, s) for s in uses))
    if record.repeated != wanted:
        yield f"{record.name}: repeated is {record.repeated}, should be {wanted}"


def _is_affine(record: OpDef, s: Sample) -> bool:
    if not s.op.output.dtype.is_float:
        return all(x.dtype is not BOOL for x in (*s.op.inputs, s.op.output))  # its float rows tell
    if 0 not in s.floats():
        return False
    a, b = (s.rng.normal(size=s.arrays[0].shape) * scale for scale in (1.0, -3.0))
    first, second, middle = (apply(record, s.op, [x, *s.arrays[1:]])[0] for x in (a, b, (a + b) / 2))
    return same([(first + second) / 2], [middle], 1e-11)


def check_exact(record: OpDef, uses: Sequence[Sample]) -> Iterator[str]:
    """Operands in bfloat16, of many magnitudes, make a result that is; `uses` are in bfloat16."""
    rounds = tried = False
    for s, scale in product(uses if record.kind not in (*RESIDENT, Kind.LOOP) else (), (False, True)):
        arrays = list(s.arrays)
        for n in s.floats() if scale else ():
            spread = s.rng.choice([-1.0, 1.0, 1.0], arrays[n].shape) * 2.0 ** s.rng.integers(-8, 9, arrays[n].shape)
            arrays[n] = np.asarray(arrays[n] * spread, arrays[n].dtype)
        if any(x.dtype.is_float and x.dtype is not BFLOAT16 for x in s.op.inputs):
            arrays = [np.asarray(x, x.dtype) for x in arrays]  # a narrowing cast: of operands that are wider
        for t, y in zip(s.op.outputs, apply(record, s.op, arrays), strict=True):
            if t.dtype is BFLOAT16:
                tried = True
                rounds |= not np.array_equal(round_to_bfloat16(y), y, equal_nan=True)
    if tried and record.exact == rounds:
        yield f"{record.name}: exact is {record.exact}, and it {'rounds' if rounds else 'rounds nothing'}"


def check_unique(record: OpDef, uses: Sequence[Sample]) -> Iterator[str]:
    """Two of them with other names, on the same operands."""
    if record.kind is Kind.LOOP:
        return
    differ = record.kind in (*RESIDENT, Kind.COMMIT)  # of which the graph holds one by each name
    for s in uses if not differ else ():
        other = dataclasses.replace(s.op, name=f"{s.op.name}_other")
        differ |= not same(apply(record, s.op, s.arrays), apply(record, other, s.arrays))
    if record.unique != differ:
        yield f"{record.name}: unique is {record.unique}, and two of them {'differ' if differ else 'are the same'}"


# ---------------------------------------------------------------- what is read


def check_reads_part(record: OpDef, uses: Sequence[Sample]) -> Iterator[str]:
    """Whether elements of operand 0 that may be anything are left out of smaller results."""
    smaller = [s for s in uses if 0 in s.floats() and s.op.output.shape.size < s.arrays[0].size]
    if record.kind in STRUCTURE:
        smaller = []
    wanted = bool(smaller) and all(_leaves_out(record, s) for s in smaller)
    if record.reads_part != wanted:
        yield f"{record.name}: reads_part is {record.reads_part}, should be {wanted}"


def _leaves_out(record: OpDef, s: Sample) -> bool:
    whole = apply(record, s.op, s.arrays)
    return any(_is_unread(record, s, whole, at) for at in np.ndindex(s.arrays[0].shape))


def _is_unread(record: OpDef, s: Sample, whole: tuple[Array, ...], at: tuple[int, ...]) -> bool:
    for value in (np.nan, 1e30, -1e30):
        x = s.arrays[0].copy()
        x[at] = value
        if not same(apply(record, s.op, [x, *s.arrays[1:]]), whole):
            return False
    return True


def check_writes_part(record: OpDef, uses: Sequence[Sample]) -> Iterator[str]:
    """Whether the result is operand 0 but for as many elements as operand 1 has, which is smaller."""
    fresh = record.kind not in STRUCTURE and record.storage is Storage.FRESH
    tried = [s for s in uses if fresh and len(s.op.outputs) == 1 and len(s.arrays) > 1]
    tried = [s for s in tried if s.op.inputs[0].type == s.op.output.type and s.arrays[1].size < s.arrays[0].size]
    differing = [(apply(record, s.op, s.arrays)[0] != s.arrays[0], s.arrays[1].size) for s in tried]
    wanted = bool(tried) and all(np.count_nonzero(other) <= most for other, most in differing)
    if record.writes_part != wanted:
        yield f"{record.name}: writes_part is {record.writes_part}, should be {wanted}"
    if record.writes_part and not record.overwrites:
        yield f"{record.name}: writes_part, but not over operand 0"


def check_indices(record: OpDef, uses: Sequence[Sample]) -> Iterator[str]:
    """An index far outside is refused, in the operand that holds indices and in no other."""
    for s in uses if record.kind not in STRUCTURE else ():
        if s.op.attrs.get("out_of_range", "error") != "error":
            continue
        for n, x in enumerate(s.arrays):
            if s.op.inputs[n].dtype is not INT32 or not x.size:
                continue
            far = x.copy()
            far.flat[0] = 10**6
            try:
                apply(record, s.op, [*s.arrays[:n], far, *s.arrays[n + 1 :]])
                refused = False
            except FeedError:
                refused = True
            if refused != (record.indices == n):
                yield f"{s}: indices is {record.indices}, and operand {n} is {'looked up' if refused else 'a number'}"
    if record.indices is not None and not all(
        s.op.inputs[record.indices : record.indices + 1] and s.op.inputs[record.indices].dtype is INT32 for s in uses
    ):
        yield f"{record.name}: operand {record.indices} holds no indices"


def check_scores(record: OpDef, uses: Sequence[Sample]) -> Iterator[str]:
    """The products of a pair of query and key make up the flops."""
    for s in uses if record.scores else ():
        assert record.scores is not None
        q, k, v = (x.shape for x in s.op.inputs[:3])
        sizes = {"key_dim": q.dim(s.op.attrs["key_dim"]).size, "value_dim": v.dim(s.op.attrs["value_dim"]).size}
        pairs = Shape([d for d in q if d.name != s.op.attrs["key_dim"]]).size * k.dim(s.op.attrs["memory_length"]).size
        work = record.work(tuple(x.type for x in s.op.inputs), s.op.output.type, s.op.attrs)
        if work.mxu_flops != 2 * pairs * sum(sizes[d] for d in (*record.scores.contracted, *record.scores.turned)):
            yield f"{s}: {work.mxu_flops} flops are not those of its products"
        # The cotangent of the result has its dims; masks and a bias have those of scores.
        if record.scores.backward != any(s.op.attrs["value_dim"] in x.shape for x in s.op.inputs[3:]):
            yield f"{s}: backward is {record.scores.backward}"


def check_product(record: OpDef, uses: Sequence[Sample]) -> Iterator[str]:
    """Contractions are matrix products that make the result and need their flops, or those of padding besides."""
    if (record.product is None) != (record.kind is not Kind.CONTRACTION):
        yield f"{record.name}: {record.kind} with sizes of a product, or without"
        return
    for s in uses if record.product else ():
        assert record.product is not None
        types = tuple(x.type for x in s.op.inputs), s.op.output.type, s.op.attrs
        p, work = record.product(*types), record.work(*types)
        made = p.batch * p.rows * p.columns
        passes = 6 if s.op.attrs["precision"] == "highest" else 1
        flops = 2 * made * p.contracted * p.taps * passes
        padded = record.lower is not None
        if not (work.mxu_flops <= flops <= 4 * work.mxu_flops if padded else flops == work.mxu_flops):
            yield f"{s}: {flops} flops of its product, {work.mxu_flops} in all"
        size = s.op.output.shape.size
        fits = size % made == 0 if p.groups_summed else size == made  # a result for each group
        if (p.taps == 1 and not padded) and not fits:
            yield f"{s}: its product makes {made} elements"
        first = p.batch * (p.columns if p.swapped else p.rows) * p.contracted
        if not padded and first > s.op.inputs[0].shape.size:
            yield f"{s}: operand 0 has no {first} elements"


def check_read_share(record: OpDef, uses: Sequence[Sample]) -> Iterator[str]:
    """All of an operand is read, but of the matrices of groups those that some draw of rows chooses."""
    rng = np.random.default_rng(0)
    for s in uses if record.read_share else ():
        assert record.read_share is not None
        ins, out, attrs = tuple(x.type for x in s.op.inputs), s.op.output.type, s.op.attrs
        shares = [record.read_share(n, ins, out, {**attrs, "draws": None}) for n in range(len(ins))]
        if any(share != 1 for share in shares):
            yield f"{s}: {shares} of its operands are read, whatever the data"
        if attrs["groups"] not in ins[1].shape.names:
            continue
        rows, count = ins[0].shape.dim(attrs["rows"]).size, int(attrs["count"])
        bounds = ins[-2].shape
        runs = bounds.size // math.prod(d.size for d in bounds if d.name in ins[1].shape.names)
        for draws in (n for n in range(1, rows + 1) if rows % n == 0 and rows // n <= count):
            hit = [
                len({g for _ in range(draws * runs) for g in rng.choice(count, rows // draws, replace=False)}) / count
                for _ in range(400)
            ]
            share = record.read_share(1, ins, out, {**attrs, "draws": draws, "filled": 1.0})
            if abs(share - np.mean(hit)) > 0.06:
                yield f"{s}: {share:.3f} of the groups are read, {np.mean(hit):.3f} in {draws} draws"


def check_show(record: OpDef, uses: Sequence[Sample]) -> Iterator[str]:
    """Operands that leave no trace in the result are there to be shown, and without them nothing is."""
    if record.kind in STRUCTURE:
        return
    idle = bool(uses) and all(len(s.op.inputs) > 1 and _reads_first_only(record, s) for s in uses)
    if (record.show is not None) != idle:
        yield f"{record.name}: operands are shown that the result depends on, or not shown that it does not"
    for s in uses if record.show else ():
        assert record.show is not None
        for data in ((), s.arrays[1:]):
            with redirect_stdout(StringIO()) as shown:
                record.show(dataclasses.replace(s.op, inputs=s.op.inputs[: 1 + len(data)]), data)
            if bool(shown.getvalue()) != bool(data):
                yield f"{s}: shows {shown.getvalue()!r} of {len(data)} operands"


def _reads_first_only(record: OpDef, s: Sample) -> bool:
    others = [s.rng.permutation(x.ravel()).reshape(x.shape) for x in s.arrays[1:]]
    return same(apply(record, s.op, [s.arrays[0], *others]), apply(record, s.op, s.arrays))


CHECKS = {
    "linear": check_linear,
    "form": check_form,
    "remade": check_remade,
    "repeated": check_repeated,
    "exact": check_exact,
    "unique": check_unique,
    "reads_part": check_reads_part,
    "writes_part": check_writes_part,
    "indices": check_indices,
    "scores": check_scores,
    "product": check_product,
    "read_share": check_read_share,
    "show": check_show,
}
