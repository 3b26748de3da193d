"""Peak memory of whole programs, derived by hand: which buffers there are at the moment that takes most.

What a fusing compiler makes again is none of them: activation functions, norms, softmaxes, casts, cotangents that
follow element by element from what is there.
"""

from __future__ import annotations

import pytest

import meshlib as mtf

D = mtf.Dimension
F32, BF16, INT32 = 4, 2, 4
NUMBER = 4  # a float32 loss


# ---------------------------------------------------------------- two products

B, M, F, OUT = 512, 64, 256, 128


def mlp(mesh: str = "chip:1", layout: str = "", train: bool = True, optimizer: str = "sgd") -> mtf.Program:
    batch, inner, wide, outer = D("batch", B), D("inner", M), D("wide", F), D("outer", OUT)
    with mtf.Graph():
        x = mtf.input("x", [batch, inner])
        w1, w2 = mtf.variable("w1", [inner, wide]), mtf.variable("w2", [wide, outer])
        y = mtf.einsum([mtf.relu(mtf.einsum([x, w1], [batch, wide])), w2], [batch, outer])
        if not train:
            return mtf.lower({"y": y}, mesh=mesh, layout=layout)
        loss = mtf.reduce_mean(mtf.square(y))
        made = {"sgd": mtf.optimize.SgdOptimizer, "adam": mtf.optimize.AdamOptimizer}[optimizer](0.1)
        return mtf.lower({"loss": loss}, made.minimize(loss), mesh=mesh, layout=layout)


def test_mlp_forward() -> None:
    """At the second product: all that is given, relu's result, the result."""
    assert mlp(train=False).memory.peak_bytes == (B * M + M * F + F * OUT + B * F + B * OUT) * F32


def test_mlp_trained_on_one_device() -> None:
    """Where the hidden cotangent is made. That of the result is made again of the result; weights change in place."""
    given = B * M + M * F + F * OUT
    assert mlp().memory.peak_bytes == (given + B * F + B * OUT + B * F) * F32 + NUMBER


def test_mlp_trained_data_parallel() -> None:
    """At the first layer's gradient, which will be reduced; the second's comes after it, so that the result is there,
    over which its cotangent is written."""
    b = B // 4
    given = b * M + M * F + F * OUT
    peak = (given + b * F + b * F + b * OUT + M * F) * F32 + NUMBER
    assert mlp("data:4", "batch:data").memory.peak_bytes == peak


def test_mlp_under_zero_one() -> None:
    """As before, with a quarter of two slots for each weight, and Adam's count of steps."""
    b = B // 4
    given = b * M + M * F + F * OUT + 2 * (M * F + F * OUT) // 4
    program = mlp("data:4", "batch:data;slots/inner:data;slots/wide:data?", optimizer="adam")
    assert program.memory.peak_bytes == (given + b * F + b * F + b * OUT + M * F) * F32 + NUMBER + INT32


# ---------------------------------------------------------------- a classifier's loss

ROWS, MODEL, VOCAB = 256, 64, 8192


def test_cross_entropy_and_its_gradient() -> None:
    """The logits in bfloat16, over which their gradient is written: no float32 copy, no exponential, no one-hot.

    Where the loss is summed there are, for each row, the largest logit, the sum of exponentials and the wanted logit,
    in float32. The gradient of the weights goes straight into them.
    """
    rows, d, vocab = D("rows", ROWS), D("d", MODEL), D("vocab", VOCAB)
    with mtf.Graph():
        x, labels = mtf.input("x", [rows, d], "bfloat16"), mtf.input("labels", [rows], "int32")
        w = mtf.variable("w", [d, vocab])
        logits = mtf.einsum([x, mtf.cast(w, "bfloat16")], [rows, vocab])
        loss = mtf.reduce_mean(mtf.layers.softmax_cross_entropy_with_logits(logits, labels, vocab))
        program = mtf.lower({"loss": loss}, mtf.optimize.SgdOptimizer(0.1).minimize(loss))
    given = ROWS * MODEL * BF16 + ROWS * INT32 + MODEL * VOCAB * F32
    assert program.memory.peak_bytes == given + ROWS * VOCAB * BF16 + 3 * ROWS * F32 + NUMBER


# ---------------------------------------------------------------- a decode step


