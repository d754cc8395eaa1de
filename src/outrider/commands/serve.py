"""``outrider serve``: bind, load, say where and how, serve until told to stop.

Owns what a person sees at the terminal. Addresses are bound before the model is loaded, so a port
that is taken is reported at once. With ``--also`` one process serves the same weights several times
over, each with a way to draft of its own: how ``bench`` compares them in the memory of one.
"""

from __future__ import annotations

import asyncio
import json
import shlex
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, TypeVar

from outrider.commands import console
from outrider.commands.serve_options import Other, ServeOptions
from outrider.errors import OutriderError, UsageError

if TYPE_CHECKING:
    from outrider.llm import LLM

Result = TypeVar("Result")
LOOPBACK_HOSTS = frozenset({"localhost", "127.0.0.1", "[::1]"})


def run(options: ServeOptions, open_llm: Callable[[], LLM]) -> int:
    """Serve the model that ``open_llm`` loads, and once more for each ``--also``; the exit status.

    Raises:
        UsageError: an address is taken, a key is wrong, or the server's packages are missing.
        OutriderError: as ``open_llm``; begins with the ``--also`` that it is about, if it is.
    """
    options.check()
    keys, others = options.keys(), options.others()
    try:
        from outrider.server.log_names import log_to_stderr
        from outrider.server.running import Front, RunningServer, bind
        from outrider.server.settings import ServerSettings
    except ModuleNotFoundError as problem:
        raise UsageError(
            f"the server needs the package {problem.name!r}: pip install 'outrider[server]'"
        ) from None
    # Checked before the model is loaded; its name is known only afterwards.
    ServerSettings(model_name="", api_keys=keys)
    log_to_stderr()
    with ExitStack() as stack:
        ports = [options.port, *(other.port for other in others)]
        sockets = [stack.enter_context(bind(options.host, port)) for port in ports]
        llms = in_passing_thread(lambda: _open_all(open_llm, others))
        settings = ServerSettings(
            model_name=options.served_model_name or llms[0].fingerprint.model,
            api_keys=keys,
            allowed_hosts=LOOPBACK_HOSTS if options.is_loopback and not keys else None,
            stream_interval_s=options.stream_interval / 1000,
            drain_timeout_s=options.drain_timeout,
        )
        urls = [_url(options.host, bound) for bound in sockets]
        names = [llms[0].speculation.method.value, *(other.name for other in others)]
        _print_plan(llms, names)
        fronts = [
            Front(llm=llm, settings=settings, bound=bound, name=name if others else "")
            for llm, bound, name in zip(llms, sockets, names, strict=True)
        ]

        def announce() -> None:
            for line in announcement(
                dict(zip(urls, names, strict=True)), settings.model_name, keys, options.is_loopback
            ):
                console.note(line)

        status = asyncio.run(RunningServer(fronts, on_ready=announce).serve())
    console.note("stopped" if status == 0 else "stopped: the engine has failed")
    return status


def _open_all(open_llm: Callable[[], LLM], others: Sequence[Other]) -> list[LLM]:
    """The model, and once more with each other method on the same weights."""
    llm = open_llm()
    llms = [llm]
    for other in others:
        try:
            with console.Stages() as stages:
                llms.append(llm.with_speculation(other.speculation, on_progress=stages))
        except OutriderError as problem:
            raise type(problem)(f"--also {other.port}={other.name}: {problem}") from problem
        for warning in llms[-1].warnings:
            console.note(f"warning: {other.name}: {warning}")
    return llms


def in_passing_thread(act: Callable[[], Result]) -> Result:
    """Run ``act`` in a thread that ends with it.

    A thread that computes has a team of OpenMP workers as long as it lives. Were the model loaded
    and tested in the main thread, its idle team and the engine thread's would be more workers than
    there are cores; libgomp then lets them sleep between any two kernels, which doubles a step.
    """
    results: list[Result] = []
    problems: list[BaseException] = []

    def collect() -> None:
        try:
            results.append(act())
        except BaseException as problem:
            problems.append(problem)

    thread = threading.Thread(target=collect, name="loading", daemon=True)
    thread.start()
    thread.join()
    if problems:
        raise problems[0]
    return results[0]


def announcement(
    servers: Mapping[str, str], model_name: str, keys: Sequence[str], is_loopback: bool
) -> list[str]:
    """Where the servers are, a line to try the first with, and a warning where one is due.

    ``servers`` are addresses with the method behind each.
    """
    first = next(iter(servers))
    body = json.dumps(
        {"model": model_name, "messages": [{"role": "user", "content": "Hello"}]},
        ensure_ascii=True,
    )
    words = ["curl", f"{first}/v1/chat/completions", "-H", "Content-Type: application/json"]
    line = shlex.join([*words, "-d", body])
    if keys:
        line += ' -H "Authorization: Bearer $OUTRIDER_API_KEY"'
    lines = [
        f"serving {model_name} at {url} (method {method}, status page: {url}/)"
        for url, method in servers.items()
    ]
    lines.append(f"try: {line}")
    if not keys and not is_loopback:
        where = "this address" if len(servers) == 1 else "these addresses"
        lines.append(
            f"warning: everybody who can reach {where} may use the model; set "
            "OUTRIDER_API_KEY or --api-key-file"
        )
    return [*lines, "Ctrl-C or SIGTERM lets running requests end; a second one aborts them"]


def _print_plan(llms: Sequence[LLM], names: Sequence[str]) -> None:
    """The memory of the first model, and what each other one takes besides."""
    rows: list[tuple[str, str, str]] = []
    total = 0
    for llm, name in zip(llms, names, strict=True):
        whose = "" if llm is llms[0] else f"{name}: "
        for what, detail, size in llm.memory_plan.rows():
            rows.append((f"{whose}{what}", detail, console.format_bytes(size)))
        total += llm.memory_plan.total_bytes
    rows.append(("total", "", console.format_bytes(total)))
    table = console.table(("memory plan", "", ""), rows, numbers_from=2)
    console.stderr().print(table)


def _url(host: str, bound: socket.socket) -> str:
    port = bound.getsockname()[1]
    shown = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)
    return f"http://[{shown}]:{port}" if ":" in shown else f"http://{shown}:{port}"
