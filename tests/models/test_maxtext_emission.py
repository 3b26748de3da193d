"""Plans as MaxText's lines: read back they give the same bytes and the same memory; what can't be said is reported."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("yaml")

import meshlib as mtf
from hardware.slices import Slice
from layouts import LayoutRules, Mesh
from meshlib.layers import Routing
from meshlib.models import PRESETS, Experts, layout, read_maxtext, train_step, usual_layouts
from meshlib.models.maxtext.emission import Emission, emission_of
from meshlib.models.maxtext.settings import parsed
from tests.effort import some

SLICES = ("v5e-16", "v5p-128", "2*v5e-64")
# Presets whose layers MaxText has; of the others emission says what is missing.
EXPRESSED = [
    name for name in PRESETS
    if name.startswith(("gpt2", "gpt3", "llama", "maxtext", "gemma", "mixtral", "deepseek", "qwen", "gpt-oss"))
]  # fmt: skip
ROWS = [
    (name, where, usual)
    for name in EXPRESSED
    for where in SLICES
    for usual, _ in usual_layouts(PRESETS[name], Slice(where).devices, 2 * Slice(where).devices)
]
FEW = [("llama3.1-8b", "2*v5e-64", "fsdp+sequence")]  # experts are read back below


def emitted(
    name: str, where: str, usual: str, remat: str | mtf.Remat = "full"
) -> tuple[Emission, Mesh, LayoutRules, int]:
    config, slice_ = PRESETS[name], Slice(where)
    batch, length = 2 * slice_.devices, min(2048, config.max_length or 2048)
    mesh = Mesh(dict(usual_layouts(config, slice_.devices, batch))[usual])
    rules = layout(usual, config, mesh)
    return emission_of(config, mesh, rules, slice_, batch, length, remat), mesh, rules, batch


@pytest.fixture
def base(tmp_path: Path) -> Path:
    file = tmp_path / "base.yml"
    file.write_text("run_name: ''\n")
    return file


@pytest.mark.parametrize("row", some(ROWS, FEW), ids="-".join)
def test_lines_read_back_give_the_same_bytes_and_memory(base: Path, row: tuple[str, str, str]) -> None:
    emission, mesh, rules, batch = emitted(*row)
    assert not emission.missing
    run = read_maxtext(base, parsed(emission.lines))
    theirs = run.program(row[1])
    with mtf.Graph():
        ours = mtf.lower(*train_step(PRESETS[row[0]], batch, run.length), mesh, rules)
    assert theirs.memory.by_kind == ours.memory.by_kind
    assert sorted(c.sent_bytes for c in theirs.collectives) == sorted(c.sent_bytes for c in ours.collectives)
    assert theirs.memory.peak_bytes == ours.memory.peak_bytes


@pytest.mark.parametrize("name", EXPRESSED)
def test_all_usual_layouts_are_expressed(name: str) -> None:
    for where in SLICES:
        for usual, _ in usual_layouts(PRESETS[name], Slice(where).devices, 2 * Slice(where).devices):
            assert emitted(name, where, usual)[0].missing == (), (where, usual)


def test_what_maxtext_has_not_is_reported() -> None:
    wanted = {
        "t5-base": "encoder-decoder", "bert-base": "a head with a transform", "palm-8b": "parallel blocks",
        "mtf-lm-0.14b": "position: 'learned'", "switch-base-8": "experts.routing.gating",
    }  # fmt: skip
    for name, text in wanted.items():
        emission = emitted(name, "v5e-16", "fsdp")[0]
        assert any(text in what for what in emission.missing), (name, emission.missing)
        assert "# not expressed: " in str(emission)


SMALL = PRESETS["mixtral-8x7b"].replace(layers=2, d_model=256, d_ff=512, heads=8, head_dim=32, vocab=1024)
FORMS: dict[str, tuple[str | None, Routing, list[str]]] = {
    "sorted": ("grouped", Routing(capacity_factor=None), []),
    "sorted, limited": ("grouped", Routing(capacity_factor=None, shard_factor=1.5), ["ragged_buffer_factor=1.5"]),
    "rows added": ("grouped", Routing(capacity_factor=None, row_sums="scatter"), ["use_custom_sort_vjp=false"]),
    "masks": ("einsum", Routing(capacity_factor=1.25), ["capacity_factor=1.25", "sparse_matmul=false"]),
    "short": (None, Routing(capacity_factor=2.0), ["capacity_factor=2.0", "sparse_matmul=false"]),
    "all tokens": ("dense", Routing(capacity_factor=None), ["sparse_matmul=false"]),
}


@pytest.mark.parametrize("name", some([*FORMS], ["sorted, limited", "short"]))
def test_forms_of_experts_read_back_give_the_same_program(base: Path, name: str) -> None:
    form, routing, lines = FORMS[name]
    e = Experts(count=8, d_ff=512, form=form, routing=replace(routing, loss_coef=0.02))
    config, mesh = SMALL.replace(experts=e), Mesh("expert:8")
    rules = layout("expert", config, mesh)
    emission = emission_of(config, mesh, rules, Slice("v5e-8"), 16, 512)
    assert emission.missing == ()
    assert sorted(x for x in emission.lines if x.startswith(("capacity", "sparse", "ragged", "use_custom"))) == lines
    theirs = read_maxtext(base, parsed(emission.lines)).program("v5e-8")
    with mtf.Graph():
        ours = mtf.lower(*train_step(config, 16, 512), mesh, rules)
    assert theirs.memory.by_kind == ours.memory.by_kind
    assert theirs.memory.peak_bytes == ours.memory.peak_bytes
    assert sorted(c.sent_bytes for c in theirs.collectives) == sorted(c.sent_bytes for c in ours.collectives)
    assert theirs.work == ours.work


def test_forms_that_maxtext_has_not_are_reported() -> None:
    for form, routing in (("gather", Routing(capacity_factor=1.25)), ("einsum", Routing(min_expert_capacity=300))):
        config = SMALL.replace(experts=Experts(count=8, d_ff=512, form=form, routing=routing))
        mesh = Mesh("fsdp:8")
        emission = emission_of(config, mesh, layout("fsdp", config, mesh), Slice("v5e-8"), 16, 512)
        assert any("experts.form" in what or "min_expert_capacity" in what for what in emission.missing)


def test_only_what_differs_from_defaults_is_written() -> None:
    lines = emitted("llama2-7b", "v5e-16", "fsdp")[0].lines
    assert [line.partition("=")[0] for line in lines] == [
        "base_emb_dim", "base_num_query_heads", "base_num_kv_heads", "base_mlp_dim", "base_num_decoder_layers",
        "per_device_batch_size", "gradient_clipping_threshold",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("remat", "line"),
    [
        ("matmuls", "remat_policy=minimal"),
        ("none", "remat_policy=none"),
        (mtf.Remat(offload=["q", "k", "v"]), "remat_policy=qkv_proj_offloaded"),
        (mtf.Remat(save=["wo"], offload_carries=True), "mlpwo=device"),
    ],
    ids=["matmuls", "none", "named", "custom"],
)
def test_policies_are_written_by_name_or_value_by_value(remat: str | mtf.Remat, line: str) -> None:
    emission = emitted("llama2-7b", "v5e-16", "fsdp", remat)[0]
    assert line in emission.lines
    assert not emission.missing


def test_another_order_of_axes_is_written(base: Path) -> None:
    config, where = PRESETS["llama2-7b"], Slice("v5e-16")
    mesh = Mesh("tensor:4;fsdp:4")
    emission = emission_of(config, mesh, layout("fsdp+tensor", config, mesh), where, 16, 2048)
    assert read_maxtext(base, parsed(emission.lines)).mesh(where) == mesh
