"""Search QA: questions, pages, search, custom corpora, and attacks by a policy."""

import json
import random
import re
import shutil
import sys
import tempfile
from collections import Counter, defaultdict
from pathlib import Path

import pytest

from agentrl_env import EnvClient, Message, ToolCall
from agentrl_env.hosting.loader import load_target
from tests.environments.play import play

pytestmark = pytest.mark.environments

FOLDER = Path(__file__).parents[2] / "environments" / "search_qa"
with pytest.MonkeyPatch.context() as patch:
    patch.setenv("SEARCH_QA_PAGES", "4000")
    with tempfile.TemporaryDirectory() as copy:
        SearchQa = load_target(str(shutil.copytree(FOLDER, Path(copy) / "search_qa")))
PACKAGE = SearchQa.__module__.rpartition(".")[0]
environment, questions, world, prose, grading = (
    sys.modules[f"{PACKAGE}.{name}"] for name in ("environment", "questions", "world", "prose", "grading")
)
every_level = pytest.mark.parametrize("level", list(questions.LEVELS))


@pytest.fixture
async def client():
    async with EnvClient.local(SearchQa) as client:
        yield client


def suffix(level):
    return f"-{level}" if level > 1 else ""


def drawn(level, split="test", count=1000):
    return [questions.Questions(split, level)[index] for index in range(count)]


def text_of(title):
    return environment.encyclopedia().page(title).text


async def call(session, name, **arguments):
    return await session.step(Message.assistant(None, ToolCall.of(name, **arguments)))


async def said(session, name, **arguments):
    return (await call(session, name, **arguments)).messages[0].content


@every_level
async def test_expert_answers_held_out_questions_and_repeats(client, level):
    for index in range(40):
        played = await play(await client.open("search_qa", split="test" + suffix(level), index=index))
        assert (played.reward, played.metrics["f1"]) == (1.0, 1.0), played.transcript
        assert played == await play(await client.open("search_qa", split="test" + suffix(level), index=index))


@pytest.mark.slow
@every_level
async def test_expert_answers_two_hundred_questions_of_every_split(client, level):
    for split in ("train", "validation", "test"):
        for index in range(200):
            session = await client.open("search_qa", split=split + suffix(level), index=index)
            assert (await play(session)).reward == 1.0


@every_level
def test_splits_have_a_thousand_different_questions_and_share_none(level):
    asked = {
        split: {question["question"].partition(" ")[2] for question in drawn(level, split)}
        for split in questions.NUM_QUESTIONS
    }
    assert {len(one) for one in asked.values()} <= {
        999,
        1000,
    }  # openings such as "Name" and "Tell me" can differ
    assert not asked["test"] & asked["train"]
    assert not asked["test"] & asked["validation"]
    assert not asked["validation"] & asked["train"]


def test_world_and_pages_depend_only_on_the_seed():
    again = world.World()
    assert again.things == world.world().things
    assert again.facts == world.world().facts
    assert world.World(seed=7).facts != again.facts
    titles = [thing.title for thing in again.things]
    assert len(titles) == len({title.lower() for title in titles}) == 4_000
    for title, _, text in prose.pages(again):
        assert text_of(title) == text


def test_every_fact_is_on_the_page_of_its_subject():
    known = world.world()
    for name, facts in known.facts.items():
        for subject in list(facts)[:100]:
            assert known.text_of(name, facts[subject]) in text_of(known.things[subject].title)


def test_pages_have_articles_that_fit_and_bands_have_plurals():
    known = world.world()
    text = " ".join(page for _, _, page in prose.pages(known))
    assert " is an oil painting" in text
    assert not re.findall(r"\b(?:a [aeio]|an [^aeio])\w*", text)
    assert not re.findall(r"(?<!the )(?<!The )(?:University of|River) [A-Z]\w+", text)
    bands = [known.things[number].name for number in known.of_kind["band"]]
    assert {"Thieves", "Wolves", "Foxes"} <= {name.split()[-1] for name in bands}
    assert not [name for name in bands if re.search(r"(fs|xs|ss|[^aeo]ys|Echos)$", name)]


@pytest.mark.parametrize("level", [1, 5, 6])
def test_questions_repeat_no_word_of_their_start(level):
    for question in drawn(level, count=500):
        text = question["question"]
        assert not re.match(r"Which (\w+) is the \1\b", text)
        assert not re.search(r"that (was \w+|lies) .* and \1 ", text)
        assert "first climbed first" not in text


