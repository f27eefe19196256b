"""Mistakes of authors that only a session reveals, and their error messages.

Each class body runs through ``check``. The error must name the line that ends with ``# here``.
"""

from __future__ import annotations

import json

import pytest

from agentrl_env import EnvClient
from agentrl_env.errors import EnvironmentFailed
from agentrl_env.hosting.loader import load_target
from agentrl_env.testing import run_checks
from agentrl_env.testing.checks import fork, oracle, random_play, samples
from tests.env.test_author_mistakes import check_sentence, task, write_task

SAMPLES = {
    "no return": (
        "@classmethod  # here\ndef samples(cls, split):\n    [{}]\n",
        "samples('train') of task 'guess' is a NoneType, which has no index: return a list",
    ),
    "generator": (
        "@classmethod  # here\ndef samples(cls, split):\n    yield {}\n",
        "samples('train') of task 'guess' is a generator, which has no index: return a list",
    ),
    "text": (
        "@classmethod  # here\ndef samples(cls, split):\n    return ['apple']\n",
        "samples('train')[0] of task 'guess' is a str; it must be a dict",
    ),
    "splits in one dict": (
        "@classmethod  # here\ndef samples(cls, split):\n    return {'train': [{}], 'test': [{}]}\n",
        "samples('train') of task 'guess' is a dict of all splits; return the samples of one: ...[split]",
    ),
    "numbers as names": (
        "@classmethod  # here\ndef samples(cls, split):\n    return {7: {'word': 'apple'}}\n",
        "samples('train') of task 'guess' is a dict with the key 7, but names of samples are text and "
        "numbers are positions: return a list, or {str(id): sample for id, sample in ...}",
    ),
    "a set": (
        "@classmethod  # here\ndef samples(cls, split):\n    return [{'words': [{'apple'}]}]\n",
        "samples('train')[0] of task 'guess' cannot be sent as JSON: it holds a set at ['words'][0]",
    ),
    "not a number": (
        "@classmethod  # here\ndef samples(cls, split):\n    return [{'x': float('nan')}]\n",
        "samples('train')[0] of task 'guess' cannot be sent as JSON: it holds nan at ['x']",
    ),
    "an object": (
        "@classmethod  # here\ndef samples(cls, split):\n    return [{'x': {'y': object()}}]\n",
        "cannot be sent as JSON: it holds a object at ['x']['y']",
    ),
    "a NumPy number": (
        "from numpy import int64\n@classmethod  # here\ndef samples(cls, split):\n"
        "    return [{'n': cls.int64(3)}]\n",
        "cannot be sent as JSON: it holds a int64 at ['n']",
    ),
    "missing file": (
        "@classmethod\ndef samples(cls, split):\n    return open('words.txt').readlines()  # here\n",
        "FileNotFoundError: [Errno 2] No such file or directory: 'words.txt'",
    ),
    "missing split": (
        "@classmethod\ndef samples(cls, split):\n    return {'train': [{}]}[split]  # here\n",
        "samples('test') of task 'guess' failed: KeyError: 'test'",
    ),
    "an error at an index": (
        "@classmethod\ndef samples(cls, split):\n"
        "    class Rows(list):\n        def __getitem__(self, n):\n            return {}['n']  # here\n"
        "    return Rows([1])\n",
        "samples('train')[0] of task 'guess' raised KeyError: 'n'",
    ),
}

