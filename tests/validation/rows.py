"""Rows that tests look at: of the training runs a few of every chip; all of them in a deep run."""

from __future__ import annotations

from meshlib.validation.runs import ROWS
from tests.effort import deep

BY_NAME = {row["id"]: row for row in ROWS}
SAMPLE = (
    "mt-v4-22b-1x", "mt-v5e-16b-1x", "mt-v5e-16b-4x", "mt-v5e-128b-1x", "mt-v5p-32b-1x128", "mt-v5p-1024b-1x4096",
    "rc-v6e-gpt3-175b-bf16", "rc-v6e-llama3.1-8b-8", "rc-v5p-gpt3-175b-int8", "iw-llama70b-64-bf16",
    "iw-llama70b-64-fp8", "mlp-v0.7-bert-v3-32",
)  # fmt: skip
TRAINING = tuple(BY_NAME[name] for name in SAMPLE)
MICRO = tuple(row for row in ROWS if row["id"].startswith("mb-") and "dcn" not in row["model"]["op"].lower())
# Of those whose chip others stand for, what is read of the row is looked at, and no time predicted.
READ = ("mt-v5e-16b-4x", "mt-v5p-1024b-1x4096", "rc-v5p-gpt3-175b-int8")
PREDICTED = tuple(row for row in TRAINING if row["id"] not in READ)
LOOKED_AT = ROWS if deep() else (*PREDICTED, *MICRO)
