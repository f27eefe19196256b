"""Fixtures for tests on real Ray clusters, in the venv of ``make ray``."""

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("ray") else ["test_*.py"]