RESET = {
    "no return": (
        "def reset(self, sample, rng):  # here\n    'Guess.'\n",
        "reset() returned NoneType; return a str, a Message or a list of them",
    ),
    "a dict": (
        "def reset(self, sample, rng):  # here\n    return {'role': 'user', 'content': 'Guess.'}\n",
        "reset() returned dict; return a str, a Message or a list of them; write Message(role=..., "
        "content=...) instead of a dict",
    ),
    "a list of dicts": (
        "def reset(self, sample, rng):  # here\n    return [{'role': 'user', 'content': 'Guess.'}]\n",
        "a list of them; write Message(role=..., content=...) instead of a dict",
    ),
    "a list of texts": (
        "def reset(self, sample, rng):  # here\n    return ['Guess', 'a word.']\n",
        "a list of them; write Message(role=..., content=...) instead of a str",
    ),
    "a NumPy number in JSON": (
        "def reset(self, sample, rng):\n    import json\n    return json.dumps(rng.integers(9))  # here\n",
        "is not JSON serializable; make a number of NumPy plain, as in int(...) or float(...)",
    ),
    "observation and info": (
        "def reset(self, sample, rng):  # here\n    return 'Guess.', {}\n",
        "reset() returned tuple; return a str, a Message or a list of them",
    ),
    "a missing field": (
        "def reset(self, sample, rng):\n    return sample.data['word']  # here\n",
        "reset of task 'guess' failed: KeyError: 'word'",
    ),
    "a dict instead of the sample": (
        "def reset(self, sample, rng):\n    return sample['word']  # here\n",
        "TypeError: 'TaskSample' object is not subscriptable; the data from samples() is in sample.data",
    ),
    "a field of the sample": (
        "def reset(self, sample, rng):\n    return sample.word  # here\n",
        "'TaskSample' object has no attribute 'word'; the data from samples() is in sample.data",
    ),
    "the module instead of the generator": (
        "def reset(self, sample, rng):\n    return rng.randint(3)  # here\n",
        "AttributeError: 'numpy.random._generator.Generator' object has no attribute 'randint'",
    ),
    "a hang": (
        "reset_timeout = 0.05\ndef reset(self, sample, rng):  # here\n    import time\n    time.sleep(0.5)\n",
        "AuthorTimeout: still running after 0.05 s",
    ),
    "a limit of one session": (
        "def reset(self, sample, rng):  # here\n    self.max_turns = 2\n    return 'Guess.'\n",
        "self.max_turns is set, but sessions share the settings of their class: write max_turns = ... in "
        "Guess; end a session earlier with Done(..., truncated=True)",
    ),
    "a timeout in the constructor": (
        "def __init__(self):\n    self.tool_timeout = 9\n"
        "def reset(self, sample, rng):  # here\n    return ''\n",
        "self.tool_timeout is set, but sessions share the settings of their class: "
        "write tool_timeout = ... in Guess (",
    ),
    "an error in the constructor": (
        "def __init__(self):\n    self.n = 1 / 0  # here\n",
        "reset of task 'guess' failed: ZeroDivisionError",
    ),
    "an error in startup": (
        "@classmethod\ndef startup(cls):\n    raise OSError('no database')  # here\n",
        "startup of task 'guess' failed: OSError: no database",
    ),
}

