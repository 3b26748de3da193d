"""Published rows of MaxText, from the command lines that were run: the same program as the rows written by hand.

`OLD` has the facts of base.yml of January 2024, which the tables of v4, v5e and v5p are of; the command lines are those
of MaxText/configs/{v4,v5e,v5p}/*.sh then, and of AI-Hypercomputer/tpu-recipes for v6e. What a row says and its command
line does not, or the other way round, stands beside it.
"""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("yaml")

import meshlib as mtf
from meshlib.models import read_maxtext
from meshlib.models.maxtext.settings import parsed
from meshlib.validation.published import ROWS
from meshlib.validation.runs import run_of
from meshlib.validation.training import prepare
from tests.effort import some

OLD = """
base_emb_dim: 2560
base_num_query_heads: 8
base_num_kv_heads: 8
base_mlp_dim: 8192
base_num_decoder_layers: 16
head_dim: 256
mlp_activations: ["relu"]
vocab_size: 32_768
logits_via_embedding: true
normalize_embedding_logits: false
"""
MODELS = {
    "llama2-70b": "base_emb_dim: 8192\nbase_num_query_heads: 64\nbase_num_kv_heads: 8\nbase_mlp_dim: 28672\n"
    "base_num_decoder_layers: 80\nvocab_size: 32000\nhead_dim: 128\n",
    "llama3.1-70b": "base_emb_dim: 8192\nbase_num_query_heads: 64\nbase_num_kv_heads: 8\nbase_mlp_dim: 28672\n"
    "base_num_decoder_layers: 80\nvocab_size: 128256\nhead_dim: 128\n",
    "mixtral-8x7b": "base_emb_dim: 4096\nbase_num_query_heads: 32\nbase_num_kv_heads: 8\nbase_mlp_dim: 14336\n"
    "base_moe_mlp_dim: 14336\nbase_num_decoder_layers: 32\nvocab_size: 32000\nnum_experts: 8\nhead_dim: 128\n"
    "num_experts_per_tok: 2\ndecoder_block: mixtral\n",
}
HOST = "remat_policy=custom decoder_layer_input=offload query_proj=offload key_proj=offload value_proj=offload"
LINES = {
    "mt-v5e-16b-1x": "global_parameter_scale=16 per_device_batch_size=6 remat_policy=full",
    "mt-v5e-32b-2x": "global_parameter_scale=32 per_device_batch_size=4 remat_policy=full",
    "mt-v5e-128b-1x": "global_parameter_scale=128 per_device_batch_size=1 ici_fsdp_parallelism=16 "
    "ici_tensor_parallelism=16",
    "mt-v5p-32b-1x128": "global_parameter_scale=32 per_device_batch_size=8 remat_policy=minimal "
    "ici_tensor_parallelism=4",
    "mt-v5p-128b-1x256": "global_parameter_scale=128 per_device_batch_size=2 remat_policy=minimal "
    "ici_tensor_parallelism=8",
    "mt-v5p-512b-1x1024": "global_parameter_scale=512 per_device_batch_size=2 ici_tensor_parallelism=16",
    "mt-v4-22b-1x": "base_emb_dim=6144 base_num_kv_heads=24 base_num_query_heads=24 base_mlp_dim=24576 "
    "base_num_decoder_layers=48 per_device_batch_size=16 attention=dot_product",
    "rc-v6e-llama2-70b": "model_name=llama2-70b per_device_batch_size=2 max_target_length=4096 "
    "remat_policy=qkv_proj_offloaded ici_fsdp_parallelism=1 ici_fsdp_transpose_parallelism=-1",
    "rc-v6e-llama3.1-70b-256": f"model_name=llama3.1-70b per_device_batch_size=5 max_target_length=8192 {HOST}",
    "rc-v6e-mixtral-8x7b": "model_name=mixtral-8x7b per_device_batch_size=12 max_target_length=4096 megablox=false "
    f"sparse_matmul=false capacity_factor=1.25 {HOST} out_proj=offload",
    "td-v5p-llama2-70b": "model_name=llama2-70b per_device_batch_size=4 max_target_length=4096 "
    "remat_policy=save_dot_except_mlpwi",
}
BY_NAME = {str(row.get("id")): row for row in ROWS}
CLOSE = 0.01  # of a step: MaxText's rules split activations by features, the rows by positions


@pytest.mark.parametrize("name", some([*LINES], ["mt-v5e-16b-1x"]))
def test_rows_are_those_of_their_command_lines(tmp_path: Path, name: str) -> None:
    file = tmp_path / "base.yml"
    file.write_text("steps: 15\n" if "model_name" in LINES[name] else OLD)
    (tmp_path / "models").mkdir()
    for model, text in MODELS.items():
        (tmp_path / "models" / f"{model}.yml").write_text(text)
    run = read_maxtext(file, parsed(LINES[name].split()))
    row = run_of(BY_NAME[name])
    by_hand = prepare(row).step
    est = mtf.estimate(run.program(row.slice), row.slice, placement=run.placement(row.slice))
    assert run.batch(row.slice) == row.batch
    assert run.config.layers == row.model["layers"]
    assert est.fits == by_hand.fits
    assert est.step_seconds == pytest.approx(by_hand.step_seconds, rel=CLOSE)
    assert est.memory.peak_bytes == pytest.approx(by_hand.memory.peak_bytes, rel=0.02)
