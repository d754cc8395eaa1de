"""An engine around a fake model, for traces of what a server does to it; and what must hold.

The fake target writes each token and its position into a real cache and computes the next token
from what it reads back, so a row that is copied, kept or freed wrongly changes the text. The fake
drafter checks that the target's states reach it once each and in order. Both are pure functions of
tokens: what a request must answer is known before it is submitted.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import compress
from types import SimpleNamespace
from typing import Any, NoReturn
from zlib import crc32

import torch

from outrider.config import AdmissionLimits, EngineConfig, SamplingParams
from outrider.engine import Engine
from outrider.kv_cache import KEY_BLOCK, KVCache
from outrider.request import Request
from outrider.scheduler import Admission
from outrider.tree import DraftTree
from outrider.types import FinishReason
from tests.engines import LetterDecoder

VOCAB = 12
EOS = 0
POISON = 10  # a pass that computes it raises
NAN = 11  # what comes after it is not a number
MAX_LEN = 64
MAX_DRAFT = 4


def next_token(prefix: Sequence[int]) -> int:
    """What the fake model says after these tokens; the end about once in 23."""
    draw = crc32(bytes(prefix)) % 23
    return EOS if draw == 0 else 1 + draw % 9


def state_after(prefix: Sequence[int]) -> float:
    """The fake model's captured state at the last of these tokens."""
    return float(crc32(bytes(prefix)) % 2**20)


def answer(prompt: Sequence[int], max_tokens: int) -> list[int]:
    """What a request must emit if nobody cancels it."""
    tokens = list(prompt)
    limit = min(max_tokens, MAX_LEN - len(prompt))
    while len(tokens) < len(prompt) + limit:
        tokens.append(next_token(tokens))
        if tokens[-1] == EOS:
            break
    return tokens[len(prompt) :]


def talkative(max_tokens: int, count: int) -> list[list[int]]:
    """Prompts of two tokens whose answers are as long as they may be."""
    pairs = ([first, second] for first in range(1, 10) for second in range(1, 10))
    return [pair for pair in pairs if len(answer(pair, max_tokens)) == max_tokens][:count]


class FakeTarget:
    """Reads its prefix from the cache; fails where it is told to."""

    config = SimpleNamespace(vocab_size=VOCAB)

    def __init__(self) -> None:
        self.fails_in_company = False
        self.num_faults = 0

    def new_cache(self, *, max_batch_size: int, num_slots: int) -> KVCache:
        return KVCache(
            num_layers=1,
            num_kv_heads=1,
            head_dim=2,
            max_batch_size=max_batch_size,
            num_slots=num_slots,
            dtype=torch.float32,
        )

    def forward(self, segments, cache: KVCache, *, capture: Sequence[int] = ()) -> Any:
        if self.fails_in_company and len(segments) > 1:
            self.fails_in_company = False
            self._fault("in company")
        if any(POISON in segment.tokens for segment in segments):
            self._fault("poison")
        counts = tuple(len(segment.tokens) for segment in segments)
        slots = cache.begin([segment.cache_row for segment in segments], counts)
        written = [
            (float(token), float(start + depth))
            for segment, start in zip(segments, slots.starts, strict=True)
            for token, depth in zip(segment.tokens, segment.depths, strict=True)
        ]
        key_RGK = torch.tensor(written).unsqueeze(1)
        cache.write(0, slots, key_RGK, -key_RGK)
        logits, states = [], []
        for b, segment in enumerate(segments):
            committed = read_row(cache, segment.cache_row, slots.starts[b])
            masks = None if segment.ancestor_mask_TT is None else segment.ancestor_mask_TT.tolist()
            for node in range(len(segment.tokens)):
                seen = segment.tokens[: node + 1]
                if masks is not None:
                    seen = [*compress(segment.tokens, masks[node])]
                prefix = committed + list(seen)
                states.append([state_after(prefix)])
                if node >= segment.num_silent:
                    logits.append(self._logits(prefix))
        return SimpleNamespace(
            logits_RV=torch.tensor(logits),
            hidden_RC=torch.tensor(states) if capture else None,
            counts=counts,
        )

    def _logits(self, prefix: Sequence[int]) -> list[float]:
        if NAN in prefix:
            return [float("nan")] * VOCAB
        row = [0.0] * VOCAB
        row[next_token(prefix)] = 5.0
        return row

    def _fault(self, why: str) -> None:
        self.num_faults += 1
        raise RuntimeError(why)


def fill_row(cache: KVCache, row: int, keys_LGSK: torch.Tensor, values_LGSK: torch.Tensor) -> None:
    """Put these keys and values into a row's first slots, as no part of the program would."""
    slot_S = torch.arange(keys_LGSK.shape[2])
    block_S, lane_S = slot_S // KEY_BLOCK, slot_S % KEY_BLOCK
    cache._keys[:, row, :, block_S, :, lane_S] = keys_LGSK.permute(2, 0, 1, 3)
    cache._values[:, row, :, : len(slot_S), : cache.head_dim] = values_LGSK


