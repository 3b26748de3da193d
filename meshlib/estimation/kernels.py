"""Fusion groups as work of one device: matrix products, vector operations, bytes at the boundary. No time yet.

Counts are exact and without padding; `padded_bytes` and `padded_vpu_ops` are what tiles of (8, 128) make of them.
A value that is made and used inside one group takes no bytes; groups are those of the program. One that
follows by a cast or a scaling from a value no wider is never stored: its readers read that and do it again. An
operation that looks only at a part of an operand (gather, slice) reads that part.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import ceil
from typing import TypeGuard

from hardware.core import Matmul
from hardware.memory import SUBLANES, padded_bytes
from layouts import Sharding
from meshlib.dtypes import BFLOAT16, INT4
from meshlib.estimation.tiles import tiled_bytes
from meshlib.graph import FORWARD, Tensor
from meshlib.operation import RESIDENT, Kind, Product, Scores, Storage
from meshlib.ops.attention import seen_pairs
from meshlib.ops.einsum import EIGHT_BIT
from meshlib.program.instructions import Commit, Compute, Instruction, Loop, Move, Resident, Value
from meshlib.program.records import Program, walk
from meshlib.program.work import attributes, local_types, local_work


@dataclass(frozen=True, slots=True)
class Attention:
    """What a kernel of fused attention computes on one device.

    Attributes:
      of: what its record says.
      scores: pairs of query and key in the tiles that it computes, all heads and sequences; key, value: sizes of the
        dims of one head; passes: runs through the MXU.
    """

    of: Scores
    scores: int
    key: int
    value: int
    passes: int

    def products(self, together: bool) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Products per score, as sizes of head dims: those contracted over, and those that stream instead.

        `together`: scores and their cotangents, which both gradients need, are computed with the keys' gradient only.
        """
        sizes = {"key_dim": self.key, "value_dim": self.value}
        contracted = () if together and self.of.spared else self.of.contracted
        return tuple(sizes[d] for d in contracted), tuple(sizes[d] for d in self.of.turned)

    @property
    def useful(self) -> float:
        """The share of its products that is no repetition of the forward pass."""
        products = len(self.of.contracted) + len(self.of.turned)
        return (products - self.of.repeated) / products


@dataclass(frozen=True)
class Kernel:
    """What one fusion group asks of one device, once.

    Attributes:
      name, opcode, source, region: of its main operation: the product, else the last one whose result others read.
      matmuls: its products with bytes per element of rows and columns, as HBM holds them; at most one in a group.
      attention: what it computes of one.
      mxu_flops: executed, passes of higher precision included; useful_flops: of them, those that no other device
        repeats and the model asks for (one pass). Exact.
      vpu_ops, hbm_bytes: exact, without padding; the padded figures are what the engines see.
      passing: buffers at its boundary that only pass between groups, with their padded bytes, those that it reads
        first; kept: of those that are used again soon, the bytes that are moved in between, and their own.
      quantised_bytes: padded, what quantising the operands of a product in eight bits reads and writes, where that has
        not been done before; spared_bytes: by how much less the product then reads than the operands as they were.
      at_hand_bytes: padded, of what it reads that is there from the start: variables, inputs, slices of a loop's
        stacks; at_hand: whether the first and the second operand of its product are.
      row_bytes: in float32, of a block of rows that reductions in it run along; sweeps: reductions whose results its
        own members need, each of which has to see all of a row first; read_bytes: padded, of what it reads.
      touched: buffers that lie in HBM all the time, with the padded bytes that it moves of each; again: of those that
        it may find in VMEM, the room that takes and the bytes that it spares.
      free: nothing runs: sources that are there already, renamings, constants of one element.
    """

    name: str
    opcode: str
    source: str
    region: str
    matmuls: tuple[tuple[Matmul, tuple[float, float]], ...]
    mxu_flops: int
    useful_flops: float
    vpu_ops: int
    padded_vpu_ops: float
    narrow_vpu_ops: float  # of the padded ones, those in bfloat16
    hbm_bytes: int
    padded_bytes: int
    free: bool
    passing: tuple[tuple[tuple[Tensor, Sharding], int, bool], ...] = ()
    kept: tuple[tuple[int, float], ...] = ()
    attention: Attention | None = None
    quantised_bytes: int = 0
    spared_bytes: int = 0
    at_hand_bytes: int = 0
    at_hand: tuple[bool, bool] = (False, False)
    row_bytes: int = 0
    sweeps: int = 0
    read_bytes: int = 0
    touched: tuple[tuple[tuple[Tensor, Sharding], int], ...] = ()
    again: tuple[tuple[int, float], ...] = ()

    @cached_property
    def key(self) -> tuple[object, ...]:
        """What its time depends on."""
        work = (self.matmuls, self.padded_vpu_ops, self.narrow_vpu_ops, self.padded_bytes)
        narrow = self.quantised_bytes, self.spared_bytes
        here = self.at_hand_bytes, self.at_hand, self.row_bytes, self.sweeps, self.read_bytes
        return (*work, self.free, self.kept, self.attention, *narrow, *here, self.again)

    @cached_property
    def operand_bytes(self) -> float:
        """Bytes of the operands of its product, each read once."""
        return sum(p.batch * p.k * (left * p.m + right * p.taps * p.n) for p, (left, right) in self.matmuls)


