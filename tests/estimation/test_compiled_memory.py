"""What a compiled step takes besides its program's buffers, each cause by hand; plain jit; whole runs; the verdict."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

import meshlib as mtf
from hardware import CHIPS, Slice
from meshlib.estimation.memory.compiled import CODE_BYTES, FILE_BYTES, RUN_ADDS_BYTES, compiled_memory
from meshlib.estimation.work.tiles import tiled_bytes
from meshlib.testing import assert_fits

D = mtf.Dimension
GIB, MIB = 2**30, 2**20
CAPACITIES = {"v2": 7.48, "v3": 15.48, "v4": 30.75, "v5e": 15.75, "v5p": 95.74, "v6e": 31.25, "v7": 94.7}


@cache
def trained(chips: int) -> mtf.Program:
    """A training step of four layers with heads of 64, fully sharded."""
    config = mtf.models.preset("gpt2").replace(layers=4, heads=8, head_dim=64, vocab=50_304)
    with mtf.Graph():
        outputs, updates = mtf.models.train_step(config, batch=8 * chips, length=1024)
        layout = mtf.models.layout("fsdp", config, f"fsdp:{chips}")
        return mtf.lower(outputs, updates, f"fsdp:{chips}", layout)


def memory(program: mtf.Program, slice_: str | Slice, compiler: mtf.Compiler = mtf.XLA_TPU):
    return mtf.estimate(program, slice_, compiler).memory


@pytest.mark.parametrize("chip", CAPACITIES)
def test_capacity_is_what_programs_are_offered(chip: str) -> None:
    slice_ = Slice(f"{chip}-8")
    found = memory(mtf.lower({"y": attention(64)}, mesh=f"a:{slice_.devices}"), slice_)
    assert found.capacity_bytes / GIB == pytest.approx(CAPACITIES[chip], abs=0.006)
    assert found.built_bytes == CHIPS[chip].hbm_bytes // CHIPS[chip].devices_per_chip > found.capacity_bytes


def attention(head_dim: int) -> mtf.Tensor:
    dims = [D("batch", 4), D("heads", 8), D("length", 1024), D("key", head_dim)]
    with mtf.Graph():
        q, k, v = (mtf.input(name, dims, "bfloat16") for name in "qkv")
        k, v = (mtf.rename_dimension(mtf.sin(x), "length", "memory") for x in (k, v))
        return mtf.attention(mtf.sin(q), k, v, "length", "memory", "key")


def test_heads_of_64_lie_in_128_lanes() -> None:
    """Of q, k, v and the context the sines and the result are operands of the kernel alone: four buffers of 4 MiB."""
    narrow, wide = (mtf.lower({"y": attention(n)}) for n in (64, 128))
    size = 4 * 8 * 1024 * 64 * 2
    assert memory(narrow, "v5e-1").compiled.layout_bytes == 4 * size
    assert memory(wide, "v5e-1").compiled.layout_bytes == 0


def test_gradients_of_keys_and_values_are_summed_in_float32() -> None:
    """Beside heads in 128 lanes, two blocks of float32 while the kernel of both gradients runs."""
    with mtf.Graph():
        dims = [D("batch", 4), D("heads", 8), D("length", 1024), D("key", 128)]
        q, k, v = (mtf.input(name, dims, "bfloat16") for name in "qkv")
        k, v = (mtf.rename_dimension(x, "length", "memory") for x in (k, v))
        y = mtf.attention(q, k, v, "length", "memory", "key")
        program = mtf.lower(dict(zip("ab", mtf.gradients([mtf.reduce_sum(y)], [k, v]), strict=True)))
    assert memory(program, "v5e-1").compiled.layout_bytes == pytest.approx(2 * 4 * 4 * 8 * 1024 * 128, rel=0.01)


@pytest.mark.parametrize(("features", "computed", "more"), [(320, False, 6), (384, False, 0), (320, True, 0)])
def test_a_table_whose_rows_do_not_fill_lanes_is_copied_for_a_lookup(features: int, computed: bool, more: int) -> None:
    """4,096 rows of 320 float32 numbers take 5 MiB with the rows' numbers in lanes, and 6 MiB with 384 in each row."""
    vocab, d, batch = D("vocab", 4096), D("d", features), D("batch", 128)
    with mtf.Graph():
        table, ids = mtf.variable("table", [vocab, d], dtype="float32"), mtf.input("ids", [batch], "int32")
        other = mtf.reduce_sum(mtf.cumsum(table, vocab)) if computed else None
        rows = mtf.gather(mtf.cumsum(table, vocab) if computed else mtf.cast(table, "bfloat16"), ids, vocab)
        program = mtf.lower({"rows": rows, "other": other} if computed else {"rows": rows})
    compiled = memory(program, "v5e-1").compiled
    assert compiled.layout_bytes == pytest.approx(more * MIB, abs=2**18)