def read_row(cache: KVCache, row: int, count: int) -> list[int]:
    """The tokens in a row's first slots, which must lie in their order."""
    # As lists: an operation on a tensor of so few numbers costs more than all of them.
    keys_LGSK, values_LGSK = cache.read(row, count)
    stored = keys_LGSK[0, 0].tolist()
    assert list(range(count)) == [position for _, position in stored]
    values = values_LGSK[0, 0].tolist()
    assert values == [[-token, -position] for token, position in stored]
    return [int(token) for token, _ in stored]


class FakeDrafter:
    """Guesses right most of the time; keeps each request's states and checks every one.

    Args:
        capacity: most requests to remember at once.
        forgets: how many of an adopted prefix's last states it needs again; None forgets all.
    """

    captures = (0,)
    num_passes = 0

    def __init__(self, capacity: int, *, forgets: int | None = 0, seed: int = 0) -> None:
        self._capacity = capacity
        self._forgets = forgets
        self._rng = random.Random(seed)
        self.states: dict[int, list[float]] = {}
        self.fails_at: set[str] = set()  # each once
        self.fails_on: set[int] = set()  # requests that it cannot propose for
        self.spoils: set[int] = set()  # requests whose draft logits are not finite
        self.num_faults = 0

    def admit(self, request) -> None:
        self._fault("admit")
        assert request.request_id not in self.states
        self._store(request.request_id, [])

    def adopt(self, request, source_id: int, num_tokens: int, *, takes_over: bool) -> int:
        self._fault("adopt")
        known = self.states.get(source_id)
        if takes_over:
            self.states.pop(source_id, None)
        if known is None or self._forgets is None:
            known = []
        else:
            assert len(known) >= num_tokens
            known = known[: num_tokens - self._forgets]
        assert request.request_id not in self.states
        self._store(request.request_id, list(known))
        return len(known)

    def prefill(self, request, num_committed: int, hidden_TC) -> None:
        self._fault("prefill")
        self._take(request, hidden_TC)
        assert num_committed == len(self.states[request.request_id])

    def propose(self, requests, max_depth, min_score: float = 0.0) -> list[DraftTree]:
        self._fault("propose")
        if self.fails_on & {request.request_id for request in requests}:
            self._raise("on one")
        trees = []
        for request, limit in zip(requests, max_depth, strict=True):
            tokens = list(request.token_ids)
            tree = DraftTree.root(tokens[-1])
            node = 0
            for _ in range(min(limit, MAX_DRAFT, self._rng.randrange(MAX_DRAFT + 1))):
                true = next_token(tokens)
                token = true if self._rng.random() < 0.8 else 1 + true % 9
                node = tree.add(node, token, tree.score[node] * 0.9)
                tokens.append(token)
            if request.request_id in self.spoils:
                self.num_faults += 1
                tree.is_finite = False
            trees.append(tree)
        return trees

    def observe(self, requests, trees, verdicts, hidden) -> None:
        self._fault("observe")
        for request, hidden_TC in zip(requests, hidden, strict=True):
            self._take(request, hidden_TC)

    def release(self, request) -> None:
        self.states.pop(request.request_id, None)

    def _store(self, request_id: int, states: list[float]) -> None:
        self.states[request_id] = states
        assert len(self.states) <= self._capacity

    def _take(self, request, hidden_TC) -> None:
        states = self.states[request.request_id]
        states += hidden_TC[:, 0].tolist()
        num_known = min(len(states), len(request.token_ids))  # a stop may have cut some off
        for position in range(max(0, num_known - len(hidden_TC)), num_known):
            assert state_after(request.token_ids[: position + 1]) == states[position]

    def _fault(self, where: str) -> None:
        if where in self.fails_at:
            self.fails_at.remove(where)
            self._raise(where)

    def _raise(self, why: str) -> NoReturn:
        self.num_faults += 1
        raise RuntimeError(why)


@dataclass
class Ticket:
    """One submitted request and what it must come to."""

    request: Request
    expected: list[int]
    must_fail: bool
    may_fail: bool = False


