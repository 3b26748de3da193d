"""Layouts of others: the sharding of every tensor must be the one that an independent resolver finds."""

from __future__ import annotations

import re
from itertools import product
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from layouts import (
    LayoutError,
    LayoutRules,
    Mesh,
    Rule,
    Shape,
    Sharding,
    check,
    from_flax,
    from_haliax,
    from_partition_specs,
    to_flax,
    to_partition_spec,
)
from tests.layouts.strategies import layouts, properties

MESH = Mesh("x:2;y:3;z:2")
DIMS = ["batch", "d_model", "heads", "vocab"]


# ---------------------------------------------------------------- Flax


def resolve_as_flax(rules, names):
    """Flax's rules from their documentation: a list in order of precedence; a rule holds for its dim if the dim has
    none yet and none of its mesh axes is in use in this tensor. Walks over what is still free, unlike the library."""
    free, open_dims, answer = set(MESH.axes), set(names), dict.fromkeys(names)
    for dim, axes in rules:
        wanted = [] if axes is None else [axes] if isinstance(axes, str) else list(axes)
        if dim in open_dims and free.issuperset(wanted):
            answer[dim] = tuple(wanted)
            open_dims.remove(dim)
            free.difference_update(wanted)
    return [answer[name] or () for name in names]


def entries():
    several = st.lists(st.sampled_from(MESH.axes), min_size=0, max_size=3, unique=True)
    return st.one_of(st.none(), st.sampled_from(MESH.axes), several.map(tuple), several)


def shapes():
    names = st.lists(st.sampled_from(DIMS), min_size=1, max_size=4, unique=True)
    return names.map(lambda chosen: Shape([(name, 2 * 3 * 2) for name in chosen]))


@properties
@given(st.lists(st.tuples(st.sampled_from(DIMS), entries()), max_size=8), st.lists(shapes(), min_size=3, max_size=3))
def test_flax_rules_give_flax_shardings(rules, tensors):
    read = from_flax(rules)
    assert LayoutRules(str(read)) == read
    for shape in tensors:
        for scope in ("variables", "slots", "activations"):
            assert list(read.sharding(shape, MESH, scope).axes) == resolve_as_flax(rules, shape.names), str(read)


def clashes(rules, shape, scope):
    """Whether two required rules want the same axis."""
    required = [rule for name in shape.names for rule in rules.for_dim(name, scope) if not rule.optional]
    used = [axis for rule in required for axis in rule.axes]
    return len(set(used)) < len(used)


@properties
@given(layouts(), st.lists(shapes(), min_size=3, max_size=3))
def test_layouts_written_for_flax_keep_their_shardings(rules, tensors):
    for scope in ("variables", "slots", "activations"):
        written = to_flax(rules, scope)
        again = from_flax(written)
        for shape in tensors:
            if clashes(rules, shape, scope):  # where required rules clash, Flax would pass over the second one
                continue
            expected = rules.sharding(shape, MESH, scope)
            assert list(expected.axes) == resolve_as_flax(written, shape.names)
            assert again.sharding(shape, MESH, scope) == expected


def test_the_example_in_the_documentation_of_flax():
    # flax/linen/spmd.py, docstring of logical_to_mesh_axes
    rules = [("batch", "X"), ("features", "X"), ("heads", "Y"), ("batch", "Z")]
    sharding = from_flax(rules).sharding("batch:4;length:4;heads:4;features:4", "X:2;Y:2;Z:2")
    assert to_partition_spec(sharding) == ("X", None, "Y", None)


@pytest.mark.parametrize(
    ("rules", "layout"),
    [
        ([], ""),
        ([("d", "x")], "d:x?"),
        ([["d", ["x", "y"]]], "d:(x+y)?"),
        ([("d", ["x"])], "d:x?"),
        ([("d", None)], "d:"),
        ([("d", ())], "d:"),
        ([("d", "x"), ("d", None), ("d", "y")], "d:x?"),  # the second ends the search
        ([("d", None), ("d", "y")], "d:"),
        ([("d", ("x", "y")), ("d", ("x",)), ("e", "x")], "d:(x+y)?;d:x?;e:x?"),
    ],
)
def test_reading_flax(rules, layout):
    assert str(from_flax(rules)) == layout


