"""Textbook questions on time, bytes, FLOPs, bounds, fit and thresholds, asked of programs through the public face.

Problems and ranges are those of worked_problems.json, which takes them from jax-ml/scaling-book; they are copied by
value and compared with the file where present. What the book computes at peak rates is asked of ideal chips.
"""

from __future__ import annotations

import json

import pytest

from tests.effort import deep, each
from tests.estimation.worked import inference, rooflines, sharding, training, transformers
from tests.paths import SHARED

FILE = SHARED / "reference" / "worked_problems.json"
ANSWERS = {
    **rooflines.ANSWERS, **sharding.ANSWERS, **transformers.ANSWERS, **training.ANSWERS, **inference.ANSWERS,
}  # fmt: skip
ALL = 127  # answers in the file
LOOKED_AT = ANSWERS if deep() else dict([*ANSWERS.items()][::10])  # by default one in ten
EXCUSED = {
    ("lat-07", "int4 weights only on 2x2"): "there is no element of four bits",
    ("lat-09", "int4 QPS/chip"): "there is no element of four bits",
    ("lat-11", "sequences/step"): "a question on the arrival of requests; no program",
    ("lat-11", "tokens/step"): "a question on the arrival of requests; no program",
}


@each("answer, accept", LOOKED_AT, parts=2)
def test_answer_in_accepted_range(answer, accept):
    value = answer()
    assert value in accept if isinstance(accept[0], str) else accept[0] <= value <= accept[1], (value, accept)


def test_at_most_one_in_twenty_is_excused():
    assert not EXCUSED.keys() & ANSWERS.keys()
    assert len(ANSWERS) + len(EXCUSED) == ALL
    assert len(EXCUSED) <= ALL / 20


def test_questions_and_ranges_are_those_of_the_file():
    if not FILE.exists():
        pytest.skip(f"{FILE.name} is not beside this checkout ({FILE.parent})")
    asked = {(p["id"], a["quantity"]): a["accept"] for p in json.loads(FILE.read_text()) for a in p["answers"]}
    assert asked.keys() == ANSWERS.keys() | EXCUSED.keys()
    for key, (_, accept) in ANSWERS.items():
        assert asked[key] == accept, key
