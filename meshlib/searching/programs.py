"""The programs of a search: one per choice of the builder's arguments, each with its session."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Any

from layouts import LayoutRules, Mesh
from meshlib.core.arguments import number
from meshlib.core.canonical_keys import key_of
from meshlib.core.compiler import XLA_TPU, Compiler
from meshlib.core.errors import GraphError, LayoutError, SliceError, nearest
from meshlib.core.graph import Graph, Operation
from meshlib.core.opdef import Home, Kind
from meshlib.core.replay import all_operations
from meshlib.core.source_lines import users_function
from meshlib.core.wording import argument
from meshlib.estimation import Estimate, estimate
from meshlib.lowering import Session
from meshlib.lowering.assigned import Subjects, stationary_axes
from meshlib.models.stages import MICROBATCH
from meshlib.searching.bounds.candidate import Bounds
from meshlib.searching.bounds.least_memory import LeastMemory
from meshlib.searching.outcomes import ESTIMATED, REFUSED, Figures, Outcome
from meshlib.searching.roles import TensorClasses
from meshlib.searching.space import Candidate, Choices

Build = Callable[..., tuple[Any, Sequence[Operation]]]
MODEL_ERROR = 0.038  # at least the median error on published training runs: `python -m meshlib validate`


@dataclass(frozen=True)
class Objective:
    """The objective: a figure of the estimate to minimise, per size of some dims of the program."""

    name: str
    of: Callable[[Estimate], float]
    bound: Callable[[Bounds, Candidate], float]
    # a closer bound, at a hundred times the cost of `bound`; and those of many candidates, at ten times its cost each
    closer: Callable[[Bounds, Candidate], float] | None = None
    together: Callable[[Bounds, Sequence[Candidate]], list[float]] | None = None
    given: object = None  # the figure's name, or the function, as given by the user
    error: float = 0.0  # relative differences below this are insignificant

    @property
    def key(self) -> str:
        """Canonical key of a figure's name, or of a function's code and closure. Raises: GraphError without one."""
        return key_of("search: objective", self.given)

    @staticmethod
    def named(given: object) -> Objective:
        """An objective from the user's argument: a figure of `Estimate` by name, "usd", "memory", or a function."""
        if given == "memory":
            return Objective("peak memory", lambda est: est.memory.peak_bytes, _state, given=given)
        if given == "usd":
            return Objective(
                "cost of a step", lambda est: est.usd(), _usd, _closer_usd, _usd_of_many, given, MODEL_ERROR
            )
        if given == "step_seconds":
            return Objective(
                "step", lambda est: est.step_seconds, Bounds.seconds, Bounds.critical_path_seconds,
                Bounds.core_time_seconds, given, MODEL_ERROR,
            )  # fmt: skip
        if isinstance(given, str) and isinstance(getattr(Estimate, given, None), property):
            return Objective(
                given, lambda est: number(getattr(est, given), "search", argument("objective")), _nothing, given=given
            )
        if not isinstance(given, str) and callable(given):
            function: Callable[[Estimate], float] = given

            def figure(est: Estimate) -> float:
                with users_function("search: objective"):
                    value = function(est)
                return number(value, "search", "objective")

            return Objective("objective", figure, _nothing, given=given)
        figures = ["usd", "memory", *(name for name, x in vars(Estimate).items() if isinstance(x, property))]
        raise GraphError(
            f"search: {argument('objective')} must be 'step_seconds', 'usd', 'memory', the name of another figure of "
            f"mtf.Estimate, or a function of an Estimate, got {given!r:.80}{nearest(given, figures)}"
        )


def _usd(bounds: Bounds, c: Candidate) -> float:
    return _rate(c) * bounds.seconds(c)


def _closer_usd(bounds: Bounds, c: Candidate) -> float:
    return _rate(c) * bounds.critical_path_seconds(c)


def _usd_of_many(bounds: Bounds, candidates: Sequence[Candidate]) -> list[float]:
    return [_rate(c) * value for c, value in zip(candidates, bounds.core_time_seconds(candidates), strict=True)]


def _rate(c: Candidate) -> float:
    return (c.slice.usd_per_hour or 0.0) / 3600