@every_level
def test_answers_match_the_facts_and_are_on_the_last_page(level):
    """Follow the relations in a question's meaning through the table of facts."""
    known, rng = world.world(), random.Random(level)
    draw = getattr(questions, f"_{questions.LEVELS[level]}")
    checked = 0
    while checked < 200:
        meaning = draw(known, rng, level)
        question = questions._ask(known, meaning, rng)
        if question is None:
            continue
        checked += 1
        kind, *rest = meaning
        (answer,) = question["answer"]
        assert answer.lower() not in question["question"].lower()
        pages = [text_of(title) for _, title in question["steps"]]
        if kind == "chain":
            found, relations = {rest[0]}, rest[1:]
            assert len(pages) == level == len(relations)
        elif kind == "bridge":
            number, one, other, asked = rest
            found = {
                subject
                for subject in known.facts[one]
                if known.facts[one][subject] == known.facts[one][number]
                and known.facts[other][subject] == known.facts[other][number]
            }
            relations = [asked]
            assert known.things[number].name not in question["question"]
        else:
            asked, *numbers = rest
            year = known.facts[questions.DATED[known.things[numbers[0]].kind]]
            if kind == "difference":
                assert answer == str(abs(year[numbers[0]] - year[numbers[1]]))
                continue
            edge = (min if kind == "first" else max)(year[number] for number in numbers)
            found, relations = {number for number in numbers if year[number] == edge}, [asked]
        for relation in relations:
            found = {known.facts[relation][thing] for thing in found}
        assert {known.text_of(relations[-1], value) for value in found} == {answer}
        assert any(answer in page for page in pages)


@every_level
def test_questions_do_not_contain_their_answers(level):
    for question in drawn(level):
        assert not grading.exact(question["question"], question["answer"])
        assert not any(answer in question["question"] for answer in question["answer"])


@pytest.fixture(scope="module")
def whole():
    """The modules of the task with all 40,000 pages."""
    package = load_target(str(FOLDER)).__module__.rpartition(".")[0]
    return [sys.modules[f"{package}.{name}"] for name in ("environment", "questions")]


@pytest.mark.slow
@every_level
def test_most_common_answer_to_similar_questions_is_rarely_right(whole, level):
    _, questions = whole
    common, right = defaultdict(Counter), 0
    for index in range(5000):
        question = questions.Questions("train", level)[index]
        common[_form(question)][question["answer"][0]] += 1
    for index in range(1000):
        question = questions.Questions("test", level)[index]
        guesses = common[_form(question)].most_common(1)
        right += bool(guesses) and grading.exact(guesses[0][0], question["answer"])
    print(f"level {level}: the most common answer is right in {right} of 1000")
    assert right <= 20


def _form(question):
    """Return the first words of a question without names."""
    return " ".join(word for word in question["question"].split()[:9] if word.islower())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("level", "first_page", "ten_pages"),
    [(1, 1.0, 1.0), (2, 0.05, 0.4), (3, 0.05, 0.1), (4, 0.05, 0.1), (5, 0.5, 1.0), (6, 0.35, 0.7)],
)
def test_one_search_for_the_question_seldom_finds_the_answer(whole, level, first_page, ten_pages):
    environment, questions = whole
    index, first, ten = environment.encyclopedia(), 0, 0
    for number in range(300):
        question = questions.Questions("test", level)[number]
        texts = [index.page(title).text for title, _ in index.search(question["question"])[:10]]
        first += question["answer"][0] in texts[0]
        ten += any(question["answer"][0] in text for text in texts)
    print(f"level {level}: the answer is on the first page in {first}, on one of ten in {ten} of 300")
    assert first / 300 <= first_page
    assert ten / 300 <= ten_pages


async def test_results_and_pages_are_shown_in_parts(client):
    session = await client.open("search_qa", split="test", index=0)
    first = await said(session, "search", query="film silent harbour")
    assert first.startswith("Results, page 1 of 5:\n- ")
    second = await said(session, "search", query="film silent harbour", page=2)
    assert not set(first.splitlines()) & set(second.splitlines())
    assert "There is no page 6 of the results" in (
        await said(session, "search", query="silent harbour film", page=6)
    )
    title = first.splitlines()[1].removeprefix("- ").rpartition(":")[0]
    assert (await said(session, "read", title=f" {title.upper()} ")).startswith(title)
    assert "it has 1" in await said(session, "read", title=title, part=2)
    assert "no page with the title 'Nowhere'" in await said(session, "read", title="Nowhere")
    (fork,) = await session.fork(1)
    for one in (session, fork):
        assert (await play(one)).reward == 1.0


