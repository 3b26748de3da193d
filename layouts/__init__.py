"""Where names go: dimensions, meshes, layout rules, shardings, and the ways between shardings.

A program names its dimensions; a layout says which names are split over which axes of a mesh. This floor
turns the two into facts about each tensor, and knows neither numbers nor hardware:

    Dimension, Shape     names and sizes of a tensor           dims.py
    Mesh                 named axes of devices                 mesh.py
    Rule, LayoutRules    names -> axes, for all tensors        rules.py
    Sharding             which device holds which block        sharding.py
    reshard, Plan, Step  the cheapest collectives between two  reshard.py, plan.py
    check, Report        all that is wrong with a layout       check.py
    PRESETS, preset      layouts that have names               presets.py
    from_flax, to_flax   layouts in others' notation           readers.py
    draw                 which device holds what, as text      drawing.py

Everything is immutable, checked when made, and hashable. A fault is a `LayoutError` that names dimension,
axis and both numbers; nothing is ever silently replicated.

>>> rules = LayoutRules("batch:rows;hidden:cols")
>>> print(rules.sharding("batch:512;hidden:1024", "rows:2;cols:4"))
[batch:512@rows, hidden:1024@cols]
"""

from layouts.checking import Report, check
from layouts.dims import Dimension, Shape
from layouts.drawing import draw
from layouts.errors import LayoutError, MeshlibError, nearest
from layouts.mesh import Mesh
from layouts.plan import Plan, Step, permute_pairs
from layouts.presets import (
    PRESETS,
    context_parallel,
    data_parallel,
    fully_sharded,
    joined,
    model_parallel,
    preset,
    sequence_parallel,
    two_dimensional,
    zero1,
)
from layouts.readers import from_flax, from_haliax, from_partition_specs, to_flax, to_partition_spec
from layouts.resharding import reshard
from layouts.rules import LayoutRules, Rule
from layouts.sharding import Sharding

__all__ = [
    "PRESETS",
    "Dimension",
    "LayoutError",
    "LayoutRules",
    "Mesh",
    "MeshlibError",
    "Plan",
    "Report",
    "Rule",
    "Shape",
    "Sharding",
    "Step",
    "check",
    "context_parallel",
    "data_parallel",
    "draw",
    "from_flax",
    "from_haliax",
    "from_partition_specs",
    "fully_sharded",
    "joined",
    "model_parallel",
    "nearest",
    "permute_pairs",
    "preset",
    "reshard",
    "sequence_parallel",
    "to_flax",
    "to_partition_spec",
    "two_dimensional",
    "zero1",
]
