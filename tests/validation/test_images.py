"""Published runs of residual networks: what is read of a row, what it leaves open, how well it is predicted."""

from __future__ import annotations

import statistics
from itertools import combinations

import pytest

import meshlib as mtf
from meshlib.command import main
from meshlib.estimation.time.physics import CALIBRATED
from meshlib.validation import image_training
from meshlib.validation.hosts import Host, fitted_host, host_of, table_of
from meshlib.validation.image_training import prepare_images
from meshlib.validation.images import image_run_of, is_of_images
from meshlib.validation.runs import ROWS
from meshlib.validation.talks import (
    DETECTION_PIXELS,
    IMAGENET_PIXELS,
    Duration,
    Epochs,
    Speed,
    Talks,
    epochs,
    talk_host,
)
from meshlib.validation.validating import check_row, percentile, validate
from tests.effort import deep
from tests.validation.rows import BY_NAME

RESNETS = [r for r in ROWS if is_of_images(r) and r["kind"] != "talk" and "ResNet" in r["model"]["name"]]
EPOCHS = [r for r in ROWS if r["id"].startswith("talk-rn50")]


@pytest.mark.parametrize(
    ("name", "batch", "cores", "steps", "evaluated"),
    [  # batch and steps as in run_and_time.sh of these submissions: 1252 and 157 steps, groups of 1, 1, 8, 1 and 4
        ("mlp-v0.6-resnet-tpu-v3-32", 4096, 1, 1252, 50_000),
        ("mlp-v0.6-resnet-tpu-v3-512", 32768, 1, 157, 50_000),
        ("mlp-v0.7-resnet-v3-8192-TF", 65536, 8, 79, 50_000),
        ("mlp-v0.7-resnet-tpu-v4-128-TF", 8192, 1, 626, 50_000),
        ("mlp-v1.0-resnet-tpu-v4-4096-TF", 32768, 4, 157, 50_000),
        ("mlp-v0.5-resnet-v2-8", 1024, 1, 5005, 0),
        ("mlp-v0.5-resnet-v3-512", 32768, 1, 157, 0),
        ("ext-resnet-v3-512", 32768, 1, 1, 0),
        ("talk-rn50-1", 256, 2, 450411, 0),
    ],
)
def test_what_a_row_says(name, batch, cores, steps, evaluated):
    run = image_run_of(BY_NAME[name])
    assert (run.batch, run.norm_cores, run.steps, run.evaluated) == (batch, cores, steps, evaluated)
    replicas, each = run.dims
    assert replicas.size * each.size == batch
    assert run.config.name == ("resnet-50-v2" if name.startswith("talk") else "resnet-50")


def test_at_least_ten_of_twelve_rows_are_expressed():
    """The rows of ResNet-50 in the file that this project started with: 9, and 3 of a talk."""
    asked = [*RESNETS, *(BY_NAME[f"talk-rn50-{n}"] for n in ("1", "16", "64-8k"))]
    assert len(asked) == 12
    assert sum(not check_row(row).why_not for row in asked) >= 10


@pytest.mark.skipif(not deep(), reason="all rows take a minute: --hypothesis-profile=deep")
def test_runs_are_within_the_targets():
    runs = [image_run_of(row) for row in RESNETS]
    errors = [abs(prepare_images(run).seconds(CALIBRATED) / run.measured_seconds - 1) for run in runs]
    assert statistics.median(errors) <= 0.08
    assert percentile(errors, 0.9) <= 0.2


