"""Chapter 5, and the plans of chapter 6: from which batch, or up to how many ways, collectives hide behind products."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property

import meshlib as mtf
from hardware import Slice
from hardware.core import critical_intensity
from tests.estimation.worked.common import Answers, D, estimate, hides, ideal, ring, smallest, straight, whole_bytes


def mlp(tokens: int, d: int, f: int, mesh: str, layout: str, train: bool = False) -> mtf.Program:
    """x W_in W_out in bfloat16, forward, or a step that trains both with all gradients."""
    b, wide, narrow = D("B", tokens), D("F", f), D("D", d)
    with mtf.Graph():
        make = mtf.variable if train else mtf.input
        x = make("x", [b, narrow], dtype="bfloat16")
        w_in = mtf.variable("in", [narrow, wide], dtype="bfloat16")
        w_out = mtf.variable("out", [wide, narrow], dtype="bfloat16")
        y = mtf.einsum([mtf.einsum([x, w_in], [b, wide]), w_out], [b, narrow])
        if not train:
            return mtf.lower({"y": y}, mesh=mesh, layout=layout)
        grads = mtf.gradients([mtf.reduce_sum(mtf.sin(y))], [w_in, w_out, x])
        return mtf.lower({str(n): g for n, g in enumerate(grads)}, mesh=mesh, layout=layout)


MIXED = "B:X;F:Y;activations/D:Y;variables/D:X"  # fully sharded over X, tensor-parallel over Y


def backward_hides(est: mtf.Estimate, network: str) -> bool:
    """Whether the busiest place of the network is done before the products of the backward pass."""
    products = sum(r.mxu_seconds for r in est.rows if r.phase == "backward")
    return max(s for name, s in est.engine_seconds.items() if name.startswith(network)) <= products


def data_parallel(axes: str) -> int:
    """Tokens per chip from which the gradients' reduction over torus axes of a whole pod hides."""
    pod = Slice("v5p-16x20x28", ideal("v5p"))
    chips = math.prod({"X": 16, "Y": 20, "Z": 28}[a] for a in axes.split("+"))

    def reached(tokens: int) -> bool:
        program = mlp(tokens * chips, 8192, 32768, "X:16;Y:20;Z:28", f"B:{axes}", train=True)
        return backward_hides(estimate(program, pod, placement=straight(pod, program.mesh)), "ici")

    return smallest(reached)


def pods() -> int:
    """Tokens per slice, of any size, from which gradients cross the data-centre network in time. Here of 4 chips."""

    def reached(tokens: int) -> bool:
        program = mlp(64 * tokens, 8192, 32768, "pods:64;chips:4", "B:pods;F:chips", train=True)
        return backward_hides(estimate(program, Slice("64*v5p-8", ideal("v5p"))), "dcn")

    return smallest(reached, 2**20)


