"""Published training runs as plain data: model, mesh, layout, batch and software, from the fields of their rows.

Nothing here depends on a row's name. What a row leaves open is decided by what runs of its kind do, and said in
`Run.assumed`: an unstated recomputation policy is the one that recomputes least and still fits; a data-parallel run
shards its optimizer (Xu et al., arXiv:2004.13336); dimensions left out are those published under the model's name; a
batch that devices do not share evenly is padded. Rows that leave more open say why they are not expressed.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hardware.chips import Chip, get_chip
from hardware.slices import Slice
from meshlib.core.dtypes import as_dtype
from meshlib.models import PRESETS, Experts, TransformerConfig
from meshlib.validation.experts import experts_of, with_experts
from meshlib.validation.machine import axes_of, slice_of
from meshlib.validation.measured import flops_per_token, local_layers, measured, parameters
from meshlib.validation.policies import NOTHING_TWICE, NotExpressed, Policy, lightest, policy_in, policy_of
from meshlib.validation.recipes import bound, loss_blocks, torus_sums, with_kernels
from meshlib.validation.submissions import UNKNOWN, Submission, submission_of

FILE = Path(__file__).with_name("published_results.json")
HELD_OUT = FILE.with_name("held_out_results.json")
"""Published runs that took no part in the fit of any constant."""

ROWS: tuple[dict[str, Any], ...] = tuple(json.loads(FILE.read_text(encoding="utf-8"))["rows"])


Row = Mapping[str, Any]

_DIMS = ("layers", "d_model", "q_heads", "head_dim", "d_ff", "vocab")
_BATCHES = ("global_sequences", "global_examples", "sequences", "global_batch_size")
BATCH_AXES = ("slices", "data", "shard", "fsdp", "expert")
FLASH_SINCE = 2023  # jax.experimental.pallas.ops.tpu.flash_attention
STATE_VALUES = 3  # per parameter: itself and two slots


@dataclass(frozen=True)
class Run:
    """A published training run.

    Attributes:
      name, family, chip, precision ("bf16", "int8", "fp8", "float32"): what tables group by. bound: of eight-bit
        operands, `Numerics.bound`.
      model: dims as the row gives them; length, batch: tokens of a sequence, sequences of a step.
      slice: where it ran; mesh: axis -> size on all slices; across: axis -> the factor of it that joins slices.
      policy: recomputation policy; attention: "flash" or "materialised"; optimizer: name; state_dtype: dtype of
        variables and slots.
      steps, evaluation: training steps, and sequences run forward, in the measured time.
      measured_seconds: measured time of both.
      experts: the mixtures of experts, or None.
      loss_blocks: parts of each sequence whose logits and loss are computed one after the other.
      torus_sums: `Compiler.torus_sums`.
      submission: facts about its software from outside the row.
      apart: why the row does not measure the model, or ""; assumed: assumptions on what the row left open.
    """

    name: str
    family: str
    chip: str
    precision: str
    bound: float | None
    model: Mapping[str, Any]
    batch: int
    length: int
    slice: Slice
    mesh: tuple[tuple[str, int], ...]
    across: tuple[tuple[str, int], ...]
    policy: Policy
    attention: str
    optimizer: str
    state_dtype: str
    steps: int
    evaluation: int
    measured_seconds: float
    experts: Experts | None = None
    loss_blocks: int = 1
    torus_sums: bool = False
    submission: Submission = UNKNOWN
    apart: str = ""
    assumed: tuple[str, ...] = ()

    def axis(self, name: str) -> int:
        """Size of a mesh axis, 1 if there is none."""
        return dict(self.mesh).get(name, 1)

    @property
    def eight_bit(self) -> bool:
        """True if products run in eight bits."""
        return self.precision in ("int8", "fp8")

    @property
    def noisy(self) -> bool:
        """True if cotangents are rounded stochastically (AQT's int8): `meshlib.models.maxtext.model.NOISE_BYTES`."""
        return self.precision == "int8"

    @property
    def looks_up_biases(self) -> bool:
        """True if biases are looked up row by row, as MaxText does with those of experts whose tokens are sorted."""
        known = known_model(str(self.model.get("name", "")))
        grouped = self.experts is not None and self.experts.form == "grouped"
        return self.family.startswith("maxtext") and grouped and known is not None and known.bias

    @property
    def row_sums(self) -> str:
        """`Compiler.row_sums` of the run."""
        return "scatter 2025" if self.experts is not None and self.experts.routing.row_sums == "scatter" else "scatter"

    @property
    def locals(self) -> int:
        """Windowed layers per global layer."""
        return local_layers(self.model)

    @property
    def padded_batch(self) -> int:
        """Sequences per step, padded to divide over the devices that share them."""
        parts = math.prod(self.axis(name) for name in BATCH_AXES)
        return -(-self.batch // parts) * parts

    @property
    def predictions(self) -> int | None:
        """Tokens per sequence that an encoder predicts: 15 %, 76 of 512 (Devlin et al., arXiv:1810.04805)."""
        return int(0.15 * self.length) if self.encoder else None

    @property
    def encoder(self) -> bool:
        """True if attention is bidirectional."""
        return "encoder" in str(self.model.get("arch")) and "decoder" not in str(self.model.get("arch"))

    @property
    def evaluations(self) -> int:
        """Forward passes in evaluations, in whole batches."""
        return -(-self.evaluation // self.evaluation_batch)

    @property
    def evaluation_batch(self) -> int:
        """Sequences per evaluation step: those of a training step, unless the submission says otherwise."""
        return self.submission.evaluation_batch or self.batch

    @property
    def model_flops(self) -> float:
        """Model FLOPs in the measured time on all chips, as papers count: 6 per parameter and token, and attention."""
        spans = "full" if self.encoder else "windows"
        whole = flops_per_token(self.model, self.length, spans) * self.batch * self.length
        return (self.steps + self.evaluations * self.evaluation_batch / self.batch / 3) * whole

    @property
    def utilisation(self) -> float:
        """Model FLOPs per measured second, over the bf16 peak of the slice."""
        return self.model_flops / self.measured_seconds / self.slice.peak_flops("bf16")


def run_of(row: Row) -> Run:
    """The training run that a row describes.

    Raises: NotExpressed, with the reason, for rows of other kinds and for what the row leaves open.
    """
    if "inference" in str(row.get("kind")) or "phase" in (row.get("batch") or {}):
        raise NotExpressed("it is not a training run: see meshlib.validation.inference")
    model, completed = dimensions(row)
    chip = get_chip(str(row["chip"]))
    slice_, assumed = slice_of(row, chip)
    slice_, kernels = with_kernels(row, slice_)
    submission = submission_of(row)
    batch, length = _batch(row, slice_)
    axes = axes_of(row, slice_, model["d_model"])
    steps, evaluation, seconds, counted = measured(row, batch, length, slice_, model)
    if submission.buckets:
        sequences, length = submission.slowest
        batch = submission.replicas * sequences
    if not submission.evaluates:
        evaluation, counted = 0, ()
    run = Run(
        name=str(row.get("id", "?")),
        family=_family(row, model),
        chip=chip.name,
        precision=_precision(str(row.get("precision", ""))),
        bound=bound(row),
        model=model,
        batch=batch,
        length=length,
        slice=slice_,
        mesh=axes.sizes,
        across=axes.across,
        policy=Policy(),
        attention=_attention(row, chip),
        optimizer=str(row.get("optimizer") or ""),
        state_dtype=_state_dtype(row),
        steps=steps,
        evaluation=evaluation,
        measured_seconds=seconds,
        submission=submission,
        apart=_why_apart(row, model),
    )
    experts, routed = experts_of(row, model)
    blocks, in_parts = loss_blocks(row)
    run = replace(run, experts=experts, loss_blocks=blocks, torus_sums=torus_sums(row))
    padded = _padded(run)
    policy, why = _policy(row, run)
    counted = (*counted, *submission.facts)
    left_open = (
        *completed,
        *assumed,
        *axes.assumed,
        *counted,
        *padded,
        *routed,
        *why,
        *kernels,
        *in_parts,
        *_software(run),
    )
    return replace(run, policy=policy, assumed=left_open)


def known_model(name: str) -> TransformerConfig | None:
    """The preset with the longest name that is contained in this one.

    >>> known_model("PaLM 540B").name, known_model("maxtext-7b")
    ('palm-540b', None)
    """
    matching = [preset for preset in PRESETS if preset in name.lower().replace(" ", "-")]
    return PRESETS[max(matching, key=len)] if matching else None


def dimensions(row: Row) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Dimensions, and those that the row leaves to the model published under its name."""
    stated = row.get("model")
    model: dict[str, Any] = dict(stated) if isinstance(stated, Mapping) else {"name": stated or ""}
    arch = str(model.get("arch", ""))
    if model.get("op"):
        raise NotExpressed(f"it measures the operation {str(model['op'])[:60]!r}, not a model")
    if arch.startswith("encoder-decoder"):
        raise NotExpressed("it does not say how long the sequences on either side are")
    if "heads" in model:
        model.setdefault("q_heads", model["heads"])
    if "moe" in arch.lower() or model.get("experts"):
        with_experts(model)
    assumed = _completed(model)
    missing = [k for k in _DIMS if not model.get(k)]
    if len(missing) == len(_DIMS):
        raise NotExpressed("it states no dimensions of a model")
    if missing:
        raise NotExpressed(f"not stated of its model: {', '.join(missing)}")
    wrong = [k for k in _DIMS if not float(model[k]).is_integer() or model[k] < 1]
    if wrong:
        raise NotExpressed(f"its model's {wrong[0]} must be a whole number of at least 1, not {model[wrong[0]]}")
    return model | {k: int(model[k]) for k in _DIMS}, assumed


def _completed(model: dict[str, Any]) -> tuple[str, ...]:
    """Fill in the published dimensions of a model of that name, and heads that make up d_model."""
    known = known_model(str(model.get("name", "")))
    if known is not None and known.kind != "encoder-decoder":
        published: dict[str, Any] = {
            "layers": known.layers, "d_model": known.d_model, "q_heads": known.heads, "head_dim": known.head_dim,
            "d_ff": known.d_ff, "vocab": known.vocab, "kv_heads": known.memory_heads, "arch": known.kind,
            "mlp_matrices": 3 if known.gated else 2, "tied_embedding": known.tied,
        }  # fmt: skip
        if known.windows != (None,):
            published |= {"local_window": known.windows[0], "pattern": f"{len(known.windows) - 1} local"}
        if all(model.get(k) in (None, published[k]) for k in _DIMS if k != "vocab"):
            missing = [k for k in published if model.get(k) is None]
            model |= {k: published[k] for k in missing}
            dims = [k for k in missing if k in _DIMS]
            return (f"{', '.join(dims)} as published of {known.name}",) if dims else ()
    if not model.get("head_dim") and model.get("d_model") and model.get("q_heads"):
        model["head_dim"] = model["d_model"] / model["q_heads"]
        return ("head_dim: d_model over heads",)
    return ()


def _batch(row: Row, slice_: Slice) -> tuple[int, int]:
    """(sequences per step, tokens per sequence)."""
    batch = row.get("batch") or {}
    length = batch.get("seq") or (row.get("model") or {}).get("seq")
    if not length:
        raise NotExpressed("its sequence length is not stated")
    stated = next((batch[key] for key in _BATCHES if batch.get(key)), None)
    if not stated and "per_device_batch_size" in batch:
        each = batch.get("devices_per_chip")
        stated = float(batch["per_device_batch_size"]) * (int(each) * slice_.chips if each else slice_.devices)
    if not stated and batch.get("tokens"):
        stated = float(batch["tokens"]) / float(length)
    if not stated:
        raise NotExpressed("its batch is not stated")
    whole = round(float(stated))
    if whole < 1 or abs(whole - float(stated)) > 1e-6 * whole:
        raise NotExpressed(f"its batch makes no whole number of sequences: {float(stated):g}")
    return whole, int(length)


def _padded(run: Run) -> tuple[str, ...]:
    """The assumption made about a batch that does not divide over the devices; NotExpressed for fewer sequences."""
    if run.padded_batch == run.batch:
        return ()
    parts = math.prod(run.axis(name) for name in BATCH_AXES)
    if run.batch < parts:
        raise NotExpressed(f"{run.batch} sequences do not divide over {parts} devices")
    return (f"{run.batch} sequences padded to {run.padded_batch}",)


def _state_dtype(row: Row) -> str:
    """Dtype of variables and slots: MaxText's weight_dtype applies to both."""
    narrow = re.search(r"weight_dtype\W+(bf16|bfloat16)", str(row.get("note", "")).lower())
    return "bfloat16" if narrow else "float32"


def _precision(text: str) -> str:
    words = text.lower()
    if "int8" in words and "weights" not in words:
        return "int8"
    if "fp8" in words:
        return "fp8"
    return "float32" if re.search(r"float32|fp32|f32", words) and "bf16" not in words else "bf16"


def _family(row: Row, model: Mapping[str, Any]) -> str:
    kind = str(row.get("kind") or row.get("family") or "run")
    side = "encoder" if str(model.get("arch", "")).startswith("encoder") else "decoder"
    return f"{kind} {side}{' with experts' if model.get('experts') else ''}"


def _attention(row: Row, chip: Chip) -> str:
    """Fused attention if the row says so, or if the chip is no older than such kernels on TPUs."""
    return "flash" if "flash" in str(row.get("note", "")).lower() or chip.year >= FLASH_SINCE else "materialised"


def _why_apart(row: Row, model: Mapping[str, Any]) -> str:
    """Why a row can be predicted but is not a measure of the model."""
    if str(row.get("usability", "A")).startswith("C"):
        return "the row itself is marked as of little use"
    doubts = {"dims_certainty": ("memory", "uncertain", "ambiguous"), "dims_source": ("uncertain", "ambiguous")}
    for key, words in doubts.items():
        if any(word in str(model.get(key, "")).lower() for word in words):
            return f"its dimensions are uncertain: {str(model[key])[:60]}"
    if "from memory" in str((row.get("batch") or {}).get("certainty", "")):
        return "its batch is from memory"
    return ""


def _remat_text(row: Row, followed: int = 0) -> tuple[str, tuple[str, ...]]:
    """A row's rematerialisation policy in words (its own, a note's, or another row's), and assumptions."""
    text = str(row.get("remat") or "").strip()
    if text == "see note":
        return policy_in(str(row.get("note", ""))), ()
    other = re.match(r"(?:the )?(?:same )?(?:remat )?as (?:in )?(?:row )?['\"]?([\w.+-]+)", text.lower())
    if other is None:
        return text, ()
    like = [r for r in ROWS if str(r.get("id", "")).lower() == other[1].rstrip(".")]
    if like and followed < len(ROWS):
        return _remat_text(like[0], followed + 1)[0], (f"recomputation as in {like[0]['id']}",)
    named = policy_in(text)
    if not named:
        raise NotExpressed(f"its recomputation is {text!r}, which names no row and no policy")
    return named, ()


def _software(run: Run) -> tuple[str, ...]:
    """Assumptions from the software that runs of its kind use."""
    noise = ("cotangents rounded at random to int8, as AQT does",) if run.noisy else ()
    narrow = run.axis("shard") > 1 and run.precision != "float32" and not run.submission.wide_gradients
    biases = ("biases of experts looked up row by row",) if run.looks_up_biases else ()
    sums = ("gradients of sorted tokens added row by row, by a compiler of 2025",) if run.row_sums != "scatter" else ()
    gathered = ("sharded weights gathered in bfloat16 (not verified)",) if narrow else ()
    bounded = (f"scales for magnitudes up to {run.bound:g} as its recipe fixes them",) if run.bound else ()
    torus = ("gathers over a whole torus sent as all_reduces, by a compiler of 2025",) if run.torus_sums else ()
    return (*noise, *biases, *sums, *gathered, *bounded, *torus)


def _policy(row: Row, run: Run) -> tuple[Policy, tuple[str, ...]]:
    """The rematerialisation policy, and assumptions."""
    text, assumed = _remat_text(row)
    policy = policy_of(text or run.submission.remat)
    if policy is not None:
        return policy, assumed
    if run.encoder:
        scores = ("scores",) if run.attention == "materialised" else ()
        return Policy((*NOTHING_TWICE.save, *scores)), ("no product is recomputed",)
    shards = run.axis("fsdp") * run.axis("tensor") * run.axis("context")
    state = STATE_VALUES * as_dtype(run.state_dtype).itemsize * parameters(run.model, held=True) / shards
    tokens = run.batch * run.length / run.slice.devices
    name, policy = lightest(run.model, state, tokens, run.slice.hbm_bytes_per_device)
    return policy, (f"recomputation: {name}, the least that fits",)