def test_whole_groups_and_parts():
    assert from_flax([("a", "x"), ("b", ("x", "y"))]).sharding("a:6;b:6", MESH).axes == (("x",), ())
    assert LayoutRules("a:x;b:x+y?").sharding("a:6;b:6", MESH).axes == (("x",), ("y",))
    assert LayoutRules("a:x;b:(x+y)?").sharding("a:6;b:6", MESH).axes == (("x",), ())
    assert LayoutRules("a:x;b:(x+y)?").sharding("b:6", MESH).axes == (("x", "y"),)


@pytest.mark.parametrize(
    ("source", "canonical"),
    [("d:(x+y)?", "d:(x+y)?"), ("d:(x)?", "d:x?"), ("slots/d:(y+x)?;e:z", "slots/d:(y+x)?;e:z")],
)
def test_brackets_in_layouts(source, canonical):
    rules = LayoutRules(source)
    assert str(rules) == canonical
    assert LayoutRules(canonical) == LayoutRules(rules.rules) == rules
    assert rules.rules[0].whole == ("(" in canonical)
    assert rules != LayoutRules(canonical.replace("(", "").replace(")", "")) or "(" not in canonical


@pytest.mark.parametrize(
    ("source", "message", "under_caret"),
    [
        ("d:(x+y)", r"brackets are for optional axes: write \(x\+y\)\? or x\+y", "(x+y)"),
        ("d:()?", "axis name '' is not an identifier", ")?"),
        ("d:(x+9)?", "axis name '9' is not an identifier", "9)?"),
        ("d:(x+x)?", "axis 'x' occurs twice for dim 'd'", "x)?"),
        ("d:(x+y?", r"axis name '\(x' is not an identifier", "(x+y?"),
        ("d:x+(y)?", r"axis name '\(y\)' is not an identifier", "(y)?"),
    ],
)
def test_faults_of_brackets(source, message, under_caret):
    with pytest.raises(LayoutError, match=message) as caught:
        LayoutRules(source)
    text, caret = caught.value.__notes__[0].splitlines()
    assert text[caret.index("^") :] == under_caret


def test_only_the_names_of_the_program():
    rules = [("batch", "x"), ("experts", "y"), ("batch", "z")]
    assert str(from_flax(rules, dims=["batch", "vocab"])) == "batch:x?;batch:z?"


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ("ab", "a list of .dim, axes. pairs, not 'ab'"),
        (None, "a list of .dim, axes. pairs, not None"),
        ([("a", "x"), "bc"], r"Flax rule 1: expected a \(dim, axes\) pair, not 'bc'"),
        ([("a", "x", "y")], "Flax rule 0: expected"),
        ([(3, "x")], "Flax rule 0: expected"),
        ([("a", 3)], r"Flax rule 0, \('a', 3\): the axes are a name, several names or None, not 3"),
        ([("a", ("x", None))], r"Flax rule 0, .*not \('x', None\)"),
        ([("a", ("x", "x"))], "Flax rule 0, .*axis 'x' occurs 2 times"),
        ([("a b", "x")], "'a b' is not an identifier"),
    ],
)
def test_what_is_no_flax_rule(rules, message):
    with pytest.raises(LayoutError, match=message):
        from_flax(rules)


def test_sizes_and_axes_stay_checked():
    with pytest.raises(LayoutError, match=r"7 % 2 = 1\. Pad d to 8"):
        from_flax([("d", "x")]).sharding("d:7", MESH)
    rules = from_flax([("d", ("x", "yy"))])
    assert str(rules.sharding("d:6", MESH)) == "[d:6]"
    (note, *_) = check(rules, MESH, [("t", "d:6", "activations")]).notes
    assert re.match(r"rule d:\(x\+yy\)\?: no axis 'yy' in mesh .*did you mean 'y'\?; it splits nothing here", note)


@pytest.mark.parametrize(
    ("layout", "rules"),
    [
        ("", []),
        ("batch:x;d:x?", [("batch", "x"), ("d", "x")]),
        ("d:x?;batch:x", [("batch", "x"), ("d", "x")]),
        ("d:;e:y+x", [("d", None), ("e", ("y", "x"))]),
        ("d:(x+y)?;d:z?", [("d", ("x", "y")), ("d", "z")]),
        ("d:x+y+z?", [("d", c) for c in (("x", "y", "z"), ("x", "y"), ("x", "z"), ("y", "z"), "x", "y", "z")]),
    ],
)
def test_writing_flax(layout, rules):
    assert to_flax(layout) == rules


