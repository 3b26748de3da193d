"""Choice of the plainest layout among those whose times the model cannot distinguish."""

from __future__ import annotations

from layouts import LayoutRules, Mesh


def plainness(mesh: Mesh, layout: LayoutRules, batch: str | None) -> tuple[int, ...]:
    """Sort key that is lower for layouts people would write: few axes, batch split by a required rule, few rules.

    Example:
      >>> from layouts import LayoutRules, Mesh
      >>> usual = plainness(Mesh("fsdp:64"), LayoutRules("batch:fsdp;d_model:fsdp?"), "batch")
      >>> odd = plainness(Mesh("model:64"), LayoutRules("vocab:model;d_ff:model;batch:model?"), "batch")
      >>> usual < odd
      True
    """
    axes = sum(size > 1 for size in mesh.sizes_by_axis.values())
    of_batch = [rule.optional for rule in layout.rules if rule.dim == batch]
    unusual = bool(of_batch) and all(of_batch)
    optional = sum(rule.optional for rule in layout.rules)
    return axes, int(unusual), len(layout.rules), optional