@pytest.mark.parametrize(
    ("given", "gold", "right", "score"),
    [
        ("The Silent Harbour.", ["Silent Harbour"], True, 1.0),
        ("silent  harbour", ["x", "Silent Harbour"], True, 1.0),
        ("Harbour", ["Silent Harbour"], False, 2 / 3),
        ("1984 or 1985", ["1984"], False, 0.5),
        ("", ["1984"], False, 0.0),
        ("the", ["1984"], False, 0.0),
        ("", ["The"], False, 0.0),
        ("The", ["The"], True, 0.0),
        ("harbour silent", ["Silent Harbour"], False, 1.0),
    ],
)
def test_answers_are_compared_without_case_articles_and_punctuation(given, gold, right, score):
    assert grading.exact(given, gold) is right
    assert grading.f1(given, gold) == pytest.approx(score)


# A hostile policy

TEXTS = [
    "",
    "  ",
    '"',
    "title:* OR x",
    "'); DROP TABLE pages; --",
    "NEAR(a b) AND NOT",
    "灯 💡",
    "\x00",
    "the a of",
    "film " * 20_000,
    "x" * 100_000,
    "self.gold",
]


@pytest.mark.parametrize("text", TEXTS)
async def test_any_text_can_be_searched_and_read_and_earns_nothing(client, text):
    session = await client.open("search_qa", split="test", index=1)
    for name, argument in (("search", "query"), ("read", "title")):
        result = await call(session, name, **{argument: text})
        assert (result.status, result.reward) == ("running", 0.0)
        assert len(result.messages[0].content) < 3000
    (fork,) = await session.fork(1)
    assert (await call(fork, "answer", text=text)).reward == 0.0
    assert (await play(session)).reward == 1.0


async def test_listing_every_candidate_earns_nothing(client):
    names = " ".join(thing.name for thing in world.world().things)
    for level in (1, 4):
        session = await client.open("search_qa", split="test" + suffix(level), index=2)
        gold = drawn(level, count=3)[2]["answer"][0]
        (fork,) = await session.fork(1)
        assert (await call(session, "answer", text=names)).reward == 0.0
        assert (await call(fork, "answer", text=f"{gold} or another")).reward == 0.0


# Custom corpora

WIKI = [
    {"id": "1", "title": "Ada", "text": "Ada lives in Rome."},
    {"id": "2", "contents": '"Rome"\nRome lies on the Tiber.\nIt is old.'},
    {"title": "Ada", "text": ["Another Ada.", " She sails."]},
    {"title": "Long", "text": "word " * 1000},
    {"title": "Empty"},
]
HOTPOT = [
    {
        "_id": "a",
        "question": "On which river lies the city where Ada lives?",
        "answer": "Tiber",
        "supporting_facts": [["Ada", 0], ["Rome", 0]],
        "context": [["Ada", ["Ada lives in Rome."]], ["Rome", ["Rome lies", " on the Tiber."]]],
    },
    {"question": "no answer"},
]
NQ = [
    {"question": "where does ada live", "answer": ["Rome", "Roma"]},
    {"id": "t", "question": "what is rome", "golden_answers": ["old"]},
]


def write(folder, **files):
    folder.mkdir(exist_ok=True)
    for name, records in files.items():
        path = folder / ".".join(name.rsplit("_", 1))
        lines = "\n".join(json.dumps(record) for record in records)
        path.write_text(lines if path.suffix == ".jsonl" else json.dumps(records))
    return folder


def loaded(tmp_path, monkeypatch, folder):
    monkeypatch.setenv("SEARCH_QA_DATA", str(folder))
    return load_target(str(shutil.copytree(FOLDER, tmp_path / "tasks" / "search_qa")))


