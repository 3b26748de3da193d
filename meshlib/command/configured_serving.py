"""MaxText configurations as subjects of `meshlib serve`: their model, lengths and dtypes."""

from __future__ import annotations

import argparse

from hardware.slices import Slice
from meshlib.command.configured import run_of
from meshlib.command.serving import ServingTask
from meshlib.core.text import wrapped
from meshlib.models.maxtext.keys import READ
from meshlib.models.maxtext.model import FLOATS
from meshlib.models.maxtext.run import MaxTextRun
from meshlib.models.maxtext.settings import OVERRIDES, RULES

KERNELS = {"int8": "int8", "fp8": "float8_e4m3fn"}  # MaxText's `quantization` -> dtype of the stored kernels
PROMPT, CACHES = "max_prefill_predict_length", {"int8": "int8", "fp8": "float8_e4m3fn"}


def asked_of(args: argparse.Namespace, where: Slice) -> ServingTask:
    """The serving task of an inference configuration.

    The batch is fixed if an override gives it, else swept; layouts are searched, so keys that fix one are reported.
    """
    run = run_of(args, serving=True)
    s = run.settings
    context = args.context or run.length
    prompt = args.prompt or _prompt(run, context)
    batches = None
    if s.sources.get("per_device_batch_size") == OVERRIDES:
        batches = [max(1, round(s.number("per_device_batch_size") * where.devices))]
    numerics = run.config.numerics.unquantised
    weights = args.weights or KERNELS.get(s["quantization"]) or FLOATS[s["weight_dtype"]]
    return ServingTask(
        run.config.replace(numerics=numerics, dropout=0.0), context, prompt, batches, weights,
        args.caches or _caches(run), _notes(run),
    )  # fmt: skip


def _prompt(run: MaxTextRun, context: int) -> int | None:
    """Tokens of a prefill."""
    prompt = run.settings.values.get(PROMPT)
    if prompt is None:
        return None
    if not isinstance(prompt, int) or isinstance(prompt, bool) or not 1 <= prompt < context:
        run.settings.fail(PROMPT, f"must be a whole number from 1 to max_target_length - 1 = {context - 1}", prompt)
    return prompt


def _caches(run: MaxTextRun) -> str | None:
    """Dtype of quantised caches, or None."""
    values = run.settings.values
    if not values.get("quantize_kvcache"):
        return None
    kind = values.get("kv_quant_dtype", "int8")
    if kind not in CACHES:
        run.settings.fail("kv_quant_dtype", f"must be one of {', '.join(CACHES)}", kind)
    return CACHES[kind]


def _notes(run: MaxTextRun) -> tuple[str, ...]:
    """Notes on keys that fix a layout, and on keys that no estimate reflects."""
    values = run.settings.values
    says = [key for key in values if key.endswith("_parallelism") or key in (RULES, "mesh_axes")]
    layout_keys = [
        f"{key}={values[key]}"[:60] for key in says if values[key] not in (READ.get(key), None) and key != RULES
    ]
    layout_keys += [RULES] if RULES in values and run.settings.sources.get(RULES) != "base.yml" else []
    notes = (
        [f"{', '.join(layout_keys)}: a layout of the configuration's own; layouts are searched here"]
        if layout_keys
        else []
    )
    notes += [str(one) for one in run.unread]
    return tuple(line for note in notes for line in wrapped(note, "not expressed: ", " "))
