"""The lowering rules of the design, one small program each, with the bytes derived by hand.

Every row names what may be sent: (kind, axes, payload bytes on one device, bytes a device sends on a ring). With k
devices and a payload of b bytes: all_gather (k-1) b, reduce_scatter and all_to_all (k-1)/k b, all_reduce 2 (k-1)/k b.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import numpy as np
import pytest

import meshlib as mtf

D = mtf.Dimension
Moved = list[tuple[str, str, int, float]]
F32, BF16 = 4, 2


def moved(program: mtf.Program) -> Moved:
    """What a program sends, sorted."""
    return sorted((c.kind, "+".join(c.axes), c.payload_bytes, c.sent_bytes) for c in program.collectives)


def x_w(b: int = 4, k: int = 8, n: int = 6, dtype: str = "float32") -> tuple[mtf.Tensor, mtf.Tensor, mtf.Tensor]:
    """x[b, k], w[k, n] and their product, contracted over k."""
    x = mtf.input("x", [D("b", b), D("k", k)], dtype)
    w = mtf.variable("w", [D("k", k), D("n", n)], dtype=dtype)
    return x, w, mtf.einsum([x, w], output_shape=[D("b", b), D("n", n)])


def two_layers(batch: int, pixels: int = 16, hidden: int = 32, classes: int = 8) -> tuple[mtf.Tensor, list]:
    """The network of the issue: its loss and its updates by plain SGD."""
    b, p, h, c = D("batch", batch), D("pixels", pixels), D("hidden", hidden), D("classes", classes)
    images, labels = mtf.input("images", [b, p]), mtf.input("labels", [b], "int32")
    w1, w2 = mtf.variable("w1", [p, h]), mtf.variable("w2", [h, c])
    logits = mtf.einsum([mtf.relu(mtf.einsum([images, w1], [b, h])), w2], [b, c])
    loss = mtf.reduce_mean(mtf.layers.softmax_cross_entropy_with_logits(logits, mtf.one_hot(labels, c), c))
    return loss, mtf.optimize.SgdOptimizer(0.1).minimize(loss)


# ---------------------------------------------------------------- training steps of the two-layer network


def data_parallel() -> tuple[tuple, Moved]:
    """Both gradients and the loss, nothing else. k = 4."""
    return (two_layers(64), "data:4", "batch:data"), [
        ("all_reduce", "data", 16 * 32 * F32, 3072),  # w1: 2 x 3/4 x 2048
        ("all_reduce", "data", 32 * 8 * F32, 1536),  # w2: 2 x 3/4 x 1024
        ("all_reduce", "data", F32, 6),  # loss: 2 x 3/4 x 4
    ]


def model_parallel() -> tuple[tuple, Moved]:
    """One all_reduce of the [batch, classes] logits, nothing else."""
    return (two_layers(64), "model:4", "hidden:model"), [("all_reduce", "model", 64 * 8 * F32, 3072)]


def two_dimensional() -> tuple[tuple, Moved]:
    """Both: logits over the hidden axis, gradients and loss over the batch axis, each a fourth or half as large."""
    return (two_layers(64), "rows:2;cols:2", "batch:rows;hidden:cols"), [
        ("all_reduce", "cols", 32 * 8 * F32, 1024),  # logits of half the batch
        ("all_reduce", "rows", 16 * 16 * F32, 1024),  # w1, half of hidden
        ("all_reduce", "rows", 16 * 8 * F32, 512),  # w2, half of hidden
        ("all_reduce", "rows", F32, 4),
    ]


def replicated() -> tuple[tuple, Moved]:
    """Every core does everything."""
    return (two_layers(64), "rows:2;cols:2", ""), []


def fully_sharded() -> tuple[tuple, Moved]:
    """Each variable gathered once a region that needs it, each gradient reduce-scattered."""
    return (two_layers(256), "data:4", "batch:data;hidden:data?"), [
        ("all_gather", "data", 16 * 8 * F32, 3 * 512),  # w1, forward; the backward does not read it
        ("all_gather", "data", 8 * 8 * F32, 3 * 256),  # w2, forward
        ("all_gather", "data", 8 * 8 * F32, 3 * 256),  # w2, backward
        ("reduce_scatter", "data", 16 * 32 * F32, 1536),
        ("reduce_scatter", "data", 32 * 8 * F32, 768),
        ("all_reduce", "data", F32, 6),
    ]


def fully_sharded_small_batch() -> tuple[tuple, Moved]:
    """A batch of 4 is cheaper to move than the weights, which stay where they are (gathering w1 once: 12,288 bytes).

    The hidden activations [4, 64] lie by hidden between the two products, in forward and backward: nobody wants them by
    batch, and so they take no more memory. All images do, so the backward gathers them again.
    """
    return (two_layers(4, pixels=64, hidden=64), "data:4", "batch:data;hidden:data?"), [
        ("all_gather", "data", 64 * F32, 3 * 256),  # images, forward: all examples to each part of w1
        ("all_gather", "data", 64 * F32, 3 * 256),  # images, backward
        ("reduce_scatter", "data", 4 * 8 * F32, 96),  # partial logits of w2's parts: 3/4 x 128
        ("all_gather", "data", 8 * F32, 96),  # cotangent of the logits
        ("all_reduce", "data", F32, 6),
    ]


def zero_1() -> tuple[tuple, Moved]:
    """Slots split: reduce_scatter the gradient, update a part, all_gather the variable."""
    return (two_layers(256), "data:4", "batch:data;slots/hidden:data"), [
        ("reduce_scatter", "data", 16 * 32 * F32, 1536),
        ("reduce_scatter", "data", 32 * 8 * F32, 768),
        ("all_gather", "data", 16 * 8 * F32, 1536),
        ("all_gather", "data", 8 * 8 * F32, 768),
        ("all_reduce", "data", F32, 6),
    ]


def data_over_two_axes() -> tuple[tuple, Moved]:
    """One collective over both axes of the batch, not one each."""
    return (two_layers(64), "data:2;fsdp:2", "batch:data+fsdp"), [
        ("all_reduce", "data+fsdp", 16 * 32 * F32, 3072),
        ("all_reduce", "data+fsdp", 32 * 8 * F32, 1536),
        ("all_reduce", "data+fsdp", F32, 6),
    ]


# ---------------------------------------------------------------- pending sums


def contraction() -> tuple[tuple, Moved]:
    """A split contraction leaves a sum; the fetched product is reduced once. k = 2: 2 x 1/2 x 96."""
    return ((x_w()[2], []), "m:2", "k:m"), [("all_reduce", "m", 4 * 6 * F32, 96)]


def batch_only() -> tuple[tuple, Moved]:
    """A matmul split over its batch needs nobody."""
    return ((x_w()[2], []), "m:2", "b:m"), []


def sum_of_pending_sums() -> tuple[tuple, Moved]:
    """x w + y v: one all_reduce of the sum."""
    y = mtf.input("y", [D("b", 4), D("k", 8)])
    v = mtf.variable("v", [D("k", 8), D("n", 6)])
    total = x_w()[2] + mtf.einsum([y, v], [D("b", 4), D("n", 6)])
    return ((total, []), "m:2", "k:m"), [("all_reduce", "m", 96, 96)]


def through_slice() -> tuple[tuple, Moved]:
    """Two of six columns are kept: reduce these, a third of the bytes."""
    return ((mtf.slice(x_w()[2], 1, 2, "n"), []), "m:2", "k:m"), [("all_reduce", "m", 4 * 2 * F32, 32)]


def through_transpose() -> tuple[tuple, Moved]:
    """A transpose changes no bytes: one all_reduce, whichever side."""
    return ((mtf.transpose(x_w()[2], [D("n", 6), D("b", 4)]), []), "m:2", "k:m"), [("all_reduce", "m", 96, 96)]


def through_add_n() -> tuple[tuple, Moved]:
    """Three partial sums meet in one add_n: one all_reduce."""
    x, w, first = x_w()
    more = [mtf.einsum([f(x), w], [D("b", 4), D("n", 6)]) for f in (mtf.tanh, mtf.sin)]
    return ((mtf.add_n([first, *more]), []), "m:2", "k:m"), [("all_reduce", "m", 96, 96)]


def add_n_groups() -> tuple[tuple, Moved]:
    """Two partial sums and a full value: the two are added first, then reduced once."""
    x, w, first = x_w()
    second = mtf.einsum([mtf.tanh(x), w], [D("b", 4), D("n", 6)])
    full = mtf.input("full", [D("b", 4), D("n", 6)])
    return ((mtf.add_n([first, full, second]), []), "m:2", "k:m"), [("all_reduce", "m", 96, 96)]


def through_reduce_sum() -> tuple[tuple, Moved]:
    """A sum of the product over n shrinks it: 4 numbers are reduced, not 24."""
    return ((mtf.reduce_sum(x_w()[2], reduced_dim=D("n", 6)), []), "m:2", "k:m"), [("all_reduce", "m", 16, 16)]


def through_scaling() -> tuple[tuple, Moved]:
    """-(x w) / 3 over a mean: all linear, one number."""
    return ((mtf.reduce_mean(-x_w()[2] / 3), []), "m:2", "k:m"), [("all_reduce", "m", 4, 4)]


def before_relu() -> tuple[tuple, Moved]:
    """relu is not linear: reduce before it, although the mean after it would be one number."""
    return ((mtf.reduce_mean(mtf.relu(x_w()[2])), []), "m:2", "k:m"), [("all_reduce", "m", 96, 96)]


def before_adding_full() -> tuple[tuple, Moved]:
    """Adding a full operand to every part would count it twice: reduce first."""
    bias = mtf.variable("bias", [D("n", 6)])
    return ((x_w()[2] + bias, []), "m:2", "k:m"), [("all_reduce", "m", 96, 96)]


def product_of_pending() -> tuple[tuple, Moved]:
    """(sum a)(sum b) is not a sum of products: both are reduced."""
    x, w, first = x_w()
    second = mtf.einsum([mtf.tanh(x), w], [D("b", 4), D("n", 6)])
    return ((first * second, []), "m:2", "k:m"), [("all_reduce", "m", 96, 96)] * 2


def narrow_before_reduce() -> tuple[tuple, Moved]:
    """A narrowing cast would round every part: float32 is reduced."""
    return ((mtf.cast(x_w()[2], "bfloat16"), []), "m:2", "k:m"), [("all_reduce", "m", 96, 96)]


def reduce_before_widening() -> tuple[tuple, Moved]:
    """A widening cast may wait: bfloat16 is reduced, half the bytes."""
    return ((mtf.cast(x_w(dtype="bfloat16")[2], "float32"), []), "m:2", "k:m"), [("all_reduce", "m", 4 * 6 * BF16, 48)]


def maximum_over_split_dim() -> tuple[tuple, Moved]:
    """A maximum is reduced at once."""
    x = mtf.input("x", [D("b", 4), D("k", 8)])
    return ((mtf.reduce_max(x, reduced_dim=D("k", 8)), []), "m:2", "k:m"), [("all_reduce", "m", 16, 16)]


def scatter_to_split_home() -> tuple[tuple, Moved]:
    """The result is wanted split over the axis of the sum: reduce_scatter, half of an all_reduce."""
    return ((mtf.constrain(x_w()[2], "n:m"), []), "m:2", "k:m"), [("reduce_scatter", "m", 96, 48)]


# ---------------------------------------------------------------- uses, gathers, exchanges


def variable_used_twice() -> tuple[tuple, Moved]:
    """x w and tanh(x) w: one all_reduce of the summed gradient. k = 2."""
    x, w, first = x_w(b=16)
    second = mtf.einsum([mtf.tanh(x), w], [D("b", 16), D("n", 6)])
    loss = mtf.reduce_sum(mtf.square(first) + mtf.square(second))
    return ((None, mtf.optimize.SgdOptimizer(0.1).minimize(loss)), "m:2", "b:m"), [
        ("all_reduce", "m", 8 * 6 * F32, 192)
    ]


def three_projections() -> tuple[tuple, Moved]:
    """q, k and v of one input: their input gradients meet, and one all_reduce takes the sum."""
    b, d, h = D("b", 8), D("d", 4), D("h", 16)
    x = mtf.variable("x", [b, d])
    heads = [mtf.einsum([x, mtf.variable(n, [d, h], trainable=False)], [b, h]) for n in ("q", "k", "v")]
    loss = mtf.reduce_sum(mtf.add_n([mtf.square(y) for y in heads]))
    return ((None, mtf.optimize.SgdOptimizer(0.1).minimize(loss)), "m:4", "h:m"), [
        ("all_reduce", "m", 8 * 4 * F32, 192)  # 2 x 3/4 x 128
    ]


def projections_of_renamed_input() -> tuple[tuple, Moved]:
    """k and v read the input under another name: their sum waits for q's, behind the rename; one all_reduce."""
    length, memory, d, h = D("length", 8), D("memory_length", 8), D("d", 4), D("h", 16)
    x = mtf.variable("x", [length, d])
    y = mtf.rename_dimension(x, "length", "memory_length")
    q = mtf.einsum([x, mtf.variable("q", [d, h], trainable=False)], [length, h])
    k, v = (mtf.einsum([y, mtf.variable(n, [d, h], trainable=False)], [memory, h]) for n in ("k", "v"))
    loss = mtf.reduce_sum(mtf.square(q)) + mtf.reduce_sum(mtf.square(k)) + mtf.reduce_sum(mtf.square(v))
    return ((None, mtf.optimize.SgdOptimizer(0.1).minimize(loss)), "m:4", "h:m"), [
        ("all_reduce", "m", 8 * 4 * F32, 192)  # 2 x 3/4 x 128
    ]


