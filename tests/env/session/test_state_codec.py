"""The codec for session state. Values round trip, and hostile bytes run no code."""

import base64
import json
import math
import pickle
import random
import subprocess
import sys
import threading
from collections import Counter, OrderedDict, defaultdict, deque
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from enum import Enum, Flag
from fractions import Fraction
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import NamedTuple
from uuid import UUID
from zoneinfo import ZoneInfo

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from pydantic import BaseModel

from agentrl_env import Message, ToolCall
from agentrl_env.errors import StateError
from agentrl_env.session import state_codec
from agentrl_env.session.state_codec import MAX_BYTES, MAX_DEPTH, decode, encode
from agentrl_env.types import TaskSample
from tests.env.tasks import Quick


@dataclass
class Spot:
    at: int = 0
    seen: list = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Frozen:
    name: str

    def __post_init__(self):
        if self.name == "never":
            raise ZeroDivisionError("__post_init__ ran")


@dataclass
class Listed(list):
    at: int = 0


class Board(BaseModel):
    cells: list = []
    turn: int = 0


class Colour(Enum):
    RED = 1


class Move(NamedTuple):
    row: int
    note: object = None


class Bits(Flag):
    ONE = 1
    TWO = 2


class Plain:
    pass


class Task(Quick):
    """A task of this module."""


BIT_GENERATORS = (np.random.PCG64, np.random.PCG64DXSM, np.random.MT19937, np.random.Philox, np.random.SFC64)
DTYPES = st.one_of(
    npst.boolean_dtypes(),
    npst.integer_dtypes(endianness="?"),
    npst.floating_dtypes(sizes=(16, 32, 64), endianness="?"),
    npst.complex_number_dtypes(sizes=(64, 128), endianness="?"),
    npst.unicode_string_dtypes(min_len=1, max_len=4, endianness="?"),
    npst.byte_string_dtypes(min_len=1, max_len=4),
    npst.datetime64_dtypes(endianness="?"),
    npst.timedelta64_dtypes(endianness="?"),
)
ARRAYS = DTYPES.flatmap(
    lambda dtype: npst.arrays(dtype, npst.array_shapes(min_dims=0, max_dims=3, min_side=0))
)
SCALARS = DTYPES.flatmap(lambda dtype: npst.arrays(dtype, 1)).map(lambda array: array[0])
ZONES = [ZoneInfo("Europe/Berlin"), timezone(timedelta(hours=-3, minutes=30), "here")]
TEXT = st.text(st.characters(codec=None, categories=None))
HASHABLE = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(min_value=2**64).map(lambda n: -(n**9))
    | st.floats(allow_nan=False)
    | TEXT
    | st.binary()
    | st.builds(Frozen, TEXT)
    | st.just(Colour.RED)
    | st.datetimes(timezones=st.none() | st.just(UTC) | st.sampled_from(ZONES))
    | st.dates()
    | st.times()
    | st.timedeltas()
    | st.decimals(allow_nan=False)
    | st.fractions()
    | st.uuids()
    | st.sampled_from([Path("a/b"), PurePosixPath("/a"), PureWindowsPath("C:/a")]),
    lambda inner: st.lists(inner, max_size=3).map(tuple) | st.frozensets(inner, max_size=3),
    max_leaves=5,
)
LEAVES = st.one_of(
    HASHABLE,
    st.floats(),
    ARRAYS,
    SCALARS,
    st.integers(min_value=0).map(random.Random),
    st.builds(
        lambda kind, seed: np.random.Generator(kind(seed)),
        st.sampled_from(BIT_GENERATORS),
        st.integers(0, 2**200),
    ),
    TEXT.map(Message.assistant),
)
STATES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.sets(HASHABLE, max_size=4),
        st.dictionaries(HASHABLE, inner, max_size=4),
        st.builds(deque, st.lists(inner, max_size=3), st.none() | st.integers(0, 4)),
        st.dictionaries(HASHABLE, inner, max_size=4).map(OrderedDict),
        st.builds(Spot, st.integers(), st.lists(inner, max_size=2)),
        st.builds(Move, st.integers(), inner),
        st.builds(Board, cells=st.lists(inner, max_size=2)),
    ),
    max_leaves=8,
)


