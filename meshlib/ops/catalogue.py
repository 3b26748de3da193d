"""Every operation of the language, defined: importing this module imports every other module of the folder.

A program needs only the operations that it uses. Tables with a row for each operation, and copies of programs that
arrive from another process, need all of them.
"""

from importlib import import_module
from pkgutil import iter_modules

import meshlib.ops

for _module in iter_modules(meshlib.ops.__path__):
    import_module(f"meshlib.ops.{_module.name}")
