"""A whole run: counts, sums, and a published run of GPT-3 with its evaluations."""

from __future__ import annotations

from dataclasses import replace

import pytest

import meshlib as mtf
from hardware import Slice
from hardware.goodput import best_segment_seconds, segment_seconds, waiting_share
from tests.effort import deep

D = mtf.Dimension


def estimated(batch: int = 64, fed: mtf.HostInput | None = None, training: bool = True) -> mtf.Estimate:
    with mtf.Graph():
        x = mtf.input("x", [D("batch", batch), D("length", 128), D("d", 256)], "bfloat16")
        y = mtf.einsum([x, mtf.variable("w", [D("d", 256), D("f", 512)], dtype="bfloat16")], reduced_dims=[D("d", 256)])
        loss = mtf.reduce_mean(mtf.square(y))
        updates = mtf.optimize.SgdOptimizer(0.1).minimize(loss) if training else []
        program = mtf.lower({"loss": loss}, updates, mesh="data:8", layout="batch:data")
    return mtf.estimate(program, "v3-8", input=fed)


def test_steps_follow_from_tokens_and_epochs() -> None:
    est = estimated()
    assert est.run(tokens=1e6).steps == -(-1_000_000 // (64 * 128))
    assert est.run(epochs=3, examples=1000).steps == -(-3000 // 64)
    assert est.run(epochs=0.5, examples=1280).steps == 10
    run = est.run(100)
    assert (run.steps, run.examples, run.tokens) == (100, 64, 64 * 128)
    assert run.seconds == pytest.approx(100 * est.step_seconds)
    assert run.usd == pytest.approx(est.usd(100))
    assert run.hours * 3600 == pytest.approx(run.seconds)


def test_evaluations_input_and_checkpoints_add_up() -> None:
    fed = mtf.HostInput(examples_per_second=1000)
    est, evaluation = estimated(fed=fed), estimated(32, fed, training=False)
    assert est.input_wait_seconds > 0
    run = est.run(
        1000, evaluation=evaluation, evaluation_examples=100, evaluate_every=300, checkpoint_every=500,
        checkpoint_seconds=2.0, start_seconds=30,
    )  # fmt: skip
    hosts = est.slice.hosts
    assert (run.evaluations, run.checkpoints) == (4, 2)
    assert run.training_seconds == pytest.approx(1000 * 64 / (1000 * hosts))  # the hosts bound it
    assert run.input_wait_seconds == pytest.approx(run.training_seconds - 1000 * est.device_seconds)
    assert run.evaluation_seconds == pytest.approx(4 * 4 * 32 / (1000 * hosts))
    assert run.seconds == pytest.approx(30 + run.training_seconds + run.evaluation_seconds + 4.0)
    text = str(run)
    for shown in (
        "1,000 steps of 8.192 k tokens",
        "waits for input",
        "start",
        "evaluations",
        "checkpoints",
        "at list price",
    ):
        assert shown in text
    assert run.as_json()["seconds_modelled"] == run.seconds


def test_a_published_run_of_gpt3_with_its_evaluations() -> None:
    """mlcommons/training_results_v4.0, cloud-tpu-v5p-1024-maxtext: 23 blocks of 12 steps and an evaluation of 24,567
    sequences; 114.794 minutes to train, the median of three."""
    if not deep():
        pytest.skip("a run of 175 billion parameters: with --hypothesis-profile=deep")
    config = mtf.models.preset("maxtext-16b").replace(
        name="gpt3", layers=96, d_model=12_288, heads=96, head_dim=128, d_ff=49_152, vocab=50_304,
        numerics=mtf.Numerics(activation_dtype="bfloat16", precision="int8"),
    )  # fmt: skip
    mesh = "fsdp:64;tensor:8"
    rules = mtf.models.layout("fsdp+sequence", config, mesh)
    made = []
    for training in (True, False):
        with mtf.Graph():
            if training:
                program = mtf.lower(*mtf.models.train_step(config, 2048, 2048), mesh=mesh, layout=rules)
            else:
                loss = mtf.models.transformer(config, 2048, 2048).loss
                program = mtf.lower({"loss": loss}, mesh=mesh, layout=rules)
        made.append(mtf.estimate(program, "v5p-1024"))
    step, evaluation = made
    run = step.run(23 * 12, evaluation=evaluation, evaluation_examples=24_567, evaluate_every=12)
    assert run.evaluations == 23
    assert run.seconds / 60 == pytest.approx(114.794, rel=0.25)
    assert 0.2 < run.evaluation_seconds / run.training_seconds < 0.5


def test_faults_are_named() -> None:
    est = estimated()
    with mtf.Graph():
        x = mtf.input("x", [D("rows", 64)])
        bare = mtf.estimate(mtf.lower({"y": mtf.exp(x)}, mesh="data:8", layout="rows:data"), "v3-8")
    for call, text in (
        (lambda: est.run(), r"by one of steps, epochs \(with examples\) or tokens; got \[\]"),
        (lambda: est.run(3, tokens=5), r"got \['steps', 'tokens'\]"),
        (lambda: est.run(epochs=3), "epochs and examples, those of one epoch, go together"),
        (lambda: est.run(1.5), "steps must be an integer, got float 1.5"),  # type: ignore[arg-type]
        (lambda: est.run(0), "steps must be at least 1, got 0"),
        (lambda: est.run(tokens=float("nan")), "tokens must be a finite number"),
        (lambda: est.run(3, evaluation=est), "evaluation and evaluation_examples go together"),
        (lambda: est.run(3, evaluate_every=2), "evaluate_every needs evaluation"),
        (lambda: est.run(3, evaluation=4, evaluation_examples=4), "evaluation must be an Estimate, got int"),  # type: ignore[arg-type]
        (
            lambda: est.run(3, evaluation=est, evaluation_examples=4, evaluate_every=0),
            "evaluate_every must be at least 1",
        ),
        (lambda: est.run(3, checkpoint_every=1, checkpoint_seconds=-1), "checkpoint_seconds must not be negative"),
        (lambda: bare.run(epochs=1, examples=10), "no input of the program has a dim 'batch' .its inputs: 'x'.; give"),
        (lambda: est.run(3, evaluation=bare, evaluation_examples=4), "no input of the evaluation has a dim 'batch'"),
    ):
        with pytest.raises(mtf.GraphError, match=text):
            call()
    assert bare.run(5).examples is None
    chip = replace(est.slice.chip, usd_per_chip_hour=None)
    free = mtf.estimate(est.program, Slice("v3-8", chip)).run(5)
    assert "list price" not in str(free)
    with pytest.raises(mtf.SliceError, match="no list price of v3-8"):
        _ = free.usd


# ---------------------------------------------------------------- failures


def test_failures_cost_what_segments_repeat() -> None:
    est = estimated()
    step = est.step_seconds
    plain = est.run(1000, checkpoint_every=100, checkpoint_seconds=5 * step)
    run = est.run(
        1000, checkpoint_every=100, checkpoint_seconds=5 * step, mean_time_between_failures=400 * step,
        restart_seconds=20 * step,
    )  # fmt: skip
    assert run.failures is not None
    want = 10 * segment_seconds(100 * step, 5 * step, 20 * step, 400 * step)
    assert run.seconds == pytest.approx(want)
    assert run.failures.lost_seconds == pytest.approx(want - plain.seconds)
    assert run.failures.count == pytest.approx(want / (400 * step))
    assert run.goodput == pytest.approx(1000 * step / want)
    assert plain.goodput == pytest.approx(1000 / 1050)
    assert "failures" in str(run)
    assert run.as_json()["goodput_modelled"] == run.goodput
    assert plain.as_json()["failures"] is None


def test_checkpoints_come_as_often_as_is_best() -> None:
    est = estimated()
    step = est.step_seconds
    options = {"checkpoint_seconds": 3 * step, "mean_time_between_failures": 500 * step, "restart_seconds": 10 * step}
    best = est.run(2000, **options)
    assert best.failures is not None
    every = best.failures.checkpoint_every
    assert best.failures.best_every == every
    assert every == pytest.approx(best_segment_seconds(3 * step, 500 * step) / step, rel=0.1)
    others = [est.run(2000, checkpoint_every=n, **options).seconds for n in (every // 2, every, every * 2)]
    assert best.seconds == pytest.approx(others[1])
    assert best.seconds <= min(others)


def test_spare_slices_save_waiting() -> None:
    est = estimated()
    runs = [
        est.run(
            100, checkpoint_every=10, mean_time_between_failures=3600, restart_seconds=1, repair_seconds=1800,
            spare_slices=spares,
        )
        for spares in (0, 1, 2)
    ]  # fmt: skip
    shares = [run.failures.waiting_seconds / run.seconds for run in runs if run.failures is not None]
    assert shares == pytest.approx([waiting_share(spares, 1800, 3600) for spares in (0, 1, 2)])
    assert runs[0].goodput < runs[1].goodput < runs[2].goodput


MEAN = {"mean_time_between_failures": 9, "checkpoint_every": 50}


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"restart_seconds": 3}, "restart_seconds needs mean_time_between_failures"),
        ({**MEAN, "mean_time_between_failures": 0}, "mean_time_between_failures must be positive, got 0"),
        ({"mean_time_between_failures": 9}, "needs checkpoints; give checkpoint_every, or checkpoint_seconds"),
        ({**MEAN, "spare_slices": 1}, "spare_slices needs repair_seconds"),
        ({**MEAN, "restart_seconds": -1}, "restart_seconds must be 0 or more"),
        ({**MEAN, "repair_seconds": 1, "spare_slices": -1}, "spare_slices must be at least 0"),
        ({**MEAN, "mean_time_between_failures": 1e-9}, "let no segment of"),
        ({**MEAN, "repair_seconds": 1e30, "spare_slices": 3}, "always waits for repair of more than 3 slices"),
        ({**MEAN, "repair_seconds": 1, "spare_slices": 10**9}, "spares must be at most 1,000,000"),
    ],
    ids=["alone", "mean", "checkpoints", "spares", "restart", "negative spares", "never ends", "waits", "many spares"],
)  # fmt: skip
def test_arguments_about_failures(options: dict[str, float], part: str) -> None:
    with pytest.raises(mtf.GraphError, match=part):
        estimated().run(100, **options)
