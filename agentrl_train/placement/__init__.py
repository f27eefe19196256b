"""Placement of the processes of a run.

``devices.py`` assigns GPUs. ``launcher.py`` starts processes locally or under torchrun. ``ray.py`` and
``ray_engine.py`` place them on Ray and are the only modules that import it. ``serving.py`` is the torch
engine in a separate process.
"""