def tied_table() -> tuple[tuple, Moved]:
    """One table for lookup and logits, data-parallel: both of its gradients reduced together. k = 2."""
    b, v, d = D("b", 16), D("v", 8), D("d", 4)
    table, tokens = mtf.variable("table", [v, d]), mtf.input("tokens", [b], "int32")
    logits = mtf.einsum([mtf.tanh(mtf.gather(table, tokens, v)), table], [b, v])
    train = mtf.optimize.SgdOptimizer(0.1).minimize(mtf.reduce_sum(mtf.square(logits)))
    return ((None, train), "m:2", "b:m"), [("all_reduce", "m", 8 * 4 * F32, 128)]


def split_vocabulary() -> tuple[tuple, Moved]:
    """Each device looks up what it holds: the parts of [b, d] are summed."""
    table = mtf.variable("table", [D("v", 32), D("d", 4)])
    found = mtf.gather(table, mtf.input("tokens", [D("b", 6)], "int32"), D("v", 32))
    return ((found, []), "m:2", "v:m"), [("all_reduce", "m", 6 * 4 * F32, 96)]


def gather_in_bfloat16() -> tuple[tuple, Moved]:
    """The narrow cast stays where the variable lies, so the gather moves 2 bytes an element. k = 2."""
    x = mtf.input("x", [D("b", 64), D("k", 8)], "bfloat16")
    w = mtf.variable("w", [D("k", 8), D("n", 6)], activation_dtype="bfloat16")
    return ((mtf.einsum([x, w], [D("b", 64), D("n", 6)]), []), "m:2", "b:m;n:m?"), [
        ("all_gather", "m", 8 * 3 * BF16, 48)
    ]


