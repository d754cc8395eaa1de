"""Toy targets and an exact sampler, around the production step; and the check of the law.

Everything between a drafter's proposal and the end of an answer is the program's own:
``speculative_step``, ``walk``, ``DraftTree``, ``Budget``, ``Request``, ``OutputStream``. In place
of the rest stand

- a target that has logits for every prefix in a table. What a row's prefix is follows from the
  cache's committed tokens and from the mask, as in a real decoder, so a wrong commit or mask shows;
- the drafters of :mod:`toy_drafters`;
- for the enumeration, a sampler in integer arithmetic, on whole logits to the base 2, over the
  noise of :mod:`race`.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cache
from types import SimpleNamespace
from typing import Any, TypeAlias
from unittest import mock

import torch

from outrider import step
from outrider.budget import Budget
from outrider.config import SamplingParams
from outrider.grammar import GrammarCompiler
from outrider.models.layers import Segment
from outrider.request import Request
from outrider.tree import DraftTree
from outrider.types import FinishReason, PredictionStats, Verdict
from outrider.warping import Constraint
from tests.exactness.race import Weights, World, distance, enumerate_law
from tests.exactness.toy_drafters import Tally, ToyDrafter
from tests.grammars import allowed_by_trying, letters

PROMPT = (0, 1)
EOS = frozenset({2})

Answer: TypeAlias = tuple[tuple[int, ...], str, FinishReason]
"""Token ids, text and finish reason: all that a caller sees."""

Law: TypeAlias = dict[tuple[Answer, ...], Fraction]
"""Probabilities of the answers of one batch."""


@dataclass(frozen=True)
class ToyTarget:
    """Logits for every prefix, drawn once from ``values`` by a hash of the prefix."""

    vocab_size: int
    seed: int = 0
    values: tuple[float, ...] = (-2, 0, 2)

    def draft(self) -> ToyTarget:
        """Another model of the same vocabulary, to draft with."""
        return ToyTarget(self.vocab_size, self.seed + 1000, self.values)

    def logits(self, prefix: Sequence[int], position: int | None = None) -> list[float]:
        """Next-token logits; ``position`` is that of the prefix's last token: a wrong one shows."""
        return _drawn_logits(self, tuple(prefix), len(prefix) - 1 if position is None else position)

    def forward(
        self, segments: Sequence[Segment], cache: ToyCache, *, capture: Sequence[int] = ()
    ) -> SimpleNamespace:
        """What ``Decoder.forward`` returns, as far as the step looks at it."""
        rows = []
        for segment in segments:
            committed = cache.tokens[segment.cache_row]
            cache.written[segment.cache_row] = list(segment.tokens)
            for node in range(segment.num_silent, len(segment.tokens)):
                prefix = [*committed, *self.visible(segment, node)]
                rows.append(self.logits(prefix, len(committed) + self.depth(segment, node)))
        counts = tuple(len(segment.tokens) for segment in segments)
        logits_RV = torch.tensor(rows, dtype=torch.float32)
        return SimpleNamespace(logits_RV=logits_RV, hidden_RC=None, counts=counts)

    def visible(self, segment: Segment, node: int) -> list[int]:
        """The segment's tokens that a node attends to, itself last."""
        mask_TT = segment.ancestor_mask_TT
        return [
            token
            for other, token in enumerate(segment.tokens)
            if (other <= node if mask_TT is None else mask_TT[node, other])
        ]

    def depth(self, segment: Segment, node: int) -> int:
        """The node's distance from the root's position."""
        return segment.depths[node]


@cache
def _drawn_logits(target: ToyTarget, prefix: tuple[int, ...], position: int) -> list[float]:
    draw = random.Random(f"{target.seed} {prefix} {position}")
    return [draw.choice(target.values) for _ in range(target.vocab_size)]


class ToyCache:
    """Which tokens are committed for each request, and which the last pass wrote behind them."""

    def __init__(self, prompts: Sequence[Sequence[int]]) -> None:
        # As after prefill: the last tokens but the root are left to the first step.
        self.tokens = [list(prompt[:-2]) for prompt in prompts]
        self.written: list[list[int]] = [[] for _ in prompts]

    def committed(self, row: int) -> int:
        return len(self.tokens[row])

    def extend(self, row: int, count: int) -> None:
        self.tokens[row] += self.written[row][:count]
        self.written[row] = self.written[row][count:]

    def commit(self, row: int, path: Sequence[int]) -> None:
        self.tokens[row] += [self.written[row][node] for node in (0, *path)]

    def scrub(self, row: int, num_slots: int) -> None:
        """Holds nothing that could be other than finite."""