def kernel_of(
    program: Program,
    members: Sequence[Instruction],
    fused: set[Value],
    held: set[Value],
    forward: frozenset[str],
    quantised: set[tuple[Value, Value]],
    gathered: Mapping[Value, Value],
    through: Mapping[Value, tuple[Value, ...]],
    in_place: frozenset[Value],
    region: str | None,
) -> Kernel:
    """The work of a fusion group.

    `fused` are the program's values that never reach HBM, `held` its `resident_values`, `forward` the names of the
    forward pass's operations, by which those that a backward pass computes again are known: copies keep their names.
    `quantised` has the operands that are there in eight bits already, each with its scales; those of this group join.
    `gathered` says of operands that came in eight bits from which blocks; `through`, of values that their readers make,
    of what; `in_place`, which results are there already but for the part that is written. `region` is that of a loop
    around which is no part of the forward pass: then nothing inside is, whatever it was written for.
    """
    made = [i for i in reversed(members) if any(y not in fused for y in i.outputs)] or members[::-1]
    large = (i for i in made if any(y.local_size > 1 for y in i.outputs))
    main = next((i for i in members if _is_matmul(i)), None) or next(large, members[-1])
    matmuls, flops, useful, ops, padded_ops, narrow = [], 0, 0.0, 0, 0.0, 0.0

    def again(i: Instruction) -> bool:
        return i.operation.name in forward and (region or i.operation.region) != FORWARD

    attention = attention_of(program, main) if main.operation.kind.scores and isinstance(main, Compute) else None
    for i in members:
        work = local_work(program, i)
        flops += work.mxu_flops
        ops += work.vpu_ops
        if work.vpu_ops:
            stretched = work.vpu_ops * _stretch(i, program.sliding_dims)
            padded_ops += stretched
            narrow += stretched if i.outputs[0].tensor.dtype is BFLOAT16 else 0.0
        if _is_matmul(i):
            product = matmul_of(program, i)
            matmuls.append((product, _operand_itemsizes(i)))
            useful += _useful_flops(program, i, again(i)) / product.passes
    if attention is not None and isinstance(main, Compute):
        useful += flops / attention.passes * attention.useful * _share_useful(program, main, again(main))
    passed, spared = _quantised(main, quantised, gathered) if _is_matmul(main) else (0, 0)
    boundary = _boundary(members, fused, held, through, program.sliding_dims, in_place)
    free = all(_is_free(i) for i in members)
    return Kernel(
        main.operation.name,
        main.opcode,
        main.operation.source,
        region or main.region,
        tuple(matmuls),
        flops,
        useful,
        ops,
        padded_ops,
        narrow,
        0 if free else boundary.exact,
        0 if free else boundary.padded,
        free,
        () if free else boundary.passing,
        (),
        attention,
        passed,
        spared,
        boundary.at_hand,
        _at_hand(main, members, held) if _is_matmul(main) else (False, False),
        *_rows(members),
        boundary.read,
        () if free else boundary.touched,
    )


def _rows(members: Sequence[Instruction]) -> tuple[int, int]:
    """Bytes of a block of rows that a group reduces, and how many of its reductions its own members wait for."""
    used = {x for i in members for x in i.inputs}
    row = sweeps = 0
    for i in members:
        if isinstance(i, Compute) and i.operation.kind.kind is Kind.REDUCTION and i.outputs[0] in used:
            length = i.inputs[0].local_size // max(1, i.outputs[0].local_size)
            if length > 1:
                row, sweeps = max(row, 4 * SUBLANES * length), sweeps + 1
    return row, sweeps


