"""What a 2-layer Transformer sends in one training step, against figures derived by hand, layout by layout.

All figures are bytes that one device sends on a ring of k devices, for a value of b bytes on one device (when whole):
all_gather and reduce_scatter (k-1)/k b, all_reduce 2 (k-1)/k b. Kinds of collectives are not prescribed: a program may
send less, by moving something cheaper. T is an activation [batch, length, d_model], S a float32 [batch, length].

"again": the backward computes each layer again (remat="full"), up to what its gradient needs: all but its last product.
"""

from __future__ import annotations

import importlib
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from typing import Any

import pytest

import meshlib as mtf
from tests.compilers import FREE_WEIGHTS
from tests.effort import some

bindings, elimination, partition, placements, problem, strategy_costs = (
    importlib.import_module(f"meshlib.lowering.{part}")
    for part in ("bindings", "elimination", "partition", "placements", "problem", "strategy_costs")
)
pass_options = strategy_costs.pass_options

BATCH, LENGTH, LAYERS, HEADS, D_MODEL, D_FF, VOCAB = 16, 64, 2, 8, 256, 1024, 512
F32 = 4
# (activation_dtype, scan, remat)
VARIANTS = [
    ("float32", False, "none"), ("float32", True, "full"), ("bfloat16", True, "none"), ("bfloat16", False, "full"),
]  # fmt: skip


def all_reduce(k: int, size: float) -> float:
    """Bytes sent to sum `size` bytes over k devices."""
    return 2 * (k - 1) / k * size


def all_gather(k: int, size: float) -> float:
    """Bytes sent to put `size` bytes together from their k parts."""
    return (k - 1) / k * size


reduce_scatter = all_gather


@dataclass(frozen=True)
class Model:
    """Bytes of the model's weights as they are gathered and as their gradients are summed: in `wide` bytes an element.

    Norms are float32 throughout.
    """

    wide: int
    again: bool

    @property
    def activation(self) -> int:
        """T: [batch, length, d_model]."""
        return BATCH * LENGTH * D_MODEL * self.wide

    @property
    def statistic(self) -> int:
        """S: [batch, length], float32; labels take as much."""
        return BATCH * LENGTH * F32

    @property
    def table(self) -> int:
        """Embeddings, which make the logits, too."""
        return VOCAB * D_MODEL * self.wide

    @property
    def positions(self) -> int:
        return LENGTH * D_MODEL * self.wide

    @property
    def matrices(self) -> int:
        """q, k, v and out are d_model x d_model, wi and wo d_model x d_ff."""
        return LAYERS * (4 * D_MODEL**2 + 2 * D_MODEL * D_FF) * self.wide

    @property
    def inner_biases(self) -> int:
        """Of q, k, v and wi: split where heads and d_ff are."""
        return LAYERS * (3 * D_MODEL + D_FF) * self.wide

    @property
    def outer_biases(self) -> int:
        """Of out and wo."""
        return LAYERS * 2 * D_MODEL * self.wide

    @property
    def scales(self) -> int:
        """Of two norms a layer and the last one."""
        return (2 * LAYERS + 1) * D_MODEL * F32

    @property
    def norms(self) -> int:
        """Scales and biases."""
        return 2 * self.scales

    @property
    def elements(self) -> int:
        """All variables."""
        wide = self.table + self.positions + self.matrices + self.inner_biases + self.outer_biases
        return wide // self.wide + self.norms // F32

    def on_tensor(self, j: int) -> float:
        """All gradients, where heads, d_ff and vocab are split j times."""
        return (self.matrices + self.inner_biases + self.table) / j + self.outer_biases + self.norms + self.positions


def data(m: Model, i: int, j: int) -> float:
    """Each gradient is summed once, that of the tied table too; and the loss."""
    k = i * j
    return all_reduce(k, m.on_tensor(1)) + all_reduce(k, F32)


