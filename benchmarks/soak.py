"""A server under twice its load for minutes, a storm of clients that leave, and two ends.

Starts ``outrider serve`` on the embedded model and the loopback, and drives it::

    capacity    as many users as the batch has places, each asking again at once
    overload    twice that rate, open loop: nobody waits for anybody; half of them stream
    storm       400 requests, every other client leaves at a random point; then a full batch that
                leaves at one moment
    drain       SIGTERM with open streams: they end well, the process ends with status 0
    kill        SIGKILL with open streams, on a second server: each ends with an error

    python benchmarks/soak.py --minutes 10 --json > soak.json

Exit status 1 when a bound is broken. Clients share the machine with the server, so its figures are
no measure of speed. Flags that are not this script's own go to the server. Progress goes to stderr.
Needs ``outrider[server,bench]`` and a system with signals and ``ps``.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import aiohttp
from soak_load import (
    Clients,
    HealthWatch,
    MemoryWatch,
    ServerProcess,
    bundled_prompts,
    leave_at_once,
    measure_capacity,
    offer,
    open_streams,
    status,
    storm,
    until_free,
)

from outrider.commands.console import note, stdout, table

SCHEMA_VERSION = 1
NUM_STORM, NUM_STREAMS = 400, 4
HEALTH_MS, FREE_S, KILL_S, GROWTH = 100.0, 1.0, 2.0, 0.02
ANSWERED, ALLOWED = {"200"}, {"200", "429", "503"}


@dataclass(frozen=True, slots=True)
class Figures:
    """What was seen, in the order in which it happened."""

    capacity_rps: float
    offered_rps: float
    overload_s: float
    overload_ends: dict[str, int]
    health_p99_ms: float
    health_num_bad: int
    slots_after_overload: int
    rss_mib: tuple[float, float, float]
    storm_ends: dict[str, int]
    storm_free_s: float
    slots_after_storm: int
    drain_s: float
    drain_exit_status: int | None
    drain_ends: dict[str, int]
    kill_s: float
    kill_ends: dict[str, int]
    failed: int
    faults: int


@dataclass(frozen=True, slots=True)
class Check:
    """One figure beside its bound."""

    name: str
    seen: str
    bound: str
    holds: bool


def thirds(mib: Sequence[float]) -> tuple[float, float, float]:
    """The highest value of the first, the middle and the last third."""
    size = max(1, len(mib) // 3)
    return max(mib[:size]), max(mib[size : 2 * size] or mib), max(mib[-size:])


def checks(figures: Figures, drain_timeout_s: float) -> list[Check]:
    """Every bound, and whether it holds."""
    first, middle, last = figures.rss_mib

    def of(name: str, ends: dict[str, int], allowed: set[str]) -> Check:
        holds = bool(ends) and set(ends) <= allowed
        return Check(name, counts(ends), " or ".join(sorted(allowed)), holds)

    return [
        of("overload: requests ended with", figures.overload_ends, ALLOWED),
        Check(
            "overload: some answered, some refused",
            counts(figures.overload_ends),
            "both",
            {"200", "429"} <= set(figures.overload_ends),
        ),
        Check(
            "overload: /health p99",
            f"{figures.health_p99_ms:.1f} ms",
            f"< {HEALTH_MS:g} ms",
            figures.health_p99_ms < HEALTH_MS and figures.health_num_bad == 0,
        ),
        Check(
            "overload: slots in use after it",
            str(figures.slots_after_overload),
            "0",
            figures.slots_after_overload == 0,
        ),
        Check(
            "overload: memory at start, middle, end",
            f"{first:.0f}, {middle:.0f}, {last:.0f} MiB",
            f"end < middle + {GROWTH:.0%}",
            last < middle * (1 + GROWTH),
        ),
        of("storm: requests ended with", figures.storm_ends, ANSWERED | {"left"}),
        Check(
            "storm: slots free after a full batch left",
            f"{figures.storm_free_s:.2f} s",
            f"< {FREE_S:g} s",
            figures.storm_free_s < FREE_S and figures.slots_after_storm == 0,
        ),
        of("drain: open streams ended with", figures.drain_ends, ANSWERED),
        Check(
            "drain: SIGTERM to the end, exit status",
            f"{figures.drain_s:.1f} s, {figures.drain_exit_status}",
            f"< {drain_timeout_s + 2:g} s, 0",
            figures.drain_s < drain_timeout_s + 2 and figures.drain_exit_status == 0,
        ),
        of("kill: open streams ended with", figures.kill_ends, {"cut"}),
        Check(
            "kill: SIGKILL to the last stream's end",
            f"{figures.kill_s:.2f} s",
            f"< {KILL_S:g} s",
            figures.kill_s < KILL_S,
        ),
        Check(
            "requests failed, steps that raised",
            f"{figures.failed}, {figures.faults}",
            "0, 0",
            figures.failed == figures.faults == 0,
        ),
    ]


def counts(ends: dict[str, int]) -> str:
    """``200: 5, 429: 3``."""
    return ", ".join(f"{end}: {count}" for end, count in sorted(ends.items())) or "none"


async def soak(arguments: argparse.Namespace, flags: Sequence[str]) -> Figures:
    """Both servers, one after the other."""
    prompts = bundled_prompts(arguments.prompts)
    # A connection per client: one that leaves closes its own.
    session = aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, force_close=True),
        timeout=aiohttp.ClientTimeout(total=None),
    )

    def clients(server: ServerProcess) -> Clients:
        return Clients(server, session, prompts, arguments.max_tokens)

    async with session:
        with ServerProcess(flags) as server:
            note(f"soak: {server.model} at {server.url}; measuring its capacity")
            users, first = arguments.batch, clients(server)
            rate = await measure_capacity(first, users, arguments.warmup)
            seconds = 60.0 * arguments.minutes
            note(f"soak: {rate:.2f} requests/s; offering {2 * rate:.2f} for {seconds:g} s")
            overload = clients(server)
            started = time.monotonic()
            async with HealthWatch(server) as health, MemoryWatch(server) as memory:
                await offer(overload, 2 * rate, seconds)
                overload_s = time.monotonic() - started
            _, slots = await until_free(overload, 30.0)
            note(f"soak: {counts(overload.ends)}; a storm of {arguments.storm}")
            leaving = clients(server)
            await storm(leaving, arguments.storm, at_once=4 * users)
            # At last a full batch that leaves at one moment, in the middle of its answers.
            await leave_at_once(await open_streams(leaving, users, 1000))
            free_s, storm_slots = await until_free(leaving, 30.0)
            after = await status(leaving)
            note("soak: SIGTERM with open streams")
            draining = clients(server)
            tasks = await open_streams(draining, NUM_STREAMS, 128)
            drain_s, exit_status = await server.stop(arguments.drain_timeout + 10)
            await asyncio.gather(*tasks)
        with ServerProcess(flags) as server:
            note("soak: SIGKILL with open streams")
            killed = clients(server)
            tasks = await open_streams(killed, NUM_STREAMS, 1000)
            started = time.monotonic()
            server.process.send_signal(signal.SIGKILL)
            await asyncio.gather(*tasks)
            kill_s = time.monotonic() - started
    return Figures(
        capacity_rps=rate,
        offered_rps=2 * rate,
        overload_s=overload_s,
        overload_ends=dict(overload.ends),
        health_p99_ms=health.p99_ms,
        health_num_bad=health.num_bad,
        slots_after_overload=slots,
        rss_mib=thirds(memory.mib),
        storm_ends=dict(leaving.ends),
        storm_free_s=free_s,
        slots_after_storm=storm_slots,
        drain_s=drain_s,
        drain_exit_status=exit_status,
        drain_ends=dict(draining.ends),
        kill_s=kill_s,
        kill_ends=dict(killed.ends),
        failed=after["failed"],
        faults=after["faults"],
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run it all and print the table; 1 when a bound is broken."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=10.0, help="of overload")
    parser.add_argument("--warmup", type=float, default=30.0, help="seconds to measure capacity")
    parser.add_argument("--storm", type=int, default=NUM_STORM, help="requests in the storm")
    parser.add_argument("--batch", type=int, default=8, help="the server's --max-batch-size")
    parser.add_argument("--max-tokens", type=int, default=32, help="of each answer")
    parser.add_argument("--drain-timeout", type=float, default=30.0)
    parser.add_argument("--prompts", type=Path, help="JSONL; the bundled ones unless given")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    arguments, more = parser.parse_known_args(argv)
    # A short queue is full soon; the storm fits in.
    flags = ["--max-batch-size", str(arguments.batch), "--max-model-len", "2048"]
    flags += ["--max-waiting", str(4 * arguments.batch)]
    flags += ["--drain-timeout", str(arguments.drain_timeout), *more]
    figures = asyncio.run(soak(arguments, flags))
    found = checks(figures, arguments.drain_timeout)
    if arguments.json:
        document = {
            "schema_version": SCHEMA_VERSION,
            "server_flags": flags,
            "figures": asdict(figures),
            "checks": [asdict(check) for check in found],
        }
        print(json.dumps(document, indent=2))
    else:
        rows = [
            (check.name, check.seen, check.bound, "yes" if check.holds else "NO") for check in found
        ]
        title = (
            f"{figures.offered_rps:.2f} requests/s offered, twice the capacity, "
            f"for {figures.overload_s:.0f} s"
        )
        stdout().print(table(("", "seen", "bound", "holds"), rows, title=title))
    return 0 if all(check.holds for check in found) else 1


if __name__ == "__main__":
    sys.exit(main())