class ToyText:
    """Token 0 is "a", token 1 is "b", and so on."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return "".join("abcdefghij"[token] for token in ids)


# Of the first seeds, one under which every setting of the tests accepts and rejects drafts.
TARGET = ToyTarget(3, seed=2)


def exact_weights(
    logits: Sequence[float],
    prefix: Sequence[int],
    params: SamplingParams,
    *,
    prompt_len: int = len(PROMPT),
    eos_ids: frozenset[int] = EOS,
) -> Weights:
    """The law of the next token, unnormalised, by the book: integer logits to the base 2.

    Penalties and biases must be whole numbers and the temperature must leave whole logits. All 0
    where a grammar allows nothing.
    """
    output = list(prefix[prompt_len:])
    value = [Fraction(logit) for logit in logits]
    for token in range(len(value)):
        if token in prefix:
            rate = Fraction(params.repetition_penalty)
            value[token] = value[token] / rate if value[token] > 0 else value[token] * rate
        if token in output:
            value[token] -= Fraction(params.presence_penalty)
            value[token] -= Fraction(params.frequency_penalty) * output.count(token)
        value[token] += Fraction(params.logit_bias.get(token, 0))
    ends = set(params.stop_token_ids) | (set() if params.ignore_eos else set(eos_ids))
    held_back = ends if len(output) < params.min_tokens else set()
    allowed = sorted(allowed_tokens(output, params, len(value), eos_ids))
    if params.grammar is None or not held_back.issuperset(allowed):
        allowed = [token for token in allowed if token not in held_back]
    if not allowed:
        return (0,) * len(value)
    if params.temperature == 0:
        best = max(allowed, key=lambda token: (value[token], -token))
        return tuple(int(token == best) for token in range(len(value)))
    powers = powers_of_two([value[token] / Fraction(params.temperature) for token in allowed])
    weight = dict(zip(allowed, powers, strict=True))
    if params.top_k:
        kth = sorted(weight.values(), reverse=True)[: params.top_k][-1]
        weight = {token: w for token, w in weight.items() if w >= kth}
    nucleus: dict[int, int] = {}
    for token in sorted(weight, key=lambda token: (-weight[token], token)):
        if sum(nucleus.values()) < Fraction(params.top_p) * sum(weight.values()):
            nucleus[token] = weight[token]
    floor = Fraction(params.min_p) * max(nucleus.values())
    return tuple(w if (w := nucleus.get(t, 0)) >= floor else 0 for t in range(len(value)))


# Longer than any answer here, so that every beginning of a text is found.
_TRIED_LEN = 8


def allowed_tokens(
    output: Sequence[int], params: SamplingParams, vocab_size: int, eos_ids: frozenset[int]
) -> set[int]:
    """What a regular grammar allows after this output, by trying all texts."""
    if params.grammar is None:
        return set(range(vocab_size))
    tokenizer = letters(vocab_size, eos_ids)
    alphabet = tokenizer.text(sorted({*range(vocab_size)} - eos_ids))
    allowed = allowed_by_trying(
        params.grammar.text, tokenizer, output, alphabet=alphabet, max_len=_TRIED_LEN
    )
    return allowed - eos_ids if params.ignore_eos else allowed


@cache
def _compiler(vocab_size: int, eos_ids: frozenset[int]) -> GrammarCompiler:
    return GrammarCompiler(letters(vocab_size, eos_ids), vocab_size)


def production_constraint(
    params: SamplingParams, vocab_size: int, eos_ids: frozenset[int]
) -> Constraint | None:
    """The program's own matcher."""
    if params.grammar is None:
        return None
    compiler = _compiler(vocab_size, eos_ids)
    return compiler.constraint(params.grammar, ignores_eos=params.ignore_eos)


def expected_logprobs(
    logits: Sequence[float], token: int, num_top: int
) -> tuple[int, float, list[tuple[int, float]]]:
    """By the book: the logarithm of the softmax, and the likeliest by probability, then id."""
    total = math.fsum(math.exp(logit) for logit in logits)
    logprob = [logit - math.log(total) for logit in logits]
    order = sorted(range(len(logits)), key=lambda other: (-logits[other], other))
    return token, logprob[token], [(other, logprob[other]) for other in order[:num_top]]


