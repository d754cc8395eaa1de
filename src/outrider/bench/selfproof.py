"""The client proves itself before it judges anybody: what it sees against what is known.

Owns the limits beyond which a client is the bottleneck. The mock server runs in a process of its
own, as a real one does, and writes into every chunk when it sent it::

    paced     a chunk every 10 ms on every connection      -> error of the gaps seen
    flood     chunks as fast as they go                    -> tokens/s that the client can take in

:mod:`outrider.bench.run` does this at the largest concurrency it is going to measure.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from itertools import pairwise

import numpy as np

from outrider.bench.client import Client, Endpoint
from outrider.bench.mock_server import FLOOD, PACED
from outrider.bench.records import Answer, ClientProof, SamplingRecord
from outrider.bench.workloads import Question
from outrider.errors import EndpointError

# Errors of gaps do not add up (a chunk seen late shortens the next gap), so rates and TPOT bear
# far more than single gaps do; these are the limits of single gaps on a machine that is also busy
# with the server under test. A quiet machine shows errors below a tenth of them.
MAX_GAP_ERROR_P50_S = 0.005
MAX_GAP_ERROR_P99_S = 0.030
_NUM_PACED, _NUM_FLOOD = 100, 200  # chunks per connection: about one second, and a burst
_START_S = 30.0


async def prove_client(client: Client, concurrency: int) -> ClientProof:
    """Measure the client on this machine, now, at this concurrency; takes about two seconds.

    Raises:
        EndpointError: the mock server does not start.
    """
    async with _mock_server() as url:
        await _stream(client, url, PACED, concurrency, 10)  # connections are opened, code is warm
        paced = await _stream(client, url, PACED, concurrency, _NUM_PACED)
        started_s = client.clock()
        flood = await _stream(client, url, FLOOD, concurrency, _NUM_FLOOD)
        flood_s = client.clock() - started_s
    return judge_client(paced, flood, flood_s)


def judge_client(paced: Sequence[Answer], flood: Sequence[Answer], flood_s: float) -> ClientProof:
    """What these answers of the mock server say about the client that read them."""
    failed = [answer.error for answer in (*paced, *flood) if answer.error is not None]
    errors = [error for answer in paced for error in _gap_errors(answer)]
    if failed or not errors:
        reason = f"the client lost streams of its own mock server: {(failed or ['no chunks'])[0]}"
        return ClientProof(len(paced), 0, 0.0, 0.0, 0.0, False, reason)
    p50, p99 = (float(value) for value in np.quantile(errors, (0.5, 0.99)))
    reasons = [
        f"{share} of the chunk gaps are seen up to {error * 1e3:.1f} ms wrong, and {limit * 1e3:g} "
        "ms is the limit"
        for share, error, limit in (
            ("half", p50, MAX_GAP_ERROR_P50_S),
            ("99 %", p99, MAX_GAP_ERROR_P99_S),
        )
        if error > limit
    ]
    return ClientProof(
        concurrency=len(paced),
        num_chunks=len(errors),
        gap_error_p50_s=p50,
        gap_error_p99_s=p99,
        max_tokens_per_s=sum(answer.completion_tokens or 0 for answer in flood) / flood_s,
        is_sound=not reasons,
        reason="; ".join(reasons),
    )


def _gap_errors(answer: Answer) -> list[float]:
    """Seen gaps minus sent ones, without sign; the chunks' text is when each was sent."""
    sent = [float(line) for line in answer.text.split()]
    seen = [chunk.at_s for chunk in answer.chunks]
    return [
        abs((seen_b - seen_a) - (sent_b - sent_a))
        for (seen_a, seen_b), (sent_a, sent_b) in zip(pairwise(seen), pairwise(sent), strict=True)
    ]


async def _stream(
    client: Client, url: str, model: str, concurrency: int, num_chunks: int
) -> list[Answer]:
    endpoint = Endpoint(url=url, model=model, asks_running_usage=True)
    sampling = SamplingRecord(
        temperature=0.0, top_p=1.0, max_tokens=num_chunks, seed=None, ignore_eos=False
    )
    question = Question("mock", "mock", (("user", "When?"),))
    asked = (client.ask(endpoint, question, sampling, None) for _ in range(concurrency))
    return list(await asyncio.gather(*asked))


@asynccontextmanager
async def _mock_server() -> AsyncIterator[str]:
    """Its address; it ends with our end of its stdin, whatever becomes of us."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "outrider.bench.mock_server",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        # Ctrl-C in the terminal is ours to handle; the server just ends with us.
        start_new_session=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        try:
            async with asyncio.timeout(_START_S):
                line = await process.stdout.readline()
        except TimeoutError:
            line = b""
        if not line.startswith(b"http://"):
            raise EndpointError(
                f"the built-in mock server did not start within {_START_S:g} s; without it the "
                "client cannot prove itself: is the machine overloaded?"
            )
        yield line.decode().strip()
    finally:
        process.stdin.close()
        try:
            async with asyncio.timeout(5):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()
