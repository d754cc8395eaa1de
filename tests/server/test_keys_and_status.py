"""API keys on every route, counters, the status page, the OpenAPI document."""

from __future__ import annotations

import ast
import base64
import inspect
import re
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from outrider import LLM
from outrider.commands.serve import LOOPBACK_HOSTS
from outrider.errors import ParameterError
from outrider.server import auth
from outrider.server.auth import OPEN_PATHS, KeyGate
from outrider.server.openapi import document
from outrider.server.routes_openai import OpenAIRoutes
from outrider.server.routes_status import StatusRoutes
from outrider.server.routes_tokens import TokenRoutes
from outrider.server.schemas import WITHOUT_EFFECT, ChatRequest, CompletionRequest
from outrider.server.settings import ServerSettings
from tests.server.live import NAME, LiveServer, chat_body, envelope

KEY, OTHER_KEY = "first-key", "second-key"


@pytest.fixture(scope="module")
def locked(llm: LLM) -> Iterator[LiveServer]:
    own = llm.with_speculation(llm.speculation)
    with LiveServer(own, api_keys=(KEY, OTHER_KEY)) as live:
        yield live


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def all_routes(server: LiveServer) -> list[tuple[str, str]]:
    service = server.service
    routes = [
        *OpenAIRoutes(service).routes(),
        *TokenRoutes(service).routes(),
        *StatusRoutes(service).routes(),
    ]
    return [
        (method, route.path.replace("{name:path}", NAME))
        for route in routes
        for method in route.methods or ()
        if method != "HEAD"
    ]


def test_every_route_but_two_needs_a_key(locked: LiveServer) -> None:
    import httpx

    routes = all_routes(locked)
    opened = set()
    for method, path in [*routes, ("GET", "/nothing"), ("POST", "/health/x")]:
        response = httpx.request(method, locked.url + path, verify=False)
        if response.status_code == 401:
            assert "invalid_api_key" == envelope(response)["code"]
            assert "WWW-Authenticate" in response.headers
        else:
            opened.add(path)

    assert len(routes) >= 12
    assert {"/health", "/ready"} == opened == set(OPEN_PATHS)


@pytest.mark.parametrize(
    "value",
    [
        f"Bearer {KEY}",
        f"bearer  {OTHER_KEY}",
        "Basic " + base64.b64encode(f"anybody:{KEY}".encode()).decode(),
    ],
)
def test_a_valid_key_opens(locked: LiveServer, value: str) -> None:
    assert 200 == locked.get("/v1/models", headers={"Authorization": value}).status_code


@pytest.mark.parametrize(
    "value",
    [
        "",
        "Bearer",
        f"Bearer {KEY}x",
        f"Bearer {KEY[:-1]}",
        KEY,
        f"Token {KEY}",
        "Basic !!!",
        "Basic " + base64.b64encode(KEY.encode()).decode(),
        "Bearer \xff".encode("latin-1"),
    ],
)
def test_any_other_key_does_not(locked: LiveServer, value: str | bytes) -> None:
    response = locked.get("/v1/models", headers=[("Authorization", value)])

    assert 401 == response.status_code
    assert KEY not in response.text


def test_keys_are_compared_in_constant_time_only() -> None:
    """No == on keys or digests anywhere in the module."""
    compared = [
        ast.unparse(node)
        for node in ast.walk(ast.parse(inspect.getsource(auth)))
        if isinstance(node, ast.Compare)
        and any(isinstance(operator, ast.Eq | ast.NotEq) for operator in node.ops)
    ]

    assert all(re.search(r"scheme|type", text) for text in compared), compared
    assert "compare_digest" in inspect.getsource(KeyGate)


def test_each_key_has_a_salt_of_its_own_and_each_server_others() -> None:
    app = SimpleNamespace()
    gate, other = KeyGate(app, [KEY, OTHER_KEY]), KeyGate(app, [KEY])  # type: ignore[arg-type]

    assert gate._salt(KEY) == gate._salt(KEY)
    assert 3 == len({gate._salt(KEY), gate._salt(OTHER_KEY), other._salt(KEY)})
    assert "" == KeyGate(app, [])._salt("anything")  # type: ignore[arg-type]


