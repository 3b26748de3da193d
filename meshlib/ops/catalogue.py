"""All operations: importing this module imports every module that defines one.

A program needs only the operations that it uses. Tables with a row per operation and unpickled programs need all.
"""

from importlib import import_module
from pkgutil import walk_packages

import meshlib.ops

for _module in walk_packages(meshlib.ops.__path__, "meshlib.ops."):
    import_module(_module.name)
