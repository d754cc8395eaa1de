"""The figures of an evaluation, as they are kept and shown.

Owns pooled counts and their table; every figure comes from :mod:`outrider.training.evaluate`. The
command line prints :meth:`EvaluationReport.rows`, a run folder keeps ``to_json``.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from outrider.errors import CheckpointError
from outrider.types import SpeculationStats

SCHEMA_VERSION = 1
ALL = "all"
"""The category under which all texts are pooled."""


@dataclass(frozen=True, slots=True)
class Acceptance:
    """What one setting reached at one temperature on the texts of one category.

    ``num_loops`` texts fell into a repetition loop and are in none of the other figures;
    ``num_tokens`` are those of the ``num_texts`` that count.
    """

    setting: str
    temperature: float
    category: str
    num_texts: int
    num_loops: int
    num_tokens: int
    stats: SpeculationStats

    @property
    def acceptance_length(self) -> float:
        """Tokens per verify step, bonus included, over all steps of all texts."""
        return self.stats.acceptance_length

    def to_json(self) -> dict[str, Any]:
        """Plain values for a JSON document."""
        stats = self.stats
        return {
            "setting": self.setting,
            "temperature": self.temperature,
            "category": self.category,
            "acceptance_length": stats.acceptance_length,
            "per_position": stats.per_position,
            "num_texts": self.num_texts,
            "num_loops": self.num_loops,
            "num_tokens": self.num_tokens,
            "verify_steps": stats.verify_steps,
            "drafted": stats.drafted,
            "accepted": stats.accepted,
            "rejected": stats.drafted - stats.accepted,
            "accepted_at": stats.accepted_at,
        }

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Acceptance:
        """What :meth:`to_json` described; a ``KeyError`` or ``TypeError`` where it did not."""
        stats = SpeculationStats(
            verify_steps=int(fields["verify_steps"]),
            drafted=int(fields["drafted"]),
            accepted=int(fields["accepted"]),
            accepted_at=[int(count) for count in fields["accepted_at"]],
        )
        return cls(
            setting=str(fields["setting"]),
            temperature=float(fields["temperature"]),
            category=str(fields["category"]),
            num_texts=int(fields["num_texts"]),
            num_loops=int(fields["num_loops"]),
            num_tokens=int(fields["num_tokens"]),
            stats=stats,
        )


@dataclass(frozen=True, slots=True)
class EvaluationReport:
    """Everything that was measured, with its conditions.

    Attributes:
        acceptances: per setting and temperature, all categories together first.
        differing: (setting, temperature, prompt id) of texts that plain decoding gave otherwise;
            None where the texts were replayed and there was nothing to compare.
        skipped: ids of prompts that did not fit the context.
        conditions: what the figures hold for.
        elapsed_s: seconds it took.
    """

    acceptances: tuple[Acceptance, ...]
    differing: tuple[tuple[str, float, str], ...] | None
    skipped: tuple[str, ...]
    conditions: dict[str, Any]
    elapsed_s: float

    @property
    def is_lossless(self) -> bool | None:
        """Every text was plain decoding's own; None where that was not looked at."""
        return None if self.differing is None else not self.differing

    def by_category(self, setting: str, temperature: float) -> dict[str, float]:
        """Acceptance lengths of one setting, ``ALL`` among them, where any text counts."""
        return {
            found.category: found.acceptance_length
            for found in self.acceptances
            if (found.setting, found.temperature) == (setting, temperature) and found.num_texts
        }

    def rows(self) -> list[list[str]]:
        """The table, headings first: a line per temperature and setting, a column per category.

        A category without a text that counts shows a dash.
        """
        categories = list(dict.fromkeys(found.category for found in self.acceptances))
        heads = ["T", "setting", *categories, "texts", "loops", "accepted", "drafted"]
        lines = [heads]
        for whole in sorted(
            (found for found in self.acceptances if found.category == ALL),
            key=lambda found: found.temperature,
        ):
            cells = {
                found.category: f"{found.acceptance_length:.2f}" if found.num_texts else "-"
                for found in self.acceptances
                if (found.setting, found.temperature) == (whole.setting, whole.temperature)
            }
            lines.append(
                [
                    f"{whole.temperature:g}",
                    whole.setting,
                    *(cells[category] for category in categories),
                    str(whole.num_texts),
                    str(whole.num_loops),
                    str(whole.stats.accepted),
                    str(whole.stats.drafted),
                ]
            )
        return lines

    def to_json(self) -> dict[str, Any]:
        """The whole report as a JSON document."""
        return {
            "schema_version": SCHEMA_VERSION,
            "conditions": self.conditions,
            "acceptance": [found.to_json() for found in self.acceptances],
            "is_lossless": self.is_lossless,
            "differing": None if self.differing is None else [list(d) for d in self.differing],
            "skipped": list(self.skipped),
            "elapsed_s": self.elapsed_s,
        }

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> EvaluationReport:
        """The report that :meth:`to_json` described.

        Raises:
            CheckpointError: the document is none, or of another schema.
        """
        try:
            if document["schema_version"] != SCHEMA_VERSION:
                raise ValueError(f"schema_version is {document['schema_version']!r}")
            differing = document["differing"]
            return cls(
                acceptances=tuple(Acceptance.from_json(part) for part in document["acceptance"]),
                differing=None
                if differing is None
                else tuple((str(a), float(b), str(c)) for a, b, c in differing),
                skipped=tuple(str(id_) for id_ in document["skipped"]),
                conditions=dict(document["conditions"]),
                elapsed_s=float(document["elapsed_s"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"not an evaluation of schema {SCHEMA_VERSION} ({error!r}); measure again"
            ) from None

    def holds_for(self, conditions: dict[str, Any]) -> bool:
        """Whether measuring under ``conditions`` would give the same figures again.

        All must agree but the date, and where a head lies: its tensors are named by
        ``head_sha256``, without which nothing is known to be the same.
        """
        named = conditions.get("head_sha256") is not None
        return named and _comparable(self.conditions) == _comparable(conditions)


def _comparable(conditions: dict[str, Any]) -> dict[str, Any]:
    """As it comes back from JSON, without what decides no figure."""
    kept = json.loads(json.dumps(conditions))
    kept.pop("date", None)
    for shape in kept.get("settings", {}).values():
        shape.pop("head", None)
    return kept
