"""Encodes the state of an episode as JSON, so that another process can continue the episode.

The format contains only data: decoding imports no module and calls no function, class or method that the
data names. A value is ``null``, a boolean, a number, a string or an array of values, or an object
with one key, its tag. ``_ROWS`` lists the tags and their content, except for two. ``enum`` has a class and
the name of a member. ``object``, which is a dataclass, named tuple or pydantic model, has a class, the names
of the fields that were set, and the name and value of each field.

Classes must be in ``agentrl_env.types`` or in the task's own package, at the top level of a module that is
already imported. A time zone is read by its name from the time zone database. Objects that a value refers to
twice are decoded as two objects.
"""

from __future__ import annotations

import json
import math
import random
import re
import sys
from base64 import b64encode
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from functools import partial
from pathlib import Path, PurePosixPath, PureWindowsPath
from types import ModuleType
from typing import Annotated, Any, Literal, get_args
from uuid import UUID
from zoneinfo import ZoneInfo

import numpy as np
from msgspec import Meta, convert
from numpy.random import SeedSequence
from pydantic import BaseModel

from agentrl_env.environment import Environment
from agentrl_env.errors import StateError

MAX_BYTES = 1024 * 1024
"""Maximum size of a state that is decoded."""
MAX_DEPTH = 100
"""Maximum nesting of values."""
MAX_VALUES = 500_000
"""Maximum number of values in a state. A value with two references counts twice."""
SUPPORTED = (
    "None, bool, int, float, complex, str, bytes, list, tuple, range, set, frozenset, dict, deque, Counter, "
    "OrderedDict, defaultdict of builtin types, Decimal, Fraction, UUID, paths, dates, times and time zones "
    "of datetime and zoneinfo, random.Random, NumPy generators, NumPy arrays and scalars of booleans, "
    "numbers, dates and text, agentrl_env.types, and dataclasses, named tuples, pydantic models and enums "
    "that the task's package defines at the top level of a module"
)

_TYPES = "agentrl_env.types"
_SURROGATE = re.compile("[\ud800-\udfff]")
_DTYPE = re.compile(
    r"\|[biu]1|\|S\d{1,6}|[<>](?:[iuf][248]|c8|c16|U\d{1,6}|[mM]8(?:\[\d{0,6}[a-zA-Z]{1,2}\])?)"
)
_ZONE = re.compile(r"\w+([/+-]\w+)*", re.ASCII)
_FRACTION_BITS = 1 << 16
"""Maximum number of bits in a numerator or denominator, since larger ones take long to reduce."""
_FACTORIES: dict[Any, Any] = {kind.__name__: kind for kind in (bool, int, float, str, list, dict, set)}
_BELOW = {"state": 2**128, "inc": 2**128, "has_uint32": 2, "uinteger": 2**32, "pos": 625, "buffer_pos": 5}
_BELOW |= {"entropy": 1, "pool_size": 65, "n_children_spawned": 2**63}
"""Bounds of the integers in a generator's state. NumPy does not check positions and reads out of bounds."""

_Step = tuple[Any, list[Any], int]  # a value, the list of its contents, a position in the list
_Array = tuple[str, list[Annotated[int, Meta(ge=0)]], bytes]
_RandomState = tuple[Literal[3], tuple[int, ...], float | None]
_Clock = tuple[str, Literal[0, 1], Any]  # ISO 8601 without the zone, fold, zone
_BitGenerator = Literal["MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64"]
_Generator = tuple[_BitGenerator, dict[str, Any], dict[str, Any]]


def encode(value: Any, environment: type[Environment] | None = None) -> bytes:
    """Return a state as ASCII JSON. It can contain classes of the task's package.

    Raises StateError if the state contains an unsupported value or itself, or is too deep or too large.
    """
    try:
        node = _Encoder(_packages(environment)).encode(value)
    except StateError as error:
        state = "the state" if environment is None else f"snapshot() of task {environment.name!r}"
        raise StateError(f"{state} {error}") from None
    return json.dumps(node, allow_nan=False, separators=(",", ":")).encode()


def decode(data: bytes, environment: type[Environment] | None = None) -> Any:
    """Return the state that ``encode`` received. Raises StateError. The bytes need not be trusted."""
    if len(data) > MAX_BYTES:
        raise StateError(f"the state has {len(data)} bytes; at most {MAX_BYTES} are decoded")
    try:
        return _decode(json.loads(data.decode("ascii")), _packages(environment), 0)
    except Exception as error:
        raise StateError(f"the state is malformed: {type(error).__name__}: {error}"[:500]) from error