def tensor_part(m: Model, j: int, parts: int) -> float:
    """Over j devices, each with 1/parts of the batch: 10 T + 3 S.

    A layer sums the results of its two products of split dims, T each, and the cotangents of its two inputs: q, k and
    v share one. The lookup in a split table is summed, and the cotangent of the logits' input. The loss: maximum, sum
    and wanted logit. Again: the first of the two results.
    """
    sums = 4 * LAYERS + 2 + (LAYERS if m.again else 0)
    return all_reduce(j, (sums * m.activation + 3 * m.statistic) / parts)


def tensor(m: Model, i: int, j: int) -> float:
    """8 heads are split over 8 devices at most; of 16, two share a head, and what they sum over heads is smaller.

    So attention's sums go round rings of 8; all others round rings of i j.
    """
    if i * j <= 8:
        return tensor_part(m, i * j, 1)
    attention = 2 * LAYERS + (LAYERS if m.again else 0)
    return all_reduce(8, attention * m.activation) + all_reduce(
        i * j, (2 * LAYERS + 2) * m.activation + 3 * m.statistic
    )


def two_dimensional(m: Model, i: int, j: int) -> float:
    """Tensor parallel on 1/i of the batch; each gradient, 1/j of the split ones, summed over i; and the loss."""
    return tensor_part(m, j, i) + all_reduce(i, m.on_tensor(j)) + all_reduce(i, F32)


def fully_sharded_part(m: Model, i: int, j: int, copies: int = 1) -> float:
    """Each variable is gathered once a region that needs it, each gradient scattered once.

    The backward needs matrices, table and scales, and the biases of norms, whose results fusion makes again (that of
    the last norm, which is in no layer, only where a cast follows it); again, what comes before the last product needs
    the biases of products, but not the last of each layer. Of several copies of the whole the scattered parts of
    gradients are summed.
    """
    forward = m.on_tensor(j)
    backward = (m.matrices + m.table) / j + m.scales + LAYERS * 2 * D_MODEL * F32
    if m.again:
        backward += m.inner_biases / j + m.outer_biases / 2
    elif m.wide < F32:
        backward += D_MODEL * F32
    gradients = reduce_scatter(i, m.on_tensor(j)) + all_reduce(copies, m.on_tensor(j) / i)
    return all_gather(i, forward + backward) + gradients + all_reduce(i * copies, F32)


def fsdp(m: Model, i: int, j: int) -> float:
    """Over one axis."""
    return fully_sharded_part(m, i * j, 1)


def fsdp_tensor(m: Model, i: int, j: int) -> float:
    """The parts of each weight over i, tensor parallel on 1/i of the batch over j."""
    return fully_sharded_part(m, i, j) + tensor_part(m, j, i)


def zero1(m: Model, i: int, j: int) -> float:
    """Each gradient is scattered, the new value of each variable, in float32, gathered; and the loss."""
    k = i * j
    return reduce_scatter(k, m.on_tensor(1)) + all_gather(k, m.elements * F32) + all_reduce(k, F32)


def zero1_tensor(m: Model, i: int, j: int) -> float:
    """The same over i for the parts of each weight over j, tensor parallel on 1/i of the batch over j."""
    parts, elements = m.on_tensor(j), (m.on_tensor(j) - m.norms) / m.wide + m.norms / F32
    scattered = reduce_scatter(i, parts) + all_gather(i, elements * F32) + all_reduce(i, F32)
    return scattered + tensor_part(m, j, i)


def sequence(m: Model, i: int, j: int) -> float:
    """Tensor parallel, each all_reduce as reduce_scatter to the split length and all_gather before the next product.

    A layer gathers two inputs and scatters two results, and the cotangents the other way round. Besides, gradients of
    weights need the two inputs again, which the forward did not keep (again: gathered anyway, with one result
    scattered). Lookup: scattered, its cotangent gathered; logits: input gathered, its cotangent scattered, input
    gathered for the gradient of the table. Loss: 3 S as ever, and labels in each region. Variables without a split
    dim have seen a part of the length only: their gradients are summed, that of the positions is put together.
    """
    k = i * j
    a_layer = 4 + 4 + (3 if m.again else 2)
    activations = all_gather(k, (a_layer * LAYERS + 2 + 3) * m.activation)
    loss = all_reduce(k, 3 * m.statistic) + all_gather(k, 2 * m.statistic) + all_reduce(k, F32)
    return activations + loss + all_reduce(k, m.norms + m.outer_biases) + all_gather(k, m.positions)