def powers_of_two(logits: Sequence[float | Fraction]) -> Weights:
    """Whole numbers in the proportions of ``2 ** logit``."""
    exponents = [Fraction(logit) for logit in logits]
    assert all(e.denominator == 1 for e in exponents), "choose settings that keep logits whole"
    return tuple(2 ** int(exponent - min(exponents)) for exponent in exponents)


@dataclass
class ExactSampler:
    """Stands in for ``RequestSampler``: the same picks, over the noise of a :class:`World`.

    Its methods cut up what a pick depends on, for the wrong variants to get one part wrong.
    """

    world: World
    params: SamplingParams
    eos_ids: frozenset[int]
    is_raw_argmax: bool = False

    def picks(
        self, logits_NV: torch.Tensor, token_ids: Sequence[int], tree: DraftTree
    ) -> Sequence[int]:
        """On demand, so that only the races of the walk's path are enumerated."""
        return _OnDemand(self, logits_NV, list(token_ids), tree)

    def pick(
        self, logits: Sequence[float], token_ids: Sequence[int], tree: DraftTree, node: int
    ) -> int:
        """The winner at a node, given its own prefix; -1 where a grammar allows nothing."""
        weights = self.weights(logits, token_ids, tree, node)
        if not any(weights):
            return -1
        return self.world.winner(self.key(len(token_ids), tree.depth[node]), weights)

    def key(self, num_tokens: int, depth: int) -> tuple[int | None, ...]:
        """What the noise depends on: seed, choice and absolute position."""
        return self.params.seed, self.params.choice, num_tokens + depth

    def weights(
        self, logits: Sequence[float], token_ids: Sequence[int], tree: DraftTree, node: int
    ) -> Weights:
        """The law at a node, given its own prefix."""
        prefix = [*token_ids, *tree.path_tokens(node)]
        return exact_weights(logits, prefix, self.params, eos_ids=self.eos_ids)

    def release(self, position: int) -> None:
        """Noise is never redrawn in a world."""


@dataclass(frozen=True)
class _OnDemand(Sequence[int]):
    sampler: ExactSampler
    logits_NV: torch.Tensor
    token_ids: list[int]
    tree: DraftTree

    def __len__(self) -> int:
        return len(self.tree)

    def __getitem__(self, node: Any) -> Any:
        return self.sampler.pick(self.logits_NV[node].tolist(), self.token_ids, self.tree, node)


class ToyRequest(Request):
    """A production request that lets its drafter look at the target and at the noise."""

    target: ToyTarget

    def order(self, logits: Sequence[float], position: int) -> Iterator[int]:
        """Tokens by logits plus the noise of a position, best first."""
        sampler: Any = self.sampler
        if isinstance(sampler, ExactSampler):
            return sampler.world.ranking(sampler.key(position, 0), powers_of_two(logits))
        shifted_V = torch.tensor(logits) + sampler.noise.at(position)
        return iter(shifted_V.argsort(descending=True, stable=True).tolist())


