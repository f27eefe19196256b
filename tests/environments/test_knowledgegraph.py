"""The knowledge graph: questions, tools on both stores, and attacks by a policy."""

import json
import re
import sys
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs

import numpy as np
import pytest

from agentrl_env import EnvClient, Message, TaskSample, ToolCall, ToolError
from agentrl_env.hosting.loader import load_target
from tests.environments import agentbench
from tests.environments.play import play

pytestmark = pytest.mark.environments

pyoxigraph = pytest.importorskip("pyoxigraph", reason="the extra knowledgegraph is not installed")

KG = load_target(str(Path(__file__).parents[2] / "environments" / "knowledgegraph"))
PACKAGE = KG.__module__.rpartition(".")[0]
sparql, official, world = (sys.modules[f"{PACKAGE}.{name}"] for name in ("sparql", "official", "world"))
LEVELS = ("", "-2", "-3", "-4")


@pytest.fixture
async def client():
    async with EnvClient.local(KG) as client:
        yield client


def question(level=1, index=0, split="test"):
    return world.Questions(split, level)[index]


def opened(data):
    environment = KG()
    environment.reset(TaskSample(task="knowledgegraph", seed=1, data=data), np.random.default_rng(1))
    return environment


def call(environment, action):
    """Run a call in the notation of AgentBench's files."""
    name, _, rest = action.removesuffix(")").partition("(")
    return getattr(environment, name)(*rest.split(","))


@pytest.mark.parametrize("level", LEVELS)
async def test_expert_answers_questions_of_every_level(client, level):
    for split in ("train", "validation", "test"):
        for index in range(12):
            session = await client.open("knowledgegraph", split=split + level, index=index)
            transcript, reward, _ = await play(session)
            assert reward == 1.0, transcript
            assert len(transcript) <= 1 + 2 * KG.max_turns


@pytest.mark.parametrize("level", ["", "-3"])
async def test_noisy_expert_follows_other_relations_and_fails(level):
    noisy = type("Noisy", (KG,), {"name": "knowledgegraph", "expert_noise": 0.5})
    async with EnvClient.local(noisy) as client:
        sessions = [await client.open("knowledgegraph", split="train" + level, index=n) for n in range(16)]
        assert {(await play(session)).reward for session in sessions} == {0.0, 1.0}


@pytest.mark.slow
@pytest.mark.parametrize("level", LEVELS)
async def test_expert_answers_two_hundred_held_out_questions(client, level):
    for index in range(200):
        session = await client.open("knowledgegraph", split="test" + level, index=index)
        assert (await play(session))[1] == 1.0


@pytest.mark.parametrize("level", [1, 2, 3, 4])
def test_splits_have_a_thousand_different_questions_and_share_none(level):
    asked = {
        split: {question(level, i, split)["question"] for i in range(size)}
        for split, size in world.NUM_QUESTIONS.items()
    }
    for split, size in world.NUM_QUESTIONS.items():
        assert len(asked[split]) == size >= 1000
    assert not asked["train"] & (asked["validation"] | asked["test"])
    assert not asked["validation"] & asked["test"]


@pytest.mark.parametrize("split", ["train", "test"])
def test_position_of_the_right_relation_varies_at_level_1(split):
    place, places = world.world(), Counter()
    number = {identifier: i for i, identifier in enumerate(place.ids)}
    for index in range(400):
        data = question(index=index, split=split)
        (anchor,) = (number[identifier] for identifier in data["entities"].values())
        relation = data["actions"][1].rstrip(")").split(",")[1]
        places[sorted(name for name, edges in place.edges.items() if anchor in edges).index(relation)] += 1
    assert places[0] == 0
    assert max(places.values()) < 100


@pytest.mark.parametrize("split", ["train", "test"])
def test_neither_the_last_nor_the_usual_relation_is_often_right_at_level_1(split):
    place, usual, asked = world.world(), Counter(), []
    number = {identifier: i for i, identifier in enumerate(place.ids)}
    for index in range(400):
        data = question(index=index, split=split)
        (anchor,) = (number[identifier] for identifier in data["entities"].values())
        relation = data["actions"][1].rstrip(")").split(",")[1]
        usual[relation] += 1
        asked.append((sorted(name for name, edges in place.edges.items() if anchor in edges), relation))
    order = [relation for relation, _ in usual.most_common()]
    assert sum(relation == listed[-1] for listed, relation in asked) < 80
    assert sum(relation == next(one for one in order if one in listed) for listed, relation in asked) < 80


