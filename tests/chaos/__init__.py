"""Seeded fault injection into real processes and connections, with an account of every step."""
