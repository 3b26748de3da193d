"""Keys of a MaxText configuration with a cost that are not expressed, each with its effect."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from meshlib.core.errors import nearest
from meshlib.models.maxtext.kernels import FOLLOWING, FUSED
from meshlib.models.maxtext.keys import DEFAULT_RULES, EFFECTS, READ, REMAT_KEYS
from meshlib.models.maxtext.remat import WITH_QUANTISED
from meshlib.models.maxtext.settings import OVERRIDES, RULES, Settings

NAMED_DIMS = tuple(dict.fromkeys(name for name, _ in DEFAULT_RULES))


@dataclass(frozen=True)
class Unread:
    """A key that is not expressed: its value, MaxText's default, and its effect."""

    key: str
    value: Any
    default: Any
    changes: str

    def __str__(self) -> str:
        return f"{self.key}={self.value}: {self.changes}"


def unread_keys(s: Settings) -> tuple[Unread, ...]:
    """Keys that differ from their defaults, change compute, memory or communication, and are not expressed."""
    values = s.values
    changed = [
        Unread(key, values[key], default, effect.changes)
        for effect in EFFECTS
        if effect.counts(values)
        for key, default in effect.defaults.items()
        if key in values and values[key] not in (default, None)
    ]
    return (*changed, *_partly_expressed(s), *_foreign(s))


def _foreign(s: Settings) -> Iterator[Unread]:
    """Keys of another version of MaxText: those that are set anew one by one, the others together."""
    changed = {key for key, value in s.foreign.items() if s.values[key] != value}
    for key in sorted(changed):
        yield Unread(key, s.values[key], s.foreign[key], "a key of another version of MaxText, not known here")
    left = sorted(s.foreign.keys() - changed)
    if left:
        names = ", ".join(left)
        yield Unread(names, "as in base.yml", None, "of another version of MaxText, taken to have no effect")


def _unused_remat_keys(s: Settings) -> Iterator[Unread]:
    """Keys that only count with remat_policy=custom, if the policy is another."""
    if s["remat_policy"] != "custom":
        for key in REMAT_KEYS:
            if s[key] != READ[key]:
                changes = f"counts with remat_policy=custom alone, not with {s['remat_policy']}"
                yield Unread(key, s[key], READ[key], changes)


def _rules_of_unknown_dims(s: Settings) -> Iterator[Unread]:
    """Rules whose dim is likely misspelt."""
    for name in dict.fromkeys(str(rule[0]) for rule in _own_rules(s)):
        hint = nearest(name, NAMED_DIMS) if name not in NAMED_DIMS else ""
        if hint:
            yield Unread(RULES, name, None, f"no tensor here has a dim of that name{hint}")


def _blocks_of_kernels(s: Settings) -> Iterator[Unread]:
    """Block sizes inside the attention kernel that differ from those which the estimate takes."""
    for key, other in FOLLOWING.items():
        if s[key] != s[other] and s["attention"] != "dot_product" and not (key.endswith("_dq") and s[FUSED]):
            taken = f"the estimate takes that of {other}, {s[other]}"
            yield Unread(key, s[key], READ[key], f"a block of its own inside the attention kernel; {taken}")


def _partly_expressed(s: Settings) -> list[Unread]:
    """Keys that are read, but with values that are only partly expressed."""
    unread = [*_unused_remat_keys(s), *_rules_of_unknown_dims(s), *_blocks_of_kernels(s)]

    def note(key: str, changes: str) -> None:
        unread.append(Unread(key, s[key], READ[key], changes))

    if s["grad_dtype"] != "float32" and s["weight_dtype"] == "float32":
        note("grad_dtype", "gradients are kept and clipped in this dtype; float32 here")
    if s["remat_policy"] in WITH_QUANTISED and s["quantization"]:
        note("remat_policy", "quantised operands are kept, too; recomputed here")
    chunk = s["chunk_attn_window_size"]
    if chunk and chunk < s.size("max_target_length"):
        note("chunk_attn_window_size", "three of four layers see chunks of this many tokens; all tokens here")
    for key in ("ici_sequence_parallelism", "dcn_sequence_parallelism"):
        if s[key] != 1 and "sequence" not in s["mesh_axes"]:
            note(key, "mesh_axes has no axis 'sequence', so MaxText ignores it")
    if s["context_parallel_strategy"] != "all_gather" and s["ici_context_parallelism"] != 1:
        note("context_parallel_strategy", "how keys and values reach split queries; the cheaper of gathering keys and "
             "of partial results here")  # fmt: skip
    return unread


def _own_rules(s: Settings) -> list[Any]:
    """The rules given by overrides; MaxText ignores names that no dim has."""
    return [*s.values[RULES]] if s.sources.get(RULES) == OVERRIDES else []