@pytest.mark.parametrize(
    ("noun", "plural"),
    [
        ("Thief", "Thieves"),
        ("Library", "Libraries"),
        ("Valley", "Valleys"),
        ("Fox", "Foxes"),
        ("Echo", "Echoes"),
        ("Piano", "Pianos"),
    ],
)
def test_names_have_english_plurals(noun, plural):
    assert world._plural(noun) == plural


def test_questions_name_the_university_and_repeat_no_relation():
    """Examples: "the alumni of the University of Cedrum", "the rivers that flow through both A and B"."""
    repeated = 0
    for data in (question(2, index) for index in range(400)):
        text, actions = data["question"], data["actions"]
        bare = r"(?<!\bthe )\b(University of|\w+ (Museum|River|Prize|Medal|Trio|Quartet)\b)"
        assert not re.search(bare, text)
        if "intersection" in actions[-1] and len(actions) == 5:
            same = actions[1].partition(",")[2] == actions[3].partition(",")[2]
            repeated += same
            assert (" both " in text) == same
    assert repeated >= 10


def test_questions_and_the_world_depend_only_on_the_seed():
    again = world.World()
    assert again.names == world.world().names
    assert again.edges == world.world().edges
    assert world.World(seed=7).edges != again.edges
    assert len(again.names) == len(set(again.names)) == len(set(again.ids)) == 50_000


async def test_same_seed_gives_the_same_transcript(client):
    first, second = [
        [
            (await play(await client.open("knowledgegraph", split="test" + level, index=5, seed=3)))[0]
            for level in LEVELS
        ]
        for _ in range(2)
    ]
    assert first == second


async def test_wrong_set_earns_nothing_and_its_f1_is_reported(client):
    index = next(
        i for i in range(1000) if len(question(2, i)["actions"]) == 4 and len(question(2, i)["answer"]) > 1
    )
    session = await client.open("knowledgegraph", split="test-2", index=index)
    for _ in range(2):
        result = await session.step(await session.expert())
    result = await session.step(Message.assistant("Final Answer: #0"))
    assert result.terminated
    assert result.reward == 0.0
    assert result.metrics["f1"] == 0.0


def test_f1_counts_the_shared_answers_and_numbers_compare_as_numbers():
    gold = [{"answer_argument": "m.1"}, {"answer_argument": "m.2"}]
    assert official.grade(["m.1", "m.2"], gold) == (True, 1.0)
    assert official.grade(["m.1", "m.3"], gold) == (False, 0.5)
    assert official.grade([], gold) == (False, 0.0)
    assert official.grade(["3"], [{"answer_argument": "3.0"}]) == (True, 1.0)


def facts(*triples):
    """Return an embedded store. An integer object is the value of an attribute."""

    def term(value):
        return f'"{value}"^^<{sparql.XSD}integer>' if isinstance(value, int) else f"<{sparql.NS}{value}>"

    lines = [f"<{sparql.NS}{one}> <{sparql.NS}{name}> {term(other)} .\n" for one, name, other in triples]
    return sparql.EmbeddedStore(["".join(lines).encode()])


CYCLONES = ("neighbors", ("neighbors", ("entity", "m.0marie"), "storm.category"), "category.storms")
REGION = ("neighbors", ("entity", "m.0region"), "region.storms")
ALL = ("neighbors", ("entity", "common.topic"), "topic.storms")