@dataclass(frozen=True)
class Setup:
    """All that a run depends on besides the noise; each part can be replaced by a wrong one.

    One request per entry of ``choices``, with the same prompt and seed, decoded as one batch.
    ``predicted`` gathers what became of ``prediction``, over all runs.
    """

    target: ToyTarget
    params: SamplingParams
    drafter: ToyDrafter | None = None
    choices: tuple[int, ...] = (0,)
    eos_ids: frozenset[int] = EOS
    sampler: type[ExactSampler] = ExactSampler
    cache: type[ToyCache] = ToyCache
    request: type[ToyRequest] = ToyRequest
    walk: Callable[[DraftTree, Sequence[int]], Verdict] | None = None
    constraint: Callable[..., Constraint | None] = production_constraint
    prediction: tuple[int, ...] = ()
    predicted: list[PredictionStats] = field(default_factory=list, compare=False)

    def run(self, world: World | None = None) -> tuple[Answer, ...]:
        """Decode with the exact sampler over ``world``'s noise, or with the production sampler."""
        cache: Any = self.cache([PROMPT] * len(self.choices))
        target: Any = self.target
        requests = [self._request(row, choice, world) for row, choice in enumerate(self.choices)]
        with mock.patch.object(step, "walk", self.walk) if self.walk else nullcontext():
            while running := [r for r in requests if r.finish_reason is None]:
                budget = Budget(None, max_rows=1024)
                step.speculative_step(running, target, cache, self.drafter, budget)
        for request in requests:
            self._check_logprobs(request)
            if request.prediction is not None:
                self.predicted.append(request.prediction.stats)
        return tuple(_answer(request) for request in requests)

    def _check_logprobs(self, request: Request) -> None:
        """Those of each token are the raw ones after its own prefix, and there are no others."""
        num_top = self.params.logprobs
        if num_top is None:
            assert not request.output.logprobs
            return
        token_ids = request.output.token_ids
        assert len(token_ids) == len(request.output.logprobs)
        for place, found in enumerate(request.output.logprobs):
            logits = self.target.logits([*PROMPT, *token_ids[:place]])
            token, logprob, top = expected_logprobs(logits, token_ids[place], num_top)
            assert token == found.token_id
            assert abs(logprob - found.logprob) < 1e-6
            assert [other for other, _ in top] == [other for other, _ in found.top]
            for (_, one), (_, other) in zip(top, found.top, strict=True):
                assert abs(one - other) < 1e-6

    def run_one(self, choice: int) -> Answer:
        """One answer decoded alone, with the production sampler."""
        (answer,) = replace(self, choices=(choice,)).run()
        return answer

    def _request(self, row: int, choice: int, world: World | None) -> ToyRequest:
        params = replace(self.params, choice=choice)
        request = self.request(
            row,
            PROMPT,
            params,
            decoder=ToyText(),
            eos_ids=self.eos_ids,
            vocab_size=self.target.vocab_size,
            max_model_len=1000,
            speculates=self.drafter is not None,
            prediction_ids=self.prediction,
            constraint=self.constraint(params, self.target.vocab_size, self.eos_ids),
        )
        request.target = self.target
        if world is not None:
            sampler: Any = self.sampler(world, params, self.eos_ids)
            request.sampler = sampler
        request.admit(row)
        return request

    def plain_law(self) -> Law:
        """The law by ancestral sampling: no engine, no step, no drafter.

        Answers of different choices are independent: their joint law is the product.
        """
        one: dict[Answer, Fraction] = {}

        def extend(output: tuple[int, ...], probability: Fraction) -> None:
            answer = self._ended(output)
            if answer is not None:
                one[answer] = one.get(answer, Fraction(0)) + probability
                return
            prefix = [*PROMPT, *output]
            logits = self.target.logits(prefix)
            weights = exact_weights(logits, prefix, self.params, eos_ids=self.eos_ids)
            for token, weight in enumerate(weights):
                if weight:
                    extend((*output, token), probability * Fraction(weight, sum(weights)))

        extend((), Fraction(1))
        joint: Law = {(): Fraction(1)}
        for _ in self.choices:
            joint = {
                (*answers, answer): probability * share
                for answers, probability in joint.items()
                for answer, share in one.items()
            }
        return joint

    def _ended(self, output: tuple[int, ...]) -> Answer | None:
        """The answer if it ends with this output, by the rules for its last token."""
        if not output:
            return None
        params = self.params
        text = ToyText().decode(output)
        if output[-1] in params.stop_token_ids or (
            output[-1] in self.eos_ids and not params.ignore_eos
        ):
            return output, text[:-1], FinishReason.STOP
        cuts = [len(text) - len(stop) for stop in params.stop if text.endswith(stop)]
        if cuts and len(output) >= params.min_tokens:
            return output, text[: min(cuts)], FinishReason.STOP
        may_follow = allowed_tokens(
            output, replace(params, ignore_eos=False), self.target.vocab_size, self.eos_ids
        )
        if params.grammar is not None and may_follow <= self.eos_ids:
            return output, text, FinishReason.STOP
        if len(output) == params.max_tokens:
            return output, text, FinishReason.LENGTH
        return None


def _answer(request: Request) -> Answer:
    assert request.finish_reason is not None
    return tuple(request.output.token_ids), request.output.text, request.finish_reason


class LawDiffersError(AssertionError):
    """The engine's law is not the target's; ``distance`` is their total variation distance."""

    def __init__(self, gap: Fraction) -> None:
        super().__init__(f"the emitted law differs from the target's by {gap} = {float(gap):.4f}")
        self.distance = gap


def check_law(setup: Setup) -> Tally:
    """Require that the emitted law *is* the target's, as fractions; returns what happened."""
    tally = Tally()
    if setup.drafter is not None:
        setup = replace(setup, drafter=replace(setup.drafter, tally=tally))
    emitted, plain = enumerate_law(setup.run), setup.plain_law()
    for stats in setup.predicted:
        tally.drafted += stats.accepted + stats.rejected
        tally.accepted += stats.accepted
        tally.rejected += stats.rejected
    if emitted != plain:
        raise LawDiffersError(distance(emitted, plain))
    return tally
