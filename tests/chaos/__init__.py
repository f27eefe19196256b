"""Seeded fault runs: real processes are killed, paused and cut off, and every step is accounted for."""
