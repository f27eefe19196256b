"""Harbor: its folders as tasks, and tasks exported to its format."""
