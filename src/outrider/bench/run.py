"""One run from the first check to the last block: what has to happen in which order.

Owns the sequence, the resuming and the progress; each step is another module's::

    selfproof   the client proves itself                 or nothing is measured
    servers     what has to be started is started        all at once, or one process at a time
    probe       every server says who it is              one model everywhere, or nothing is
    blocks      the order of turns
    drive       a turn: warm-up where the server is cold, then the questions
    store       the turn's records are kept              from here on it need not be measured again

Interrupted anywhere, the same call goes on with the first block that is not complete.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.bench import environment
from outrider.bench.arms import ArmSpec, without_secrets
from outrider.bench.blocks import Turn, block_questions, plan_turns
from outrider.bench.client import IDLE_S, Client, Endpoint
from outrider.bench.drive import run_turn, warm_up_questions, warm_up_turn
from outrider.bench.probe import Probed, probe
from outrider.bench.records import (
    ArmRecord,
    BlockKind,
    ClientProof,
    Load,
    RequestRecord,
    RunData,
    RunRecord,
    SamplingRecord,
)
from outrider.bench.selfproof import prove_client
from outrider.bench.servers import Server
from outrider.bench.store import RunFolder, complete_indices, read_run
from outrider.bench.workloads import Workload
from outrider.errors import EndpointError, ParameterError

OPEN_REQUESTS = 32  # of a block under an open load, which has no slots to count by
SHARED_LOG = "shared"  # of a process that serves several arms; its lines say which
_PROOF_CONCURRENCY = 16  # where no load is closed


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchSettings:
    """What is compared, under which loads, how often.

    ``requests`` is per block and arm; None takes ``rounds`` of every slot, twice as many for one
    user, and 32 under an open load. ``one_at_a_time`` stops a started process before the next one
    starts, for machines that cannot hold all.

    Raises:
        ParameterError: a value is out of range, or a load is there twice.
    """

    arms: tuple[ArmSpec, ...]
    sampling: SamplingRecord
    loads: tuple[Load, ...]
    num_blocks: int = 8
    num_aa_blocks: int = 3
    requests: int | None = None
    rounds: int = 4
    served_model: str = ""
    arrival_seed: int = 1
    one_at_a_time: bool = False
    start_timeout_s: float = 600.0
    idle_s: float = IDLE_S
    judging: Mapping[str, Any] | None = None  # margins and objectives, fixed before measuring

    def __post_init__(self) -> None:
        if not 1 <= self.num_blocks <= 1000:
            raise ParameterError(f"--blocks: {self.num_blocks} is outside 1 .. 1000")
        if not 0 <= self.num_aa_blocks <= 1000:
            raise ParameterError(f"--aa-blocks: {self.num_aa_blocks} is outside 0 .. 1000")
        if self.requests is not None and not 1 <= self.requests <= 1_000_000:
            raise ParameterError(f"--requests: {self.requests} is outside 1 .. 1000000")
        if not self.loads:
            raise ParameterError("no load: give --concurrency, --rate or --trace")
        names = [load.name for load in self.loads]
        twice = [name for place, name in enumerate(names) if name in names[:place]]
        if twice:
            raise ParameterError(f"load {twice[0]} is there twice; name each load once")
        for load in self.loads:
            if load.concurrency is not None and self.num_requests(load) < load.concurrency:
                raise ParameterError(
                    f"--requests: {self.requests} is fewer than the {load.concurrency} in flight; "
                    "such a block never reaches its load"
                )

    def num_requests(self, load: Load) -> int:
        """Questions of one arm's turn."""
        if self.requests is not None:
            return self.requests
        if load.concurrency is None:
            return OPEN_REQUESTS
        return self.rounds * max(2, load.concurrency)

    def to_json(self, workload: Workload) -> dict[str, Any]:
        """Everything that a resumed run must have in common with what is there."""
        return {
            "arms": [arm.to_json() for arm in self.arms],
            "loads": [load.name for load in self.loads],
            "num_blocks": self.num_blocks,
            "num_aa_blocks": self.num_aa_blocks,
            "requests": {load.name: self.num_requests(load) for load in self.loads},
            "prompt_hash": workload.record.prompt_hash,
            "sampling": {name: getattr(self.sampling, name) for name in SamplingRecord.__slots__},
            "served_model": self.served_model,
            "arrival_seed": self.arrival_seed,
            "one_at_a_time": self.one_at_a_time,
            "judging": dict(self.judging or {}),
        }


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a run is; ``left_s`` is None before anything was timed.

    ``stage`` is a sentence. ``turn`` is the one that is under way, one of ``num_of_kind`` blocks of
    its kind at its load; ``last`` are its requests once it has ended.
    """

    stage: str
    num_done: int
    num_turns: int
    left_s: float | None
    turn: Turn | None = None
    num_of_kind: int = 0
    last: Sequence[RequestRecord] = ()
    is_block_done: bool = False


OnProgress = Callable[[Progress], None]


class RunClock:
    """Seconds since the run began; a resumed run goes on where its records end."""

    def __init__(self, offset_s: float = 0.0) -> None:
        self._zero_s = time.monotonic() - offset_s

    def __call__(self) -> float:
        """Seconds since the run began."""
        return time.monotonic() - self._zero_s


async def run_bench(
    settings: BenchSettings, workload: Workload, out: Path, on_progress: OnProgress
) -> RunData:
    """Measure everything that is not in ``out`` yet, and return all of it.

    Raises:
        ParameterError: ``out`` holds another run, or something else.
        EndpointError: the client is the bottleneck, or a server cannot be measured; what is
            complete by then stays.
        FailureError: ``out`` cannot be written; what is complete by then stays.
    """
    folder = RunFolder(out)
    earlier = read_run(out) if folder.holds_run() else None
    asked = settings.to_json(workload)
    if earlier is not None:
        _refuse_other(out, earlier.run.settings, asked)
    else:
        folder.check()
    ended_s = [block.ended_s for block in earlier.blocks] if earlier is not None else []
    clock = RunClock(max(ended_s, default=0.0))
    async with Client(clock, idle_s=settings.idle_s) as client:
        measuring = _Run(settings, workload, folder, client, on_progress)
        await measuring.measure(asked, earlier)
    return read_run(out)


def settings_hash(asked: Mapping[str, Any]) -> str:
    """Twelve hex digits that name what was asked for."""
    canonical = json.dumps(asked, ensure_ascii=True, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode("ascii")).hexdigest()[:12]


class _Run:
    """The moving parts of one run."""

    def __init__(
        self,
        settings: BenchSettings,
        workload: Workload,
        folder: RunFolder,
        client: Client,
        on_progress: OnProgress,
    ) -> None:
        self._settings, self._workload, self._folder = settings, workload, folder
        self._client, self._on_progress = client, on_progress
        self._specs = {spec.name: spec for spec in settings.arms}
        # What was started, by the arms that it serves; closing a stack ends the process.
        self._started: dict[tuple[str, ...], AsyncExitStack] = {}
        self._probed: dict[str, Probed] = {}
        self._warm: dict[str, Load] = {}  # the load that each running server was warmed up for
        self._turns = plan_turns(
            list(self._specs), settings.loads, settings.num_blocks, settings.num_aa_blocks
        )
        self._num_done = 0
        self._spent_s: list[float] = []

    async def measure(self, asked: Mapping[str, Any], earlier: RunData | None) -> None:
        """All turns that are left."""
        proof = await self._prove_client()
        try:
            for name in self._specs:
                await self._ready(name)
            run = self._conditions(asked, proof)
            if earlier is None:
                self._folder.create(run)
            else:
                _refuse_other_servers(earlier.run, run)
            done = complete_indices(self._folder.path, run)
            # Warm-ups have indices of their own, beyond those of the plan and of earlier sessions.
            warm_up_index = self._next_free_index()
            for turn in self._turns:
                if turn.index in done:
                    self._num_done += 1
                    continue
                warm_up_index += await self._turn(turn, warm_up_index)
        finally:
            for stack in self._started.values():
                await stack.aclose()
        self._tell("measured")

    async def _prove_client(self) -> ClientProof:
        self._tell("the client proves itself against a mock server")
        closed = [load.concurrency for load in self._settings.loads if load.concurrency]
        proof = await prove_client(self._client, max(closed, default=_PROOF_CONCURRENCY))
        if not proof.is_sound:
            raise EndpointError(
                f"this client would be measured instead of the servers: {proof.reason}; quiet the "
                "machine, lower the concurrency, or run the client on another machine"
            )
        return proof

    async def _ready(self, name: str) -> Endpoint:
        """The arm's endpoint, its server running and probed."""
        spec = self._specs[name]
        if spec.command is None:
            if name not in self._probed:
                self._probed[name] = await self._probe(name, spec.url or "")
            return self._probed[name].endpoint
        if spec.served_with not in self._started:
            await self._start(spec.served_with, spec.command)
        return self._probed[name].endpoint

    async def _start(self, arms: tuple[str, ...], command: Sequence[str]) -> None:
        """Start the process that serves these arms, and probe each."""
        if self._settings.one_at_a_time:
            for others in list(self._started):
                for other in others:
                    self._warm.pop(other, None)
                await self._started.pop(others).aclose()
        stack = AsyncExitStack()
        server = Server(arms, command, self._folder.log(arms[0] if len(arms) == 1 else SHARED_LOG))
        # Registered first: whatever goes wrong from here on, the process ends with the run.
        self._started[arms] = stack
        await stack.enter_async_context(server)
        await server.wait_ready(
            self._client,
            self._settings.start_timeout_s,
            lambda waited_s: self._tell(f"starting {', '.join(arms)}: {waited_s:.0f} s"),
        )
        for arm in arms:
            self._probed[arm] = await self._probe(arm, server.url(arm))

    async def _probe(self, name: str, url: str) -> Probed:
        self._tell(f"asking {name} who it is")
        endpoint = Endpoint(
            url=url, model=self._settings.served_model, api_key=environment.api_key()
        )
        question, sampling = self._workload.questions[0], self._settings.sampling
        probed = await probe(self._client, name, endpoint, question, sampling)
        for other, known in self._probed.items():
            if known.endpoint.model != probed.endpoint.model:
                raise EndpointError(
                    f"arm {name} serves {probed.endpoint.model!r} and arm {other} serves "
                    f"{known.endpoint.model!r}: arms may differ in speculation only; give the "
                    "baseline the same model (and the same --served-model-name)"
                )
        return probed

    async def _turn(self, turn: Turn, warm_up_index: int) -> int:
        """Carry out one turn and keep it; 1 if there was a warm-up before it, else 0."""
        settings, questions = self._settings, self._workload.questions
        begun_s = self._client.clock()
        endpoint = await self._ready(turn.arm)
        num_warm_ups = 0
        if self._warm.get(turn.arm) != turn.load:
            self._tell(f"warming up at {turn.load.text}: {turn.arm}")
            warm = warm_up_turn(turn, warm_up_index)
            block, requests = await run_turn(
                self._client,
                endpoint,
                warm,
                warm_up_questions(questions, turn),
                settings.sampling,
                arrival_seed=settings.arrival_seed,
            )
            self._refuse_dead(turn.arm, requests)
            self._folder.write_turn(block, requests)
            self._warm[turn.arm] = turn.load
            num_warm_ups = 1
        self._tell_turn(turn)
        block, requests = await run_turn(
            self._client,
            endpoint,
            turn,
            block_questions(questions, turn.number, settings.num_requests(turn.load)),
            settings.sampling,
            arrival_seed=settings.arrival_seed,
        )
        self._refuse_dead(turn.arm, requests)
        self._folder.write_turn(block, requests)
        self._num_done += 1
        self._spent_s.append(self._client.clock() - begun_s)
        self._tell_turn(turn, requests)
        return num_warm_ups

    def _refuse_dead(self, arm: str, requests: Sequence[RequestRecord]) -> None:
        """A server that answers nothing any more is no measurement; single failures are one."""
        if all(request.error is not None for request in requests):
            raise EndpointError(
                f"arm {arm}: all {len(requests)} requests of a block failed, the first with: "
                f"{requests[0].error}"
            )

    def _next_free_index(self) -> int:
        last = max((turn.index for turn in self._turns), default=-1)
        return max(last, self._folder.last_index()) + 1

    def _conditions(self, asked: Mapping[str, Any], proof: ClientProof) -> RunRecord:
        now = datetime.datetime.now(datetime.UTC)
        sampling = self._settings.sampling
        return RunRecord(
            arms=tuple(self._arm_record(spec) for spec in self._settings.arms),
            workload=self._workload.record,
            sampling=sampling,
            loads=self._settings.loads,
            machine=environment.machine(),
            versions=environment.versions(),
            started=now.isoformat(timespec="seconds"),
            settings=asked,
            settings_hash=settings_hash(asked),
            seeds={
                "arrivals": self._settings.arrival_seed,
                **({} if sampling.seed is None else {"sampling": sampling.seed}),
            },
            client=proof,
        )

    def _arm_record(self, spec: ArmSpec) -> ArmRecord:
        probed = self._probed[spec.name]
        return ArmRecord(
            name=spec.name,
            method=spec.method,
            is_baseline=spec.is_baseline,
            url=probed.endpoint.url,
            model=probed.endpoint.model,
            command=None if spec.command is None else without_secrets(spec.command),
            process=spec.process,
            speculation=spec.speculation,
            engine=probed.engine,
            engine_version=probed.engine_version,
            precision=probed.precision,
            losslessness=probed.losslessness,
            losslessness_detail=probed.losslessness_detail,
            details=probed.details,
        )

    def _tell(self, stage: str, **more: Any) -> None:
        num_left = len(self._turns) - self._num_done
        mean_s = sum(self._spent_s) / len(self._spent_s) if self._spent_s else None
        left_s = None if mean_s is None else mean_s * num_left
        self._on_progress(Progress(stage, self._num_done, len(self._turns), left_s, **more))

    def _tell_turn(self, turn: Turn, last: Sequence[RequestRecord] = ()) -> None:
        """That a turn begins, or has ended."""
        settings, is_aa = self._settings, turn.kind is BlockKind.AA
        num_positions = 2 if is_aa else len(settings.arms)
        self._tell(
            f"{turn.load.text}: {turn.arm}",
            turn=turn,
            num_of_kind=settings.num_aa_blocks if is_aa else settings.num_blocks,
            last=last,
            is_block_done=bool(last) and turn.position == num_positions - 1,
        )


def _refuse_other(out: Path, there: Mapping[str, Any], asked: Mapping[str, Any]) -> None:
    """Blocks under other settings cannot be put beside those that are there."""
    # Through JSON, as those that are there have gone: tuples become lists.
    wanted = json.loads(json.dumps(asked))
    differing = [name for name in wanted if wanted[name] != there.get(name)]
    if differing:
        name = differing[0]
        raise ParameterError(
            f"--out: {out} holds a run with other settings: {name} was {there.get(name)} and is "
            f"now {wanted[name]}; repeat the first command to go on with it, or give a new folder"
        )


def _refuse_other_servers(earlier: RunRecord, now: RunRecord) -> None:
    for before, after in zip(earlier.arms, now.arms, strict=True):
        for what in ("model", "engine", "engine_version", "precision"):
            was, is_now = getattr(before, what), getattr(after, what)
            if was != is_now:
                raise EndpointError(
                    f"arm {after.name}: {what} was {was} when the run began and is {is_now} now; "
                    "bring back the first server, or start a new run in another folder"
                )