@pytest.mark.parametrize(
    ("variable", "found"),
    [
        (CYCLONES, ["m.0a", "m.0b"]),
        (("intersection", CYCLONES, REGION), ["m.0a"]),
        (("count", CYCLONES), ["2"]),
        (("count", ("intersection", CYCLONES, REGION)), ["1"]),
        (("argmin", CYCLONES, "storm.wind"), ["m.0a"]),
        (("argmax", CYCLONES, "storm.wind"), []),  # the starting entity has the highest value
        (("neighbors", CYCLONES, "storm.damage"), ["m.0city"]),  # reached only through the starting entity
        (REGION, ["m.0a", "m.0marie"]),
        (ALL, ["common.topic", "m.0a"]),
    ],
)
def test_answer_does_not_contain_the_entities_that_it_starts_from(variable, found):
    store = facts(
        ("m.0marie", "storm.category", "m.0five"),
        *(("m.0five", "category.storms", storm) for storm in ("m.0marie", "m.0a", "m.0b")),
        *(("m.0region", "region.storms", storm) for storm in ("m.0marie", "m.0a")),
        *(("common.topic", "topic.storms", storm) for storm in ("common.topic", "m.0a")),
        *((f"m.0{name}", "storm.wind", wind) for name, wind in (("marie", 9), ("a", 5), ("b", 7))),
        ("m.0marie", "storm.damage", "m.0city"),
    )
    assert sorted(store(sparql.members(variable))) == found


@pytest.mark.parametrize("level", [1, 2, 3, 4])
def test_generated_answers_do_not_contain_the_questions_entities(level):
    for record in (question(level, index) for index in range(1000)):
        answers = {answer["answer_argument"] for answer in record["answer"]}
        assert answers.isdisjoint(record["entities"].values())


# A hostile policy


INJECTIONS = [
    "m.0 } UNION { ?x ?p ?o",
    "#0> ?o } #",
    "film.film.genre> ?y . ?y ?z ?x . <x",
    "?r",
    "<http://rdf.freebase.com/ns/film.film.genre>",
    "a.b\\u003E",
    "a.b\n} ; DROP ALL",
    "type.object.type",
    "type.property.expected_type",
    "#" + "9" * 4000,
    "#-1",
    "#٣",
    "",
]


@pytest.mark.parametrize("text", INJECTIONS)
def test_arguments_never_become_part_of_a_query(text):
    environment = opened(question(2))
    base = environment.gold[0][1][0]
    call(environment, f"get_relations({base})")
    environment.get_neighbors(base, environment.gold[1][1][1])
    size = len(KG.store("").store)
    for attack in (
        lambda: environment.get_relations(text),
        lambda: environment.get_neighbors(text, "film.film.genre"),
        lambda: environment.get_neighbors("#0", text),
        lambda: environment.intersection("#0", text),
        lambda: environment.get_attributes(text),
        lambda: environment.argmax("#0", text),
        lambda: environment.argmin(text, "film.film.runtime"),
        lambda: environment.count(text),
    ):
        with pytest.raises(ToolError):
            attack()
    assert len(environment.variables) == 1
    assert len(KG.store("").store) == size


async def test_variables_of_another_session_do_not_exist(client):
    one, other = [await client.open("knowledgegraph", split="test", index=0) for _ in range(2)]
    for _ in range(2):
        await one.step(await one.expert())
    result = await other.step(Message.assistant("Final Answer: #0"))
    assert not result.done
    assert result.messages[0].content == "There is no variable #0."
    result = await other.step(Message.assistant(None, ToolCall.of("count", variable="#0")))
    assert "is not a variable" in result.messages[0].content


async def test_entities_of_other_questions_cannot_be_looked_up(client):
    session = await client.open("knowledgegraph", split="test", index=0)
    gold = question()["answer"][0]
    for name in (gold["entity_name"], gold["answer_argument"], next(iter(question(index=1)["entities"]))):
        result = await session.step(Message.assistant(None, ToolCall.of("get_relations", variable=name)))
        assert "neither an entity of the question" in result.messages[0].content


async def test_no_answer_of_a_tool_shows_the_gold_answer(client):
    for index in range(20):
        session = await client.open("knowledgegraph", split="test-3", index=index)
        text = session.messages[0].content
        while True:
            move = await session.expert()
            if not move.tool_calls:
                break
            text += (await session.step(move)).messages[0].content
        for answer in question(3, index)["answer"]:
            if "entity_name" in answer:
                words = [word.strip("[],.?") for word in text.split()]
                assert answer["answer_argument"] not in text
                assert not (len(answer["entity_name"].split()) > 1 and answer["entity_name"] in text), words


def test_variables_that_would_take_long_are_rejected():
    environment = opened(next(q for i in range(1000) if len((q := question(1, i))["answer"]) > 1))
    for action in environment.gold:
        getattr(environment, action[0])(*action[1])
    for latest in ("#0", "#1", "#2"):
        environment.intersection(latest, latest)
    with pytest.raises(ToolError, match="too complex"):
        environment.intersection("#3", "#3")
    with pytest.raises(ToolError, match="too complex"):
        environment.intersection("#3", "#2")
    assert len(environment.variables) == 4


