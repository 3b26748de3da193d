"""Compiler behaviour as one record, shared by lowering, estimates, searches and the command line.

A layout says how tensors are sharded. The rest is decided by a compiler: whether it moves a weight or the activations,
what it overlaps, whether it unrolls a loop, on which links it places the mesh. `mtf.lower` and `mtf.estimate` take
these decisions from the same record, so that a plan is priced as it would be run.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from types import MappingProxyType

from hardware.chips import Chip
from meshlib.core.arguments import at, bounded, choice, flag, whole
from meshlib.core.errors import GraphError, nearest
from meshlib.core.shown import Brief

# Modes of hiding collectives behind computation; the rules are in `meshlib.estimation.time.scheduling`.
OVERLAPS = ("none", "independent", "collective matmul")
PARTITIONERS = ("explicit", "gspmd")
ROW_SUMS = ("scatter", "scatter 2025")
# Collectives that a SparseCore can run: those with a compiler flag of their own.
OFFLOADED = ("all_gather", "reduce_scatter", "all_reduce")
_FLAGS = ("stationary_weights", "unrolled_loops", "whole_torus_axes", "slice_jitter", "bias_lookups", "torus_sums")


@dataclass(frozen=True, kw_only=True, repr=False)
class Compiler(Brief):
    """Decisions of a compiler about a program whose layout is given.

    Change one with `dataclasses.replace`; its str lists the fields that differ from the published record of its name.

    Attributes:
      name: the name in tables; the records of `mtf.COMPILERS` are named after the compiler they describe.
      overlap: what hides collectives: "none"; "independent" work; "collective matmul", which also splits collectives
        next to a product into pieces (windowed einsum).
      windowed_einsum_bytes: least size of a gathered or reduced tensor, unsharded on one device, for which a windowed
        einsum is used.
      stationary_weights: a variable is never resharded over an axis that a required rule gives to one of its dims, if
        the rule also holds for activations: these move to the weight, as in Megatron. Optional rules and rules for
        variables alone only shard storage, as in fully sharded training; the weight is gathered where that sends less.
      unrolled_loops: loops are unrolled, so that collectives of one trip may overlap with the next.
      whole_torus_axes: each mesh axis takes whole axes of the torus where it can, as `create_device_mesh` of
        `jax.experimental.mesh_utils` places them; otherwise the best of all placements is taken.
      slice_jitter: slices joined by DCN wait for the slowest of them, `mtf.Physics.slice_jitter` of a step.
      step_overhead_seconds: fixed cost of a step on the device, besides the launches of kernels and collectives, which
        are facts of the chip.
      rounding_noise_bytes: bytes of random bits that an int8 product reads per element of a cotangent that it rounds;
        4 with AQT's stochastic rounding, 0 with rounding to nearest.
      ragged_tile_width: the grouped-product kernel (`mtf.ragged_dot`) pads larger weights to whole tiles of this many
        inputs and outputs; 0: no padding.
      bias_lookups: biases of grouped products are looked up row by row, and their gradients added row by row, as
        MaxText writes them: an instruction of the core for each 128 elements of a row. Otherwise both are grouped
        products with ones, as `mtf.layers.moe` writes them.
      row_sums: how rows are added up at positions, as in the gradient of a lookup: "scatter" sorts them and adds them
        on one core, "scatter 2025" as compilers did until 2025, which took three times as long.
      torus_sums: an all_gather or reduce_scatter over a whole torus of three axes that wrap runs as an all_reduce: each
        device sums blocks surrounded by zeros, or keeps one block of the sum. libtpu compiles them so (seen
        for v5p) unless a flag keeps them (xla_tpu_prefer_async_allgather_to_allreduce); not in windowed einsums.
      sparse_core_collectives: kinds of collectives offloaded to SparseCores on chips that have them, of "all_gather",
        "reduce_scatter" and "all_reduce": the TensorCore loses no time to these. Chips without SparseCores run them
        on the TensorCore.
      partitioner: "explicit" runs the program that `mtf.lower` returns, collectives included, as `mtf.on_jax` does
        through `shard_map`; "gspmd" is `jax.jit` with sharding annotations, which differs in memory.
    Raises: GraphError for a value that a field cannot have.
    Example:
      >>> from dataclasses import replace
      >>> import meshlib as mtf
      >>> print(mtf.XLA_TPU)
      xla-tpu
      >>> print(replace(mtf.XLA_TPU, unrolled_loops=True, rounding_noise_bytes=4))
      xla-tpu with unrolled_loops=True, rounding_noise_bytes=4

    Sources: Wang et al., "Overlap communication with dependent computation via decomposition", ASPLOS 2023; Shoeybi et
    al., arXiv:1909.08053 (Megatron-LM); Xu et al., "GSPMD", arXiv:2105.04663; openxla/xla:
    xla/service/spmd/spmd_partitioner.h, SpmdPartitionerOptions.threshold_for_windowed_einsum_mib (256); ragged tiles:
    jax.experimental.pallas.ops.tpu.megablox, gmm, and AI-Hypercomputer/maxtext: src/maxtext/configs/types.py,
    wi_tile_fwd_embed_dim (1,024); SparseCores: flags xla_tpu_enable_sparse_core_collective_offload_* in
    AI-Hypercomputer/maxtext benchmarks/xla_flags_library.py.
    """

    name: str
    overlap: str = "collective matmul"
    windowed_einsum_bytes: int = 256 * 2**20
    stationary_weights: bool = True
    unrolled_loops: bool = False
    whole_torus_axes: bool = True
    slice_jitter: bool = True
    step_overhead_seconds: float = 0.5e-6
    rounding_noise_bytes: int = 0
    ragged_tile_width: int = 1024
    bias_lookups: bool = False
    row_sums: str = "scatter"
    torus_sums: bool = False
    sparse_core_collectives: tuple[str, ...] = ()
    partitioner: str = "explicit"

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise GraphError(f"{at('Compiler')}: name must be text, got {self.name!r:.80}")
        choice(self.overlap, "Compiler", "overlap", OVERLAPS)
        choice(self.row_sums, "Compiler", "row_sums", ROW_SUMS)
        choice(self.partitioner, "Compiler", "partitioner", PARTITIONERS)
        kinds: object = self.sparse_core_collectives
        if not isinstance(kinds, tuple):
            raise GraphError(f"{at('Compiler')}: sparse_core_collectives must be a tuple of kinds, got {kinds!r:.80}")
        for kind in kinds:
            choice(kind, "Compiler", "sparse_core_collectives", OFFLOADED)
        for field in _FLAGS:
            flag(getattr(self, field), "Compiler", field)
        bounded(self.step_overhead_seconds, "Compiler", "step_overhead_seconds")
        for field in ("windowed_einsum_bytes", "rounding_noise_bytes", "ragged_tile_width"):
            whole(getattr(self, field), "Compiler", field, low=0)

    def cuts_in_pieces(self, size_bytes: float) -> bool:
        """True if a collective of `size_bytes` next to a product runs as a windowed einsum.

        >>> import meshlib as mtf
        >>> mtf.XLA_TPU.cuts_in_pieces(2**20), mtf.IDEAL.cuts_in_pieces(2**20), mtf.NO_OVERLAP.cuts_in_pieces(2**40)
        (False, True, False)
        """
        return self.overlap == "collective matmul" and size_bytes >= self.windowed_einsum_bytes

    def offloads(self, kind: str, chip: Chip) -> bool:
        """True if collectives of this kind run on the chip's SparseCores instead of its TensorCores.

        >>> import meshlib as mtf
        >>> from dataclasses import replace
        >>> from hardware import CHIPS
        >>> offloading = replace(mtf.XLA_TPU, sparse_core_collectives=("all_gather",))
        >>> [offloading.offloads("all_gather", CHIPS[name]) for name in ("v5e", "v5p", "v6e", "v7")]
        [False, True, True, True]
        """
        return kind in self.sparse_core_collectives and chip.sparse_cores_per_chip > 0

    @property
    def changes(self) -> dict[str, object]:
        """The fields that differ from the record of the same name in `COMPILERS`, or from the defaults."""
        like = COMPILERS.get(self.name, XLA_TPU)
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "name"}
        return {field: value for field, value in values.items() if value != getattr(like, field)}

    def __str__(self) -> str:
        changes = ", ".join(f"{field}={value}" for field, value in self.changes.items())
        return f"{self.name} with {changes}" if changes else self.name


# Copies and small products on v7 take 1.4-1.8 us more than their bytes: 1 us is the launch of each operation
# (`hardware.chip_figures`), the remaining half microsecond that of a program. Programs of one operation cannot separate
# the two: assumed.
XLA_TPU = Compiler(name="xla-tpu")
"""XLA for TPUs with its default options, given a program with its collectives: published runs are predicted with it."""
GSPMD = Compiler(name="gspmd", partitioner="gspmd")
"""`jax.jit` with sharding annotations, the collectives being the compiler's choice."""
IDEAL = Compiler(
    name="ideal",
    windowed_einsum_bytes=0,
    unrolled_loops=True,
    whole_torus_axes=False,
    slice_jitter=False,
    step_overhead_seconds=0.0,
)
"""As much overlap as dependencies allow, the best placement, no overhead: what a compiler could reach at most."""
NO_OVERLAP = Compiler(name="no-overlap", overlap="none")
"""Each collective waits for the core, and the core for it."""
COMPILERS = MappingProxyType({c.name: c for c in (XLA_TPU, GSPMD, IDEAL, NO_OVERLAP)})
"""The compilers that have a name, as `meshlib --compiler` takes them."""


def require_compiler(value: object, what: str) -> Compiler:
    """`value`, which must be a Compiler.

    Raises: GraphError that begins with `what`.
    """
    if isinstance(value, Compiler):
        return value
    hint = ""
    if isinstance(value, str):
        hint = f"; it is mtf.COMPILERS[{value!r}]" if value in COMPILERS else nearest(value, COMPILERS)
    raise GraphError(f"{at(what)}: compiler must be an mtf.Compiler, got {type(value).__name__} {value!r:.80}{hint}")
