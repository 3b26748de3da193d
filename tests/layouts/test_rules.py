import pickle

import pytest
from hypothesis import given

from layouts import LayoutError, LayoutRules, Mesh, Rule
from tests.layouts.strategies import layouts, properties

MESH = Mesh("data:4;model:8")


@pytest.mark.parametrize(
    ("source", "canonical"),
    [
        ("", ""),
        (None, ""),
        ([], ""),
        ("batch:rows;hidden:cols", "batch:rows;hidden:cols"),
        ("batch:rows, hidden:cols", "batch:rows;hidden:cols"),
        ("batch:rows.hidden:cols", "batch:rows;hidden:cols"),
        ("\n batch:rows\thidden:cols ;; ", "batch:rows;hidden:cols"),
        ("batch:data+fsdp", "batch:data+fsdp"),
        ("d:data?", "d:data?"),
        ("d:data+fsdp?", "d:data+fsdp?"),
        ("variables/d:data", "variables/d:data"),
        ("d:data;activations/d:", "d:data;activations/d:"),
        ({"batch": "rows", "x": ("data", "fsdp"), "d": "data?"}, "batch:rows;x:data+fsdp;d:data?"),
        ({"activations/d": None, "e": ()}, "activations/d:;e:"),
        ([("d", "a?"), ("d", "b?")], "d:a?;d:b?"),
        ([("d", ("a", "b?"))], "d:a+b?"),
        ([Rule("d", ("a",), True, "slots"), ("e", "b")], "slots/d:a?;e:b"),
        (LayoutRules("a:b"), "a:b"),
    ],
)
def test_sources(source, canonical):
    rules = LayoutRules(source)
    assert str(rules) == canonical
    assert LayoutRules(canonical) == rules
    assert hash(LayoutRules(canonical)) == hash(rules)
    assert pickle.loads(pickle.dumps(rules)) == rules


@properties
@given(layouts())
def test_text_round_trip(rules):
    assert LayoutRules(str(rules)) == LayoutRules(rules.rules) == rules


@pytest.mark.parametrize(
    ("source", "message", "under_caret"),
    [
        ("batch", "'batch' has no ':'", "batch"),
        ("a:b;batch;c:d", "'batch' has no ':'", "batch;c:d"),
        ("a:b:c", "two ':'", ":c"),
        ("a: b c", "'c' has no ':'", "c"),
        ("a:b;9:c", "'9' is not an identifier", "9:c"),
        (":c", "'' is not an identifier", ":c"),
        ("a:b;c:d+", "axis name '' is not an identifier", ""),
        ("a:?", "axis name '' is not an identifier", "?"),
        ("a:b?+c", r"'b\?' is not an identifier", "b?+c"),
        ("a:b+b", "'b' occurs twice for dim 'a'", "b"),
        ("variable/a:b", r"no scope 'variable'.*; did you mean 'variables'\?", "variable/a:b"),
        ("x:y;/a:b", "no scope ''", "/a:b"),
        ("variables/:b", "'' is not an identifier", ":b"),
        ({"a b": "c"}, "'a b' is not an identifier", "a b:c"),
        ({"a": "b;c"}, "'b;c' is not an identifier", "b;c"),
    ],
)
def test_parse_errors_point_at_the_fault(source, message, under_caret):
    with pytest.raises(LayoutError, match=message) as caught:
        LayoutRules(source)
    text, caret = caught.value.__notes__[0].splitlines()
    assert text[caret.index("^") :] == under_caret


def test_two_required_rules():
    with pytest.raises(LayoutError, match="dim 'd': d:a and d:b; remove one"):
        LayoutRules("d:a;d:b")
    LayoutRules("d:a;d:b?;variables/d:b")
    with pytest.raises(LayoutError, match="not 3"):
        LayoutRules([(3, "a")])


def test_names():
    rules = LayoutRules("a:x+y;b:x?;slots/a:z")
    assert rules.dims == ("a", "b")
    assert rules.axes == ("x", "y", "z")
    assert len(rules) == 3


