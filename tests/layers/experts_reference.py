"""A mixture of experts in plain float64 NumPy, token by token, written apart from the library.

A group is a list of tokens that stand in line. It is decided who sits where (`seats`), and every seated token's expert
works on that token alone (`mixture`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import ceil

import numpy as np

from meshlib.layers import Routing
from tests.layers.layers_reference import gelu, silu, softmax

Array = np.ndarray
ACTIVATIONS = {"relu": lambda x: np.maximum(x, 0), "gelu": gelu, "silu": silu}


@dataclass
class Outcome:
    """Of one group: (token, expert, gate) of each seat, choices without one, and who wanted which expert."""

    seats: list[tuple[int, int, float]]
    dropped: int
    wanted: list[int] | list[list[int]]
    balance: float
    z: float


def room(r: Routing, experts: int, tokens: int) -> int:
    """Places of an expert."""
    if r.capacity_factor is None:
        return tokens
    k = {"switch": 1, "ntlb": 1, "top_2": 2}.get(r.gating, r.top_k)
    return min(tokens, max(r.min_expert_capacity, ceil(k * tokens * r.capacity_factor / experts - 1e-9)))


def best(values: Array, count: int) -> list[int]:
    """Indices of the largest, the earlier of equals first."""
    return sorted(range(len(values)), key=lambda i: (-values[i], i))[:count]


def allowed(favour: Array, r: Routing) -> Array:
    """Scores to choose by, of one token: none of experts outside of its best groups."""
    if r.expert_groups == 1:
        return favour
    size = len(favour) // r.expert_groups
    parts = [favour[g * size : (g + 1) * size] for g in range(r.expert_groups)]
    marks = np.array([sum(sorted(p)[-(1 if r.group_score == "max" else 2) :]) for p in parts])
    chosen = best(marks, r.groups_per_token)
    return np.array([f if n // size in chosen else -np.inf for n, f in enumerate(favour)])


def seats(logits: Array, bias: Array | None, r: Routing, real: Array) -> Outcome:
    """Route one group: logits [tokens, experts]; `real` says which tokens are not padding."""
    count, experts = logits.shape
    scores = np.array([softmax(row) for row in logits]) if r.scores == "softmax" else 1 / (1 + np.exp(-logits))
    favour = scores if bias is None else scores + bias
    places = room(r, experts, count)
    taken, dropped, taken_by = [0] * experts, 0, []
    lines: list[list[tuple[int, int, float]]] = []  # rounds of (token, expert, gate) in order of precedence
    if r.gating == "expert_choice":
        for e in range(experts):
            order = best(np.where(real, scores[:, e], -1), places)
            taken_by += [(t, e, scores[t, e] * r.scale) for t in order if real[t]]
        dropped = sum(bool(real[t]) and all(t != s for s, _, _ in taken_by) for t in range(count))
        wanted = [sum(e == n for _, e, _ in taken_by) for n in range(experts)]
    else:
        asked = {"switch": 1, "top_2": 2, "ntlb": r.ntlb_top_k}.get(r.gating, r.top_k)
        chosen = [best(allowed(row, r), asked) for row in favour]
        for k in range(asked):
            line = []
            for t in range(count):
                gate = scores[t, chosen[t][k]]
                if r.renormalise and r.gating in ("top_k", "top_2"):
                    gate = gate / sum(scores[t, e] for e in chosen[t])
                late = r.gating == "top_2" and k == 1
                if late and (
                    r.second_policy == "none" or (r.second_policy == "threshold" and gate <= r.second_threshold)
                ):
                    continue
                if real[t]:
                    line.append((t, chosen[t][k], gate * r.scale))
            lines.append(line)
        standing = set(range(count))
        for line in lines:
            for t, e, gate in line:
                if r.gating == "ntlb" and t not in standing:
                    continue
                if taken[e] < places:
                    taken[e] += 1
                    taken_by.append((t, e, gate))
                    standing.discard(t)
                elif r.gating != "ntlb":
                    dropped += 1
        if r.gating == "ntlb":
            dropped = sum(bool(real[t]) for t in standing)
        counted = lines[:1] if r.gating == "ntlb" else lines
        wanted = [sum(e == n for line in counted for _, e, _ in line) for n in range(experts)]
    first = lines[:1] if r.gating == "top_2" else None
    counts = wanted if first is None else [sum(e == n for _, e, _ in first[0]) for n in range(experts)]
    shares = np.array([row / row.sum() for row in scores]) * real[:, None]
    balance = experts * sum(c / max(1, sum(counts)) * shares[:, n].mean() for n, c in enumerate(counts))
    z = np.mean([np.log(np.exp(row).sum()) ** 2 * seen for row, seen in zip(logits, real, strict=True)])
    return Outcome(taken_by, dropped, wanted, float(balance), float(z))


def block(x: Array, w: Mapping[str, Array], activation: str) -> Array:
    """A feed-forward layer of one token."""
    h, act = through(x, w, "wi"), ACTIVATIONS[activation]
    h = act(through(x, w, "wi_gate")) * h if "wi_gate/kernel" in w else act(h)
    return through(h, w, "wo")


def through(x: Array, w: Mapping[str, Array], part: str) -> Array:
    """One product, with its bias where there is one."""
    return x @ w[f"{part}/kernel"] + w.get(f"{part}/bias", 0.0)


def mixture(
    x: Array, w: Mapping[str, Array], r: Routing, activation: str = "relu", real: Array | None = None
) -> tuple[Array, list[Outcome]]:
    """x [groups, tokens, features]; `w` by the names of variables within the layer."""
    out, said = np.zeros(x.shape), []
    parts = {
        side: {name.removeprefix(f"{side}/"): v for name, v in w.items() if name.startswith(f"{side}/")}
        for side in ("experts", "shared")
    }
    for g, group in enumerate(x):
        seen = np.ones(len(group), bool) if real is None else real[g]
        seen_of_all = 1.0 if real is None else max(float(np.mean(real)), 1e-20)
        outcome = seats(group @ w["router/kernel"] + w.get("router/logit_bias", 0.0), w.get("router/bias"), r, seen)
        for t, e, gate in outcome.seats:
            out[g, t] += gate * block(group[t], {n: v[e] for n, v in parts["experts"].items()}, activation)
        if parts["shared"]:
            for t, token in enumerate(group):
                out[g, t] += block(token, parts["shared"], activation)
        said.append(replace(outcome, balance=outcome.balance / seen_of_all, z=outcome.z / seen_of_all))
    return out, said


def two_levels(
    x: Array, w: Mapping[str, Array], outer: Routing, inner: Routing, activation: str = "relu"
) -> tuple[Array, list[Outcome]]:
    """As `mixture`, of experts that are mixtures themselves: each is given its places, filled or not, as a group.

    Losses of the inner level are means over the places that hold a token.
    """
    out, said = np.zeros(x.shape), []
    inner_losses: list[tuple[float, float]] = []
    given: list[float] = []  # of each inner group the share of places that hold a token
    for g, group in enumerate(x):
        outcome = seats(group @ w["router/kernel"], w.get("router/bias"), outer, np.ones(len(group), bool))
        experts, below = w["router/kernel"].shape[1], []
        for e in range(experts):
            here = [(t, gate) for t, n, gate in outcome.seats if n == e]
            places = np.zeros((1, room(outer, experts, len(group)), group.shape[1]))
            places[0, : len(here)] = group[[t for t, _ in here]]
            own = {name.removeprefix("inner/"): v[e] for name, v in w.items() if name.startswith("inner/")}
            filled = np.arange(places.shape[1])[None] < len(here)
            made, (inside,) = mixture(places, own, inner, activation, filled)
            given.append(float(np.mean(filled)))
            below.append(replace(inside, balance=inside.balance * given[-1], z=inside.z * given[-1]))
            for k, (t, gate) in enumerate(here):
                out[g, t] += gate * made[0, k]
        shared = {name.removeprefix("shared/"): v for name, v in w.items() if name.startswith("shared/")}
        if shared:
            out[g] += [block(token, shared, activation) for token in group]
        said.append(
            Outcome(
                outcome.seats,
                outcome.dropped + sum(o.dropped for o in below),
                [o.wanted for o in below],
                outcome.balance,
                outcome.z,
            )
        )
        inner_losses.append((float(np.mean([o.balance for o in below])), float(np.mean([o.z for o in below]))))
    share = float(np.mean(given))
    return out, [
        replace(own, balance=own.balance + balance / share, z=own.z + z / share)
        for own, (balance, z) in zip(said, inner_losses, strict=True)
    ]
