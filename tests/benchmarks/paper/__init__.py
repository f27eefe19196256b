"""The sweeps behind the figures of docs/evidence.md, and their small tasks and policy (``make paper``)."""
