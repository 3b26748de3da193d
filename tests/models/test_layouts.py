"""Layouts of Transformers by name: which rules, on which axes, and what is refused."""

from __future__ import annotations

import pytest

import meshlib as mtf
from layouts import LayoutRules, data_parallel, fully_sharded, joined, preset
from meshlib.models import layout
from meshlib.models import preset as model

TINY = model("llama2-7b").reduced()  # d_model 32, 4 heads of 8, d_ff 64, vocab 64


@pytest.mark.parametrize(
    ("name", "mesh", "rules"),
    [
        ("data", "data:8", "batch:data"),
        ("data", "cores:8", "batch:cores"),
        ("tensor", "model:4", "heads:model;d_ff:model;vocab:model"),
        ("2d", "data:2;tensor:4", "batch:data;heads:tensor;d_ff:tensor;vocab:tensor"),
        ("sequence", "tensor:4", "heads:tensor;d_ff:tensor;vocab:tensor;length:tensor?"),
        ("context", "context:4", "length:context"),
        ("fsdp", "data:4", "batch:data;d_model:data?"),
        ("zero1", "data:4", "batch:data;slots/d_model:data?"),
        (
            "fsdp+tensor",
            "fsdp:2;tensor:2",
            "batch:fsdp;d_model:fsdp?;heads:tensor;d_ff:tensor;vocab:tensor",
        ),
        ("data+fsdp", "data:2;fsdp:2", "batch:data+fsdp;d_model:fsdp?"),
        ("data+zero1", "data:4", "batch:data;slots/d_model:data?"),
        ("data+context", "data:2;context:2", "batch:data;length:context"),
    ],
)
def test_names_stand_for_rules(name, mesh, rules):
    assert str(layout(name, TINY, mesh)) == rules


MIXTRAL, DEEPSEEK, SWITCH = model("mixtral-8x7b"), model("deepseek-v3"), model("switch-base-128")


@pytest.mark.parametrize(
    ("name", "config", "mesh", "rules"),
    [
        ("data+expert", MIXTRAL, "data:8", "batch:data;experts:data"),
        ("fsdp+expert", MIXTRAL, "fsdp:8", "batch:fsdp;d_model:fsdp?;experts:fsdp"),
        ("data+expert", MIXTRAL, "data:4;expert:8", "batch:data+expert;experts:expert;batch_unsplit:data"),
        (
            "fsdp+expert", MIXTRAL, "fsdp:16;expert:8",
            "batch:fsdp+expert;d_model:fsdp+expert?;experts:expert;batch_unsplit:fsdp",
        ),
        (
            "fsdp+expert", MIXTRAL, "fsdp:1024;expert:8",
            "batch:fsdp+expert;d_model:fsdp?;experts:expert;batch_unsplit:fsdp",
        ),
        ("fsdp+context", MIXTRAL, "fsdp:8;context:4", "batch:fsdp;d_model:fsdp+context?;length:context"),
        ("fsdp+context", MIXTRAL, "fsdp:4096;context:2", "batch:fsdp;d_model:fsdp?;length:context"),
        (
            "fsdp+expert+context", MIXTRAL, "fsdp:8;expert:8;context:4",
            "batch:fsdp+expert;d_model:fsdp+expert+context?;length:context;experts:expert;batch_unsplit:fsdp;"
            "length_unsplit:context",
        ),
        (
            "data+expert+tensor", MIXTRAL, "data:2;expert:2;tensor:2",
            "batch:data+expert;heads:tensor;expert_d_ff:tensor;vocab:tensor;experts:expert;batch_unsplit:data",
        ),
        (
            "fsdp+expert", DEEPSEEK, "fsdp:32;expert:32",
            "batch:fsdp+expert;d_model:fsdp+expert?;kv_rank:fsdp?;q_rank:fsdp?;experts:expert;batch_unsplit:fsdp",
        ),
        ("tensor", SWITCH, "tensor:4", "heads:tensor;d_ff:tensor;expert_d_ff:tensor;vocab:tensor"),
    ],
)  # fmt: skip
def test_experts_lie_on_an_axis_of_their_own_or_with_the_data(name, config, mesh, rules):
    assert str(layout(name, config, mesh)) == rules