TOOLS = {
    "a raised end": (
        "@tool\ndef guess(self):\n    raise Done('Right.', reward=1.0)  # here\n",
        "TypeError: exceptions must derive from BaseException; return what ends the episode",
    ),
    "no return": (
        "@tool  # here\ndef guess(self):\n    'no'\n",
        "guess() returned NoneType; return a str, a Message or a list of them",
    ),
    "a number": (
        "@tool  # here\ndef guess(self):\n    return 7\n",
        "guess() returned int; return a str, a Message or a list of them",
    ),
    "a Gymnasium step": (
        "@tool  # here\ndef guess(self):\n    return 'no', 0.0, False, False, {}\n",
        "guess() returned tuple; return a str, a Message or a list of them",
    ),
    "text and a reward": (
        "@tool  # here\ndef guess(self):\n    return 'no', 1.0\n",
        "guess() returned tuple; return a str, a Message or a list of them; with a reward, return "
        "Reply(content, reward=...), or Done(content, reward=...) at the end",
    ),
    "data": (
        "@tool  # here\ndef guess(self):\n    return {'answer': 'no'}\n",
        "returned dict; return a str, a Message or a list of them, such as json.dumps(...) of the dict",
    ),
    "a coroutine without await": (
        "@tool  # here\nasync def guess(self):\n    return self.look()\nasync def look(self): ...\n",
        "guess() returned a coroutine; await it",
    ),
    "a KeyError": ("@tool\ndef guess(self):\n    return {}['missing']  # here\n", "KeyError: 'missing'"),
    "state that reset did not set": (
        "@tool\ndef guess(self):\n    return self.word  # here\n",
        "AttributeError: 'Guess' object has no attribute 'word'",
    ),
    "an error in a library": (
        "@tool\ndef guess(self):\n    import json\n    return json.loads('{')  # here\n",
        "JSONDecodeError: Expecting property name",
    ),
    "an exit": (
        "@tool\ndef guess(self):\n    raise SystemExit(3)  # here\n",
        "SystemExit: 3",
    ),
    "a reward without its name": (
        "@tool\ndef guess(self):\n    return Done('yes', 1.0)  # here\n",
        "TypeError: Done.__init__() takes 2 positional arguments but 3 were given",
    ),
    "a limit that a tool sets": (
        "max_turns = 1\n@tool  # here\ndef guess(self):\n    self.max_seconds = 1\n    return 'no'\n",
        "self.max_seconds is set, but sessions share the settings of their class",
    ),
    "a reward that is text": (
        "@tool  # here\ndef guess(self):\n    return Reply('yes', reward='1')\n",
        "reward must be a finite number, got '1'",
    ),
    "a reward that is no number": (
        "@tool  # here\ndef guess(self):\n    return Reply('yes', reward=float('nan'))\n",
        "reward must be a finite number, got nan",
    ),
    "a reward that is a Fraction": (
        "from fractions import Fraction\n"
        "@tool  # here\ndef guess(self):\n    return Reply('yes', reward=self.Fraction(1, 2))\n",
        "reward must be a finite number, got Fraction(1, 2); write float(...)",
    ),
    "a metric that is text": (
        "@tool  # here\ndef guess(self):\n    return Reply('yes', metrics={'speed': 'high'})\n",
        "metric speed must be a finite number, got 'high'",
    ),
    "a connection of another thread": (
        "@classmethod\ndef startup(cls):\n    import sqlite3\n    cls.db = sqlite3.connect(':memory:')\n"
        "@tool\nasync def guess(self):\n    return str(self.db.execute('select 1'))  # here\n",
        "plain methods run on several threads: connect with check_same_thread=False, and hold a lock where "
        "sessions share the connection",
    ),
    "a task in a plain method": (
        "@tool\ndef guess(self):\n    import asyncio\n    return asyncio.get_running_loop().time()  # here\n",
        "no running event loop; a plain method runs on a thread: make it async def",
    ),
    "a loop in an async method": (
        "async def look(self): return ''\n"
        "@tool\nasync def guess(self):\n    import asyncio\n    look = self.look()\n    try:\n"
        "        return asyncio.run(look)  # here\n    finally:\n        look.close()\n",
        "asyncio.run() cannot be called from a running event loop; await the coroutine instead",
    ),
    "a hang": (
        "@tool(timeout=0.05)  # here\ndef guess(self):\n    import time\n    time.sleep(0.5)\n",
        "AuthorTimeout: guess(): still running after 0.05 s",
    ),
    "an await too many": (
        "def look(self): return ''\n@tool\nasync def guess(self):\n    return await self.look()  # here\n",
        "can't be used in 'await' expression; await only the results of async methods",
    ),
    "an error in a task group": (
        "async def look(self):\n    return {}['missing']  # here\n"
        "@tool\nasync def guess(self):\n    import asyncio\n"
        "    async with asyncio.TaskGroup() as group:\n        group.create_task(self.look())\n",
        "KeyError: 'missing'",
    ),
    "respond without return": (
        "def respond(self, text):  # here\n    'no'\n",
        "respond() returned NoneType; return a str, a Message or a list of them",
    ),
    "a score that is a number": (
        "max_turns = 1\ndef score(self):  # here\n    return 1.0\n",
        "score() returned float; return a dict",
    ),
    "a score with text": (
        "max_turns = 1\ndef score(self):  # here\n    return {'success': 'yes'}\n",
        "metric success must be a finite number, got 'yes'",
    ),
    "an error in score": (
        "max_turns = 1\ndef score(self):\n    return {'n': self.n}  # here\n",
        "AttributeError: 'Guess' object has no attribute 'n'",
    ),
}

SESSION_TOOLS = {
    "an error": (
        "def session_tools(self):\n    return {}['missing']  # here\n",
        "session_tools of task 'guess' failed: KeyError: 'missing'",
    ),
    "no return": (
        "def session_tools(self):  # here\n    self.tool_specs()\n",
        "session_tools() must return a list of ToolSpec, as self.tool_specs() does",
    ),
    "dicts": (
        "def session_tools(self):  # here\n    return [tool.model_dump() for tool in self.tool_specs()]\n",
        "session_tools() must return a list of ToolSpec, as self.tool_specs() does",
    ),
    "a tool twice": (
        "def session_tools(self):  # here\n    return 2 * self.tool_specs()\n",
        "session_tools() returned two tools with one name: guess, guess",
    ),
    "an unknown tool": (
        "def session_tools(self):  # here\n    from agentrl_env import ToolSpec\n"
        "    return [ToolSpec.model_validate({'function': {'name': 'look'}})]\n",
        "session_tools() returned 'look', which is not a tool of the task: guess",
    ),
    "a set in a schema": (
        "def session_tools(self):  # here\n    from agentrl_env import ToolSpec\n"
        "    function = {'name': 'guess', 'parameters': {'enum': {1, object()}}}\n"
        "    return [ToolSpec.model_validate({'function': function})]\n",
        "session_tools() returned a tool that cannot be sent as JSON",
    ),
    "a hang": (
        "reset_timeout = 0.05\ndef session_tools(self):  # here\n    import time\n    time.sleep(0.5)\n",
        "session_tools of task 'guess' failed: AuthorTimeout: still running after 0.05 s",
    ),
}

