"""Agent tokens are signed with a random key, expire, can be revoked, and are shared by a fleet."""

import asyncio
import json
from base64 import urlsafe_b64encode
from contextlib import asynccontextmanager
from hashlib import sha256
from hmac import digest

import httpx
import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosedError

from agentrl_env import EnvClient
from agentrl_env.client.client import ClientSession
from agentrl_env.errors import NotSupported, ServeError, Unauthorized, UnknownSession, WireError
from agentrl_env.fleet.redis_store import RedisStore
from agentrl_env.hosting.serve import EnvServer
from agentrl_env.server.auth import AGENT_KEY, CLOSED_S, AgentTokens
from agentrl_env.server.limits import Limits
from tests.env.fleet.test_controller import Site
from tests.env.redis_server import RedisServer
from tests.env.tasks import Clock, Quick, until

TOKEN = "T0K"


@pytest.fixture
def redis(tmp_path):
    server = RedisServer(tmp_path)
    server.start()
    yield server
    server.kill()


@asynccontextmanager
async def serving(**options):
    server = EnvServer([Quick], port=0, drain_s=0.0, **{"token": TOKEN, **options})
    await server.start()
    try:
        async with EnvClient.connect(server.url, token=server_token(options)) as operator:
            yield server, operator
    finally:
        await server.stop()


def server_token(options):
    return options.get("token", TOKEN)


async def status(url, session, token):
    """Return status and error message of a request for a session."""
    async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=60) as http:
        headers = {"authorization": f"Bearer {token}"}
        answer = await http.get(f"/v1/sessions/{session.session_id}", headers=headers)
    return answer.status_code, answer.json().get("error", {}).get("message", "")


async def renewed(url, session, token=TOKEN):
    async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=60) as http:
        headers = {"authorization": f"Bearer {token}"}
        answer = await http.post(f"/v1/sessions/{session.session_id}/token", headers=headers)
    return answer.status_code, answer.json()


async def test_operator_token_cannot_be_guessed_from_an_agent_token():
    """No guess of a dictionary attack reproduces the MAC. It once found T0K in 0.16 s."""
    async with serving() as (_, operator):
        token = (await operator.open("quick")).agent_token
    text, _, mac = token.removeprefix("agent.").rpartition(".")
    session_id = text.rsplit(".", 2)[0]
    for guess in ("T0K", "secret"):
        for message in (text, session_id, token.rpartition(".")[0]):
            right = urlsafe_b64encode(digest(guess.encode(), message.encode(), sha256)).rstrip(b"=").decode()
            assert right != mac
    assert AgentTokens("T0K").read(token) is None  # the operator token alone does not verify it


def test_every_token_has_its_own_id_and_expiry():
    clock = Clock()
    tokens = AgentTokens(TOKEN, lifetime_s=60, clock=clock)
    first, second = tokens.read(tokens.issue("a.b")), tokens.read(tokens.issue("a.b"))
    assert first.token_id != second.token_id
    assert (first.session_id, first.expiry) == ("a.b", int(clock.now) + 60)


@pytest.mark.parametrize("part", [0, 1, 2, 3])
def test_every_part_of_a_token_is_signed(part):
    tokens = AgentTokens(TOKEN)
    parts = tokens.issue("ab").removeprefix("agent.").split(".")
    parts[part] = "9" * len(parts[part])
    assert tokens.read("agent." + ".".join(parts)) is None


def test_token_expires():
    clock = Clock()
    tokens = AgentTokens(TOKEN, lifetime_s=60, clock=clock)
    shown = tokens.issue("a.b")
    grant = tokens.read(shown)
    clock.now += 61
    for check in (grant.check, lambda: tokens.read(shown)):
        with pytest.raises(Unauthorized, match="has expired; the operator can issue another"):
            check()
    assert tokens.read(tokens.issue("a.b")) is not None


