"""`meshlib plan base.yml KEY=VALUE ...`, `config.json`, and plans as something to run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("yaml")

import meshlib as mtf
from meshlib.command import main

TINY = [
    *("base_emb_dim=64", "base_num_query_heads=4", "base_num_kv_heads=4", "base_mlp_dim=128", "head_dim=16"),
    *("vocab_size=256", "base_num_decoder_layers=2", "max_target_length=64", "per_device_batch_size=4"),
]


def run(*typed: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    try:
        status = main(typed)
    except SystemExit as stop:
        status = int(str(stop.code))
    shown = capsys.readouterr()
    return status, shown.out, shown.err


@pytest.fixture
def base(tmp_path: Path) -> str:
    file = tmp_path / "base.yml"
    file.write_text("run_name: ''\n")
    return str(file)


def test_a_pasted_command_line_is_planned(base: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(
        "plan", base, *TINY, "--slice", "2*v5e-4", "ici_tensor_parallelism=4", "use_iota_embed=true", "steps=7",
        capsys=capsys,
    )  # fmt: skip
    assert status == 0
    assert "mesh       data:2;tensor:4" in out
    assert "32 sequences of 64 tokens" in out
    assert "not expressed: use_iota_embed=True" in out
    assert "steps" not in out.partition("\nnext:")[0]


def test_the_other_commands_take_configurations(base: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run("estimate", base, *TINY, "--slice", "v5e-16", "--rows", "3", capsys=capsys)
    assert status == 0
    assert "fsdp:16" in out


def test_remedies_are_said_as_keys(base: str, capsys: pytest.CaptureFixture[str]) -> None:
    wide = ["vocab_size=4096", "base_emb_dim=4096", "base_mlp_dim=65536", "head_dim=1024", "remat_policy=none"]
    typed = [text for text in TINY if text.partition("=")[0] not in {one.partition("=")[0] for one in wide}]
    _, out, _ = run("plan", base, *typed, *wide, "--slice", "v5e-1", capsys=capsys)
    text = " ".join(out.split())
    assert "DOES NOT FIT" in text
    assert "optimizer_memory_host_offload=true: saves about" in text


def test_other_overrides_are_compared_in_a_sentence(base: str, capsys: pytest.CaptureFixture[str]) -> None:
    changes = ("--", "remat_policy=minimal", "--", "per_device_batch_size=8")
    status, out, _ = run("compare", base, *TINY, "--slice", "v5e-16", "--json", *changes, capsys=capsys)
    assert status == 0
    told = json.loads(out)
    sentences = [other["sentence"] for other in told["others"]]
    assert sentences[0].startswith("remat_policy=minimal is ")
    assert "more memory" in sentences[0]
    before, after = told["first"]["step_seconds_modelled"], told["others"][1]["second"]["step_seconds_modelled"]
    assert f"{1 - after / 2 / before:.1%} faster*" in sentences[1]  # half a step of twice the tokens
    assert "for 4,096 tokens" in sentences[1]


def test_configurations_of_inference_are_served(base: str, capsys: pytest.CaptureFixture[str]) -> None:
    quantised = ("quantization=int8", "quantize_kvcache=true", "max_prefill_predict_length=16")
    own = ("ici_autoregressive_parallelism=2", "use_iota_embed=true")
    status, out, _ = run("serve", base, *TINY, *quantised, *own, "--slice", "v5e-1", capsys=capsys)
    text = " ".join(out.split())
    assert status == 0
    assert "batch 4 sequences" in text
    assert "weights in int8, 64 positions of cache in int8, prompts of 16 tokens" in text
    assert "not expressed: ici_autoregressive_parallelism=2: a layout of the configuration's own" in text
    assert "not expressed: use_iota_embed=True" in text


def test_lines_for_maxtext_are_the_overrides(base: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run("plan", base, *TINY, "--slice", "v5e-16", "--emit", "maxtext", capsys=capsys)
    assert (status, out.splitlines()) == (0, TINY)


@pytest.mark.parametrize("target", ["flax", "haliax", "specs", "python"])
def test_plans_are_printed_for_other_targets(base: str, target: str, capsys: pytest.CaptureFixture[str]) -> None:
    _, out, err = run("plan", base, *TINY, "--slice", "v5e-16", "--emit", target, capsys=capsys)
    assert err == ""
    assert ("read_maxtext(" if target == "python" else "jax.make_mesh((16,), ('fsdp',))") in out


def test_configs_of_hugging_face_are_planned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "config.json"
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
    file.write_text(json.dumps({"model_type": "qwen2", "vocab_size": 256, **sizes}))
    args = ("--slice", "v5e-4", "--length", "64", "--batch", "8", "--layout", "fsdp@fsdp:4", "--remat", "full")
    status, out, _ = run("plan", str(file), *args, capsys=capsys)
    assert status == 0
    assert "115,392 parameters" in out  # 2 * 256 * 64 + 64 + 2 * (4 * 64 * 64 + 3 * 64 * 128 + 2 * 64 + 3 * 64)


def test_a_config_of_images_is_planned_and_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
    folder = tmp_path / "small"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "vit", "image_size": 32, "patch_size": 8, **sizes}))
    args = (str(folder), "--slice", "v5e-4", "--batch", "8")
    status, out, _ = run("plan", *args, "--set", "classes=10", capsys=capsys)
    assert (status, "small on v5e-4: fits" in out, "8 images" in out) == (0, True, True)
    config = mtf.sharing.read_image_config(folder).replace(classes=10)
    assert f"{config.parameters:,} parameters" in out
    _, source, _ = run("plan", *args, "--emit", "python", capsys=capsys)
    names: dict[str, Any] = {}
    exec(source, names)
    assert names["config"] == config.replace(classes=2)
    status, _, _ = run("init", *args, "--out", str(tmp_path / "test_small.py"), capsys=capsys)
    assert status == 0
    assert pytest.main(["-q", "-p", "no:cacheprovider", str(tmp_path / "test_small.py")]) == 0


MISTAKES = {
    "unknown key": ("plan BASE per_device_batchsize=2 --slice v5e-16", "did you mean 'per_device_batch_size'"),
    "no equals": ("plan BASE steps --slice v5e-16", "'steps' is not KEY=VALUE"),
    "overrides of a model": ("plan gpt2 steps=2 --slice v5e-16", "--set steps=2"),
    "batch": ("plan BASE --batch 3 --slice v5e-16", "per_device_batch_size="),
    "layout": ("plan BASE --layout fsdp@fsdp:16 --slice v5e-16", "ici_*"),
    "rank": ("plan BASE --slice v5e-16 --emit maxtext --rank 2", "there is 1 plan"),
    "target": ("plan BASE --slice v5e-16 --emit torch", "no choice 'torch'; there are maxtext, flax"),
    "no slice": ("explain BASE", "give --slice"),
    "compared with nothing": ("compare BASE steps=2 --slice v5e-16", "after --, what to change"),
    "compared with no change": ("compare BASE --slice v5e-16 --", "after --, what to change"),
    "a change of a plan": ("plan BASE --slice v5e-16 -- steps=2", "-- begins what meshlib compare changes"),
    "a change of a model": ("compare gpt2 --slice v5e-16 -- steps=2", "say --set steps=2"),
    "no change of a model": ("compare gpt2 --slice v5e-16 --", "-- is followed by what changes"),
    "a change of the answer": ("compare gpt2 --slice v5e-16 -- --json", "they come before --"),
    "another kind of model": (
        "compare resnet-18 --slice v5e-4 --batch 4 -- gpt2 --length 64",
        "takes images, gpt2 tokens",
    ),
    "an unknown change": ("compare gpt2 --slice v5e-16 -- --batsh 2", "no option --batsh; did you mean '--batch'?"),
    "a wrong change": ("compare BASE --slice v5e-16 -- remat_policy=ful", "did you mean 'full'"),
    "inference": ("plan BASE quantize_kvcache=true --slice v5e-16", "meshlib serve BASE KEY=VALUE"),
    "prompts": ("serve BASE max_prefill_predict_length=0 --slice v5e-4", "max_prefill_predict_length=0"),
    "caches": ("serve BASE quantize_kvcache=true kv_quant_dtype=int5 --slice v5e-4", "kv_quant_dtype=int5"),
    "no file": ("plan /nowhere/base.yml --slice v5e-16", "can't be read"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_one_line(base: str, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    typed, text = MISTAKES[name]
    status, out, err = run(*typed.replace("BASE", base).split(), capsys=capsys)
    assert (status, out) == (2, "")
    assert text.replace("BASE", base) in err
    assert "Traceback" not in err
