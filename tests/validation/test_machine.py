"""What rows say of machine, layout and rates in other words than the published set: all of it is read."""

from __future__ import annotations

import pytest

import meshlib as mtf
from hardware import CHIPS, Slice
from hardware.placement import DCN
from meshlib.validation.machine import slice_of
from meshlib.validation.measured import flops_per_token, local_layers, parameters
from meshlib.validation.policies import NotExpressed
from meshlib.validation.runs import run_of
from meshlib.validation.training import config_of, lowered
from meshlib.validation.validating import check_row
from tests.effort import each
from tests.validation.rows import TRAINING

ROW = next(row for row in TRAINING if row["id"] == "mt-v5e-16b-1x")
SLICES = {**ROW, "n_chips": 1024, "n_slices": 4}


@pytest.mark.parametrize(
    ("layout", "mesh", "across"),
    [
        ({"ici_fsdp": -1}, (("slices", 4), ("fsdp", 256)), (("slices", 4),)),
        ({"ici_fsdp": -1, "dcn_data": -1}, (("slices", 4), ("fsdp", 256)), (("slices", 4),)),
        ({"ici_fsdp": 256.0, "dcn_fsdp": "4"}, (("fsdp", 1024),), (("fsdp", 4),)),
        ({"ici_fsdp": 64, "ici_tensor": 4, "dcn_fsdp": 4}, (("fsdp", 256), ("tensor", 4)), (("fsdp", 4),)),
        ({"fsdp": 1024}, (("fsdp", 1024),), ()),
        ("FSDP in slice", (("slices", 4), ("fsdp", 256)), (("slices", 4),)),
    ],
)
def test_layouts_over_slices(layout, mesh, across):
    run = run_of({**SLICES, "layout": layout, "batch": {"global_sequences": 6144, "seq": 2048}})
    assert (run.mesh, run.across) == (mesh, across)


@pytest.mark.parametrize(
    ("layout", "why"),
    [
        ({"ici_fsdp": -1, "ici_tensor": -1}, "does not make 256 devices"),
        ({"ici_fsdp": 64, "ici_pipeline": 4}, "axis 'ici_pipeline' of its layout has no counterpart"),
        ("tensor parallel", "not stated: tensor parallel"),
        ({}, "layout is not stated"),
    ],
)
def test_layouts_without_a_counterpart(layout, why):
    with pytest.raises(NotExpressed, match=why):
        run_of({**ROW, "layout": layout})


def test_slices_are_joined_by_the_axis_that_the_row_names():
    """On 16 x 16 chips no way to lay 64 x 4 takes whole torus axes: tensor parallelism must not leave the slice."""
    layout = {"ici_fsdp": 64, "ici_tensor": 4, "dcn_data": 4}
    run = run_of({**SLICES, "layout": layout, "batch": {"per_device_batch_size": 2, "seq": 2048}})
    placement = mtf.estimate(lowered(run, training=False), run.slice, placement=dict(run.across)).placement
    assert {axis for axis, factors in placement.factors for f in factors if f.place == DCN} == {"slices"}


@pytest.mark.parametrize(
    "changes",
    [
        {"slice": {"topology": [16, 16]}},
        {"slice": "16x16"},
        {"n_chips": None, "n_cores": 256},
        {"n_chips": None},
        {"n_slices": None},
        {"chip": "v5litepod"},
    ],
)
def test_the_same_machine_in_other_words(changes):
    run = run_of({**ROW, **changes})
    assert run.slice.name == "v5e-16x16"
    assert run.assumed == ()


def test_a_number_of_slices_follows_from_the_layout():
    row = {**ROW, "n_chips": 512, "n_slices": None, "layout": {"ici_fsdp": 256, "dcn_data": 2}}
    assert run_of(row).slice == Slice("2*v5e-16x16")


@pytest.mark.parametrize(
    ("given", "convention", "share"),
    [
        # Of 6 P + 6 L d S causal: in full counts 6 L d S more, S = 2048.
        ({"tflops_per_s_per_chip": 120}, "causal-halved attention", 1.0),
        ({"tflops_per_s_per_chip": 120}, "causal attention halved (checked: 70B row = 6N + 6LHdS)", 1.0),
        ({"tflops_per_s_per_chip": 120}, "non-causal attention counted in full (pre PR#1988)", None),
        ({"mfu": 120 / 197}, "causal-halved attention", 1.0),
        ({"mfu": 120 / 197}, None, None),
    ],
)
def test_seconds_follow_from_rates(given, convention, share):
    run = run_of({**ROW, "measured": given, "derived": {}, "flops_convention": convention})
    causal = 6 * 32 * 32 * 256 * 2048
    weights = 6 * parameters(run.model)
    counted = weights + causal * (1 if share else 2)
    assert run.measured_seconds == pytest.approx(counted * 12288 / 120e12, rel=1e-9)
    assert bool(run.assumed) == (convention is None)