def test_a_network_that_no_row_has_is_predicted_too():
    row = {"id": "x", "kind": "mine", "chip": "v3", "n_chips": 4, "slice": {"topology": "2x2"}, "precision": "bf16",
           "model": {"name": "ResNet-18", "arch": "CNN", "image": 64}, "layout": {"data": 8},
           "batch": {"global_examples": 500}, "measured": {"images_per_s": 20000}}  # fmt: skip
    found = check_row(row)
    assert (found.why_not, found.images.batch, found.images.measured_seconds) == ("", 504, 500 / 20000)
    assert "500 images padded to 504" in found.images.assumed
    seconds = [prepare_images(image_run_of({**row, "id": name})).seconds(CALIBRATED) for name in ("x", "y")]
    # 504 images of 0.15 G multiply-adds, three times, on eight cores of 61.5 TFLOP/s: at least 0.9 ms.
    assert seconds[0] == seconds[1]
    assert 0.9e-3 < seconds[0] < 20e-3


SMALL = {"id": "small", "kind": "mine", "chip": "v3", "n_chips": 16, "slice": {"topology": "4x4"}, "precision": "bf16",
         "model": {"name": "ResNet-18", "arch": "CNN", "image": 64}, "layout": {"data": 32},
         "batch": {"global_examples": 1024}, "measured": {"images_per_s": 20000}}  # fmt: skip


@pytest.mark.parametrize(
    "row", [SMALL, *(r for r in RESNETS + EPOCHS if deep() and not check_row(r).why_not)], ids=lambda row: row["id"]
)
def test_more_replicas_run_the_same_program(monkeypatch, row):
    """Against a program lowered for all replicas of the run, which may issue sums of gradients in another order."""
    shared = prepare_images(image_run_of(row))
    monkeypatch.setattr(image_training, "REPLICAS_LOWERED", 1 << 20)
    image_training._estimated.cache_clear()
    own = prepare_images(image_run_of(row))
    assert own.step is not shared.step
    for est, other in ((shared.step, own.step), (shared.evaluation, own.evaluation)):
        if est is not None:
            assert est.step_seconds == pytest.approx(other.step_seconds, rel=2e-3)
            assert est.useful_flops == other.useful_flops
            assert est.memory.peak_bytes == other.memory.peak_bytes


ROW = BY_NAME["mlp-v0.6-resnet-tpu-v3-32"]


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ({**ROW, "model": {"name": "EfficientNet", "arch": "CNN"}}, "no model such as 'EfficientNet'"),
        ({**ROW, "model": {"name": "BigGAN", "image": 512}}, "`meshlib validate --talks` compares its whole duration"),
        ({**ROW, "layout": {"spatial": 4, "data": 8}}, "axis 'spatial' of its layout"),
        ({**ROW, "layout": {"data": 64}}, "does not make 32 devices"),
        (
            {**ROW, "batch": {}, "n_chips": 8, "slice": {"topology": "2x4"}, "layout": {"data": 16}},
            "its batch is not stated",
        ),
        ({**ROW, "batch": {"global_examples": 0.5}}, "no whole number of images"),
        ({**ROW, "measured": {}, "derived": {}}, "no time of steps"),
        ({**ROW, "derived": {}}, "not what a block is"),
        ({**ROW, "precision": "int8"}, "no rows in eight bits"),
        ({**ROW, "model": {**ROW["model"], "image": 12.5}}, "12.5 wide"),
        (BY_NAME["talk-rn50-64-growing"], "its batch grows"),
        (BY_NAME["mlp-v1.0-unet3d-tpu-v4-128-JAX"], "3D U-Net"),
    ],
)
def test_rows_that_make_no_program_say_why(row, why):
    assert why in check_row(row).why_not


# ------------------------------------------------------------------ hosts and talks


