"""Chapter 4, and the counts of chapter 6: parameters, FLOPs and memory of Transformers, as scanned programs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import meshlib as mtf
from hardware import Chip, Slice
from tests.estimation.worked.common import BYTE, Answers, D, estimate, ideal


def weight(name: str, *dims: mtf.Dimension) -> mtf.Tensor:
    return mtf.variable(name, dims, dtype="bfloat16")


def weight_count(program: mtf.Program, prefix: str = "") -> int:
    """Elements of the variables whose names begin so, optimizer slots apart."""
    tensors = [v.tensor for n, v in program.variables.items() if n.startswith(prefix)]
    return sum(t.shape.size for t in tensors if not t.operation.attrs["slot_of"])


@dataclass(frozen=True)
class Model:
    """A decoder with gated feed-forward parts, without norms (the book's counts leave them out) and positions."""

    layers: int
    width: int
    hidden: int
    heads: int  # of keys and values
    group: int  # queries for each
    head: int
    vocab: int

    def step(self, tokens: int = 128) -> mtf.Program:
        """A training step of one sequence; every trip of the backward loop computes its layer again."""
        t, d, f, v = D("T", tokens), D("D", self.width), D("F", self.hidden), D("V", self.vocab)
        k, g, h, m = D("K", self.heads), D("G", self.group), D("H", self.head), D("M", tokens)
        loop = D("layers", self.layers)
        with mtf.Graph():
            embedding, unembedding = weight("vocab/in", v, d), weight("vocab/out", d, v)
            shapes = {
                "attention/q": (d, k, g, h), "attention/k": (d, k, h), "attention/v": (d, k, h),
                "attention/o": (k, g, h, d), "ffw/up": (d, f), "ffw/gate": (d, f), "ffw/down": (f, d),
            }  # fmt: skip
            weights = [weight(name, loop, *dims) for name, dims in shapes.items()]

            def layer(carries: tuple[mtf.Tensor, ...], slices: tuple[mtf.Tensor, ...]) -> tuple[list[mtf.Tensor], list]:
                (x,) = carries
                wq, wk, wv, wo, up, gate, down = slices
                q = mtf.einsum([x, wq], [t, k, g, h])
                keys, values = (mtf.rename_dimension(mtf.einsum([x, w], [t, k, h]), "T", "M") for w in (wk, wv))
                scores = mtf.softmax(mtf.einsum([q, keys], [k, g, t, m]), m)
                x = x + mtf.einsum([mtf.einsum([scores, values], [t, k, g, h]), wo], [t, d])
                inner = mtf.silu(mtf.einsum([x, gate], [t, f])) * mtf.einsum([x, up], [t, f])
                return [x + mtf.einsum([inner, down], [t, d])], []

            x = mtf.gather(embedding, mtf.input("tokens", [t], "int32"), v)
            (x,), _ = mtf.scan(layer, [x], weights, loop)
            logits = mtf.einsum([x, unembedding], [t, v])
            loss = mtf.reduce_mean(mtf.reduce_logsumexp(logits, v))
            return mtf.lower({"loss": loss}, mtf.optimize.SgdOptimizer(1.0).minimize(loss), mesh="chips:1")


@cache
def llama() -> mtf.Estimate:
    """LLaMA 3-70B. Few tokens, so that attention beyond its projections hardly counts, as in 6 flops a parameter."""
    return estimate(Model(80, 8192, 28672, 8, 8, 128, 128256).step(), Slice("v5p-1", one("v5p")))


@cache
def llama_like() -> mtf.Program:
    return Model(64, 4096, 16384, 32, 1, 128, 32000).step()


def one(kind: str, **figures: object) -> Chip:
    """A single ideal chip as a slice of its own."""
    return ideal(kind, pod_shape=(1,), max_slice_chips=1, wrap_cube=None, name_counts="chips", **figures)


def share_of_attention() -> float:
    attention, rest = (weight_count(llama_like(), p) for p in ("attention", "ffw"))
    return attention / (attention + rest)


def flops_per_token() -> float:
    return llama().useful_flops / 128


def seconds_per_token() -> float:
    return flops_per_token() / llama().slice.peak_flops_per_device


def cache_bytes(layers: int, context: int, width: int) -> int:
    """A cache of keys and values in one byte an element, for one sequence."""
    dims = [D("both", 2), D("layers", layers), D("S", context), D("KH", width)]
    with mtf.Graph():
        cache = mtf.variable("cache", dims, 0, BYTE, trainable=False)
        y = mtf.reduce_max(mtf.cast(cache, "bfloat16"))
        return mtf.lower({"y": y}, mesh="chips:1").memory.by_kind["variables"]


@cache
def deepseek() -> mtf.Estimate:
    """A stack of square products with the 37e9 parameters that each token uses, on the accelerator of the problem."""
    t, d, e, loop = D("T", 128), D("D", 11180), D("E", 11180), D("layers", 296)
    with mtf.Graph():

        def layer(carries: tuple[mtf.Tensor, ...], slices: tuple[mtf.Tensor, ...]) -> tuple[list[mtf.Tensor], list]:
            return [mtf.rename_dimension(mtf.sin(mtf.einsum([carries[0], slices[0]], [t, e])), "E", "D")], []

        (y,), _ = mtf.scan(layer, [weight("x", t, d)], [weight("w", loop, d, e)], loop)
        program = mtf.lower({}, mtf.optimize.SgdOptimizer(1.0).minimize(mtf.reduce_sum(y)), mesh="chips:1")
    return estimate(program, Slice("v5p-1", one("v5p", peak_bf16_flops=1.513e15)))


def deepseek_flops() -> float:
    return deepseek().useful_flops / 128 * 14.8e12


def trained(build: Callable[[mtf.Tensor], mtf.Tensor]) -> int:
    """FLOPs of a training step of what `build` makes of x[T, D], gradients of x included."""
    with mtf.Graph():
        x = weight("x", D("T", 8192), D("D", 8192))
        loss = mtf.reduce_sum(mtf.sin(build(x)))
        program = mtf.lower({"loss": loss}, mtf.optimize.SgdOptimizer(1.0).minimize(loss), mesh="chips:1")
    return estimate(program, "v5e-1").flops


def mlp(x: mtf.Tensor) -> mtf.Tensor:
    t, d = x.shape
    f = D("F", 32768)
    a, b = (mtf.einsum([x, weight(n, d, f)], [t, f]) for n in ("gate", "up"))
    return mtf.einsum([mtf.sin(a) * b, weight("down", f, d)], [t, d])


def projections(x: mtf.Tensor) -> mtf.Tensor:
    t, d = x.shape
    heads = [D("N", 64), D("H", 128)]
    q, k, v = (mtf.einsum([x, weight(n, d, *heads)], [t, *heads]) for n in "qkv")
    return mtf.einsum([mtf.sin(q) + mtf.sin(k) + v, weight("o", *heads, d)], [t, d])


def core(x: mtf.Tensor) -> mtf.Tensor:
    """Scores and values of 64 heads of 128; q, k and v are x by other names."""
    t, d = x.shape
    n, h, m = D("N", 64), D("H", 128), D("M", 8192)
    q = mtf.reshape(x, [t, n, h])
    k, v = (mtf.rename_dimension(mtf.sin(y), "T", "M") for y in (q, mtf.sin(q)))
    scores = mtf.einsum([q, k], [n, t, m])
    return mtf.reshape(mtf.einsum([mtf.sin(scores), v], [t, n, h]), [t, d])


def five_letters() -> float:
    sizes = dict(zip("ijklmno", (2, 3, 5, 7, 11, 13, 17), strict=True))
    with mtf.Graph():
        a, b = (mtf.input(n, [D(c, sizes[c]) for c in n]) for n in ("ijkl", "ijmno"))
        c = mtf.einsum([a, b], [D(c, sizes[c]) for c in "klmno"])
        return estimate(mtf.lower({"c": c}, mesh="chips:1"), "v5e-1").flops


def chain(kept: int, again: bool = False, layers: int = 64) -> mtf.Program:
    """A step of layers of `kept` square products on 4e6 tokens: each product's operand is kept for its gradient.

    `again`: only the input of a layer is kept, the others are computed again.
    """
    t, d, e, loop = D("T", 4_000_000), D("D", 8192), D("E", 8192), D("layers", layers)

    def layer(x: mtf.Tensor, weights: Sequence[mtf.Tensor]) -> mtf.Tensor:
        for w in weights:
            x = mtf.rename_dimension(mtf.einsum([x, w], [t, e]), "E", "D")
        return x

    with mtf.Graph():
        x = mtf.input("x", [t, d], "bfloat16")
        if again:
            w = [weight(f"w{n}", loop, d, e) for n in range(kept)]
            (x,), _ = mtf.scan(lambda carries, slices: ([layer(carries[0], slices)], []), [x], w, loop)
        else:
            x = layer(x, [weight(f"w{n}", d, e) for n in range(layers * kept)])
        loss = mtf.reduce_mean(mtf.square(x))
        return mtf.lower({"loss": loss}, mtf.optimize.SgdOptimizer(1.0).minimize(loss), mesh="chips:1")


def kept_bytes(program: mtf.Program) -> int:
    """What the forward pass leaves for the backward pass, its input among it."""
    kinds = program.memory.by_kind
    return kinds["activations"] + kinds["inputs"]


def repeated() -> float:
    """The last product of each layer is not needed again."""
    est = estimate(chain(20, again=True), Slice("v5p-1", one("v5p")))
    return est.flops / est.useful_flops


def adam(w: mtf.Tensor, gradient: mtf.Tensor) -> list[mtf.Operation]:
    """Adam on a bfloat16 weight that has no float32 copy, which the library's optimizers would keep."""
    m, v = (mtf.variable(f"{w.name}/{n}", w.shape, 0.0, "float32", trainable=False) for n in "mv")
    g = mtf.cast(gradient, "float32")
    new_m, new_v = m * 0.9 + g * 0.1, v * 0.999 + g * g * 0.001
    new_w = mtf.cast(w, "float32") - new_m / (mtf.sqrt(new_v) + 1e-8) * 1e-3
    return [mtf.assign(m, new_m), mtf.assign(v, new_v), mtf.assign(w, mtf.cast(new_w, w.dtype))]


def updated() -> mtf.Program:
    """Adam's step of all weights of LLaMA 2 13B, gradients being fed."""
    loop, d, f, v = D("layers", 40), D("D", 5120), D("F", 13824), D("V", 32000)
    shapes = {"attention": (D("projections", 4), loop, d, D("D_out", 5120)), "ffw": (D("three", 3), loop, d, f)}
    with mtf.Graph():
        updates = []
        for name, shape in (shapes | {"in": (v, d), "out": (d, v)}).items():
            updates += adam(weight(name, *shape), mtf.input(f"d_{name}", shape, "bfloat16"))
        return mtf.lower({}, updates, mesh="chips:1")


def kept_of_feed_forward() -> int:
    """The feed-forward parts of LLaMA 2 13B on 16e6 tokens; both F-wide results and the layer's output are kept."""
    t, d, f = D("T", 16_000_000), D("D", 5120), D("F", 13824)
    with mtf.Graph():
        x = mtf.input("x", [t, d], "bfloat16")
        for n in range(40):
            gate, up, down = weight(f"gate{n}", d, f), weight(f"up{n}", d, f), weight(f"down{n}", f, d)
            halves = [mtf.einsum([x, w], [t, f]) for w in (gate, up)]
            x = x + mtf.recompute_grad(lambda a, b, w: mtf.einsum([mtf.silu(a) * b, w], [t, d]), [*halves, down])
        loss = mtf.reduce_mean(mtf.square(x))
        program = mtf.lower({"loss": loss}, mtf.optimize.SgdOptimizer(1.0).minimize(loss), mesh="chips:1")
    return kept_bytes(program)


ANSWERS: Answers = {
    ("cnt-01", "parameters"): (lambda: weight_count(llama_like()), [15959681900.0, 17616698100.0]),
    ("cnt-01", "attention share"): (share_of_attention, [0.2425, 0.2575]),
    ("cnt-01", "KV bytes/token"): (lambda: cache_bytes(64, 1, 4096), [508559.36, 540016.64]),
    ("cnt-03", "FLOP"): (five_letters, [1019998.98, 1022041.02]),
    ("cnt-09", "MLP"): (lambda: trained(mlp), [39186594400000.0, 39978242800000.0]),
    ("cnt-09", "QKVO"): (lambda: trained(projections), [13062198100000.0, 13326080900000.0]),
    ("cnt-09", "attention core"): (lambda: trained(core), [6531099070000.0, 6663040460000.0]),
    ("cnt-11", "FFW"): (lambda: weight_count(llama().program, "ffw"), [55807731300.0, 56935160200.0]),
    ("cnt-11", "vocab"): (lambda: weight_count(llama().program, "vocab"), [2059319380.0, 2143373230.0]),
    ("cnt-11", "attention"): (lambda: weight_count(llama().program, "attention"), [11838003600.0, 12321187400.0]),
    ("cnt-11", "total"): (lambda: weight_count(llama().program), [69846863700.0, 71257911500.0]),
    ("cnt-11", "training FLOP/token"): (flops_per_token, [410614896000.0, 436013755000.0]),
    ("mem-01", "20 per layer"): (lambda: 8 * kept_bytes(chain(20, layers=8)), [78852915200000, 88919244800000]),
    ("mem-01", "1 per layer"): (lambda: kept_bytes(chain(20, again=True)), [3942645760000, 4445962240000]),
    ("mem-01", "7 per layer"): (lambda: 8 * kept_bytes(chain(7, layers=8)), [27598520320000, 31121735680000]),
    ("mem-01", "FLOP multiple, block remat"): (repeated, [1.29333333, 1.37333333]),
    ("mem-03", "weights+optimizer"): (lambda: updated().memory.by_kind["variables"], [124800000000, 135200000000]),
    ("mem-03", "activations"): (kept_of_feed_forward, [39845888000000, 44040192000000]),
    ("imm-01", "bytes"): (lambda: cache_bytes(64, 8192, 8192), [8504035250.0, 8675833940.0]),
    ("tim-07", "model FLOPs"): (deepseek_flops, [3.219888e+24, 3.351312e+24]),
    ("tim-07", "MFU"): (
        lambda: deepseek_flops() / (2.79e6 * 3600 * deepseek().slice.peak_flops_per_device), [0.211882522, 0.220530788]
    ),
    ("tim-03", "FLOP/token"): (flops_per_token, [407400000000, 432600000000]),
    ("tim-03", "time per token"): (seconds_per_token, [0.00088, 0.00102]),
    ("tim-03", "total"): (lambda: 15e12 * flops_per_token(), [6.111e+24, 6.489e+24]),
    ("tim-03", "years"): (lambda: 15e12 * seconds_per_token() / (365 * 86400), [421.886502, 447.982575]),
}  # fmt: skip