def test_blanks_around_parts_do_not_matter():
    mesh = "fsdp:2;tensor:2"
    assert layout(" fsdp + tensor ", TINY, mesh) == layout("fsdp+tensor", TINY, mesh)


def test_biases_are_fully_sharded_where_they_divide():
    bert = model("bert-large").reduced()
    assert str(layout("fsdp", bert, "fsdp:4")) == "batch:fsdp;d_model:fsdp?;d_ff:fsdp?;vocab:fsdp?"
    assert str(layout("fsdp", bert.replace(vocab=63), "fsdp:4")) == "batch:fsdp;d_model:fsdp?;d_ff:fsdp?"


def test_fully_sharded_weights_keep_the_tensor_axis_too():
    rules = layout("fsdp+tensor", TINY, "fsdp:2;tensor:2")
    for shape, axes in {
        "d_model:32;d_ff:64": [("fsdp",), ("tensor",)],
        "d_ff:64": [("tensor",)],
        "layers:2;d_model:32": [(), ("fsdp",)],
        "batch:4;length:8;d_model:32": [("fsdp",), (), ()],
    }.items():
        assert list(rules.sharding(shape, "fsdp:2;tensor:2").axes) == axes


@pytest.mark.parametrize(
    ("name", "size", "dim"),
    [
        ("llama3.1-405b", 8, "heads"),  # 8 heads of keys
        ("llama3.1-405b", 16, "group"),  # 16 queries for each
        ("palm-540b", 16, "heads"),  # one head of keys: heads are those of queries
        ("gpt3-175b", 96, "heads"),
        ("gemma3-12b", 8, "heads"),
    ],
)
def test_heads_give_way_to_groups_where_there_are_too_few(name, size, dim):
    config = model(name).replace(vocab=96 * 1024, d_ff=96 * 1024)
    assert str(layout("tensor", config, f"tensor:{size}")) == f"{dim}:tensor;d_ff:tensor;vocab:tensor"


@pytest.mark.parametrize(
    ("name", "config", "mesh", "words"),
    [
        ("tensor", model("gpt2"), "tensor:8", r"(?s)heads: 12 % 8 = 4.*vocab: 50257 % 8 = 1; use .*vocab=50264"),
        ("tensor", model("llama3-8b"), "tensor:32", "heads: 8 % 32 = 8; groups of 4 queries, 4 % 32 = 4"),
        ("tensor", model("gemma4-31b"), "tensor:8", "4 % 8 = 4; 16 % 8 = 0"),
        ("fsdp", model("llama3.1-405b"), "fsdp:96", "d_model: 16384 % 96 = 64"),
        ("tensr", TINY, "tensor:2", "no layout 'tensr'; did you mean 'tensor'"),
        (
            "fsdp+tensor",
            TINY,
            "data:2;cols:2",
            "'tensor' needs an axis 'tensor' or 'model', but the mesh is data:2;cols:2",
        ),
        ("tensor+sequence", TINY, "tensor:2", "exclude each other"),
        ("fsdp", "llama2-7b", "fsdp:2", "expected a TransformerConfig, got str"),
        (3, TINY, "fsdp:2", "expected a name such as"),
        ("data+expert", TINY, "data:2", "llama2-7b-reduced has no experts to lay on axis 'data'"),
        ("data+expert", MIXTRAL, "data:16", "experts: 8 % 16 = 8; use an axis whose size divides 8"),
    ],
)
def test_layouts_that_do_not_fit_are_refused(name, config, mesh, words):
    with pytest.raises(mtf.LayoutError, match=words):
        layout(name, config, mesh)


def test_joining_layouts_joins_the_axes_of_a_dim():
    rules = joined(data_parallel(axis="pods"), fully_sharded(axis="data"), LayoutRules("variables/d_ff:data"))
    assert str(rules) == "batch:pods+data;d_model:data?;variables/d_ff:data"
    assert str(joined(rules, rules)) == str(rules)
    assert str(preset("sequence_parallel", dims=["heads"], axis="cols")) == "heads:cols;length:cols?"
