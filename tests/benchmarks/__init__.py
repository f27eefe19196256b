"""Benchmarks (``make bench``). Each figure is compared with a peer in the same run and with its ceiling."""