def context(m: Model, i: int, j: int) -> float:
    """Keys and values of all positions are gathered in the forward, T each, and their cotangents scattered, T each.

    Again: the layer needs all keys and values once more. Else the gradients use those of the forward. Weights have seen
    a part of the length: each gradient is summed once, that of the positions put together.
    """
    k = i * j
    gathers = 4 if m.again else 2
    attention = all_gather(k, gathers * LAYERS * m.activation) + reduce_scatter(k, 2 * LAYERS * m.activation)
    return attention + all_reduce(k, m.on_tensor(1) - m.positions) + all_gather(k, m.positions) + all_reduce(k, F32)


HAND: dict[str, tuple[str, Callable[[Model, int, int], float]]] = {
    "data": ("data:{k}", data),
    "tensor": ("tensor:{k}", tensor),
    "2d": ("data:{i};tensor:{j}", two_dimensional),
    "fsdp": ("fsdp:{k}", fsdp),
    "fsdp+tensor": ("fsdp:{i};tensor:{j}", fsdp_tensor),
    "zero1": ("data:{k}", zero1),
    "zero1+tensor": ("data:{i};tensor:{j}", zero1_tensor),
    "sequence": ("tensor:{k}", sequence),
    "context": ("context:{k}", context),
}
# 8 heads on 16 devices: pairs of devices have the same heads; everything else is split 16 times.
ON_16 = {
    "tensor": ("tensor:8;half:2", "heads:tensor;d_ff:tensor+half;vocab:tensor+half"),
    "sequence": ("tensor:8;half:2", "heads:tensor;d_ff:tensor+half;vocab:tensor+half;length:tensor+half?"),
}
SPLITS = {4: (2, 2), 8: (2, 4), 16: (4, 4)}


@lru_cache
def step(dtype: str, scan: bool, remat: str) -> tuple[mtf.models.TransformerConfig, mtf.Session, Any]:
    """The model, its training step to lower under many layouts, and the updates."""
    config = mtf.models.TransformerConfig(
        name="two layers", layers=LAYERS, d_model=D_MODEL, heads=HEADS, head_dim=32, d_ff=D_FF, vocab=VOCAB,
        max_length=LENGTH, bias=True, numerics=mtf.Numerics(activation_dtype=dtype),
    )  # fmt: skip
    with mtf.Graph():
        outputs, updates = mtf.models.train_step(config, BATCH, LENGTH, remat=remat, scan=scan)
    return config, mtf.Session(outputs, updates), updates


@lru_cache
def lowered(
    name: str,
    devices: int,
    dtype: str = "float32",
    scan: bool = False,
    remat: str = "none",
    compiler: mtf.Compiler = mtf.XLA_TPU,
) -> mtf.Program:
    """The step under a layout by name."""
    config, session, _ = step(dtype, scan, remat)
    i, j = SPLITS[devices]
    mesh = HAND[name][0].format(k=devices, i=i, j=j)
    if devices == 16 and name in ON_16:
        mesh, layout = ON_16[name]
        return session.lower(mesh, layout, compiler=compiler)
    return session.lower(mesh, mtf.models.layout(name, config, mesh), compiler=compiler)


def allowed(name: str, devices: int, dtype: str = "float32", remat: str = "none") -> float:
    """The figure by hand."""
    return HAND[name][1](Model(4 if dtype == "float32" else 2, remat == "full"), *SPLITS[devices])


# Unrolled in float32 the search stops a little above: it goes another way round the embedding, whose table is as large
# as what is looked up in it.
NEARLY = {("fsdp", 16): 1.0004}

