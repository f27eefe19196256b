"""Tests on real Ray clusters, in the environment of ``make ray``."""

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("ray") else ["test_*.py"]
