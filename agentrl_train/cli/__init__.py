"""The commands of agentrl-train."""
