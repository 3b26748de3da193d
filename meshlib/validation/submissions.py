"""Facts from scripts and logs of MLPerf submissions that rows leave out.

A row names the file that its time was read in; facts here are of the files beside it: the script that started the run
(`run_and_time.sh` of its system), the model that it ran, and the order of events in its log. They are looked up by that
source, never by a row's name, and a row that has one says so in `Run.assumed`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Submission:
    """Facts about a run that its row leaves out.

    Attributes:
      buckets: (sequences, length) of the alternative batches of a replica, one for each range of lengths; () if all
        sequences have one length. replicas: number of replicas, each with such a batch.
      softmax_dtype: dtype in which the weights of materialised attention are computed and kept.
      wide_gradients: gradients are summed, and updated weights gathered, as float32.
      evaluates: whether blocks of training include evaluations; evaluation_batch: sequences of an evaluation step, 0
        for as many as in training.
      remat: recomputation policy if the row names none.
      source: source of these facts, in words.
    """

    buckets: tuple[tuple[int, int], ...] = ()
    replicas: int = 0
    softmax_dtype: str = "bfloat16"
    wide_gradients: bool = False
    evaluates: bool = True
    evaluation_batch: int = 0
    remat: str = ""
    source: str = ""

    @property
    def slowest(self) -> tuple[int, int]:
        """Sequences and length of the bucket that a step waits for: the one with most tokens, the longest of equals.

        Replicas draw buckets independently; with many, one draws it in every step, and all sum gradients with it.

        >>> Submission(((58, 128), (30, 256), (16, 512)), 128).slowest
        (16, 512)
        """
        return max(self.buckets, key=lambda bucket: (bucket[0] * bucket[1], bucket[1]))

    @property
    def facts(self) -> tuple[str, ...]:
        """The facts as sentences, for `Run.assumed`."""
        stated = []
        if self.buckets:
            sequences, length = self.slowest
            stated.append(f"batches by length, of which a step waits for {sequences} x {length} a replica")
        if self.softmax_dtype == "float32":
            stated.append("softmax in float32")
        if self.wide_gradients:
            stated.append("gradients summed in float32")
        if not self.evaluates:
            stated.append("blocks without evaluations")
        if self.evaluation_batch:
            stated.append(f"evaluations of {self.evaluation_batch:,} sequences at once")
        if self.remat:
            stated.append(f"recomputation: {self.remat}")
        return tuple(f"{fact} ({self.source})" for fact in stated)


UNKNOWN = Submission()
"""A submission without known facts."""

_GPT3_REMAT = {1024: "full", 2048: "save_dot_except_mlpwi", 3072: "save_dot_except_mlpwi", 12_288: "minimal"}

# (repository, system, benchmark) -> facts. Other submissions of BERT for TPUs there, of tpu-v4-16, -128 and -512 and
# tpu-v3-8192 (v0.7), tpu-v4-4096 and -6912 (v1.0) and cloud-tpu-v4-6912 (v2.0), start with one length of sequences and
# sum gradients in bfloat16 (--use_bfloat16_all_reduce); their logs have evaluations inside blocks.
_SUBMISSIONS: dict[tuple[str, str, str], Submission] = {
    # Google/benchmarks/bert/implementations: bert-cloud-TF2.0-tpu-v3-32 (attention.py, model_training_utils.py, whose
    # gradients are of float32 variables) and masked_softmax.py, stored with the same package for GPUs. result_0.txt:
    # eval_start comes after the last block_stop.
    ("training_results_v0.7", "tpu-v3-32-TF2.0", "bert"): Submission(
        softmax_dtype="float32", wide_gradients=True, evaluates=False, source="its model and log"
    ),
    # run_and_time.sh: --seq_len_buckets, --batch_size_buckets, --eval_batch_size; dataset_input.py groups by them.
    # result_0.txt counts 3,113 to 3,124 sequences a step.
    ("training_results_v1.0", "tpu-v4-128-TF", "bert"): Submission(
        buckets=((58, 128), (30, 256), (16, 512)), replicas=128, evaluation_batch=3072, source="run_and_time.sh"
    ),
    ("training_results_v2.0", "cloud-tpu-v4-8192-TF", "bert"): Submission(
        buckets=((14, 64), (8, 128), (5, 192), (4, 256), (3, 304), (2, 512)),
        replicas=4096,
        evaluation_batch=12_288,
        source="run_and_time.sh",
    ),
    # Google/benchmarks/gpt3/implementations/maxtext: v5p-1024.sh and its neighbours. Policies had other names then:
    # save_dot_except_logits_ffn1 is save_dot_except_mlpwi, save_dot_except_logits is minimal (from memory).
    **{
        ("training_results_v4.0", f"cloud-tpu-v5p-{cores}-maxtext", "gpt3"): Submission(
            remat=remat, evaluation_batch=cores // 2, source=f"v5p-{cores}.sh"
        )
        for cores, remat in _GPT3_REMAT.items()
    },
}


def submission_of(row: Row) -> Submission:
    """The facts about the submission that a row's time was read in; `UNKNOWN` for others.

    >>> source = {"repo": "mlcommons/training_results_v1.0", "file": "Google/results/tpu-v4-128-TF/bert/result_*.txt"}
    >>> submission_of({"source": source}).replicas, submission_of({"source": "a talk"}).replicas
    (128, 0)
    """
    source = row.get("source")
    if not isinstance(source, Mapping):
        return UNKNOWN
    match = re.search(r"/results/([^/]+)/([^/]+)/", str(source.get("file") or ""))
    if match is None:
        return UNKNOWN
    repository = str(source.get("repo") or "").rpartition("/")[2]
    return _SUBMISSIONS.get((repository, match[1], match[2]), UNKNOWN)
