"""What needs an extra that is not installed is not collected: its tests say so, its doctests are left out."""

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("jax") else ["meshlib/jax/*"]
