"""Hosting: targets are loaded, and served in every protocol."""
