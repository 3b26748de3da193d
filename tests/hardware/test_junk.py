"""Every public name of the hardware floor is called with junk: only a HardwareError may come out."""

from __future__ import annotations

import inspect
import itertools
import re
from collections.abc import Callable
from fractions import Fraction

import numpy as np

import hardware
from hardware import CHIPS, Chip, Demand, HardwareError, Links, Matmul, Placement, Slice, Torus, Work
from hardware.placement import PlacementFactor, placements
from tests.core.public import public_names
from tests.effort import each

JUNK: list[Callable[[], object]] = [
    lambda: None, lambda: "", lambda: "x", lambda: "xy", lambda: "v3", lambda: "v3-8", lambda: "v3-٨",
    lambda: "ä b\n\0", lambda: "v3-" + 5000 * "9", lambda: b"bytes", lambda: 0, lambda: 1, lambda: -3,
    lambda: 10**30, lambda: 10**400, lambda: 1.5, lambda: float("nan"), lambda: float("-inf"), lambda: 1j, lambda: True,
    lambda: np.float32(0.5), lambda: np.int64(3), lambda: np.bool_(True), lambda: np.str_("x"),
    lambda: np.ones(3), lambda: np.ones((8, 4)), lambda: np.array("x"), lambda: np.array([None]),
    lambda: Fraction(1, 3), lambda: [], lambda: [1], lambda: [None, "x"], lambda: ["x"], lambda: ("x", "x"),
    lambda: (1, 2), lambda: [[1], [2, 3]], lambda: ((4, True),), lambda: {}, lambda: {"x": None}, lambda: {"x": 8},
    lambda: {"x": -8}, lambda: {3: "x"}, lambda: {"x"}, object, lambda: lambda *args: None, lambda: iter([1]),
    lambda: CHIPS["v3"], lambda: Slice("v3-8"), lambda: Links(1e9), lambda: Torus((2, 2)), lambda: Work(),
    lambda: [Work()], lambda: (Matmul(1, 2, 3),), lambda: Demand("broadcast", ("x",), 1), lambda: [placed()],
    lambda: [Demand("all_reduce", ("y",), 1.0)], lambda: (("x", (PlacementFactor(0, 2, 1),)),),
    lambda: PlacementFactor(9, 2, 1),
    lambda: (("x", (PlacementFactor("a", None, -1),)),), lambda: "collective_permute", lambda: ["x", "x"],
]  # fmt: skip


def placed() -> Placement:
    return next(placements("v3-8", {"x": 8}))


SANE: dict[str, Callable[[], object]] = {
    "slice": lambda: Slice("v3-8"), "slice_": lambda: Slice("v3-8"), "mesh": lambda: {"x": 8}, "chip": lambda: "v3",
    "work": Work, "placement": placed, "kind": lambda: "all_reduce", "axes": lambda: ["x"],
    "payload_bytes": lambda: 1e6, "bytes_per_second": lambda: 1e9, "shape": lambda: (4, 4), "costs": list,
    "m": lambda: 8, "k": lambda: 8, "n": lambda: 8, "factors": lambda: placed().factors, "path": lambda: "no.toml",
}  # fmt: skip
OWN: dict[tuple[str, str], Callable[[], object]] = {
    ("Slice", "name"): lambda: "v3-8", ("Slice", "chip"): lambda: None, ("get_chip", "name"): lambda: "v3",
    ("legal_slices", "kind"): lambda: "v3",
    **{("Chip", name): (lambda name=name: getattr(CHIPS["v5e"], name)) for name in inspect.signature(Chip).parameters},
}  # fmt: skip
PUBLIC = {
    name: getattr(hardware, name) for name in public_names(hardware)
    if callable(getattr(hardware, name)) and name != "HardwareError"
}  # fmt: skip


def call(function: Callable[..., object], given: dict[str, Callable[[], object]]) -> None:
    arguments = {name: make() for name, make in given.items()}
    try:
        result = function(**arguments)
        if inspect.isgenerator(result):
            list(itertools.islice(result, 2))
    except HardwareError as fault:
        if not 0 < len(str(fault)) < 12000:
            raise
    except Exception as fault:
        if not (isinstance(fault, TypeError) and re.search(r"missing \d+ required", str(fault))):
            raise AssertionError(f"{function.__name__}({arguments}): {fault!r}") from fault


