"""Serving: a pool of sessions, the HTTP application in front of it, and the process around both."""