def test_revocations_are_forgotten_once_they_no_longer_matter():
    clock = Clock()
    tokens = AgentTokens(TOKEN, lifetime_s=60, clock=clock)
    for number in range(100):
        tokens.close(str(number))
        asyncio.run(tokens.renew(f"x{number}"))
    clock.now += CLOSED_S + 1
    tokens.close("last")
    asyncio.run(tokens.renew("last"))
    assert (list(tokens._closed), list(tokens._renewed)) == (["last"], ["last"])


async def test_lifetime_is_a_limit_of_the_server():
    async with serving(limits=Limits.parse(["agent_token_s=0.001"])) as (server, operator):
        session = await operator.open("quick")
        assert await status(server.url, session, session.agent_token) == (
            401,
            "this agent token has expired; the operator can issue another",
        )


async def test_renewed_token_replaces_earlier_tokens():
    async with serving() as (server, operator):
        session, other = await operator.open("quick"), await operator.open("quick")
        code, answer = await renewed(server.url, session)
        assert code == 201
        assert (await status(server.url, session, answer["agent_token"]))[0] == 200
        assert await status(server.url, session, session.agent_token) == (
            401,
            "this agent token was revoked",
        )
        assert (await status(server.url, other, other.agent_token))[0] == 200
        assert (await renewed(server.url, session, answer["agent_token"]))[0] == 403
        unknown = ClientSession(None, session.info.model_copy(update={"session_id": "x.y"}))
        code, answer = await renewed(server.url, unknown)
        assert (code, answer["error"]["type"]) == (404, UnknownSession.type)


async def test_operator_can_revoke_all_tokens_of_an_agent_and_its_session_continues():
    async with serving() as (server, operator):
        session, other = await operator.open("quick"), await operator.open("quick")
        own = f"{server.url}/v1/sessions/{session.session_id}/token"
        _, answer = await renewed(server.url, session)
        async with httpx.AsyncClient(trust_env=False) as http:
            agent, owner = ({"authorization": f"Bearer {t}"} for t in (answer["agent_token"], TOKEN))
            assert (await http.delete(own, headers=agent)).status_code == 403
            for _ in range(2):
                revoked = await http.delete(own, headers=owner)
                assert (revoked.status_code, revoked.content) == (204, b"")
            unknown = await http.delete(own.replace(session.session_id, "x.y"), headers=owner)
            assert (unknown.status_code, unknown.json()["error"]["type"]) == (404, UnknownSession.type)
        for token in (session.agent_token, answer["agent_token"]):
            assert await status(server.url, session, token) == (401, "this agent token was revoked")
        assert (await status(server.url, other, other.agent_token))[0] == 200
        assert (await session.step("Hello.")).seq == 1
        _, answer = await renewed(server.url, session)
        assert (await status(server.url, session, answer["agent_token"]))[0] == 200


async def test_closing_a_session_revokes_its_token():
    async with serving() as (server, operator):
        session = await operator.open("quick")
        await session.close()
        assert (await status(server.url, session, session.agent_token))[0] == 401


async def test_open_websocket_of_an_agent_ends_with_its_token():
    async with serving() as (server, operator):
        session = await operator.open("quick")
        headers = {"authorization": f"Bearer {session.agent_token}"}
        call = json.dumps({"id": 1, "call": "info", "session_id": session.session_id})
        async with connect(
            server.url.replace("http", "ws", 1) + "/v1/ws", additional_headers=headers
        ) as agent:
            await agent.send(call)
            assert "result" in json.loads(await agent.recv())
            await renewed(server.url, session)
            await agent.send(call)
            assert json.loads(await agent.recv())["error"]["type"] == "unauthorized"


async def test_server_without_a_token_cannot_renew_tokens():
    async with serving(token=None) as (server, operator):
        code, answer = await renewed(server.url, await operator.open("quick"))
        assert (code, answer["error"]["type"]) == (501, NotSupported.type)