async def test_text_without_a_final_answer_continues_the_episode(client):
    session = await client.open("knowledgegraph", split="test", index=0)
    for text in ("I don't know.", "Final Answer: none", "final answer #"):
        result = await session.step(Message.assistant(text))
        assert not result.done
        assert result.metrics["invalid_calls"] == 1.0


# A SPARQL endpoint and AgentBench's files


class SparqlServer:
    """A SPARQL 1.1 endpoint on a store of pyoxigraph."""

    def __init__(self, store):
        self.store, self.broken, self.queries = store, None, []
        serving = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = self.rfile.read(int(self.headers["Content-Length"])).decode()
                serving.queries.append(parse_qs(body)["query"][0])
                status, answer = serving.broken or (200, None)
                if answer is None:
                    results = serving.store.query(serving.queries[-1])
                    answer = results.serialize(format=pyoxigraph.QueryResultsFormat.JSON)
                self.send_response(status)
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *arguments):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/sparql"
        self.thread = threading.Thread(target=self.server.serve_forever, daemon=True)
        self.thread.start()

    def close(self):
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


@pytest.fixture
def endpoint(monkeypatch):
    server = SparqlServer(pyoxigraph.Store())
    monkeypatch.setenv("KNOWLEDGEGRAPH_SPARQL", server.url)
    yield server
    server.close()
    KG.stores.pop(server.url).client.close() if server.url in KG.stores else None


RECORDS = [
    {
        "question": "which airports serve the city where the author of the red door was born?",
        "qid": "1",
        "source": "cwq",
        "entities": {"The Red Door": "m.0red", "flight": "m.0fl"},
        "s_expression": "(AND ...)",
        "actions": [
            "get_relations(m.0red)",
            "get_neighbors(m.0red,book.written_work.author)",
            "get_relations(#0)",
            "get_neighbors(#0,people.person.place_of_birth)",
            "get_relations(#1)",
            "get_neighbors(#1,location.location.nearby_airports)",
            "get_relations(common.topic)",
            "get_neighbors(common.topic,aviation.airport.all)",
            "intersection(#2,#3)",
        ],
        "answer": [
            {"answer_type": "Entity", "answer_argument": "m.0a1", "entity_name": "One"},
            {"answer_type": "Entity", "answer_argument": "ns:m.0a2", "entity_name": "Two"},
        ],
    },
    {
        "question": "how many ships were built there?",
        "qid": 2,
        "entities": {"Yard": "m.0yard"},
        "actions": ["get_relations(m.0yard)", "get_neighbors(m.0yard,boats.yard.ships)", "count(#0)"],
        "answer": [{"answer_type": "Value", "answer_argument": "3"}],
    },
    {
        "question": "what was the last match?",
        "entities": {"Cup": "m.0cup"},
        "actions": [
            "get_relations(m.0cup)",
            "get_neighbors(m.0cup, time.recurring_event.instances)",
            "get_attributes(#0)",
            "argmax(#0, time.event.end_date)",
        ],
        "answer": [{"answer_type": "Entity", "answer_argument": "m.0last"}],
    },
]


def graph(records):
    """Return a store with noise in which the gold calls of records find exactly their answers."""
    ns, xsd = sparql.NS, "http://www.w3.org/2001/XMLSchema#"
    store, fresh = pyoxigraph.Store(), iter(range(10**6))

    def node(name):
        return pyoxigraph.NamedNode(ns + name)

    def add(one, relation, other):
        store.add(pyoxigraph.Quad(node(one), node(relation), other))

    def witness(variables, variable, member):
        """Add the facts that make an entity a member of a variable."""
        name, arguments = variable
        if name == "get_neighbors":
            base, relation = arguments
            if base[0] == "#":
                between = f"m.0between{next(fresh)}"
                witness(variables, variables[int(base[1:])], between)
                base = between
            add(base, relation, node(member))
            add(base, "common.topic.image", node("m.0image"))
        elif name == "intersection":
            for part in arguments:
                witness(variables, variables[int(part[1:])], member)
        else:
            for who, date in ((member, "2001-02-03"), (f"m.0other{next(fresh)}", "1999-01-01")):
                witness(variables, variables[int(arguments[0][1:])], who)
                add(who, arguments[1], pyoxigraph.Literal(date, datatype=pyoxigraph.NamedNode(xsd + "date")))

    for record in records:
        calls = [
            (action.partition("(")[0], [a.strip() for a in action.partition("(")[2].rstrip(")").split(",")])
            for action in record["actions"]
        ]
        variables = [one for one in calls if one[0] not in ("get_relations", "get_attributes")]
        members = [answer["answer_argument"].removeprefix("ns:") for answer in record["answer"]]
        if variables[-1][0] == "count":
            members = [f"m.0counted{next(fresh)}" for _ in range(int(members[0]))]
        target = variables[-2] if variables[-1][0] == "count" else variables[-1]
        for member in members:
            witness(variables, target, member)
    return store