@pytest.mark.parametrize(
    ("layout", "shape", "scope", "axes"),
    [
        ("batch:data;hidden:model", "batch:8;hidden:16", "activations", "data, model"),
        ("batch:data;hidden:model", "hidden:16;other:3", "activations", "model, "),
        ("batch:data+model", "batch:32", "activations", "data+model"),
        ("batch:model+data", "batch:32", "activations", "model+data"),
        # optional: takes what is free, after all required ones, in order
        ("d:data?;batch:data", "d:8;batch:8", "activations", ", data"),
        ("d:data?;batch:data", "d:8", "variables", "data"),
        ("d:data?;e:data?", "e:8;d:8", "activations", ", data"),
        ("d:data+model?;batch:data", "d:8;batch:8", "activations", "model, data"),
        ("d:data?;d:model?;batch:data", "d:8;batch:8", "activations", "model, data"),
        ("d:data?;d:model?", "d:8", "activations", "data"),
        ("d:data;d:model?", "d:8", "activations", "data"),
        ("batch:data;d:data?", "batch:8;d:7", "activations", "data, "),
        # scopes replace; slots fall back to variables, then to the unscoped rule
        ("d:data;variables/d:model", "d:8", "variables", "model"),
        ("d:data;variables/d:model", "d:8", "slots", "model"),
        ("d:data;variables/d:model", "d:8", "activations", "data"),
        ("d:data;variables/d:model;slots/d:", "d:8", "slots", ""),
        ("d:data;slots/d:model", "d:8", "variables", "data"),
        ("d:data;slots/d:model", "d:8;e:8", "slots", "model, "),
        ("d:data;activations/d:", "d:8", "activations", ""),
        ("d:data;activations/d:", "d:8", "slots", "data"),
        ("variables/d:data;e:model", "d:8;e:8", "slots", "data, model"),
    ],
)
def test_sharding(layout, shape, scope, axes):
    sharding = LayoutRules(layout).sharding(shape, MESH, scope)
    assert ", ".join("+".join(entry) for entry in sharding.axes) == axes
    assert sharding.pending == ()


def test_axes_of_size_one_are_checked_then_dropped():
    mesh = Mesh("data:1;model:2")
    assert LayoutRules("a:data+model").sharding("a:2", mesh).axes == (("model",),)
    with pytest.raises(LayoutError, match="'a' and 'b' of one tensor are both split over axis 'data'"):
        LayoutRules("a:data;b:data").sharding("a:2;b:2", mesh)
    # whether an alternative is needed does not depend on sizes
    assert LayoutRules("a:data?;a:model?").sharding("a:2", mesh).axes == ((),)


def test_indivisible():
    with pytest.raises(LayoutError) as caught:
        LayoutRules("batch:data;vocab:model").sharding("d_model:512;vocab:50257", MESH, "variables")
    assert str(caught.value) == (
        "variable [d_model:512, vocab:50257] cannot be laid out: dim 'vocab' does not divide over axis 'model': "
        "50257 % 8 = 1. Pad vocab to 50264 (+0.01 %), or remove vocab:model."
    )
    assert caught.value.__notes__ == ["  mesh data:4;model:8    layout batch:data;vocab:model"]
    with pytest.raises(LayoutError, match=r"over axes 'data' x 'model': 40 % 32 = 8\. Pad d to 64 \(\+60.00 %\)"):
        LayoutRules("d:data+model").sharding("d:40", MESH)


def test_question_mark_does_not_forgive_sizes():
    with pytest.raises(LayoutError, match=r"7 % 4 = 3\. Pad d to 8 .*, or remove d:data\?"):
        LayoutRules("d:data?").sharding("d:7", MESH)


def test_all_faults_at_once():
    rules = LayoutRules("a:data;b:data;c:modle;d:model")
    with pytest.raises(LayoutError) as caught:
        rules.sharding("a:8;b:8;c:8;d:9", MESH)
    text = str(caught.value)
    assert "dims 'a' and 'b' of one tensor are both split over axis 'data'" in text
    assert "Make one optional (b:data?), or put it on another axis." in text
    assert "rule c:modle: no axis 'modle' in mesh data:4;model:8; did you mean 'model'?" in text
    assert "9 % 8 = 1" in text


def test_unknown_scope():
    with pytest.raises(LayoutError, match=r"'slot'; .*; did you mean 'slots'\?"):
        LayoutRules("a:data").sharding("a:4", MESH, "slot")
