"""Layouts: dimensions, meshes, layout rules, shardings, and reshard plans between shardings.

A program names its dimensions; a layout maps names to the mesh axes that split them. This package derives
the sharding of each tensor, without any knowledge of values or hardware.

Everything is immutable, validated at construction, and hashable. A fault is a `LayoutError` that names dimension,
axis and both numbers; nothing is ever silently replicated.

>>> rules = LayoutRules("batch:rows;hidden:cols")
>>> print(rules.sharding("batch:512;hidden:1024", "rows:2;cols:4"))
[batch:512@rows, hidden:1024@cols]
"""

from pathlib import Path as _Path

from layouts.checking import Report as Report
from layouts.checking import check as check
from layouts.dims import Dimension as Dimension
from layouts.dims import Shape as Shape
from layouts.drawing import draw as draw
from layouts.errors import LayoutError as LayoutError
from layouts.errors import MeshlibError as MeshlibError
from layouts.errors import nearest as nearest
from layouts.mesh import Mesh as Mesh
from layouts.plan import Plan as Plan
from layouts.plan import Step as Step
from layouts.plan import permute_pairs as permute_pairs
from layouts.presets import PRESETS as PRESETS
from layouts.presets import context_parallel as context_parallel
from layouts.presets import data_parallel as data_parallel
from layouts.presets import fully_sharded as fully_sharded
from layouts.presets import joined as joined
from layouts.presets import model_parallel as model_parallel
from layouts.presets import preset as preset
from layouts.presets import sequence_parallel as sequence_parallel
from layouts.presets import two_dimensional as two_dimensional
from layouts.presets import zero1 as zero1
from layouts.readers import from_flax as from_flax
from layouts.readers import from_haliax as from_haliax
from layouts.readers import from_partition_specs as from_partition_specs
from layouts.readers import to_flax as to_flax
from layouts.readers import to_partition_spec as to_partition_spec
from layouts.resharding import reshard as reshard
from layouts.rules import LayoutRules as LayoutRules
from layouts.rules import Rule as Rule
from layouts.sharding import Sharding as Sharding


def _check_own_packages() -> None:
    # The three packages are installed together. `meshlib` (3-D geometry) and `hardware` on the package index are other
    # projects, which would write into the same folders.
    root = _Path(__file__).resolve().parent.parent
    for name in ("meshlib", "hardware"):
        file = root / name / "__init__.py"
        if file.is_file() and b"meshlib-tpu" not in file.read_bytes():
            raise ImportError(
                f"layouts belongs to meshlib-tpu, but another distribution has written {file}; "
                "install meshlib-tpu in an environment of its own"
            )


_check_own_packages()
