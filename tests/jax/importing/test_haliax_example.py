"""The example that plans a Haliax model: its numbers are JAX's, its config decides, its mistakes are named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import meshlib as mtf
from examples.plans import plan_haliax
from tests.jax.importing.checks import compared

pytest.importorskip("haliax", exc_type=ImportError)
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:`equinox.static_field`:UserWarning")
SMALL = {
    "model": {
        "seq_len": 8, "hidden_dim": 16, "intermediate_dim": 32, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2,
        "vocab_size": 64,
    },
    "trainer": {"train_batch_size": 8, "mp": "f32"},
}  # fmt: skip


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "run.json"
    path.write_text(json.dumps(SMALL))
    return path


def filled(tree: Any) -> Any:
    """Random arrays of the shapes of a tree; whole numbers below 64."""
    import jax

    random = np.random.default_rng(0)
    return jax.tree.map(
        lambda x: (
            random.integers(0, 64, x.shape, np.int32)
            if np.issubdtype(x.dtype, np.integer)
            else random.normal(0, 0.3, x.shape).astype(np.float32)
        ),
        tree,
    )


def test_loss_and_gradients_are_those_of_jax(config: Path) -> None:
    arguments, loss = plan_haliax.loss_of(plan_haliax.configured(config))
    compared(
        loss,
        *filled(arguments),
        layouts=[("data:2;model:2", "batch:data;mlp:model;kv_head:model;variables/embed:data")],
    )


def test_the_config_decides(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sent = []
    for width in (1, 4):
        run = {**SMALL, "trainer": {**SMALL["trainer"], "model_axis_size": width, "mp": "p=f32,c=bfloat16"}}
        run["trainer"]["tensor_parallel_axes"] = ["mlp"]
        config.write_text(json.dumps(run))
        program = plan_haliax.plan(plan_haliax.configured(config), "v5e-8")
        sent.append({axis for c in program.collectives for axis in c.axes})
    assert sent == [{"data"}, {"data", "model"}]
    assert "mesh data:2;model:4, layout batch:data;variables/embed:data;mlp:model" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"trainer": {"model_axis_size": 3}}, "model_axis_size 3 does not divide 8 devices"),
        ({"trainer": {"mp": "p=f33"}}, "mp: no dtype 'f33' in 'p=f33'; there are f32, float32, bf16, bfloat16"),
        ({"trainer": {"batch": 8}}, "no trainer.batch; there are train_batch_size"),
        ({"train": {}}, "no part 'train'; there are model, trainer, optimizer"),
    ],
    ids=["axis", "dtype", "key", "part"],
)
def test_mistakes(change: dict[str, Any], message: str, config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config.write_text(json.dumps(change))
    assert plan_haliax.main(["--config", str(config), "--slice", "v5e-8"]) == 2
    assert message in capsys.readouterr().err


def test_its_dims_have_the_names_of_haliax(config: Path) -> None:
    graph = plan_haliax.imported(plan_haliax.configured(config))
    dims = {d.name for x in graph.trainable_variables for d in x.shape}
    assert dims == {"embed", "mlp", "layers", "kv_head", "q_heads_per_group", "head_size", "vocab"}
    assert isinstance(graph, mtf.Graph)
