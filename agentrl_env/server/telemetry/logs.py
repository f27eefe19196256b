"""The log of a serving process: one line per event, as text or as JSON."""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime
from typing import Literal

from agentrl_env.server.auth import caller

LogFormat = Literal["text", "json"]


def configure_logs(form: LogFormat = "text", *, level: str | None = None, messages: bool = False) -> None:
    """Write the log to standard error, unless logging is configured already.

    Args:
        form: one readable line per event, or one JSON object.
        level: lowest level; by default ``info`` as JSON and ``warning`` as text.
        messages: also log the messages of models and environments.
    """
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines() if form == "json" else TextLines())
    lowest = level or ("info" if form == "json" else "warning")
    logging.basicConfig(handlers=[handler], level=lowest.upper())
    logging.getLogger("agentrl_env.messages").setLevel(logging.DEBUG if messages else logging.WARNING)


class JsonLines(logging.Formatter):
    """One JSON object per record: time, level, event, facts, client, and the traceback of an exception."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as one line."""
        line: dict[str, object] = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "event": record.getMessage(),
            "logger": record.name,
            **_facts(record),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class TextLines(logging.Formatter):
    """Time, level and event, then each fact as ``name=value``; a traceback follows on its own lines."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as a line."""
        facts = "".join(f" {name}={_shown(value)}" for name, value in _facts(record).items())
        line = f"{_time(record)} {record.levelname} {_one_line(record.getMessage())}{facts}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


def _facts(record: logging.LogRecord) -> dict[str, object]:
    """Return the structured fields of a record, with the client it was logged for."""
    facts = getattr(record, "facts", None)
    facts = facts if isinstance(facts, dict) else {}
    return facts if facts.get("client") else {**facts, **({"client": name} if (name := _client()) else {})}


def _client() -> str:
    return caller.get().name


def _time(record: logging.LogRecord) -> str:
    return (
        datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    )


def _shown(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return text if text.isprintable() and " " not in text and text else json.dumps(text)


def _one_line(text: str) -> str:
    return text.replace("\n", "\\n").replace("\r", "\\r")
