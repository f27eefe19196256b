"""Encodes the state of an episode as JSON, so that another process can continue from it.

The format carries data and nothing else: decoding imports no module and calls no function, class or method
that the data names. A value is ``null``, a boolean, a number, a string or an array of values, or an object
with one key, its tag:

===============  ==========================================================================
``int``          an integer beyond 64 bits, in hexadecimal
``float``        ``nan``, ``inf`` or ``-inf``
``str``          text with lone surrogates: its UTF-8 bytes in Base64
``bytes``        Base64
``tuple`` ...    an array of values; likewise ``set`` and ``frozenset``
``deque``        its bound (or null) and its values
``dict``         an array of ``[key, value]``
``array``        dtype, shape and contents of a NumPy array, in Base64
``scalar``       dtype and contents of a NumPy scalar; of text the kind and the text
``generator``    a ``numpy.random.Generator``: bit generator, its state, its seed sequence
``random``       a ``random.Random``: what ``getstate`` returns
``enum``         an enum of the task: class and member
``object``       a dataclass or pydantic model: class, fields, and which fields were set
===============  ==========================================================================

Classes are those of ``agentrl_env.types`` and of the task's own package, at the top level of a module that is
already imported. Objects that a value refers to twice are decoded as two objects.
"""

from __future__ import annotations

import json
import math
import random
import re
import reprlib
import sys
from base64 import b64decode, b64encode
from collections import deque
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import BaseModel

from agentrl_env.errors import StateError

if TYPE_CHECKING:
    from agentrl_env.environment import Environment

MAX_BYTES = 1024 * 1024
"""The largest state that is decoded."""
MAX_DEPTH = 100
"""How deep values may be nested."""
MAX_VALUES = 500_000
"""How many values a state may hold, one that it refers to twice counted twice."""
SUPPORTED = (
    "None, bool, int, float, str, bytes, list, tuple, set, frozenset, dict, deque, NumPy arrays and scalars, "
    "numpy.random.Generator, random.Random, agentrl_env.types, and dataclasses, pydantic models and enums "
    "that the task's package defines at the top level of a module"
)

_TYPES = "agentrl_env.types"
_SEQUENCES: dict[str, type] = {"tuple": tuple, "set": set, "frozenset": frozenset}
_NOT_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
_BIT_GENERATORS = {
    kind.__name__: kind
    for kind in (np.random.PCG64, np.random.PCG64DXSM, np.random.MT19937, np.random.Philox, np.random.SFC64)
}
_BELOW = {"state": 2**128, "inc": 2**128, "has_uint32": 2, "uinteger": 2**32, "pos": 625, "buffer_pos": 5}
"""Bounds of the integers in a bit generator's state. NumPy does not check positions, and reads beyond."""
_DTYPE = re.compile(
    r"\|[biu]1|\|S\d{1,6}|[<>](?:[iuf][248]|c8|c16|U\d{1,6}|[mM]8(?:\[\d{0,6}[a-zA-Z]{1,2}\])?)"
)


def encode(value: Any, environment: type[Environment] | None = None) -> bytes:
    """Return a state as ASCII JSON.

    Args:
        value: what ``snapshot`` returned.
        environment: the task, whose package may define classes that the state holds; also named in errors.

    Raises:
        StateError: the state holds what is not supported, holds itself, or is too deep or too large.
    """
    return json.dumps(_Encoder(environment).encode(value), allow_nan=False, separators=(",", ":")).encode()


def decode(data: bytes, environment: type[Environment] | None = None) -> Any:
    """Return the state that ``encode`` was given.

    Args:
        data: of any origin.
        environment: the task, whose package may define classes that the state holds.

    Raises:
        StateError: the bytes encode no state that this task could have.
    """
    if len(data) > MAX_BYTES:
        raise StateError(f"the state has {len(data)} bytes; at most {MAX_BYTES} are decoded")
    decoder = _Decoder(environment)
    try:
        return decoder.decode(json.loads(data.decode("ascii")), 0)
    except Exception as error:
        raise StateError(f"the state is malformed: {type(error).__name__}: {error}"[:500]) from error