def facts(value):
    """Convert a value so that equality means the same types, bits and order."""
    kind = type(value)
    if kind in (list, tuple, deque, Move):
        return kind, [facts(item) for item in value], getattr(value, "maxlen", None)
    if kind in (set, frozenset):
        return kind, sorted(repr(facts(item)) for item in value)
    if kind in (dict, OrderedDict, defaultdict):
        return kind, [(facts(key), facts(item)) for key, item in value.items()]
    if kind in (float, complex, Decimal, datetime, time):
        return kind, repr(value)
    if isinstance(value, np.ndarray | np.generic):
        return kind, value.dtype, value.shape, value.tobytes()
    if kind is np.random.Generator:
        bits, seeds = value.bit_generator, value.bit_generator.seed_seq
        seeds = (seeds.entropy, seeds.spawn_key, seeds.n_children_spawned)
        return type(bits), facts(bits.state), facts(seeds)
    if kind is random.Random:
        return kind, value.getstate()
    if kind is Spot:
        return kind, value.at, facts(value.seen)
    if kind is Board:
        return kind, facts(value.cells), value.turn, value.model_fields_set
    return kind, value


@settings(max_examples=150, deadline=None)
@given(STATES)
def test_decode_inverts_encode(state):
    data = encode(state, Task)
    assert data.isascii()
    assert facts(decode(data, Task)) == facts(state)


@pytest.mark.parametrize("kind", BIT_GENERATORS)
def test_generator_continues(kind):
    rng = np.random.Generator(kind([7, 2**70]))
    rng.integers(10, dtype=np.uint32), rng.spawn(2), rng.normal(size=3)
    copy = decode(encode(rng))
    draw = [[r.integers(2**60), r.integers(9, dtype=np.uint32), r.normal()] for r in (rng, copy)]
    assert draw[0] == draw[1]
    children = [r.spawn(1)[0].integers(2**60) for r in (rng, copy)]
    assert children[0] == children[1]


def test_unchanged_seed_sequence_is_decoded():
    rng = decode(seeds_with(entropy=7, n_children_spawned=3))
    assert rng.bit_generator.seed_seq.state == np.random.SeedSequence(7, n_children_spawned=3).state


def test_generator_without_a_seed_sequence_continues():
    rng = np.random.Generator(np.random.Philox(key=3))
    assert decode(encode(rng)).integers(2**60) == rng.integers(2**60)


def test_random_continues_after_gauss():
    rng = random.Random(5)
    rng.gauss()
    copy = decode(encode(rng))
    assert [copy.gauss(), copy.random()] == [rng.gauss(), rng.random()]


def test_array_is_decoded_in_order_and_writable():
    array = np.asfortranarray(np.arange(6).reshape(2, 3))[:, ::-1]
    copy = decode(encode(array))
    assert np.array_equal(copy, array)
    copy += 1  # it is writable


def test_wire_models_are_supported():
    sample = TaskSample(task="x", data={"a": [1, None]})
    message = Message.assistant("hi", ToolCall.of("note", text="x"))
    assert decode(encode([sample, message])) == [sample, message]


@pytest.mark.parametrize(
    "state",
    [
        datetime(2024, 10, 27, 2, 30, fold=1, tzinfo=ZoneInfo("Europe/Berlin")),
        datetime(2024, 2, 29, 12, 0, 0, 7, tzinfo=UTC),
        time(9, 30, tzinfo=timezone(timedelta(hours=2))),
        [date(2024, 2, 29), timedelta(days=-1, microseconds=5), Decimal("1.10"), Decimal("-Infinity")],
        [UUID(int=7), Path("notes.txt"), PureWindowsPath("C:\\a"), Fraction(1, 3), 1 - 2j, range(9, 0, -2)],
        [Counter("aab"), OrderedDict(b=1, a=2), Move(1, Path("x"))],
    ],
)
def test_values_of_the_standard_library_are_supported(state):
    assert facts(decode(encode(state, Task), Task)) == facts(state)


