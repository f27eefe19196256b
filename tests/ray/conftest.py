"""Runs on real Ray clusters, in the environment that ``make ray`` completes."""

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("ray") else ["test_*.py"]