@pytest.mark.parametrize(("width", "more"), [(512, 8), (4096, 24)])
def test_operands_and_results_of_grouped_products_are_stored(width: int, more: int) -> None:
    """The plan has the result alone, 16 MiB in float32. The kernel of the product reads its operand (4 or 32 MiB) and
    writes 8 MiB in bfloat16, which another kernel reads."""
    rows, groups, f = D("rows", 4096), D("groups", 4), D("f", 1024)
    with mtf.Graph():
        x, w = mtf.input("x", [rows, D("x", width)], "bfloat16"), mtf.input("w", [groups, D("v", width), f], "bfloat16")
        squares, w = mtf.rename_dimension(mtf.square(x), "x", "d"), mtf.rename_dimension(w, "v", "d")
        y = mtf.ragged_dot(squares, w, mtf.input("sizes", [groups], "int32"), rows, groups)
        program = mtf.lower({"z": mtf.square(mtf.cast(y, "float32"))})
    compiled = memory(program, "v5e-1").compiled
    inputs = sum(v.local_bytes for v in program.inputs.values())
    assert compiled.buffers_bytes == pytest.approx(inputs + 16 * MIB, abs=8192)
    assert compiled.layout_bytes == pytest.approx(more * MIB, abs=8192)


def test_operands_of_kernels_before_a_grouped_product_are_free_after_them() -> None:
    """Gate and input of a layer, 8 MiB each, end where its second product begins: its result of 16 MiB in bfloat16,
    which is 32 MiB in float32, is not beside them. In the plan these and the 32 MiB are in one group."""
    rows, groups, d, f = D("rows", 4096), D("groups", 4), D("d", 2048), D("f", 1024)
    with mtf.Graph():
        x, sizes = mtf.input("x", [rows, d], "bfloat16"), mtf.input("sizes", [groups], "int32")
        wi, wo = (mtf.input(name, [groups, d, f], "bfloat16") for name in ("wi", "wo"))
        gate, linear = mtf.ragged_dot(x, wi, sizes, rows, groups), mtf.ragged_dot(x, wo, sizes, rows, groups)
        y = mtf.ragged_dot(mtf.silu(gate) * linear, wo, sizes, rows, groups)
        program = mtf.lower({"z": mtf.cast(mtf.square(y), "float32")})
    compiled = memory(program, "v5e-1").compiled
    inputs = sum(v.local_bytes for v in program.inputs.values())
    assert compiled.buffers_bytes == pytest.approx(inputs + (8 + 8 + 32) * MIB, abs=8192)
    assert compiled.buffers_bytes + compiled.layout_bytes == pytest.approx(inputs + (16 + 32) * MIB, abs=8192)


