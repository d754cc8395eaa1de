"""Whatever the OpenAPI document allows, and what it does not: no answer is our fault.

``OUTRIDER_FUZZ_CASES`` sets how many requests are made up in all; `make fuzz` makes many.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, Verbosity, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
)

from outrider import LLM, SpeculationConfig
from tests.server.conftest import ENGINE
from tests.server.live import LiveServer

NUM_CASES = int(os.environ.get("OUTRIDER_FUZZ_CASES", "2000"))
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]
# Shares of all cases: the routes that take much get much.
SHARES = {
    "/v1/chat/completions": 0.45,
    "/v1/completions": 0.3,
    "/tokenize": 0.1,
    "/detokenize": 0.08,
}


@pytest.fixture(scope="module")
def short(checkpoint: Path, cache_folder: Path) -> Iterator[LiveServer]:
    """A server of little context: an answer without a limit is short too."""
    config = replace(ENGINE, max_model_len=48)
    llm = LLM(checkpoint, engine=config, speculation=SpeculationConfig(adaptive=False))
    with LiveServer(llm) as live:
        yield live


def validator(operation: Any, document: dict[str, Any]) -> jsonschema_rs.Validator | None:
    """What the document says of this operation's body; None where it has none."""
    if operation.method != "post":
        return None
    body = document["paths"][operation.path]["post"]["requestBody"]
    schema = body["content"]["application/json"]["schema"]
    return jsonschema_rs.validator_for({**schema, "components": document["components"]})


def exercise(
    operation: Any,
    mode: GenerationMode,
    count: int,
    server: LiveServer,
    bodies: jsonschema_rs.Validator | None,
) -> Counter:
    """Send ``count`` made-up requests; the statuses they got."""
    statuses: Counter = Counter()
    with requests.Session() as session:

        @settings(
            max_examples=count,
            database=None,
            deadline=None,
            derandomize=True,
            phases=[Phase.generate],
            verbosity=Verbosity.quiet,
            suppress_health_check=list(HealthCheck),
        )
        @given(operation.as_strategy(generation_mode=mode))
        def send(case: Any) -> None:
            response = case.call(base_url=server.url, session=session, timeout=60)
            statuses[response.status_code] += 1
            checks = list(CHECKS)
            # What violates one form of a message on purpose may be another one by accident.
            if mode is GenerationMode.NEGATIVE and not is_valid(bodies, response.request.body):
                checks.append(negative_data_rejection)
            case.validate_response(response, checks=checks)

        send()
    return statuses


def is_valid(bodies: jsonschema_rs.Validator | None, sent: bytes | str | None) -> bool:
    """Whether a body is what the document allows after all."""
    try:
        return bodies is not None and bodies.is_valid(json.loads(sent or b""))
    except ValueError:
        return False


@pytest.mark.timeout(0 if NUM_CASES > 5000 else 900)
def test_no_request_is_answered_with_a_fault_of_ours(short: LiveServer) -> None:
    schema = schemathesis.openapi.from_url(short.url + "/openapi.json")
    document = short.get("/openapi.json").json()
    expected = short.chat("a", temperature=1, seed=1).json()["choices"]
    operations = [found.ok() for found in schema.get_all_operations()]
    seen: Counter = Counter()
    for operation in operations:
        share = SHARES.get(operation.path, 0.01)
        modes = [GenerationMode.POSITIVE]
        if operation.method == "post":
            modes.append(GenerationMode.NEGATIVE)
        for mode in modes:
            count = max(1, round(NUM_CASES * share / len(modes)))
            seen += exercise(operation, mode, count, short, validator(operation, document))
    short.wait_until_idle()

    assert len(operations) >= 10
    assert sum(seen.values()) >= 0.9 * NUM_CASES
    assert seen[200] > 0.05 * NUM_CASES
    assert seen[400] > 0.1 * NUM_CASES
    assert 0 == sum(count for status, count in seen.items() if status >= 500)
    assert expected == short.chat("a", temperature=1, seed=1).json()["choices"]
