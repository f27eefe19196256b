"""The web shop is solvable, graded by the formula, equal as text and pages, and loads official files."""

import asyncio
import json
import shutil
from importlib import import_module
from pathlib import Path

import httpx
import pytest
import uvicorn
from playwright.async_api import async_playwright, expect

from agentrl_env import EnvClient, Message, SessionStatus, ToolCall
from agentrl_env.hosting.loader import load_target
from tests.browser import CHROMIUM, needs_chromium
from tests.environments.play import play

pytestmark = pytest.mark.environments

FOLDER = Path(__file__).parents[2] / "environments" / "webshop"
SPLITS = [f"{name}{level}" for level in ("", "-2", "-3") for name in ("train", "validation", "test")]


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    """The task with a small catalogue in its own folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WEBSHOP_PRODUCTS", "3000")
        yield load_target(str(shutil.copytree(FOLDER, tmp_path_factory.mktemp("tasks") / "webshop")))


@pytest.fixture
async def client(task):
    async with EnvClient.local(task) as client:
        yield client


@pytest.fixture
def module(task):
    """Return a function that imports a module of the task."""
    package = task.__module__.rpartition(".")[0]
    return lambda name: import_module(f"{package}.{name}")


async def call(session, name, **arguments):
    return await session.step(Message.assistant(None, ToolCall.of(name, **arguments)))


async def click(session, value):
    return await call(session, "click_action", value=value)


async def test_noisy_expert_clicks_anything_and_fails_in_a_part_of_its_episodes(task):
    noisy = type("Noisy", (task,), {"name": "webshop", "expert_noise": 0.6})
    async with EnvClient.local(noisy) as client:
        rewards = [(await play(await client.open("webshop", index=index))).reward for index in range(24)]
    assert min(rewards) < 1.0 == max(rewards)


@pytest.mark.parametrize("split", SPLITS)
async def test_expert_always_buys_a_matching_article(client, split):
    for index in range(15):
        session = await client.open("webshop", split=split, index=index)
        played = await play(session)
        assert played.reward == 1.0
        assert played == await play(await client.open("webshop", split=split, index=index))


@pytest.mark.parametrize(("level", "count"), [(1, 100_000), (2, 80_000), (3, 80_000)])
def test_splits_share_no_wish_and_hold_out_a_thousand_problems(module, level, count):
    goals = module("catalogue").generate_goals(level, count)
    wishes = [
        {
            json.dumps([goal[key] for key in ("kind", "attributes", "options", "price_upper")])
            for goal in split
        }
        for split in (goals["train"], goals["validation"], goals["test"])
    ]
    assert [len(split) for split in wishes] == [len(goals[name]) for name in ("train", "validation", "test")]
    assert min(map(len, wishes)) >= 1000
    assert len(set.union(*wishes)) == sum(map(len, wishes))


async def test_buttons_lead_to_their_pages(client):
    session = await client.open("webshop", split="test-2", index=0)
    found = await call(session, "search_action", keywords="hair dryer")
    assert "page 1 of 5, 50 products" in found.messages[0].content
    second = (await click(session, "next >")).messages[0].content
    assert "page 2 of 5" in second
    assert (await click(session, "< Prev")).messages[0].content == found.messages[0].content
    await click(session, "Next >")
    asin = second.split("[B0")[1].split("]")[0]
    product = (await click(session, f"b0{asin.lower()}")).messages[0].content
    color = product.split("color: [")[1].split("]")[0]
    assert f"[{color}]*" in (await click(session, color.upper())).messages[0].content
    features = (await click(session, "Features")).messages[0].content
    assert "Buy Now" not in features
    assert f"[{color}]*" in (await click(session, "< Prev")).messages[0].content
    assert (await click(session, "< Prev")).messages[0].content == second
    assert "search bar" in (await click(session, "Back to Search")).messages[0].content


async def test_missing_button_is_rejected_in_one_sentence(client):
    session = await client.open("webshop", split="test", index=0)
    assert "it has a search bar" in (await click(session, "Buy Now")).messages[0].content
    await call(session, "search_action", keywords="lamp")
    assert "click 'Back to Search' first" in (
        (await call(session, "search_action", keywords="lamp")).messages[0].content
    )
    refused = await click(session, "B0ZZZZZZZZ")
    assert "no 'B0ZZZZZZZZ' to click; it has Back to Search, Next >, B0" in refused.messages[0].content
    assert refused.reward == 0.0
    assert refused.status is SessionStatus.RUNNING


@pytest.mark.parametrize(
    "keywords",
    [
        "",
        "  ",
        '"',
        "lamp OR title:*",
        "lamp'); DROP TABLE products; --",
        "NEAR(a b) AND NOT",
        "灯 💡",
        "\x00",
        "the a of",
        "lamp " * 20_000,
    ],
)
async def test_search_accepts_any_text(client, keywords):
    session = await client.open("webshop", split="test", index=0)
    result = await call(session, "search_action", keywords=keywords)
    assert "Results for" in result.messages[0].content
    assert (await play(session)).reward == 1.0


async def test_pages_do_not_reveal_the_goal(client):
    """The target's identifier and the grader's list of attributes are never shown."""
    session = await client.open("webshop", split="test-3", index=1)
    goal = session.info.sample.data if session.info.sample else {}
    conversation, *_ = await play(session)
    assert goal["asin"] not in conversation[0]
    assert "attributes" not in str(conversation).lower()


async def test_forked_visit_continues_on_its_page(client):
    session = await client.open("webshop", split="test-3", index=2)
    for _ in range(2):
        await session.step(await session.expert())
    (copy,) = await session.fork(1)
    assert (await play(copy))[1] == (await play(session))[1] == 1.0


def product(module, **fields):
    about = {
        "asin": "B000000001",
        "title": "Velmo Camera Tripod, foldable",
        "category": "Electronics › Camera Tripod",
        "query": "camera tripod",
        "price": 40.0,
        "attributes": ("foldable", "heavy duty"),
        "options": {"color": ("black", "navy"), "size": ("x-large", "large")},
    }
    return module("catalogue").Product(**{**about, **fields})


GOAL = {"attributes": ["foldable", "heavy duty"], "options": {"color": "navy"}, "price_upper": 50.0}


@pytest.mark.parametrize(
    ("bought", "chosen", "total"),
    [
        ({}, {"color": "navy"}, 1.0),
        ({}, {"color": "black"}, 3 / 4),
        ({"price": 50.01}, {"color": "navy"}, 3 / 4),
        ({"attributes": ("foldable",)}, {"color": "navy"}, 3 / 4),
        ({"attributes": (), "title": "Ixul Camera Tripod"}, {}, 1 / 4),
        ({"attributes": (), "features": ("Heavy duty: tested",)}, {"color": "navy"}, 1.0),
        # Another kind of article: a third of the title's words agree, no words agree, and only the category
        # agrees.
        ({"query": "camera", "category": "", "title": "Ixul Camera Bag"}, {"color": "navy"}, 1.0),
        ({"query": "lamp", "category": "Home › Lamp", "title": "Ixul Lamp"}, {"color": "navy"}, 0.0),
        ({"query": "lamp", "title": "Ixul Lamp"}, {"color": "navy"}, 1.0),
    ],
)
def test_reward_follows_the_formula(module, bought, chosen, total):
    target = product(module)
    reward = module("reward").grade(product(module, **bought), chosen, GOAL, target)
    assert reward.score == pytest.approx(total)
    assert reward.product <= reward.score
    assert (reward.product == 1.0) == (total == 1.0)


def test_article_above_the_price_limit_earns_nothing(module):
    target = product(module)
    dear = module("reward").grade(product(module, price=50.01), {"color": "navy"}, GOAL, target)
    half = module("reward").grade(product(module, attributes=("foldable",)), {"color": "navy"}, GOAL, target)
    assert (dear.product, half.product) == (0.0, 0.5)


@pytest.mark.parametrize(
    ("kind", "asked"),
    [
        ("area rug", "an area rug"),
        ("hdmi adapter", "an hdmi adapter"),
        ("summer dress", "a summer dress"),
        ("sandals", "sandals"),
        ("beef jerky", "beef jerky"),
    ],
)
def test_requests_have_the_right_article(module, kind, asked):
    catalogue = module("catalogue")
    assert kind in {name for _, kinds in catalogue.KINDS.values() for name, *_ in kinds}
    assert catalogue._with_article(kind) == asked


@pytest.mark.parametrize("level", [1, 2, 3])
async def test_first_result_of_the_instruction_rarely_fits(client, level):
    split, fits, rewards = f"test-{level}" if level > 1 else "test", 0, 0.0
    for index in range(40):
        session = await client.open("webshop", split=split, index=index)
        asked = session.messages[0].content.splitlines()[0].removeprefix("Instruction: ")
        found = (await call(session, "search_action", keywords=asked)).messages[0].content
        page = (await click(session, "B0" + found.split("[B0")[1].split("]")[0])).messages[0].content
        options = [
            word.split("]")[0] for line in page.splitlines() if ": [" in line for word in line.split("[")[1:]
        ]
        for option in options:
            if f": {option}," in asked:
                await click(session, option)
        rewards += (bought := await click(session, "Buy Now")).reward
        fits += bought.metrics["success"] == 1.0
    assert fits <= 10
    assert rewards <= 12


def test_kind_counts_half_or_a_tenth_by_the_share_of_the_title(module):
    words = "one two three four five six seven eight nine ten eleven twelve"
    target = product(module, title=words, attributes=(), category="a", query="a")
    kinds = [
        module("reward").same_kind(product(module, title=title, category="b", query="b"), target)
        for title in ("one two three", "one two", "one", "zero")
    ]
    assert kinds == [1.0, 0.5, 0.1, 0.0]


@pytest.mark.parametrize(
    ("wanted", "given", "equal"),
    [
        ("navy", "Navy", True),
        ("navy", "navy blue", True),
        ("x-large", "X Large", True),
        ("large", "x-large", False),
        ("x-large", "xx-large", False),
        ("pack of 1", "pack of 12", False),
        ("pack", "pack of 12", False),
        ("", "navy", False),
        ("navy", "", False),
    ],
)
def test_phrases_are_equal_up_to_additional_words_but_not_numbers(module, wanted, given, equal):
    assert module("reward").same(wanted, given) is equal


async def test_forms_of_the_site_buy_in_the_same_shop(task, module):
    site = module("pages").site()
    async with (
        site.router.lifespan_context(site),
        httpx.AsyncClient(
            transport=httpx.ASGITransport(app=site), base_url="http://shop", follow_redirects=True
        ) as browser,
        EnvClient.local(task) as client,
    ):
        session = await client.open("webshop", split="test-2", index=5)
        page = await browser.get("/", params={"split": "test-2", "index": 5})
        assert session.messages[0].content.split("\n")[0].removeprefix("Instruction: ") in page.text
        while not session.status.final:
            move = await session.expert()
            function = move.tool_calls[0].function
            assert ('name="keywords"' in page.text) == (function.name == "search_action")
            await session.step(move)
            address = page.url.join(function.name.removesuffix("_action"))
            page = await browser.post(address, data=json.loads(function.arguments))
        assert "Reward: 1" in page.text


@needs_chromium
async def test_chromium_buys_in_the_same_shop(task, module):
    server = uvicorn.Server(uvicorn.Config(module("pages").site(), port=0, log_level="warning"))
    serving = asyncio.create_task(server.serve())
    while not server.started:  # noqa: ASYNC110 - a server has no event for it
        await asyncio.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    async with EnvClient.local(task) as client, async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = await browser.new_page()
        await page.goto(f"http://127.0.0.1:{port}/?split=train-3&index=4")
        session = await client.open("webshop", split="train-3", index=4)
        while not session.status.final:
            move = await session.expert()
            result = await session.step(move)
            (argument,) = json.loads(move.tool_calls[0].function.arguments).values()
            if move.tool_calls[0].function.name == "search_action":
                await page.get_by_label("Keywords").fill(argument)
                await page.get_by_role("button", name="Search", exact=True).click()
            else:
                await page.get_by_role("button", name=argument, exact=True).click()
        await expect(page.locator("#reward")).to_have_text(f"Reward: {result.reward:g}")
        await browser.close()
    server.should_exit = True
    await serving


async def test_unknown_visits_and_samples_are_not_found(module):
    site = module("pages").site()
    async with (
        site.router.lifespan_context(site),
        httpx.AsyncClient(transport=httpx.ASGITransport(app=site), base_url="http://shop") as browser,
    ):
        assert (await browser.get("/", params={"split": "nothing"})).status_code == 404
        assert (await browser.get("/unknown/")).status_code == 404
        assert (await browser.post("/unknown/click")).status_code == 404


RECORDS = [
    {
        "asin": "b000000001",
        "name": "Velmo Camera  Tripod",
        "query": "Camera Tripod",
        "product_category": "Electronics › Camera › Tripods",
        "pricing": "$10.00$20.00",
        "full_description": "Stands still.",
        "small_description": ["Foldable", None, ""],
        "customization_options": {
            "Color": [{"value": "Navy/Blue "}, {"value": "Red"}, {"image": "x"}],
            "Size": None,
        },
        "average_rating": "4.4 out of 5",
    },
    {"asin": "B000000001", "name": "Twice"},
    {"asin": "nan", "name": "No identifier"},
    {"asin": "B000000002", "name": None},
    "dirt",
    {
        "asin": "B000000003",
        "name": "Lamp",
        "pricing": None,
        "customization_options": "",
        "small_description": "Bright.",
    },
    {"asin": "B000000004", "name": "Rug", "pricing": "$1,299.50", "customization_options": {"": []}},
]
DESCRIBED = {
    "B000000001": {
        "attributes": ["foldable"],
        "instruction": "a tripod",
        "instruction_attributes": ["foldable"],
    },
    "B000000003": {"attributes": ["bright"], "instruction": "a lamp", "instruction_attributes": []},
    "B000000004": {"attributes": ["soft"], "instruction": "a rug.", "instruction_attributes": ["soft"]},
}
PEOPLE = {
    "B000000001": [
        {
            "instruction": "i want a tripod, navy.",
            "instruction_attributes": ["foldable"],
            "instruction_options": ["navy | blue"],
        },
        {"instruction": "", "instruction_attributes": ["foldable"]},
        {
            "instruction": "a red one",
            "instruction_attributes": ["foldable"],
            "instruction_options": {"Color": "red"},
        },
        None,
    ],
    "B000000004": {
        "instruction": "a soft rug",
        "instruction_attributes": ["soft"],
        "instruction_options": [],
    },
}


def write_official(folder, people=PEOPLE):
    folder.mkdir(exist_ok=True)
    (folder / "items_shuffle_1000.json").write_text(json.dumps(RECORDS, indent=1))
    (folder / "items_ins_v2_1000.json").write_text(json.dumps(DESCRIBED))
    if people:
        (folder / "items_human_ins.json").write_text(json.dumps(people))
    return folder


def test_dirty_official_products_are_read(module, tmp_path, caplog):
    store = module("official").open_official(write_official(tmp_path))
    assert "4 of 7 products were left out" in caplog.text
    assert "2 instructions were left out" in caplog.text
    assert store.count("products") == 3
    tripod, lamp, rug = (store.get(f"B00000000{i}") for i in (1, 3, 4))
    assert tripod.title == "Velmo Camera Tripod"
    assert tripod.query == "camera tripod"
    assert tripod.options == {"color": ("navy | blue", "red")}
    assert tripod.features == ("Foldable",)
    assert 10 <= tripod.price <= 20
    assert (tripod.rating, lamp.price, rug.price) == (4.4, 100.0, 1299.5)
    assert store.search("bright lamp") == ("B000000003",)
    left = sorted(path.name for path in tmp_path.iterdir() if "sqlite" in path.name)
    assert left == ["catalogue.sqlite", "catalogue.sqlite.sources"]


@pytest.mark.parametrize(
    ("product", "described", "asked", "expected"),
    [
        ({"pricing": "$.99"}, {}, {}, {"price": 0.99}),
        ({"pricing": "$" + "9" * 400}, {}, {}, {"price": 100.0}),
        ({"small_description": 5, "full_description": float("nan")}, {}, {}, {"features": ("5",)}),
        ({"small_description": {"a": "one"}}, {}, {}, {"features": ("one",)}),
        ({"name": "A \ud83d lamp"}, {}, {"instruction": "a \ud83d lamp"}, {"title": "A ? lamp"}),
        (
            {
                "customization_options": {
                    "color": ["red", ["blue", "https://image"]],
                    "size": 5,
                    "fit": {"value": "x"},
                }
            },
            {},
            {"instruction_options": {"color": ["blue"]}},
            {"options": {"color": ("red", "blue"), "size": ("5",), "fit": ("x",)}},
        ),
        ({}, {"attributes": 7}, {}, {"attributes": ("7",)}),
        ({}, {"attributes": "foldable"}, {}, {"attributes": ("foldable",)}),
        (
            {"small_description": "foldable"},
            {},
            {"instruction_attributes": "foldable"},
            {"features": ("foldable",)},
        ),
        (
            {"customization_options": {"color": [{"value": "Buy Now"}]}},
            {},
            {},
            {"options": {"color": ("buy now",)}},
        ),
    ],
)
async def test_dirty_product_is_sold(
    module, task, tmp_path, monkeypatch, product, described, asked, expected
):
    record = {"asin": "B000000001", "name": "Lamp", "small_description": ["bright"], **product}
    about = {"attributes": ["bright"], **described}
    wish = {"instruction": "a lamp", "instruction_attributes": about["attributes"], **asked}
    for name, content in (
        ("items_shuffle", [record]),
        ("items_ins_v2", {"b000000001": about}),
        ("items_human_ins", {"B000000001": [wish]}),
    ):
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    store = module("official").open_official(tmp_path)
    sold = store.get("B000000001")
    assert {name: getattr(sold, name) for name in expected} == expected
    monkeypatch.setattr(module("environment"), "shop", lambda: store)
    async with EnvClient.local(task) as client:
        session = await client.open("webshop", split="test", sample=store.goals(range(1))[0])
        assert (await play(session)).reward == 1.0


def test_long_texts_are_not_kept_and_find_nothing(module, tmp_path):
    store = module("official").open_official(write_official(tmp_path))
    store.search("bright lamp"), store.get("B000000003")
    before = [cache.cache_info().currsize for cache in (store._found, store._read, store._count)]
    long = "x" * 1_000_000
    assert store.get(long) is None
    assert store.search(f"bright {long} lamp") == ("B000000003",)
    assert [cache.cache_info().currsize for cache in (store._found, store._read, store._count)] == before


def test_official_goals_come_from_people_or_are_generated(module, tmp_path):
    texts = []
    for name, people in (("people", PEOPLE), ("generated", None)):
        store = module("official").open_official(write_official(tmp_path / name, people))
        texts.append({goal["instruction"].partition(", and price")[0] for goal in store.goals(range(10))})
    assert texts == [{"i want a tripod, navy", "a red one", "a soft rug"}, {"a tripod", "a rug"}]


async def test_official_data_is_played(tmp_path, monkeypatch):
    monkeypatch.setenv("WEBSHOP_DATA", str(write_official(tmp_path / "data")))
    task = load_target(str(shutil.copytree(FOLDER, tmp_path / "webshop")))
    async with EnvClient.local(task) as client:
        assert list((await client.tasks())["webshop"].splits) == ["train", "validation", "test"]
        for index in range(3):
            session = await client.open("webshop", split="test", index=index)
            assert (await play(session))[1] == 1.0


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "the file ends before"),
        ("{}", "a JSON array is expected"),
        ("[{}, ", "the file ends"),
        ("[1, {", "ends within element 2"),
    ],
)
def test_broken_official_file_is_named(module, tmp_path, text, sentence):
    (tmp_path / "items_shuffle.json").write_text(text)
    (tmp_path / "items_ins_v2.json").write_text("{}")
    with pytest.raises(ValueError, match=sentence):
        module("official").open_official(tmp_path)
    assert not [path.name for path in tmp_path.iterdir() if "sqlite" in path.name]


def test_store_is_rebuilt_when_a_file_changes(module, tmp_path):
    official = module("official")
    store = official.open_official(write_official(tmp_path, None))
    assert len(store.goals(range(10))) == 2
    (tmp_path / "items_human_ins.json").write_text(json.dumps(PEOPLE))
    assert len(official.open_official(tmp_path).goals(range(10))) == 3


def test_missing_official_file_is_named(module, tmp_path):
    with pytest.raises(ValueError, match=r"there is no items_shuffle\.json"):
        module("official").open_official(tmp_path)


def test_arrays_are_read_across_chunks(module, tmp_path, monkeypatch):
    monkeypatch.setattr(module("official"), "CHUNK", 7)
    path = tmp_path / "array.json"
    path.write_text(json.dumps(RECORDS, indent=2, ensure_ascii=False), encoding="utf-8")
    assert list(module("official").read_array(path)) == RECORDS