def test_decode_step_writes_into_its_cache() -> None:
    """Keys and values of the new token are written where the caches lie; what passes besides is a token's worth."""
    batch, length, heads, key, model = D("batch", 4), D("memory", 1024), D("heads", 8), D("key", 32), D("model", 256)
    with mtf.Graph():
        x, place = mtf.input("x", [batch, model], "bfloat16"), mtf.input("place", [], "int32")
        weights = [mtf.variable(n, [model, heads, key], dtype="bfloat16") for n in ("q", "k", "v")]
        out = mtf.variable("out", [heads, key, model], dtype="bfloat16")
        q, k, v = (mtf.einsum([x, w], [batch, heads, key]) for w in weights)
        shape = [batch, length, heads, key]
        caches = [mtf.variable(n, shape, 0.0, dtype="bfloat16", trainable=False) for n in ("keys", "values")]
        one = mtf.Dimension("memory", 1)
        keys, values = (
            mtf.update_slice(c, mtf.broadcast(new, [batch, one, heads, key]), length, place)
            for c, new in zip(caches, (k, v), strict=True)
        )
        scores = mtf.cast(mtf.einsum([q, keys], [batch, heads, length]), "float32")
        found = mtf.einsum([mtf.cast(mtf.softmax(scores, length), "bfloat16"), values], [batch, heads, key])
        y = mtf.einsum([found, out], [batch, model])
        updates = [mtf.assign(c, new) for c, new in zip(caches, (keys, values), strict=True)]
        program = mtf.lower({"y": y}, updates)
    print(program.memory)
    cache, token = 4 * 1024 * 8 * 32 * BF16, 4 * 8 * 32 * BF16
    given = 2 * cache + 4 * 256 * 8 * 32 * BF16 + 4 * 256 * BF16 + INT32
    scores_bytes = 4 * 8 * 1024 * BF16
    assert program.memory.peak_bytes <= given + scores_bytes + 4 * token
    assert program.memory.peak_bytes >= given + scores_bytes


def test_a_prompt_goes_into_the_caches_of_all_layers() -> None:
    """What a trip writes of a layer's cache and nothing in the loop reads goes into the stack, where the slice lies."""
    sizes = {"layers": 16, "d_model": 32, "heads": 2, "head_dim": 16, "d_ff": 32, "vocab": 32}
    config = mtf.models.TransformerConfig(name="tiny", position="rotary", **sizes)
    with mtf.Graph():
        program = mtf.lower(*mtf.models.prefill(config, 4, 256, 256))
    stored = [*program.variables.values(), *program.inputs.values()]
    caches = sum(v.local_bytes for v in stored if "cache_length" in v.tensor.shape)
    assert program.memory.peak_bytes - sum(v.local_bytes for v in stored) < caches / 4


# ---------------------------------------------------------------- experts