@dataclass
class _Encoder:
    """Converts a state to values for ``json.dumps``, and counts the values."""

    packages: list[str]
    values: int = 0

    def encode(self, value: Any, path: tuple[_Step, ...] = (), holder: Any = None) -> Any:
        """Encode a value, or the list of the contents of ``holder``. Raises StateError.

        ``path`` lists the values that contain it.
        """
        if _is_json(value):
            return value
        holder = value if holder is None else holder
        if type(value) is not list:
            try:
                tag, content = self._content(value)
            except TypeError as error:
                raise StateError(f"holds {error} at {_where(path)}; it may hold {SUPPORTED}") from None
            return {tag: self.encode(content, path, holder)}
        self.values += len(value)
        if any(around is holder for around, _, _ in path):
            raise StateError(f"holds a value that contains itself, at {_where(path)}")
        if len(path) >= MAX_DEPTH:
            raise StateError(f"is nested deeper than {MAX_DEPTH} values")
        if self.values > MAX_VALUES:
            raise StateError(f"holds more than {MAX_VALUES} values")
        items = enumerate(value)
        return [v if _is_json(v) else self.encode(v, (*path, (holder, value, n))) for n, v in items]

    def _content(self, value: Any) -> tuple[str, Any]:
        """Return the tag of a value and its content, which is then encoded too. Raises TypeError."""
        kind = type(value)
        tag = _TAGS.get(kind) or ("scalar" if isinstance(value, np.generic) else None)
        if tag is not None:
            return tag, _ROWS[tag][1](value)
        key = _key(kind, self.packages)
        if key is None or (isinstance(value, Enum) and value.name not in kind.__members__):
            # A combination of flags is not a member.
            raise TypeError(f"a {kind.__module__}.{kind.__qualname__}".replace("a builtins.", "a "))
        return ("enum", [key, value.name]) if isinstance(value, Enum) else ("object", [key, *_fields(value)])


def _decode(node: Any, packages: list[str], depth: int) -> Any:
    """Decode a value that ``json.loads`` returned. Any exception means that it is malformed."""
    if depth > MAX_DEPTH:
        raise ValueError(f"nested deeper than {MAX_DEPTH} values")
    if isinstance(node, list):
        return [_decode(item, packages, depth + 1) for item in node]
    if not isinstance(node, dict):
        return node
    ((tag, encoded),) = node.items()
    content = _decode(encoded, packages, depth)
    if tag not in ("enum", "object"):
        _, _, content_type, value_of = _ROWS[tag]
        return value_of(content if type(content) is content_type else convert(content, content_type))
    key, *content = convert(content, list)
    kind: Any = _find(convert(key, str), packages)
    if kind is None or issubclass(kind, Enum) != (tag == "enum"):
        raise ValueError(f"the task's package has no {key} that a state can contain")
    return kind.__members__[convert(content, tuple[str])[0]] if tag == "enum" else _object(kind, *content)


def _is_json(value: Any) -> bool:
    """Return True if a value is encoded as itself, which is true for most values."""
    kind = type(value)
    if kind is str:  # two surrogates would be decoded as one character
        return value.isascii() or not _SURROGATE.search(value)
    if kind is int:
        return bool(-(2**63) <= value < 2**63)
    return value is None or kind is bool or (kind is float and math.isfinite(value))


def _where(path: tuple[_Step, ...]) -> str:
    ordered = {list, *(kind for kind in _TAGS if not issubclass(kind, dict))}
    steps = (n if type(holder) in ordered else parts[n - n % 2] for holder, parts, n in path)
    return "state" + "".join(f"[{step!r:.60}]" for step in steps)


def _packages(environment: type[Environment] | None) -> list[str]:
    """Return the packages, or single modules, of a task and of its base classes."""
    bases = environment.__mro__ if environment is not None else ()
    modules = [base.__module__ for base in bases if issubclass(base, Environment) and base is not Environment]
    return list(dict.fromkeys(getattr(sys.modules[name], "__package__", None) or name for name in modules))


def _key(kind: type, packages: list[str]) -> str | None:
    """Return the key of a class, which is its name and its module's name in the package, or None."""
    module, name = kind.__module__, kind.__qualname__
    keys = [f"{module[len(p) + 1 :]}:{name}" for p in packages if f"{module}.".startswith(f"{p}.")]
    return next((key for key in [*keys, f"{_TYPES}:{name}"] if _find(key, packages) is kind), None)


def _find(key: str, packages: list[str]) -> type | None:
    """Return the class with a key, or None. Only looks at the top level of modules that are imported."""
    inner, _, name = key.partition(":")
    for module_name in [_TYPES] if inner == _TYPES else [f"{p}.{inner}".rstrip(".") for p in packages]:
        module = sys.modules.get(module_name)
        found = vars(module).get(name) if isinstance(module, ModuleType) else None
        if isinstance(found, type) and found.__module__ == module_name:
            # Its instances consist only of named fields, or are members of an enum.
            plain = is_dataclass(found) and found.__new__ is object.__new__
            if plain or issubclass(found, Enum | BaseModel) or _is_named_tuple(found):
                return found
    return None


