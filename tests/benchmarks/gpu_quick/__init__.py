"""Tests, a training run and benchmarks with ceilings, in 15 minutes on one GPU without a network.

``pack.py`` collects the files for a bare machine. ``run.sh`` installs them there and starts ``__main__.py``,
which runs each part of ``parts.py`` in its own process.
"""