@pytest.mark.parametrize(("gated", "rows", "more"), [(False, 8192, 0), (True, 8192, 8), (False, 2048, 9)])
def test_gradients_of_weights_exist_as_soon_as_their_operands(gated: bool, rows: int, more: int) -> None:
    """Gradients of a layer's weights (8 MiB each) are beside the weights that it has gathered: all three where two
    products read their cotangents at once, less what else has ended by then. If the plan's peak, the widest value
    beside both gathered weights and one gradient, is before that, it stays the peak."""
    layers, batch, d, f = D("layers", 4), D("batch", rows), D("d", 1024), D("f", 4096)
    dims = {"gate": [d, f], "wi": [d, f], "wo": [f, d]}

    def layer(carries: tuple[mtf.Tensor, ...], _: object) -> tuple[tuple[mtf.Tensor, ...], tuple[mtf.Tensor, ...]]:
        (x,) = carries
        gate, wi, wo = (mtf.cast(mtf.variable(n, dims[n]), "bfloat16") if gated or n != "gate" else None for n in dims)
        hidden = mtf.sin(mtf.einsum([x, wi], [batch, f]))
        hidden = hidden if gate is None else hidden * mtf.einsum([x, gate], [batch, f])
        return (x + mtf.einsum([hidden, wo], [batch, d]),), ()

    with mtf.Graph():
        (y,), _ = mtf.scan(layer, [mtf.input("x", [batch, d], "bfloat16")], dim=layers, stack_variables=True)
        loss = mtf.reduce_mean(mtf.cast(y, "float32"))
        updates = mtf.optimize.SgdOptimizer(1e-3).minimize(loss)
        program = mtf.lower({"loss": loss}, updates, "fsdp:4", "batch:fsdp;d:fsdp?")
    found = memory(program, "v5e-4")
    assert found.compiled.layout_bytes == more * MIB
    short = compiled_memory(program, mtf.XLA_TPU, found.peak_bytes, found.peak_bytes)
    assert short.layout_bytes == 0, "where memory is short, the plan's order"


@pytest.mark.parametrize(("images", "channels", "more"), [(64, 64, 24), (128, 64, 0), (64, 128, 0)])
def test_no_position_of_an_image_is_in_lanes(images: int, channels: int, more: int) -> None:
    """Densest are 112 positions in 128 lanes: 16 MiB each for the first result and the second, beside it. Windows slide
    over these, and 64 images or channels fill half of the lanes: 28 MiB each."""
    dims = [D("batch", images), D("height", 16), D("width", 112), D("channels", channels)]
    with mtf.Graph():
        y = mtf.input("x", dims, "bfloat16")
        for n in range(2):
            taps = [D("filter_height", 3), D("filter_width", 3), D("channels", channels), D("channels_out", channels)]
            y = mtf.conv2d(y, mtf.input(f"w{n}", taps, "bfloat16"))
            y = mtf.rename_dimension(y, "channels_out", "channels")
        program = mtf.lower({"y": y})
    assert memory(program, "v5e-1").compiled.layout_bytes == more * MIB


def test_a_step_needs_the_sum_of_its_causes() -> None:
    program = trained(4)
    found = memory(program, "v5e-4")
    c = found.compiled
    assert found.needed_bytes == c.buffers_bytes + c.layout_bytes + c.code_bytes + c.fragmentation_bytes
    assert c.buffers_bytes == found.peak_bytes
    gaps = c.fragmentation_bytes - 0.01 * (c.buffers_bytes + c.layout_bytes - c.state_bytes)
    assert 0 <= gaps < 0.01 * (c.buffers_bytes + c.layout_bytes - c.state_bytes)
    assert c.code_bytes % CODE_BYTES == 0
    assert (c.casts_bytes, c.loops_bytes) == (0, 0)


def test_gpt2_xl_on_four_chips_needs_what_libtpu_reports() -> None:
    config = mtf.models.preset("gpt2-xl")
    with mtf.Graph():
        outputs, updates = mtf.models.train_step(config, batch=16, length=1024)
        program = mtf.lower(outputs, updates, "fsdp:4", mtf.models.layout("fsdp", config, "fsdp:4"))
    assert memory(program, "v5e-4").needed_bytes / GIB == pytest.approx(7.40, rel=0.03)


