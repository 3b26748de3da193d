"""MXU work of a fusion group: products and attention, useful FLOPs, eight-bit operands."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeGuard

from hardware.core import Matmul
from hardware.memory import LANES
from meshlib.core.dtypes import INT4
from meshlib.core.graph import BACKWARD
from meshlib.core.opdef import Kind, Product, ScoreProducts
from meshlib.estimation.work.stored_values import Stored
from meshlib.estimation.work.tiles import tiled_bytes
from meshlib.ops.contraction.einsum import EIGHT_BIT, matmul_plan
from meshlib.ops.contraction.ragged import computed_rows
from meshlib.ops.fused_attention.attention import executed_share, seen_pairs
from meshlib.program.analysis.work import attributes, local_types, local_work
from meshlib.program.instructions import Compute, Instruction, Move, Value
from meshlib.program.records import Program

_LENGTHS = ("length", "memory_length")  # of queries and keys


@dataclass(frozen=True, slots=True)
class Attention:
    """Work of a fused attention kernel on one device.

    Attributes:
      of: the operation's record of products per score.
      scores: pairs of query and key in the computed tiles, all heads and sequences; key, value: sizes of the dims of
        one head; passes: runs through the MXU.
      length, memory: global numbers of queries and keys of a sequence; causal, window: the mask.
    """

    of: ScoreProducts
    scores: int
    key: int
    value: int
    passes: int
    length: int = 1
    memory: int = 1
    causal: bool = False
    window: int | None = None

    def scores_in(self, tile: tuple[int, int]) -> float:
        """Query-key pairs computed with tiles of this size; fully masked tiles are skipped."""
        seen = self.length, self.memory, self.causal, self.window
        return float(self.scores * executed_share(*seen, tile) / executed_share(*seen))

    def products(self, together: bool) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Head dims of the products per score: (contracted ones, streamed ones).

        `together`: scores and their cotangents, which both gradients need, are computed with the keys' gradient only.
        """
        sizes = {"key_dim": self.key, "value_dim": self.value}
        contracted = () if together and self.of.spared else self.of.contracted
        return tuple(sizes[d] for d in contracted), tuple(sizes[d] for d in self.of.turned)

    @property
    def useful(self) -> float:
        """Share of its products that does not repeat the forward pass."""
        products = len(self.of.contracted) + len(self.of.turned)
        return (products - self.of.repeated) / products


def is_matmul(i: Instruction) -> TypeGuard[Compute]:
    """True if an instruction is a product that other work may fuse with."""
    return isinstance(i, Compute) and i.operation.opdef.kind is Kind.CONTRACTION


def product_of(i: Compute) -> Product:
    """The sizes of a contraction on one device."""
    of = i.operation.opdef.product
    assert of is not None
    return of(*local_types(i), i.operation.attrs)


def rows_first(product: Compute) -> tuple[Value, Value]:
    """The operands of a product, that of its rows first."""
    first, second = product.inputs[:2]
    return (second, first) if product_of(product).swapped else (first, second)


def matmul_of(program: Program, instruction: Compute) -> Matmul:
    """The matrix products of a contraction on one device."""
    p, op = product_of(instruction), instruction.operation
    passes = 1
    if attributes(program, op).get("precision") == "highest":
        once = op.opdef.work(*local_types(instruction), {**op.attrs, "precision": "default"}).mxu_flops
        if once:  # windows over nothing but padding
            passes = local_work(program, instruction).mxu_flops // once
    dtype = mxu_dtype(instruction)
    p = with_shared_tiles(p)
    return Matmul(p.rows, p.contracted, p.columns, p.batch, dtype, passes, p.taps, p.beside, p.packs)