async def answers(records, endpoint, client):
    """Play records with their gold calls and return the rewards."""
    rewards = []
    for record in records:
        endpoint.store = graph([record])
        session = await client.open("knowledgegraph", split="train", sample=record)
        rewards.append((await play(session))[1])
    return rewards


def load(tmp_path, records, text=None):
    path = tmp_path / "questions.json"
    path.write_text(text or json.dumps(records))
    return official.read_questions(path)


def corrupted(record):
    wrong = [*record["answer"][1:], {"answer_argument": "m.0wrong"}]
    return {**record, "answer": wrong}


async def test_questions_of_a_file_are_answered_by_an_endpoint(tmp_path, endpoint, client):
    records = load(tmp_path, RECORDS)
    assert await answers(records, endpoint, client) == [1.0, 1.0, 1.0]
    assert len(endpoint.queries) > 15
    endpoint_graphs = [graph([record]) for record in records]
    for record, store in zip(records, endpoint_graphs, strict=True):
        endpoint.store = store
        session = await client.open("knowledgegraph", split="train", sample=corrupted(record))
        assert (await play(session))[1] == 0.0


async def test_development_file_of_agentbench_is_answered_right(endpoint, client):
    records = official.read_questions(agentbench.folder("knowledgegraph") / "dev.json")
    assert len(records) == 20
    assert {need for record in records for need in record["needs"]} == {
        "a SPARQL endpoint that holds its facts"
    }
    assert await answers(records, endpoint, client) == [1.0] * 20
    for record in records:
        endpoint.store = graph([record])
        session = await client.open("knowledgegraph", split="train", sample=corrupted(record))
        assert (await play(session))[1] == 0.0


def test_dirty_records_load_and_report_missing_fields(tmp_path):
    records = load(
        tmp_path,
        [
            {"question": "?", "entities": ["m.0a"], "answer": "m.0b"},
            {"question": "?", "entities": {"x": "not an id"}, "answers": [4]},
            {"question": None, "actions": None},
            "no record",
        ],
    )
    assert records[0]["entities"] == {"m.0a": "m.0a"}
    assert records[0]["answer"] == [{"answer_argument": "m.0b"}]
    assert records[1]["answer"] == [{"answer_argument": "4"}]
    assert records[1]["needs"][1:] == ["identifiers instead of not an id"]
    assert records[2]["needs"][1:] == records[3]["needs"][1:] == ["a question", "answers, to be graded"]
    lines = "\n".join(json.dumps(record) for record in RECORDS)
    assert [record["qid"] for record in load(tmp_path, None, text=lines)] == ["1", "2", ""]
    for text in ("{", "5", "[" * 100_000, '{"a": "b"}'):
        with pytest.raises(Exception, match="cannot read the questions"):
            load(tmp_path, None, text=text)


def test_answer_with_many_blanks_is_parsed_quickly():
    module = sys.modules[KG.__module__]
    assert module.FINAL.search("final answer:" + " " * 1_000_000 + "x") is None
    assert [module.FINAL.search(f"Final Answer:{text}")[1] for text in (" #3", "3", " # 3", "\n#3.")] == [
        "3"
    ] * 4