ONE, OTHER = VARIANTS[1:3]
# Between them each dtype, each policy, meshes of each size, and heads that two devices share.
FIRST = {
    "data": [(4, OTHER)],
    "tensor": [(8, ONE), (16, ONE)],
    "2d": [(8, OTHER)],
    "fsdp": [(8, ONE)],
    "fsdp+tensor": [(8, ONE), (4, OTHER)],
    "zero1": [(8, OTHER)],
    "zero1+tensor": [(4, ONE)],
    "sequence": [(8, ONE), (4, OTHER)],
    "context": [(4, ONE)],
}


@pytest.mark.parametrize("name", HAND)
def test_a_step_sends_at_most_what_is_derived_by_hand(name: str):
    for devices, variant in some([(k, variant) for k in SPLITS for variant in VARIANTS], FIRST[name]):
        assert_at_most_what_is_derived(name, devices, *variant)


def assert_at_most_what_is_derived(name: str, devices: int, dtype: str, scan: bool, remat: str) -> None:
    sent, hand = lowered(name, devices, dtype, scan, remat).sent_bytes, allowed(name, devices, dtype, remat)
    most = hand * (1 + 1e-9) * NEARLY.get((name, devices), 1)
    assert hand / 2 < sent <= most, (devices, dtype, scan, remat)  # the figures are not loose bounds


@pytest.mark.parametrize("devices", some([*SPLITS], [8]))
@pytest.mark.parametrize("name", ["data", "zero1", "context"])  # under fsdp, d_ff may take the axis of the batch
def test_where_nothing_is_cheaper_the_figures_are_exact(name: str, devices: int):
    sent, hand = lowered(name, devices).sent_bytes, allowed(name, devices)
    assert hand * (1 - 1e-12) <= sent <= hand * (1 + 1e-12) * NEARLY.get((name, devices), 1)


@pytest.mark.parametrize(("dtype", "scan", "remat"), some(VARIANTS, [VARIANTS[1]]))
@pytest.mark.parametrize(("d", "f", "t"), some([(2, 2, 2), (2, 4, 2)], [(2, 2, 2)]))
def test_three_axes(d: int, f: int, t: int, dtype: str, scan: bool, remat: str):
    """Fully sharded over f, of which there are d copies, and tensor parallel over t."""
    config, session, _ = step(dtype, scan, remat)
    mesh = f"data:{d};fsdp:{f};tensor:{t}"
    layout = mtf.models.layout("data+fsdp+tensor", config, mesh)
    sent = session.lower(mesh, layout).sent_bytes
    m = Model(4 if dtype == "float32" else 2, remat == "full")
    hand = fully_sharded_part(m, f, t, copies=d) + tensor_part(m, t, d * f)
    # The search stays at a table that is gathered over the other axis for its lookup: 0.3 % more.
    missed = 1.004 if (f, dtype, scan, remat) == (4, "bfloat16", False, "full") else 1 + 1e-9
    assert hand / 2 < sent <= hand * missed


@pytest.mark.parametrize("compiler", [mtf.XLA_TPU, FREE_WEIGHTS])
def test_tensor_parallel_in_payload(compiler):
    """9 T: the lookup and 2 T a layer forward; backward the logits' input, and 2 T a layer but for the first norm's
    input. Where weights may move, one T less: the table is cheaper to gather than its lookup to sum.

    The cotangent of the first layer's input is used linearly alone: the sums wait for what is made of it, the gradients
    of the table, scattered, of the positions and of the norm's scale and bias.
    """
    stationary = compiler.stationary_weights
    moved = lowered("tensor", 8, compiler=compiler).collectives
    m = Model(4, False)
    large = Counter((c.phase, c.payload_bytes) for c in moved if c.payload_bytes >= m.activation)
    assert large == {("forward", m.activation): 2 * LAYERS + stationary, ("backward", m.activation): 2 * LAYERS}
    gathered, scattered = 0 if stationary else m.table / 8, m.table
    small = gathered + scattered + m.positions + 2 * D_MODEL * F32 + 2 * m.statistic + F32
    assert sum(c.payload_bytes for c in moved if c.payload_bytes < m.activation) == small


