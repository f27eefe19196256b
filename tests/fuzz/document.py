"""Requests that schemathesis makes from the OpenAPI document; the answers must be as it says."""

from __future__ import annotations

from random import Random
from typing import Any

import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from schemathesis import GenerationMode
from schemathesis.checks import CHECKS
from schemathesis.core.failures import FailureGroup

from tests.fuzz.account import Account

ANSWER_S = 20.0
ROUND = 200
"""Requests of one operation in a row."""
CHECKED = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
    "allow_header_conformance",
)


def follow_document(url: str, number: int, seed_: int, session_ids: list[str], account: Account) -> None:
    """Send so many requests, sound and unsound ones in turns, of every operation of the document."""
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
    operations = [result.ok() for result in schema.get_all_operations()]
    random, end, turn = Random(seed_), account.requests + number, 0
    checks = CHECKS.get_by_names(list(CHECKED))
    with requests.Session() as http:
        http.trust_env = False
        while account.requests < end:
            operation = operations[turn % len(operations)]
            mode = (GenerationMode.POSITIVE, GenerationMode.NEGATIVE)[turn // len(operations) % 2]
            turn += 1
            if mode is GenerationMode.NEGATIVE and not (operation.body or operation.query):
                continue
            few = 1 if not (operation.body or operation.query or operation.path_parameters) else ROUND
            most = min(few, end - account.requests)
            _play(operation.as_strategy(mode), most, random, session_ids, http, checks, account)


def _play(
    strategy: Any,
    most: int,
    random: Random,
    session_ids: list[str],
    http: requests.Session,
    checks: list[Any],
    account: Account,
) -> None:
    begun = account.requests

    @seed(random.randrange(2**32))
    @settings(
        max_examples=most,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=strategy)
    def play(case: Any) -> None:
        if account.requests - begun >= most:
            return
        if "id" in case.path_parameters and random.random() < 0.7:
            case.path_parameters["id"] = random.choice(session_ids)
        if isinstance(case.body, dict) and "task" in case.body and random.random() < 0.5:
            case.body["task"] = "fuzzed"
        account.sent["schemathesis"] += 1
        try:
            response = case.call(session=http, timeout=ANSWER_S)
        except requests.Timeout:
            account.note_hang(case.as_curl_command())
            return
        account.note_status(response.status_code, case.as_curl_command())
        try:
            case.validate_response(response, checks=checks)
        except FailureGroup as group:
            account.note_unlike(f"{group.exceptions[0].message}: {case.as_curl_command()}")

    play()
