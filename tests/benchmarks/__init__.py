"""Benchmarks, not tests (``make bench``): each figure is next to a peer's in the same run and its ceiling."""