def test_decoded_defaultdict_keeps_its_factory():
    copy = decode(encode(defaultdict(list, a=[1])))
    copy["b"].append(2)
    assert copy == {"a": [1], "b": [2]}


def test_zone_is_looked_up_by_a_plain_name():
    with pytest.raises(StateError, match="not the name of a time zone"):
        decode(tagged("zone", "../../etc/passwd"))


def test_decoding_runs_no_code_of_a_dataclass():
    data = encode(Frozen("later"), Task).replace(b"later", b"never")
    assert decode(data, Task).name == "never"


def holding_itself():
    state = []
    state.append({"again": state})
    return state


def nested(depth):
    state = None
    for _ in range(depth):
        state = [state]
    return state


def doubled():
    state = []
    for _ in range(60):
        state = [state, state]
    return state


class Local:
    @dataclass
    class Inner:
        at: int = 0


def spot_with_more():
    spot = Spot()
    spot.more = 1
    return spot


@pytest.mark.parametrize(
    ("state", "words"),
    [
        (lambda: {"walk": [1, (lambda: 1)]}, r"holds a function at state\['walk'\]\[1\]; it may hold None"),
        (threading.Lock, "holds a _thread.lock at state; it may hold"),
        (lambda: Plain(), r"holds a tests\.env\.session\.test_state_codec\.Plain at state"),
        (lambda: Plain, "holds a type at state"),
        (
            lambda: {"seen": defaultdict(lambda: 1)},
            r"holds a collections.defaultdict of <lambda> at state\['seen'\]",
        ),
        (lambda: defaultdict(list, at=[Plain()]), r"Plain at state\['at'\]\[0\]"),
        (lambda: Move(1, Plain()), r"Plain at state\['note'\]"),
        (lambda: Fraction(2**70000, 3), "holds a fraction of more than 65536 bits at state"),
        (lambda: Listed(), "Listed at state"),
        (lambda: Local.Inner(), "Inner at state"),
        (spot_with_more, "holds a Spot with 'more', which is not one of its fields, at state; it may hold"),
        (lambda: Bits.ONE | Bits.TWO, "Bits at state"),
        (lambda: np.array([object()]), "holds NumPy's object at state"),
        (
            lambda: np.zeros(2, "i4,i4"),
            r"holds NumPy's \[.*\] at state; it may hold .* arrays and scalars of booleans",
        ),
        (lambda: np.random.RandomState(1), "RandomState at state"),
        (holding_itself, r"contains itself, at state\[0\]\['again'\]"),
        (lambda: nested(MAX_DEPTH + 1), "deeper than 100 values"),
        (doubled, "holds more than 1000 values"),
    ],
)
def test_unsupported_value_is_named_with_its_path(state, words, monkeypatch):
    monkeypatch.setattr(state_codec, "MAX_VALUES", 1000)
    with pytest.raises(StateError, match=rf"^snapshot\(\) of task 'task' .*{words}"):
        encode(state(), Task)


def test_state_of_maximum_depth_is_decoded():
    state = nested(MAX_DEPTH)
    assert decode(encode(state)) == state


def test_classes_of_another_package_are_rejected():
    data = encode(Spot(), Task)
    for bytes_ in (data, data.replace(b"test_state_codec:Spot", b"subprocess:Popen")):
        with pytest.raises(StateError, match="has no"):
            decode(bytes_)


def tagged(tag, content):
    return json.dumps({tag: content}).encode()


