"""Published training runs as plain data: what a row of measurements says of model, mesh, layout, batch and software.

Nothing here depends on a row's name. What a row leaves open is decided by what runs of its kind do, and said in
`Run.assumed`: an unstated recomputation policy is the one that recomputes least and still fits; a data-parallel run
shards its optimizer (Xu et al., arXiv:2004.13336). Rows that leave the layout or the dimensions open say why they are
not expressed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from hardware.chips import Chip, get_chip
from hardware.errors import HardwareError
from hardware.slices import Slice
from meshlib.estimate.policies import NOTHING_TWICE, NotExpressed, Policy, lightest, policy_in, policy_of

Row = Mapping[str, Any]

_AXES = {
    "data": "data", "fsdp": "fsdp", "fsdp_transpose": "fsdp", "tensor": "tensor", "tensor_transpose": "tensor",
    "tensor_sequence": "tensor", "model": "tensor", "mdl": "tensor", "context": "context", "sequence": "context",
}  # fmt: skip
FLASH_SINCE = 2023  # jax.experimental.pallas.ops.tpu.flash_attention
STATE_BYTES = 12  # a parameter: itself and two slots in float32


@dataclass(frozen=True)
class Run:
    """A published training run.

    Attributes:
      name, family, chip, precision ("bf16", "int8", "fp8"): what tables group by.
      model: dims as the row gives them; length, batch: tokens of a sequence, sequences of a step.
      slice: where it ran; mesh: axis -> size, devices in all.
      policy: of recomputation; attention: "flash" or "materialised"; optimizer: name.
      steps, evaluation: training steps, and sequences run forward, in the measured time.
      measured_seconds: of all of that.
      apart: why the row is no measure of the model, or ""; assumed: what the row left open.
    """

    name: str
    family: str
    chip: str
    precision: str
    model: Mapping[str, Any]
    batch: int
    length: int
    slice: Slice
    mesh: tuple[tuple[str, int], ...]
    policy: Policy
    attention: str
    optimizer: str
    steps: int
    evaluation: int
    measured_seconds: float
    apart: str = ""
    assumed: tuple[str, ...] = ()

    def axis(self, name: str) -> int:
        """Size of a mesh axis, 1 if there is none."""
        return dict(self.mesh).get(name, 1)

    @property
    def eight_bit(self) -> bool:
        """Whether products run in 8 bits."""
        return self.precision != "bf16"

    @property
    def locals(self) -> int:
        """Layers with a window between two with global attention."""
        return int(str(self.model.get("pattern") or "0").split()[0]) if self.model.get("local_window") else 0

    @property
    def predictions(self) -> int | None:
        """Tokens of a sequence that an encoder predicts: 15 %, 76 of 512 (Devlin et al., arXiv:1810.04805)."""
        return int(0.15 * self.length) if self.encoder else None

    @property
    def encoder(self) -> bool:
        """Whether attention looks both ways."""
        return "encoder" in str(self.model.get("arch")) and "decoder" not in str(self.model.get("arch"))

    @property
    def model_flops(self) -> float:
        """Of the measured time, on all chips, as papers count: 6 a parameter and token, attention as it is masked."""
        m, tokens = self.model, self.batch * self.length
        width = m["q_heads"] * m["head_dim"]
        layers, window = m["layers"], m.get("local_window")
        spans = [self.length if self.encoder else self.length / 2]
        if window:
            spans = [min(self.length / 2, float(window))] * self.locals + spans
        attention = 12 * layers * width * sum(spans) / len(spans) * tokens
        whole = 6 * parameters(m) * tokens + attention
        return float(self.steps * whole + self.evaluation / self.batch * whole / 3)

    @property
    def utilisation(self) -> float:
        """Model FLOPs per second over the bf16 peak of the slice, as measured."""
        return self.model_flops / self.measured_seconds / self.slice.peak_flops("bf16")


def parameters(model: Mapping[str, Any]) -> float:
    """What tokens are multiplied by: attention, feed-forward, and the head. No norms, biases, or table looked up in.

    >>> gpt3 = dict(layers=96, d_model=12288, q_heads=96, head_dim=128, d_ff=49152, mlp_matrices=2, vocab=50304)
    >>> round(parameters(gpt3) / 1e9, 1)
    174.6
    """
    d, heads = model["d_model"], model["q_heads"]
    attention = 2 * d * model["head_dim"] * (heads + (model.get("kv_heads") or heads))
    layer = attention + (model.get("mlp_matrices") or 2) * d * model["d_ff"]
    return float(model["layers"] * layer + d * model["vocab"])


def run_of(row: Row) -> Run:
    """The training run that a row describes.

    Raises: NotExpressed, with the reason, for rows of other kinds and for what the row leaves open.
    """
    model = _model(row)
    chip = get_chip(str(row["chip"]))
    slice_, assumed = _slice(row, chip)
    batch, length = _batch(row, slice_)
    mesh, split = _mesh(row, slice_, model, batch)
    steps, evaluation, measured = _measured(row, batch, length, slice_, model)
    run = Run(
        name=str(row.get("id", "?")),
        family=_family(row, model),
        chip=chip.name,
        precision=_precision(str(row.get("precision", ""))),
        model=model,
        batch=batch,
        length=length,
        slice=slice_,
        mesh=mesh,
        policy=Policy(),
        attention=_attention(row, chip),
        optimizer=str(row.get("optimizer") or ""),
        steps=steps,
        evaluation=evaluation,
        measured_seconds=measured,
        apart=_apart(row, model),
        assumed=(*assumed, *split),
    )
    policy, why = _policy(row, run)
    return replace(run, policy=policy, assumed=(*run.assumed, *why))


def _model(row: Row) -> Mapping[str, Any]:
    found = row.get("model")
    model: dict[str, Any] = dict(found) if isinstance(found, Mapping) else {}
    arch = str(model.get("arch", ""))
    if "moe" in arch.lower() or model.get("experts"):
        raise NotExpressed("mixture-of-experts layers are not in the library yet")
    if "cnn" in arch.lower() or "image" in model or "patch" in model:
        raise NotExpressed("training of convolutional networks is not expressed as rows yet")
    if arch.startswith("encoder-decoder"):
        raise NotExpressed("it does not say how long the sequences on either side are")
    if "inference" in str(row.get("kind")) or "phase" in (row.get("batch") or {}):
        raise NotExpressed("decoding against a cache has no program of the library's own yet")
    if "heads" in model:
        model.setdefault("q_heads", model["heads"])
    missing = [k for k in ("layers", "d_model", "q_heads", "head_dim", "d_ff", "vocab") if not model.get(k)]
    if missing:
        raise NotExpressed(f"its model's {', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not stated")
    return model


def _slice(row: Row, chip: Chip) -> tuple[Slice, tuple[str, ...]]:
    count, chips = int(row.get("n_slices") or 1), int(row["n_chips"])
    where = row.get("slice")
    text = str((where.get("topology") if isinstance(where, Mapping) else where) or "")
    shape = re.search(r"\d+(?:x\d+)+", text)
    each, assumed = chips // count, tuple[str, ...]()
    if shape and math.prod(map(int, shape[0].split("x"))) == each:
        size = shape[0]
    else:
        size, assumed = _compact(each, len(chip.pod_shape), chip), ("shape of the slice",)
    name = f"{count}*{chip.name}-{size}" if count > 1 else f"{chip.name}-{size}"
    try:
        return Slice(name, chip), assumed
    except HardwareError:
        # A machine that is no slice on offer: the same chips in a torus of their own.
        sides = tuple(sorted(map(int, size.split("x"))))
        own = replace(chip, pod_shape=sides, max_slice_chips=math.prod(sides))
        if chip.wrap_cube and any(side % chip.wrap_cube for side in sides):
            own = replace(own, wrap_cube=None)
        return Slice(name, own), (*assumed, "a torus of that shape")


def _compact(chips: int, rank: int, chip: Chip) -> str:
    """The most compact box of that many chips, of whole cubes where the chip's slices are made of them."""
    edge = chip.wrap_cube if chip.wrap_cube and chips % chip.wrap_cube**rank == 0 else 1
    boxes = _boxes(chips // edge**rank, rank)
    best = min(boxes, key=lambda sides: (sum(sides), sides))
    return "x".join(str(side * edge) for side in best)


def _boxes(volume: int, rank: int) -> Iterator[tuple[int, ...]]:
    if rank == 1:
        yield (volume,)
        return
    for side in range(1, volume + 1):
        if volume % side == 0:
            yield from ((side, *rest) for rest in _boxes(volume // side, rank - 1) if side <= rest[0])


def _batch(row: Row, slice_: Slice) -> tuple[int, int]:
    batch = row.get("batch") or {}
    length = batch.get("seq") or (row.get("model") or {}).get("seq")
    if not length:
        raise NotExpressed("its sequence length is not stated")
    found = batch.get("global_sequences") or batch.get("global_examples") or batch.get("sequences")
    if not found and "per_device_batch_size" in batch:
        found = float(batch["per_device_batch_size"]) * slice_.devices
    if not found:
        raise NotExpressed("its batch is not stated")
    return int(found), int(length)


def _mesh(
    row: Row, slice_: Slice, model: Mapping[str, Any], batch: int
) -> tuple[tuple[tuple[str, int], ...], tuple[str, ...]]:
    """The mesh, and what of it is assumed."""
    layout = row.get("layout") or {}
    sizes = dict.fromkeys(("slices", "data", "shard", "fsdp", "context", "tensor"), 1)
    stated = {k: v for k, v in layout.items() if isinstance(v, int)}
    for key, size in stated.items():
        network, _, rest = key.partition("_")
        axis = _AXES.get(rest if network in ("ici", "dcn") else key)
        if axis is None and size != 1:
            raise NotExpressed(f"axis '{key}' of its layout has no counterpart here")
        sizes["slices" if network == "dcn" and axis == "data" else axis or "data"] *= size
    devices = slice_.devices
    for axis, size in sizes.items():
        if size < 0:  # -1: what is left
            sizes[axis] = -devices // math.prod(sizes.values()) * abs(size)
    if not stated:
        sizes["slices"], sizes["fsdp"] = _from_words(str(layout.get("note", "")), slice_)
    if sizes["slices"] == 1 and math.prod(sizes.values()) * slice_.slices == devices:
        sizes["slices"] = slice_.slices
    if math.prod(sizes.values()) != devices:
        raise NotExpressed(f"its layout {stated or dict(layout)} does not make {devices} devices")
    if batch % (sizes["slices"] * sizes["data"] * sizes["fsdp"]):
        raise NotExpressed(f"{batch} sequences do not divide over {devices // sizes['tensor']} devices")
    if sizes["fsdp"] == sizes["tensor"] == 1 and sizes["data"] > 1:
        sizes["shard"] = math.gcd(sizes["data"], model["d_model"])
        sizes["data"] //= sizes["shard"]
    fully, assumed = sizes["fsdp"], tuple[str, ...]()
    if model["d_model"] % fully:
        sizes["fsdp"] = math.gcd(fully, model["d_model"])
        sizes["data"] *= fully // sizes["fsdp"]
        assumed = (f"weights split in {sizes['fsdp']} parts, not {fully}",)
    found = tuple((axis, size) for axis, size in sizes.items() if size > 1)
    return found or (("data", 1),), assumed


def _from_words(note: str, slice_: Slice) -> tuple[int, int]:
    """(slices, fsdp) of a layout in words: fully sharded in a slice, data-parallel between slices."""
    text = note.lower()
    if "fsdp" in text and "slice" in text:
        return slice_.slices, slice_.devices // slice_.slices
    raise NotExpressed("its layout is not stated" + (f": {note}" if note else ""))


def _precision(text: str) -> str:
    words = text.lower()
    if "int8" in words and "weights" not in words:
        return "int8"
    return "fp8" if "fp8" in words else "bf16"


def _family(row: Row, model: Mapping[str, Any]) -> str:
    kind = str(row.get("kind") or row.get("family") or "run")
    return f"{kind} {'encoder' if str(model.get('arch', '')).startswith('encoder') else 'decoder'}"


def _attention(row: Row, chip: Chip) -> str:
    """Fused attention where the row says so, or the chip is no older than such kernels on TPUs."""
    return "flash" if "flash" in str(row.get("note", "")).lower() or chip.year >= FLASH_SINCE else "materialised"


def _apart(row: Row, model: Mapping[str, Any]) -> str:
    """Why a row can be predicted but is no measure of the model."""
    if str(row.get("usability", "A")).startswith("C"):
        return "the row itself is marked as of little use"
    doubts = {"dims_certainty": ("memory", "uncertain", "ambiguous"), "dims_source": ("uncertain", "ambiguous")}
    for key, words in doubts.items():
        if any(word in str(model.get(key, "")).lower() for word in words):
            return f"its dimensions are uncertain: {str(model[key])[:60]}"
    if "from memory" in str((row.get("batch") or {}).get("certainty", "")):
        return "its batch is from memory"
    return ""


def _measured(row: Row, batch: int, length: int, slice_: Slice, model: Mapping[str, Any]) -> tuple[int, int, float]:
    """(training steps, sequences evaluated, seconds of all of them)."""
    measured, derived = row.get("measured") or {}, row.get("derived") or {}
    block = re.match(r"([\d,]+) (?:training )?steps of", str(derived.get("block", "")))
    if "block_s_median" in measured and block:
        evaluated = re.search(r"evaluation forward of ([\d,]+) sequences", str(derived["block"]))
        count = int(evaluated[1].replace(",", "")) if evaluated else 0
        return int(block[1].replace(",", "")), count, float(measured["block_s_median"])
    for where in (measured, derived):
        for key, unit in (("step_time_s", 1.0), ("step_time_ms", 1e-3)):
            if where.get(key):
                return 1, 0, float(where[key]) * unit
    if measured.get("tokens_per_s_per_chip"):
        return 1, 0, batch * length / slice_.chips / float(measured["tokens_per_s_per_chip"])
    if measured.get("tflops_per_s_per_chip") and "causal-halved" in str(row.get("flops_convention")):
        flops = (6 * parameters(model) + 6 * model["layers"] * model["q_heads"] * model["head_dim"] * length) * length
        return 1, 0, flops * batch / slice_.chips / float(measured["tflops_per_s_per_chip"]) / 1e12
    if measured.get("steps_per_s"):
        return 1, 0, 1 / float(measured["steps_per_s"])
    raise NotExpressed("it gives no step time, and no rate from which one follows")


def _policy(row: Row, run: Run) -> tuple[Policy, tuple[str, ...]]:
    """What is computed again, and what of that is assumed."""
    text = str(row.get("remat") or "")
    found = policy_of(policy_in(str(row.get("note", ""))) if text == "see note" else text)
    if found is not None:
        return found, ()
    if run.encoder:
        scores = ("scores",) if run.attention == "materialised" else ()
        return Policy((*NOTHING_TWICE.save, *scores)), ("no product is computed again",)
    shards = run.axis("fsdp") * run.axis("tensor") * run.axis("context")
    state = STATE_BYTES * parameters(run.model) / shards
    tokens = run.batch * run.length / run.slice.devices
    name, found = lightest(run.model, state, tokens, run.slice.hbm_bytes_per_device)
    return found, (f"recomputation: {name}, the least that fits",)
