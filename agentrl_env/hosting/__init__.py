"""Hosting: loads targets and serves them in every protocol."""
