"""The page in a real browser: nothing loaded, nothing logged, every chart drawn, nothing cut off.

Needs Chromium, which is driven over its DevTools protocol; skipped where there is none.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
import pytest

from outrider.bench.judgement import judge
from outrider.bench.records import Load, LoadKind
from outrider.report.page import page
from tests.scripted import ScriptedArm, scripted_run
from tests.unit.test_bench_report import with_counters

_NAMES = ("chromium", "chromium-browser", "google-chrome")
CHROMIUM = next(filter(None, map(shutil.which, _NAMES)), "")
WIDTHS = (400, 1400)
# Text of a drawing that its frame cuts off, and drawings of which nothing is seen.
CUT_OFF = """
[...document.querySelectorAll('figure svg')].flatMap(svg => {
  const frame = svg.getBoundingClientRect();
  const texts = [...svg.querySelectorAll('text')];
  const cut = texts.filter(text => {
    const box = text.getBoundingClientRect();
    return box.left < frame.left - 1 || box.right > frame.right + 1
      || box.top < frame.top - 1 || box.bottom > frame.bottom + 1;
  }).map(text => text.textContent);
  return frame.width > 100 && texts.length > 3 ? cut : ['not drawn'];
})
"""
# What is wider than the window and cannot be scrolled by itself.
TOO_WIDE = """
[...document.querySelectorAll('body *')].filter(element =>
  element.getBoundingClientRect().right > innerWidth + 1
  && !element.closest('svg') && !element.closest('.scroll'))
  .map(element => element.tagName)
"""
SMALLEST_TEXT = """
Math.min(...[...document.querySelectorAll('figure svg')].flatMap(svg => {
  const scale = svg.getBoundingClientRect().width / svg.viewBox.baseVal.width;
  return [...svg.querySelectorAll('text')].map(
    text => scale * parseFloat(getComputedStyle(text).fontSize));
}))
"""

_Result = TypeVar("_Result")

pytestmark = [
    pytest.mark.alone,
    pytest.mark.skipif(not CHROMIUM, reason="no Chromium on this machine"),
]


class Tab:
    """One page of a running browser: calls, and every event that came meanwhile."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._last = 0
        self.events: list[dict[str, Any]] = []

    async def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._last += 1
        await self._socket.send_json({"id": self._last, "method": method, "params": parameters})
        while True:
            message = await self._socket.receive_json(timeout=60)
            if message.get("id") == self._last:
                assert "error" not in message, message
                return message["result"]
            self.events.append(message)

    async def value(self, expression: str) -> Any:
        found = await self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"]["value"]

    async def show(self, path: Path, width: int) -> None:
        """Load a file in a window of this width, and wait until it is laid out."""
        await self.call("Emulation.setDeviceMetricsOverride", width=width, height=900,
                        deviceScaleFactor=1, mobile=width < 600)  # fmt: skip
        num_before = len(self.events)
        await self.call("Page.navigate", url=path.as_uri())
        while "Page.loadEventFired" not in {e["method"] for e in self.events[num_before:]}:
            await asyncio.sleep(0.05)
            await self.value("document.readyState")


@contextmanager
def browser(profile: Path) -> Iterator[int]:
    """A headless browser of its own; its DevTools port."""
    flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run"]
    flags += ["--remote-debugging-port=0", f"--user-data-dir={profile}"]
    process = subprocess.Popen(
        [CHROMIUM, *flags, "about:blank"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        told = profile / "DevToolsActivePort"
        deadline = time.monotonic() + 60
        while not (told.exists() and len(told.read_text().split()) == 2):
            assert process.poll() is None
            assert time.monotonic() < deadline, "the browser does not start"
            time.sleep(0.05)
        yield int(told.read_text().split()[0])
    finally:
        process.terminate()
        process.wait(30)


def in_browser(folder: Path, act: Callable[[Tab], Awaitable[_Result]]) -> _Result:
    async def run(port: int) -> _Result:
        async with aiohttp.ClientSession() as session:
            async with session.get(f"http://127.0.0.1:{port}/json/list") as answer:
                pages = [row for row in await answer.json() if row["type"] == "page"]
            address = pages[0]["webSocketDebuggerUrl"]
            async with session.ws_connect(address, max_msg_size=0) as socket:
                tab = Tab(socket)
                for domain in ("Page", "Runtime", "Network", "Log"):
                    await tab.call(f"{domain}.enable")
                return await act(tab)

    with browser(folder / "profile") as port:
        return asyncio.run(run(port))


def loaded(events: Sequence[Mapping[str, Any]]) -> list[str]:
    """Every address that was asked for; what is written into the page itself is none."""
    asked = [e["params"] for e in events if e["method"] == "Network.requestWillBeSent"]
    urls = [each["request"]["url"] for each in asked]
    return [url for url in urls if not url.startswith("data:")]


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of many methods, whose names are long, with every chart."""
    methods = ("ngram", "eagle3", "eagle3-tree", "eagle3-tree+ngram", "mtp-tree+ngram", "medusa")
    arms = [
        ScriptedArm(name, 0.014, tokens_per_step=2, ttft_s=0.045, slowdown=lambda n: 1 + 0.03 * n)
        for name in methods
    ]
    plain = ScriptedArm("off", 0.010, slowdown=lambda users: 1 + 0.02 * users)
    loads = [Load(LoadKind.CLOSED, n) for n in (1, 2, 4, 8)]
    path = tmp_path_factory.mktemp("report") / "report.html"
    path.write_text(page(judge(with_counters(scripted_run([plain, *arms], loads)))))
    return path


def test_the_page_is_whole_on_phone_and_desk(report: Path):
    async def act(tab: Tab) -> list[tuple[Any, ...]]:
        found = []
        for width in WIDTHS:
            await tab.show(report, width)
            checks = ("document.querySelectorAll('figure svg').length", CUT_OFF, TOO_WIDE,
                      "document.documentElement.scrollWidth", SMALLEST_TEXT)  # fmt: skip
            found.append(tuple([await tab.value(check) for check in checks]))
        found.append(tuple(tab.events))
        return found

    *seen, events = in_browser(report.parent, act)

    for width, (num_charts, cut_off, too_wide, page_width, smallest) in zip(
        WIDTHS, seen, strict=True
    ):
        assert 1 + 2 * 4 + 3 + 6 == num_charts, "ratio, distributions, acceptance and time, models"
        assert [] == cut_off
        assert [] == too_wide
        assert page_width <= width
        assert 7.0 <= smallest
    assert {report.as_uri()} == set(loaded(events))
    logged = ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded")
    assert [] == [json.dumps(event) for event in events if event["method"] in logged]


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        ("<p style='width: 2000px'>wide</p>", "too wide"),
        ("<figure><svg viewBox='0 0 9 9' width='300'></svg></figure>", "not drawn"),
        ("<img src='http://127.0.0.1:9/x.png'>", "asked"),
    ],
)
def test_a_faulty_page_is_noticed(report: Path, tmp_path: Path, fault: str, expected: str):
    faulty = tmp_path / "faulty.html"
    faulty.write_text(report.read_text().replace("</body>", f"{fault}</body>"))

    async def act(tab: Tab) -> set[str]:
        await tab.show(faulty, 400)
        found = {"too wide"} if await tab.value(TOO_WIDE) else set()
        found |= {"not drawn"} & set(await tab.value(CUT_OFF))
        return found | ({"asked"} if {faulty.as_uri()} != set(loaded(tab.events)) else set())

    assert expected in in_browser(tmp_path, act)