async def test_custom_pages_and_questions_are_played(tmp_path, monkeypatch, caplog):
    folder = write(tmp_path / "data", wiki_jsonl=WIKI, hotpot_dev_json=HOTPOT, nq_jsonl=NQ)
    task = loaded(tmp_path, monkeypatch, folder)
    async with EnvClient.local(task) as client:
        splits = (await client.tasks())["search_qa"].splits
        assert {name: split.num_samples for name, split in splits.items()} == {"hotpot_dev": 1, "nq": 2}
        session = await client.open("search_qa", split="hotpot_dev", index=0)
        found = await said(session, "search", query="river Tiber")
        assert "- Rome: Rome lies on the Tiber. It is old." in found
        assert "Another Ada. She sails." in await said(session, "read", title="Ada (2)")
        long = await said(session, "read", title="Long", part=3)
        assert long.startswith("Long (part 3 of 3)\n\nword word")
        played = await play(session)
        assert (played.reward, played.metrics["pages"]) == (1.0, 4.0)
        for text, reward in (("roma", 1.0), ("Paris", 0.0)):
            session = await client.open("search_qa", split="nq", index=0)
            assert (await call(session, "answer", text=text)).reward == reward
    assert "1 records were left out" in caplog.text
    left = sorted(path.name for path in folder.iterdir() if "sqlite" in path.name)
    assert left == ["search_qa.sqlite", "search_qa.sqlite.sources"]


async def test_questions_with_context_need_no_pages(tmp_path, monkeypatch):
    newer = {
        "question": "Where does Ada live?",
        "answer": "Rome",
        "supporting_facts": {"title": ["Ada", "Ada"], "sent_id": [0, 1]},
        "context": {"title": ["Ada", "Bob"], "sentences": [["Ada lives in Rome."], ["Bob sings."]]},
    }
    folder = write(tmp_path / "data", train_jsonl=[newer, newer], dev_json=HOTPOT[:1])
    async with EnvClient.local(loaded(tmp_path, monkeypatch, folder)) as client:
        for split in ("train", "dev"):
            session = await client.open("search_qa", split=split, index=0)
            assert (await play(session)).reward == 1.0


@pytest.mark.parametrize(
    "dirt",
    [
        {"supporting_facts": 5},
        {"supporting_facts": {"title": 5}},
        {"supporting_facts": [[]]},
        {"supporting_facts": [[None, 0]]},
        {"context": {"title": 5, "sentences": True}},
        {"question": "half a pair \ud800?"},
        {"answer": ["\udfff", "Rome"]},
    ],
)
def test_dirty_records_do_not_stop_a_start(tmp_path, dirt):
    folder = write(tmp_path / "data", wiki_jsonl=[*WIKI, {"title": "\ud800", "text": "half \udfff"}])
    write(folder, nq_jsonl=[{"question": "where does ada live", "answer": "Rome"} | dirt])
    index = sys.modules[f"{PACKAGE}.official"].open_folder(folder)
    assert index.splits() == {"nq": 1}
    assert index.question("nq", 0)["answer"]


def test_index_is_rebuilt_when_a_file_changes(tmp_path):
    official = sys.modules[f"{PACKAGE}.official"]
    folder = write(tmp_path / "data", nq_jsonl=NQ, wiki_jsonl=WIKI)
    assert official.open_folder(folder).splits() == {"nq": 2}
    write(folder, nq_jsonl=[*NQ, NQ[0] | {"question": "and where does bob live"}])
    assert official.open_folder(folder).splits() == {"nq": 3}


@pytest.mark.parametrize(
    ("files", "sentence"),
    [
        ({}, "has no questions"),
        ({"wiki_jsonl": WIKI}, "has no questions"),
        ({"nq_jsonl": NQ}, "has no pages"),
        ({"nq_jsonl": NQ, "wiki_jsonl": [*WIKI, "{"]}, "left out"),
    ],
)
def test_incomplete_folder_is_reported(tmp_path, files, sentence, caplog):
    folder = write(tmp_path / "data", **files)
    official = sys.modules[f"{PACKAGE}.official"]
    if sentence == "left out":
        official.open_folder(folder)
        assert sentence in caplog.text
        return
    with pytest.raises(official.DataError, match=sentence):
        official.open_folder(folder)
    assert not [path.name for path in folder.iterdir() if "sqlite" in path.name]


def test_broken_line_is_named(tmp_path):
    folder = write(tmp_path / "data", nq_jsonl=NQ, wiki_jsonl=WIKI)
    with open(folder / "wiki.jsonl", "a") as file:
        file.write("\n{")
    official = sys.modules[f"{PACKAGE}.official"]
    with pytest.raises(official.DataError, match=r"wiki\.jsonl, line 6 is no JSON"):
        official.open_folder(folder)
