"""Files of a run: the run folder, checkpoints, the journal of finished groups, atomic writes."""
