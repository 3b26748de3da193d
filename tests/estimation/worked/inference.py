"""Chapters 7 and 8: a step of decoding. Weights and the cache of keys and values are read once; ICI is left out."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import meshlib as mtf
from hardware import CHIPS, Slice, legal_slices
from tests.estimation.worked.common import BYTE, Answers, D, estimate, ideal, smallest

BOOK_HBM = {"hbm_bytes": 16 * 10**9, "hbm_reserved_bytes": 0}  # the book counts 16 GB and all of it


@dataclass(frozen=True)
class Decoder:
    """A decoder of gated feed-forward parts that adds a token to each of `batch` sequences of `context` tokens.

    Heads of keys and values lie on axis `heads` of the mesh, weights on both axes. The cache lies on axis `rest` by
    sequences where attention is `fused`, else by positions. New keys and values are results, to be put in the cache by
    who keeps it.
    """

    layers: int
    width: int
    hidden: int
    heads: int
    group: int
    head: int
    vocab: int
    dtype: str = BYTE
    cache_dtype: str = BYTE
    fused: bool = False

    def step(self, batch: int, context: int, mesh: str) -> mtf.Program:
        """The program of one step."""
        b, s, loop, one = D("B", batch), D("S", context), D("layers", self.layers), D("length", 1)
        sequence = D("sequence", batch)
        d, f, v = D("D", self.width), D("F", self.hidden), D("V", self.vocab)
        k, g, h = D("K", self.heads), D("G", self.group), D("H", self.head)

        def stored(name: str, dtype: str, *dims: mtf.Dimension) -> mtf.Tensor:
            return mtf.variable(name, dims, 0, dtype, trainable=False)

        def wide(x: mtf.Tensor) -> mtf.Tensor:
            return mtf.cast(x, "bfloat16")

        with mtf.Graph():
            shapes = [(k, g, d, h), (k, d, h), (k, d, h), (k, g, h, d), (d, f), (d, f), (f, d)]
            weights = [stored(f"w{n}", self.dtype, loop, *dims) for n, dims in enumerate(shapes)]
            caches = [stored(name, self.cache_dtype, loop, sequence, k, s, h) for name in ("keys", "values")]

            def layer(carries: tuple[mtf.Tensor, ...], slices: tuple[mtf.Tensor, ...]) -> tuple[list, list]:
                (x,) = carries
                wq, wk, wv, wo, up, gate, down, keys, values = (wide(w) for w in slices)
                q = mtf.einsum([x, wq], [b, k, g, h])
                new = [mtf.einsum([x, w], [b, k, h]) for w in (wk, wv)]
                q = mtf.rename_dimension(q, "B", "sequence")
                if self.fused:
                    q = mtf.reshape(q, [sequence, k, g, one, h])
                    seen = mtf.reshape(mtf.attention(q, keys, values, one, s, h), [sequence, k, g, h])
                else:
                    scores = mtf.softmax(mtf.einsum([q, keys], [sequence, k, g, s]), s)
                    seen = mtf.einsum([scores, values], [sequence, k, g, h])
                x = x + mtf.einsum([mtf.rename_dimension(seen, "sequence", "B"), wo], [b, d])
                inner = mtf.silu(mtf.einsum([x, gate], [b, f])) * mtf.einsum([x, up], [b, f])
                return [x + mtf.einsum([inner, down], [b, d])], new

            x = mtf.input("x", [b, d], "bfloat16")
            (x,), new = mtf.scan(layer, [x], [*weights, *caches], loop)
            logits = mtf.einsum([x, wide(stored("unembedding", self.dtype, d, v))], [b, v])
            outputs = {"token": mtf.argmax(logits, v), "keys": new[0], "values": new[1]}
            cut = "sequence:rest" if self.fused else "S:rest"
            return mtf.lower(outputs, mesh=mesh, layout=f"K:heads;F:heads+rest;V:heads+rest;variables/D:rest?;{cut}")

    @cache  # noqa: B019 (few, and for one run)
    def on(self, batch: int, context: int, slice_: str) -> mtf.Estimate:
        """The step on a slice of ideal chips."""
        found = Slice(slice_, ideal("v5e", **WITHOUT_ICI, **BOOK_HBM))
        heads = min(found.devices, self.heads)
        return estimate(self.step(batch, context, f"heads:{heads};rest:{found.devices // heads}"), found)

    def most(self, context: int, slice_: str, step: int = 1, below: int = 256) -> int:
        """The largest multiple of `step` that fits as a batch, which `below` does not."""
        return smallest(lambda batch: not self.on(batch, context, slice_).fits, below, step) - step


# The problems leave out what is sent.
WITHOUT_ICI = {"ici_bytes_per_second": 1e18, "ici_hop_seconds": 0.0, "collective_launch_seconds": 0.0}


def stored_bytes(est: mtf.Estimate, cache_only: bool) -> int:
    """Bytes of weights, or of the cache, on all devices."""
    found = (v.local_bytes for n, v in est.program.variables.items() if (n in ("keys", "values")) == cache_only)
    return sum(found) * est.slice.devices


def seconds(est: mtf.Estimate) -> float:
    """A step: weights are fetched while others are used, so it takes as long as its bytes."""
    return est.step_seconds


def rate(model: Decoder, slice_: str) -> float:
    """Requests of 512 tokens a second and chip with the largest batch: a step reads what lies in memory once."""
    batch = model.most(8192, slice_)
    est = model.on(batch, 8192, slice_)
    read = est.program.memory.by_kind["variables"] / est.slice.hbm_bytes_per_second_per_device
    return batch / (read * 512 * est.slice.chips)


def full() -> float:
    """Seconds of a step with the largest batch of LLaMA 3-70B in bfloat16 on 4 x 8."""
    model = replace(IN_BFLOAT16, fused=True)
    return seconds(model.on(model.most(16384, "v5e-32", 4, 128), 16384, "v5e-32"))


BATCH_4 = Decoder(48, 7168, 23552, 4, 14, 128, 32000, cache_dtype="bfloat16", fused=True)  # 98,304 bytes a token
# Of 13e9 parameters, with fewer heads and a wider hidden dim.
LLAMA_2_13B = Decoder(40, 5120, 16384, 8, 5, 128, 32000, "bfloat16", "bfloat16", fused=True)
LLAMA_3_70B = Decoder(80, 8192, 28672, 8, 8, 128, 128256)
IN_BFLOAT16 = replace(LLAMA_3_70B, dtype="bfloat16", cache_dtype="bfloat16")
QUESTION_2 = Decoder(64, 4096, 16384, 8, 4, 256, 32000)


def smallest_slice() -> str:
    name = next(n for n in legal_slices("v5e") if LLAMA_3_70B.on(32, 8192, n).fits)
    return "x".join(map(str, sorted(Slice(name).torus_shape, reverse=True)))


def serving() -> mtf.Estimate:
    return LLAMA_3_70B.on(32, 8192, "v5e-8")


def left() -> int:
    est = IN_BFLOAT16.on(32, 8192, "v5e-32")
    return est.slice.hbm_bytes - stored_bytes(est, cache_only=False)


ANSWERS: Answers = {
    ("imm-04", "KV"): (lambda: stored_bytes(serving(), cache_only=True), [41231686000.0, 44667659900.0]),
    ("imm-04", "total"): (lambda: 8 * serving().program.memory.by_kind["variables"], [109561183000.0, 116338163000.0]),
    ("imm-04", "chips (before rounding)"): (
        lambda: 8 * serving().program.memory.by_kind["variables"] / CHIPS["v5e"].hbm_bytes, [6.4946062, 7.62410292]
    ),
    ("imm-04", "slice"): (smallest_slice, ["4x2"]),
    ("imm-06", "batch K=8"): (lambda: QUESTION_2.most(131072, "v5e-16", below=16), [6, 7]),
    ("imm-06", "batch K=1"): (
        lambda: replace(QUESTION_2, heads=1, group=32).most(131072, "v5e-16", below=128), [54, 60]
    ),
    ("lat-01", "step"): (lambda: seconds(BATCH_4.on(4, 8192, "v5e-16")), [0.0024, 0.003]),
    ("lat-04", "step B=8"): (lambda: seconds(LLAMA_2_13B.on(8, 8192, "v5e-8")), [0.00542963415, 0.00615731707]),
    ("lat-04", "tokens/s B=8"): (lambda: 8 / seconds(LLAMA_2_13B.on(8, 8192, "v5e-8")), [1286.27451, 1472.06972]),
    ("lat-04", "step B=64"): (lambda: seconds(LLAMA_2_13B.on(64, 8192, "v5e-8")), [0.0165254878, 0.0187402439]),
    ("lat-04", "tokens/s B=64"): (lambda: 64 / seconds(LLAMA_2_13B.on(64, 8192, "v5e-8")), [3380.9592, 3869.31997]),
    ("lat-04", "batch 64 fits"): (
        lambda: "yes" if LLAMA_2_13B.on(64, 8192, "v5e-8").fits else "no", ["yes"]
    ),
    ("lat-07", "step"): (full, [0.0183414634, 0.0206829268]),
    ("lat-07", "512 tokens"): (lambda: 512 * full(), [9, 10.8]),
    ("lat-09", "HBM left bf16 4x8"): (left, [360000000000, 420000000000]),
    ("lat-09", "batch bf16 4x8"): (lambda: IN_BFLOAT16.most(8192, "v5e-32"), [135, 158]),
    ("lat-09", "bf16 QPS/chip"): (lambda: rate(IN_BFLOAT16, "v5e-32"), [0.42, 0.52]),
    ("lat-09", "int8 QPS/chip"): (lambda: rate(LLAMA_3_70B, "v5e-16"), [0.85, 1.04]),
}  # fmt: skip
