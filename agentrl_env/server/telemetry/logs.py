"""The log of a serving process: one line per event, as text or as JSON.

Without ``messages`` the log omits everything that models and environments write. It shows only the types,
files and lines of an exception, whose text might quote arguments, and only the place of records from
libraries that might quote messages. Logged text cannot imitate another line or a terminal control sequence.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
import threading
import traceback
from collections.abc import Iterator
from datetime import UTC, datetime
from operator import attrgetter
from typing import Any, Literal

from agentrl_env.server.auth import caller

LogFormat = Literal["text", "json"]
logger = logging.getLogger("agentrl_env")
_LIBRARIES = ("asyncio", "httpcore", "httpx", "mcp", "py", "uvicorn", "websockets")
"""Loggers whose records might quote messages. ``py`` is the logger of Python's warnings."""
_WORDLESS = {"asyncio": re.compile(r"[\w ]+"), "py": re.compile(r".*?:\d+: \w+")}
"""The first part of their texts, which quotes nothing: the event, or the place and kind of a warning."""
_FRAMES, _CAUSES = 40, 20
"""Maximum numbers of frames and of chained exceptions in a traceback. A recursion has a thousand frames."""


def configure_logs(form: LogFormat = "text", *, level: str | None = None, messages: bool = False) -> None:
    """Write the log to standard error, unless logging is configured already.

    Args:
        form: one readable line per event, or one JSON object.
        level: lowest level. The default is ``info`` for JSON. For text it is ``warning``, plus the drain and
            the end of the process.
        messages: also log the messages of models and environments.
    """
    logging.getLogger("agentrl_env.messages").setLevel(logging.DEBUG if messages else logging.WARNING)
    if logging.getLogger().handlers:
        return
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines(messages=messages) if form == "json" else TextLines(messages=messages))
    lowest = level or ("info" if form == "json" else "warning")
    logging.basicConfig(handlers=[handler], level=lowest.upper())
    if level is None:
        logging.getLogger("agentrl_env.process").setLevel(logging.INFO)
    if not messages:
        for name in _LIBRARIES:
            logging.getLogger(name).setLevel(logging.WARNING)  # at lower levels they log whole frames
    logging.captureWarnings(True)
    sys.unraisablehook = threading.excepthook = _log_uncaught


class _Lines(logging.Formatter):
    """One line per record.

    Args:
        messages: include the texts of exceptions and of libraries that might quote messages.
    """

    def __init__(self, *, messages: bool = False) -> None:
        super().__init__()
        self._messages = messages


class JsonLines(_Lines):
    """One JSON object per record: time, level, event, facts, client and the traceback of an exception."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as one line."""
        line: dict[str, object] = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "event": _event(record, self._messages),
            "logger": record.name,
            **_facts(record),
        }
        error = _error(record)
        if error is not None:
            line["traceback"] = "\n".join(_traceback(error, self._messages))
        return json.dumps(line, default=str).replace("\x7f", "\\u007f")


class TextLines(_Lines):
    """Time, level and event, then each fact as ``name=value``. A traceback follows on indented lines."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as a line."""
        facts = "".join(f" {name}={_format(value)}" for name, value in _facts(record).items())
        lines = [f"{_time(record)} {record.levelname} {_event(record, self._messages)}{facts}"]
        error = _error(record)
        if error is not None:
            lines += [f"  {line}" for line in _traceback(error, self._messages)]
        return "\n".join(map(escape, lines))


def escape(text: str) -> str:
    """Return text with control characters and line breaks escaped."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _event(record: logging.LogRecord, messages: bool) -> str:
    text, library = record.getMessage(), record.name.partition(".")[0]
    if messages or library not in _LIBRARIES:
        return text
    wordless = _WORDLESS[library].match(text) if library in _WORDLESS else None
    place = f"{record.name} logged at {record.filename}:{record.lineno}"
    return wordless[0] if wordless else f"{place}; --log-messages shows it"


def _error(record: logging.LogRecord) -> BaseException | None:
    return record.exc_info[1] if isinstance(record.exc_info, tuple) else None


def _traceback(error: BaseException, messages: bool) -> Iterator[str]:
    """Yield the lines of a traceback."""
    if messages:
        for part in traceback.format_exception(error):
            yield from part.splitlines()
    else:
        yield from outline(error)


def outline(error: BaseException, seen: set[int] | None = None) -> Iterator[str]:
    """Yield files, lines and types of an exception and of its causes, without their texts."""
    seen = set() if seen is None else seen
    seen.add(id(error))
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    for other in (cause, *getattr(error, "exceptions", ())):
        if other is not None and id(other) not in seen and len(seen) < _CAUSES:
            yield from outline(other, seen)
            yield "which led to:"
    frames = list(traceback.walk_tb(error.__traceback__))
    for frame, line in frames[-_FRAMES:]:
        code = frame.f_code
        # Code without a file might come from the agent, with names that it chose.
        where = f'"{code.co_filename}", line {line}, in {code.co_name}'
        yield f"File {where if os.path.isfile(code.co_filename) else f'<none>, line {line}'}"
    yield type_name(type(error))


def type_name(kind: type[BaseException]) -> str:
    """Return the name of a class, or of the first base that a module defines under its name."""
    for base in kind.__mro__:
        try:
            found = attrgetter(base.__qualname__)(sys.modules[base.__module__])
        except Exception:  # the class was created by a call, or by the agent's code
            continue
        if found is base:
            return f"{base.__module__}.{base.__qualname__}".removeprefix("builtins.")
    return "BaseException"


def _log_uncaught(args: Any) -> None:
    """Log an uncaught exception in a thread or a finalizer."""
    if args.exc_value is not None and not isinstance(args.exc_value, SystemExit):
        logger.error("an exception in a thread or a finalizer was not caught", exc_info=args.exc_value)


def _facts(record: logging.LogRecord) -> dict[str, object]:
    """Return the structured fields of a record, and the client of the call that logged it."""
    facts = getattr(record, "facts", None)
    facts = facts if isinstance(facts, dict) else {}
    name = caller.get().name
    return {**facts, "client": name} if name and not facts.get("client") else facts


def _time(record: logging.LogRecord) -> str:
    return (
        datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    )


def _format(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return text if text.isprintable() and " " not in text and text else json.dumps(text)
