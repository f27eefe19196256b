"""Stub."""


class Server: ...