def _state(bounds: Bounds, c: Candidate) -> float:
    try:
        return bounds.held_bytes(c)
    except LayoutError:  # the candidate will be refused
        return 0.0


def _nothing(bounds: Bounds, c: Candidate) -> float:
    return float("-inf")


@dataclass(eq=False)
class SearchProblem:
    """The program of one choice of builder arguments, as seen by the search."""

    choices: Choices
    outputs: Any
    updates: Sequence[Operation]
    compiler: Compiler
    session: Session
    subjects: Subjects
    tensors: TensorClasses
    dims: tuple[str, ...]
    batch: str | None
    units: float
    _shapes: list[tuple[Any, str]] = field(default_factory=list)
    _bounds: dict[Session, Bounds] = field(default_factory=dict)  # of graphs with sizes that follow from a layout
    _memory: dict[Session, LeastMemory] = field(default_factory=dict)

    @cached_property
    def named(self) -> tuple[str, ...]:
        """The axes named by constraints in the program."""
        bound = [op.attrs["layout"] for op in self.subjects.operations if op.opdef.home is Home.GIVEN]
        return tuple(dict.fromkeys(axis for rules in bound for axis in rules.axes))

    @cached_property
    def bounds(self) -> Bounds:
        """Lower bounds for all layouts."""
        return self._bounds_of(self.session, False)

    def settled(self, c: Candidate) -> Session:
        """The session with the sizes that follow from a candidate's layout; the program's own if none do."""
        return self.session.under(c.mesh, c.layout)

    def bounds_under(self, c: Candidate) -> Bounds:
        """Closer bounds for all layouts from which the same sizes follow; `bounds` if none do.

        The program of such a layout is that of a graph with these sizes, so bounds of that graph hold.
        """
        session = self.settled(c)
        if session is self.session:
            return self.bounds
        if session not in self._bounds:
            self._bounds[session] = self._bounds_of(session, True)
        return self._bounds[session]

    def needed_bytes(self, c: Candidate) -> float:
        """Lower bound on what the compiled step needs, at ten times the cost of `Bounds.held_bytes`.

        Raises: LayoutError if the layout cannot shard a variable.
        """
        session = self.settled(c)
        if session not in self._memory:
            outputs, updates = session.asked
            self._memory[session] = LeastMemory.of([*outputs.values()], updates)
        return self._memory[session].needed_bytes(c.layout, c.mesh, self.compiler)

    def _bounds_of(self, session: Session, settled: bool) -> Bounds:
        mesh = dict.fromkeys(self.named, 1) or {"device": 1}
        return Bounds.of(session.lower(mesh, compiler=self.compiler), session.subjects.operations, settled)

    @property
    def key(self) -> str:
        """Canonical key of the program, its builder arguments, and the units of the objective."""
        return key_of("search", self.choices, self.outputs, self.updates, self.units)

    def alike(self, c: Candidate) -> object:
        """Key that is equal for candidates that differ in axis names alone: equal shardings of all tensors, and equal
        sets of dims that each axis may split."""
        numbers: dict[str, int] = {}
        shardings: list[object] = []
        for shape, scope in self._shapes:
            sharding = c.layout.fitting(shape, c.mesh, scope)
            shardings.append(
                tuple(tuple(numbers.setdefault(a, len(numbers)) for a in sharding.of(d)) for d in shape.names)
            )
            if scope == "variables" and self.compiler.stationary_weights:
                shardings.append(frozenset(numbers.get(a) for d in shape for a in stationary_axes(c.layout, d)))
        axes: dict[str, set[str]] = {axis: set() for axis in [*numbers, *c.mesh.sizes_by_axis]}
        for rule in c.layout.rules:
            for axis in rule.axes:
                axes[axis].add(rule.dim)
        named = tuple((c.mesh.axis_size(axis), frozenset(dims)) for axis, dims in axes.items())
        return (c.choices, c.slice, named, tuple(shardings))

    def closer_bound(self, c: Candidate, objective: Objective) -> float:
        """A candidate's closer bound."""
        assert objective.closer is not None
        return objective.closer(self.bounds_under(c), c) / self.units

    def bounds_together(
        self, candidates: Sequence[Candidate], objective: Objective, limit: float
    ) -> list[tuple[float, float]]:
        """Bounds of candidates, and on their bytes: of one slice, number of axes, and sizes that follow from layouts.

        Those that cannot fit, or be below `limit` by their products alone, have no closer bound.
        """
        assert objective.together is not None
        bounds = self.bounds_under(candidates[0])
        own = [(objective.bound(bounds, c) / self.units, _state(bounds, c)) for c in candidates]
        left = [
            n for n, c in enumerate(candidates)
            if own[n][0] < limit and own[n][1] <= c.slice.usable_hbm_bytes_per_device
        ]  # fmt: skip
        for n, bound in zip(left, objective.together(bounds, [candidates[n] for n in left]), strict=True):
            own[n] = max(own[n][0], bound / self.units), own[n][1]
        return own

    def estimated(self, c: Candidate, objective: Objective, bound: float) -> Outcome:
        """Lower and estimate a candidate."""
        try:
            est = self.estimate(c)
            value = objective.of(est) / self.units
        except (LayoutError, SliceError) as fault:  # also a chip without a required rate or price
            return Outcome(c, REFUSED, bound, why=str(fault).splitlines()[0])
        return Outcome(c, ESTIMATED, bound, value, Figures.of(est))

    def estimate(self, c: Candidate) -> Estimate:
        """The estimate of a candidate."""
        return estimate(self.session.lower(c.mesh, c.layout, compiler=self.compiler), c.slice)


