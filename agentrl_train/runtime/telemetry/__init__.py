"""What a run tells of itself while it goes: its numbers, its trace, its progress, and who is told."""