def _at_hand(product: Compute, members: Sequence[Instruction], held: set[Value]) -> tuple[bool, bool]:
    """Which sides of a product, rows and columns, are made of nothing but what is there from the start."""
    maker = {y: i for i in members for y in i.outputs}

    def here(x: Value) -> bool:
        made = maker.get(x)
        return x in held if made is None else all(here(z) for z in made.inputs)

    first, second = _rows_first(product)
    return here(first), here(second)


def _product_of(i: Compute) -> Product:
    of = i.operation.kind.product
    assert of is not None
    return of(*local_types(i), i.operation.attrs)


def _rows_first(product: Compute) -> tuple[Value, Value]:
    """The operands of a product, that of its rows first."""
    first, second = product.inputs[:2]
    return (second, first) if _product_of(product).swapped else (first, second)


def _operand_itemsizes(product: Compute) -> tuple[float, float]:
    """Bytes of an element of rows and columns in HBM: of what casts make, those of what is cast."""
    if product.operation.attrs.get("precision") in EIGHT_BIT:
        return 1, 1
    first, second = (_stored(x.tensor).dtype.itemsize for x in _rows_first(product))
    return first, second


def quantises(i: Instruction) -> bool:
    """Whether an instruction is a product that quantises its operands, with scales beside them."""
    return isinstance(i, Compute) and i.operation.attrs.get("precision") in EIGHT_BIT and len(i.inputs) == 4


def _quantised(product: Compute, done: set[tuple[Value, Value]], gathered: Mapping[Value, Value]) -> tuple[int, int]:
    """Of a product in eight bits, bytes that quantising moves, and those by which its operands are smaller then."""
    if not quantises(product):
        return 0, 0
    moved = spared = 0
    for x, scales in zip(product.inputs[:2], product.inputs[2:], strict=True):
        wide, narrow = (padded_block_bytes(x.local_shape.sizes, n) for n in (_stored(x.tensor).dtype.itemsize, 1))
        spared += wide - narrow
        if (x, scales) not in done:
            done.add((x, scales))
            block = gathered.get(x, x)
            moved += (wide + narrow) * block.local_size // max(1, x.local_size)
    return moved, spared


def _useful_flops(program: Program, i: Compute, again: bool) -> float:
    """Those of an instruction's flops, passes included, that nobody repeats; the mean of devices that differ."""
    op, attrs = i.operation, attributes(program, i.operation)
    share = _share_useful(program, i, again)
    if op.kind.lower is None:
        return op.kind.work(*local_types(i), attrs).mxu_flops * share
    whole = op.kind.work(tuple(x.tensor.type for x in i.inputs), op.output.type, attrs)
    return whole.mxu_flops / program.mesh.size if share else 0.0


def _share_useful(program: Program, i: Compute, again: bool) -> float:
    """Of an instruction's flops on one device, those that no other repeats and no earlier pass has made already."""
    return 0.0 if again else 1 / duplication(program, i)


def forward_names(program: Program) -> frozenset[str]:
    """Names of the operations of the forward pass, those in loops included."""
    return frozenset(i.operation.name for i, _, _ in walk(program) if i.operation.region == FORWARD)


def duplication(program: Program, instruction: Compute) -> int:
    """On how many devices the same part of an operation runs: the mesh over the axes that split it."""
    split = program.mesh.group_size(tuple(dict.fromkeys(axis for axis, _ in instruction.assignment)))
    return program.mesh.size // split


def matmul_of(program: Program, instruction: Compute) -> Matmul:
    """The products that a contraction is on one device."""
    p, op = _product_of(instruction), instruction.operation
    passes = 1
    if attributes(program, op).get("precision") == "highest":
        once = op.kind.work(*local_types(instruction), {**op.attrs, "precision": "default"}).mxu_flops
        passes = local_work(program, instruction).mxu_flops // once
    dtype = mxu_dtype(instruction)
    return Matmul(p.rows, p.contracted, p.columns, p.batch, dtype, passes, p.taps, p.beside, p.packs)


def mxu_dtype(product: Compute) -> str:
    """What the MXU multiplies in: what the precision says, else the wider operand's type if that is narrow."""
    precision = product.operation.attrs.get("precision")
    if precision in EIGHT_BIT:
        return str(precision)
    dtypes = [x.tensor.dtype for x in product.inputs[:2]]
    if all(t.is_narrow_integer for t in dtypes):
        return "int4" if all(t is INT4 for t in dtypes) else "int8"
    return "fp8" if all(t.is_float and not t.computes for t in dtypes) else "bf16"