def bits_with(kind, **changes):
    """Return an encoded generator with other values in the state of its bit generator."""
    encoded = json.loads(encode(np.random.Generator(kind(1))))
    for name, value in changes.items():
        (state,) = (values for values in lists_of(encoded["generator"][1]) if name in values)
        state[state.index(name) + 1] = value
    return json.dumps(encoded).encode()


def lists_of(node):
    if isinstance(node, list):
        yield node
    for item in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
        yield from lists_of(item)


def generator(name, state, **seeds):
    """Return an encoded generator with any bit generator, state and seed sequence state."""
    seeds = {"entropy": 1, "spawn_key": {"tuple": []}, "pool_size": 4, "n_children_spawned": 0, **seeds}
    return tagged("generator", [name, state, {"dict": [part for pair in seeds.items() for part in pair]}])


def seeds_with(**changes):
    name, state, _ = json.loads(encode(np.random.default_rng(1)))["generator"]
    return generator(name, state, **changes)


def b64(data):
    return base64.b64encode(data).decode()


class Evil:
    def __reduce__(self):
        return (print, ("executed",))


SYSTEM = {"object": ["os:system", None, "command", "true"]}
HOSTILE = [
    b"",
    b"\x80\x04",
    b"{",
    b"nul",
    b'"\xc3\xa9"',
    b"[" * 100_000,
    b"9" * 5000,
    b"0" * (MAX_BYTES + 1),
    b"[" * (MAX_DEPTH + 2) + b"]" * (MAX_DEPTH + 2),
    b"{}",
    b'{"int":"1","str":""}',
    pickle.dumps(Evil()),
    json.dumps(SYSTEM).encode(),
    tagged("import", "os"),
    tagged("__reduce__", ["os.system", ["true"]]),
    tagged("py/object", "os.system"),
    tagged("object", ["builtins:type", None]),
    tagged("object", [":Task", None]),
    tagged("object", ["test_state_codec:Task", None]),
    tagged("object", ["test_state_codec:subprocess", None]),
    tagged("object", ["test_state_codec:Plain", None]),
    tagged("object", ["test_state_codec:Colour", None, "_value_", 1]),
    tagged("object", ["test_state_codec:Quick", None]),
    tagged("object", ["test_state_codec.Spot:__init__", None]),
    tagged("object", ["agentrl_env.types:BaseModel", []]),
    tagged("object", ["agentrl_env.types:Message", None, "role", "user"]),
    tagged("object", ["test_state_codec:Spot", None, "__class__", 1]),
    tagged("object", ["test_state_codec:Spot", None, "extra", 1]),
    tagged("object", ["no_such_module:Spot", None]),
    tagged("enum", ["test_state_codec:Colour", "__class__"]),
    tagged("enum", ["test_state_codec:Spot", "at"]),
    tagged("int", "one"),
    tagged("int", 1),
    tagged("float", "1.0"),
    tagged("float", ["nan"]),
    tagged("str", "!"),
    tagged("str", [2**21]),
    tagged("bytes", None),
    tagged("tuple", "ab"),
    tagged("set", [[]]),
    tagged("dict", [[], 1]),
    tagged("dict", [1, 2, 3]),
    tagged("dict", {"a": 1}),
    tagged("deque", [-1]),
    tagged("deque", [1.5]),
    tagged("deque", []),
    tagged("array", ["|O", [1], b64(bytes(8))]),
    tagged("array", ["O", [1], b64(bytes(8))]),
    tagged("array", ["i4,O", [1], b64(bytes(12))]),
    tagged("array", ["<i8", [-1], b64(bytes(8))]),
    tagged("array", ["<i8", [2**40], b64(bytes(8))]),
    tagged("array", ["<i8", [1.0], b64(bytes(8))]),
    tagged("array", ["<i8", [1], b64(bytes(7))]),
    tagged("array", ["<U0", [1], ""]),
    tagged("array", ["<U1", [1], b64(b"\xff" * 4)]),
    tagged("array", ["|b1", [1], b64(b"\x02")]),
    tagged("array", ["<M8[zz]", [1], b64(bytes(8))]),
    tagged("scalar", {"array": ["<i8", [2], b64(bytes(16))]}),
    tagged("scalar", 1),
    tagged("numpy.str", 1),
    tagged("numpy.bytes", "!"),
    tagged("random", {"tuple": [3, {"tuple": [0] * 625}, "gauss"]}),
    tagged("random", {"tuple": [3, {"tuple": [0] * 624 + [10**6]}, None]}),
    tagged("random", {"tuple": [3, {"tuple": [0] * 5}, None]}),
    generator("RandomState", {"dict": []}),
    generator("__class__", {"dict": []}),
    generator("PCG64", None),
    generator("PCG64", {"dict": []}),
    tagged("generator", [*json.loads(encode(np.random.default_rng(1)))["generator"][:2], None]),
    bits_with(np.random.MT19937, pos=10**6),
    bits_with(np.random.MT19937, pos=-1),
    bits_with(np.random.MT19937, key=[1]),
    bits_with(np.random.MT19937, key={"array": ["<u4", [2], b64(bytes(8))]}),
    bits_with(np.random.Philox, buffer_pos=-5),
    bits_with(np.random.Philox, buffer_pos=5),
    bits_with(np.random.PCG64, has_uint32=2),
    bits_with(np.random.PCG64, uinteger=2**32),
    bits_with(np.random.PCG64, inc={"int": hex(2**128)}),
    bits_with(np.random.PCG64, bit_generator="MT19937"),
    seeds_with(pool_size=2**40),
    seeds_with(pool_size=-1),
    seeds_with(n_children_spawned=-1),
    seeds_with(spawn_key=[]),
    seeds_with(extra=1),
    tagged("zone", "/etc/passwd"),
    tagged("zone", None),
    tagged("defaultdict", [None, "eval"]),
    tagged("datetime", ["2024-01-01", 0, "os"]),
    tagged("Fraction", [1, 0]),
    tagged("Fraction", [1, {"int": hex(2**70000)}]),
    tagged("object", ["test_state_codec:Move", None, "row", 1]),
]


