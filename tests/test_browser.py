"""The HTML of every kind, as Chromium draws it: light and dark, on a phone and on a desktop.

No error in the console, no page wider than its window, no label that is cut off, small or of little contrast.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import axes
from tests.browser import Browser, find
from tests.test_show import CASES, TRANSFERS

ROOT = Path(__file__).resolve().parent.parent
CHROMIUM = find()

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here (Debian's package chromium)"),
]


class MLP(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(64, 256, bias=False), torch.nn.Linear(256, 64, bias=False)

    def forward(self, x):
        h = torch.relu(axes.einsum(x, self.up.weight, "b d, f@tp d -> b f@tp"))
        return axes.einsum(h, self.down.weight, "b f@tp, d f@tp -> b d")


def step() -> str:
    with axes.simulate(4096, rank=77), axes.init_mesh("dp=512 tp=8", device_type="cpu") as mesh:
        model = axes.shard_module(MLP(), {"up.weight": "f@tp d", "down.weight": "d f@tp"}, mesh)
        return axes.explain(model, axes.zeros("b@dp d", b=4096, d=64)).html()


def operation(expression: str, mesh: str = "dp=2 tp=2", **options: object) -> str:
    return axes.explain(expression, b=8, d=64, f=32, mesh=mesh, **options).html()


def notebook() -> str:
    """The outputs of the tour's notebook below each other, under the rules that JupyterLab has for tables."""
    rules = """
      .jp-RenderedHTMLCommon tbody tr:nth-child(odd) { background: #fff }
      .jp-RenderedHTMLCommon tbody tr:nth-child(even) { background: #f5f5f5 }
      .jp-RenderedHTMLCommon table { color: #212121; table-layout: fixed; font-size: 12px }
      :not(.jp-RenderedMarkdown).jp-RenderedHTMLCommon td { text-align: right; white-space: normal }
    """
    cells = json.loads((ROOT / "docs" / "tour.ipynb").read_text(encoding="utf-8"))["cells"]
    outputs = [output.get("data", {}) for cell in cells for output in cell.get("outputs", ())]
    parts = ["".join(output["text/html"]) for output in outputs if "text/html" in output]
    assert len(parts) >= 4
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><style>{rules}</style>'
    body = "".join(f'<div class="jp-RenderedHTMLCommon">{part}</div>' for part in parts)
    return f'<!doctype html><html lang="en"><head>{head}</head><body>{body}</body></html>'


PAGES: dict[str, Callable[[], str]] = {
    **{name: lambda case=case: case().html() for name, case in CASES.items()},
    "explained operation": lambda: operation("b@dp f@tp, f@tp d -> b@dp d"),
    "explained operation on 4,096 ranks": lambda: operation("b@dp f@tp, f@tp d -> b@dp d", "dp=8 tp=512"),
    "explained move": lambda: axes.explain("b@dp d -> b d@dp", b=8, d=64, mesh="dp=4").html(),
    "explained step": step,
    "explained transfer": lambda: axes.explain(TRANSFERS["transfer from pipeline stages"]().at(13)).html(),
    "notebook": notebook,
}


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser(CHROMIUM) as opened:
        yield opened


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_drawn_well(name, browser, tmp_path):
    page = tmp_path / "page.html"
    page.write_text(PAGES[name](), encoding="utf-8")
    for width in (390, 1280):
        for dark in (False, True):
            seen = browser.look(page, width, dark)
            assert not seen.errors
            assert not seen.complaints, f"{width} pixels, {'dark' if dark else 'light'}"