def gathered_once_a_region() -> tuple[tuple, Moved]:
    """A split variable used by two matmuls of the forward is gathered once."""
    x, w, first = x_w(b=64)
    second = mtf.einsum([mtf.tanh(x), w], [D("b", 64), D("n", 6)])
    return (({"y": first, "z": second}, []), "m:2", "b:m;n:m?"), [("all_gather", "m", 8 * 3 * F32, 96)]


def changed_split_dim() -> tuple[tuple, Moved]:
    """length split before, heads split after: each device keeps its half and sends the other."""
    x = mtf.input("x", [D("length", 8), D("heads", 4)])
    return ((mtf.constrain(x, "heads:m"), []), "m:2", "length:m"), [("all_to_all", "m", 4 * 4 * F32, 32)]


def swapped_axes() -> tuple[tuple, Moved]:
    """The same blocks in another order of axes: each sends its block at most once."""
    x = mtf.input("x", [D("n", 8)])
    return ((mtf.constrain(x, "n:b+a"), []), "a:2;b:2", "n:a+b"), [("collective_permute", "a+b", 2 * F32, 8)]


def reshape_keeps_major() -> tuple[tuple, Moved]:
    """Merging [batch, length] keeps the split of batch: nothing moves."""
    x = mtf.input("x", [D("batch", 4), D("length", 6)])
    return ((mtf.reshape(x, [D("tokens", 24)]), []), "m:2", "batch:m;tokens:m"), []


