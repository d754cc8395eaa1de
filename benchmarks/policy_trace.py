"""Traces of acceptance: what a drafter would have proposed at every place of real answers.

A policy may begin a round at any token, so a trace knows the draft tree of each: the answers are
decoded once plainly, then once more with a drafter that is asked at every token and of which
nothing is verified. Which nodes the target would have accepted follows from the answer itself. The
drafter learns from what it would have learnt there.

A node is ``[parent, score in thousandths, 1 if it is on the answer's path]``; nodes of one tree are
numbered from 1, parents first, 0 being the root.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from policy_costs import new_engine

from outrider import LLM, SamplingParams
from outrider.config import SpeculationConfig
from outrider.drafters.base import Drafter
from outrider.tree import DraftTree
from outrider.types import Verdict

Node = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Answer:
    """One text: where it starts in its context, and the tree at each of its places."""

    category: str
    prompt_len: int
    places: tuple[tuple[Node, ...], ...]


@dataclass(frozen=True, slots=True)
class Trace:
    """A drafter's answers; ``makes_passes`` is False for n-gram, which has none."""

    drafter: str
    makes_passes: bool
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
            future = self._answers[request.request_id][len(request.token_ids) :]
            self._out[request.request_id] = tree
            places = self.places.setdefault(request.request_id, {})
            places[len(request.token_ids)] = nodes_of(tree, future)
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


def nodes_of(tree: DraftTree, future: Sequence[int]) -> tuple[Node, ...]:
    """The tree's nodes as a trace knows them."""
    path = set(path_of(tree, future))
    return tuple(
        (tree.parent[node], round(1000 * tree.score[node]), int(node in path))
        for node in range(1, len(tree))
    )


def record(
    llm: LLM,
    name: str,
    speculation: SpeculationConfig,
    prompts: Sequence[tuple[str, list[int]]],
    max_tokens: int,
) -> Trace:
    """The trace of a drafter over these prompts, (category, ids) each."""
    params = SamplingParams(max_tokens=max_tokens)
    plain = llm.with_speculation(SpeculationConfig(method="off"))
    completions = plain.generate([ids for _, ids in prompts], params)
    drafting = llm.with_speculation(speculation)
    texts: dict[int, list[int]] = {}
    witness = Witness(drafting.engine._drafter, texts)
    engine = new_engine(llm, witness, speculation.num_draft_tokens)
    requests = []
    for (_, ids), completion in zip(prompts, completions, strict=True):
        request = engine.new_request(ids, params)
        texts[request.request_id] = [*ids, *completion.token_ids]
        engine.submit(request)
        requests.append(request)
    while engine.has_work:
        engine.step()
    answers = []
    for (category, ids), request in zip(prompts, requests, strict=True):
        assert request.token_ids == texts[request.request_id], "the text does not depend on drafts"
        places = witness.places[request.request_id]
        ends = range(len(ids), len(request.token_ids))
        answers.append(Answer(category, len(ids), tuple(places.get(end, ()) for end in ends)))
    return Trace(name, witness.num_passes > 0, tuple(answers))


def write_traces(path: Path, traces: Sequence[Trace], conditions: dict[str, Any]) -> None:
    """Compressed JSON; the same traces give the same bytes."""
    data = {
        "schema_version": 1,
        "conditions": conditions,
        "traces": [
            {
                "drafter": trace.drafter,
                "makes_passes": trace.makes_passes,
                "answers": [
                    {"category": a.category, "prompt_len": a.prompt_len, "places": a.places}
                    for a in trace.answers
                ],
            }
            for trace in traces
        ],
    }
    text = json.dumps(data, separators=(",", ":"))
    path.write_bytes(gzip.compress(text.encode(), mtime=0))


def read_traces(path: Path) -> list[Trace]:
    """What :func:`write_traces` wrote."""
    data = json.loads(gzip.decompress(path.read_bytes()))
    return [
        Trace(
            trace["drafter"],
            trace["makes_passes"],
            tuple(
                Answer(
                    answer["category"],
                    answer["prompt_len"],
                    tuple(tuple(map(tuple, nodes)) for nodes in answer["places"]),
                )
                for answer in trace["answers"]
            ),
        )
        for trace in data["traces"]
    ]
