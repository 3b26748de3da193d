"""Profiles of the property tests: repeatable and small in CI, `--hypothesis-profile=deep` by hand."""

from hypothesis import HealthCheck, settings

settings.register_profile(
    "ci", derandomize=True, deadline=None, max_examples=60, database=None, suppress_health_check=list(HealthCheck)
)
settings.register_profile(
    "deep", deadline=None, max_examples=10_000, database=None, suppress_health_check=list(HealthCheck)
)
settings.load_profile("ci")
