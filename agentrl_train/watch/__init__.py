"""A live page about one run, or two to compare: ``agentrl-train watch``."""