def _dims_to_split(
    sources: Sequence[Operation], sizes: Mapping[str, int], forbidden: Collection[str]
) -> tuple[str, ...]:
    """The dims of inputs and variables that a layout may split."""
    named = dict.fromkeys(d.name for op in sources for d in op.output.shape)
    if MICROBATCH in sizes:  # before and after the stages, microbatches may be split over their axis
        named[MICROBATCH] = None
    return tuple(n for n in named if sizes.get(n, 1) > 1 and n not in forbidden)


def problem_of(
    build: Build,
    choices: Choices,
    per: Sequence[str],
    forbid: Sequence[str],
    compiler: Compiler = XLA_TPU,
    beside: SearchProblem | None = None,
) -> SearchProblem:
    """Build the program of a choice; `beside` is that of another choice, with which caches are shared.

    Raises: GraphError where the builder gives no outputs and updates, or a dim is unknown.
    """
    with Graph(), users_function("search: build"):
        built = build(**dict(choices))
    if not isinstance(built, tuple) or len(built) != 2:
        raise GraphError(f"search: build must return (outputs, updates), as mtf.lower takes them, got {built!r:.80}")
    outputs, updates = built
    session = Session(outputs, updates) if beside is None else beside.session.sibling(outputs, updates)
    subjects = session.subjects
    strict, free = subjects.judged(LayoutRules(), Mesh("device:1"))
    tensors = TensorClasses.of([*strict, *free])
    sources = [op for op in subjects.operations if op.opdef.kind in (Kind.INPUT, Kind.VARIABLE) and _outside(op)]
    stacked = {op.loop.dim.name for op in all_operations(subjects.operations) if op.loop is not None}
    sizes = tensors.sizes
    for of, names in (("per", per), ("forbid", forbid)):
        for name in names:
            if name not in sizes:
                hint = nearest(name, sizes) or f"; there are {', '.join(sizes)}"
                raise GraphError(f"search: {argument(of)} has dim {name!r}, which the program does not have{hint}")
    dims = _dims_to_split(sources, sizes, {*stacked, *forbid})
    units = prod([float(sizes[name]) for name in per], start=1.0)
    inputs = [op.output.shape.names for op in sources if op.opdef.kind is Kind.INPUT]
    batch = next((names[0] for names in inputs if names and names[0] in dims), None)
    return SearchProblem(
        choices, outputs, updates, compiler, session, subjects, tensors, dims, batch, units, list(tensors.counts)
    )


def _outside(op: Operation) -> bool:
    return op.graph.parent is None


# Arguments of a model's builder beyond those of `train_step`.
