"""Figures, each beside a peer's in the same run and its ceiling: ``make bench``. Nothing here is a test."""
