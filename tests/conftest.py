"""Profiles of the property tests: repeatable and small in CI, `--hypothesis-profile=deep` by hand. Poisoned buffers."""

import os

# One thread for NumPy's products, before NumPy is there: tests run beside each other, on all cores.
for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(name, "1")

from hypothesis import HealthCheck, settings  # noqa: E402

from meshlib import arrays  # noqa: E402
from tests.effort import DEEP_EXAMPLES  # noqa: E402

settings.register_profile(
    "ci", derandomize=True, deadline=None, max_examples=60, database=None, suppress_health_check=list(HealthCheck)
)
settings.register_profile(
    "deep", deadline=None, max_examples=DEEP_EXAMPLES, database=None, suppress_health_check=list(HealthCheck)
)
settings.load_profile("ci")

# Whatever an executor reads before it wrote it is NaN.
arrays.poisoned = True