def reshape_gathers_minor() -> tuple[tuple, Moved]:
    """Splitting the minor part of a merged dim is not a run of it: gathered. k = 2."""
    x = mtf.input("x", [D("batch", 4), D("length", 6)])
    return ((mtf.reshape(x, [D("tokens", 24)]), []), "m:2", "length:m"), [("all_gather", "m", 4 * 3 * F32, 48)]


CASES: tuple[Callable[[], tuple[tuple, Moved]], ...] = (
    data_parallel,
    model_parallel,
    two_dimensional,
    replicated,
    fully_sharded,
    fully_sharded_small_batch,
    zero_1,
    data_over_two_axes,
    contraction,
    batch_only,
    sum_of_pending_sums,
    through_slice,
    through_transpose,
    through_add_n,
    add_n_groups,
    through_reduce_sum,
    through_scaling,
    before_relu,
    before_adding_full,
    product_of_pending,
    narrow_before_reduce,
    reduce_before_widening,
    maximum_over_split_dim,
    scatter_to_split_home,
    variable_used_twice,
    three_projections,
    projections_of_renamed_input,
    tied_table,
    split_vocabulary,
    gather_in_bfloat16,
    gathered_once_a_region,
    changed_split_dim,
    swapped_axes,
    reshape_keeps_major,
    reshape_gathers_minor,
)


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.__name__)
def test_bytes_derived_by_hand(case: Callable[[], tuple[tuple, Moved]]) -> None:
    assert_moves_what_was_derived(case)


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.__name__)
def test_numbers_equal_the_unsharded_program(case: Callable[[], tuple[tuple, Moved]]) -> None:
    assert_numbers_equal_the_unsharded_program(case)


