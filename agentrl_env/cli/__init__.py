"""The commands of ``agentrl-env``: an author's, an operator's, and those for a server at a URL."""