@dataclass
class Server:
    """An engine on the fakes, every admission watched; a step is one second of its clock."""

    max_batch_size: int = 3
    max_slots: int | None = 2 * MAX_LEN
    prefill_chunk: int = 8
    prefix_cache: bool = True
    limits: AdmissionLimits = field(default_factory=AdmissionLimits)
    speculates: bool = True
    forgets: int | None = 0
    now: float = 0.0
    tickets: list[Ticket] = field(default_factory=list)
    admissions: list[Admission] = field(default_factory=list)
    _open: list[Ticket] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.target = FakeTarget()
        self.drafter = FakeDrafter(self.max_batch_size, forgets=self.forgets)
        self.engine = Engine(
            self.target,  # type: ignore[arg-type]
            decoder=LetterDecoder(),
            eos_ids=frozenset({EOS}),
            config=EngineConfig(
                max_batch_size=self.max_batch_size,
                max_slots=self.max_slots,
                prefill_chunk=self.prefill_chunk,
                prefix_cache=self.prefix_cache,
                admission=self.limits,
            ),
            max_model_len=MAX_LEN,
            drafter=self.drafter if self.speculates else None,
            max_draft_tokens=MAX_DRAFT,
            costs=None,
            clock=lambda: self.now,
        )
        self.cache = self.engine._cache
        self.scheduler = self.engine._scheduler
        admit = self.scheduler.admit

        def watched() -> Admission | None:
            admission = admit()
            if admission is not None:
                self.admissions.append(admission)
                self.check_salt(admission)
            return admission

        self.scheduler.admit = watched  # type: ignore[method-assign]

    def new(self, prompt: Sequence[int], max_tokens: int = 12, **more) -> Request:
        return self.engine.new_request(prompt, SamplingParams(max_tokens=max_tokens), **more)

    def submit(self, prompt: Sequence[int], max_tokens: int = 12, **more) -> Request:
        request = self.new(prompt, max_tokens, **more)
        self.engine.submit(request)
        self.follow(request)
        return request

    def follow(self, request: Request) -> None:
        prompt = request.token_ids[: request.prompt_len]
        expected = answer(prompt, request.params.max_tokens)
        ticket = Ticket(request, expected, POISON in prompt or NAN in prompt)
        self.tickets.append(ticket)
        self._open.append(ticket)

    def step(self) -> list[Request]:
        self.now += 1.0
        first = self.scheduler.running[:1]
        num_faults = self.engine.stats().faults
        changed = self.engine.step()[0]
        if first and first[0].finish_reason is None and num_faults == self.engine.stats().faults:
            assert first == self.scheduler.running[:1], "the first one always goes on"
        return changed

    def run(self, limit: int = 2000) -> None:
        """Step until nobody waits or runs; a livelock runs into the limit."""
        for _ in range(limit):
            if not self.engine.has_work:
                return
            self.step()
            self.check()
        raise AssertionError("requests that never end")

    def check_salt(self, admission: Admission) -> None:
        if admission.reuse is None:
            return
        salts = {ticket.request.request_id: ticket.request.salt for ticket in self.tickets}
        source, request = salts[admission.reuse.source_id], admission.request
        assert source == request.salt

    def check(self) -> None:
        """What holds between any two calls."""
        running, waiting = self.scheduler.running, self.scheduler.waiting
        rows = [request.row for request in running]
        kept = self.engine._prefixes.rows
        free = self.cache.free_rows

        assert sorted([*rows, *free]) == list(range(self.max_batch_size))
        assert {row.row for row in kept} <= set(free)
        assert self.scheduler.slots_used <= self.scheduler.max_slots
        assert not {*running} & {*waiting}
        for request in running:
            committed = self.cache.committed(request.row)
            assert request.token_ids[:committed] == read_row(self.cache, request.row, committed)
        for row in kept:
            assert list(row.token_ids) == read_row(self.cache, row.row, len(row.token_ids))
            waits = row.request_id in {request.request_id for request in waiting}
            assert waits if row.is_private else not {POISON, NAN} & {*row.token_ids}
        known = {request.request_id for request in running if request.speculates}
        known |= {row.request_id for row in kept if row.speculates}
        guard = self.engine._drafter
        assert guard is None or guard.is_off or known - guard._lost == {*self.drafter.states}
        self._check_stats()
        for ticket in self._open:
            self._check_ticket(ticket)
        self._open = [ticket for ticket in self._open if ticket.request.finish_reason is None]

    def _check_stats(self) -> None:
        stats = self.engine.stats()
        ended = stats.finished + stats.aborted + stats.failed
        assert stats.submitted == ended + stats.waiting + stats.prefilling + stats.running
        admitted = [t.request for t in self.tickets if t.request.num_admissions]
        assert sum(request.prompt_len for request in admitted) == stats.prompt_tokens
        assert stats.draft_faults == self.drafter.num_faults, "what else fails in it is a mistake"
        emitted = sum(ticket.request.num_output for ticket in self.tickets)
        assert emitted == stats.emitted_tokens

    def _check_ticket(self, ticket: Ticket) -> None:
        request = ticket.request
        emitted = request.token_ids[request.prompt_len :]
        if request.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
            assert ticket.expected == emitted
            assert not ticket.must_fail
        else:
            assert ticket.expected[: len(emitted)] == emitted
        if request.finish_reason is FinishReason.ERROR:
            assert ticket.must_fail or ticket.may_fail, request.error
        if request.finish_reason is not None:
            assert request.cache_row is None
            assert request not in self.scheduler.waiting
