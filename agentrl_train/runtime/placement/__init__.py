"""Which processes run where, and who starts them.

``devices.py`` says which GPUs each process gets; ``launcher.py`` is the seam between a run and whoever starts
its processes: this machine (``local.py``), torchrun (``torchrun.py``) or Ray (``ray.py``, which alone imports
it). ``colocated.py`` lets learner and engine take turns on the same GPUs; ``serving.py`` is the torch engine
in a process of its own.
"""