@pytest.mark.parametrize("data", HOSTILE, ids=range(len(HOSTILE)))
def test_malformed_bytes_raise_state_error(data):
    with pytest.raises(StateError):
        decode(data, Task)


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from(["<i8", "|b1", "<U1", "PCG64", "test_state_codec:Spot", "test_state_codec:Colour"]),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(sorted([*state_codec._ROWS, "enum", "object"])), inner, min_size=1, max_size=1
        )
    ),
    max_leaves=12,
)


@settings(max_examples=150, deadline=None)
@given(st.binary() | JSON.map(lambda node: json.dumps(node).encode()))
def test_arbitrary_bytes_decode_or_raise_state_error(data):
    try:
        state = decode(data, Task)
    except StateError:
        return
    assert facts(decode(encode(state, Task), Task)) == facts(state)


AUDIT = """
import pickle, sys
import tests.env.session.test_state_codec as tests
from agentrl_env.errors import StateError

events = []
def hook(event, arguments):
    if watching and not event.startswith(("object.__", "sys._getframe")):
        events.append((event, arguments))

watching = False
sys.addaudithook(hook)
for data in tests.HOSTILE:
    tests.decode(b"null", tests.Task)
    watching = True
    try:
        tests.decode(data, tests.Task)
    except StateError:
        pass
    watching = False
assert not events, events[:5]
watching = True
eval("1")
assert events
"""


def test_hostile_bytes_import_no_module_and_run_no_code():
    """Audit events reveal imports, compiled code, processes, files and sockets."""
    done = subprocess.run([sys.executable, "-c", AUDIT], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


def test_non_finite_numbers_are_valid_json():
    data = encode([math.nan, math.inf, -math.inf, -0.0])
    json.loads(data, parse_constant=pytest.fail)
    assert facts(decode(data)) == facts([math.nan, math.inf, -math.inf, -0.0])
