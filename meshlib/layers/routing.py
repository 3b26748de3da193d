"""`Routing`: choice of experts, capacity, and balance losses, as one record."""

from __future__ import annotations

from dataclasses import dataclass, fields
from math import ceil

from meshlib.core.arguments import at, choice, divisors_near, flag, number, whole
from meshlib.core.errors import GraphError
from meshlib.core.shown import Brief

GATINGS = ("top_k", "top_2", "switch", "ntlb", "expert_choice")
POLICIES = ("all", "none", "threshold", "random")
ROW_SUMS = ("gather", "scatter")


@dataclass(frozen=True, kw_only=True, repr=False)
class Routing(Brief):
    """Assignment of tokens to experts.

    Choice:
      gating: "top_k": each token goes to the experts of its `top_k` highest scores. "switch": to the highest one.
        "top_2": to the two highest, of which `second_policy` may drop the second. "ntlb" (no token left behind): to
        the first of its `ntlb_top_k` highest with free capacity. "expert_choice": each expert takes the tokens with
        the highest scores for it, up to its capacity, which is set by `top_k` experts per token.
      scores: "softmax" over all experts, or "sigmoid" of each.
      renormalise: whether the gates of a token are divided by their sum. For softmax that is the softmax over the
        chosen experts. With a single choice the gate would have no gradient: "switch", "ntlb" and "expert_choice"
        never renormalise.
      scale: factor of all gates (DeepSeek's routed scaling).
      logit_bias: whether router logits have a trained bias per expert (gpt-oss).
      bias: whether a bias per expert affects the choice but not the gates; an untrained variable, see `balanced_bias`.
      expert_groups, groups_per_token: experts are divided into groups of equal size, of which a token uses the best
        few, by the highest score of a group or the sum of its two highest (`group_score`: "max", "top_2").
    Capacity:
      capacity_factor: capacity of an expert relative to the mean number of tokens that choose it, in each group; None:
        the worst case. capacity_factor_eval: the same when not training; by default as in training.
      min_expert_capacity: least number of slots, limited to the tokens of a group.
      group_size: tokens per group; by default those along the last dim before the features.
      expert_shards, shard_factor: for form "grouped", which has no capacity per expert: tokens are sent to this many
        shards of the experts; None: to those into which the layout splits the experts. A shard has capacity for
        `shard_factor` times the mean number of choices from a group; choices beyond it count as dropped. None: the
        worst case, min(choices, experts of a shard) per token.
      row_sums: how the rows of a token's choices are added up where tokens are looked up: "gather" looks up the slot of
        each choice; "scatter" leaves gradients of lookups to differentiation, which adds rows at positions, as MaxText
        without `use_custom_sort_vjp`. Both have the same result; TPUs take several times as long to add rows.
    Training:
      jitter: inputs of the router are multiplied by random numbers in [1 - jitter, 1 + jitter].
      loss_coef: coefficient of the balance loss. z_loss: coefficient of the squared logsumexp of the scores.
      second_policy: for "top_2": "all" keeps second choices, "none" drops them, "threshold" keeps those with a gate
        above `second_threshold`, "random" keeps them with probability gate / second_threshold in training, otherwise by
        the threshold.

    Raises: GraphError with all faults at once.
    Example:
      >>> import meshlib as mtf
      >>> mtf.layers.Routing(gating="switch", capacity_factor=1.25).places(experts=8, tokens=512)
      80

    Source: tensorflow/mesh: mesh_tensorflow/transformer/moe.py for names; Shazeer et al., arXiv:1701.06538; GShard,
      arXiv:2006.16668; Switch, arXiv:2101.03961; expert choice, arXiv:2202.09368; DeepSeek-V3, arXiv:2412.19437.
    """

    gating: str = "top_k"
    top_k: int = 2
    scores: str = "softmax"
    renormalise: bool = True
    scale: float = 1.0
    logit_bias: bool = False
    bias: bool = False
    expert_groups: int = 1
    groups_per_token: int = 1
    group_score: str = "top_2"
    capacity_factor: float | None = 1.25
    capacity_factor_eval: float | None = None
    min_expert_capacity: int = 4
    group_size: int | None = None
    expert_shards: int | None = None
    shard_factor: float | None = None
    row_sums: str = "gather"
    jitter: float = 0.0
    loss_coef: float = 0.01
    z_loss: float = 0.0
    second_policy: str = "all"
    second_threshold: float = 0.2
    ntlb_top_k: int = 4

    def __post_init__(self) -> None:
        what = "Routing"
        choice(self.gating, what, "gating", GATINGS)
        choice(self.scores, what, "scores", ("softmax", "sigmoid"))
        choice(self.group_score, what, "group_score", ("max", "top_2"))
        choice(self.row_sums, what, "row_sums", ROW_SUMS)
        choice(self.second_policy, what, "second_policy", POLICIES)
        for f in fields(self):
            value, (kind, _, optional) = getattr(self, f.name), str(f.type).partition(" | ")
            if kind in _KINDS and not (optional and value is None):
                _KINDS[kind](value, what, f.name)
        if faults := self._faults():
            raise GraphError.listing(at(what), faults)

    @property
    def choices(self) -> int:
        """Experts that each token chooses."""
        return {"switch": 1, "ntlb": 1, "top_2": 2}.get(self.gating, self.top_k)

    def places(self, experts: int, tokens: int, training: bool = True) -> int:
        """Capacity of an expert for the tokens of a group."""
        factor = self.capacity_factor
        if not training and self.capacity_factor_eval is not None:
            factor = self.capacity_factor_eval
        wanted = tokens if factor is None else ceil(self.choices * tokens * factor / experts - 1e-9)
        return min(tokens, max(wanted, self.min_expert_capacity))

    def check_experts(self, experts: int, what: str) -> None:
        """Raise GraphError unless there are enough experts to choose from, in groups of equal size."""
        faults = []
        asked = max(self.choices, self.ntlb_top_k if self.gating == "ntlb" else 1)
        within = experts // self.expert_groups * self.groups_per_token
        if experts % self.expert_groups:
            faults.append(
                f"{experts} experts can't be cut into {self.expert_groups} groups of equal size: "
                f"{experts} % {self.expert_groups} = {experts % self.expert_groups}; expert_groups may be "
                f"{divisors_near(experts, self.expert_groups)}"
            )
        if self.expert_shards is not None and experts % self.expert_shards:
            faults.append(
                f"{experts} experts can't be cut into {self.expert_shards} shards of equal size (expert_shards): "
                f"{experts} % {self.expert_shards} = {experts % self.expert_shards}; use "
                f"{divisors_near(experts, self.expert_shards)}"
            )
        if not faults and self.gating != "expert_choice" and asked > within:
            by = {"top_k": " (top_k)", "ntlb": " (ntlb_top_k)", "top_2": " (gating 'top_2')"}.get(self.gating, "")
            faults.append(
                f"each token chooses {asked} experts{by}, but there are only {within} to choose from; "
                f"use at most {within}"
            )
        elif (
            not faults and self.expert_groups > 1 and self.group_score == "top_2" and experts // self.expert_groups < 2
        ):
            faults.append("group_score 'top_2' adds up the two best of a group, which has one expert; use 'max'")
        if faults:
            raise GraphError.listing(at(what), faults)

    def check_grouped(self, what: str) -> None:
        """Raise GraphError for options that form "grouped" lacks: it has no capacity per expert."""
        if self.gating in ("ntlb", "expert_choice"):
            raise GraphError(
                f"{at(what)}: gating {self.gating!r} depends on the capacity of experts, which form 'grouped' lacks"
            )
        given = [n for n in ("capacity_factor", "capacity_factor_eval") if getattr(self, n) is not None]
        if given:
            raise GraphError(
                f"{at(what)}: form 'grouped' has no capacity by expert, but the routing has {given[0]}="
                f"{getattr(self, given[0])}; give Routing({given[0]}=None), and shard_factor to limit a shard"
            )

    def _faults(self) -> list[str]:
        faults = []
        counts = ("top_k", "expert_groups", "groups_per_token", "min_expert_capacity", "group_size", "ntlb_top_k")
        for name in (*counts, "expert_shards"):
            size = getattr(self, name)
            if size is not None and size < 1:
                faults.append(f"{name} must be at least 1, got {size}")
        for name in ("capacity_factor", "capacity_factor_eval", "shard_factor", "scale", "second_threshold"):
            if getattr(self, name) is not None and getattr(self, name) <= 0:
                faults.append(f"{name} must be positive, got {getattr(self, name)}")
        for name in ("loss_coef", "z_loss"):
            if getattr(self, name) < 0:
                faults.append(f"{name} must not be negative, got {getattr(self, name)}")
        if self.second_policy == "threshold" and self.second_threshold > 1:
            faults.append(
                f"second_threshold is a share of a token's gates and must be at most 1, got {self.second_threshold}"
            )
        if not 0 <= self.jitter < 1:
            faults.append(f"jitter must be in [0, 1), got {self.jitter}")
        if self.groups_per_token > self.expert_groups:
            faults.append(
                f"groups_per_token must be at most expert_groups, {self.expert_groups}, got {self.groups_per_token}"
            )
        if self.gating == "expert_choice" and (self.bias or self.expert_groups > 1):
            faults.append("bias and expert_groups are for tokens that choose; 'expert_choice' has neither")
        return faults


_KINDS = {"int": whole, "float": number, "bool": flag}