def test_a_prefix_is_reused_with_one_key_and_not_with_another(locked: LiveServer) -> None:
    def hits_after(key: str) -> int:
        body = chat_body("The ford and the bridge that was down and the better way", max_tokens=2)
        response = locked.post("/v1/chat/completions", body, headers=bearer(key))
        assert 200 == response.status_code
        texts.append(response.json()["choices"][0]["message"]["content"])
        locked.wait_until_idle()
        return locked.stats().prefix_hit_tokens

    texts: list[str] = []
    first, other, again = hits_after(KEY), hits_after(OTHER_KEY), hits_after(KEY)

    assert first == other
    assert other < again
    assert 1 == len(set(texts))


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200),
        ("LOCALHOST:8000", 200),
        ("127.0.0.1:1", 200),
        ("[::1]:8000", 200),
        ("evil.example", 403),
        ("localhost.evil.example", 403),
        ("127.0.0.1@evil.example", 403),
        ("", 403),
    ],
)
def test_a_local_server_answers_only_to_its_own_names(own_llm: LLM, host: str, status: int) -> None:
    with LiveServer(own_llm, allowed_hosts=LOOPBACK_HOSTS) as server:
        response = server.get("/v1/models", headers={"Host": host})

        assert status == response.status_code
        if status == 403:
            assert "wrong_host" == envelope(response)["code"]


@pytest.mark.parametrize("field", WITHOUT_EFFECT)
def test_a_field_without_effect_has_none(server: LiveServer, field: str) -> None:
    value = {"a": "b"} if field == "metadata" else "somebody"
    fields = {"temperature": 1, "seed": 3}

    expected = server.chat(**fields).json()["choices"]
    assert expected == server.chat(**fields, **{field: value}).json()["choices"]


@pytest.mark.parametrize("key", ["", "a\nb", "ключ", "a\x00"])
def test_a_key_that_no_header_can_carry_is_refused(key: str) -> None:
    with pytest.raises(ParameterError, match="api_key"):
        ServerSettings(model_name=NAME, api_keys=(key,))


def samples(server: LiveServer) -> dict[str, float]:
    lines = server.get("/metrics").text.splitlines()
    return {
        line.rpartition(" ")[0]: float(line.rpartition(" ")[2])
        for line in lines
        if line and not line.startswith("#")
    }


def test_counters_have_vllms_names_and_follow_the_answers(server: LiveServer) -> None:
    prefix, label = "vllm:spec_decode_num_", f'{{model_name="{NAME}"}}'
    server.wait_until_idle()
    before = samples(server)
    answer = server.chat("around it and around it and", max_tokens=80, ignore_eos=True).json()
    server.wait_until_idle()
    after = samples(server)
    counts = answer["speculative"]

    assert 0 < counts["accepted"] < counts["drafted"]
    for name, expected in (
        (f"{prefix}drafts_total{label}", counts["steps"]),
        (f"{prefix}draft_tokens_total{label}", counts["drafted"]),
        (f"{prefix}accepted_tokens_total{label}", counts["accepted"]),
        ("outrider_emitted_tokens_total", 80),
        ('outrider_requests_total{finish_reason="length"}', 1),
    ):
        assert expected == after[name] - before.get(name, 0), name
    per_position = f"{prefix}accepted_tokens_per_pos_total"
    by_place = sum(
        value - before.get(name, 0)
        for name, value in after.items()
        if name.startswith(per_position)
    )
    assert counts["accepted"] == by_place
    assert 0 == after["outrider_slots_used"]


def test_a_made_up_path_is_no_label(server: LiveServer) -> None:
    for number in range(5):
        server.get(f"/made-up/{number}")

    assert "made-up" not in server.get("/metrics").text


def test_the_status_page_fetches_nothing_from_elsewhere(server: LiveServer) -> None:
    page = server.get("/")

    assert page.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert [] == re.findall(r"https?://|src=|href=|@import", page.text)
    assert "innerHTML" not in page.text


def test_the_status_page_shows_only_what_the_status_has(server: LiveServer) -> None:
    status = server.get("/status.json").json()
    used = set(re.findall(r"now\.(\w+)", server.get("/").text))

    assert used <= set(status)
    assert "ready" == status["state"]
    assert status["slots_total"] > 0
    assert {"prefill", "draft", "verify", "rest"} == set(status["step_s"])


def test_the_document_names_every_route_and_every_field(server: LiveServer) -> None:
    found = server.get("/openapi.json").json()
    paths = {path.replace(NAME, "{name}") for _, path in all_routes(server)}
    schemas = found["components"]["schemas"]

    assert paths - {"/", "/openapi.json"} == set(found["paths"])
    assert document(NAME) == found
    for body in (ChatRequest, CompletionRequest):
        assert set(body.model_fields) == set(schemas[body.__name__]["properties"])
        assert schemas[body.__name__]["additionalProperties"] is False


def test_health_and_ready_are_open_and_short(server: LiveServer) -> None:
    assert {"status": "ok"} == server.get("/health").json()
    assert {"status": "ready"} == server.get("/ready").json()
