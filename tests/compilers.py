"""The default compiler with each policy of overlap; pieces however small."""

from __future__ import annotations

from dataclasses import replace

import meshlib as mtf
from meshlib.core.compiler import OVERLAPS

BY_OVERLAP = {policy: replace(mtf.XLA_TPU, overlap=policy, windowed_einsum_bytes=0) for policy in OVERLAPS}
INDEPENDENT, IN_PIECES = BY_OVERLAP["independent"], BY_OVERLAP["collective matmul"]
FREE_WEIGHTS = replace(mtf.XLA_TPU, stationary_weights=False)