def _is_named_tuple(kind: Any) -> bool:
    return issubclass(kind, tuple) and hasattr(kind, "_fields")


def _field_names(kind: Any) -> list[str]:
    if _is_named_tuple(kind):
        return list(kind._fields)
    return list(kind.model_fields) if issubclass(kind, BaseModel) else [field.name for field in fields(kind)]


def _fields(value: Any) -> list[Any]:
    """Return the set fields of a pydantic model, then the name and value of each field."""
    names, held, given = _field_names(type(value)), {*getattr(value, "__dict__", ())}, None
    if isinstance(value, BaseModel):
        held |= {*(value.__pydantic_extra__ or ()), *(value.__pydantic_private__ or ())}
        given = sorted(value.__pydantic_fields_set__)
    if beyond := held.difference(names):
        raise TypeError(f"a {type(value).__qualname__} with {min(beyond)!r}, which is not one of its fields,")
    pairs = ((name, getattr(value, name)) for name in names if hasattr(value, name))
    return [given, *(part for pair in pairs for part in pair)]


def _object(kind: Any, given: Any, *pairs: Any) -> Any:
    """Return an instance of a dataclass, named tuple or pydantic model without running its class's code."""
    attributes, names = _dict(pairs), _field_names(kind)
    if not attributes.keys() <= set(names):
        raise ValueError(f"not the fields of {kind.__qualname__}")
    if _is_named_tuple(kind):
        return tuple.__new__(kind, [attributes[name] for name in names])
    made = object.__new__(kind)
    if issubclass(kind, BaseModel):
        attributes = {"__dict__": attributes, "__pydantic_fields_set__": convert(given, set[str])}
        attributes |= dict.fromkeys(("__pydantic_extra__", "__pydantic_private__"))
    for name, value in attributes.items():
        object.__setattr__(made, name, value)
    return made


def _pairs(held: dict[Any, Any]) -> list[Any]:
    return [part for pair in held.items() for part in pair]


def _dict(flat: Sequence[Any]) -> dict[Any, Any]:
    return dict(zip(flat[::2], flat[1::2], strict=True))


def _array_content(array: np.ndarray[Any, Any]) -> list[Any]:
    if not array.dtype.itemsize or not _DTYPE.fullmatch(array.dtype.str):
        raise TypeError(f"NumPy's {array.dtype}")
    return [array.dtype.str, list(array.shape), array.tobytes()]


def _array(content: _Array) -> np.ndarray[Any, Any]:
    """Return an array whose memory contains only values that NumPy itself can write."""
    dtype, shape, data = content
    if not _DTYPE.fullmatch(dtype):
        raise ValueError(f"not a plain dtype: {dtype[:50]}")
    array = np.frombuffer(bytearray(data), np.dtype(dtype))
    order, kind = dtype[0], dtype[1]
    unit, largest = (f"{order}u4", sys.maxunicode) if kind == "U" else ("u1", 1 if kind == "b" else 255)
    if np.any(array.view(unit) > largest):
        raise ValueError("text that is not Unicode, or booleans that are neither true nor false")
    return array.reshape(shape)


def _clock(value: datetime | time) -> list[Any]:
    return [value.replace(tzinfo=None).isoformat(), value.fold, value.tzinfo]


def _at(kind: type[datetime] | type[time], content: _Clock) -> datetime | time:
    text, fold, zone = content
    return kind.fromisoformat(text).replace(fold=fold, tzinfo=zone)


def _zone(name: str | None) -> ZoneInfo:
    if not _ZONE.fullmatch(name or ""):
        raise ValueError("not the name of a time zone")
    return ZoneInfo(str(name))


def _small(fraction: Fraction) -> list[int]:
    numbers = [fraction.numerator, fraction.denominator]
    if max(number.bit_length() for number in numbers) > _FRACTION_BITS:
        raise TypeError(f"a fraction of more than {_FRACTION_BITS} bits")
    return numbers


def _fraction(numbers: tuple[int, int]) -> Fraction:
    if max(number.bit_length() for number in numbers) > _FRACTION_BITS:
        raise ValueError(f"a fraction of more than {_FRACTION_BITS} bits")
    return Fraction(*numbers)


def _default_content(held: defaultdict[Any, Any]) -> list[Any]:
    name = getattr(held.default_factory, "__name__", None)
    if _FACTORIES.get(name) is not held.default_factory:
        raise TypeError(f"a collections.defaultdict of {name}")
    return [None, name, *_pairs(held)]