def test_bad_line_of_a_file_affects_only_its_question(tmp_path):
    lines = [json.dumps(RECORDS[0]), "{oops", json.dumps(RECORDS[1])]
    records = load(tmp_path, None, text="\n".join(lines))
    assert [record["qid"] for record in records] == ["1", "", "2"]
    assert records[1]["needs"][1].startswith("JSON on line 2: ")
    assert [len(record["needs"]) for record in records] == [1, 4, 1]


def test_one_record_or_an_object_of_records_is_a_file_of_questions(tmp_path):
    for content in (RECORDS[1], {"2": RECORDS[1]}, {"data": [RECORDS[1]]}):
        records = load(tmp_path, None, text=json.dumps(content, indent=2))
        assert [record["question"] for record in records] == ["how many ships were built there?"]


@pytest.mark.parametrize(
    ("fields", "needs"),
    [
        ({"answer": [{"answer_argument": None, "entity_name": "One"}]}, "answers, to be graded"),
        ({"answer": [{}], "answers": None}, "answers, to be graded"),
        ({"answer": 0}, None),
        ({"answer": [{"answer_argument": '"0"^^http://www.w3.org/2001/XMLSchema#integer'}]}, None),
        ({"entities": "m.0yard"}, None),
        ({"entities": {"Yard": ["/m/0yard"]}}, None),
        ({"entities": {"Yard": None}}, "identifiers instead of none"),
        ({"question": "how \ud83d many?", "entities": {"Yard \ud83d": "m.0yard"}}, None),
        (
            {"actions": ["count()", "get_relations", "frob(m.0yard, x)", "get_relations(> . ?s ?p ?o #)"]},
            None,
        ),
    ],
)
async def test_dirty_record_opens_or_reports_what_is_missing(tmp_path, endpoint, client, fields, needs):
    (record,) = load(tmp_path, [{**RECORDS[1], "answer": [{"answer_argument": "0"}], **fields}])
    if needs:
        assert record["needs"][1:] == [needs]
        with pytest.raises(Exception, match=f"needs {needs}"):
            await client.open("knowledgegraph", split="train", sample=record)
        return
    endpoint.store = graph([RECORDS[1]])
    session = await client.open("knowledgegraph", split="train", sample=record)
    result = await session.step(ToolCall.of("get_relations", variable="> . ?s ?p ?o #"))
    assert "neither an entity" in result.messages[0].content
    assert record["answer"] == [{"answer_argument": "0"}]
    for name in (next(iter(record["entities"])), "m.0yard"):
        listed = await session.step(ToolCall.of("get_relations", variable=name))
        assert "boats.yard.ships" in listed.messages[0].content


async def test_file_without_an_endpoint_names_the_setting(tmp_path, client, monkeypatch):
    monkeypatch.delenv("KNOWLEDGEGRAPH_SPARQL", raising=False)
    with pytest.raises(Exception, match="set KNOWLEDGEGRAPH_SPARQL"):
        await client.open("knowledgegraph", split="train", sample=load(tmp_path, RECORDS)[0])


async def test_failing_endpoint_is_not_a_reward_of_zero(tmp_path, endpoint, client):
    record = load(tmp_path, RECORDS)[1]
    session = await client.open("knowledgegraph", split="train", sample=record)
    endpoint.broken = 500, b"out of order"
    result = await session.step(await session.expert())
    assert result.status == "failed_environment"
    assert "answers 500: out of order" in json.dumps(result.info)


def test_failure_of_the_endpoint_shows_no_credentials():
    endpoint = sparql.Endpoint("http://bob:PASSW0RD@127.0.0.1:9/sparql?key=QSECRET")
    with pytest.raises(sparql.StoreUnavailable, match=r"http://127\.0\.0\.1:9/sparql\?key=\*\*\*") as found:
        endpoint("ASK {}")
    assert not [secret for secret in ("bob", "PASSW0RD", "QSECRET") if secret in str(found.value)]


async def test_query_that_the_endpoint_aborts_does_not_end_the_episode(tmp_path, endpoint, client):
    record = load(tmp_path, RECORDS)[1]
    endpoint.store = graph([record])
    session = await client.open("knowledgegraph", split="train", sample=record)
    endpoint.broken = 500, b"Virtuoso S1T00 Error: the estimated execution time is too long"
    result = await session.step(await session.expert())
    assert "The query was given up" in result.messages[0].content
    endpoint.broken = None
    assert (await play(session))[1] == 1.0