class _Classes:
    """The dataclasses, pydantic models and enums that a state may hold instances of.

    A class has a key, ``MODULE:NAME``, where the module is relative to the task's package, so that the same
    folder may have different places on different machines.
    """

    def __init__(self, environment: type[Environment] | None) -> None:
        from agentrl_env.environment import Environment

        bases = environment.__mro__ if environment is not None else ()
        modules = [
            base.__module__ for base in bases if issubclass(base, Environment) and base is not Environment
        ]
        self._packages = list(dict.fromkeys(_package(module) for module in modules))

    def key(self, kind: type) -> str | None:
        """Return the key of a class, or None if a state may not hold its instances."""
        for package in self._packages:
            if kind.__module__ == package or kind.__module__.startswith(f"{package}."):
                key = f"{kind.__module__[len(package) + 1 :]}:{kind.__qualname__}"
                if self.find(key) is kind:
                    return key
        key = f"{kind.__module__}:{kind.__qualname__}"
        return key if kind.__module__ == _TYPES and self.find(key) is kind else None

    def find(self, key: str) -> type | None:
        """Return the class that has a key, or None. Only looks into modules that are already imported."""
        inner, _, name = key.partition(":")
        names = [f"{package}.{inner}" if inner else package for package in self._packages]
        for module_name in [_TYPES] if inner == _TYPES else names:
            module = sys.modules.get(module_name)
            found = vars(module).get(name) if isinstance(module, ModuleType) else None
            if isinstance(found, type) and found.__module__ == module_name and _is_plain(found):
                return found
        return None


class _Encoder:
    """Turns one value into what ``json.dumps`` takes."""

    def __init__(self, environment: type[Environment] | None) -> None:
        self._classes = _Classes(environment)
        self._holder = "the state" if environment is None else f"snapshot() of task {environment.name!r}"
        self._path: list[Any] = []
        self._around: set[int] = set()
        """The identities of the values that contain the present one."""
        self._values = 0

    def encode(self, value: Any) -> Any:
        """Return the encoded value. Raises StateError."""
        if _is_json(value):
            return value
        kind = type(value)
        encode = _ENCODERS.get(kind)
        if encode is not None:
            return encode(self, value)
        if id(value) in self._around:
            raise StateError(f"{self._holder} holds a value that contains itself, at {self._where()}")
        if len(self._around) >= MAX_DEPTH:
            raise StateError(f"{self._holder} is nested deeper than {MAX_DEPTH} values")
        self._around.add(id(value))
        encoded = self._container(value, kind)
        self._around.discard(id(value))
        return encoded

    def integer(self, value: int) -> Any:
        return {"int": hex(value)}

    def real(self, value: float) -> Any:
        return {"float": repr(value)}

    def text(self, value: str) -> Any:
        try:
            value.encode()
        except UnicodeEncodeError:
            return {"str": _base64(value.encode("utf-8", "surrogatepass"))}
        return value

    def binary(self, value: bytes) -> Any:
        return {"bytes": _base64(value)}

    def array(self, value: np.ndarray[Any, Any]) -> Any:
        return {"array": [self._dtype(value), list(value.shape), _base64(value.tobytes())]}

    def numpy_text(self, value: np.str_ | np.bytes_) -> Any:
        return {"scalar": [value.dtype.kind, self.encode(value.item())]}

    def random(self, value: random.Random) -> Any:
        return {"random": self.encode(value.getstate())}

    def generator(self, value: np.random.Generator) -> Any:
        bits = value.bit_generator
        name, seeds = type(bits).__name__, bits.seed_seq
        if _BIT_GENERATORS.get(name) is not type(bits):
            raise self._unsupported(bits)
        sequence = None
        if type(seeds) is np.random.SeedSequence:
            sequence = (seeds.entropy, seeds.spawn_key, seeds.pool_size, seeds.n_children_spawned)
        return {"generator": [name, self.encode(bits.state), self.encode(sequence)]}

    def _container(self, value: Any, kind: type) -> Any:
        if kind is list:
            return self._each(value)
        if kind in _SEQUENCES.values():
            return {kind.__name__: self._each(value)}
        if kind is dict:
            return {"dict": self._pairs(value)}
        if kind is deque:
            return {"deque": [value.maxlen, self._each(value)]}
        if isinstance(value, np.generic):
            return {"scalar": [self._dtype(value), _base64(value.tobytes())]}
        key = self._classes.key(kind)
        if key is None:
            raise self._unsupported(value)
        return self._member(value, key) if isinstance(value, Enum) else self._object(value, kind, key)

    def _member(self, value: Enum, key: str) -> Any:
        if type(value).__members__.get(value.name) is not value:  # a combination of flags
            raise self._unsupported(value)
        return {"enum": [key, value.name]}

    def _object(self, value: Any, kind: type, key: str) -> Any:
        names = _field_names(kind)
        held = {name: getattr(value, name) for name in names if hasattr(value, name)}
        beyond = sorted(getattr(value, "__dict__", {}).keys() - set(names))
        given = None
        if isinstance(value, BaseModel):
            beyond += [*(value.__pydantic_extra__ or ()), *(value.__pydantic_private__ or ())]
            given = sorted(value.__pydantic_fields_set__)
        if beyond:
            holds = f"{self._holder} holds a {kind.__qualname__} at {self._where()}"
            raise StateError(f"{holds} with {beyond[0]!r}, which is not one of its fields")
        return {"object": [key, self._pairs(held), given]}

    def _dtype(self, value: Any) -> str:
        if not value.dtype.itemsize or not _DTYPE.fullmatch(value.dtype.str):
            holds = f"{self._holder} holds NumPy's {value.dtype} at {self._where()}"
            raise StateError(f"{holds}; arrays may hold booleans, numbers, dates and text of fixed length")
        return str(value.dtype.str)

    def _each(self, values: Any) -> list[Any]:
        self._count(len(values))
        return [value if _is_json(value) else self._at(number, value) for number, value in enumerate(values)]

    def _pairs(self, held: dict[Any, Any]) -> list[Any]:
        self._count(len(held))
        return [[self._at(key, key), self._at(key, value)] for key, value in held.items()]

    def _count(self, number: int) -> None:
        self._values += number
        if self._values > MAX_VALUES:
            raise StateError(f"{self._holder} holds more than {MAX_VALUES} values")

    def _at(self, step: Any, value: Any) -> Any:
        self._path.append(step)
        encoded = self.encode(value)
        self._path.pop()
        return encoded

    def _unsupported(self, value: Any) -> StateError:
        kind = type(value)
        name = (
            kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
        )
        return StateError(f"{self._holder} holds a {name} at {self._where()}; it may hold {SUPPORTED}")

    def _where(self) -> str:
        return "state" + "".join(f"[{reprlib.repr(step)}]" for step in self._path)


