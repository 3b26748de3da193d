"""Rows of measurements as training runs: what is read of them, what is assumed, and the programs they become."""

from __future__ import annotations

import dataclasses
import json

import pytest

import meshlib as mtf
from hardware import Slice
from meshlib.estimation.time.physics import CALIBRATED, Physics
from meshlib.validation.naive import naive_seconds, naive_without_chip_seconds
from meshlib.validation.policies import NotExpressed, Policy, lightest, policy_of
from meshlib.validation.runs import run_of
from meshlib.validation.training import config_of, layout_of, lowered, prepare
from tests.validation.rows import BY_NAME, TRAINING

ROWS = {row["id"]: row for row in TRAINING}
MLPERF = {
    "kind": "mlperf", "chip": "v5p", "n_chips": 512, "slice": {"topology": "8x8x8"},
    "model": ROWS["rc-v5p-gpt3-175b-int8"]["model"], "layout": {"ici_fsdp": 512},
    "batch": {"global_examples": 2048, "seq": 2048}, "precision": "int8 matmul (AQT)",
    "measured": {"block_s_median": 285.777},
    "derived": {"block": "12 training steps of 2048 x 2048 tokens + evaluation forward of 24,567 sequences"},
}  # fmt: skip


def test_a_block_has_steps_and_an_evaluation():
    run = run_of(MLPERF)
    assert (run.steps, run.evaluation, run.measured_seconds) == (12, 24567, 285.777)
    assert run.precision == "int8"
    rounding = "cotangents rounded at random to int8, as AQT does"
    assert run.assumed == ("recomputation: save_qkv_proj, the least that fits", rounding)
    made = prepare(run)
    alone = dataclasses.replace(run, steps=1, evaluation=0)
    step = prepare(alone).seconds(CALIBRATED)
    evaluation = made.seconds(CALIBRATED) - 12 * step
    # A forward pass of twelve batches: a third or less of twelve steps, which compute again as well.
    assert 0.2 < evaluation / (12 * step) < 1 / 3
    # 6 P tokens a step and causal attention, over the peak of 512 chips: 1.06 of bf16 peak, in int8.
    assert run.utilisation == pytest.approx(1.06, abs=0.01)


def test_parameters_and_flops_of_a_run_are_the_models():
    for row in TRAINING:
        run = run_of(row)
        flops = config_of(run).flops_per_token(run.length) * run.batch * run.length
        share = 0.9 if run.encoder else 0.99  # a row counts the head for every token of an encoder, and no biases
        assert share < run.steps * flops / run.model_flops < 1.02, row["id"]


@pytest.mark.parametrize(
    ("changes", "mesh", "name"),
    [
        ({}, (("fsdp", 256),), "v5e-16x16"),
        ({"n_slices": 4, "n_chips": 1024, "layout": {"ici_fsdp": 256}}, (("slices", 4), ("fsdp", 256)), "4*v5e-16x16"),
        ({"layout": {"note": "FSDP in slice"}}, (("fsdp", 256),), "v5e-16x16"),
        ({"layout": {"ici_fsdp": 32, "ici_fsdp_transpose": 8}}, (("fsdp", 256),), "v5e-16x16"),
        ({"layout": {"ici_fsdp": 64, "ici_tensor": 4}}, (("fsdp", 64), ("tensor", 4)), "v5e-16x16"),
        ({"layout": {"data": 256}}, (("shard", 256),), "v5e-16x16"),
        ({"slice": None}, (("fsdp", 256),), "v5e-16x16"),
    ],
)
def test_meshes(changes, mesh, name):
    run = run_of({**ROWS["mt-v5e-16b-1x"], **changes})
    assert run.mesh == mesh
    assert run.slice == Slice(name)
    assert ("shape of the slice" in run.assumed) == ("slice" in changes)


def test_a_machine_that_is_no_slice_on_offer():
    row = {**ROWS["mlp-v0.7-bert-v3-32"], "chip": "v4", "n_chips": 3456, "slice": {"topology": None},
           "layout": {"data": 3456}, "batch": {"global_examples": 6912, "seq": 512}}  # fmt: skip
    run = run_of(row)
    assert run.slice.torus_shape == (12, 12, 24)
    assert run.mesh == (("data", 27), ("shard", 128))


def test_policies_in_words():
    assert policy_of("custom: decoder_layer_input on device, qkv remat") == Policy()
    assert policy_of("custom: out_proj,mlpwo on device") == Policy(("out", "wo"))
    assert policy_of("custom: decoder_layer_input,mlpwo offloaded; k,v on device") == Policy(("k", "v"), ("wo",), True)
    assert policy_of("qkv_proj_offloaded") == Policy((), ("q", "k", "v"))
    assert policy_of("minimal") == Policy(("q", "k", "v", "out", "wi", "wi_gate", "wo"))
    with pytest.raises(NotExpressed, match="'nonsense' is not known"):
        policy_of("nonsense")


def test_the_least_recomputation_that_fits():
    model = MLPERF["model"]
    kept = 2 * 96 * 12288  # bytes of one value of d_model of every layer, per token
    for fits, name in ((10 * kept, "minimal"), (6 * kept, "save_dot_except_mlpwi"), (4 * kept, "save_qkv_proj")):
        assert lightest(model, 0.0, 1.0, 1.001 * fits / 0.95)[0] == name
        assert lightest(model, 0.0, 1.0, 0.999 * fits / 0.95)[0] != name


