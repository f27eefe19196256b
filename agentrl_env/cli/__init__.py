"""The commands of ``agentrl-env``."""