def with_shared_tiles(product: Product) -> Product:
    """The product that a kernel computes: sorted rows in tiles shared by several groups count for each of them."""
    if product.groups == 1:
        return product
    sorted_rows = product.contracted if product.groups_summed else product.rows
    rows = product.runs * computed_rows(-(-sorted_rows // product.runs), product.groups)
    return replace(product, contracted=rows) if product.groups_summed else replace(product, rows=rows)


def in_ragged_tiles(matmul: Matmul, product: Compute, width: int) -> tuple[Matmul, int]:
    """A product of rows sorted by expert, with weights in whole tiles, and its number of tiles of columns.

    Token rows are not padded. Other products are unchanged, without tiles. Columns are the weights' dim of the result;
    of a result that is the weights' gradient its last dim.

    Args:
      matmul, product: the product on one device, and its instruction.
      width: inputs and outputs of a tile.
    Source: `gmm` and `tgmm` of jax.experimental.pallas.ops.tpu.megablox, whose first grid dim is that of columns.
    """
    if "filled" not in product.operation.attrs:
        return matmul, 0
    shapes = [x.tensor.shape.names for x in (*product.inputs[:2], *product.outputs)]
    roles = matmul_plan(*shapes)
    weight = next(names for names in shapes if product.operation.attrs["groups"] in names)
    sizes = {"m": roles.rows, "k": roles.contracted, "n": roles.columns}
    of_weight = {size: names for size, names in sizes.items() if names and set(names) <= set(weight)}
    tiles = {size: -(-getattr(matmul, size) // width) for size in of_weight}
    tiled = {size: count * width for size, count in tiles.items() if count > 1}
    columns = [size for size, names in of_weight.items() if size != "k" and (size == "n" or weight[-1] in names)]
    return replace(matmul, **tiled), tiles[columns[-1]] if columns else 1


def looked_up_registers(product: Compute) -> int:
    """Registers of the rows that a grouped product with ones selects, or adds up, such as biases; 0 for others."""
    p = product_of(product)
    rows = p.contracted if p.groups_summed else p.rows
    if "filled" not in product.operation.attrs or (p.rows if p.groups_summed else p.contracted) > 1:
        return 0
    return p.batch * rows * -(-p.columns // LANES)


def mxu_dtype(product: Compute) -> str:
    """MXU dtype: from the precision, otherwise the wider operand's dtype if that is narrow."""
    precision = product.operation.attrs.get("precision")
    if precision in EIGHT_BIT:
        return str(precision)
    dtypes = [x.tensor.dtype for x in product.inputs[:2]]
    if all(t.is_narrow_integer for t in dtypes):
        return "int4" if all(t is INT4 for t in dtypes) else "int8"
    return "fp8" if all(t.is_float and not t.computes for t in dtypes) else "bf16"


def operand_itemsizes(product: Compute, itemsize: Callable[[Value], float]) -> tuple[float, float]:
    """Bytes per element of rows and columns in HBM; `itemsize` gives those of a value as stored."""
    if product.operation.attrs.get("precision") in EIGHT_BIT:
        return 1, 1
    first, second = map(itemsize, rows_first(product))
    return first, second


def at_hand(product: Compute, members: Sequence[Instruction], held: set[Value]) -> tuple[bool, bool]:
    """For rows and columns of a product: whether they depend only on values present from the start."""
    maker = {y: i for i in members for y in i.outputs}

    def is_available(x: Value) -> bool:
        producer = maker.get(x)
        return x in held if producer is None else all(is_available(z) for z in producer.inputs)

    first, second = rows_first(product)
    return is_available(first), is_available(second)


def attention_of(program: Program, instruction: Instruction) -> Attention:
    """The work of a fused attention kernel on one device."""
    q, k, v = (x.sharding.local_shape for x in instruction.inputs[:3])
    attrs = instruction.operation.attrs
    key, value = q.dim(attrs["key_dim"]).size, v.dim(attrs["value_dim"]).size
    scores = seen_pairs(q, k, attrs)
    of = instruction.operation.opdef.scores
    assert of is not None
    contracted, turned = Attention(of, scores, key, value, 1).products(together=False)
    once = 2 * scores * (sum(contracted) + sum(turned))
    passes = max(1, local_work(program, instruction).mxu_flops // max(1, once))
    length, memory = (x.tensor.shape.dim(attrs[n]).size for x, n in zip(instruction.inputs, _LENGTHS, strict=False))
    return Attention(of, scores, key, value, passes, length, memory, attrs["causal"], attrs["window"])


def useful_flops(program: Program, i: Compute, again: bool) -> float:
    """An instruction's useful flops, passes included: those not repeated; the mean over devices that differ.

    `again`: whether an earlier pass has computed them already.
    """
    op, attrs = i.operation, attributes(program, i.operation)
    share = share_useful(program, i, again)
    if op.opdef.lower is None:
        return op.opdef.work(*local_types(i), attrs).mxu_flops * share
    whole = op.opdef.work(tuple(x.tensor.type for x in i.inputs), op.output.type, attrs)
    return whole.mxu_flops / i.outputs[0].sharding.mesh.size if share else 0.0


def share_useful(program: Program, i: Compute, again: bool) -> float:
    """Useful share of an instruction's flops on one device: not repeated by other devices or an earlier pass."""
    return 0.0 if again else 1 / duplication(program, i)


def duplication(program: Program, instruction: Compute) -> int:
    """Number of devices that run the same part of an operation: mesh size over the axes that split it."""
    split = program.mesh.group_size(tuple(dict.fromkeys(axis for axis, _ in instruction.assignment)))
    return program.mesh.size // split


def quantises(i: Instruction) -> bool:
    """True if an instruction is a product that quantises its operands, with separate scales."""
    return isinstance(i, Compute) and "grids" in i.operation.attrs


@dataclass(eq=False)
class Quantised:
    """Operands that are already available in eight bits, in program order.

    Attributes:
      gathered: value gathered in eight bits -> the local block that it was gathered from.
      noise_bytes: per element of a cotangent, stored random bits for stochastic rounding, where software draws them; 0
        with rounding to nearest, as in this library.
      forward: names of the forward pass's operations; other products in the backward pass have a cotangent first.
    """

    noise_bytes: int = 0
    forward: frozenset[str] = frozenset()
    gathered: dict[Value, Value] = field(default_factory=dict)
    _done: set[tuple[Value, Value]] = field(default_factory=set)  # with their scales

    def moved(self, product: Compute, stored: Stored) -> tuple[int, int]:
        """For an eight-bit product: bytes moved by quantisation, and bytes saved by its narrower operands."""
        if not quantises(product):
            return 0, 0
        moved = spared = 0
        of_cotangent = product.region == BACKWARD and product.operation.name not in self.forward
        for n, (x, scales) in enumerate(zip(product.inputs[:2], product.inputs[2:4], strict=True)):
            noise = 2 * self.noise_bytes * x.local_size if of_cotangent and n == 0 else 0  # written and read
            wide, narrow = (tiled_bytes(x.local_shape.sizes, size) for size in (stored.itemsize(x), 1))
            spared += wide - narrow
            if (x, scales) not in self._done:
                self._done.add((x, scales))
                block = self.gathered.get(x, x)
                moved += (wide + narrow + noise) * block.local_size // max(1, x.local_size)
        return moved, spared


def narrow_values(program: Program) -> set[Value]:
    """Values gathered for eight-bit products alone: they are quantised first and sent at one byte per element."""
    wide = {*program.outputs.values(), *program.updates.values()}
    narrow: set[Value] = set()
    for i in reversed(program.instructions):
        eight = quantises(i)
        gather = isinstance(i, Move) and i.step_kind.gathers and i.outputs[0] in narrow
        for n, x in enumerate(i.inputs):
            (narrow if gather or (eight and n < 2) else wide).add(x)
    return narrow - wide