_ENCODERS: dict[type, Callable[[_Encoder, Any], Any]] = {
    int: _Encoder.integer,
    float: _Encoder.real,
    str: _Encoder.text,
    bytes: _Encoder.binary,
    np.str_: _Encoder.numpy_text,
    np.bytes_: _Encoder.numpy_text,
    np.ndarray: _Encoder.array,
    np.random.Generator: _Encoder.generator,
    random.Random: _Encoder.random,
}


class _Decoder:
    """Turns what ``json.loads`` returns into the value; any exception means that it is malformed."""

    def __init__(self, environment: type[Environment] | None) -> None:
        self._classes = _Classes(environment)

    def decode(self, node: Any, depth: int) -> Any:
        """Return the value of a node that is nested so deep."""
        if depth > MAX_DEPTH:
            raise ValueError(f"nested deeper than {MAX_DEPTH} values")
        if isinstance(node, list):
            return [self.decode(item, depth + 1) for item in node]
        if not isinstance(node, dict):
            return node
        ((tag, content),) = node.items()
        return _DECODERS[tag](self, content, depth)

    def integer(self, content: Any, depth: int) -> int:
        return int(_checked(content, str), 16)

    def real(self, content: Any, depth: int) -> float:
        return _NOT_FINITE[content]

    def text(self, content: Any, depth: int) -> str:
        return _binary(content).decode("utf-8", "surrogatepass")

    def binary(self, content: Any, depth: int) -> bytes:
        return _binary(content)

    def items(self, content: Any, depth: int) -> list[Any]:
        return [self.decode(item, depth + 1) for item in _checked(content, list)]

    def queue(self, content: Any, depth: int) -> deque[Any]:
        bound, items = content
        return deque(self.items(items, depth), None if bound is None else _below(bound, 2**63))

    def mapping(self, content: Any, depth: int) -> dict[Any, Any]:
        pairs = _checked(content, list)
        return {self.decode(key, depth + 1): self.decode(value, depth + 1) for key, value in pairs}

    def array(self, content: Any, depth: int) -> np.ndarray[Any, Any]:
        dtype, shape, data = content
        sizes = [_below(size, 2**63) for size in _checked(shape, list)]
        return _numpy(dtype, bytearray(_binary(data))).reshape(sizes)

    def scalar(self, content: Any, depth: int) -> np.generic:
        dtype, data = content
        if dtype == "U":
            return np.str_(_checked(self.decode(data, depth), str))
        if dtype == "S":
            return np.bytes_(_checked(self.decode(data, depth), bytes))
        (value,) = _numpy(dtype, _binary(data))
        return value  # type: ignore[no-any-return]

    def random(self, content: Any, depth: int) -> random.Random:
        version, internal, gauss = self.decode(content, depth)
        made = random.Random(0)
        made.setstate((_below(version, 4), internal, None if gauss is None else _checked(gauss, float)))
        return made

    def generator(self, content: Any, depth: int) -> np.random.Generator:
        name, encoded, sequence = content
        state, sequence = self.decode(encoded, depth), self.decode(sequence, depth)
        bits = _BIT_GENERATORS[name](0 if sequence is None else _seed_sequence(*sequence))
        _check_bits("", bits.state, state)
        bits.state = state
        return np.random.Generator(bits)

    def member(self, content: Any, depth: int) -> Any:
        key, name = content
        return self._class(key, Enum).__members__[name]

    def object(self, content: Any, depth: int) -> Any:
        key, pairs, given = content
        kind = self._class(key, object)
        held = self.mapping(pairs, depth)
        if not held.keys() <= set(_field_names(kind)):
            raise ValueError(f"not the fields of {key}")
        made = object.__new__(kind)
        if issubclass(kind, BaseModel):
            names = {_checked(name, str) for name in _checked(given, list)}
            state = {"__dict__": held, "__pydantic_fields_set__": names}
            BaseModel.__setstate__(made, {**state, "__pydantic_extra__": None, "__pydantic_private__": None})
        else:
            for name, value in held.items():
                object.__setattr__(made, name, value)
        return made

    def _class(self, key: Any, base: type) -> Any:
        found = self._classes.find(_checked(key, str))
        if found is None or not issubclass(found, base) or (base is object and issubclass(found, Enum)):
            raise ValueError(f"the task's package has no {key} that a state may hold")
        return found


