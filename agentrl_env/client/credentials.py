"""Credentials in addresses and headers, which must not appear in errors and files."""

from __future__ import annotations

import re
from collections.abc import Iterable

import httpx

HIDDEN = "***"
MIN_SECRET = 8
"""Minimum length of a hidden text. Shorter values, such as versions, also occur in other words."""
NOT_PRINTABLE = "a line break or another character that is not printable ASCII"
_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")


def public_url(url: str) -> str:
    """Return a URL without its user, password and fragment, and with ``***`` for the values of its query."""
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL:
        return re.sub(r"(?s)//.*@", "//", url).partition("?")[0]
    shown = str(parsed.copy_with(userinfo=b"", query=None, fragment=None))
    fields = [field.partition("=") for field in parsed.query.decode().split("&") if field]
    query = "&".join(f"{name}={HIDDEN}" if equals else HIDDEN for name, equals, _ in fields)
    return f"{shown}?{query}" if query else shown


def secrets_of(url: httpx.URL) -> list[str]:
    """Return the user and the password of a URL and the values of its query, as written and decoded."""
    written = [field.partition("=") for field in url.query.decode().split("&")]
    values = [value if equals else name for name, equals, value in written]
    user, _, password = url.userinfo.decode().partition(":")
    return [user, password, url.username, url.password, *values, *url.params.values()]


def hide(text: str, secrets: Iterable[str]) -> str:
    """Return a text with ``***`` for each secret that is long enough to be recognized."""
    for secret in sorted(secrets, key=len, reverse=True):
        if len(secret) >= MIN_SECRET:
            text = text.replace(secret, HIDDEN)
    return text


def is_header_name(text: str) -> bool:
    """Return True if a text can be the name of an HTTP header."""
    return _HEADER_NAME.fullmatch(text) is not None
