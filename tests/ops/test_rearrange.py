"""mtf.rearrange, reduce and repeat against einops itself, on random patterns and layouts; their names and errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import einops
import numpy as np
import pytest

import meshlib as mtf
from tests.effort import draws
from tests.oracle import assert_close, draw_layout, needed, run

D = mtf.Dimension
Array = np.ndarray[Any, Any]
IMAGES = [D("batch", 4), D("height", 8), D("width", 6), D("c", 3)]


def drawn(rng: np.random.Generator, kind: str) -> tuple[list[mtf.Dimension], str, dict[str, int]]:
    """Dims, a pattern of `kind` for them, and the sizes that it needs: splits, merges, numbers, ones, an ellipsis."""
    dims = [D(name, int(rng.choice([1, 2, 4, 6, 8]))) for name in ("a", "b", "c", "d")[: rng.integers(1, 5)]]
    left: list[str] = []
    axes: list[str] = []
    gone: list[str] = []
    sizes: dict[str, int] = {}
    first, last = sorted(rng.integers(len(dims) + 1, size=2)) if rng.random() < 0.3 else (0, 0)
    hidden = range(first, last)
    for place, d in enumerate(dims):
        if place in hidden and place > first:
            continue
        if place in hidden:
            left.append("...")
            axes.append("...")
        elif d.size == 1 and rng.random() < 0.5:
            left.append(str(rng.choice(["1", "()"])))
        elif d.size % 2 == 0 and rng.random() < 0.5:
            sizes[f"{d.name}0"] = 2
            left.append(f"({d.name}0 {d.name}1)")
            axes += [f"{d.name}0", f"{d.name}1"]
        elif d.size % 2 == 0 and kind == "reduce" and rng.random() < 0.5:
            left.append(f"({d.name} 2)")
            axes.append(d.name)
        else:
            left.append(d.name)
            axes.append(d.name)
    if kind == "reduce":
        gone = [a for a in axes if rng.random() < 0.4]
    kept = [a for a in axes if a not in gone]
    if kind == "repeat":
        kept += ["new"] if rng.random() < 0.6 else ["3"]
        sizes |= {"new": 2} if "new" in kept else {}
    right: list[str] = []
    order = [kept[i] for i in rng.permutation(len(kept))]
    while order:
        count = int(rng.integers(1, 4))
        group, order = order[:count], order[count:]
        right.append(" ".join(group) if rng.random() < 0.4 else f"({' '.join(group)})")
    if rng.random() < 0.2:
        right.insert(int(rng.integers(len(right) + 1)), "1")
    return dims, f"{' '.join(left)} -> {' '.join(right)}", sizes


def built(kind: str, x: mtf.Tensor, pattern: str, how: str, sizes: dict[str, int]) -> mtf.Tensor:
    if kind == "reduce":
        return mtf.reduce(x, pattern, how, **sizes)
    return {"rearrange": mtf.rearrange, "repeat": mtf.repeat}[kind](x, pattern, **sizes)


def wanted(kind: str, x: Array, pattern: str, how: str, sizes: dict[str, int]) -> Array:
    if kind == "reduce":
        return einops.reduce(x, pattern, how, **sizes)
    return {"rearrange": einops.rearrange, "repeat": einops.repeat}[kind](x, pattern, **sizes)


@pytest.mark.parametrize("kind", ["rearrange", "reduce", "repeat"])
def test_random_patterns_do_what_einops_does_under_any_layout(kind: str) -> None:
    rng = np.random.default_rng(11)
    for _ in range(draws(40, 2000)):
        dims, pattern, sizes = drawn(rng, kind)
        how = str(rng.choice(["sum", "mean", "max", "min", "prod"]))
        x = rng.normal(size=[d.size for d in dims])
        with mtf.Graph():
            y = built(kind, mtf.input("x", dims, "float64"), pattern, how, sizes)
        value = {"y": wanted(kind, x, pattern, how, sizes)}
        session = mtf.Session({"y": y})
        assert_close(run(session.lower("p:1", ""), {"x": x})[0], value, 1e-12, pattern)
        shapes = [t.shape for t in needed([y])]
        for _ in range(3):
            layout = draw_layout(rng, list(dict.fromkeys(d.name for s in shapes for d in s)))
            if layout.rules and layout.allows(shapes):
                program = session.lower(layout.mesh_text, layout.rules_text)
                for executor in ("exact", "fast"):
                    assert_close(run(program, {"x": x}, executor)[0], value, 1e-12, (pattern, layout))


@pytest.mark.parametrize("kind", ["rearrange", "repeat", "sum"])
def test_a_gradient_is_the_pattern_read_backwards(kind: str) -> None:
    rng = np.random.default_rng(5)
    more = {"repeat": " q", "sum": ""}.get(kind, "")
    lost = " c" if kind != "sum" else ""
    left, right = "batch (h p) width c", f"(batch p) width{lost} h{more}"
    sizes = {"p": 2, **({"q": 3} if kind == "repeat" else {})}
    with mtf.Graph():
        x = mtf.input("x", IMAGES, "float64")
        y = built("reduce" if kind == "sum" else kind, x, f"{left} -> {right}", "sum", sizes)
        c = mtf.input("cotangent", y.shape, "float64")
        (dx,) = mtf.gradients([y], [x], [c])
        assert dx is not None
        program = mtf.lower({"dx": dx}, mesh="r:2;s:2", layout="batch:r;height:s")
    cotangent = rng.normal(size=y.shape.sizes)
    back = f"{right} -> {left}"
    if kind == "repeat":
        value = einops.reduce(cotangent, back, "sum", p=2)
    elif kind == "sum":
        value = einops.repeat(cotangent, back, p=2, c=3)
    else:
        value = einops.rearrange(cotangent, back, p=2)
    feeds = {"x": rng.normal(size=(4, 8, 6, 3)), "cotangent": cotangent}
    assert_close(run(program, feeds)[0], {"dx": value}, 1e-12, kind)


def test_flags_and_products() -> None:
    rng = np.random.default_rng(3)
    x = rng.integers(-2, 3, (4, 6)).astype(np.int32)
    with mtf.Graph():
        given = mtf.input("x", [D("a", 4), D("b", 6)], "int32")
        flags = mtf.greater(given, 0)
        program = mtf.lower(
            {
                "any": mtf.reduce(flags, "a (b 2) -> b", "any"),
                "all": mtf.reduce(flags, "a (b 2) -> a", "all"),
                "prod": mtf.reduce(given, "a (b 2) -> b", "prod"),
            },
            mesh="r:2",
            layout="a:r",
        )
    value = {
        "any": einops.reduce(x > 0, "a (b 2) -> b", "any"),
        "all": einops.reduce(x > 0, "a (b 2) -> a", "all"),
        "prod": einops.reduce(x, "a (b 2) -> b", "prod").astype(np.int32),
    }
    assert_close(run(program, {"x": x})[0], value, 0, "flags")


def test_patches_of_split_images_stay_where_they_are() -> None:
    """Both spatial dims split: what is split inside stays; merging them gathers the minor one alone."""
    with mtf.Graph():
        x = mtf.input("x", IMAGES)
        apart = mtf.rearrange(x, "batch (height p) (width q) c -> batch height width (p q c)", p=2, q=3)
        merged = mtf.rearrange(x, "batch (h p) (w q) c -> batch (h w) (p q c)", p=2, q=3, names={"h w": "height"})
    assert apart.shape == mtf.Shape("batch:4;height:4;width:2;p_q_c:18")
    layout = {"mesh": "r:2;s:2", "layout": "height:r;width:s"}
    assert not mtf.lower([apart], **layout).collectives
    assert [c.axes for c in mtf.lower([merged], **layout).collectives] == [("s",)]


@pytest.mark.parametrize(
    ("pattern", "sizes", "names"),
    [
        ("batch (h p) width c -> batch (h p) c width", {"p": 2}, ["batch", "height", "c", "width"]),
        ("batch height width c -> (batch height) 1 (c width)", {}, ["batch_height", "_anonymous_1", "c_width"]),
        ("... c -> c ...", {}, ["c", "batch", "height", "width"]),
        ("batch ... -> (...) batch", {}, ["height_width_c", "batch"]),
    ],
)
def test_names_of_dims(pattern: str, sizes: dict[str, int], names: list[str]) -> None:
    with mtf.Graph():
        y = mtf.rearrange(mtf.input("x", IMAGES), pattern, name="done", **sizes)
    assert list(y.shape.names) == names
    assert y.name == "done"


def test_other_names() -> None:
    with mtf.Graph():
        x = mtf.input("x", IMAGES)
        called = {"b": "batch", "(h w)": "length", "c": "c"}
        y = mtf.rearrange(x, "b height width c -> (height width) b c".replace("height", "h").replace("width", "w"),
                          names={**called, "h": "height", "w": "width"})  # fmt: skip
        same = mtf.rearrange(x, "batch height width c -> batch height width c")
        numbered = mtf.repeat(x, "... c -> ... (2 c)")
    assert y.shape == mtf.Shape("length:48;batch:4;c:3")
    assert same is x
    assert numbered.shape.names[-1] == "_2_c"


# fmt: off
MESSAGES: list[tuple[Callable[[mtf.Tensor], object], str]] = [
    (lambda x: mtf.rearrange(x, "batch height width c"), "one '->', this one 0"),
    (lambda x: mtf.rearrange(x, 3), "must be a text"),
    (lambda x: mtf.rearrange(x, "batch (height width c -> c"), "mbalanced parentheses"),
    (lambda x: mtf.rearrange(x, "batch height width c c -> c"), "duplicate dimension"),
    (lambda x: mtf.rearrange(x, "batch height width c -> batch c"), "'height', 'width' on the left side only"),
    (lambda x: mtf.rearrange(x, "batch height -> height batch"), "has 2 dims, but x has 4"),
    (lambda x: mtf.rearrange(x, "... -> ... q"), "'q' on the right side only; mtf.repeat"),
    (lambda x: mtf.rearrange(x, "bacth ... -> ... bacth"), r"dim 0 of x is 'batch', but 'bacth' in the pattern; write"),
    (lambda x: mtf.rearrange(x, "height ... -> ... height"), "which is elsewhere"),
    (lambda x: mtf.rearrange(x, "(b p) ... -> b p ..."), r"give sizes of all its axes but one, as in p="),
    (lambda x: mtf.rearrange(x, "batch (h p) ... -> batch h p ...", p=3), r"with p=3: 8 % 3 = 2"),
    (lambda x: mtf.rearrange(x, "batch (h p) ... -> batch h p ...", p=3, h=3), r"of 9 elements, with h=3, p=3"),
    (lambda x: mtf.rearrange(x, "batch ... -> ... batch", bacth=2), "'bacth' is given, .* did you mean 'batch'"),
    (lambda x: mtf.rearrange(x, "batch ... -> ... batch", batch=2.5), "size of axis 'batch' must be an integer"),
    (lambda x: mtf.rearrange(x, "batch ... -> ... batch", batch=0), "at least 1, got 0"),
    (lambda x: mtf.rearrange(x, "batch ... -> ... batch", batch=3), r"dim batch:4 is \(batch\) of 3 elements"),
    (lambda x: mtf.rearrange(x, "batch ... c -> c ... batch", names={"batch": "rows"}), "but 'rows' in the pattern"),
    (lambda x: mtf.rearrange(x, "batch ... -> ... batch", names={"rows": "batch"}), "'rows', which is not a dim"),
    (lambda x: mtf.rearrange(x, "batch ... -> ... batch", names="ab"), "names must be a dict"),
    (lambda x: mtf.rearrange(x, "(a b) ... -> a b ...", a=2, names={"a": "height"}), "height"),
    (lambda x: mtf.rearrange(x, "b, ... -> ... b"), "Unknown character ','"),
    (lambda x: mtf.repeat(x, "batch ... -> ..."), "'batch' on the left side only"),
    (lambda x: mtf.repeat(x, "... -> ... q r", r=2), "axis 'q' is new: give its size, as in q=2"),
    (lambda x: mtf.reduce(x, "batch ... -> ...", "median"), "reduction must be 'sum' or"),
    (lambda x: mtf.reduce(x, "batch ... -> ...", "any"), "needs bool"),
    (lambda x: mtf.rearrange("x", "a -> a"), "expected a tensor"),
]
# fmt: on


@pytest.mark.parametrize(("build", "words"), MESSAGES)
def test_messages(build: Callable[[mtf.Tensor], object], words: str) -> None:
    with mtf.Graph():
        x = mtf.input("x", IMAGES)
        with pytest.raises(mtf.MeshlibError, match=words) as raised:
            build(x)
    assert "test_rearrange.py:" in str(raised.value)
