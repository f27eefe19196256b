"""Seeded attacks on real servers that also serve honest clients."""
