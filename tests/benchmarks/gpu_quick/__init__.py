"""A quarter of an hour on one GPU without a network: tests, a training run, figures beside their ceilings.

``pack.py`` collects what a bare machine needs; ``run.sh`` installs it there and starts ``__main__.py``, which
runs one process after another: ``parts.py``.
"""
