"""Asks a server who it is before anything is measured, and refuses what cannot be measured.

Owns the questions: which model, which engine, whether it streams, whether it counts tokens chunk by
chunk, and what it says about its own exactness. Used by :mod:`outrider.bench.run` once per arm.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import orjson

from outrider.bench.client import Client, Endpoint
from outrider.bench.environment import API_KEY
from outrider.bench.records import Answer, Losslessness, SamplingRecord
from outrider.bench.sse import printable
from outrider.bench.workloads import Question
from outrider.errors import EndpointError

_LEVEL = re.compile(r"exactness (\S+)")
_PRECISION = re.compile(r"\b(bfloat16|float16|float32)\b")
# What servers call their own description; the first that answers with JSON is kept whole.
_ABOUT = ("/status.json", "/version", "/get_server_info", "/server_info")
_EXACT_LEVEL = "L2"


@dataclass(frozen=True, slots=True, kw_only=True)
class Probed:
    """A server that can be measured."""

    endpoint: Endpoint
    engine: str | None
    engine_version: str | None
    precision: str | None
    losslessness: Losslessness
    losslessness_detail: str
    details: Mapping[str, Any]


async def probe(
    client: Client, arm: str, endpoint: Endpoint, question: Question, sampling: SamplingRecord
) -> Probed:
    """Identify the server, and have it write two tokens.

    Without a model's name the only one that is served is taken.

    Raises:
        EndpointError: it is down, hangs, is no OpenAI-compatible server, lacks the model, refuses
            the sampling settings, does not stream, or says no token counts.
    """
    row = await _model(client, arm, endpoint)
    endpoint = replace(endpoint, model=str(row["id"]))
    endpoint = await _streaming(client, arm, endpoint, question, sampling)
    about = await _about(client, endpoint)
    fingerprint = printable(str(about.get("fingerprint", "")))
    level = _LEVEL.search(fingerprint)
    precision = _PRECISION.search(fingerprint)
    engine = row.get("owned_by")
    version = about.get("version")
    is_exact = engine == "outrider" and level is not None and level[1] == _EXACT_LEVEL
    return Probed(
        endpoint=endpoint,
        engine=printable(str(engine)) if engine else None,
        engine_version=printable(str(version)) if version else None,
        precision=precision[1] if precision else None,
        losslessness=Losslessness.EXACT if is_exact else Losslessness.NOT_AUDITED,
        losslessness_detail=fingerprint if level else "the server says nothing about exactness",
        details={"model": row, "about": about, "running_usage": endpoint.asks_running_usage},
    )


async def _model(client: Client, arm: str, endpoint: Endpoint) -> Mapping[str, Any]:
    """The served model's row of ``/v1/models``."""
    where = f"arm {arm}: {endpoint.url}/v1/models"
    status, body, error = await client.get(endpoint, "/v1/models")
    if error is not None:
        raise EndpointError(f"arm {arm}: {error}")
    if status in (401, 403):
        raise EndpointError(f"{where} wants a key (HTTP {status}); set {API_KEY}")
    rows = _json(body).get("data") if status == 200 else None
    if not isinstance(rows, list):
        shown = printable(body[:1000])[:120]
        raise EndpointError(
            f"{where} answers HTTP {status} and no list of models ({shown!r}); give the address of "
            "an OpenAI-compatible server, without /v1"
        )
    served = [row for row in rows if isinstance(row, Mapping) and isinstance(row.get("id"), str)]
    names = [printable(row["id"]) for row in served]
    if endpoint.model:
        if endpoint.model not in {row["id"] for row in served}:
            raise EndpointError(
                f"{where} serves {', '.join(names) or 'nothing'} and not {endpoint.model!r}; give "
                "one of them with --served-model"
            )
        return next(row for row in served if row["id"] == endpoint.model)
    if len(served) != 1:
        raise EndpointError(
            f"{where} serves {', '.join(names) or 'nothing'}; choose one with --served-model"
        )
    return served[0]


async def _streaming(
    client: Client, arm: str, endpoint: Endpoint, question: Question, sampling: SamplingRecord
) -> Endpoint:
    """The endpoint with the best ways to count and compare tokens that the server accepts.

    Strict servers refuse a field that they do not know; lax ones ignore it, which the answers show.
    """
    short = replace(sampling, max_tokens=2)
    for has_usage, has_ids in ((True, True), (True, False), (False, True), (False, False)):
        asking = replace(endpoint, asks_running_usage=has_usage, asks_token_ids=has_ids)
        answer = await client.ask(asking, question, short, sampling.seed)
        if answer.error is None and _counts(answer):
            return asking
        if answer.error is not None and (answer.status is None or answer.status < 400):
            break  # nothing to do with what was asked for: it hangs, drops, or is no such server
    if answer.error is not None:
        hint = "; leave out --ignore-eos" if "ignore_eos" in answer.error else ""
        where = "" if answer.error.startswith(endpoint.url) else f"{endpoint.url}: "
        raise EndpointError(f"arm {arm}: {where}{answer.error}{hint}")
    raise EndpointError(
        f"arm {arm}: {endpoint.url} streams without usage though stream_options.include_usage "
        "asks for it, so no token can be counted; use a server that reports usage"
    )


def _counts(answer: Answer) -> bool:
    return answer.completion_tokens is not None and answer.completion_tokens > 0


async def _about(client: Client, endpoint: Endpoint) -> dict[str, Any]:
    for path in _ABOUT:
        status, body, _ = await client.get(endpoint, path)
        found = _json(body) if status == 200 else {}
        if found:
            return found
    return {}


def _json(body: str) -> dict[str, Any]:
    """The object in a body; empty for anything else (HTML, a list, nothing)."""
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError:
        return {}
    return value if isinstance(value, dict) else {}
