"""Fuzz a server with malformed and unusual requests, and check the answers."""
