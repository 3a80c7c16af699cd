"""Headless Chromium, spoken to over a pipe: opens a page in a width and a colour scheme, and looks at what it has drawn.

with Browser(find()) as browser:
    seen = browser.look(Path("page.html"), width=390, dark=True)
    assert not seen.complaints
"""

from __future__ import annotations

import itertools
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

PATIENCE = 60
"""Seconds for an answer."""

STARTER = """
import fcntl, os, sys
ends = [fcntl.fcntl(int(end), fcntl.F_DUPFD, 10) for end in sys.argv[1:3]]
os.dup2(ends[0], 3), os.dup2(ends[1], 4)
os.execv(sys.argv[3], sys.argv[3:])
"""
"""Becomes Chromium, which reads commands from descriptor 3, and writes answers to 4."""

LOOK = """
(() => {
  const found = [], room = document.documentElement.clientWidth;
  if (document.documentElement.scrollWidth > room)
    found.push(`the page is ${document.documentElement.scrollWidth} wide in a window of ${room}`);
  const numbers = text => (text.match(/[\\d.]+/g) || []).map(Number);
  const light = ([r, g, b]) => [r, g, b].map(v => v / 255)
      .map(v => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
      .reduce((sum, v, at) => sum + v * [0.2126, 0.7152, 0.0722][at], 0);
  const over = ([r, g, b, a = 1], [x, y, z]) => [r * a + x * (1 - a), g * a + y * (1 - a), b * a + z * (1 - a)];
  const canvas = matchMedia('(prefers-color-scheme: dark)').matches ? [18, 18, 18] : [255, 255, 255];
  const inks = element => {
    const style = getComputedStyle(element);
    if (!(element instanceof SVGElement) || element.tagName === 'svg') return numbers(style.backgroundColor);
    if (element.tagName !== 'rect' || style.fill === 'none') return [0, 0, 0, 0];
    if (style.fill.startsWith('url')) {
      const stripes = document.querySelector(style.fill.match(/#[\\w-]+/)[0]).children;
      return numbers(getComputedStyle(stripes[0]).fill);
    }
    const [r, g, b, a = 1] = numbers(style.fill);
    return [r, g, b, a * style.fillOpacity * style.opacity];
  };
  const smallest = 9;
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  let count = 0;
  while (walker.nextNode()) {
    const node = walker.currentNode, element = node.parentElement;
    if (!node.data.trim() || element.closest('style, title, desc, script')) continue;
    const range = document.createRange();
    range.selectNodeContents(node);
    const box = range.getBoundingClientRect();
    if (!box.width || !box.height) continue;
    count += 1;
    const svg = element.closest('svg');
    if (svg) {
      const frame = svg.getBoundingClientRect(), size = parseFloat(getComputedStyle(element).fontSize);
      const scale = svg.viewBox.baseVal ? frame.width / svg.viewBox.baseVal.width : 1;
      if (size * scale < smallest) found.push(`'${node.data}' is ${(size * scale).toFixed(1)} pixels high`);
      if (box.left < frame.left - 1 || box.right > frame.right + 1 || box.bottom > frame.bottom + 2)
        found.push(`'${node.data}' is cut off by its picture`);
    }
    element.scrollIntoView({block: 'center', inline: 'center'});
    const at = range.getBoundingClientRect();
    const style = getComputedStyle(element);
    const stack = document.elementsFromPoint((at.left + at.right) / 2, (at.top + at.bottom) / 2);
    const behind = stack.reverse().reduce((under, each) => over([...inks(each), 1].slice(0, 4), under), canvas);
    const ink = over(numbers(svg ? style.fill : style.color), behind);
    const [low, high] = [light(ink), light(behind)].sort((one, two) => one - two);
    const ratio = (high + 0.05) / (low + 0.05);
    if (ratio < 4.5) found.push(`'${node.data.trim()}' has a contrast of ${ratio.toFixed(1)}`);
  }
  document.querySelectorAll('*').forEach(each => { each.scrollLeft = 0; });
  scrollTo(0, 0);
  if (!count) found.push('the page shows no text');
  return found;
})()
"""
"""What a person would find ugly: too wide a page, labels that are cut off, and text that is hard to tell from its ground."""


def find() -> str | None:
    """Where Chromium is, if it is."""
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@dataclass(frozen=True)
class Seen:
    """A page as it was drawn: errors of the console, and what is ugly."""

    errors: tuple[str, ...]
    complaints: tuple[str, ...]


class Browser:
    """A running Chromium with one tab."""

    def __init__(self, program: str) -> None:
        self._folder = tempfile.TemporaryDirectory()
        to_child, self._write = os.pipe()
        self._read, from_child = os.pipe()
        options = ("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--disable-dev-shm-usage")
        command = [program, *options, "--remote-debugging-pipe", f"--user-data-dir={self._folder.name}"]
        self._process = subprocess.Popen(
            [sys.executable, "-c", STARTER, str(to_child), str(from_child), *command],
            pass_fds=(to_child, from_child),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_child)
        os.close(from_child)
        self._numbers, self._rest, self._events = itertools.count(1), b"", []
        target = self._ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self._ask(f"{domain}.enable")

    def __enter__(self) -> Browser:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._session = None
        os.close(self._write)  # Chromium ends when its pipe does
        try:
            self._process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._read)
        self._folder.cleanup()

    _session: str | None = None

    def look(self, page: Path, width: int, dark: bool) -> Seen:
        """Opens a page, in a window of so many CSS pixels."""
        self._events.clear()
        features = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self._ask("Emulation.setEmulatedMedia", features=features)
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
        self._ask("Emulation.setDeviceMetricsOverride", **size)
        self._ask("Page.navigate", url=page.resolve().as_uri())
        self._until("Page.loadEventFired")
        complaints = self._ask("Runtime.evaluate", expression=LOOK, returnByValue=True)["result"]["value"]
        return Seen(tuple(self._errors()), tuple(complaints))

    def _errors(self) -> list[str]:
        found = []
        for event in self._events:
            said = event["params"]
            if event["method"] == "Runtime.exceptionThrown":
                found.append(said["exceptionDetails"]["text"])
            elif event["method"] == "Log.entryAdded" and said["entry"]["level"] == "error":
                found.append(said["entry"]["text"])
            elif event["method"] == "Runtime.consoleAPICalled" and said["type"] in ("error", "assert"):
                found.append(str(said["args"]))
        return found

    def _ask(self, method: str, **params: Any) -> dict[str, Any]:
        """Calls a method of the DevTools protocol, and waits for its result."""
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]

    def _until(self, event: str) -> None:
        while not any(each["method"] == event for each in self._events):
            self._receive()

    def _receive(self) -> dict[str, Any]:
        """The next message, kept where it is an event."""
        end = time.monotonic() + PATIENCE
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._read], [], [], max(0, end - time.monotonic()))
            more = os.read(self._read, 1 << 20) if ready else b""
            assert more, "Chromium doesn't answer" if not ready else "Chromium has ended"
            self._rest += more
        first, _, self._rest = self._rest.partition(b"\0")
        message = json.loads(first)
        if "method" in message:
            self._events.append(message)
        return message