def test_other_rates():
    for key, rate in (("tokens_per_s", 256 * 12288 / 9), ("sequences_per_s", 1536 / 9), ("steps_per_s", 1 / 9)):
        assert run_of({**ROW, "derived": {}, "measured": {key: rate}}).measured_seconds == pytest.approx(9)


def test_windows_in_other_words():
    model = {"layers": 6, "d_model": 8, "q_heads": 1, "head_dim": 8, "d_ff": 8, "vocab": 8, "local_window": 16}
    for pattern, count in (("5 local : 1 global", 5), ("5:1", 5), (5, 5), ("alternating", 1), (None, 1)):
        assert local_layers(model | {"pattern": pattern}) == count
    # Five layers see 16 tokens each, one half of 1024.
    seen = flops_per_token(model | {"pattern": 5}, 1024, "windows") - 6 * parameters(model)
    assert seen == 12 * 6 * 8 * (5 * 16 + 512) / 6


def test_what_is_published_of_a_model_completes_a_row():
    full = run_of({**ROW, "model": {"name": "llama3.1-8b"}})
    assert (full.model["d_ff"], full.model["mlp_matrices"], full.model["kv_heads"]) == (14336, 3, 8)
    assert full.assumed == ("layers, d_model, q_heads, head_dim, d_ff, vocab as published of llama3.1-8b",)
    other = {k: v for k, v in ROW["model"].items() if k != "head_dim"} | {"q_heads": 20}
    assert run_of({**ROW, "model": other}).model["head_dim"] == 256
    with pytest.raises(NotExpressed, match="whole number of at least 1, not -3"):
        run_of({**ROW, "model": ROW["model"] | {"layers": -3}})


def test_batches():
    padded = run_of({**ROW, "batch": {"global_examples": 1500, "seq": 2048}})
    assert (padded.batch, padded.padded_batch) == (1500, 1536)
    assert "1500 sequences padded to 1536" in padded.assumed
    assert run_of({**ROW, "batch": {"tokens": 3145728, "seq": 2048}}).batch == 1536
    refused = [
        ({"per_device_batch_size": 0.5}, "128 sequences do not divide over 256"),
        ({"per_device_batch_size": 0.001}, "no whole number"),
        ({"tokens": 100}, "no whole number"),
    ]
    for batch, why in refused:
        with pytest.raises(NotExpressed, match=why):
            run_of({**ROW, "batch": batch | {"seq": 2048}})


def test_float32_is_no_quantisation():
    run = run_of({**ROW, "precision": "float32 weights & activations"})
    assert (run.precision, run.eight_bit, config_of(run).numerics.activation_dtype) == ("float32", False, "float32")
    assert run_of({**ROW, "precision": "bf16 (fp32 weights)"}).precision == "bf16"


JUNK = (None, "x", -1, 0, [], {}, [1, 2], {"a": 1}, float("nan"))


@each("key, junk", [(key, junk) for key in ROW if key not in ("id", "source") for junk in JUNK])
def test_no_row_stops_the_others(key, junk):
    check_row({**ROW, key: junk})


def test_a_whole_pod_in_words():
    row = {"n_chips": 1024, "slice": {"topology": "full pod"}}
    found, assumed = slice_of(row, CHIPS["v3"])
    assert (found.torus_shape, assumed) == ((32, 32), ())


@pytest.mark.parametrize(("chips", "slices"), [(2**64, 1), (1e300, 1), (10**9 + 7, 1), (-4, 1), (64, -2), (63, 2)])
def test_no_machine_has_such_chips(chips, slices):
    """Some of them have too many boxes to go through."""
    with pytest.raises(NotExpressed, match=rf"chips make no {slices} equal slices; a machine has 1 to 1,000,000,000"):
        slice_of({"n_chips": chips, "n_slices": slices}, CHIPS["v4"])


def test_a_box_of_a_large_prime():
    assert slice_of({"n_chips": 999_999_937}, CHIPS["v5e"])[0].torus_shape == (1, 999_999_937)