def tensor_parallel(ways: int, f: int, tokens: int = 8192, kind: str = "v5p") -> mtf.Estimate:
    """A layer that is split over its hidden dim on one ring; sizes are rounded down to whole shares."""
    program = mlp(tokens, 8192 // ways * ways, f // ways * ways, f"Y:{ways}", "F:Y;activations/D:Y")
    return estimate(program, ring(kind, ways))


def most_ways(f: int) -> int:
    return smallest(lambda ways: not hides(tensor_parallel(ways, f)), 64) - 1


def verdict(ways: int) -> str:
    est = tensor_parallel(ways, 28672)
    return "compute-bound" if est.comm_seconds < est.compute_seconds else "comms-bound"


def most_ways_decoding() -> int:
    """Most ways before activations of a batch of 32 cross a link of v5e for longer than weights are read."""

    def crossed(ways: int) -> bool:
        engines = tensor_parallel(ways, 16384, 32, "v5e").engine_seconds
        return engines["ici axis 0"] > engines["hbm"]

    return smallest(crossed, 128) - 1


@cache
def on_64_by_4(tokens: int, d: int, f: int) -> mtf.Estimate:
    """The forward pass, whose bytes splits of other sizes are made of."""
    return estimate(mlp(tokens, d, f, "X:64;Y:4", MIXED), Slice("v5p-512", ideal("v5p")))


@dataclass(frozen=True)
class Split:
    """A layer's forward pass on N chips, X ways fully sharded and Y tensor-parallel, with the book's network.

    Bytes come from the program lowered for 64 x 4 chips: those over X depend on Y alone (and the other way round), as
    1 / Y. X has the bandwidth of `x_axes` torus axes, Y of one. All in seconds on v5p at nominal rates.
    """

    tokens: int
    d: int
    f: int
    chips: int
    x_axes: int = 2

    @cached_property
    def _parts(self) -> tuple[float, float, float]:
        """(seconds x ways of Y) of gathering weights, (seconds x ways of X) of activations, seconds of products."""
        chip = ideal("v5p")
        est = on_64_by_4(self.tokens, self.d, self.f)
        byte = critical_intensity(chip, "ici") / est.slice.peak_flops_per_device
        weights, activations = whole_bytes(est, "X") * 4, whole_bytes(est, "Y") * 64
        products = est.flops * est.slice.devices / self.chips / est.slice.peak_flops_per_device
        return weights * byte / self.x_axes, activations * byte, products

    @property
    def best(self) -> float:
        """X of the least time on the network."""
        weights, activations, _ = self._parts
        return math.sqrt(activations / weights * self.chips)

    def network(self, x: float, together: Callable[..., float] = operator.add) -> float:
        """Time on the network, the two kinds one after the other or, with max, at once."""
        weights, activations, _ = self._parts
        return together(weights * x / self.chips, activations / x if x < self.chips else 0.0)

    def hidden(self, together: Callable[..., float] = operator.add) -> bool:
        """Whether the best split hides behind the products."""
        return self.network(self.best, together) <= self._parts[2]

    def pair(self) -> str:
        """The best powers of two."""
        ways = [2**n for n in range(self.chips.bit_length()) if 2**n <= self.chips]
        x = min(ways, key=self.network)
        return f"{x} x {2 ** (self.chips.bit_length() - 1) // x}"


def floor(together: Callable[..., float] = operator.add) -> float:
    """Tokens per chip of a pod from which LLaMA's layers hide the network."""
    chips = 8960
    return smallest(lambda tokens: Split(tokens, 8192, 28672, chips).hidden(together), 2**24, 64 * 16) / chips


def mixed_threshold() -> int:
    """Batch from which the best split of 4096 chips, placed and timed by the estimate, is compute-bound."""
    cube = Slice("v5p-16x16x16", ideal("v5p"))

    def reached(tokens: int) -> bool:
        for y in (4, 8, 16):
            est = estimate(mlp(tokens, 8192, 32768, f"X:{4096 // y};Y:{y}", MIXED), cube, compiler=mtf.NO_OVERLAP)
            if est.comm_seconds <= est.compute_seconds:
                return True
        return False

    return smallest(reached, 2**22, 8192)


def fully_sharded_wins() -> int:
    """Batch from which 4096 ways over three axes send for less time than 512 x 8 over two and one."""
    return smallest(
        lambda tokens: Split(tokens, 8192, 32768, 4096, 3).network(4096)
        <= Split(tokens, 8192, 32768, 4096, 2).network(512), 2**24, 4096,
    )  # fmt: skip


PLAN = Split(4194304, 8192, 28672, 8960)

ANSWERS: Answers = {
    ("trn-01", "1 axis"): (lambda: data_parallel("Z"), [2397, 2703]),
    ("trn-01", "3 axes"): (lambda: data_parallel("X+Y+Z"), [799, 901]),
    ("trn-01", "pod"): (lambda: 8960 * data_parallel("X+Y+Z"), [7159040, 8072960]),
    ("trn-04", "LLaMA 3-70B limit"): (lambda: most_ways(28672), [10.5692863, 11.9185569]),
    ("trn-04", "Gemma-7B limit"): (lambda: most_ways(49152), [18.1187765, 20.4318118]),
    ("trn-04", "8-way"): (lambda: verdict(8), ["compute-bound"]),
    ("trn-04", "16-way"): (lambda: verdict(16), ["comms-bound"]),
    ("trn-04", "F needed for 8-way"): (
        lambda: smallest(lambda f: hides(tensor_parallel(8, f)), 65536, 8), [19176, 21624]
    ),
    ("trn-06", "X_opt"): (lambda: Split(48000, 8192, 32768, 64).best, [13.0084107, 14.3777171]),
    ("trn-06", "pair"): (lambda: Split(48000, 8192, 32768, 64).pair(), ["16 x 4"]),
    ("trn-09", "mixed compute-bound above"): (mixed_threshold, [1450000, 1800000]),
    ("trn-09", "FSDP beats 512x8 above"): (fully_sharded_wins, [4200000, 6300000]),
    ("trn-11", "tokens per pod"): (pods, [69033.6, 77846.4]),
    ("trn-17", "floor serial"): (floor, [439.971052, 467.185756]),
    ("trn-17", "floor overlapped"): (lambda: floor(max), [107.724871, 119.064331]),
    ("trn-17", "verdict"): (lambda: "compute-bound" if PLAN.hidden() else "comms-bound", ["compute-bound"]),
    ("trn-17", "X_opt"): (lambda: PLAN.best, [1570.51358, 1667.65875]),
    ("trn-17", "plan"): (lambda: PLAN.pair(), ["2048 x 4"]),
    ("ish-01", "ways"): (most_ways_decoding, [52, 68]),
}  # fmt: skip
