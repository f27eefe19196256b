"""Fuzzing of a server: malformed and unusual requests, and an account of the answers."""
