"""Seeded attacks on real servers, beside honest neighbours."""