EXPERT_AND_STATE = {
    "an expert that returns a dict": (
        "def expert(self, rng):  # here\n    return {'n': 3}\n",
        "expert() returned dict; return a ToolCall, a str or an assistant Message",
    ),
    "an expert that fails": (
        "def expert(self, rng):\n    return ToolCall.of('guess', n=self.n)  # here\n",
        "expert of task 'guess' failed: AttributeError: 'Guess' object has no attribute 'n'",
    ),
    "a lock in the state": (
        "import threading\n"
        "def reset(self, sample, rng):\n    self.lock = self.threading.Lock()\n    return 'Guess.'\n"
        "def snapshot(self):  # here\n    return vars(self)\ndef restore(self, state): ...\n",
        "TypeError: cannot pickle '_thread.lock' object: the state holds 'lock', a lock, which cannot be "
        "copied; leave it out, and create it again in restore()",
    ),
    "an error in snapshot": (
        "def snapshot(self):\n    return self.n  # here\ndef restore(self, state): ...\n",
        "snapshot of task 'guess' failed: AttributeError: 'Guess' object has no attribute 'n'",
    ),
    "an error in restore": (
        "def snapshot(self):\n    return 3\ndef restore(self, state):\n    self.n = state['n']  # here\n",
        "restore of task 'guess' failed: TypeError: 'int' object is not subscriptable",
    ),
}
CASES = {
    f"{subject}: {name}": case
    for subject, cases in {
        "samples": SAMPLES,
        "reset": RESET,
        "tools": TOOLS,
        "session tools": SESSION_TOOLS,
        "expert and state": EXPERT_AND_STATE,
    }.items()
    for name, case in cases.items()
}


def told_by_check(target: str) -> list[str]:
    """Return the error that ends ``check``, or the evidence of its failures."""
    checks = (samples, random_play, fork, oracle)
    try:
        (report,) = run_checks(load_target(target).local, deadline=120.0, checks=checks)
    except EnvironmentFailed as error:
        return [str(error)]
    return [failure.evidence for failure in report.failures]


@pytest.mark.parametrize(("body", "sentence"), CASES.values(), ids=CASES)
def test_check_names_the_mistake_and_its_line(body, sentence, tmp_path):
    source = task(body)
    if "def respond" in body:  # a random player calls tools if the task has any
        source = task(body, tools="")
    told = told_by_check(write_task(tmp_path, source))
    found = [text for text in told if sentence in text]
    assert found, told
    check_sentence(found[0], sentence, source)


def test_error_in_a_neighbour_names_the_neighbour(tmp_path):
    source = "from .helpers import look\n" + task("@tool\ndef guess(self):\n    return look({})\n")
    target = write_task(tmp_path, source, helpers="def look(words):\n    return words['apple']\n")
    with EnvClient.local_sync(target) as client, client.open("guess") as session:
        result = session.step({"role": "assistant", "content": None, "tool_calls": [CALL]})
    assert result.info["error"]["message"].startswith("KeyError: 'apple' (")
    assert result.info["error"]["message"].endswith("guess/helpers.py:2, in look)")


def test_error_of_a_spawned_process_that_cannot_import_the_folder_has_the_remedy(tmp_path):
    source = "import multiprocessing\nfrom concurrent.futures import ProcessPoolExecutor\n"
    source += "from .helpers import look\n" + task(
        "@tool\ndef guess(self):\n"
        "    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context('spawn')) as pool:\n"
        "        return str(pool.submit(look).result())\n"
    )
    target = write_task(tmp_path, source, helpers="def look():\n    return 3\n")
    with EnvClient.local_sync(target) as client, client.open("guess") as session:
        result = session.step({"role": "assistant", "content": None, "tool_calls": [CALL]})
    assert "name the task as module:Class, or fork" in result.info["error"]["message"]


CALL = {"id": "a", "type": "function", "function": {"name": "guess", "arguments": json.dumps({})}}