@pytest.mark.parametrize("chips", [4, 16])
def test_plain_jit_casts_before_loops_and_loops_over_blocks(chips: int) -> None:
    program = trained(chips)
    own, plain = (memory(program, f"v5e-{chips}", c) for c in (mtf.XLA_TPU, mtf.GSPMD))
    assert own.plain_jit_bytes == plain.needed_bytes > own.needed_bytes
    stacked = [
        v for n, v in program.variables.items() if n.startswith("layers/") and not v.tensor.operation.attrs["slot_of"]
    ]
    cast = sum(tiled_bytes(v.local_shape.sizes, 2) for v in stacked if len(v.tensor.shape) > 2)
    rest = sum(tiled_bytes(v.local_shape.sizes, 2) for v in stacked if len(v.tensor.shape) == 2)  # biases and norms
    assert cast <= plain.compiled.casts_bytes <= cast + rest
    tokens, d_model, d_ff, vocab = 8 * 1024, 768, 3072, 50_304
    looped = 2 * tokens * (d_model + d_ff) + 2 * tokens * vocab if chips >= 8 else 0
    assert plain.compiled.loops_bytes == looped


def test_plain_jit_keeps_the_gradient_of_logits_only_where_it_fits() -> None:
    program = trained(16)
    logits = 2 * 8 * 1024 * 50_304
    plain = memory(program, "v5e-16", mtf.GSPMD)
    assert plain.fits
    for size, less in ((plain.needed_bytes, 0), (plain.needed_bytes - 1, logits)):
        slice_ = Slice("v5e-16", replace(CHIPS["v5e"], hbm_bytes=size, hbm_reserved_bytes=0))
        small = memory(program, slice_, mtf.GSPMD)
        assert small.compiled.loops_bytes == plain.compiled.loops_bytes - less
        assert small.fits
    assert memory(program, "v5e-16").compiled.loops_bytes == 0


def test_a_whole_run_takes_an_export_of_float32_weights() -> None:
    program = trained(4)
    found = memory(program, "v5e-4")
    variables = [v.tensor for v in program.variables.values() if not v.tensor.operation.attrs["slot_of"]]
    weights = sum(4 * t.shape.size for t in variables)
    assert found.compiled.export_bytes == pytest.approx(2 * min(FILE_BYTES, weights), rel=0.01)
    assert found.run_bytes == max(found.needed_bytes + RUN_ADDS_BYTES, found.compiled.state_bytes + 2 * weights)
    with mtf.Graph():
        cache = mtf.variable("cache", "positions:64", trainable=False)
        decoding = mtf.lower(updates=[mtf.assign(cache, cache + 1.0)])
    for untrained in (mtf.lower({"y": attention(64)}), decoding):
        assert memory(untrained, "v5e-1").run_bytes == memory(untrained, "v5e-1").needed_bytes


def test_the_verdict_is_yes_tight_or_no() -> None:
    """Where memory is short, the compiled step has fewer gaps between its buffers."""
    program = trained(4)

    def slice_of(size: int) -> Slice:
        return Slice("v5e-4", replace(CHIPS["v5e"], hbm_bytes=size, hbm_reserved_bytes=0))

    run, needed = memory(program, "v5e-4").run_bytes, memory(program, "v5e-4").needed_bytes
    least = memory(program, slice_of(needed - 1)).needed_bytes
    assert least < needed
    for size, verdict in ((run, "yes"), (run - 1, "tight"), (needed, "tight"), (least, "tight"), (least - 1, "no")):
        slice_ = slice_of(size)
        found = memory(program, slice_)
        assert (found.verdict, found.fits) == (verdict, verdict != "no"), size
        assert f"fits: {verdict} (" in str(found)
        if verdict == "yes":
            assert_fits(program, slice_)
            continue
        with pytest.raises(AssertionError, match="tight on v5e-4" if verdict == "tight" else "does not fit"):
            assert_fits(program, slice_)
        if verdict == "tight":
            assert_fits(program, slice_, tight=True)
            assert "tight: a whole run needs" in found.message


def test_all_three_are_printed() -> None:
    text = str(memory(trained(4), "v5e-4"))
    for words in ("15.75 GiB offered to programs of 16 GiB", "compiled step*", "plain jit (GSPMD)*", "a whole run*"):
        assert words in text