@each("name", list(PUBLIC))
def test_junk_gives_a_hardware_error(name):
    function = PUBLIC[name]
    parameters = inspect.signature(function).parameters.values()
    needed = [p.name for p in parameters if p.default is p.empty]
    good = {n: OWN.get((name, n), SANE.get(n, lambda: None)) for n in needed}
    call(function, {})
    for parameter, junk in itertools.product(parameters, JUNK):  # one argument wrong, the others right
        call(function, {**good, parameter.name: junk})
    rng = np.random.default_rng(len(name))
    for _ in range(100):
        call(function, {n: JUNK[int(rng.integers(len(JUNK)))] for n in needed})


def test_what_is_right_is_taken():
    for name, function in PUBLIC.items():
        needed = [p.name for p in inspect.signature(function).parameters.values() if p.default is p.empty]
        if name not in ("load_chip", "Cost", "Time"):
            function(**{n: OWN.get((name, n), SANE.get(n, lambda: None))() for n in needed})


@each("where, junk", [(where, junk) for where in range(7) for junk in range(len(JUNK))])
def test_junk_in_methods(where, junk):
    thing = JUNK[junk]()
    mxu, torus = hardware.MXU(2, 3), Torus((4, 2), (True, False))
    uses = [
        lambda: mxu.run(thing, np.ones((1, 2))), lambda: mxu.run(np.ones((2, 2)), thing),
        lambda: mxu.cycles(thing, 2, 3), lambda: mxu.cycles(1, 2, 3, thing),
        lambda: torus.neighbour(0, 0, thing), lambda: torus.route(thing, 1), lambda: torus.node(thing),
    ]  # fmt: skip
    call(uses[where], {})


@each("junk", range(len(JUNK)))
def test_junk_in_closed_forms(junk):
    from hardware import collectives
    from hardware.chip_files import chip_from_table

    thing, links = JUNK[junk](), Links(1e9)
    for form in (
        collectives.all_gather_seconds, collectives.reduce_scatter_seconds, collectives.all_reduce_seconds,
        collectives.all_to_all_seconds, collectives.all_to_all_bound_seconds, collectives.broadcast_seconds,
    ):  # fmt: skip
        for arguments in ((thing, [(4, True)], links), (1, thing, links), (1, [thing], links), (1, [(4, True)], thing)):
            call(lambda form=form, arguments=arguments: form(*arguments), {})
        if form is not collectives.all_to_all_bound_seconds:
            call(lambda form=form: form(1, [(4, True)], links, thing), {})
    for arguments in ((thing, (4, True), links), (1, thing, links), (1, (4, True), links, thing)):
        call(lambda arguments=arguments: collectives.ring_stage_seconds(*arguments), {})
    call(lambda: collectives.permute_seconds(1, thing, links), {})
    call(lambda: collectives.ring_sent_bytes(thing, 1, 2), {})
    call(lambda: chip_from_table(thing), {})
    for key in ("name", "base", "sources", "pod_shape", "vpu_bf16", "wrap_axis"):
        call(lambda key=key: chip_from_table({"name": "own", "base": "v5e", key: thing}), {})


@each("junk", range(len(JUNK)))
def test_junk_in_messages(junk):
    from hardware import point_plans, ring_plans

    torus, data = Torus((2, 2)), [np.ones((4, 2))] * 4
    good = {"torus": lambda: torus, "data": lambda: data, "blocks": lambda: data, "target": lambda: lambda node: node}
    for make in (
        ring_plans.all_gather, ring_plans.reduce_scatter, ring_plans.all_reduce,
        point_plans.all_to_all, point_plans.permute, point_plans.broadcast,
    ):  # fmt: skip
        parameters = inspect.signature(make).parameters.values()
        needed = {p.name: good[p.name] for p in parameters if p.default is p.empty}
        for parameter in parameters:
            if parameter.name == "chunks" and isinstance(JUNK[junk](), int) and JUNK[junk]() > 1000:
                continue  # so many messages are what was asked for
            call(make, {**needed, parameter.name: JUNK[junk]})
    call(lambda: ring_plans.run_together(JUNK[junk](), [ring_plans.all_reduce(torus, data)]), {})
    call(lambda: ring_plans.run_together(Links(1e9), JUNK[junk]()), {})
