"""Sweeps: variants of one run with several seeds each, in processes, and one report about all of them."""
