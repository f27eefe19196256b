"""Requests by the thousand that no client of ours would send, and an account of what came of them."""