def _sequence(kind: Callable[[list[Any]], Any], decoder: _Decoder, content: Any, depth: int) -> Any:
    return kind(decoder.items(content, depth))


_DECODERS: dict[str, Callable[[_Decoder, Any, int], Any]] = {
    "int": _Decoder.integer,
    "float": _Decoder.real,
    "str": _Decoder.text,
    "bytes": _Decoder.binary,
    **{tag: partial(_sequence, kind) for tag, kind in _SEQUENCES.items()},
    "deque": _Decoder.queue,
    "dict": _Decoder.mapping,
    "array": _Decoder.array,
    "scalar": _Decoder.scalar,
    "generator": _Decoder.generator,
    "random": _Decoder.random,
    "enum": _Decoder.member,
    "object": _Decoder.object,
}


def _is_json(value: Any) -> bool:
    """Return whether a value is encoded as itself; of most states nearly all are."""
    kind = type(value)
    if kind is str:
        return bool(value.isascii())
    if kind is int:
        return bool(-(2**63) <= value < 2**63)
    return value is None or kind is bool or (kind is float and math.isfinite(value))


def _package(module: str) -> str:
    """Return the package of a module that is imported, or its own name where it is in none."""
    return getattr(sys.modules[module], "__package__", None) or module


def _is_plain(kind: type) -> bool:
    """Return whether instances are made of named fields alone, or are members of an enum."""
    return issubclass(kind, Enum | BaseModel) or (is_dataclass(kind) and kind.__new__ is object.__new__)


def _field_names(kind: Any) -> list[str]:
    return list(kind.model_fields) if issubclass(kind, BaseModel) else [field.name for field in fields(kind)]


def _base64(data: bytes) -> str:
    return b64encode(data).decode()


def _binary(content: Any) -> bytes:
    return b64decode(_checked(content, str), validate=True)


def _checked(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise ValueError(f"a {type(value).__name__} instead of a {kind.__name__}")
    return value


def _below(value: Any, bound: int) -> int:
    if not 0 <= _checked(value, int) < bound:
        raise ValueError(f"{value} is not in [0, {bound})")
    return int(value)


def _numpy(dtype: Any, data: bytes | bytearray) -> np.ndarray[Any, Any]:
    """Return a flat array. Its memory holds only what NumPy itself would have written there."""
    if not _DTYPE.fullmatch(_checked(dtype, str)):
        raise ValueError(f"no plain dtype: {dtype[:50]}")
    array = np.frombuffer(data, np.dtype(dtype))
    if array.dtype.kind == "U" and np.any(array.view(f"{dtype[0]}u4") > sys.maxunicode):
        raise ValueError("text that is no Unicode")
    if array.dtype.kind == "b" and np.any(array.view("u1") > 1):
        raise ValueError("booleans that are neither true nor false")
    return array


def _seed_sequence(entropy: Any, spawn_key: Any, pool_size: Any, spawned: Any) -> np.random.SeedSequence:
    return np.random.SeedSequence(
        entropy,
        spawn_key=_checked(spawn_key, tuple),
        pool_size=_below(pool_size, 65),
        n_children_spawned=_below(spawned, 2**63),
    )


def _check_bits(name: str, pattern: Any, given: Any) -> None:
    """Raise ValueError unless the state of a bit generator has the form of another one's."""
    _checked(given, type(pattern))
    if isinstance(pattern, dict):
        if pattern.keys() != given.keys():
            raise ValueError("not the state of this bit generator")
        for key, value in pattern.items():
            _check_bits(key, value, given[key])
    elif isinstance(pattern, np.ndarray):
        if (pattern.dtype, pattern.shape) != (given.dtype, given.shape):
            raise ValueError("not the state of this bit generator")
    elif isinstance(pattern, int):
        _below(given, _BELOW[name])
    elif pattern != given:
        raise ValueError("not the state of this bit generator")