def test_dispatch_to_experts() -> None:
    """Two devices with two of four experts each: tokens for all go out, tokens from all come in."""
    groups, tokens, experts, room, model, wide = 2, 64, 4, 32, 128, 512
    g, t, e, c = D("groups", groups), D("tokens", tokens), D("experts", experts), D("room", room)
    d, f = D("model", model), D("wide", wide)
    with mtf.Graph():
        x, where = mtf.input("x", [g, t, d]), mtf.input("where", [g, t, e, c])
        up, down = mtf.variable("up", [e, d, f]), mtf.variable("down", [e, f, d])
        sent = mtf.constrain(mtf.einsum([where, x], [e, g, c, d]), "experts:all")
        hidden = mtf.relu(mtf.einsum([sent, up], [e, g, c, f]))
        back = mtf.einsum([hidden, down], [e, g, c, d])
        y = mtf.einsum([where, mtf.constrain(back, "groups:all")], [g, t, d])
        program = mtf.lower({"y": y}, mesh="all:2", layout="groups:all;experts:all?")
    given = (tokens * model + tokens * experts * room + 2 * experts // 2 * model * wide) * F32
    # At the second product: what the experts made of their tokens, and its result.
    assert program.memory.peak_bytes == given + (experts // 2 * groups * room * (wide + model)) * F32


# ---------------------------------------------------------------- a scanned Transformer layer, under each policy

LAYERS, BATCH, LENGTH, WIDTH, HEADS, KEY, HIDDEN = 3, 4, 128, 64, 4, 16, 512
STREAM = BATCH * LENGTH * WIDTH * BF16  # the residual stream; q, k, v and context are as large
WIDE = BATCH * LENGTH * HIDDEN * BF16
ROW = BATCH * LENGTH * F32  # a statistic of each token


def transformer(remat: str) -> mtf.Program:
    """Layers of fused attention and a GELU, RMS norms before each, trained in bfloat16 with float32 weights."""
    layers, batch, length, width = D("layers", LAYERS), D("batch", BATCH), D("length", LENGTH), D("width", WIDTH)
    heads, key, hidden = D("heads", HEADS), D("key", KEY), D("hidden", HIDDEN)
    mixed = mtf.Numerics(activation_dtype="bfloat16")

    def trip(carries: tuple[mtf.Tensor, ...], slices: tuple[()]) -> tuple[tuple[mtf.Tensor, ...], tuple[()]]:
        (x,) = carries
        scores = mtf.layers.Scores(causal=True, kernel="flash")
        h = mtf.layers.rms_norm(x, width, numerics=mixed, name="first")
        x = x + mtf.layers.multihead_attention(h, None, None, key, [heads], numerics=mixed, scores=scores)
        h = mtf.layers.rms_norm(x, width, numerics=mixed, name="second")
        return (x + mtf.layers.feed_forward(h, hidden, "gelu", False, False, numerics=mixed),), ()

    with mtf.Graph():
        x = mtf.input("x", [batch, length, width], "bfloat16")
        (y,), _ = mtf.scan(trip, [x], dim=layers, remat=remat, stack_variables=True)
        loss = mtf.reduce_mean(mtf.square(mtf.cast(y, "float32")))
        return mtf.lower({"loss": loss}, mtf.optimize.SgdOptimizer(0.1).minimize(loss))


# What each policy keeps of a layer, and what is there besides in its backward pass when most is.
POLICIES = {
    # Its input. Computed again: q, k, v, context, what attention returns, what the second norm returns, which two
    # products read, the hidden values; the cotangent of these; a statistic of each norm. GELU is made by who reads it.
    "full": (STREAM, 4 * STREAM + STREAM + STREAM + WIDE + WIDE + 2 * ROW),
    # Its input, q, k, v, what attention returns, the hidden values. Besides: the cotangents of the hidden values and of
    # what they are made of, the second norm's statistic.
    "matmuls": (STREAM + 4 * STREAM + WIDE, WIDE + STREAM + ROW),
    # All that is not made again element by element: its input, of each norm a statistic; q, k, v, context, what
    # attention returns; the hidden values.
    "none": (STREAM + 2 * ROW + 5 * STREAM + WIDE, WIDE + STREAM),
}


@pytest.mark.parametrize("remat", POLICIES)
def test_transformer_layers(remat: str) -> None:
    kept, inside = POLICIES[remat]
    weights = LAYERS * (4 * WIDTH * HEADS * KEY + 2 * WIDTH * HIDDEN + 2 * WIDTH) * F32
    given = STREAM + weights
    # Gradients of all layers are stacked; the cotangent of the stream is carried in one place.
    backward = weights + STREAM + NUMBER
    assert transformer(remat).memory.peak_bytes == given + backward + LAYERS * kept + inside


def test_unrolled_layers_take_what_their_products_take() -> None:
    """Element-wise work is made again whatever the policy says: keeping all takes little more than keeping products."""

    def peak(remat: str) -> int:
        shape = {"layers": 3, "d_model": 128, "d_ff": 512, "heads": 2, "kv_heads": 2, "head_dim": 64, "vocab": 256}
        config = mtf.models.preset("llama2-7b").replace(**shape, attention="flash")
        with mtf.Graph():
            outputs, updates = mtf.models.train_step(config, 4, 512, "sgd", remat=remat, scan=False)
            return mtf.lower(outputs, updates).memory.peak_bytes

    assert peak("matmuls") <= peak("none") <= 1.2 * peak("matmuls")


def test_scores_that_are_written_out_are_kept_once() -> None:
    """In a scan as in layers written out: beyond what the products with weights take, one [length, length] in bfloat16
    a head and layer, what attention returns of a head, and a few numbers a row."""
    batch, length, heads, layers = 4, 256, 4, 3
    shape = {"layers": layers, "d_model": 128, "d_ff": 256, "heads": heads, "kv_heads": heads, "head_dim": 32}
    config = mtf.models.preset("gpt2").replace(**shape, vocab=256, attention="materialised", dropout=0.0)

    def peak(remat: str, scan: bool) -> int:
        with mtf.Graph():
            outputs, updates = mtf.models.train_step(config, batch, length, "sgd", remat=remat, scan=scan)
            return mtf.lower(outputs, updates).memory.peak_bytes

    scores = layers * batch * heads * length * length * BF16
    context = layers * batch * length * 128 * BF16
    rows = layers * batch * length * (2 * heads + 4) * F32
    for scan in (True, False):
        beyond = peak("none", scan) - peak("matmuls", scan)
        # One layer's scores and a cotangent of theirs are there under either policy.
        assert scores - scores // layers <= beyond <= scores + context + rows


# ---------------------------------------------------------------- other programs


def trained(loss: mtf.Tensor, mesh: str = "chip:1", layout: str = "") -> mtf.Program:
    return mtf.lower({"loss": loss}, mtf.optimize.SgdOptimizer(0.1).minimize(loss), mesh=mesh, layout=layout)


def test_mlp_with_gathered_weights() -> None:
    """Each device holds a quarter of both. The second one, gathered once more, is there with the hidden cotangent that
    it makes, over whose argument nothing can be written yet."""
    b, weights = B // 4, M * F + F * OUT
    program = mlp("all:4", "batch:all;variables/inner:all;variables/wide:all?")
    assert program.memory.peak_bytes == (b * M + weights // 4 + b * F + b * OUT + F * OUT + b * F) * F32 + NUMBER


def test_convolutions() -> None:
    """Where the cotangent between them is made: all that is given, relu's result, the result."""
    batch, height, width = D("batch", 8), D("height", 32), D("width", 32)
    first, second, third, rows, columns = D("in", 16), D("mid", 32), D("out", 64), D("rows", 3), D("columns", 3)
    with mtf.Graph():
        x = mtf.input("x", [batch, height, width, first])
        a, b = mtf.variable("a", [rows, columns, first, second]), mtf.variable("b", [rows, columns, second, third])
        program = trained(mtf.reduce_mean(mtf.square(mtf.conv2d(mtf.relu(mtf.conv2d(x, a)), b))))
    pixels, filters = 8 * 32 * 32, 9 * (16 * 32 + 32 * 64)
    assert program.memory.peak_bytes == (filters + pixels * (16 + 32 + 64 + 32)) * F32 + NUMBER


def test_decode_step_with_a_cache_of_eight_bits() -> None:
    """Nobody writes the wide keys and values: products widen them on the way. Beside the scores in bfloat16, where they
    are made, there are the token's query and its values, whose turn comes later."""
    batch, length, heads, key, model = D("batch", 4), D("memory", 1024), D("heads", 8), D("key", 32), D("model", 256)
    one, updates, held = D("memory", 1), [], []
    with mtf.Graph():
        x, place = mtf.input("x", [batch, model], "bfloat16"), mtf.input("place", [], "int32")
        weights = [mtf.variable(n, [model, heads, key], dtype="bfloat16") for n in ("q", "k", "v")]
        out = mtf.variable("out", [heads, key, model], dtype="bfloat16")
        q, *made = (mtf.einsum([x, w], [batch, heads, key]) for w in weights)
        for name, new in zip(("keys", "values"), made, strict=True):
            cache = mtf.variable(name, [batch, length, heads, key], 0.0, dtype="int8", trainable=False)
            scales = mtf.variable(f"{name}_scales", [batch, length, heads], 0.0, trainable=False)
            for kept, part in zip((cache, scales), mtf.quantize(new, key), strict=True):
                dims = [one if d == length else d for d in kept.shape]
                held.append(mtf.update_slice(kept, mtf.broadcast(part, dims), length, place))
                updates.append(mtf.assign(kept, held[-1]))
        keys, key_scales, values, value_scales = held
        products = mtf.einsum([q, mtf.cast(keys, "bfloat16")], [batch, heads, length])
        shares = mtf.softmax(mtf.cast(products, "float32") * key_scales, length) * value_scales
        found = mtf.einsum([mtf.cast(shares, "bfloat16"), mtf.cast(values, "bfloat16")], [batch, heads, key])
        program = mtf.lower({"y": mtf.einsum([found, out], [batch, model])}, updates)
    cache_bytes, scale_bytes, token = 4 * 1024 * 8 * 32, 4 * 1024 * 8 * F32, 4 * 8 * 32 * BF16
    given = 2 * (cache_bytes + scale_bytes) + 4 * 256 * 8 * 32 * BF16 + 4 * 256 * BF16 + INT32
    assert program.memory.peak_bytes == given + 4 * 8 * 1024 * BF16 + 2 * token


def test_a_table_at_both_ends() -> None:
    """Where the rows' cotangents are put into the table's gradient: the logits' gradient in their place, which the
    other half of the table's gradient still needs, with what was looked up; two statistics of each row's softmax."""
    rows, d, vocab = D("rows", ROWS), D("d", MODEL), D("vocab", VOCAB)
    with mtf.Graph():
        ids, labels = mtf.input("ids", [rows], "int32"), mtf.input("labels", [rows], "int32")
        table = mtf.variable("table", [vocab, d])
        logits = mtf.einsum([mtf.gather(table, ids, vocab), table], [rows, vocab])
        loss = mtf.reduce_mean(mtf.layers.softmax_cross_entropy_with_logits(logits, labels, vocab))
        program = trained(loss)
    numbers = 2 * VOCAB * MODEL + ROWS * VOCAB + 2 * ROWS * MODEL + 2 * ROWS
    assert program.memory.peak_bytes == numbers * F32 + 2 * ROWS * INT32 + NUMBER