def test_scopes_are_written_one_by_one():
    layout = "batch:x;d:x?;activations/d:;slots/d:y"
    with pytest.raises(LayoutError, match=r"no scopes, but the layout has activations/d:, slots/d:y; .*scope='slots'"):
        to_flax(layout)
    assert to_flax(layout, "variables") == [("batch", "x"), ("d", "x")]
    assert to_flax(layout, "slots") == [("batch", "x"), ("d", "y")]
    assert to_flax(layout, "activations") == [("batch", "x"), ("d", None)]
    with pytest.raises(LayoutError, match="did you mean 'slots'"):
        to_flax(layout, "slot")


# ---------------------------------------------------------------- Haliax


@properties
@given(st.dictionaries(st.sampled_from(DIMS), entries()), shapes())
def test_haliax_mappings_lay_each_dim_where_they_say(mapping, shape):
    expected = [mapping.get(name) or () for name in shape.names]
    expected = [(e,) if isinstance(e, str) else tuple(e) for e in expected]
    used = [axis for entry in expected for axis in entry]
    rules = from_haliax(mapping)
    if len(set(used)) == len(used):
        assert list(rules.sharding(shape, MESH).axes) == expected
    else:  # a duplicate entry, as jax says of such a PartitionSpec
        with pytest.raises(LayoutError, match="both split over axis"):
            rules.sharding(shape, MESH)


@properties
@given(st.dictionaries(st.sampled_from(DIMS), entries()), st.dictionaries(st.sampled_from(DIMS), entries()))
def test_haliax_parameters_have_their_own_mapping(mapping, params):
    rules = from_haliax(mapping, params)
    for name in DIMS:
        for scope, one in (("activations", mapping), ("variables", params), ("slots", params)):
            found = rules.sharding([(name, 12)], MESH, scope)
            assert found == from_haliax(one).sharding([(name, 12)], MESH, scope)


def test_what_is_no_haliax_mapping():
    for wrong in (None, "batch", [("batch", "x")], {3: "x"}):
        with pytest.raises(LayoutError, match="Haliax mapping: expected a dict of names to mesh axes"):
            from_haliax(wrong)
    with pytest.raises(LayoutError, match="Haliax params: expected a dict"):
        from_haliax({}, params=[])
    with pytest.raises(LayoutError, match="Haliax mapping, 'a': the axes are"):
        from_haliax({"a": 3})


# ---------------------------------------------------------------- PartitionSpecs


@properties
@given(st.dictionaries(st.sampled_from(DIMS), st.sampled_from([None, *MESH.axes, ("x", "y")])), st.data())
def test_specs_that_agree_give_themselves_back(where, data):
    specs = {}
    for shape in data.draw(st.lists(shapes(), max_size=4)):
        spec = [where.get(name) for name in shape.names]
        used = [axis for e in spec if e for axis in ([e] if isinstance(e, str) else e)]
        if len(set(used)) == len(used):
            while spec and spec[-1] is None and data.draw(st.booleans()):
                spec.pop()
            specs[data.draw(st.sampled_from([shape, shape.names]))] = tuple(spec)
    rules = from_partition_specs(specs)
    for shape, spec in specs.items():
        shape = shape if isinstance(shape, Shape) else Shape([(name, 12) for name in shape])
        padded = (*spec, *[None] * (shape.ndim - len(spec)))
        assert to_partition_spec(rules.sharding(shape, MESH)) == padded


def test_every_sharding_is_written_and_read():
    for entry, other in product([(), ("x",), ("y", "x"), ("z", "x", "y")], repeat=2):
        if set(entry) & set(other):
            continue
        sharding = Sharding("a:12;b:12", MESH, [entry, other])
        spec = to_partition_spec(sharding)
        assert prod(len(e) if isinstance(e, tuple) else 1 for e in spec if e) == (len(entry) or 1) * (len(other) or 1)
        assert from_partition_specs({sharding.shape: spec}).sharding("a:12;b:12", MESH) == sharding


