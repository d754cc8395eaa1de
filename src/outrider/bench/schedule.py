"""When requests are due: arrival times of an open load, and nothing about sending them.

Owns the arrival processes and the reading of traces. A closed load has no arrival times: a request
is due when a slot gets free, which only :mod:`outrider.bench.blocks` can know.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from outrider.bench.records import Load, LoadKind
from outrider.errors import ParameterError

_TRACE_FORMS = '{"at_s": seconds} or {"timestamp": milliseconds} per line'


def arrival_times(load: Load, num_requests: int, seed: int) -> tuple[float, ...]:
    """Seconds from the start at which each request is due, rising; the first is at 0.

    Poisson and gamma gaps have the mean ``1 / value``; a gamma's coefficient of variation is the
    load's burstiness (1 is Poisson, above it arrivals come in bursts). The same seed gives the
    same times, so every arm of a block meets the same arrivals.

    Raises:
        ParameterError: the load is closed, or its trace has fewer arrivals than requests.
    """
    if load.kind is LoadKind.CLOSED:
        raise ParameterError(f"load {load.name}: has no arrival times")
    if load.kind is LoadKind.TRACE:
        times = read_trace(Path(load.path or ""))
        if len(times) < num_requests:
            raise ParameterError(
                f"--trace: {load.path} has {len(times)} arrivals and a block has {num_requests} "
                "requests; give a longer trace or lower --requests"
            )
        return tuple(time_s / load.value for time_s in times[:num_requests])
    cv = load.burstiness if load.kind is LoadKind.GAMMA else 1.0
    shape = 1.0 / cv**2
    random = np.random.default_rng(seed)
    gaps = random.gamma(shape, 1.0 / (load.value * shape), size=num_requests - 1)
    return (0.0, *np.cumsum(gaps).tolist())


def read_trace(path: Path) -> tuple[float, ...]:
    """Arrival times in seconds from the first one.

    Raises:
        ParameterError: the file cannot be read, or a line is no arrival or goes back in time;
            names the line.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as problem:
        raise ParameterError(f"--trace: {path} cannot be read: {problem}") from None
    times: list[float] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where = f"--trace: {path}, line {number}"
        time_s = _arrival(where, line)
        if times and time_s < times[-1]:
            raise ParameterError(f"{where}: {time_s:g} s is before the line above it; sort them")
        times.append(time_s)
    if not times:
        raise ParameterError(f"--trace: {path} holds no arrivals; give {_TRACE_FORMS}")
    return tuple(time_s - times[0] for time_s in times)


def _arrival(where: str, line: str) -> float:
    try:
        row = json.loads(line)
    except ValueError:
        row = None
    for key, unit_s in (("at_s", 1.0), ("timestamp", 1e-3)):
        value = row.get(key) if isinstance(row, dict) else None
        if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1e15:
            return value * unit_s
    raise ParameterError(f"{where}: is no arrival; give {_TRACE_FORMS}")
