"""A short run of ``make fuzz``, and the OpenAPI document."""

import asyncio

import pytest

from agentrl_env.server.app import create_app
from agentrl_env.server.telemetry.metrics import Metrics
from agentrl_env.session.pool import SessionPool
from agentrl_env.wire import SOCKET_PATH, OpenRequest
from tests.env.tasks import Quick, ask_expert, fork_session
from tests.fuzz.run import fuzz
from tests.fuzz.tasks import Fuzzed

BRIDGES = ("/api/", "/mcp/", "/openenv/")
"""Paths of other protocols, which have their own documents."""


def document(**options):
    return create_app(SessionPool([Quick]), Metrics(), **options).openapi()


@pytest.mark.slow
def test_fuzzing_finds_no_failures():
    account = fuzz(300, seed=7)
    assert account["ok"], account
    assert account["requests"] == 300
    assert set(account["sent"]) == {"schemathesis", "raw_http", "raw_frames"}


async def test_openapi_document_has_exactly_the_routes():
    app = create_app(SessionPool([Quick]), Metrics())
    routes = {
        (method, route.path)
        for route in app.router.routes
        for method in getattr(route, "methods", None) or ()
        if method != "HEAD" and route.path not in (SOCKET_PATH, "/openapi.json")
        if not route.path.startswith(BRIDGES)
    }
    paths = document(token="secret")["paths"]
    assert routes == {(method.upper(), path) for path, methods in paths.items() for method in methods}


def test_openapi_document_requires_a_token_for_the_same_routes_as_the_server():
    paths = document(token="secret")["paths"]
    assert paths["/v1/step"]["post"]["security"] == [{"bearer": []}]
    assert "security" not in paths["/health"]["get"]
    assert "security" not in document()["paths"]["/v1/step"]["post"]


@pytest.mark.parametrize("number", [1, 20])
async def test_experts_and_forks_can_run_concurrently(number):
    pool = SessionPool([Fuzzed], oracle=True)
    session_id = (await pool.open(OpenRequest(task="fuzzed"))).session_id
    async with asyncio.timeout(60):
        experts = (ask_expert(pool, session_id) for _ in range(number))
        forks = (fork_session(pool, session_id) for _ in range(number))
        await asyncio.gather(*experts, *forks)
    assert pool.open_sessions == 1 + number
    await pool.aclose()