def test_data_parallel_sums_each_gradient_once():
    """As many collectives as variables, and one for the loss; the payload is that of all of them once."""
    moved = lowered("data", 8).collectives
    _, _, updates = step("float32", False, "none")
    variables = updates[0].graph.trainable_variables
    assert len(moved) == len(variables) + 1
    assert sum(c.payload_bytes for c in moved) == sum(v.shape.size for v in variables) * F32 + F32


@pytest.mark.parametrize("scan", some([False, True], [True]))
def test_fully_sharded_gathers_each_weight_once_a_region(scan: bool):
    """In a loop once a trip."""
    moved = [c for c in lowered("fsdp", 8, "float32", scan, "full").collectives if c.kind == "all_gather"]
    assert max(Counter((c.tensor, c.phase) for c in moved).values()) == 1
    assert {c.count for c in moved} == ({1, LAYERS} if scan else {1})


# ---------------------------------------------------------------- a worse partitioner is seen


@pytest.fixture
def sabotage(monkeypatch):
    """Changes to the partitioner, which no session has learnt from or goes on with."""
    for cached in (step, lowered):
        monkeypatch.setattr(sys.modules[__name__], cached.__name__, cached.__wrapped__)
    return monkeypatch


def sent(name: str, devices: int, scan: bool = True) -> float:
    """By what the partitioner is now."""
    return lowered(name, devices, scan=scan).sent_bytes


def assert_sends_more(name: str, devices: int, than: float, scan: bool = True) -> None:
    assert sent(name, devices, scan) > than * 1.01


def test_with_each_operation_by_itself(sabotage):
    """Whose strategies are chosen without regard to what follows gathers for the products of a split length."""
    good = sent("sequence", 4)

    def greedy(graph: Any) -> Any:
        values: list[int] = []
        for v, size in enumerate(graph.sizes):
            known = [(scope, table) for scope, table in graph.tables if scope and v == max(scope)]
            costs = [sum(t[(*[values[u] for u in scope[:-1]], n)] for scope, t in known) for n in range(size)]
            values.append(min(range(size), key=costs.__getitem__))
        cost = graph.cost(values)
        return elimination.Solution(tuple(values), cost, cost)

    sabotage.setattr(problem, "solve", greedy)
    assert_sends_more("sequence", 4, good)


def test_without_pending_sums_that_pass(sabotage):
    """The cotangents of q, k and v are reduced apart."""
    sabotage.setattr(strategy_costs, "pass_options", lambda linear, asked: islice(pass_options(linear, asked), 1))
    assert_sends_more("tensor", 8, allowed("tensor", 8))


def test_without_complete_terms_that_count_once(sabotage):
    """The cotangent of the first layer's input, to which the residual's is added, is reduced before that."""

    def of_equal_terms(linear: Any, asked: Any) -> Iterator[Any]:
        for passed in pass_options(linear, asked):
            if not linear.together or all(set(p) <= set(sums) for p, sums in zip(passed, asked.sums, strict=True)):
                yield passed

    good = sent("tensor", 8, scan=False)
    sabotage.setattr(strategy_costs, "pass_options", of_equal_terms)
    assert sent("tensor", 8, scan=False) > good


def test_with_everything_brought_home(sabotage):
    """Keys and values come to queries in the backward again, and their cotangents back."""
    for part in (problem, partition):
        sabotage.setattr(part, "binding", lambda *args: bindings.Binding.ALWAYS)
    assert_sends_more("context", 8, allowed("context", 8))


def test_without_sharing_what_was_gathered(sabotage):
    """Lookup and logits gather the table apart."""
    use = placements.Places.use

    def for_itself(self: Any, t: mtf.Tensor, *args: Any) -> Any:
        del self.instances[t][1:]
        return use(self, t, *args)

    sabotage.setattr(placements.Places, "use", for_itself)
    assert_sends_more("fsdp", 4, allowed("fsdp", 4))
