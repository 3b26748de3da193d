"""Tracing of a JAX function into records: calls inlined, constants folded, every step with its source line."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np

from meshlib.jax.importing.axes import Axes
from meshlib.jax.importing.code import Array, Code, CodeStep, SourcePlace, Var, numpy_type, scan_sizes
from meshlib.jax.importing.contraction import mark_scores
from meshlib.jax.importing.control import policy_of
from meshlib.jax.importing.custom_rules import has_own_rule, named
from meshlib.jax.importing.draws import DRAWS, OPERANDS
from meshlib.jax.importing.expansions import expanded
from meshlib.jax.importing.integers import as_signed
from meshlib.jax.importing.kernels import KINDS, Kernels, kernel_name, raised, traced_kernel, without_kernel
from meshlib.jax.importing.keyed import AGAIN, Keyed, Level
from meshlib.jax.importing.pairs import ComplexPair, Value, aval_of, flat, in_parts, is_complex, packed, parts_of
from meshlib.jax.importing.places import author_of, place_of, scopes_of
from meshlib.jax.importing.rewrites import OWN_LINES, REWRITES
from meshlib.jax.importing.rewrites.mapped import mapped_axes
from meshlib.jax.importing.ruled import KIND as CUSTOM_RULE
from meshlib.jax.importing.ruled import first_line, ruled
from meshlib.jax.importing.table import RULES
from meshlib.jax.importing.trips import count_trips, follow

# Call primitives -> parameter that holds the called jaxpr.
_CALLS = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "xla_call": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "custom_vjp_call_jaxpr": "fun_jaxpr",
    "custom_lin": "jaxpr",
    "composite": "jaxpr",
    "custom_vmap_call": "call",
    "linear_call": "callee",
    "remat_call": "call_jaxpr",
}
_CHECKPOINTS = ("checkpoint", "remat", "remat2")
# Constants are folded up to this many bytes, so that a table built from others is one table.
_FOLDED_BYTES = 16 * 2**20


@dataclass
class Tracing:
    """Converts jaxprs to `Code`; `axes` numbers their index spaces."""

    axes: Axes
    most_trips: int | None = None  # bound of loops that no known number bounds
    half: str = "float16"  # dtype that replaces float16
    levels: list[Level] = field(default_factory=lambda: [Level()])  # the bodies around the current step
    keyed: Keyed = field(default_factory=Keyed)
    policy: Callable[..., Any] | None = None  # of the innermost enclosing checkpoint
    saved: int = 0
    kernels: Kernels = field(default_factory=dict)  # replacements of opaque kernels by name
    met: list[str] = field(default_factory=list)  # kernel names that occurred
    unreached: set[Value] = field(default_factory=set)  # results of callbacks that only raise
    axis_env: tuple[tuple[str, int], ...] = ()  # axes of the enclosing `shard_map`
    in_rule: bool = False  # inside a derivative rule, where nothing is differentiated further
    refused: dict[str, int] = field(default_factory=dict)  # unsupported calls, with counts

    # ------------------------------------------------------------ values

    def var(self, aval: Any, data: bool = True, of_keys: bool = False) -> Var:
        """A value known by its type alone. `of_keys`: it is a key if raw keys have that type."""
        # Tangents of integers have no value.
        dtype = "bool" if aval.dtype == jax.dtypes.float0 else str(aval.dtype)
        dtype = self.half if dtype == "float16" else dtype
        key = dtype.startswith("key<") or (of_keys and dtype == "uint32")
        level = len(self.levels) - 1
        moves = data and "float" in dtype
        return Var(tuple(map(int, aval.shape)), dtype, self.axes.space(), key=key, data=data, moves=moves, level=level)

    def known(self, value: Any, aval: Any) -> Value:
        """A value with known elements."""
        if is_complex(aval):
            parts = [self.var(part, data=False) for part in parts_of([aval])]
            for x, array in zip(parts, (np.real(value), np.imag(value)), strict=True):
                self.set_known(x, np.asarray(array))
            return ComplexPair(*parts)
        x = self.var(aval, data=False)
        if not x.key:
            self.set_known(x, np.zeros(x.shape, bool) if aval.dtype == jax.dtypes.float0 else np.asarray(value))
        return x

    def set_known(self, x: Var, array: Array) -> None:
        """Set the known elements of a value."""
        if array.size and (array.size == 1 or _uniform(array)):
            x.const = np.asarray(array.reshape(-1)[0])
        else:
            x.const = array
        if x.dtype == "bfloat16" and x.const.dtype == np.float16:
            x.const = x.const.astype(numpy_type(x.dtype))
        x.axes = [self.axes.new(n) for n in x.shape]
        self.axes.hold(x.space, x.axes)

    # ------------------------------------------------------------ code

    def body(self, closed: Any, ins: Sequence[Value], around: SourcePlace, trips: int = 0) -> Code:
        """A jaxpr as a separate body; `ins` are its arguments."""
        self.levels.append(Level(trips))
        outs = flat(self.inline(closed, ins, around, inherit=False))
        return Code([], outs, self.levels.pop().steps)

    def inline(self, closed: Any, ins: Sequence[Value], around: SourcePlace, inherit: bool) -> list[Value]:
        """Add the steps of a jaxpr and return its results. `inherit`: its steps get the caller's source line."""
        jaxpr, consts = getattr(closed, "jaxpr", closed), getattr(closed, "consts", ())
        env: dict[Any, Value] = dict(zip(jaxpr.invars, ins, strict=True))
        for v, value in zip(jaxpr.constvars, consts, strict=True):
            env[v] = self.known(value, v.aval)

        def read(atom: Any) -> Value:
            return self.known(atom.val, atom.aval) if hasattr(atom, "val") else env[atom]

        for eqn in jaxpr.eqns:
            place = replace(around, scope=(*around.scope, *scopes_of(eqn))) if inherit else place_of(eqn, around)
            env.update(zip(eqn.outvars, self._step(eqn, [read(v) for v in eqn.invars], place), strict=True))
        return [read(v) for v in jaxpr.outvars]

    def _step(self, eqn: Any, ins: list[Value], place: SourcePlace) -> Sequence[Value]:
        name, params = eqn.primitive.name, eqn.params
        if not self.in_rule and has_own_rule(eqn) and any(x.moves for x in flat(ins)):
            return self._ruled(eqn, ins, place)
        if name in KINDS:
            return self._kernel(eqn, ins, place)
        if (inner := params.get(_CALLS.get(name, ""))) is not None:
            name = f"jit:{params.get('name', '')}"
            if not self._is_known(name, inner, len(ins)) or any(is_complex(v.aval) for v in eqn.outvars):
                return self.inline(inner, ins, place, inherit=author_of(inner) != "user")
        if (written := expanded(eqn, self.axis_env)) is not None:
            return self.inline(written, ins, place, inherit=True)
        if name in _CHECKPOINTS:
            return self._checkpoint(eqn, ins, place)
        if name == "scan":
            return self._scan(eqn, ins, place)
        if name == "cond":
            return self._cond(eqn, ins, place)
        branch = _branch_here(params["platforms"]) if name == "platform_index" else None
        if branch is not None:
            return [self.known(np.int32(branch), eqn.outvars[0].aval)]
        if any(isinstance(x, ComplexPair) for x in ins) or any(is_complex(v.aval) for v in eqn.outvars):
            return self._in_parts(eqn, ins, place)
        real = flat(ins)
        rewritten = self._rewritten(name, eqn, real, place)
        return self._add(name, eqn, real, place) if rewritten is None else rewritten

    def _is_known(self, name: str, inner: Any, count: int) -> bool:
        """True if a call is a function of JAX's that has a rule here, and contains no derivative rules of others."""
        has_rule = (name in RULES or name in REWRITES) and count == OPERANDS.get(name, count)
        return author_of(inner) == "jax" and has_rule and not self._holds_rules(inner)

    def _rewritten(self, name: str, eqn: Any, real: list[Var], place: SourcePlace) -> Sequence[Value] | None:
        """The results of a primitive's rewrite; None if it has none."""
        params = {**eqn.params, "most_trips": self.most_trips} if name == "while" else eqn.params
        step = CodeStep(name, real, [], params, place)
        other = as_signed(step) or (REWRITES[name](step) if name in REWRITES else None)
        if other is None:
            return None
        try:
            written = jax.make_jaxpr(other)(*(aval_of(v.aval) for v in eqn.invars))
        except (NotImplementedError, TypeError):  # ragged_all_to_all, pbroadcast, `axis_index_groups`
            return self._refuse(eqn, f"{name} ({place.line}): a collective in it that JAX cannot map over blocks")
        outer = self.axis_env
        if name == "shard_map":
            self.axis_env = (*outer, *mapped_axes(params).items())
        inlined = self.inline(written, real, place, inherit=name not in OWN_LINES)
        self.axis_env = outer
        return inlined

    def _in_parts(self, eqn: Any, ins: Sequence[Value], place: SourcePlace) -> list[Value]:
        """Add a step on complex numbers, in parts."""
        function, avals = in_parts(eqn, [isinstance(x, ComplexPair) for x in ins]), [v.aval for v in eqn.outvars]
        if function is None:
            kind = f"complex {eqn.primitive.name}"
            return packed(self._add(kind, eqn, flat(ins), place, avals=parts_of(avals)), avals)
        written = jax.make_jaxpr(function)(*map(aval_of, flat(ins)))
        return packed(flat(self.inline(written, flat(ins), place, inherit=True)), avals)

    def _add(
        self,
        kind: str,
        eqn: Any,
        ins: list[Var],
        place: SourcePlace,
        bodies: tuple[Code, ...] = (),
        avals: Sequence[Any] | None = None,
        reads: Sequence[Var] | None = None,
        **params: Any,
    ) -> list[Var]:
        """Add a step.

        `avals`: the types of its results if they differ from JAX's; `reads`: everything that its results depend on, if
        that is more than `ins`.
        """
        of_keys = any(x.key for x in ins) and kind != "random_bits"
        avals = [v.aval for v in eqn.outvars] if avals is None else avals
        reads = ins if reads is None else reads
        outs = [self.var(aval, any(x.data for x in reads), of_keys) for aval in avals]
        if kind == "stop_gradient" or not any(x.moves for x in reads):
            for out in outs:
                out.moves = False
        step = CodeStep(kind, ins, outs, {**eqn.params, **params}, place, bodies)
        if self._are_empty(outs) or self._folded(step):
            return outs
        if not bodies and _reads_keys(step):
            drawn = self.keyed.add(step, self.levels)
            why = f"{kind.removeprefix('jit:_')} ({place.line}): {AGAIN}"
            return flat(self._refuse(eqn, why)) if drawn is None else drawn
        for out in outs:
            out.maker = step
        if any(x.trips is not None for x in ins):
            follow(step)
        if self.policy is not None and len(outs) == 1 and (where := _saved_in(self.policy, eqn)) is not None:
            self.saved += 1
            step.saved, step.on_host = f"saved_{self.saved}", where == "host"
        self.levels[-1].steps.append(step)
        return outs

    def _are_empty(self, outs: Sequence[Var]) -> bool:
        """True if all results have no elements; those that have none are known."""
        empty = [out for out in outs if 0 in out.shape]
        for out in empty:
            if not out.key:
                self.set_known(out, np.zeros(out.shape, numpy_type(out.dtype)))
        return len(empty) == len(outs)

    def _folded(self, step: CodeStep) -> bool:
        """Fold a step whose operands are known; returns whether it succeeded."""
        rule = RULES.get(step.kind)
        if rule is None or rule.fold is None or len(step.outs) != 1 or any(x.const is None for x in step.ins):
            return False
        (out,) = step.outs
        if out.key or not step.ins:
            return False
        if all(x.number is not None for x in step.ins) and (rule.by_element or step.kind in _NUMBERS_STAY):
            array = rule.fold(step, *(x.const for x in step.ins)) if rule.by_element else step.ins[0].const
            assert array is not None
            self.set_known(out, _typed(array, out))
            return True
        if int(np.prod(out.shape)) * 4 > _FOLDED_BYTES or step.kind == "broadcast_in_dim":
            return False
        arrays = [x.elements for x in step.ins]
        self.set_known(out, _typed(np.broadcast_to(rule.fold(step, *arrays), out.shape), out))
        return True

    # ------------------------------------------------------------ primitives with bodies

    def _holding(
        self,
        kind: str,
        eqn: Any,
        ins: list[Var],
        place: SourcePlace,
        bodies: tuple[Code, ...],
        reads: Sequence[Var] | None = None,
        **params: Any,
    ) -> list[Value]:
        avals = [v.aval for v in eqn.outvars]
        return packed(self._add(kind, eqn, ins, place, bodies, parts_of(avals), reads, **params), avals)

    def _checkpoint(self, eqn: Any, ins: list[Value], place: SourcePlace) -> list[Value]:
        outer, self.policy = self.policy, eqn.params.get("policy")
        body = self.body(eqn.params["jaxpr"], ins, SourcePlace(place.line, ()))
        policy, self.policy = self.policy, outer
        mark_scores(body)
        used = [x for x in flat(ins) if not x.key]
        return self._holding("checkpoint", eqn, used, place, (body,), remat=policy_of(policy, body))

    def _kernel(self, eqn: Any, ins: list[Value], place: SourcePlace) -> Sequence[Value]:
        """Replace a kernel or callback by the function that the user gave for it."""
        name = kernel_name(eqn)
        self.met.append(name)
        if name in self.kernels:
            return self.inline(traced_kernel(name, self.kernels[name], eqn), ins, place, inherit=True)
        if (nans := raised(eqn, behind=not self.unreached.isdisjoint(ins))) is not None:
            results = [self.known(x, v.aval) for x, v in zip(nans, eqn.outvars, strict=True)]
            self.unreached.update(results)
            return results
        return self._refuse(eqn, f"{eqn.primitive.name} ({place.line}): {without_kernel(eqn)}")

    def _refuse(self, eqn: Any, why: str) -> list[Value]:
        """Record an unsupported call; zeros replace its results, so that further faults are found."""
        self.refused[why] = self.refused.get(why, 0) + 1
        return [self.known(np.zeros(v.aval.shape, v.aval.dtype), v.aval) for v in eqn.outvars]

    def _holds_rules(self, closed: Any) -> bool:
        return not self.in_rule and any(map(has_own_rule, getattr(closed, "jaxpr", closed).eqns))

    def _ruled(self, eqn: Any, ins: list[Value], place: SourcePlace) -> list[Value]:
        """Add a call with a custom derivative rule."""
        if any(x.moves for x in flat(ins[: eqn.params.get("num_consts", 0)])):
            why = "it closes over a value that the arguments determine, for which its derivative rule says nothing"
            return self._refuse(eqn, f"{named(eqn)}: {why}; pass that value as an argument")
        try:
            call = ruled(eqn, flat(ins), self.axis_env)
        except Exception as fault:  # the rule is the user's
            return self._refuse(eqn, f"{named(eqn)}: its derivative rule can't be traced: {first_line(fault)}")
        operands, self.in_rule = flat(ins), True
        forward = self.body(call.forward, operands, SourcePlace(place.line, ()))
        results = len(parts_of([v.aval for v in eqn.outvars]))
        avals = [v.aval for v in call.backward.jaxpr.invars]
        of_residuals, of_cotangents = avals[: len(avals) - len(call.floating)], avals[len(avals) - len(call.floating) :]
        residuals = packed(forward.outs[results:], of_residuals)
        cotangents = [self.var(aval) for aval in of_cotangents]
        backward = self.body(call.backward, [*residuals, *cotangents], SourcePlace(place.line, ()))
        backward.ins, self.in_rule = cotangents, False
        return self._holding(CUSTOM_RULE, eqn, operands, place, (forward, backward), None, **call.marks)

    def _scan(self, eqn: Any, ins: list[Value], place: SourcePlace) -> list[Value]:
        (consts, carries), closed = scan_sizes(eqn.params), eqn.params["jaxpr"]
        avals = [v.aval for v in closed.jaxpr.invars[consts:]]
        of_keys = [isinstance(x, Var) and x.key for x in ins[consts:]]
        parts = [[self.var(part, of_keys=key) for part in parts_of([a])] for a, key in zip(avals, of_keys, strict=True)]
        own = [x for held in parts for x in held]
        for x in own:
            x.level += 1
        if all(len(held) == 1 for held in parts):
            operands = [flat([x])[0] for x in ins]
            count_trips(eqn, operands, own, self.axes.space())
            self.keyed.identify(eqn, own, operands[consts:])
        body = self.body(
            closed, [*ins[:consts], *packed(own, avals)], SourcePlace(place.line, ()), int(eqn.params["length"])
        )
        body.ins = own
        count = sum(map(len, parts[:carries]))
        results = self._holding("scan", eqn, flat(ins[consts:]), place, (body,), flat(ins), num_carry=count)
        self.keyed.stack(body.outs[count:], results[carries:])
        return results

    def _cond(self, eqn: Any, ins: list[Value], place: SourcePlace) -> list[Value]:
        (which,), operands = flat(ins[:1]), ins[1:]
        branches = eqn.params["branches"]
        if which.number is not None:
            chosen = min(max(int(which.number), 0), len(branches) - 1)
            return self.inline(branches[chosen], operands, place, inherit=False)
        bodies, before, drawn = [], self.keyed.drawn, {**self.keyed.drawn}
        for branch in branches:  # of which one runs
            self.keyed.drawn = {**before}
            bodies.append(self.body(branch, operands, SourcePlace(place.line, ())))
            drawn |= self.keyed.drawn
        self.keyed.drawn = drawn
        return self._holding("cond", eqn, [which], place, tuple(bodies), [which, *flat(operands)])


