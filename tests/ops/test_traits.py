"""A wrong trait is seen: every record against the numbers of its operation, and the checks against wrong records."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest

import meshlib as mtf
from meshlib.core.graph import Operation
from meshlib.core.opdef import (
    EVERY,
    NONLINEAR,
    OPERATIONS,
    Combination,
    Factor,
    Halo,
    Home,
    Kind,
    Linear,
    OpDef,
    PowerProduct,
    Role,
    Storage,
    Summary,
    Total,
)
from meshlib.ops.building import named_factors
from meshlib.ops.pointwise.cumulative import linear_recurrence
from tests.cases import Array
from tests.effort import each
from tests.ops.traits import kinds, numbers, roles, samples
from tests.oracle import run

CHECKS = {**kinds.CHECKS, **numbers.CHECKS, **roles.CHECKS}


def faults(record: OpDef, check: str) -> Iterator[str]:
    """What a check finds in a record, on the numbers of its rows."""
    uses = samples.samples("bfloat16" if check == "exact" else "float64").get(record.name, ())
    return CHECKS[check](record, uses)


@pytest.mark.parametrize("check", CHECKS)
@each("record", OPERATIONS)
def test_traits(record: OpDef, check: str) -> None:
    assert not list(dict.fromkeys(faults(record, check)))


# ---------------------------------------------------------------- wrong records


def every(role: Role, *attributes: str) -> Any:
    """Roles by name, those of the dims that these attributes name all wrong."""

    def wrong(op: Operation) -> tuple[Factor, ...]:
        named = {getattr(op.attrs[a], "name", op.attrs[a]): role for a in attributes}
        return named_factors(op, named)

    return wrong


def reducing(role: Role) -> Any:
    """Roles by name, those of dims that the result lacks all wrong."""
    return lambda op: named_factors(op, {d.name: role for x in op.inputs for d in x.shape if d not in op.output.shape})


def linear(*operands: int, **how: bool) -> Any:
    """A linearity that does not depend on the operation."""
    return lambda op: Linear(operands, **how)


def scores_of(name: str, **changes: Any) -> Any:
    """The scores of a record, changed."""
    scores = OPERATIONS[name].scores
    assert scores is not None
    return dataclasses.replace(scores, **changes)


masked = OPERATIONS["slice"].roles
windowed = OPERATIONS["convolution"].roles
WINDOWS: Any = OPERATIONS["convolution"].lower
POOLED: Any = OPERATIONS["reduce_window"].lower


def weighed(combine: Any, gradient: str = "") -> Any:
    """How attention runs over split keys, its blocks weighed otherwise."""
    lower = OPERATIONS[f"attention_grad_{gradient}" if gradient else "attention"].lower
    assert isinstance(lower, Summary)
    return dataclasses.replace(lower, combine=combine)


PRODUCT: Any = OPERATIONS["einsum"].product
SHIFT: Any
SLICE, SHIFT = (OPERATIONS[name].lower for name in ("slice", "shift"))
WRONG: tuple[tuple[str, str, dict[str, Any]], ...] = (
    # linear: forgotten, or said without cause
    ("linear", "linear_recurrence", {"linear": lambda op: NONLINEAR}),
    ("linear", "linear_recurrence", {"linear": linear(0, 1)}),
    ("linear", "attention", {"linear": lambda op: NONLINEAR}),
    ("linear", "attention", {"linear": linear(1, 2)}),
    ("linear", "attention_grad_query", {"linear": linear(3)}),
    ("linear", "attention_grad_memory", {"linear": linear(2, 3)}),
    ("linear", "relu", {"linear": linear(0)}),
    ("linear", "relu_grad", {"linear": lambda op: NONLINEAR}),
    ("linear", "add", {"linear": linear(0, 1)}),
    ("linear", "multiply", {"linear": linear(0, 1, together=True)}),
    ("linear", "where", {"linear": linear(1, 2)}),
    ("linear", "concat", {"linear": lambda op: NONLINEAR}),
    ("linear", "pad", {"linear": linear(0)}),
    ("linear", "cast", {"linear": linear(0)}),
    ("linear", "einsum", {"linear": linear(0, 1)}),  # in eight bits it rounds
    ("linear", "convolution", {"linear": linear(0)}),
    ("linear", "reduce_window", {"linear": linear(0)}),
    ("linear", "window_spread", {"linear": lambda op: NONLINEAR}),
    ("linear", "reduce_max", {"linear": linear(0)}),
    ("linear", "to_host", {"linear": lambda op: NONLINEAR}),
    ("linear", "gather", {"linear": linear(1)}),
    ("linear", "update_slice", {"linear": linear(0, 1, 2, together=True)}),
    ("linear", "where", {"linear": lambda op: NONLINEAR, "local": lambda block, c, x, y: np.where(c, x * y, y)}),
    # form
    ("form", "divide", {"form": lambda op: PowerProduct((1, 1))}),
    ("form", "negative", {"form": lambda op: PowerProduct((1,))}),
    ("form", "subtract", {"form": lambda op: Combination((1.0, 1.0))}),
    ("form", "multiply", {"form": lambda op: None}),
    ("form", "add_n", {"form": lambda op: None}),
    ("form", "reduce_max", {"form": lambda op: Total()}),
    ("form", "einsum", {"form": lambda op: PowerProduct((1, 1))}),
    ("form", "constant", {"form": lambda op: PowerProduct((), 2 * op.attrs["value"] + 1)}),
    ("form", "relu", {"form": lambda op: PowerProduct((1,))}),
    ("form", "gather", {"form": lambda op: Total()}),
    # kind
    ("kind", "relu", {"kind": Kind.VIEW}),
    ("kind", "exp", {"kind": Kind.INDEXED}),
    ("kind", "cumsum", {"kind": Kind.ELEMENTWISE}),
    ("kind", "transpose", {"kind": Kind.ELEMENTWISE}),
    ("kind", "transpose", {"kind": Kind.INDEXED}),
    ("kind", "shift", {"kind": Kind.VIEW}),
    ("kind", "shift", {"kind": Kind.ELEMENTWISE}),
    ("kind", "rotate_half", {"kind": Kind.ELEMENTWISE}),
    ("kind", "reduce_sum", {"kind": Kind.ELEMENTWISE}),
    ("kind", "reduce_sum", {"kind": Kind.INDEXED}),
    ("kind", "gather", {"kind": Kind.REDUCTION}),
    ("kind", "einsum", {"kind": Kind.INDEXED}),
    ("kind", "einsum", {"kind": Kind.KERNEL}),
    ("kind", "convolution", {"kind": Kind.INDEXED}),
    ("kind", "reduce_window", {"kind": Kind.REDUCTION}),
    ("kind", "add", {"kind": Kind.CONTRACTION}),
    ("kind", "attention", {"kind": Kind.CONTRACTION}),
    ("kind", "range", {"kind": Kind.ELEMENTWISE}),
    ("kind", "range", {"kind": Kind.INDEXED}),
    ("kind", "table", {"kind": Kind.SOURCE}),
    ("kind", "input", {"kind": Kind.SOURCE}),
    ("kind", "input", {"kind": Kind.VARIABLE}),
    ("kind", "variable", {"kind": Kind.INPUT}),
    ("kind", "scan", {"kind": Kind.INDEXED}),
    ("kind", "to_host", {"kind": Kind.ELEMENTWISE}),
    # memory
    ("storage", "relu", {"storage": Storage.VIEW}),
    ("storage", "transpose", {"storage": Storage.FRESH}),
    ("storage", "transpose", {"storage": Storage.RESHAPED}),
    ("storage", "slice", {"storage": Storage.ALIAS}),
    ("storage", "reshape", {"storage": Storage.ALIAS}),
    ("storage", "reshape", {"storage": Storage.VIEW}),
    ("storage", "rename_dimension", {"storage": Storage.FRESH}),
    ("storage", "identity", {"storage": Storage.VIEW}),
    ("storage", "constant", {"storage": Storage.FRESH}),
    ("storage", "range", {"storage": Storage.VIEW}),
    ("storage", "print", {"storage": Storage.VIEW}),
    ("overwrites", "add_n", {"overwrites": EVERY}),
    ("overwrites", "add_n", {"overwrites": 0}),
    ("overwrites", "multiply", {"overwrites": 0}),
    ("overwrites", "shift", {"overwrites": 1}),
    ("overwrites", "slice", {"overwrites": 1}),
    ("overwrites", "reduce_sum", {"overwrites": 1}),
    ("overwrites", "rotate_half", {"overwrites": 1}),
    ("home", "cast", {"home": Home.RULES}),
    ("home", "relu", {"home": Home.OPERAND}),
    ("home", "to_host", {"home": Home.RULES}),
    ("home", "rename_dimension", {"home": Home.OPERAND}),
    ("home", "constrain", {"home": Home.OPERAND}),
    ("home", "identity", {"home": Home.GIVEN}),
    # made again, rounded, unique, read
    ("remade", "constant", {"remade": False}),
    ("remade", "broadcast", {"remade": False}),
    ("remade", "table", {"remade": False}),
    ("remade", "random", {"remade": True}),
    ("remade", "one_hot", {"remade": True}),
    ("repeated", "cast", {"repeated": False}),
    ("repeated", "multiply", {"repeated": False}),
    ("repeated", "exp", {"repeated": True}),
    ("repeated", "add_n", {"repeated": True}),
    ("exact", "exp", {"exact": True}),
    ("exact", "pad", {"exact": True}),
    ("exact", "reduce_sum", {"exact": True}),
    ("exact", "cast", {"exact": True}),
    ("exact", "relu", {"exact": False}),
    ("exact", "gather", {"exact": False}),
    ("exact", "table", {"exact": False}),
    ("unique", "random", {"unique": False}),
    ("unique", "variable", {"unique": False}),
    ("unique", "assign", {"unique": False}),
    ("unique", "exp", {"unique": True}),
    ("reads_part", "slice", {"reads_part": False}),
    ("writes_part", "update_slice", {"writes_part": False}),
    ("writes_part", "update_slice", {"overwrites": 0}),
    ("writes_part", "add", {"writes_part": True}),
    ("reads_part", "gather", {"reads_part": False}),
    ("reads_part", "reduce_max", {"reads_part": True}),
    ("reads_part", "top_k", {"reads_part": True}),
    ("indices", "gather", {"indices": None}),
    ("indices", "gather", {"indices": 0}),
    ("indices", "one_hot", {"indices": None}),
    ("indices", "add", {"indices": 1}),
    ("scores", "attention", {"scores": scores_of("attention", turned=("key_dim",))}),
    ("scores", "attention_grad_query", {"scores": scores_of("attention_grad_query", backward=False)}),
    ("read_share", "ragged_dot", {"read_share": lambda *_: 0.5}),
    ("read_share", "ragged_dot", {"read_share": lambda *_: 1.0}),
    ("product", "einsum", {"product": None}),
    ("product", "einsum", {"product": lambda *of: dataclasses.replace(PRODUCT(*of), contracted=1)}),
    ("product", "einsum", {"product": lambda *of: dataclasses.replace(PRODUCT(*of), swapped=not PRODUCT(*of).swapped)}),
    ("product", "convolution", {"product": OPERATIONS["einsum"].product}),
    ("product", "add", {"product": OPERATIONS["einsum"].product}),
    ("show", "print", {"show": None}),
    ("show", "print", {"show": lambda op, data: None}),
    ("show", "print", {"show": lambda op, data: print(op)}),
    ("show", "add", {"show": OPERATIONS["print"].show}),
    # roles: too weak, too strong, or of another kind
    ("roles", "slice", {"roles": every(Role.WHOLE, "dim")}),
    ("roles", "slice", {"roles": lambda op: masked(op)[1:]}),
    ("roles", "slice", {"roles": lambda op: (*masked(op)[:-1], dataclasses.replace(masked(op)[-1], role=Role.MAX))}),
    ("roles", "shift", {"roles": every(Role.WHOLE, "dim"), "lower": None}),
    ("roles", "concat", {"roles": named_factors, "lower": None}),
    ("roles", "cumsum", {"roles": every(Role.WHOLE, "dim")}),
    ("roles", "cumsum", {"roles": named_factors, "lower": None}),
    ("roles", "exp", {"roles": lambda op: named_factors(op, dict.fromkeys(op.output.shape.names, Role.WHOLE))}),
    ("roles", "exp", {"roles": lambda op: named_factors(op)[1:]}),
    ("roles", "reduce_sum", {"roles": reducing(Role.MAX)}),
    ("roles", "reduce_sum", {"roles": reducing(Role.WHOLE)}),
    ("roles", "reduce_max", {"roles": reducing(Role.SUM)}),
    ("roles", "reduce_min", {"roles": reducing(Role.MAX)}),
    ("roles", "einsum", {"roles": named_factors}),
    ("roles", "gather", {"roles": every(Role.WHOLE, "dim")}),
    ("roles", "gather", {"roles": every(Role.PARALLEL, "dim")}),
    ("roles", "one_hot", {"roles": every(Role.WHOLE, "dim")}),
    ("roles", "stack", {"roles": every(Role.WHOLE, "dim")}),
    ("roles", "argsort", {"roles": every(Role.PARALLEL, "dim")}),
    ("roles", "rotate_half", {"roles": every(Role.PARALLEL, "dim")}),
    ("roles", "attention", {"roles": every(Role.WHOLE, "memory_length", "key_dim", "value_dim", "length")}),
    ("roles", "attention", {"roles": every(Role.WHOLE, "memory_length", "value_dim")}),
    ("roles", "attention", {"roles": every(Role.SUM, "memory_length")}),
    ("roles", "attention_grad_memory", {"roles": every(Role.WHOLE, "memory_length", "key_dim", "value_dim")}),
    ("roles", "convolution", {"roles": named_factors, "lower": None}),
    ("roles", "convolution", {"roles": lambda op: [f for f in windowed(op) if f.role is not Role.SUM]}),
    ("roles", "convolution", {"roles": reducing(Role.SUM), "lower": None}),
    ("roles", "reduce_window", {"roles": named_factors, "lower": None}),
    ("roles", "window_spread", {"roles": named_factors, "lower": None}),
    ("roles", "random", {"roles": lambda op: named_factors(op, dict.fromkeys(op.output.shape.names, Role.WHOLE))}),
    ("roles", "slice", {"lower": Halo(lambda op, f, i, start, stop: (0, op.inputs[i].shape.dim(f.name).size))}),
    ("roles", "shift", {"lower": Halo(lambda op, f, i, start, stop: (0, op.inputs[i].shape.dim(f.name).size))}),
    ("roles", "shift", {"lower": Halo(lambda *of: (SHIFT.needs(*of)[0] - 1, SHIFT.needs(*of)[1]), SHIFT.wrap)}),
    ("roles", "convolution", {"lower": Halo(lambda *of: (WINDOWS.needs(*of)[0], WINDOWS.needs(*of)[1] + 1))}),
    ("roles", "reduce_window", {"lower": Halo(lambda *of: (POOLED.needs(*of)[0], POOLED.needs(*of)[1] + 1))}),
    ("split", "slice", {"lower": SHIFT}),
    ("split", "slice", {"lower": Halo(lambda op, f, i, start, stop: (start, stop))}),
    ("split", "shift", {"lower": SLICE}),
    ("split", "cumsum", {"lower": OPERATIONS["linear_recurrence"].lower}),
    ("split", "linear_recurrence", {"lower": OPERATIONS["cumsum"].lower}),
    ("split", "top_k", {"lower": OPERATIONS["cumsum"].lower}),
    ("split", "argmax", {"lower": OPERATIONS["top_k"].lower}),
    ("split", "argmax", {"roles": lambda op: [f for f in OPERATIONS["argmax"].roles(op) if f.shares is None]}),
    ("split", "convolution", {"lower": Halo(lambda op, f, i, start, stop: (start, stop))}),
    ("split", "convolution", {"lower": Halo(lambda *of: (WINDOWS.needs(*of)[0] + 1, WINDOWS.needs(*of)[1]))}),
    ("split", "convolution", {"roles": lambda op: [dataclasses.replace(f, lead=1 - f.lead) for f in windowed(op)]}),
    ("split", "reduce_window", {"lower": Halo(lambda op, f, i, start, stop: (start, stop))}),
    ("split", "window_extreme", {"lower": OPERATIONS["window_spread"].lower}),
    ("split", "window_pick", {"lower": OPERATIONS["window_spread"].lower}),
    ("split", "window_spread", {"lower": OPERATIONS["window_pick"].lower}),
    ("split", "attention", {"lower": weighed(lambda levels: (levels[0],))}),
    ("split", "attention", {"lower": weighed(lambda levels: (np.zeros(levels.shape[1:]),))}),
    ("split", "attention", {"roles": every(Role.SUMMARY, "memory_length")}),
    ("split", "attention_grad_query", {"lower": weighed(lambda levels, means: (levels[0], means.sum(0)), "query")}),
    ("split", "attention_grad_query", {"lower": OPERATIONS["attention"].lower}),
    ("split", "attention_window", {"lower": Halo(lambda op, f, i, start, stop: (start, stop))}),
    ("split", "attention_window_grad_memory", {"lower": OPERATIONS["attention_window"].lower}),
    ("split", "attention_window_grad_memory", {"local": OPERATIONS["attention_grad_memory"].local}),
    ("split", "attention_grad_memory", {"lower": OPERATIONS["attention_grad_query"].lower}),
)


@each("check, name, wrong", WRONG, parts=2)
def test_a_wrong_trait_is_seen(check: str, name: str, wrong: dict[str, Any]) -> None:
    assert any(faults(dataclasses.replace(OPERATIONS[name], **wrong), check))  # test_traits finds none in the right one


def test_every_trait_is_made_wrong() -> None:
    """A new field of the record needs a check, and a wrong value of it here."""
    seen = {field for _, _, wrong in WRONG for field in wrong}
    elsewhere = {"name", "shape", "local", "grad", "work"}  # values, gradients and work: see test_operations
    assert {f.name for f in dataclasses.fields(OpDef)} == seen | elsewhere
    assert {check for check, _, _ in WRONG} == set(CHECKS)


@pytest.mark.parametrize("excuse", samples.EXCUSED, ids="-".join)
def test_no_excuse_is_idle(excuse: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    name, trait = excuse
    monkeypatch.delitem(samples.EXCUSED, excuse)
    assert any(faults(OPERATIONS[name], "linear" if trait == "linear" else "roles"))


# ---------------------------------------------------------------- what linear lets pass

PARTS, N, A = (mtf.Dimension(name, size) for name, size in (("part", 4), ("n", 6), ("a", 3)))


def test_a_pending_sum_passes_a_recurrence() -> None:
    """h = m h + x, x a sum of parts on four cores: what is reduced is one number, not x."""
    rng = np.random.default_rng(0)
    m, parts = rng.normal(size=(3, 6)), rng.normal(size=(3, 6, 4))
    with mtf.Graph():
        x = mtf.reduce_sum(mtf.input("parts", [A, N, PARTS], "float64"), reduced_dim=PARTS)
        y = linear_recurrence(mtf.input("m", [A, N], "float64"), x, N)
        total = mtf.reduce_sum(y)
    h, wanted = np.zeros(3), 0.0
    for n in range(6):
        h = m[:, n] * h + parts.sum(2)[:, n]
        wanted += h.sum()
    _passes(total, {"m": m, "parts": parts}, wanted)


@pytest.mark.parametrize("which", ["v", "q of dy", "k of dy", "kv of dy", "q of v"])
def test_a_pending_sum_passes_attention(which: str) -> None:
    """Attention in v, its gradients in the cotangent, that for the queries in v, too."""
    i, j, d, e = (mtf.Dimension(name, size) for name, size in (("i", 4), ("j", 5), ("d", 3), ("e", 2)))
    shapes = {"q": [i, d], "k": [j, d], "v": [j, e], "dy": [i, e]}
    pending = which.rpartition(" ")[2]
    rng = np.random.default_rng(1)
    feeds = {name: rng.normal(size=[x.size for x in shape]) for name, shape in shapes.items()}
    feeds[pending] = rng.normal(size=(*feeds[pending].shape, 4))
    with mtf.Graph():
        given = {
            name: mtf.input(name, [*shape, PARTS] if name == pending else shape, "float64")
            for name, shape in shapes.items()
        }
        given[pending] = mtf.reduce_sum(given[pending], reduced_dim=PARTS)
        y = mtf.attention(given["q"], given["k"], given["v"], i, j, d, e)
        sides = [given[name] for name in which.partition(" ")[0]]
        made = mtf.gradients([y], sides, [given["dy"]]) if " " in which else [y]
        total = mtf.add_n([mtf.reduce_sum(x * mtf.reduce_sum(given["k"])) for x in made if x is not None])
    whole = {**feeds, pending: feeds[pending].sum(-1)}
    q, k, v, dy = (whole[name] for name in shapes)
    p = np.exp(q @ k.T / np.sqrt(3))
    p /= p.sum(1, keepdims=True)
    ds = p * (dy @ v.T - (dy * (p @ v)).sum(1, keepdims=True)) / np.sqrt(3)
    dq, dk, dv = ds @ k, ds.T @ q, p.T @ dy
    results = {"v": [p @ v], "q of dy": [dq], "k of dy": [dk], "kv of dy": [dk, dv], "q of v": [dq]}
    _passes(total, feeds, sum(x.sum() for x in results[which]) * k.sum())


def _passes(total: mtf.Tensor, feeds: Mapping[str, Array], wanted: float) -> None:
    program = mtf.lower({"total": total}, mesh="p:4", layout="part:p", precision="highest")
    assert [(c.kind, c.payload_bytes) for c in program.collectives] == [("all_reduce", 8)]
    for executor in ("exact", "fast"):
        (found,) = run(program, feeds, executor)
        assert found["total"] == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parametrize("table", [False, True])
def test_a_sum_that_trips_subtract_from_is_reduced_once(table: bool) -> None:
    """0 - x[0] - x[1] - ..., each x a sum of parts on four cores."""
    parts = np.random.default_rng(2).normal(size=(6, 3, 4))
    with mtf.Graph():
        x = mtf.input("parts", [N, A, PARTS], "float64")
        step: Any = lambda c, s: ((c[0] - mtf.reduce_sum(s[0], reduced_dim=PARTS),), ())  # noqa: E731
        none = mtf.constant(np.zeros(3), [A], "float64") if table else mtf.zeros([A], "float64")
        ((y,), _) = mtf.scan(step, [none], [x], N)
    program = mtf.lower({"y": y}, mesh="p:4", layout="part:p")
    assert [(c.kind, c.payload_bytes, c.count) for c in program.collectives] == [("all_reduce", 24, 1)]
    for executor in ("exact", "fast"):
        (found,) = run(program, {"parts": parts}, executor)
        np.testing.assert_allclose(found["y"], -parts.sum((0, 2)), rtol=1e-12)


def test_a_product_in_eight_bits_waits_for_its_operands_sum() -> None:
    """Two halves are 1 on the grid, but each of them rounds to 0."""
    halves = np.full((3, 6, 2), 0.5)
    with mtf.Graph():
        two = mtf.Dimension("part", 2)
        x = mtf.reduce_sum(mtf.input("x", [A, N, two], "float64"), reduced_dim=two)
        y = mtf.reduce_sum(mtf.einsum([x, mtf.ones([N], "float64")], [A], precision="int8"))
    for layout in ("", "part:p"):
        (found,) = run(mtf.lower({"y": y}, mesh="p:2", layout=layout), {"x": halves})
        assert found["y"] == 18
