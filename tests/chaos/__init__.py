"""Seeded fault runs: real processes are killed, paused and disconnected, and every step is accounted for."""