def test_names_of_tensors_and_scopes():
    dims = {"w1": ("embed", "mlp"), "w2": Shape("mlp:8;embed:4")}
    assert str(from_partition_specs({"w1": ("x", "y"), "w2": ["y"]} | {}, {"w1": dims["w1"], "w2": ("mlp",)})) == (
        "embed:x;mlp:y"
    )
    params = from_partition_specs({"w1": ("x", "y"), "w2": ("y", "x")}, dims, scope="variables")
    activations = from_partition_specs({("batch", "embed"): ("x",)}, scope="activations")
    both = LayoutRules([*params.rules, *activations.rules])
    assert str(both) == "variables/embed:x;variables/mlp:y;activations/batch:x;activations/embed:"
    with pytest.raises(LayoutError, match="no scope 'params'"):
        from_partition_specs({}, scope="params")


def test_specs_that_disagree_name_both_tensors():
    dims = {"w1": ("embed", "mlp"), "w2": ("mlp", "embed"), "w3": ("mlp",)}
    with pytest.raises(LayoutError) as caught:
        from_partition_specs({"w1": ("x", "y"), "w2": (("y", "z"),), "w3": ("y",), ("mlp", "n"): ()}, dims)
    assert str(caught.value).splitlines() == [
        "the specs: 3 faults",
        *(
            f"  dim {dim!r} is split over {mine} in 'w1' ('x', 'y'), but over {other}: one rule holds for all tensors. "
            "Rename the dim in one of them, or read the two apart with scope=."
            for dim, mine, other in (
                ("mlp", "y", "y+z in 'w2' (('y', 'z'),)"),
                ("embed", "x", "no axis in 'w2' (('y', 'z'),)"),
                ("mlp", "y", "no axis in [mlp, n] ()"),
            )
        ),
    ]


def test_the_order_of_axes_counts():
    with pytest.raises(LayoutError, match=r"'a' is split over x\+y in \[a\] .*, but over y\+x in \[b, a\]"):
        from_partition_specs({("a",): (("x", "y"),), ("b", "a"): (None, ["y", "x"])})


@pytest.mark.parametrize(
    ("specs", "message"),
    [
        ([], r"expected a dict of tensors to specs, not \[\]"),
        ({"kernel2": ()}, "no dims given for tensor 'kernel2'; did you mean 'kernel'.; add it to dims="),
        ({"w1": "x"}, "'w1' 'x': a spec is a tuple with an entry for each dim"),
        ({"w1": (None, None, "x")}, r"'w1' \(None, None, 'x'\): 3 entries for 2 dims, embed, mlp"),
        ({"w1": ("x", ("y", "x"))}, "'w1' .*axis 'x' occurs 2 times"),
        ({"w1": (3,)}, r"'w1' \(3,\): the axes are a name, several names or None, not 3"),
        ({("a", "a"): ()}, r"\[a, a\] \(\): dim 'a' occurs twice; rename one"),
        ({("a", 3): ()}, r"the dims of \('a', 3\) are a Shape or names"),
        ({"w1": "x", "w3": ()}, "the specs: 2 faults\n  'w1'.*\n  no dims given for tensor 'w3'"),
        ({("a b",): ("x",)}, "'a b' is not an identifier"),
    ],
)
def test_faults_of_specs(specs, message):
    with pytest.raises(LayoutError, match=message):
        from_partition_specs(specs, {"w1": ("embed", "mlp"), "kernel": ("a",)})


def test_what_has_no_spec():
    with pytest.raises(
        LayoutError, match=r"no pending reductions: \[n:4\] \{sum over x\}; write sharding.drop_pending"
    ):
        to_partition_spec(Sharding("n:4", MESH, [()], {"x": "sum"}))
    with pytest.raises(LayoutError, match="expected a Sharding, not str 'n:4'"):
        to_partition_spec("n:4")
    assert to_partition_spec(Sharding("n:4", "x:1", [("x",)])) == (None,)


def test_rules_of_one_axis_need_no_brackets():
    assert Rule("d", ("x", "y"), optional=True, whole=True) == LayoutRules("d:(x+y)?").rules[0]
    assert from_flax([("d", ("x",))]) == LayoutRules("d:x?")