def test_the_other_runs_of_a_table_say_what_a_host_takes():
    """A host that all runs agree on is found from any six of the seven; a run says nothing about itself.

    Runs with as many images per host and step cannot tell the rate of a host from the start of a step.
    """
    table = [dict(row) for row in table_of(BY_NAME["talk-rn50-1"])]
    assert len(table) == 7
    for row in table:
        steps, hosts = 115305030 / row["batch"]["global_examples"], row["n_chips"] // 4
        row["measured"] = {"minutes_90_epochs": (30 + steps * 0.05 + 115305030 / hosts / 2000) / 60}
    for runs in combinations(table, 6):
        host = fitted_host(runs)
        assert (host.examples_per_second, host.start_seconds, host.run_seconds) == pytest.approx((2000, 0.05, 30))
    assert fitted_host([row for row in table if row["batch"]["global_examples"] == 64 * row["n_chips"]]) is None
    for row in EPOCHS:
        if row["batch"]["global_examples"]:
            host, (why,), apart = host_of(row)
            assert host == fitted_host([other for other in table_of(row) if other["id"] != row["id"]])
            assert ("other 6 rows" in why, apart) == (True, "")
    assert host_of(ROW) == (None, (), "")


def test_a_host_hides_the_chips_or_is_hidden():
    host = Host(1000.0, 0.01)
    assert host.step_seconds(0.5, 100) == pytest.approx(0.51)
    assert host.step_seconds(0.05, 100) == pytest.approx(0.11)


@pytest.mark.skipif(not deep(), reason="seven programs take half a minute: --hypothesis-profile=deep")
def test_the_curve_of_epochs_has_the_shape_of_the_talk():
    found = epochs(EPOCHS)
    assert len(found) == 7
    for e in found:
        assert e.minutes == pytest.approx(e.stated_minutes, rel=0.03)
        assert e.step_seconds > e.device_seconds
        assert e.usd == pytest.approx(e.minutes / 60 * 4 * e.devices * 1.125)


def test_the_tables_of_the_talks():
    given = Talks(
        talk_host(),
        (Epochs(1, 256, 1402, 1427.2, 0.063, 0.19, 107.0), Epochs(64, 16384, 22.3, 22.3, 0.063, 0.19, None)),
        (),
        (Speed(256, (1000.0, 2000.0), (1000.0, 1100.0)),),
        (Duration("BigGAN", "v3-512", 24, 48, 30.0, None, "assumed"),),
    )
    text = str(given)
    for part in ("+1.8%", "256 px", "2.00", "1.10", "24 to 48 h", "30.0 h", "2,003 images/s"):
        assert part in text


@pytest.mark.skipif(not deep(), reason="RetinaNet at two sizes takes 20 seconds: --hypothesis-profile=deep")
def test_v3_gains_on_v2_as_images_grow():
    from meshlib.validation.talks import detectors

    small, large = detectors((256, 640), talk_host())
    for pick in ("chips", "fed"):
        ratios = [getattr(s, pick)[1] / getattr(s, pick)[0] for s in (small, large)]
        assert ratios[0] < ratios[1]
    assert small.fed[1] / small.fed[0] < 1.4
    assert 1.7 < large.fed[1] / large.fed[0] < 2.2
    assert small.fed[1] <= talk_host().examples_per_second * IMAGENET_PIXELS / DETECTION_PIXELS * 1.0001


def test_the_command_refuses_a_file_with_the_talks(capsys):
    assert main(["validate", "--talks", "--refit"]) == 2
    assert "leave out --file and --refit" in capsys.readouterr().err


def test_image_rows_are_not_fitted_to(tmp_path):
    """A file of one run of a residual network is reported apart from Transformers, and moves no constant."""
    import json

    row = {"id": "x", "chip": "v3", "n_chips": 4, "slice": {"topology": "2x2"}, "layout": {"data": 8},
           "model": {"name": "ResNet-18", "arch": "CNN", "image": 32}, "batch": {"global_examples": 256},
           "measured": {"step_time_ms": 1.0}}  # fmt: skip
    # The program of the test above.
    row |= {"batch": {"global_examples": 504}, "model": {"name": "ResNet-18", "arch": "CNN", "image": 64}}
    file = tmp_path / "rows.json"
    file.write_text(json.dumps([row]))
    found = validate(file, refit=True)
    assert (len(found.images), len(found.training), found.physics) == (1, 0, CALIBRATED)
    assert "residual networks, by the constants above" in str(found)
    assert mtf.Physics() == CALIBRATED
