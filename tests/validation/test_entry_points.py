"""What `validate` prints is what `mtf.lower` and `mtf.estimate` say with defaults and what a row states."""

from __future__ import annotations

import ast
from dataclasses import replace
from pathlib import Path

import pytest

import meshlib as mtf
import meshlib.validation
from meshlib.estimation import CALIBRATED
from meshlib.validation.image_training import prepare_images
from meshlib.validation.images import image_run_of, is_of_images
from meshlib.validation.runs import ROWS, Run
from meshlib.validation.training import config_of, layout_of, prepare, remat_of
from meshlib.validation.validating import check_row
from tests.effort import some
from tests.validation.rows import BY_NAME

PRIVATE = ("meshlib.estimation.", "meshlib.lowering.", "meshlib.program.", "meshlib.searching.")
SAMPLE = ("mt-v5e-16b-4x", "iw-llama70b-64-fp8")


def test_validation_imports_no_part_of_lowering_or_estimates() -> None:
    """Records for annotations aside, only public entry points."""
    for file in Path(meshlib.validation.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module:
                assert not f"{node.module}.".startswith(PRIVATE) or node.module in (
                    "meshlib.estimation", "meshlib.lowering", "meshlib.program.records",
                    "meshlib.searching.arrivals", "meshlib.searching.serving",  # homes of mtf.Arrivals and mtf.serving
                ), (file.name, node.module)  # fmt: skip


def row_sums(run: Run) -> str:
    """MaxText's `use_custom_sort_vjp`, which recipes of Mixtral and Llama 4 did not set."""
    if run.experts is None or run.experts.form != "grouped":
        return "scatter"
    return "scatter 2025" if run.chip == "v5p" and "deepseek" not in run.model["name"] else "scatter"


def stated(run: Run) -> mtf.Compiler:
    """The default compiler with what a row says of its software."""
    return replace(
        mtf.XLA_TPU,
        unrolled_loops=run.encoder,
        rounding_noise_bytes=4 if run.precision == "int8" else 0,
        row_sums=row_sums(run),
        bias_lookups="gpt-oss" in run.name or "gptoss" in run.name,
        torus_sums=run.name in ("rc-v5p-llama4-scout", "rc-v5p-llama3.1-405b", "rc-v5p-dsv3"),
    )


@pytest.mark.parametrize("name", some([r["id"] for r in ROWS], SAMPLE))
def test_runs_are_predicted_by_the_public_functions(name: str) -> None:
    run = check_row(BY_NAME[name]).run
    if run is None:
        pytest.skip(f"{name} is not a training run of a Transformer that can be expressed")
    config, mesh = config_of(run), mtf.Mesh(dict(run.mesh))
    with mtf.Graph():
        adamw = mtf.optimize.AdamWOptimizer(1e-3, slot_dtype=run.state_dtype, master_dtype=run.state_dtype)
        outputs, updates = mtf.models.train_step(
            config, run.padded_batch, run.length, adamw, remat_of(run, config), predictions=run.predictions
        )
        program = mtf.lower(outputs, updates, mesh, layout_of(run, config, mesh))
    est = mtf.estimate(program, run.slice, stated(run), dict(run.across) or None)
    predicted = prepare(run)
    assert predicted.step.step_seconds == pytest.approx(est.step_seconds, rel=1e-9)
    if predicted.evaluation is None:
        assert predicted.seconds(CALIBRATED) == pytest.approx(run.steps * est.step_seconds, rel=1e-9)


@pytest.mark.parametrize("name", some([r["id"] for r in ROWS if is_of_images(r)], ()))
def test_networks_of_images_are_predicted_by_the_public_functions(name: str) -> None:
    images = check_row(BY_NAME[name]).images
    if images is None:
        pytest.skip(f"{name} is not a training run of a residual network that can be expressed")
    run = replace(image_run_of(BY_NAME[name]), host=None)
    prepared = prepare_images(run)
    again = mtf.estimate(prepared.step.program, run.slice)
    assert prepared.step.step_seconds == again.step_seconds
    assert prepared.step.compiler == mtf.XLA_TPU


def test_constants_are_exchanged_without_lowering_again() -> None:
    run = check_row(BY_NAME["mt-v5e-16b-4x"]).run
    assert run is not None
    est = prepare(run).step
    other = replace(CALIBRATED, product_rate=0.7, slice_jitter=0.05, early_exposed=0.3)
    again = mtf.estimate(est.program, run.slice, placement=dict(run.across) or None, physics=other)
    assert est.with_physics(other).step_seconds == again.step_seconds != est.step_seconds
    assert est.with_physics(est.physics) is est
    with pytest.raises(mtf.GraphError, match=r"physics must be an mtf\.Physics, got 3"):
        est.with_physics(3)  # type: ignore[arg-type]