def attention_of(program: Program, instruction: Instruction) -> Attention:
    """What a kernel of fused attention computes on one device."""
    q, k, v = (x.sharding.local_shape for x in instruction.inputs[:3])
    attrs = instruction.operation.attrs
    key, value = q.dim(attrs["key_dim"]).size, v.dim(attrs["value_dim"]).size
    scores = seen_pairs(q, k, attrs)
    of = instruction.operation.kind.scores
    assert of is not None
    contracted, turned = Attention(of, scores, key, value, 1).products(together=False)
    once = 2 * scores * (sum(contracted) + sum(turned))
    passes = max(1, local_work(program, instruction).mxu_flops // max(1, once))
    return Attention(of, scores, key, value, passes)


def padded_value_bytes(v: Value, itemsize: float, sliding: frozenset[str]) -> int:
    """Bytes of one device's block in HBM, whole tiles. Exact for the layout of dims as named.

    Of images, which have dims that windows slide along, those dims lie in tiles that pad least: a compiler puts the
    batch or a row of the image there where channels are few.
    """
    if not sliding.isdisjoint(v.tensor.shape.names):
        return tiled_bytes(v.local_shape.sizes, itemsize)
    return padded_block_bytes(v.local_shape.sizes, itemsize)


@lru_cache(maxsize=65536)
def padded_block_bytes(sizes: tuple[int, ...], itemsize: float) -> int:
    """Bytes of a block of these sizes in whole tiles."""
    return padded_bytes(sizes, itemsize) if sizes else ceil(itemsize)


def _is_matmul(i: Instruction) -> TypeGuard[Compute]:
    return isinstance(i, Compute) and i.operation.kind.kind is Kind.CONTRACTION


def _is_free(i: Instruction) -> bool:
    kind = i.operation.kind
    if isinstance(i, Resident | Commit):
        return True
    if not isinstance(i, Compute):
        return False
    if kind.storage is Storage.ALIAS:
        return True
    if kind.remade:
        return all(y.local_bytes <= 8 for y in i.outputs)
    if kind.storage is Storage.RESHAPED or (
        kind.kind is Kind.REDUCTION and i.inputs[0].sharding.local_size == i.outputs[0].sharding.local_size
    ):
        # Tiles stay as they are where the two minor dims do; one element of each is its own sum.
        return i.inputs[0].local.shape.sizes[-2:] == i.outputs[0].local.shape.sizes[-2:]
    return False


def _stretch(i: Instruction, sliding: frozenset[str]) -> float:
    """How much more elements the vector unit handles than there are: those of the tiles of the largest value."""
    largest = max((*i.inputs, *i.outputs), key=lambda v: v.local_size)
    if not largest.local.shape.sizes:
        return 1.0
    return padded_value_bytes(largest, largest.tensor.dtype.itemsize, sliding) / max(1, largest.local_bytes)


@dataclass(frozen=True)
class _Boundary:
    """What a group reads and writes, each buffer once: exact and padded bytes; of what only passes, whether written."""

    exact: int
    padded: int
    passing: tuple[tuple[tuple[Tensor, Sharding], int, bool], ...]
    at_hand: int
    read: int
    touched: tuple[tuple[tuple[Tensor, Sharding], int], ...]


def _boundary(
    members: Sequence[Instruction],
    fused: set[Value],
    held: set[Value],
    through: Mapping[Value, tuple[Value, ...]],
    sliding: frozenset[str],
    in_place: frozenset[Value],
) -> _Boundary:
    inside = {y for i in members for y in i.outputs}
    operations = {i.operation for i in members}
    read: dict[tuple[Tensor, Sharding], tuple[int, int, bool]] = {}
    written: dict[tuple[Tensor, Sharding], tuple[int, int, bool]] = {}
    needed: set[Value] = set()  # of what members make, what goes into something that is written
    for i in reversed(members):
        if isinstance(i, Resident | Commit):
            continue
        stays = i.outputs[0] in in_place
        part = i.inputs[1] if stays else None
        stored = (y for y in i.outputs if y not in fused and y not in through)
        made = {y: (y.tensor, y.sharding) if y in held else buffer_of(y) for y in stored}
        # What is derived from a buffer that lies outside is not written; who reads it derives it again.
        own = {b: (*_sizes(part or y, sliding), y not in held) for y, b in made.items() if b[0].operation in operations}
        if not own and needed.isdisjoint(i.outputs):
            continue
        written |= own
        for n, x in enumerate(i.inputs):
            needed.add(x)
            if stays and n == 0:
                continue
            for v in (x,) if x in inside else through.get(x, (x,)):
                if v not in inside:
                    for b, found in _buffers_read(i, n if v is x else None, v, sliding, held):
                        read[b] = max(read.get(b, found), found)
    # Of what is not written the readers do the work; it is counted here, its traffic there.
    moved = [*read.values(), *written.values()]
    touched = [(b, padded) for b, (_, padded, passes) in (*read.items(), *written.items()) if not passes]
    passing = [(b, padded, False) for b, (_, padded, passes) in read.items() if passes]
    passing += [(b, padded, True) for b, (_, padded, passes) in written.items() if passes]
    here = sum(padded for _, padded, passes in read.values() if not passes)
    all_read = sum(padded for _, padded, _ in read.values())
    return _Boundary(
        sum(exact for exact, _, _ in moved),
        sum(padded for _, padded, _ in moved),
        tuple(passing),
        here,
        all_read,
        tuple(touched),
    )


def _buffers_read(
    i: Instruction, n: int | None, x: Value, sliding: frozenset[str], held: set[Value]
) -> Iterator[tuple[tuple[Tensor, Sharding], tuple[int, int, bool]]]:
    """What is read of operand `n`, or of what that is made of: its buffer, and the scales of one in fewer bits."""
    yield buffer_of(x), (*(_sizes(x, sliding) if n is None else _read(i, n, x, sliding)), x not in held)
    for t in _scales(x.tensor):
        scale = Value(t, Sharding(t.shape, x.sharding.mesh, [x.sharding.of(d.name) for d in t.shape]))
        yield buffer_of(scale), (*_sizes(scale, sliding), True)


def _read(i: Instruction, n: int, x: Value, sliding: frozenset[str]) -> tuple[int, int]:
    whole = _sizes(x, sliding)
    if n == 0 and (i.operation.kind.reads_part or isinstance(i, Move)):  # a cut, if it is a move
        return min(whole, _sizes(i.outputs[0], sliding))
    return whole


def _sizes(v: Value, sliding: frozenset[str]) -> tuple[int, int]:
    dtype = _stored(v.tensor).dtype
    return dtype.size_bytes(v.local_size), padded_value_bytes(v, dtype.itemsize, sliding)


def stored_bytes(v: Value, sliding: frozenset[str]) -> int:
    """Bytes, whole tiles, of what is in memory for a value."""
    return _sizes(v, sliding)[1]


def buffer_of(v: Value) -> tuple[Tensor, Sharding]:
    """What is in memory for a value: another one, if it follows from that alone."""
    return _stored(v.tensor), v.sharding


def _stored(t: Tensor) -> Tensor:
    """What is in memory for a tensor: one no wider from which it follows by a cast, a scaling or a shift.

    Compilers put such work into every kernel that reads the result.
    """
    source, scale = _source(t)
    if source is None or (scale is not None and _stored(source).dtype.itemsize >= t.dtype.itemsize):
        return t
    return _stored(source)


def _source(t: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """The one operand that is no wider and has the shape of `t`; a smaller one beside it that scales it, if any."""
    op = t.operation
    if not op.kind.repeated:
        return None, None
    sources = [x for x in op.inputs if not _is_small(x, t)]
    scales = [x for x in sources if x.shape.size < t.shape.size and set(x.shape) <= set(t.shape)]
    rest = [x for x in sources if x not in scales]
    if len(rest) != 1 or len(scales) > 1 or rest[0].shape != t.shape or rest[0].dtype.itemsize > t.dtype.itemsize:
        return None, None
    return rest[0], scales[0] if scales else None


def _scales(t: Tensor) -> Iterator[Tensor]:
    """What is read beside `_stored(t)`: numbers, computed before, that scale it."""
    while _stored(t) is not t:
        source, scale = _source(t)
        if scale is not None:
            while scale.operation.kind.repeated and len(scale.operation.inputs) == 1:
                (scale,) = scale.operation.inputs  # a cast is made on the way
            yield scale
        assert source is not None
        t = source


def _is_small(x: Tensor, beside: Tensor) -> bool:
    """Whether an operand costs its readers next to nothing: it is made anew, or repeated over what is beside it."""
    kind = x.operation.kind.kind
    return kind is Kind.SOURCE or (kind in RESIDENT and x.shape.size < beside.shape.size)


def resident_values(program: Program) -> set[Value]:
    """Values that have to be in HBM whatever runs: what a program, or a trip of a loop, is given and returns."""
    faces = (program.inputs, program.variables, program.outputs, program.updates)
    loops = [v for i in program.instructions if isinstance(i, Loop) for v in (*i.inputs, *i.outputs)]
    return {*loops, *(v for face in faces for v in face.values())}
