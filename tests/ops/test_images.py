"""Networks of convolutions and pools: under layouts, in blocks, in bfloat16, in memory and time; what is refused."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from itertools import product

import numpy as np
import pytest

import meshlib as mtf
import tests.cases  # noqa: F401 (first: it enters the rows of all its files)
from hardware import CHIPS, Matmul
from hardware.core import matmul_seconds
from hardware.numerics import round_to_bfloat16
from layouts import Shape
from meshlib.core.engine import Engine
from meshlib.ops.images.sliding import Slide, pairs, window_sizes
from meshlib.program.instructions import Compute, Widen
from tests.cases_images import convolved, spread_out
from tests.effort import draws, each, some
from tests.oracle import Array, assert_close, draw_layout, run

D = mtf.Dimension


def dims(text: str) -> list[mtf.Dimension]:
    return list(Shape(text))


# ---------------------------------------------------------------- how much there is to do


def most_triples(s: Slide, blocks: tuple[int, int, int]) -> int:
    """Of the blocks, one after the other: those of the definition that lie in the one that has most."""
    first, second, out = (n // b for n, b in zip((s.first, s.second, s.out), blocks, strict=True))
    found: Counter[tuple[int, int, int]] = Counter()
    for i, f, j in product(range(s.out), range(s.second), range(s.first)):
        if s.stride * i + s.dilation * f == s.spread * j + s.before:
            found[j // first, f // second, i // out] += 1
    return max(found.values(), default=0)


def test_multiply_adds_are_those_of_the_definition() -> None:
    rng = random.Random(0)
    for _ in range(draws(60, 3000)):
        blocks = rng.choice([1, 1, 2, 3]), rng.choice([1, 1, 2]), rng.choice([1, 2, 4])
        first, second, out = (b * rng.randint(1, 5) for b in blocks)
        s = Slide(rng.randint(1, 4), rng.randint(1, 3), rng.randint(1, 3), rng.randint(-4, 6), first, second, out)
        turned = {s: (0, 1, 2), s.first_cotangent(): (2, 1, 0), s.second_cotangent(): (0, 2, 1), s.swapped(): (1, 0, 2)}
        for slide, order in turned.items():
            cut = blocks[order[0]], blocks[order[1]], blocks[order[2]]
            assert pairs(slide, cut) == most_triples(slide, cut), (slide, cut)


def test_filters_as_long_as_what_they_pass_over() -> None:
    n = 1 << 20
    assert pairs(Slide(1, 1, 1, n - 1, n, n, n)) == n * (n + 1) // 2
    with mtf.Graph():
        x, w = mtf.input("x", dims(f"batch:8;length:{n};c:4")), mtf.variable("w", dims(f"tap:{n};c:4;o:4"))
        y = mtf.conv1d(x, w, padding="SAME")
    assert mtf.lower(y, mesh="m:8", layout="batch:m").work.mxu_flops == 2 * 16 * (n * n - (n // 2) ** 2)


# ---------------------------------------------------------------- a network


def network(dtype: str = "float64") -> tuple[dict[str, mtf.Tensor], dict[str, Array]]:
    """A stem, a block with a short cut, a transposed convolution; loss and the gradients of all filters."""
    rng = np.random.default_rng(0)
    feeds: dict[str, Array] = {}

    def given(name: str, text: str) -> mtf.Tensor:
        x = mtf.input(name, dims(text), dtype)
        feeds[name] = rng.normal(size=x.shape.sizes)
        return x

    with mtf.Graph():
        image = given("image", "batch:2;height:16;width:24;rgb:2")
        filters = [
            given("stem", "kh:5;kw:5;rgb:2;wide:4"),
            given("first", "kh:3;kw:3;wide:4;inner:6"),
            given("second", "kh:3;kw:3;inner:6;wide:4"),
            given("up", "kh:4;kw:4;out:2;wide:4"),
        ]
        x = mtf.max_pool(mtf.conv2d(image, filters[0], 2), {"height": 3, "width": 3}, 1, "SAME")
        x = x + mtf.conv2d(mtf.relu(mtf.conv2d(x, filters[1])), filters[2])
        x = mtf.avg_pool(x, {"height": 2, "width": 2})
        y = mtf.conv2d_transpose(x, filters[3], 2)
        loss = mtf.reduce_mean(mtf.square(mtf.resize(y, {"height": 16, "width": 12}) - 0.5))
        found = mtf.gradients([loss], filters)
    return {"loss": loss, "y": y, **{f"d{n}": x for n, x in enumerate(found) if x is not None}}, feeds


LAYOUTS = (
    ("p:2;q:3", "height:p;width:q"),
    ("p:4;q:2", "height:p;batch:q"),
    ("p:2;q:2", "height:p;width:q"),
    ("p:2;q:2;r:2", "height:p;width:q;inner:r;wide:r?"),
    ("p:2;q:2", "height:p+q"),
    ("p:2;q:2", "wide:p;height:q"),
    ("p:2;q:2", "rgb:p?;batch:q"),
)


@each("mesh, layout", some(LAYOUTS, LAYOUTS[:2]))
def test_a_network_under_layouts(mesh: str, layout: str) -> None:
    outputs, feeds = network()
    (wanted,) = run(mtf.lower(outputs, mesh="p:1", precision="highest"), feeds)
    program = mtf.lower(outputs, mesh=mesh, layout=layout, precision="highest")
    for executor in ("exact", "fast"):
        (found,) = run(program, feeds, executor)
        assert_close(found, wanted, 1e-10, f"{mesh} {layout} {executor}")


@pytest.mark.parametrize("transposed", [False, True])
def test_random_convolutions(transposed: bool) -> None:
    """Any sizes, strides, dilations and paddings: against the loops, gradients by linearity, under drawn layouts."""
    rng, tried = np.random.default_rng(transposed), draws(8, 2000)
    for _ in range(tried):
        count, letters = int(rng.integers(1, 3)), "hw"
        b, c, o, *sizes = (int(n) for n in rng.choice([2, 4, 6, 8, 12], 3 + count))
        windows, strides, steps = ([int(n) for n in rng.integers(1, high, count)] for high in (6, 4, 3))
        around: object = [(int(m), int(n)) for m, n in rng.integers(0, 4, (count, 2))]
        around = ("SAME", "VALID", around)[rng.integers(3)]
        with mtf.Graph():
            x = mtf.input("x", [D("b", b), *map(D, letters, sizes), D("c", c)], "float64")
            ends = [D("o", o), D("c", c)] if transposed else [D("c", c), D("o", o)]
            w = mtf.input("w", [*map(D, ("kh", "kw"), windows), *ends], "float64")
            conv = getattr(mtf, f"conv{count}d" + "_transpose" * transposed)
            try:
                y = conv(x, w, strides, around, steps)
            except mtf.ShapeError:  # windows larger than the image
                tried -= 1
                continue
            dx, dw = mtf.gradients([y], [x, w], [mtf.input("dy", y.shape, "float64")])
        outputs = {"y": y, "dx": dx, "dw": dw}
        feeds = {n: rng.normal(size=t.shape.sizes) for n, t in (("x", x), ("w", w), ("dy", y))}
        made = y.shape.sizes[1:-1]
        along = []
        for n in range(count):
            padding = around[n] if isinstance(around, list) else around
            size = made[n] if transposed else sizes[n]
            before = window_sizes(size, windows[n], strides[n], steps[n], padding)[1][0]
            along.append((strides[n], steps[n], before))
        reference = spread_out if transposed else convolved
        (found,) = run(mtf.lower(outputs, mesh="p:1", precision="highest"), feeds, "fast")
        other = {name: rng.normal(size=feeds[name].shape) for name in "xw"}
        np.testing.assert_allclose(found["y"], reference(feeds["x"], feeds["w"], along, made), atol=1e-10)
        for name, operands in (("x", (other["x"], feeds["w"])), ("w", (feeds["x"], other["w"]))):
            wanted = (reference(*operands, along, made) * feeds["dy"]).sum()
            assert (found[f"d{name}"] * other[name]).sum() == pytest.approx(wanted, rel=1e-9, abs=1e-9)
        for _ in range(3):
            layout = draw_layout(rng, ["b", "c", "o", *letters[:count], *letters[:count], "kh"])
            if not layout.allows([x.shape, w.shape, y.shape]):
                continue
            program = mtf.lower(outputs, mesh=layout.mesh_text, layout=layout.rules_text, precision="highest")
            for executor in ("exact", "fast"):
                assert_close(run(program, feeds, executor)[0], found, 1e-10, f"{layout} {executor}")
    assert tried > 4


@pytest.mark.parametrize("executor", ["exact", "fast"])
def test_blocks_that_no_window_meets(executor: str) -> None:
    """Of four rows at stride 2 behind three of padding the first and the third are used by nobody."""
    rng = np.random.default_rng(0)
    with mtf.Graph():
        x, w = mtf.input("x", dims("b:2;h:4;c:2"), "float64"), mtf.input("w", dims("k:1;c:2;m:4"), "float64")
        y = mtf.conv1d(x, w, 2, (3, 1), group_dims=dims("c:2"))
        dx, dw = mtf.gradients([y], [x, w], [mtf.input("dy", y.shape, "float64")])
        program = mtf.lower({"y": y, "dx": dx, "dw": dw}, mesh="p:4", layout="h:p", precision="highest")
    feeds = {n: rng.normal(size=t.shape.sizes) for n, t in (("x", x), ("w", w), ("dy", y))}
    (found,) = run(program, feeds, executor)
    y, dx, dw = np.zeros((2, 4, 2, 4)), np.zeros((2, 4, 2)), np.zeros((1, 2, 4))
    for row, window in ((1, 2), (3, 3)):
        y[:, window] = feeds["x"][:, row, :, None] * feeds["w"][0]
        dx[:, row] = (feeds["dy"][:, window] * feeds["w"][0]).sum(-1)
        dw[0] += (feeds["dy"][:, window] * feeds["x"][:, row, :, None]).sum(0)
    assert_close(found, {"y": y, "dx": dx, "dw": dw}, 1e-12, executor)


def test_two_split_dims_of_one_convolution_share_their_edges_with_others() -> None:
    """Forward two convolutions read one image: its rows and its columns move once, wide enough for both."""
    with mtf.Graph():
        x = mtf.input("x", dims("b:2;h:16;w:16;c:4"))
        w = [mtf.input(f"w{k}", dims(f"kh{k}:{k};kw{k}:{k};c:4;o:4")) for k in (3, 5)]
        y = mtf.conv2d(x, w[0]) + mtf.conv2d(x, w[1])
        program = mtf.lower({"y": y}, mesh="p:4;q:4", layout="h:p;w:q")
    wide = [i for i in program.instructions if isinstance(i, Widen)]
    assert [(i.steps[0].dim, i.outputs[0].local_shape.sizes) for i in wide] == [
        ("h", (2, 8, 4, 4)),
        ("w", (2, 8, 8, 4)),
    ]
    assert not any(i.exchanges for i in program.instructions if isinstance(i, Compute))


def test_groups_of_channels_are_convolutions_apart() -> None:
    rng = np.random.default_rng(1)
    with mtf.Graph():
        x, w = mtf.input("x", dims("b:2;h:4;c:6"), "float64"), mtf.input("w", dims("k:3;c:2;o:9"), "float64")
        whole = mtf.conv1d(x, w, groups=3)
        parts = [mtf.conv1d(mtf.slice(x, 2 * g, 2, "c"), mtf.slice(w, 3 * g, 3, "o")) for g in range(3)]
        outputs = {"whole": whole, "parts": mtf.concat(parts, "o")}
        feeds = {t.name: rng.normal(size=t.shape.sizes) for t in (x, w)}
        (found,) = run(mtf.lower(outputs, mesh="p:1", precision="highest"), feeds, "fast")
    np.testing.assert_allclose(found["whole"], found["parts"], rtol=1e-12)


# ---------------------------------------------------------------- blocks


@pytest.mark.parametrize("stride", [1, 2])
def test_an_image_in_blocks_is_convolved_as_a_whole(stride: int) -> None:
    rng = np.random.default_rng(2)
    image, filters = rng.normal(size=(2, 16, 8, 3)), rng.normal(size=(3, 3, 3, 4))
    with mtf.Graph():
        x = mtf.input("x", dims("b:2;hb:4;wb:2;h:4;w:4;c:3"), "float64")
        w = mtf.input("w", dims("kh:3;kw:3;c:3;o:4"), "float64")
        blocks = mtf.conv2d_with_blocks(x, w, stride, "SAME", D("hb", 4), D("wb", 2))
        whole = mtf.conv2d(mtf.input("image", dims("b:2;height:16;width:8;c:3"), "float64"), w, stride)
        assert blocks.shape == Shape([("b", 2), ("hb", 4), ("wb", 2), ("h", 4 // stride), ("w", 4 // stride), ("o", 4)])
        program = mtf.lower({"blocks": blocks, "whole": whole}, mesh="p:4;q:2", layout="hb:p;wb:q", precision="highest")
    cut = image.reshape(2, 4, 4, 2, 4, 3).transpose(0, 1, 3, 2, 4, 5)
    (found,) = run(program, {"x": cut, "image": image, "w": filters})
    made = found["whole"].reshape(2, 4, 4 // stride, 2, 4 // stride, 4).transpose(0, 1, 3, 2, 4, 5)
    np.testing.assert_allclose(found["blocks"], made, rtol=1e-12)
    assert {c.kind for c in program.collectives} == {"collective_permute"}


def test_layers_under_mesh_tensorflows_names() -> None:
    channels = D("channels", 6)
    with mtf.Graph() as graph:
        x = mtf.input("x", dims("b:2;h:4;w:8;channels:4"))
        blocks = mtf.input("blocks", dims("b:2;hb:2;h:4;w:8;channels:4"))
        volume = mtf.input("volume", dims("b:2;db:2;d:2;h:4;w:2;channels:4"))
        layers = mtf.layers
        shapes = {
            "conv1d": layers.conv1d(x, channels, 5, 2),
            "conv2d": layers.conv2d(x, channels, (3, 3), (2, 2)),
            "up": layers.conv2d_transpose(x, channels),
            "blocks": layers.conv2d_with_blocks(blocks, channels, h_blocks_dim=D("hb", 2), name="in_blocks"),
            "up blocks": layers.conv2d_transpose_with_blocks(blocks, channels, h_blocks_dim=D("hb", 2), name="up"),
            "volume": layers.conv3d_with_blocks(volume, channels, d_blocks_dim=D("db", 2)),
            "up volume": layers.conv3d_transpose_with_blocks(volume, channels, d_blocks_dim=D("db", 2)),
        }
    assert {name: str(y.shape) for name, y in shapes.items()} == {
        "conv1d": "[b:2, h:4, w:4, channels:6]",
        "conv2d": "[b:2, h:2, w:4, channels:6]",
        "up": "[b:2, h:8, w:16, channels:6]",
        "blocks": "[b:2, hb:2, h:4, w:8, channels:6]",
        "up blocks": "[b:2, hb:2, h:8, w:16, channels:6]",
        "volume": "[b:2, db:2, d:2, h:4, w:2, channels:6]",
        "up volume": "[b:2, db:2, d:4, h:8, w:4, channels:6]",
    }
    kernels = {name: str(v.output.shape) for name, v in graph.variables.items()}
    assert kernels["conv2d/kernel"] == "[fh:3, fw:3, channels:4, channels_out:6]"
    assert kernels["conv2d_transpose/kernel"] == "[fh:2, fw:2, channels_out:6, channels:4]"


# ---------------------------------------------------------------- arithmetic, memory, time


def test_operands_are_rounded_and_sums_are_not() -> None:
    """bfloat16 into the MXU, float32 out of it, in both executors and for both gradients."""
    rng = np.random.default_rng(3)
    values = {name: rng.normal(size=shape).astype(np.float32) for name, shape in
              {"x": (2, 6, 6, 8), "w": (3, 3, 8, 4), "dy": (2, 6, 6, 4)}.items()}  # fmt: skip
    with mtf.Graph():
        x, w = mtf.input("x", dims("b:2;h:6;w:6;c:8")), mtf.input("w", dims("kh:3;kw:3;c:8;o:4"))
        y = mtf.conv2d(x, w)
        dx, dw = mtf.gradients([y], [x, w], [mtf.input("dy", y.shape)])
        outputs = {"y": y, "dx": dx, "dw": dw}
        default, highest = (mtf.lower(outputs, mesh="p:1", precision=p) for p in ("default", "highest"))
    (wanted,) = run(highest, {name: round_to_bfloat16(v) for name, v in values.items()})
    for executor in ("exact", "fast"):
        (found,) = run(default, values, executor)
        assert_close(found, wanted, 2e-6, executor)
        (kept,) = run(highest, values, executor)
        assert not np.allclose(found["y"], kept["y"], rtol=1e-5)


def program_of(image: str, window: str, stride: int = 1, dtype: str = "bfloat16", mesh: str = "p:1", layout: str = ""):
    """One convolution."""
    with mtf.Graph():
        x, w = mtf.input("x", dims(image), dtype), mtf.input("w", dims(window), dtype)
        return mtf.lower({"y": mtf.conv2d(x, w, stride)}, mesh=mesh, layout=layout)


def test_windows_take_no_memory_no_bytes_and_no_flops_of_padding() -> None:
    program = program_of("b:128;h:16;w:16;c:128", "kh:5;kw:5;c:128;o:128")
    x, w, y = (2 * n for n in (128 * 16 * 16 * 128, 25 * 128 * 128, 128 * 16 * 16 * 128))
    assert program.memory.peak_bytes == x + w + y
    estimate = mtf.estimate(program, "v5e-1")
    (kernel,) = (r for r in estimate.rows if r.mxu_flops)
    assert kernel.hbm_bytes == x + w + y
    inside = 5 * 16 - 2 * (2 + 1)  # taps of all windows along a dim
    assert kernel.mxu_flops == 2 * 128 * inside**2 * 128 * 128


@pytest.mark.parametrize("batch", [1, 200])
@pytest.mark.parametrize(("channels", "out"), [(3, 16), (64, 2)])
@pytest.mark.parametrize("stride", [1, 2])
def test_the_fast_executor_multiplies_little_more_than_the_work(
    batch: int, channels: int, out: int, stride: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    multiplied = 0
    matmul = Engine.matmul

    def counted(self: Engine, a: Array, b: Array, out: Array) -> None:
        nonlocal multiplied
        multiplied += a.shape[0] * a.shape[1] * a.shape[2] * b.shape[2]
        matmul(self, a, b, out)

    with mtf.Graph():
        x = mtf.input("x", [D("b", batch), *dims("height:12;width:12"), D("c", channels)])
        w = mtf.input("w", [*dims("kh:3;kw:3"), D("c", channels), D("o", out)])
        y = mtf.conv2d(x, w, stride)
        found = dict(zip(("dx", "dw"), mtf.gradients([mtf.reduce_sum(mtf.square(y))], [x, w]), strict=True))
        program = mtf.lower({"y": y, **found}, precision="highest")
    feeds = {"x": np.ones(x.shape.sizes, np.float32), "w": np.ones(w.shape.sizes, np.float32)}
    monkeypatch.setattr(Engine, "matmul", counted)
    run(program, feeds, "fast")
    inside = sum(r.mxu_flops for r in mtf.estimate(program, "v5e-1").rows) // 6  # products in six passes
    assert 0 < multiplied <= 0.75 * inside  # half a flop and half as much again: what lies outside the image


def test_a_block_in_the_middle_has_the_most_to_do() -> None:
    """Of 4 blocks of 4 rows the outer ones have windows that reach out."""
    program = program_of("b:2;h:16;w:16;c:4", "kh:5;kw:1;c:4;o:4", mesh="p:4", layout="h:p")
    (kernel,) = (r for r in mtf.estimate(program, "v5e-4").rows if r.mxu_flops)
    assert kernel.mxu_flops == 2 * 2 * (4 * 5) * 16 * 4 * 4


def test_windows_that_see_padding_only_cost_no_flops() -> None:
    """Of one row between two of padding, 2 taps two rows apart meet nothing: an estimate in every precision."""
    for precision in ("default", "highest"):
        with mtf.Graph():
            x, w = mtf.input("x", dims("b:2;h:1;c:4")), mtf.input("w", dims("kh:2;c:4;o:4"))
            y = mtf.conv1d(x, w, 2, (1, 1), 2)
            dx, dw = mtf.gradients([y], [x, w], [mtf.input("dy", y.shape)])
            program = mtf.lower({"y": y, "dx": dx, "dw": dw}, precision=precision)
        assert sum(r.mxu_flops for r in mtf.estimate(program, "v5e-1").rows) == 0
        assert not run(program, {"x": np.ones((2, 1, 4)), "w": np.ones((2, 4, 4)), "dy": np.ones((2, 1, 4))})[0][
            "y"
        ].any()


def test_what_follows_a_convolution_of_split_rows_is_in_its_kernel() -> None:
    """Its edges move first; relu before it is another kernel, bias and relu after it are not."""
    with mtf.Graph():
        x, w = mtf.input("x", dims("b:8;h:64;w:64;c:64")), mtf.input("w", dims("kh:3;kw:3;c:64;o:64"))
        y = mtf.relu(mtf.conv2d(mtf.relu(x), w) + mtf.input("bias", dims("o:64")))
        program = mtf.lower({"y": y}, mesh="p:4", layout="h:p")
    kernels = [r.name for r in mtf.estimate(program, "v5e-4").rows if r.hbm_bytes]
    assert kernels == ["relu", "conv2d"]


def seconds(*given: int, **more: object) -> float:
    return matmul_seconds(CHIPS["v3"], Matmul(*given, **more))  # type: ignore[arg-type]


def test_how_windows_and_channels_fill_the_array() -> None:
    rows = 1 << 20
    # 3 channels and 7 taps of a row of the window share 21 of 128 rows of the array: 7 products, not 49.
    assert seconds(rows, 3, 64, taps=49, beside=7) == pytest.approx(7 * seconds(rows, 128, 64), rel=1e-3)
    # 64 channels leave room for two taps: of 9 taps in 3 rows 6 products.
    assert seconds(rows, 64, 128, taps=9, beside=3) == pytest.approx(6 * seconds(rows, 128, 128), rel=1e-3)
    assert seconds(rows, 128, 128, taps=9, beside=3) == pytest.approx(9 * seconds(rows, 128, 128), rel=1e-3)
    # 32 groups of 8 channels each are 2 dense products of 16 groups.
    assert seconds(rows, 8, 8, batch=32, packs=True) == pytest.approx(2 * seconds(rows, 128, 128), rel=1e-3)
    # As many products keep rows in the array, 128 at a time, which shift in within the 8 cycles that 8 columns take.
    assert seconds(rows, 8, 8, batch=32) == pytest.approx(32 * 8 / 128 * seconds(rows, 128, 128), rel=1e-3)


def test_squares_as_channels_make_the_first_layer_faster() -> None:
    plain = program_of("b:128;h:224;w:224;c:3", "kh:7;kw:7;c:3;o:64", 2)
    squares = program_of("b:128;h:112;w:112;c:12", "kh:4;kw:4;c:12;o:64")
    slow, fast = (mtf.estimate(p, "v5e-1").step_seconds for p in (plain, squares))
    assert 1.4 < slow / fast < 2.0  # 7 products for 4


# ---------------------------------------------------------------- what is refused


def small(*names: str) -> tuple[mtf.Tensor, mtf.Tensor]:
    return mtf.input("x", dims("b:2;h:8;w:8;c:4")), mtf.input("f", dims(names[0] if names else "kh:3;kw:3;c:4;o:6"))


WRONG: dict[str, tuple[Callable[[], object], str]] = {
    "channels of another size": (lambda: mtf.conv2d(*small("kh:3;kw:3;c:5;o:6")),
                                 r"conv2d \(test_images.py:\d+\): filters have 5 of the channels 'c', but need 4"),
    "no channels": (lambda: mtf.conv2d(*small("kh:3;kw:3;d:4;o:6")), "share no dim with x"),
    "two dims in common": (lambda: mtf.conv2d(*small("kh:3;kw:3;c:4;b:2")), "share 'c' and 'b' with x"),
    "a window named as a dim": (lambda: mtf.conv2d(*small("h:3;kw:3;c:4;o:6")), "'h' of the window is a dim of x"),
    "larger than the image": (lambda: mtf.conv2d(*small("kh:9;kw:3;c:4;o:6"), padding="VALID"),
                              r"no window fits dim 'h' \(8 long, window 9\); pad more"),
    "groups": (lambda: mtf.conv2d(*small(), groups=3), "3 groups do not divide the channels c:4 and o:6"),
    "filters of all groups": (lambda: mtf.conv2d(*small(), groups=2), r"4 of the channels 'c', but need 4 / 2 .*= 2"),
    "stride 0": (lambda: mtf.conv2d(*small(), 0), "stride of dim 'h' must be at least 1, got 0"),
    "stride 10**30": (lambda: mtf.max_pool(small()[0], {"h": 2}, 10**30), "of dim .h. must be at most 2147483647"),
    "padding 10**30": (lambda: mtf.conv2d(*small(), padding=10**30), "padding of dim 'h' must be at most 2147483647"),
    "three strides": (lambda: mtf.conv2d(*small(), [1, 2, 3]), "stride must have 2 entries"),
    "stride of another dim": (lambda: mtf.conv2d(*small(), {"c": 2}), "stride names c; the dims with windows are"),
    "padding": (lambda: mtf.conv2d(*small(), padding="FULL"), "padding of dim 'h' must be 'SAME' or 'VALID'"),
    "negative padding": (lambda: mtf.conv2d(*small(), padding=-1), "must not be negative"),
    "integers": (lambda: mtf.conv2d(small()[0], mtf.input("i", dims("kh:1;kw:1;c:4;o:2"), "int32")), "float tensor"),
    "other dtypes": (lambda: mtf.conv2d(small()[0], mtf.input("i", dims("kh:1;kw:1;c:4;o:2"), "bfloat16")), "cast one"),
    "blocks that do not divide": (
        lambda: mtf.conv2d_with_blocks(mtf.input("y", dims("hb:4;h:3;w:4;c:4")), small()[1], 5, "SAME", D("hb", 4)),
        "dim 'h' of the result, 3 long, is not 4 blocks"),
    "squares": (lambda: mtf.space_to_depth(small()[0], 3), "squares of 3 do not divide dim h:8 and w:8"),
    "channels as squares": (lambda: mtf.depth_to_space(small()[0], 3), "c:4 does not hold squares of 9"),
    "size 0": (lambda: mtf.resize(small()[0], {"h": 0}), "size of 'h' must be at least 1, got 0"),
}  # fmt: skip


@each("make, message", WRONG)
def test_what_is_refused(make: Callable[[], object], message: str) -> None:
    with mtf.Graph(), pytest.raises(mtf.MeshlibError, match=message):
        make()


def test_rows_that_a_split_does_not_divide_are_an_error() -> None:
    with pytest.raises(mtf.LayoutError, match=r"7 .*2|2 .*7"):
        program_of("b:2;h:14;w:4;c:4", "kh:3;kw:3;c:4;o:4", 2, mesh="p:2", layout="h:p")
