"""What the commands say about one finished answer: a JSON document, a table, or a line.

Owns field names and layout; every figure comes with the completion itself. Used by
:mod:`outrider.cli` and :mod:`outrider.commands.chat`.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rich.table import Table

from outrider.commands import console
from outrider.types import Completion

SCHEMA_VERSION = 1


def completion_json(
    completion: Completion, model: str, fingerprint: dict[str, object]
) -> dict[str, Any]:
    """The JSON document of one answer."""
    speculation, usage = completion.speculation, completion.usage
    return {
        "schema_version": SCHEMA_VERSION,
        "model": model,
        "text": completion.text,
        "token_ids": list(completion.token_ids),
        "finish_reason": completion.finish_reason.value,
        "error": completion.error,
        "seed": completion.seed,
        "usage": {**asdict(usage), "total_tokens": usage.total_tokens},
        "speculation": {
            "method": completion.method,
            "drafted": speculation.drafted,
            "accepted": speculation.accepted,
            "verify_steps": speculation.verify_steps,
            "acceptance_length": speculation.acceptance_length,
            "per_position": speculation.per_position,
        },
        "timing": {
            **asdict(completion.timing),
            "decode_tokens_per_s": completion.decode_rate,
            "draft_pass_over_target_pass": completion.draft_cost,
        },
        "fingerprint": fingerprint,
    }


def stats_table(completion: Completion) -> Table:
    """Counts and times of one answer, to print on stderr."""
    speculation, timing = completion.speculation, completion.timing
    rate, cost = completion.decode_rate, completion.draft_cost
    per_position = " ".join(f"{share:.2f}" for share in speculation.per_position)
    rows = [
        ("prompt tokens", str(completion.usage.prompt_tokens)),
        ("answer tokens", str(completion.usage.completion_tokens)),
        ("first token after", console.format_seconds(timing.first_token_s)),
        ("tokens/s after the first", "-" if rate is None else f"{rate:.1f}"),
        ("total", console.format_seconds(timing.total_s)),
        ("drafting / verifying", f"{timing.draft_s:.2f} s / {timing.verify_s:.2f} s"),
        ("one draft pass / one target pass", "-" if cost is None else f"{cost:.3f}"),
        ("method", completion.method),
        ("verify steps", str(speculation.verify_steps)),
        ("drafted / accepted", f"{speculation.drafted} / {speculation.accepted}"),
        ("acceptance length", f"{speculation.acceptance_length:.2f}"),
        ("accepted at depth 1, 2, ...", per_position or "-"),
        ("finished by", completion.finish_reason.value),
        ("fingerprint", completion.fingerprint),
    ]
    return console.table(("", ""), rows, numbers_from=2)


def answer_line(completion: Completion) -> str:
    """What one answer took, in a line."""
    rate = completion.decode_rate
    parts = [
        f"{completion.usage.completion_tokens} tokens",
        f"first after {console.format_seconds(completion.timing.first_token_s)}",
        f"then {rate:.1f} tokens/s" if rate is not None else "",
        f"acceptance length {completion.speculation.acceptance_length:.2f} ({completion.method})"
        if completion.speculation.verify_steps
        else completion.method,
        f"finished by {completion.finish_reason.value}",
    ]
    return " · ".join(part for part in parts if part)