_NUMBERS_STAY = (
    "broadcast_in_dim",
    "reshape",
    "transpose",
    "squeeze",
    "expand_dims",
    "slice",
    "rev",
    "reduce_max",
    "reduce_min",
)


def _uniform(array: Array) -> bool:
    return bool((array == array.reshape(-1)[0]).all())


def _typed(array: Array, out: Var) -> Array:
    with np.errstate(all="ignore"):
        return np.asarray(array).astype(numpy_type(out.dtype))


def _saved_in(policy: Callable[..., Any], eqn: Any) -> str | None:
    """The memory in which a policy saves the result of a step: "hbm", "host", or None."""
    answer = policy(eqn.primitive, *(v.aval for v in eqn.invars), **eqn.params)
    if type(answer).__name__ == "Offloadable":
        return "host"
    return "hbm" if answer is True or type(answer).__name__ in ("Saveable", "SaveableType") else None


def _branch_here(platforms: Sequence[tuple[str, ...] | None]) -> int | None:
    """The branch of `lax.platform_dependent` for this process's default platform; None: the common one."""
    here = jax.default_backend()
    names = ("cuda", "rocm") if here == "gpu" else (here,)
    return next((n for n, of in enumerate(platforms) if of is None or any(name in of for name in names)), None)


def _reads_keys(step: CodeStep) -> bool:
    """True if a step draws numbers with keys, or derives keys from others."""
    return any(x.key for x in step.ins) and (step.kind in DRAWS or all(out.key for out in step.outs))