def assert_moves_what_was_derived(case: Callable[[], tuple[tuple, Moved]]) -> None:
    with mtf.Graph():
        ((outputs, updates), mesh, layout), expected = case()
    program = mtf.lower(outputs, updates, mesh=mesh, layout=layout)
    assert moved(program) == sorted(expected)


def assert_numbers_equal_the_unsharded_program(case: Callable[[], tuple[tuple, Moved]]) -> None:
    """What is not sent was not needed: the exact executor agrees with one core."""
    with mtf.Graph() as graph:
        ((outputs, updates), mesh, layout), _ = case()
    rng = np.random.default_rng(0)
    feeds = {}
    for name, op in graph.inputs.items():
        sizes = op.output.shape.sizes
        feeds[name] = rng.integers(0, 8, sizes) if op.output.dtype.name == "int32" else rng.normal(size=sizes)
    results = []
    unsplit = ";".join(f"{axis}:1" for axis in mtf.Mesh(mesh).axes)
    for where, rules in ((mesh, layout), (unsplit, "")):
        program = mtf.lower(outputs, updates, mesh=where, layout=rules, precision="highest")
        sim = mtf.simulate(program, seed=3, executor="exact")
        results.append([*sim.step(feeds).values(), *(sim.state[n] for n in graph.variables)])
    coarse = any(op.output.dtype.name == "bfloat16" for op in graph.operations)
    for ours, theirs in zip(*results, strict=True):
        rtol, atol = (2e-2, 5e-3) if coarse else (2e-5, 1e-5)
        np.testing.assert_allclose(ours.astype(float), theirs.astype(float), rtol=rtol, atol=atol)


def test_reasons_name_op_dim_axes_line_and_a_way_out() -> None:
    with mtf.Graph():
        loss, train = two_layers(64)
    program = mtf.lower({"loss": loss}, train, mesh="rows:2;cols:2", layout="batch:rows;hidden:cols")
    by_tensor = {c.payload_bytes: c for c in program.collectives}
    logits = by_tensor[1024] if by_tensor[1024].axes == ("cols",) else program.collectives[0]
    assert logits.phase == "forward"
    assert logits.dim == "hidden"
    assert "sums over 'hidden', split over cols" in logits.reason
    assert "hidden:cols" in logits.avoid
    assert logits.source.startswith("test_rules.py:")
    gradient = next(c for c in program.collectives if c.phase == "backward" and c.payload_bytes == 512)
    assert gradient.axes == ("rows",)
    assert "'w2' needs the whole gradient" in gradient.reason


