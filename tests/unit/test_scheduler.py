"""The scheduler and the engine's order of work, on a fake model and clock.

Contract: whatever is submitted, cancelled, made to wait, reused or broken, every request ends, with
its own text unless it was cancelled or is to blame for a fault; no slot is lost or held twice, and
no request starts on what one of another salt has left.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from outrider.config import AdmissionLimits, EngineConfig
from outrider.errors import OverloadedError, ParameterError
from outrider.kv_cache import KVCache
from outrider.prefix_cache import PrefixCache, shared_len
from outrider.request import Request
from outrider.scheduler import Scheduler
from outrider.types import FinishReason
from tests.serving import MAX_LEN, NAN, POISON, Server, answer, talkative

FAMILIES = [
    [1 + (7 * place + family * place * place) % 9 for place in range(48)] for family in (1, 2)
]
SALTS = ("", "key one", "key two")
DRAFTER_CALLS = ("admit", "adopt", "prefill", "propose", "observe")

prompts = st.builds(
    lambda family, length, tail: [*FAMILIES[family][:length], *tail],
    st.integers(0, 1),
    st.sampled_from([1, 8, 17, 30, 31, 48]),
    st.lists(st.integers(1, 9), max_size=8),
)


class ServerMachine(RuleBasedStateMachine):
    """Traces of submissions, cancellations, faults and steps."""

    @initialize(
        max_batch_size=st.integers(1, 4),
        scale=st.sampled_from([1.0, 1.3, 2.0, None]),
        prefill_chunk=st.sampled_from([1, 8, 64]),
        prefix_cache=st.booleans(),
        speculates=st.booleans(),
        forgets=st.sampled_from([0, 1, None]),
    )
    def start(
        self, max_batch_size, scale, prefill_chunk, prefix_cache, speculates, forgets
    ) -> None:
        self.server = Server(
            max_batch_size=max_batch_size,
            max_slots=None if scale is None else int(scale * MAX_LEN),
            prefill_chunk=prefill_chunk,
            prefix_cache=prefix_cache,
            speculates=speculates,
            forgets=forgets,
            limits=AdmissionLimits(max_waiting=6),
        )

    @rule(
        prompt=prompts,
        max_tokens=st.sampled_from([1, 3, 12, 40]),
        salt=st.sampled_from(SALTS),
        speculates=st.booleans(),
    )
    def submit(self, prompt, max_tokens, salt, speculates) -> None:
        try:
            self.server.submit(prompt, max_tokens, salt=salt, speculates=speculates)
        except OverloadedError:
            assert len(self.server.scheduler.waiting) >= 6

    @rule(prompt=prompts, bad=st.sampled_from([POISON, NAN]), place=st.integers(0, 60))
    def submit_a_bad_one(self, prompt, bad, place) -> None:
        prompt = [*prompt]
        prompt.insert(place % (len(prompt) + 1), bad)
        try:
            self.server.submit(prompt, 8)
        except OverloadedError:
            assert len(self.server.scheduler.waiting) >= 6

    @rule(times=st.sampled_from([1, 1, 2, 5, 20]))
    def step(self, times: int) -> None:
        for _ in range(times):
            self.server.step()
            self.server.check()

    @precondition(lambda self: self.server.tickets)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.server.tickets)).request
        reason = request.finish_reason
        self.server.engine.abort(request)

        assert request.finish_reason == (reason or FinishReason.ABORT)

    @precondition(lambda self: len(self.server.scheduler.running) > 1)
    @rule()
    def the_last_one_waits_again(self) -> None:
        """As for want of slots, but at any moment: in the middle of a prompt too."""
        self.server.engine._preempt(self.server.scheduler.running[-1], keeps=True)

    @rule()
    def fault_in_company(self) -> None:
        """A step that fails once, whoever is in it: nobody is to blame if it goes well alone."""
        self.server.target.fails_in_company = len(self.server.scheduler.ready()) > 1

    @rule(where=st.sampled_from(DRAFTER_CALLS))
    def fault_of_the_drafter(self, where: str) -> None:
        self.server.drafter.fails_at = {where}

    @precondition(lambda self: self.server.tickets)
    @rule(data=st.data(), is_nan=st.booleans())
    def fault_of_the_drafter_on_one(self, data: st.DataObject, is_nan: bool) -> None:
        request = data.draw(st.sampled_from(self.server.tickets)).request
        drafter = self.server.drafter
        (drafter.spoils if is_nan else drafter.fails_on).add(request.request_id)

    @invariant()
    def nothing_is_lost_or_shared(self) -> None:
        self.server.check()

    def teardown(self) -> None:
        if hasattr(self, "server"):
            self.server.run()
            assert all(ticket.request.finish_reason for ticket in self.server.tickets)
            assert self.server.cache.num_free_rows == self.server.max_batch_size


@pytest.mark.draft_faults
class TestServer(ServerMachine.TestCase):
    settings = settings(max_examples=1000, stateful_step_count=30, deadline=None)


@pytest.mark.exact
@pytest.mark.draft_faults
class TestServerAtLength(ServerMachine.TestCase):
    settings = settings(max_examples=2000, stateful_step_count=60, deadline=None)


def long_trace(server: Server, *, seed: int = 0, count: int = 60) -> None:
    """Submissions and cancellations in a random order, checked after each step, to the end."""
    draw = random.Random(seed)
    for _ in range(count):
        prompt = FAMILIES[draw.randrange(2)][: draw.choice([1, 17, 30, 48])]
        prompt = [*prompt, *(draw.randrange(1, 10) for _ in range(draw.randrange(6)))]
        server.submit(prompt, draw.choice([3, 30, 60]), salt=draw.choice(SALTS))
        for _ in range(draw.randrange(4)):
            server.step()
            server.check()
        if draw.random() < 0.1:
            server.engine.abort(draw.choice(server.tickets).request)
            server.check()
        for last in server.scheduler.running[-1:]:
            if server.cache.committed(last.row) < last.prompt_len and draw.random() < 0.5:
                server.engine._preempt(last, keeps=True)  # in the middle of its prompt
                server.check()
    server.run()
    assert all(ticket.request.finish_reason for ticket in server.tickets)


@pytest.mark.parametrize("forgets", [0, 1, None])
def test_a_long_trace_meets_everything_and_every_text_is_its_own(forgets: int | None) -> None:
    """So that the traces above are not vacuous: each thing they are about happens in this one."""
    server = Server(max_slots=int(1.5 * MAX_LEN), forgets=forgets)
    long_trace(server)
    stats = server.engine.stats()
    reuses = [admission.reuse for admission in server.admissions if admission.reuse is not None]

    assert stats.preemptions > 0
    assert stats.prefix_hits > 0 or forgets is None
    assert stats.aborted > 0
    assert {True, False} == {reuse.takes_over for reuse in reuses}
    assert {True, False} == {
        a.reuse is not None and a.reuse.takes_over for a in server.admissions if a.dropped
    }
    assert any(a.dropped.is_private for a in server.admissions if a.dropped)
    assert stats.speculation.accepted > 0
    assert stats.speculation.drafted > stats.speculation.accepted
    assert (stats.prefix_hit_tokens > 0) == (forgets is not None)


# --- wrong variants that the traces must notice ---------------------------------------------------


def _ignores_the_salt(monkeypatch: pytest.MonkeyPatch) -> None:
    find = PrefixCache.find

    def wrong(self, token_ids, salt):
        found = (find(self, token_ids, other) for other in SALTS)
        return next((match for match in found if match is not None), None)

    monkeypatch.setattr(PrefixCache, "find", wrong)


def _shares_a_token_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(first, second):
        shared = shared_len(first, second)
        return shared + (16 <= shared < min(len(first), len(second)))

    monkeypatch.setattr("outrider.prefix_cache.shared_len", wrong)


def _copies_a_slot_too_few(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(self, source, row, count):
        copy(self, source, row, count - 1)
        self._committed[row] = count

    copy = KVCache.copy_prefix
    monkeypatch.setattr(KVCache, "copy_prefix", wrong)


def _keeps_the_rows_slots_when_it_waits_again(monkeypatch: pytest.MonkeyPatch) -> None:
    allocate = KVCache.allocate

    def wrong(self, row=None, *, committed=0):
        row = allocate(self, row, committed=committed)
        self._committed[row] = max(committed, 1)
        return row

    monkeypatch.setattr(KVCache, "allocate", wrong)


def _lets_everybody_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Scheduler, "surplus", lambda self: None)


def _forgets_those_that_wait_again(monkeypatch: pytest.MonkeyPatch) -> None:
    preempt = Scheduler.preempt

    def wrong(self, request, *, keeps):
        kept = preempt(self, request, keeps=keeps)
        self._waiting.remove(request)
        return kept

    monkeypatch.setattr(Scheduler, "preempt", wrong)


def _sends_the_first_back(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(self):
        return self._admitted[0] if self.slots_used > self.max_slots else None

    monkeypatch.setattr(Scheduler, "surplus", wrong)
    monkeypatch.setattr(
        Scheduler, "_has_room", lambda self, place: self._cache.num_free_rows > place
    )


WRONG: list[Callable[[pytest.MonkeyPatch], None]] = [
    _ignores_the_salt,
    _shares_a_token_too_many,
    _copies_a_slot_too_few,
    _keeps_the_rows_slots_when_it_waits_again,
    _lets_everybody_in,
    _forgets_those_that_wait_again,
    _sends_the_first_back,
]


@pytest.mark.draft_faults  # the fake drafter notices some of them first
@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: wrong.__name__[1:])
def test_a_wrong_scheduler_is_noticed(
    wrong: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong(monkeypatch)
    with pytest.raises(AssertionError):
        long_trace(Server(max_slots=int(1.5 * MAX_LEN)))


# --- one thing at a time --------------------------------------------------------------------------


def emitted(request: Request) -> list[int]:
    return request.token_ids[request.prompt_len :]


def test_a_long_prompt_does_not_hold_up_those_that_decode() -> None:
    server = Server(max_slots=None)
    first = server.submit([1], max_tokens=12)
    server.step()
    late = server.submit(FAMILIES[0], max_tokens=4)
    counts = []
    while late.num_output == 0:
        before = first.num_output
        server.step()
        counts.append(first.num_output - before)

    assert -(-(48 - 24) // server.prefill_chunk) == len(counts)
    assert all(count > 0 for count in counts)


def test_a_step_computes_no_more_of_all_prompts_than_the_chunk() -> None:
    server = Server(max_slots=None, prefill_chunk=10)
    for tail in range(1, 4):
        server.submit([tail, *FAMILIES[0][:40]], max_tokens=2)
    taken = []
    while server.engine.has_work:
        server.now += 1
        record = server.engine.step()[1]
        assert record is not None
        taken.append(record.prefill_tokens)

    assert 3 * (41 - 24) == sum(taken) == server.engine.stats().prefilled_tokens
    assert [10, 10, 10, 10, 10, 1] == [count for count in taken if count]


def test_the_last_one_admitted_waits_again_and_the_first_goes_on() -> None:
    server = Server(max_slots=MAX_LEN, prefix_cache=False, speculates=False)
    prompts = talkative(40, 2)
    first, second = (server.submit(prompt, 40) for prompt in prompts)
    seen = []
    while server.engine.has_work:
        server.step()
        server.check()
        seen.append((first.cache_row is not None, second.cache_row is not None))
    preemptions = server.engine.stats().preemptions

    assert (True, True) in seen
    assert (True, False) in seen
    assert (False, True) not in seen[: seen.index((True, False))]
    assert preemptions >= 1
    assert [answer(prompt, 40) for prompt in prompts] == [emitted(first), emitted(second)]


def test_the_queue_time_ends_with_the_first_admission() -> None:
    server = Server(max_batch_size=1, max_slots=None)
    server.submit([1], max_tokens=1)
    second = server.submit([2], max_tokens=1)
    server.run()

    assert 2.0 == second.timing().queue_s
    assert 2.0 == second.timing().total_s


def test_a_request_that_goes_on_from_another_computes_only_the_rest() -> None:
    server = Server(max_slots=None)
    first = server.submit(FAMILIES[0][:40], max_tokens=6)
    server.run()
    follow_up = server.submit([*first.token_ids, 3, 4], max_tokens=6)
    server.run()
    stats = server.engine.stats()

    assert len(first.token_ids) - 1 == follow_up.num_reused == stats.prefix_hit_tokens
    assert 40 - 24 == stats.prefilled_tokens
    assert server.admissions[-1].reuse is not None
    assert server.admissions[-1].reuse.takes_over


def test_a_long_memory_is_copied_for_a_short_beginning() -> None:
    server = Server(max_slots=None)
    server.submit(FAMILIES[0], max_tokens=4)
    server.run()
    branch = server.submit([*FAMILIES[0][:20], 9, 9, 9], max_tokens=4)
    server.run()
    again = server.submit([*FAMILIES[0], 5], max_tokens=4)
    server.run()

    assert 20 == branch.num_reused
    assert 48 == again.num_reused


def test_a_running_request_lends_what_it_has_committed() -> None:
    server = Server(max_slots=None)
    first = server.submit(FAMILIES[0][:30], max_tokens=30)
    while first.num_output < 2:
        server.step()
    second = server.submit([*FAMILIES[0][:30], 9], max_tokens=4)
    server.run()

    assert 30 == second.num_reused
    assert not any(a.reuse.takes_over for a in server.admissions if a.reuse is not None)


def test_several_answers_to_one_prompt_compute_it_once() -> None:
    server = Server(max_slots=None)
    server.engine.submit_all([server.new(FAMILIES[0], max_tokens=6) for _ in range(3)])
    for request in server.scheduler.waiting:
        server.follow(request)
    server.run()

    assert 48 - 24 == server.engine.stats().prefilled_tokens
    assert [0, 47, 47] == [ticket.request.num_reused for ticket in server.tickets]


def test_little_in_common_is_not_worth_waiting_for() -> None:
    server = Server(max_slots=None)
    server.submit(FAMILIES[0], max_tokens=6)
    server.submit([*FAMILIES[0][:20], *FAMILIES[1][:28]], max_tokens=6)
    server.step()

    assert 2 == len(server.scheduler.running)
    server.run()


@pytest.mark.parametrize("salt", ["", "key two"])
def test_another_salt_shares_nothing(salt: str) -> None:
    server = Server(max_slots=None)
    server.submit(FAMILIES[0][:40], max_tokens=4, salt="key one")
    server.run()
    other = server.submit(FAMILIES[0][:40], max_tokens=4, salt=salt)
    same = server.submit(FAMILIES[0][:40], max_tokens=4, salt="key one")
    server.run()

    assert 0 == other.num_reused
    assert 39 == same.num_reused


@pytest.mark.parametrize("bad", [NAN, POISON])
def test_nothing_of_a_request_that_ended_in_error_is_reused(bad: int) -> None:
    prompt = [*FAMILIES[0][:40], bad]
    server = Server(max_slots=None)
    failed = server.submit(prompt, max_tokens=4)
    server.run()
    again = server.submit(FAMILIES[0][:40], max_tokens=4)
    server.run()

    assert FinishReason.ERROR == failed.finish_reason
    assert 0 == again.num_reused
    assert 1 == len(server.engine._prefixes.rows)


def test_what_was_aborted_before_its_first_token_is_not_reused() -> None:
    """Its rows may hold what is not finite: no logits have been seen behind them."""
    server = Server(max_slots=None)
    request = server.submit(FAMILIES[0], max_tokens=4)
    server.step()
    server.engine.abort(request)

    assert not server.engine._prefixes.rows
    assert server.engine.stats().aborted == 1


# --- the bounded queue ----------------------------------------------------------------------------


def test_a_full_queue_refuses_and_takes_again_later() -> None:
    server = Server(max_batch_size=1, limits=AdmissionLimits(max_waiting=2))
    for _ in range(3):  # one row is free: the head of the queue does not count
        server.submit([1, 2], max_tokens=2)
    with pytest.raises(OverloadedError, match="3 requests would wait, at most 2 may"):
        server.engine.submit(server.new([1, 2]))
    server.run()
    server.submit([1, 2], max_tokens=2)
    server.run()

    assert (4, 1, 4) == tuple(
        getattr(server.engine.stats(), name) for name in ("submitted", "refused", "finished")
    )


def test_a_queue_is_bounded_in_tokens_too() -> None:
    server = Server(max_batch_size=1, limits=AdmissionLimits(max_waiting_tokens=10))
    server.submit([1] * 40, max_tokens=2)  # runs at once, however long it is
    server.submit([1] * 9, max_tokens=2)
    with pytest.raises(OverloadedError, match="11 tokens would wait, at most 10 may"):
        server.engine.submit(server.new([1, 2]))
    server.submit([1], max_tokens=2)
    server.run()

    assert 3 == server.engine.stats().finished


def test_answers_that_belong_together_are_queued_together_or_not_at_all() -> None:
    server = Server(max_batch_size=2, limits=AdmissionLimits(max_waiting=1))
    with pytest.raises(OverloadedError):
        server.engine.submit_all([server.new([1, 2]) for _ in range(4)])
    assert not server.engine.has_work
    server.engine.submit_all([server.new([1, 2]) for _ in range(3)])

    assert 3 == server.engine.stats().waiting


def test_nobody_waits_where_the_limit_is_none_at_all() -> None:
    server = Server(max_batch_size=1, limits=AdmissionLimits(max_waiting=0))
    server.submit([1], max_tokens=2)
    with pytest.raises(OverloadedError):
        server.engine.submit(server.new([1]))


# --- cancelling -----------------------------------------------------------------------------------


def test_cancelling_frees_at_every_stage() -> None:
    server = Server(max_batch_size=2, max_slots=MAX_LEN, prefix_cache=False, speculates=False)
    first, second = talkative(40, 2)
    decoding = server.submit(first, 40)
    server.step()
    again = server.submit(second, 40)
    while server.engine.stats().preemptions == 0:
        server.step()
    waiting = server.submit([4], 40)
    server.engine.abort(again)  # made to wait
    server.engine.abort(waiting)  # never ran
    server.engine.abort(decoding)
    prefilling = server.submit(FAMILIES[0][:40], 2)
    server.step()
    stats = server.engine.stats()
    server.engine.abort(prefilling)
    server.check()

    assert (0, 0, 1, 40) == (stats.waiting, stats.running, stats.prefilling, stats.slots_used)
    assert 4 == server.engine.stats().aborted
    assert 0 == server.engine.stats().slots_used
    assert not server.engine.has_work


# --- faults ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [3, 40], ids=["in its first step", "in prefill"])
def test_a_fault_ends_the_request_that_is_to_blame_and_no_other(length: int) -> None:
    server = Server(max_slots=None, prefix_cache=False)
    good = [server.submit([7, 2], 12), server.submit([3] * 40, 12)]
    server.step()
    bad = server.submit([POISON, *FAMILIES[0][:length]], 12)
    server.run()

    assert FinishReason.ERROR == bad.finish_reason
    assert "an internal fault ended this request (RuntimeError)" == bad.error
    assert [answer([7, 2], 12), answer([3] * 40, 12)] == [emitted(request) for request in good]
    assert server.engine.stats().faults >= 1
    assert 1 == server.engine.stats().failed


def test_a_fault_in_the_middle_of_a_change_is_pinned_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = Server(max_slots=None, speculates=False)
    requests = [server.submit([place, 5], 12) for place in (1, 2, 3)]
    server.step()

    def broken(token: int) -> None:
        raise RuntimeError("half done")

    monkeypatch.setattr(requests[1].output._window, "push", broken)
    server.step()
    server.tickets[1].may_fail = True

    assert FinishReason.ERROR == requests[1].finish_reason
    server.run()

    assert answer([1, 5], 12) == emitted(requests[0])
    assert answer([3, 5], 12) == emitted(requests[2])


def test_a_target_that_always_fails_ends_everybody_and_hangs_nobody() -> None:
    server = Server(max_slots=None)
    requests = [
        server.submit([place, *FAMILIES[0][:length]], 12)
        for place, length in ((1, 2), (2, 40), (3, 30))
    ]
    for ticket in server.tickets:
        ticket.may_fail = True

    def broken(*_, **__):
        raise MemoryError

    server.target.forward = broken  # type: ignore[method-assign]
    server.run(limit=50)

    assert [FinishReason.ERROR] * 3 == [request.finish_reason for request in requests]


# --- settings -------------------------------------------------------------------------------------


def test_fewer_slots_than_one_request_may_need_are_refused() -> None:
    with pytest.raises(ParameterError, match="max_slots: 63 is less than one request may need"):
        Server(max_slots=MAX_LEN - 1)
    with pytest.raises(ParameterError, match="max_slots: 63 is outside the allowed range 64"):
        EngineConfig(max_slots=63, max_model_len=64)


@pytest.mark.parametrize(
    ("name", "value"),
    [("max_waiting", -1), ("max_waiting", 1.5), ("max_waiting_tokens", True)],
)
def test_a_senseless_limit_is_refused(name: str, value: object) -> None:
    with pytest.raises(ParameterError, match=name):
        AdmissionLimits(**{name: value})  # type: ignore[arg-type]


def test_the_limits_are_given_as_such() -> None:
    with pytest.raises(ParameterError, match="admission: 5 is not an AdmissionLimits"):
        EngineConfig(admission=5)  # type: ignore[arg-type]
    with pytest.raises(ParameterError, match="prefix_cache: 'yes'"):
        EngineConfig(prefix_cache="yes")  # type: ignore[arg-type]
