"""Time of one fusion group on one device, from its work, the chip and `Physics`.

MXU, VPU and HBM work concurrently within a group:

    seconds = launch + max(max(mxu, vpu) + exposed, hbm)

`exposed` cannot be overlapped: the first pieces of a product and its last block over HBM, and of the shorter of MXU and
VPU work the share that does not run beside the other: the softmax of fused attention, element-wise work fused with a
product (`Physics.vector_overlap`).

A group that is the whole program also pays the launches, bytes and loops of its passes (`kernel_passes`).

A product that is the whole program uses the best VMEM blocks (`hardware.blocking`). Within a larger program it reaches
`product_rate` of that rate, except for as many rows as the array has: while those stream, the next weights shift in at
the array's own pace, which hides the other losses. Its blocks have `block_edge` rows and columns: [m, k] x [k, n] reads
m k n / edge elements of each operand, and the core adds up the float32 sums of each block (`hardware.blocking`).

A product in eight bits reads operands quantised by a pass of their own, which reads them and writes a byte per element.
The pass ends before the product starts; products of one operand with the same scales share it.

A softmax or norm keeps a block of rows in VMEM. Rows that do not fit are read again after every reduction.

A grouped product is a kernel of its own, whose tiles of columns the cores divide among them: five tiles take two cores
as long as six. It takes each register of results from the array (`hardware.blocking.result_seconds`).

Rows that are moved one by one keep the core busy, whatever their bytes (`row_moves`). Biases of experts that are looked
up (`Compiler.bias_lookups`) take a cycle for each 128 elements: compiled by libtpu 0.0.42.1 for v5e, v6e and v7, a row
of 1,024 to 4,096 bfloat16 numbers takes 0.8 to 1.1 cycles for each 128 of them where it is read, 1.1 to 1.5 where it is
added; of float32 numbers 0.4 and 1.4.

Fused attention contracts scores over the key dim (both passes) and cotangents over the value dim: dims narrower than
the array fill it in part. Products over the memory dim can be transposed so that these dims stream.

Sources: Hong and Kung, STOC 1981 (traffic of blocks); Dao et al., arXiv:2205.14135 (products of each pass).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from hardware.blocking import Blocks, block_sum_seconds, matmul_blocks, result_seconds
from hardware.chips import Chip
from hardware.core import Matmul, Time, Work, time_of, vpu_seconds
from hardware.memory import hbm_seconds, vmem_bytes
from meshlib.estimation.time.physics import Physics
from meshlib.estimation.work.kernel_passes import Passes, idle_seconds, summed_block_bytes
from meshlib.estimation.work.kernels import Kernel
from meshlib.estimation.work.products import Attention
from meshlib.estimation.work.relayouts import product_launch_seconds
from meshlib.estimation.work.vmem_reuse import finds_operand, found_bytes, kept_bytes

SCOPED_BYTES = 16 << 20  # the compiler's default: xla_tpu_scoped_vmem_limit_kib (from memory)
MOST = 1 << 14  # kernels whose times are kept per chip and constants


class KernelTime(NamedTuple):
    """Modelled time of one fusion group. `traffic_bytes` are padded and include re-reads of products.

    `early_seconds`: HBM seconds that can be prefetched; `first_seconds`: exposed seconds of the first pieces of that;
    `hidden_seconds`: seconds saved by prefetching, set by the schedule.
    """

    mxu_seconds: float
    vpu_seconds: float
    hbm_seconds: float
    exposed_seconds: float
    launch_seconds: float
    traffic_bytes: float
    early_seconds: float = 0.0
    first_seconds: float = 0.0
    hidden_seconds: float = 0.0

    @property
    def seconds(self) -> float:
        """Seconds from launch to end."""
        return self.launch_seconds + self.busy_seconds - self.hidden_seconds

    @property
    def busy_seconds(self) -> float:
        """Seconds without the launch."""
        return max(max(self.mxu_seconds, self.vpu_seconds) + self.exposed_seconds, self.hbm_seconds)

    @property
    def upper_seconds(self) -> float:
        """Seconds without any overlap inside the group."""
        return self.mxu_seconds + self.vpu_seconds + self.hbm_seconds + self.launch_seconds


@lru_cache(maxsize=32)
def _cache(chip: Chip, physics: Physics | None) -> dict[tuple[object, ...], KernelTime]:
    """Known times of kernels on a chip under these constants; None: of kernels that depend on none."""
    return {}


class Times:
    """Kernel times on one chip, cached by everything that they depend on, since layers and programs repeat.

    `alone`: whether the program is a single kernel.
    """

    def __init__(self, chip: Chip, physics: Physics, alone: bool = False) -> None:
        self.chip = chip
        own = {"lone_passes": physics.lone_passes, "vector_overlap": physics.vector_overlap}
        self.physics = replace(physics.without_losses(), **own) if alone else physics
        self._known = _cache(chip, None), _cache(chip, self.physics.of_kernels)

    @property
    def held_bytes(self) -> int:
        """Bytes that stay on the chip between kernels: its common memory (CMEM of v4), or half of VMEM.

        A running kernel has SCOPED_BYTES of each core's VMEM, which is all that v2 and v3 have.
        """
        chip, vmem = self.chip, vmem_bytes(self.chip)
        beside = vmem - SCOPED_BYTES * chip.cores_per_device
        return max(chip.cmem_bytes // chip.devices_per_chip, min(vmem // 2, beside))

    @property
    def ahead_seconds(self) -> float:
        """HBM time to fill half of VMEM."""
        return hbm_seconds(self.chip, vmem_bytes(self.chip) // 2)

    def of(self, kernel: Kernel) -> KernelTime:
        """Modelled time of a kernel."""
        known, key = self._known[kernel.has_constants], kernel.key
        kernel_time = known.get(key)
        if kernel_time is None:
            if len(known) >= MOST:
                known.clear()
            kernel_time = known[key] = self._time(kernel)
        return kernel_time

    def _time(self, kernel: Kernel) -> KernelTime:
        if kernel.free:
            return KernelTime(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
        if kernel.attention is not None:
            return self._attention(kernel, kernel.attention)
        chip, again, exposed, first = self.chip, 0.0, 0.0, 0.0
        here = not chip.cmem_bytes and finds_operand(kernel, self.held_bytes)
        for product, sizes in kernel.matmuls:
            cut = matmul_blocks(chip, product, *sizes)
            again += self._read(cut, product, sizes, kernel.at_hand if here else (True, True)) - kernel.operand_bytes
            exposed += cut.exposed_bytes
            pieces = zip(kernel.at_hand, (cut.rows, cut.columns), sizes, strict=True)
            first += cut.depth * sum(size * edge for here, edge, size in pieces if here)
        held_bytes = found_bytes(kernel, chip, self.held_bytes)
        elsewhere = kept_bytes(kernel, chip, self.held_bytes) + kernel.spared_bytes + held_bytes
        traffic = kernel.padded_bytes + again - elsewhere + kernel.quantised_bytes
        lone, share = kernel.passes, self.physics.lone_passes
        if lone is not None and share:
            blocks = lone.block_bytes + sum(summed_block_bytes(chip, product) for product, _ in kernel.matmuls)
            traffic += share * (lone.sweeps * kernel.read_bytes + blocks)
        # a row and its result exceed half of VMEM
        elif not kernel.matmuls and 2 * kernel.row_bytes > vmem_bytes(chip) // 2:
            traffic += kernel.sweeps * kernel.read_bytes
        # bfloat16 takes half the time on native lanes.
        ops = kernel.padded_vpu_ops - (kernel.narrow_vpu_ops / 2 if chip.vpu_bf16 else 0.0)
        ops += kernel.moves.cycles(chip) * chip.vpu_sublanes * chip.vpu_lanes * chip.vpu_alus_per_lane
        time: Time = time_of(chip, Work(tuple(p for p, _ in kernel.matmuls), vpu_ops=ops, hbm_bytes=traffic))
        bare_seconds = hbm_seconds(chip, min(exposed, traffic) + kernel.quantised_bytes) if time.mxu_seconds else 0.0
        mxu = time.mxu_seconds
        if mxu:
            products = [p for p, _ in kernel.matmuls]
            if kernel.column_tiles:
                mxu = self._tiled_seconds(products, mxu, kernel.column_tiles)
            mxu = self.in_step_seconds(products, mxu)
            bare_seconds += min(map(self._paced_share, products)) * self._unhidden(mxu, time.vpu_seconds)
        kernel_time = KernelTime(
            mxu, time.vpu_seconds, time.hbm_seconds, bare_seconds, time.launch_seconds, traffic,
            early_seconds=self._early(kernel, time.hbm_seconds, held_bytes),
            first_seconds=min(bare_seconds, hbm_seconds(chip, first)),
        )  # fmt: skip
        return self._alone(kernel, lone, kernel_time) if lone is not None and share else kernel_time

    def _alone(self, kernel: Kernel, passes: Passes, time: KernelTime) -> KernelTime:
        """Time of a program's only kernel: launches of its passes, and the parts that do not overlap."""
        if time.mxu_seconds:
            return self._product_alone(*kernel.matmuls[0], passes, time)
        share = self.physics.lone_passes
        launch = time.launch_seconds * passes.launches
        loop = share * passes.loop_seconds(self.chip, time.traffic_bytes)
        if loop == 0:
            return time._replace(launch_seconds=launch)
        vpu = max(time.vpu_seconds, loop)
        return time._replace(launch_seconds=launch, vpu_seconds=vpu, exposed_seconds=time.hbm_seconds)

    def _product_alone(
        self, product: Matmul, sizes: tuple[float, float], passes: Passes, time: KernelTime
    ) -> KernelTime:
        """Time of a product that is a program, with its relayouts."""
        chip, share, copies = self.chip, self.physics.lone_passes, passes.relayouts
        spared_bytes = share * sum(copy.copied_bytes for copy in copies if copy.is_held(chip))
        hbm = max(0.0, time.hbm_seconds - hbm_seconds(chip, spared_bytes))
        spread_bytes = share * passes.block_bytes if chip.vpu_bf16 else 0.0
        bare = idle_seconds(chip, product, sizes, time.mxu_seconds, max(0.0, hbm - hbm_seconds(chip, spread_bytes)))
        around = share * sum(copy.seconds(chip) for copy in copies)
        return time._replace(
            hbm_seconds=hbm + around,
            launch_seconds=product_launch_seconds(chip, copies),
            exposed_seconds=max(time.exposed_seconds, share * bare) + around,
        )

    def in_step_seconds(self, products: Sequence[Matmul], seconds: float) -> float:
        """Seconds of products among other kernels that take `seconds` alone."""
        physics, share = self.physics, max(map(self._paced_share, products))
        sums = sum(block_sum_seconds(self.chip, p, physics.block_edge) for p in products) if physics.block_edge else 0.0
        return seconds * (1 - share + share / physics.product_rate) + share * sums

    def _tiled_seconds(self, products: Sequence[Matmul], seconds: float, columns: int) -> float:
        """Seconds of grouped products that a kernel computes in tiles of columns, each by one core."""
        cores = self.chip.cores_per_device
        busiest = -(-columns // cores) * cores / columns
        return busiest * max(seconds, sum(result_seconds(self.chip, p) for p in products))

    def _paced_share(self, product: Matmul) -> float:
        """Share of a product's rows that stream after as many as the array has."""
        rows = self.chip.mxu_rows
        return 1 - rows / max(rows, min(product.m, product.n))

    def _unhidden(self, mxu_seconds: float, vpu_seconds: float) -> float:
        """Seconds of the shorter of MXU and VPU work in a kernel that the longer does not hide."""
        return (1 - self.physics.vector_overlap) * min(mxu_seconds, vpu_seconds)

    def _read(self, blocks: Blocks, product: Matmul, sizes: tuple[float, float], repeated: tuple[bool, bool]) -> float:
        """Bytes read by a product; an operand that is not `repeated` is read from HBM at most once."""
        edge = self.physics.block_edge
        if not edge:
            return blocks.read_bytes
        left = sizes[0] * product.m * product.k * (max(1.0, product.n / edge) if repeated[0] else 1.0)
        right = sizes[1] * product.taps * product.k * product.n * (max(1.0, product.m / edge) if repeated[1] else 1.0)
        return product.batch * (left + right)

    def _early(self, kernel: Kernel, most: float, held: float) -> float:
        """HBM seconds of a kernel that can be prefetched into half of VMEM."""
        wanted = max(0.0, kernel.at_hand_bytes - held)
        return min(most, hbm_seconds(self.chip, min(wanted, vmem_bytes(self.chip) // 2)))

    def attention_seconds(self, work: Attention) -> tuple[float, float, float]:
        """Modelled seconds of fused attention: (MXU, vector unit, exposed part of the vector unit)."""
        chip, physics = self.chip, self.physics
        peak = chip.peak_flops("bf16") / chip.devices_per_chip * chip.mxu_efficiency * physics.product_rate
        together = chip.attention_backward_kernels == 1
        contracted, turned = work.products(together)
        padded = sum(-(-size // chip.mxu_rows) * chip.mxu_rows for size in contracted)
        scores = work.scores_in(self._tile(work))
        mxu = work.passes * scores * 2 * (padded + sum(turned)) / peak
        half = physics.score_backward_ops / 2
        factor = 1.0 if not work.of.backward else half if not together else 0.0 if work.of.spared else 2 * half
        vpu = vpu_seconds(chip, scores * physics.score_vpu_ops * factor)
        return mxu, vpu, self._unhidden(mxu, vpu)

    def _attention(self, kernel: Kernel, work: Attention) -> KernelTime:
        chip = self.chip
        mxu, vpu, bare = self.attention_seconds(work)
        vmem_bytes = found_bytes(kernel, chip, self.held_bytes)
        traffic = kernel.padded_bytes - vmem_bytes - kept_bytes(kernel, chip, self.held_bytes)
        hbm = hbm_seconds(chip, traffic)
        return KernelTime(mxu, vpu, hbm, bare, chip.launch_seconds, traffic, self._early(kernel, hbm, vmem_bytes))

    def _tile(self, work: Attention) -> tuple[int, int]:
        """(queries, keys) of a tile of scores."""
        if work.of.backward:
            return self.chip.attention_backward_tile
        return self.chip.attention_tile if work.window is None else self.chip.attention_window_tile