@pytest.mark.parametrize(("kib", "launches"), [(64, 1), (68, 2)])
def test_collectives_of_more_than_64_kib_have_a_launch_each(kib: int, launches: int) -> None:
    """At 70 GB/s 64 KiB take about as long as a hop, so that more of them would gain little by waiting for another."""
    rows, cols = D("rows", 8), D("cols", kib * 256)
    with mtf.Graph():
        sums = [mtf.reduce_sum(mtf.input(name, [rows, cols]), reduced_dim=rows) for name in "ab"]
        program = mtf.lower(sums, mesh="m:2", layout="rows:m")
    assert [c.payload_bytes for c in program.collectives] == [kib * 1024] * 2
    assert len({c.launch for c in program.collectives}) == launches


def test_small_collectives_share_a_launch_but_keep_their_rows() -> None:
    with mtf.Graph():
        b, d = D("b", 64), D("d", 4)
        x = mtf.input("x", [b, d])
        sums = [mtf.reduce_sum(f(x), reduced_dim=b) for f in (mtf.tanh, mtf.sin, mtf.cos)]
    program = mtf.lower(sums, mesh="m:4", layout="b:m")
    assert [c.launch for c in program.collectives] == [0, 0, 0]
    assert moved(program) == [("all_reduce", "m", 16, 24)] * 3


def test_no_axis_wanders_to_a_dim_nobody_laid_on_it() -> None:
    """At a small batch exchanging activations would send less than the gradient; the layout splits the batch."""
    with mtf.Graph():
        loss, train = two_layers(16, pixels=256, hidden=256)
    program = mtf.lower({"loss": loss}, train, mesh="data:8", layout="batch:data")
    assert {c.kind for c in program.collectives} == {"all_reduce"}
    assert len(program.collectives) == 3


def test_lowering_does_not_depend_on_the_number_of_devices() -> None:
    with mtf.Graph():
        loss, train = two_layers(4096)
    sizes = [
        len(mtf.lower({"loss": loss}, train, mesh=f"data:{n}", layout="batch:data").instructions) for n in (2, 2048)
    ]
    assert sizes[0] == sizes[1]


def test_nothing_is_gathered_for_nobody() -> None:
    """h is made split by hidden and wanted so everywhere, although its home by the rules is whole."""
    with mtf.Graph():
        loss, train = two_layers(64)
    program = mtf.lower({"loss": loss}, train, mesh="rows:2;cols:4", layout="batch:rows;variables/hidden:cols")
    cut_again = {i.inputs[0] for i in program.instructions if i.opcode == "slice"}
    gathered = {i.outputs[0] for i in program.instructions if i.opcode == "all_gather"}
    assert not cut_again & gathered
    assert not gathered


def test_a_copy_of_a_program_makes_the_same_numbers() -> None:
    with mtf.Graph():
        program = mtf.lower({"y": x_w()[2]}, mesh="m:2", layout="k:m")
    x = np.random.default_rng(0).normal(size=(4, 8))
    values = [mtf.simulate(p).step(x=x)["y"] for p in (program, copy.deepcopy(program))]
    np.testing.assert_array_equal(*values)


def test_work_of_a_core_is_exact() -> None:
    with mtf.Graph():
        y = x_w(b=4, k=8, n=6)[2]
        alone, split = (mtf.lower({"y": y}, mesh="m:2", layout=rules) for rules in ("", "k:m"))
        precise = mtf.lower({"y": y}, mesh="m:2", layout="k:m", precision="highest")
    assert alone.work.mxu_flops == 2 * 4 * 8 * 6
    assert split.work.mxu_flops == 4 * 8 * 6
    assert precise.work.mxu_flops == 6 * 4 * 8 * 6  # six bfloat16 passes make float32
    with mtf.Graph():
        start = mtf.input("x", [D("b", 4), D("k", 8)])
        w = mtf.variable("w", [D("k", 8), D("n", 8)])
        looped = mtf.while_loop(
            5, lambda v: mtf.rename_dimension(mtf.einsum([v, w], [D("b", 4), D("n", 8)]), "n", "k"), [start]
        )
        program = mtf.lower(looped, mesh="m:2", layout="b:m")
    assert program.work.mxu_flops == 5 * 2 * 2 * 8 * 8
