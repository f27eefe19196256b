"""Locate the author's code: the file and line of an exception, a frame, a function or a class."""

from __future__ import annotations

import ast
import inspect
import linecache
import os
import sys
import sysconfig
from functools import partial
from types import TracebackType
from typing import Any

_OWN_FOLDER = os.path.dirname(__file__) + os.sep
_LIBRARY = sysconfig.get_path("stdlib") + os.sep
_ADVICE = {
    "can only be used in that same thread": "plain methods run on several threads: connect with "
    "check_same_thread=False, and hold a lock where sessions share the connection",
    "no running event loop": "a plain method runs on a thread: make it async def",
    "cannot be called from a running event loop": "await the coroutine instead",
    "is bound to a different event loop": "create it in startup() or in a method, not at import",
    "can't be used in 'await' expression": "await only the results of async methods",
    "exceptions must derive from BaseException": "return what ends the episode or answers the model, as in "
    "return Done(...); only ToolError is raised",
    "terminated abruptly": "a spawned process cannot import modules from the folder "
    "of a task: name the task as module:Class, or fork",
    "64 is not JSON serializable": "make a number of NumPy plain, as in int(...) or float(...)",
    "'TaskSample' object ": "the data from samples() is in sample.data, as in sample.data['key']",
}
"""Advice about messages of Python that contain none."""


def search_working_directory() -> None:
    """Make the modules of the working directory importable, after all others."""
    if (folder := os.getcwd()) not in sys.path:
        sys.path.append(folder)


def describe(error: BaseException, method: Any = None) -> str:
    """Return an exception's class and text, cut to a readable length, with the author's file and line.

    Args:
        error: The exception.
        method: The called method. Its place is named if no frame of the author raised the error.
    """
    while isinstance(error, BaseExceptionGroup):  # a TaskGroup raises a group without a useful text
        error = error.exceptions[0]
    try:
        located = isinstance(error, SyntaxError) and os.path.isfile(error.filename or "")
        text = str(error.msg if located else error)  # type: ignore[attr-defined]
    except BaseException:  # because ``__str__`` is author code too
        text = "its text cannot be read"
    text = f"{type(error).__name__}: {text}".removesuffix(": ")[:500]
    text = text.encode("utf-8", "replace").decode("utf-8")
    for symptom, advice in _ADVICE.items():
        if symptom in text:
            text = f"{text.rstrip('.')}; {advice}"
    return with_place(text, raised_at(error) or place(method))


def raised_at(error: BaseException) -> str:
    """Return ``file:line, in function`` of the author's line that raised an error, or ""."""
    if isinstance(error, SyntaxError) and os.path.isfile(error.filename or ""):
        return f"{_relative(str(error.filename))}:{error.lineno or 1}"
    step = innermost(error)
    if step is None:
        return ""
    function = step.tb_frame.f_code.co_name
    return place(step) if function == "<module>" else f"{place(step)}, in {function}"


def innermost(error: BaseException) -> TracebackType | None:
    """Return the innermost frame of an error that is in the folder of the author's first frame."""
    step = first = author_traceback(error)
    found = None
    while step is not None and first is not None:
        file, home = step.tb_frame.f_code.co_filename, first.tb_frame.f_code.co_filename
        beside = file.startswith(os.path.dirname(home) + os.sep) and "site-packages" not in file
        if file == home or beside:
            found = step
        step = step.tb_next
    return found


def author_traceback(error: BaseException) -> TracebackType | None:
    """Return the traceback of an error from the author's first frame on, or None without such a frame."""
    step = error.__traceback__
    while step is not None:
        file = step.tb_frame.f_code.co_filename
        library = file.startswith(_LIBRARY) and "site-packages" not in file
        if not file.startswith((_OWN_FOLDER, "<frozen")) and not library:
            return step
        step = step.tb_next
    return None


def author_frames(error: BaseException) -> tuple[type[BaseException], BaseException, TracebackType | None]:
    """Return an error as ``exc_info`` of a log record, without the frames before the author's first frame."""
    return type(error), error, author_traceback(error) or error.__traceback__


def place(thing: Any, attribute: str = "") -> str:
    """Return ``file:line`` of a frame, a function, a class or a class attribute, or "" if it is unknown."""
    if isinstance(thing, TracebackType):
        return f"{_relative(thing.tb_frame.f_code.co_filename)}:{thing.tb_lineno}"
    if isinstance(thing, type):
        return _place_in_class(thing, attribute)
    while isinstance(thing, partial):
        thing = thing.func
    thing = getattr(thing, "fget", None) or getattr(thing, "__func__", thing)
    code = getattr(inspect.unwrap(thing), "__code__", None) if callable(thing) else None
    if code is None or code.co_filename.startswith(_OWN_FOLDER):
        return ""
    return f"{_relative(code.co_filename)}:{code.co_firstlineno}"


def _place_in_class(owner: type, attribute: str) -> str:
    """Return the place of an attribute in the source of a class, or the place of the class."""
    file = getattr(sys.modules.get(owner.__module__), "__file__", None)
    try:
        tree = ast.parse("".join(linecache.getlines(file or "")))
    except (SyntaxError, ValueError):
        return ""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and node.name == owner.__name__:
            named = (statement for statement in node.body if attribute in _names(statement))
            return f"{_relative(str(file))}:{next(named, node).lineno}"
    return ""


def _names(statement: ast.stmt) -> list[str]:
    """Return the names that a statement of a class body defines."""
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
        return [statement.name]
    if isinstance(statement, ast.Assign | ast.AnnAssign):
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        return [target.id for target in targets if isinstance(target, ast.Name)]
    return []


def _relative(file: str) -> str:
    """Return the path relative to the working directory if it is inside it."""
    try:
        return file.removeprefix(os.getcwd() + os.sep)
    except OSError:
        return file


def with_place(message: str, where: str) -> str:
    """Return a message with its place, unless the message already names the line."""
    line = where.partition(", in ")[0]
    named = f"({line})" in message or f"({line}, in " in message
    return f"{message} ({where})" if where and not named else message