async def test_controllers_of_a_fleet_accept_and_revoke_each_others_tokens(redis):
    async with Site(store=RedisStore(redis.url)) as site, Site(store=RedisStore(redis.url)) as other:
        await site.serve(Quick, controllers=[other.controller.url])
        await until(lambda: other.fleet.servers)
        session = await site.client.open("quick")
        there = other.controller.url
        assert (await status(there, session, session.agent_token))[0] == 200
        _, answer = await renewed(site.controller.url, session, "secret")
        assert (await status(there, session, answer["agent_token"]))[0] in (200, 401)
        await other.controller._tokens._synchronize(other.fleet.store)
        assert (await status(there, session, answer["agent_token"]))[0] == 200
        assert (await status(there, session, session.agent_token))[0] == 401
        kept = await site.fleet.store.agent_key("another")
        with_key_only = AgentTokens("guess")
        with_key_only._use(kept)  # an attacker who can read Redis
        assert site.controller._tokens.read(with_key_only.issue(session.session_id)) is None


async def test_revocations_expire_in_redis_and_malformed_ones_are_removed(redis):
    store = RedisStore(redis.url)
    await store.revoke_tokens("a", "x", 100.0)
    await store.revoke_tokens("b", "y", 200.0)
    await store._redis.hset(store._key("tokens", "revoked"), "c", "garbage")
    assert await store.revoked_tokens(150.0) == {"b": ("y", 200.0)}
    assert list(await store._redis.hgetall(store._key("tokens", "revoked"))) == ["b"]
    await store.aclose()


async def test_key_can_come_from_the_environment(monkeypatch):
    monkeypatch.setenv(AGENT_KEY, "0123456789abcdef")
    session_id = AgentTokens(TOKEN).read(AgentTokens(TOKEN).issue("a.b")).session_id
    assert session_id == "a.b"  # as after a restart
    monkeypatch.setenv(AGENT_KEY, "short")
    with pytest.raises(ServeError, match="AGENTRL_AGENT_KEY is too easy to guess"):
        AgentTokens(TOKEN)


@pytest.mark.parametrize(
    ("token", "what"), [(None, "needs a token"), ("wrong", "does not accept this token")]
)
async def test_unauthorized_error_explains_how_to_give_a_token(monkeypatch, token, what):
    monkeypatch.delenv("AGENTRL_TOKEN", raising=False)
    async with serving() as (server, _):
        for scheme in ("http", "ws"):
            async with EnvClient.connect(server.url.replace("http", scheme, 1), token=token) as client:
                with pytest.raises(WireError, match=what) as refused:
                    await client.open("quick")
            assert isinstance(refused.value, Unauthorized)
            for way in ("--token-file", "token=", "AGENTRL_TOKEN"):
                assert way in str(refused.value)
            assert "subprotocol" not in str(refused.value)


@pytest.mark.parametrize("key", ["", "guessed"])
async def test_holder_of_the_link_token_cannot_take_the_id_of_another_server(key):
    async with Site() as site:
        server = await site.serve(Quick)
        session = await site.client.open("quick")
        await server._links.stop()  # the id is either free on the controller or taken
        headers = {"authorization": f"Bearer {server._links._token}"}
        hello = {
            "server_id": server.pool.server_id,
            "server_key": key,
            "tasks": [],
            "capacity": 1,
            "sessions": [{"session_id": session.session_id, "task": "quick"}],
        }
        address = site.controller.url.replace("http", "ws", 1) + "/v1/link"
        async with connect(address, additional_headers=headers) as line:
            await line.send(json.dumps({"hello": hello}))
            with pytest.raises(ConnectionClosedError, match="the key does not belong to this server's id"):
                await line.recv()


async def test_server_takes_a_new_key_with_a_new_id():
    async with Site() as site:
        server = await site.serve(Quick)
        before = server.pool.server_id, server.pool.server_key
        await server.pool.abandon()
        assert server.pool.server_id != before[0]
        assert server.pool.server_key != before[1]
