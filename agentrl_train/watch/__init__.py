"""A live page about one run, or about two runs to compare: ``agentrl-train watch``."""
