import pytest

from layouts import (
    PRESETS,
    LayoutError,
    LayoutRules,
    Mesh,
    Sharding,
    check,
    draw,
    fully_sharded,
    model_parallel,
    preset,
    zero1,
)

MESH = Mesh("rows:2;cols:4")
TENSORS = [
    ("images", "batch:512;pixels:784", "activations"),
    ("w1", "pixels:784;hidden:1024", "variables"),
    ("h", "batch:512;hidden:1024", "activations"),
]


def test_clean_layout():
    report = check("batch:rows;hidden:cols", MESH, TENSORS)
    assert report.ok
    assert report.faults == report.notes == ()
    assert str(report) == "no faults, no notes"
    report.raise_for_faults()


def test_a_fault_is_reported_once_with_its_tensors():
    tensors = [(f"t{i}", f"vocab:50257;n{i}:3", "variables") for i in range(5)]
    report = check("n0:rows;vocab:cols", MESH, tensors)
    assert report.faults == (
        "dim 'n0' does not divide over axis 'rows': 3 % 2 = 1. Pad n0 to 4 (+33.33 %), or remove n0:rows. In: t0.",
        "dim 'vocab' does not divide over axis 'cols': 50257 % 4 = 1. "
        "Pad vocab to 50260 (+0.01 %), or remove vocab:cols. In: t0, t1, t2 and 2 more.",
    )


def test_all_faults_at_once():
    report = check("bacth:rows;pixels:col;hidden:cols;batch:cols", MESH, TENSORS)
    assert not report.ok
    assert report.faults == (
        "rule pixels:col: no axis 'col' in mesh rows:2;cols:4; did you mean 'cols'?",
        "dims 'hidden' and 'batch' of one tensor are both split over axis 'cols': "
        "an axis splits one dim of a tensor. Make one optional (batch:cols?), or put it on another axis. In: h.",
        "rule bacth:rows: no dimension 'bacth' in the program; did you mean 'batch'?",
    )
    with pytest.raises(LayoutError, match=r"(?s)^the layout: 3 faults\n.*'col'.*'hidden' and 'batch'.*'bacth'"):
        report.raise_for_faults()


def test_unknown_axis_of_a_rule_without_a_tensor():
    report = check("memory_length:cosl", MESH, TENSORS, known_dims=["memory_length"])
    assert report.faults == ("rule memory_length:cosl: no axis 'cosl' in mesh rows:2;cols:4; did you mean 'cols'?",)


def test_notes():
    rules = "batch:rows;memory_length:rows;slots/hidden:rows;variables/batch:"
    report = check(rules, MESH, TENSORS, known_dims=["memory_length"])
    assert report.ok
    assert report.notes == (
        "rule memory_length:rows is not used: no tensor here has dimension 'memory_length'",
        "rule slots/hidden:rows is not used: no tensor in its scope has dimension 'hidden'",
        "rule variables/batch: is not used: no tensor in its scope has dimension 'batch'",
        "axis 'cols' splits nothing: every tensor is held 4 times over",
    )
    assert str(report).count("note: ") == 4


def test_replaced_rule_and_axis_of_size_one():
    report = check("hidden:cols;variables/hidden:rows", "rows:2;cols:1", TENSORS[1:2])
    assert report.notes == ("rule hidden:cols is not used: scoped rules replace it wherever 'hidden' occurs",)


def test_presets_on_their_mesh():
    mesh = Mesh("data:2;model:4")
    for name in PRESETS:
        made = preset(name)
        assert made == PRESETS[name]()
        assert LayoutRules(str(made)) == made
        made.sharding("batch:8;hidden:8;d_model:8", mesh)
    assert str(model_parallel("hidden")) == "hidden:model"
    assert preset("two_dimensional", data_axis="x", model_axis="y") == LayoutRules("batch:x;hidden:y")


def test_fully_sharded_splits_variables_and_activations_differently():
    rules = fully_sharded(dims=["d_model", "d_ff"])
    assert rules.sharding("batch:8;d_model:8", "data:4").axes == (("data",), ())
    assert rules.sharding("d_ff:8;d_model:8", "data:4", "variables").axes == ((), ("data",))


def test_zero1_splits_slots_alone():
    for scope, axes in [("variables", ()), ("activations", ()), ("slots", ("data",))]:
        assert zero1().sharding("d_model:8", "data:4", scope).axes == (axes,)


def test_preset_faults():
    with pytest.raises(LayoutError, match=r"no preset 'zero'; did you mean 'zero1'\?"):
        preset("zero")
    with pytest.raises(LayoutError, match="no preset 'qqq'; there are data_parallel, "):
        preset("qqq")
    with pytest.raises(LayoutError, match=r"'zero1' has no argument 'axes'; did you mean 'axis'\?"):
        preset("zero1", axes="data")


def test_drawings():
    one = draw(Sharding("n:8", "x:2;y:2", [("y",)]))
    assert one.splitlines() == [
        "[n:8@y]  on  x:2;y:2",
        "      | devices",
        "n 0:4 | 0 2",
        "n 4:8 | 1 3",
    ]
    many = draw(Sharding.replicated("n:8", "x:16"))
    assert "0 1 2 3 4 5 6 7 +8" in many
    assert "scalar" in draw(Sharding.replicated("", "x:2"))
    middle = draw(Sharding("a:2;b:4;c:4", "x:2;y:2", [(), ("y",), ("x",)]))
    assert "c 0:2" in middle
    assert "b 2:4" in middle
    assert "a 0" not in middle


def test_optional_rules_may_name_what_is_not_there():
    """One layout serves many models and meshes; a typo is seen as a note."""
    tensors = [("x", "batch:8;hidden:4", "activations")]
    report = check("batch:rows;hiden:rows?;hidden:cols?", "rows:2", tensors)
    assert report.ok
    assert report.notes == (
        "rule hiden:rows?: no dimension 'hiden' in the program; did you mean 'hidden'?; it splits nothing here, as its "
        "'?' allows",
        "rule hidden:cols?: no axis 'cols' in mesh rows:2; it splits nothing here, as its '?' allows",
    )
    assert not check("batch:rows;hiden:rows", "rows:2", tensors).ok
    assert not check("batch:rows;hidden:cols", "rows:2", tensors).ok


def test_a_swapped_rule_is_turned_round():
    (first, second) = check("rows:batch", "rows:2", [("x", "batch:8", "activations")]).faults
    assert "no axis 'batch'" in first
    assert second.endswith("rules are dim:axis, so write batch:rows")


def test_blanks_around_colons():
    assert LayoutRules(" batch : rows; d: cols ;e :x f:y") == LayoutRules("batch:rows;d:cols;e:x;f:y")
    assert str(Mesh("rows : 2; cols: 4")) == "rows:2;cols:4"