def test_the_naive_rule_by_hand():
    row = ROWS["mt-v5e-16b-1x"]
    runs = [run_of({**row, "measured": {"step_time_s": s}}) for s in (10.0, 12.0, 20.0)]
    other = run_of({**ROWS["mt-v4-22b-1x"], "measured": {"step_time_s": 28.0}})
    # The median utilisation is that of 12 s; a run on another chip is predicted by this one's.
    assert naive_seconds(runs[0], [*runs, other]) == pytest.approx(12.0)
    ratio = other.utilisation / runs[1].utilisation
    assert naive_without_chip_seconds(other, [*runs, other]) == pytest.approx(28.0 * ratio)
    assert naive_without_chip_seconds(runs[0], runs) is None


def test_a_run_is_what_the_public_face_makes_of_it():
    """Its seconds are those of `mtf.estimate` of the program that `mtf.models.train_step` and `mtf.lower` make."""
    run = run_of(ROWS["mt-v5e-128b-1x"])
    config = config_of(run)
    mesh = mtf.Mesh("fsdp:16;tensor:16")
    with mtf.Graph():
        outputs, updates = mtf.models.train_step(config, batch=256, length=2048, remat="full")
        program = mtf.lower(outputs, updates, mesh, layout_of(run, config, mesh))
    est = mtf.estimate(program, run.slice)
    assert prepare(run).seconds(Physics()) == pytest.approx(est.step_seconds, rel=1e-3)
    assert str(layout_of(run, config, mesh)) == str(
        mtf.LayoutRules("batch:fsdp;d_model:fsdp?;heads:tensor;d_ff:tensor;vocab:tensor;length:tensor?")
    )


def test_rows_are_plain_data():
    assert json.loads(json.dumps(TRAINING)) == list(TRAINING)


def test_recomputation_as_in_another_row():
    row, other = ROWS["mt-v5e-16b-1x"], ROWS["mt-v5p-32b-1x128"]
    for words in ("as in mt-v5p-32b-1x128", "remat as in row 'mt-v5p-32b-1x128'", "same as mt-v5p-32b-1x128"):
        run = run_of({**row, "remat": words})
        assert run.policy == run_of(other).policy
        assert "recomputation as in mt-v5p-32b-1x128" in run.assumed
    assert run_of({**row, "remat": "as in the config (qkv_proj_offloaded)"}).policy == Policy(offload=("q", "k", "v"))
    with pytest.raises(NotExpressed, match="names no row and no policy"):
        run_of({**row, "remat": "as in the other run"})


def test_an_evaluation_that_a_block_includes():
    run = run_of({**ROWS["mlp-v0.7-bert-v3-32"], "source": "a log"})
    assert (run.steps, run.evaluation) == (1117, 10_000)
    assert run.evaluations == 23  # of 448 sequences
    assert "evaluation of 10,000 sequences" in run.assumed


def test_what_a_submission_says_beside_its_row():
    run = run_of(ROWS["mlp-v0.7-bert-v3-32"])
    assert (run.steps, run.evaluation, run.evaluations) == (1117, 0, 0)
    numerics = config_of(run).numerics
    assert (numerics.softmax_dtype, numerics.variable_dtype) == ("float32", "float32")
    said = [fact for fact in run.assumed if "its model and log" in fact]
    assert len(said) == 3
    assert not any("gathered in bfloat16" in fact for fact in run.assumed)


def test_a_submission_names_the_recomputation_that_its_row_leaves_out():
    row = BY_NAME["mlp-v4.0-gpt3-v5p-1024"]
    run = run_of(row)
    assert run.policy == policy_of("full")
    assert (run.evaluation_batch, run.evaluations) == (512, 48)  # one sequence a chip
    assert "recomputation: full (v5p-1024.sh)" in run.assumed
    assert run_of({**row, "remat": "minimal"}).policy == policy_of("minimal")
    assert run_of({**row, "source": {}}).policy == policy_of("save_qkv_proj")  # the least that fits


def test_replicas_that_take_batches_by_length_wait_for_the_longest():
    row = BY_NAME["mlp-v1.0-bert-tpu-v4-128-TF"]
    run = run_of(row)
    assert (run.batch, run.length, run.steps) == (128 * 16, 512, 56)
    assert any("16 x 512 a replica (run_and_time.sh)" in fact for fact in run.assumed)
    assert (run.evaluation_batch, run.evaluations) == (3072, 4)
    alike = run_of({**row, "id": "x", "source": {"repo": "elsewhere", "file": row["source"]["file"]}})
    assert (alike.batch, alike.length, alike.steps) == (3072, 512, 56)
    assert config_of(alike).numerics.softmax_dtype == "bfloat16"


PALM = {
    "id": "palm", "kind": "paper", "chip": "v4", "n_chips": 6144, "n_slices": 2, "model": {"name": "PaLM 540B"},
    "layout": "data:2 (DCN); fsdp:256; tensor:12", "batch": {"global_sequences": 2048, "seq": 2048},
    "precision": "bf16", "remat": "full", "measured": {"mfu": 0.462}, "flops_convention": "full attention",
}  # fmt: skip


def test_an_axis_of_twelve():
    """48 heads and 73,728 features divide by it; the vocabulary is padded, and 2,048 tokens stay whole."""
    run = run_of(PALM)
    assert run.mesh == (("data", 2), ("fsdp", 256), ("tensor", 12))
    assert run.slice.torus_shape == (12, 16, 16)
    config, mesh = config_of(run), mtf.Mesh("data:2;fsdp:256;tensor:12")
    assert config.vocab % 12 == 0
    rules = layout_of(run, config, mesh)
    assert not any(r.dim == "length" for r in rules.rules)
    assert lowered(run, training=False).mesh == mesh
