"""Profiles of the property tests: repeatable and small in CI, `--hypothesis-profile=deep` by hand. Poisoned buffers."""

from hypothesis import HealthCheck, settings

from meshlib import arrays
from tests.effort import DEEP_EXAMPLES

settings.register_profile(
    "ci", derandomize=True, deadline=None, max_examples=60, database=None, suppress_health_check=list(HealthCheck)
)
settings.register_profile(
    "deep", deadline=None, max_examples=DEEP_EXAMPLES, database=None, suppress_health_check=list(HealthCheck)
)
settings.load_profile("ci")

# Whatever an executor reads before it wrote it is NaN.
arrays.poisoned = True