def _default_dict(flat: list[Any]) -> defaultdict[Any, Any]:
    factory = None if flat[1] is None else _FACTORIES[flat[1]]
    return defaultdict(factory, _dict(flat[2:]))


def _random(state: _RandomState) -> random.Random:
    made = random.Random(0)
    made.setstate(state)
    return made


def _generator_content(generator: np.random.Generator) -> list[Any]:
    bits: Any = generator.bit_generator
    name, seeds = type(bits).__name__, bits.seed_seq
    if name not in get_args(_BitGenerator) or type(bits) is not getattr(np.random, name):
        return [bits]  # not supported
    return [name, bits.state, (seeds if type(seeds) is SeedSequence else SeedSequence(0)).state]


def _generator(content: _Generator) -> np.random.Generator:
    name, state, seeds = content
    _check_form({**seeds, "entropy": 0}, SeedSequence(0).state)
    bits = getattr(np.random, name)(SeedSequence(**seeds))
    _check_form(state, bits.state)
    bits.state = state
    return np.random.Generator(bits)


def _check_form(state: Any, pattern: Any) -> None:
    """Raise ValueError unless a state has the form of ``pattern`` and its integers are in bounds."""

    def form(value: Any, bound: int = 0) -> Any:
        if isinstance(value, dict):
            return {key: form(item, _BELOW.get(key, 0)) for key, item in value.items()}
        if isinstance(value, np.ndarray):
            return value.dtype, value.shape
        kind = type(value)
        return 0 <= value < bound if kind is int else value if kind is str else kind

    if form(state) != form(pattern):
        raise ValueError("not a state of this generator")


_ROWS: dict[str, tuple[type, Callable[[Any], Any], Any, Callable[[Any], Any]]] = {
    # tag: type, function for its content, type of the decoded content, function from content to value
    "int": (int, hex, str, lambda text: int(text, 16)),
    "float": (float, repr, str, {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}.__getitem__),
    "str": (str, lambda text: [*map(ord, text)], list[int], lambda codes: "".join(map(chr, codes))),
    "bytes": (bytes, lambda data: b64encode(data).decode(), bytes, bytes),
    "tuple": (tuple, list, list, tuple),
    "set": (set, list, list, set),
    "frozenset": (frozenset, list, list, frozenset),
    "deque": (deque, lambda queue: [*queue, queue.maxlen], list, lambda flat: deque(flat[:-1], flat[-1])),
    "dict": (dict, _pairs, list, _dict),
    "Counter": (Counter, _pairs, list, lambda flat: Counter(_dict(flat))),
    "OrderedDict": (OrderedDict, _pairs, list, lambda flat: OrderedDict(_dict(flat))),
    "defaultdict": (defaultdict, _default_content, list, _default_dict),
    "range": (
        range,
        lambda r: [r.start, r.stop, r.step],
        tuple[int, int, int],
        lambda numbers: range(*numbers),
    ),
    "complex": (complex, lambda z: [z.real, z.imag], tuple[float, float], lambda parts: complex(*parts)),
    "Decimal": (Decimal, str, str, Decimal),
    "Fraction": (Fraction, _small, tuple[int, int], _fraction),
    "UUID": (UUID, str, str, UUID),
    "path": (type(Path()), str, str, Path),
    "path.posix": (PurePosixPath, str, str, PurePosixPath),
    "path.windows": (PureWindowsPath, str, str, PureWindowsPath),
    "date": (date, date.isoformat, str, date.fromisoformat),
    "datetime": (datetime, _clock, _Clock, partial(_at, datetime)),
    "time": (time, _clock, _Clock, partial(_at, time)),
    "timedelta": (
        timedelta,
        lambda span: [span.days, span.seconds, span.microseconds],
        tuple[int, int, int],
        lambda parts: timedelta(*parts),
    ),
    "timezone": (timezone, lambda zone: list(zone.__getinitargs__()), list, lambda parts: timezone(*parts)),
    "zone": (ZoneInfo, lambda zone: zone.key, str | None, _zone),
    "array": (np.ndarray, _array_content, _Array, _array),
    "scalar": (np.generic, np.asarray, np.ndarray, lambda array: array.reshape(1)[0]),
    "numpy.str": (np.str_, np.str_.item, str, np.str_),  # an array would lose NULs at the end
    "numpy.bytes": (np.bytes_, np.bytes_.item, bytes, np.bytes_),
    "random": (random.Random, random.Random.getstate, _RandomState, _random),
    "generator": (np.random.Generator, _generator_content, _Generator, _generator),
}
_TAGS = {row[0]: tag for tag, row in _ROWS.items()}
