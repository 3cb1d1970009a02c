"""How the properties are tried: the same examples in every run, and few enough for every run."""

from hypothesis import HealthCheck, settings

quick = settings(derandomize=True, database=None, deadline=None, max_examples=150, print_blob=False)
"""For properties of data."""

exported = settings(quick, max_examples=14, suppress_health_check=list(HealthCheck))
"""For properties of exported programs, a second each."""
