"""Stands between a run and a server that it started, so that the server never outlives the run.

Owns one promise: when the run is gone, however it went (also by SIGKILL, when it can clean up
nothing), the server and all processes that it started go too. Started as a script of its own by
:mod:`outrider.bench.servers`; imports nothing of the package, so it is up at once and small::

    run ---- a pipe that nobody writes to ----> guardian ---- starts ----> server, its workers
             closed by the system with the run               all in the guardian's process group

A pipe and not a death signal of the kernel's: it works wherever there are pipes, and reaches the
server's children too.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

GRACE_S = 5.0  # between asking a server to end and ending it


def guard(command: list[str]) -> int:
    """Run the command until it ends by itself, or until stdin is closed; its exit status."""
    # The group is told together, the guardian with it, and it must outlive the telling. A handler
    # and not SIG_IGN, which the server would inherit.
    signal.signal(signal.SIGTERM, lambda *_: None)
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    is_over = threading.Event()
    watch = threading.Thread(target=_end_with_the_run, args=(is_over,), daemon=True)
    watch.start()
    status = process.wait()
    if is_over.is_set():
        watch.join()  # a worker may have stayed behind that did not listen
    return status if status >= 0 else 128 - status


def _end_with_the_run(is_over: threading.Event) -> None:
    """Wait for the end of the pipe, then end the whole group: politely, then for certain."""
    while os.read(0, 4096):
        pass
    is_over.set()
    os.killpg(0, signal.SIGTERM)
    time.sleep(GRACE_S)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(guard(sys.argv[1:]))
