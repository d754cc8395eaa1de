"""``outrider serve``: bind, load, say where and how, serve until told to stop.

Owns what a person sees at the terminal. The address is bound before the model is loaded, so a port
that is taken is reported at once.
"""

from __future__ import annotations

import asyncio
import json
import logging
import shlex
import socket
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

from outrider.commands import console
from outrider.commands.serve_options import ServeOptions
from outrider.errors import UsageError

if TYPE_CHECKING:
    from outrider.llm import LLM

Result = TypeVar("Result")
LOOPBACK_HOSTS = frozenset({"localhost", "127.0.0.1", "[::1]"})


def run(options: ServeOptions, open_llm: Callable[[], LLM]) -> int:
    """Serve the model that ``open_llm`` loads; the exit status.

    Raises:
        UsageError: the address is taken, a key is wrong, or the server's packages are missing.
    """
    options.check()
    keys = options.keys()
    try:
        from outrider.server.running import RunningServer, bind
        from outrider.server.settings import ServerSettings
    except ModuleNotFoundError as problem:
        raise UsageError(
            f"the server needs the package {problem.name!r}: pip install 'outrider[server]'"
        ) from None
    # Checked before the model is loaded; its name is known only afterwards.
    ServerSettings(model_name="", api_keys=keys)
    logging.basicConfig(format="%(name)s: %(message)s", level=logging.WARNING)
    with bind(options.host, options.port) as bound:
        llm = in_passing_thread(open_llm)
        settings = ServerSettings(
            model_name=options.served_model_name or llm.fingerprint.model,
            api_keys=keys,
            allowed_hosts=LOOPBACK_HOSTS if options.is_loopback and not keys else None,
            stream_interval_s=options.stream_interval / 1000,
            drain_timeout_s=options.drain_timeout,
        )
        _print_plan(llm)
        url = _url(options.host, bound)

        def announce() -> None:
            for line in announcement(url, settings.model_name, keys, options.is_loopback):
                console.note(line)

        server = RunningServer(llm, settings, bound, on_ready=announce)
        status = asyncio.run(server.serve())
    console.note("stopped" if status == 0 else "stopped: the engine has failed")
    return status


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


def announcement(url: str, model_name: str, keys: Sequence[str], is_loopback: bool) -> list[str]:
    """Where the server is, a line to try it with, and a warning where one is due."""
    body = json.dumps(
        {"model": model_name, "messages": [{"role": "user", "content": "Hello"}]},
        ensure_ascii=True,
    )
    words = ["curl", f"{url}/v1/chat/completions", "-H", "Content-Type: application/json"]
    line = shlex.join([*words, "-d", body])
    if keys:
        line += ' -H "Authorization: Bearer $OUTRIDER_API_KEY"'
    lines = [f"serving {model_name} at {url} (status page: {url}/)", f"try: {line}"]
    if not keys and not is_loopback:
        lines.append(
            "warning: everybody who can reach this address may use the model; set "
            "OUTRIDER_API_KEY or --api-key-file"
        )
    return [*lines, "Ctrl-C or SIGTERM lets running requests end; a second one aborts them"]


def _print_plan(llm: LLM) -> None:
    plan = llm.memory_plan
    rows = [(what, detail, console.format_bytes(size)) for what, detail, size in plan.rows()]
    rows.append(("total", "", console.format_bytes(plan.total_bytes)))
    table = console.table(("memory plan", "", ""), rows, numbers_from=2)
    console.stderr().print(table)


def _url(host: str, bound: socket.socket) -> str:
    port = bound.getsockname()[1]
    shown = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)
    return f"http://[{shown}]:{port}" if ":" in shown else f"http://{shown}:{port}"
