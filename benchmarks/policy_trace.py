"""Traces of acceptance: what drafters would have proposed at every place of real answers.

A policy may begin a round at any token, so a trace knows the draft tree of each: the answers are
decoded once plainly, then once more for each drafter, which is asked at every token and of which
nothing is verified. Which nodes the target would have accepted follows from the answer itself. The
drafter learns from what it would have learnt there.

A head's tree and n-gram's are kept apart and merged when they are replayed, as the product merges
them: a policy may ask for one without the other. A node is ``[parent, token, score in
thousandths]``; nodes of one tree are numbered from 1, parents first, 0 being the root.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from policy_costs import new_engine

from outrider import LLM, SamplingParams
from outrider.config import Method, SpeculationConfig
from outrider.drafters.base import Drafter
from outrider.tree import DraftTree
from outrider.types import Verdict

Node = tuple[int, int, int]
Places = tuple[tuple[Node, ...], ...]

LOOKUPS = "ngram"  # the drafter that makes no passes; every other one is a head


@dataclass(frozen=True, slots=True)
class Answer:
    """One text: how long its prompt is, and the trees at each of its tokens, by source.

    ``head`` and ``ngram`` are empty where the trace is without that source.
    """

    category: str
    prompt_len: int
    tokens: tuple[int, ...]
    head: Places
    ngram: Places


@dataclass(frozen=True, slots=True)
class Trace:
    """What one drafter, or a head with n-gram, would propose along these answers."""

    drafter: str
    has_head: bool
    has_ngram: bool
    answers: tuple[Answer, ...]


class Witness:
    """A drafter that is asked at every place and of which nothing is verified.

    Args:
        inner: the drafter that is recorded.
        answers: the whole texts, prompt and answer, by request id.
    """

    def __init__(self, inner: Drafter, answers: dict[int, list[int]]) -> None:
        self._inner = inner
        self._answers = answers
        self._out: dict[int, DraftTree] = {}
        self.places: dict[int, dict[int, tuple[Node, ...]]] = {}
        self.captures = inner.captures
        self.admit, self.prefill = inner.admit, inner.prefill
        self.adopt, self.release = inner.adopt, inner.release

    @property
    def num_passes(self) -> int:
        """The recorded drafter's."""
        return self._inner.num_passes

    def propose(
        self, requests: Sequence[Any], max_depth: Sequence[int], min_score: float = 0.0
    ) -> list[DraftTree]:
        """Roots alone; what the drafter says is written down."""
        for request, tree in zip(
            requests, self._inner.propose(requests, max_depth, min_score), strict=True
        ):
            self._out[request.request_id] = tree
            places = self.places.setdefault(request.request_id, {})
            places[len(request.token_ids)] = nodes_of(tree)
        return [DraftTree.root(request.token_ids[-1]) for request in requests]

    def observe(
        self,
        requests: Sequence[Any],
        trees: Sequence[DraftTree],
        verdicts: Sequence[Verdict],
        hidden: Sequence[Any],
    ) -> None:
        """The drafter learns as if its whole tree had been verified, on the true states."""
        told_trees, told = [], []
        for request, verified, verdict in zip(requests, trees, verdicts, strict=True):
            tree = self._out.pop(request.request_id, verified)
            place = len(request.token_ids) - len(verdict.tokens)
            future = self._answers[request.request_id][place:]
            path = path_of(tree, future)
            told_trees.append(tree)
            told.append(Verdict(tuple(path), tuple(future[: len(path) + 1]), tree.num_drafted))
        self._inner.observe(requests, told_trees, told, hidden)


def path_of(tree: DraftTree, future: Sequence[int]) -> list[int]:
    """The nodes that the target accepts, whose next tokens are these."""
    children, node, path = tree.children(), 0, []
    for token in future:
        if token not in children[node]:
            break
        node = children[node][token]
        path.append(node)
    return path


def nodes_of(tree: DraftTree) -> tuple[Node, ...]:
    """The tree's nodes as a trace knows them."""
    return tuple(
        (tree.parent[node], tree.token[node], round(1000 * tree.score[node]))
        for node in range(1, len(tree))
    )


def record(
    llm: LLM,
    drafters: Mapping[str, SpeculationConfig],
    prompts: Sequence[tuple[str, list[int]]],
    params: Sequence[SamplingParams],
) -> dict[str, Any]:
    """What these drafters propose along the answers to these prompts, (category, ids) each."""
    plain = llm.with_speculation(SpeculationConfig(method=Method.OFF))
    texts = [c.token_ids for c in plain.generate([ids for _, ids in prompts], params)]
    return {
        "answers": [
            {"category": category, "prompt_len": len(ids), "tokens": text}
            for (category, ids), text in zip(prompts, texts, strict=True)
        ],
        "drafters": {
            name: _record(llm, speculation, [ids for _, ids in prompts], texts, params)
            for name, speculation in drafters.items()
        },
    }


def _record(
    llm: LLM,
    speculation: SpeculationConfig,
    prompts: Sequence[list[int]],
    texts: Sequence[Sequence[int]],
    params: Sequence[SamplingParams],
) -> list[Places]:
    """The trees of one drafter, by answer and place."""
    known: dict[int, list[int]] = {}
    drafter = llm.with_speculation(speculation).engine._drafter
    assert drafter is not None
    witness = Witness(drafter, known)
    engine = new_engine(llm, witness, speculation.num_draft_tokens)
    requests = []
    for ids, text, settings in zip(prompts, texts, params, strict=True):
        request = engine.new_request(ids, settings)
        known[request.request_id] = [*ids, *text]
        engine.submit(request)
        requests.append(request)
    while engine.has_work:
        engine.step()
    recorded = []
    for ids, request in zip(prompts, requests, strict=True):
        assert request.token_ids == known[request.request_id], "drafts do not change the text"
        places = witness.places[request.request_id]
        ends = range(len(ids), len(request.token_ids))
        recorded.append(tuple(places.get(end, ()) for end in ends))
    return recorded


def write_traces(path: Path, recorded: Mapping[str, Any], conditions: dict[str, Any]) -> None:
    """Compressed JSON; the same traces give the same bytes."""
    text = json.dumps(
        {"schema_version": 2, "conditions": conditions, **recorded}, separators=(",", ":")
    )
    path.write_bytes(gzip.compress(text.encode(), mtime=0))


def read_traces(path: Path) -> list[Trace]:
    """Each drafter that was recorded, and each head in one tree with n-gram."""
    data = json.loads(gzip.decompress(path.read_bytes()))
    places = {
        name: [tuple(tuple(map(tuple, nodes)) for nodes in answer) for answer in answers]
        for name, answers in data["drafters"].items()
    }
    empty: list[Places] = [()] * len(data["answers"])
    heads = [name for name in places if name != LOOKUPS]

    def trace(name: str, head: list[Places], ngram: list[Places]) -> Trace:
        answers = tuple(
            Answer(a["category"], a["prompt_len"], tuple(a["tokens"]), of_head, of_ngram)
            for a, of_head, of_ngram in zip(data["answers"], head, ngram, strict=True)
        )
        return Trace(name, head is not empty, ngram is not empty, answers)

    return [
        *(trace(name, places[name], empty) for name in heads),
        trace(LOOKUPS, empty, places[LOOKUPS]),
        *(trace(f"{name}+{LOOKUPS}", places[name], places[LOOKUPS]) for name in heads),
    ]
