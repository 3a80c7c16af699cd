"""`axes.show`: its text is that of the snapshots, and SVG, HTML, terminals and notebooks show the same.

python -m tests.test_show        writes the snapshots anew, in tests/snapshots/show
"""

from __future__ import annotations

import io
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import axes
from axes import Mesh
from tests.counting import calls

SNAPSHOTS = Path(__file__).resolve().parent / "snapshots" / "show"

JOB = Mesh("pp=4 dp=2048 tp=8", "fsdp = dp tp", "edge = pp tp", ranks_per_node=8)
CUBE = Mesh("dp=2 cp=2 tp=2")


def planned(source: str, target: str, *shape: int, mesh: Mesh = CUBE, **options: object) -> axes.Plan:
    return axes.plan(source, target, shape, mesh=mesh, dtype="bfloat16", **options)


# fmt: off
CASES: dict[str, Callable[[], Any]] = {
    "mesh": lambda: axes.show(Mesh("dp=2 tp=4", "all = dp tp", ranks_per_node=4), rank=5),
    "mesh of 65,536 ranks": lambda: axes.show(JOB, rank=40000),
    "mesh with many names": lambda: axes.show(
        Mesh(
            "pp dp_replicate dp_shard cp tp",
            "fsdp = dp_shard cp",
            "batch = dp_replicate dp_shard",
            "loss = batch cp",
            "(dp_shard cp tp) = efsdp ep",
            pp=2,
            dp_replicate=1,
            cp=2,
            tp=4,
            ep=8,
            ranks=range(64),
        )
    ),
    "mesh whose rows span nodes": lambda: axes.show(Mesh("dp=4 tp=16", ranks_per_node=8), rank=20),
    "sub-mesh": lambda: axes.show(Mesh("dp=8 tp=8")["tp"], rank=20),
    "ranks in another order": lambda: axes.show(Mesh("dp=2 tp=2", ranks=[10, 12, 11, 13])),
    "sharding": lambda: axes.show(CUBE.sharding("b@dp s@(cp tp) d"), (8, 2048, 4096), rank=5),
    "sharding of any shape": lambda: axes.show(CUBE.sharding("b@dp s@tp")),
    "sharding of three split dims": lambda: axes.show(CUBE.sharding("a@dp b@cp c@tp"), (8, 6, 4), rank=5),
    "sharding of one dim": lambda: axes.show(Mesh("x=4").sharding("n@x"), (5,)),
    "sharding of a factor": lambda: axes.show(Mesh("dp=2 tp=2").sharding("(qkv=3 heads@tp dim) embed@dp", heads=4), (48, 8), rank=1),
    "pending": lambda: axes.show(CUBE.sharding("a b@tp | sum@(dp cp)"), (3, 4)),
    "pending in turn": lambda: axes.show(CUBE.sharding("a | sum@dp max@tp"), (4,)),
    "scalar": lambda: axes.show(CUBE.sharding(""), ()),
    "sharding on 65,536 ranks": lambda: axes.show(JOB.sharding("b@(pp dp) s@tp d"), (65536, 4096, 8192), rank=40000),
    "plan": lambda: axes.show(planned("b@dp s@tp d", "b@dp s d@tp", 8, 2048, 4096, mesh=Mesh("dp=2 tp=4"))),
    "plan of several steps": lambda: axes.show(
        planned("b s d | sum@(cp tp)", "b s d", 8, 64, 64, mesh=Mesh("dp=2 cp=2 tp=4"), cost_model=axes.CostModel(latency_us=0, ranks_per_node=16))
    ),
    "plan that sends nothing": lambda: axes.show(planned("s d", "s d@tp", 64, 64)),
    "plan between two sets of ranks": lambda: axes.show(
        axes.plan("a@dp b@tp", "a b@t", (64, 64), source_mesh=Mesh("dp=4 tp=2"), target_mesh=Mesh("r=2 t=2", ranks=range(8, 12))),
        rank=9,
    ),
    "plan on 65,536 ranks": lambda: axes.show(planned("b@dp s@tp d", "b@dp s d@tp", 65536, 4096, 8192, mesh=JOB), rank=40000),
    "plan in a large group": lambda: axes.show(planned("b@dp s d", "b s d", 65536, 64, 8, mesh=JOB), rank=40000),
}
# fmt: on


MOE = Mesh("pp=2 fsdp=2 tp=2", "(fsdp tp) = efsdp ep", ep=4)


def moved(source: str, target: str, *shape: int, on: Mesh, to: Mesh, **options: object) -> Any:
    return axes.transfer({"w": source}, {"w": target}, on, to, {"w": shape}, **options)


def fused() -> Any:
    """Layouts and ranks that differ: some ranks are on both sides, and tensors are parts of others."""
    table = {
        ("*.q", "*.k", "*.v"): ("*.qkv", "(tp h k) d, (tp g k) d, (tp g k) d -> (tp (h k + g k + g k)) d"),
        "*.experts.{e}.up": ("*.up", "e f d -> e d f"),
        "embed": ("embed", "head"),
    }
    shapes = {"0.q": (1024, 512), "0.k": (256, 512), "0.v": (256, 512), "embed": (4096, 512)}
    shapes |= {f"0.experts.{e}.up": (2048, 512) for e in range(8)}
    targets = {"0.qkv": "f@tp d", "0.up": "e@dp d f@tp", "embed": "v@tp d", "head": "v@tp d"}
    ends = Mesh("fsdp=2 tp=2"), Mesh("dp=2 tp=2", ranks=range(2, 6))
    return axes.transfer(dict.fromkeys(shapes, "f@(fsdp tp) d"), targets, *ends, shapes, rules=table, tp=2, k=64)


def staged() -> Any:
    """A mixture of experts in two pipeline stages, to ranks without a pipeline."""
    shapes, sources, targets, stages = {}, {}, {}, {}
    for layer in range(8):
        name = f"layers.{layer}."
        for part, shape, source, target in (
            ("q", (4096, 1024), "h@tp d@fsdp", "h@tp d"),
            ("up", (8, 2048, 1024), "e@ep f d@efsdp", "e@tp f d"),
            ("norm", (1024,), "d@fsdp", "d"),
        ):
            shapes[name + part], sources[name + part], targets[name + part] = shape, source, target
        stages[name + "*"] = MOE.at(4 * (layer // 4))["fsdp", "tp"]
    server = Mesh("dp=2 tp=4", ranks=range(8, 16))
    return axes.transfer(sources, targets, stages, server, shapes, dtype="bfloat16", bucket_mb=16)


TRANSFERS: dict[str, Callable[[], Any]] = {
    "transfer": lambda: axes.transfer(
        {"up": "f@fsdp d", "down": "d@fsdp f", "norm": "d@fsdp"},
        {"up": "f@tp d", "down": "d f@tp", "norm": "d"},
        Mesh("fsdp=4"),
        Mesh("dp=2 tp=2", ranks=range(4, 8)),
        {"up": (16384, 4096), "down": (4096, 16384), "norm": (4096,)},
        dtype="bfloat16",
    ),
    "transfer by rules": lambda: fused().at(3),
    "transfer from pipeline stages": lambda: staged().at(13),
    "transfer of 1,024 ranks to 1,024": lambda: moved(
        "f@(fsdp tp) d",
        "f d@tp",
        8192,
        8192,
        on=Mesh("fsdp=128 tp=8"),
        to=Mesh("dp=128 tp=8", ranks=range(1024, 2048)),
    ).at(1500),
    "transfer that sends nothing": lambda: moved("f@a d", "f@a d", 8, 8, on=Mesh("a=2"), to=Mesh("a=2")),
    "transfer of nothing": lambda: axes.transfer({}, {}, CUBE, CUBE, {}),
}
CASES |= {name: lambda made=made: axes.show(made()) for name, made in TRANSFERS.items()}


def snapshot(picture: Any) -> str:
    return "".join(f"{width} columns\n\n{picture.text(width)}\n\n" for width in (80, 120))


@pytest.mark.parametrize("name", CASES)
def test_the_text_is_that_of_the_snapshot_and_svg_and_html_are_whole_and_load_nothing(name: str):
    picture = CASES[name]()
    found = snapshot(picture)
    assert found == (SNAPSHOTS / f"{name}.txt").read_text(encoding="utf-8"), "python -m tests.test_show writes it anew"
    assert found.isascii()
    for width in (60, 80, 120):
        assert max(map(len, picture.text(width).splitlines())) <= width
    whole_and_alone(picture)


def whole_and_alone(picture: Any) -> None:
    """SVG that says in words what it shows, and HTML with all of it; nothing is loaded, light and dark are there."""
    svg, page = picture.svg(), picture.html()
    root, space = ElementTree.fromstring(svg), "{http://www.w3.org/2000/svg}"
    assert root.get("role") == "img"
    assert root.findtext(f"{space}title")
    assert len(root.findtext(f"{space}desc") or "") > 20
    width, height = map(float, (root.get("viewBox") or "").split()[2:])
    for text in root.iter(f"{space}text"):
        assert 0 <= float(text.get("x", -1)) <= width
        assert float(text.get("y", -1)) <= height
    ElementTree.fromstring(re.sub("<meta [^>]*>", "", page.partition("\n")[2]))
    assert picture._repr_html_() in page
    for text in (svg, page):
        assert "prefers-color-scheme: dark" in text
        assert not re.search(r"<script|<link|<iframe|href|src=|url\((?!#)|@import|http(?!://www\.w3\.org)", text)


def test_a_sharding_of_a_million_parts_is_drawn_as_fast_as_it_is_long():
    mesh = Mesh("a=1024 b=1024")
    for spec, shape in (("x@(a b) y", (1000001, 4)), ("(h=16 x@(a b))", (2**25,)), ("x@a y@b", (4096, 4096))):
        assert calls(lambda: axes.show(mesh.sharding(spec), shape, rank=700_000).text()) < 100_000  # noqa: B023


def test_every_kind_is_shown_in_a_notebook_as_axes_show_does():
    made = planned("b@dp", "b", 8)
    assert "b@dp -&gt; b" in axes.show(made).html(), "what looks like HTML is text"
    for value in (TRANSFERS["transfer"](), CUBE, CUBE.sharding("a@dp b"), made):
        assert value._repr_html_() == axes.show(value)._repr_html_()


def test_a_dtensor_is_shown_as_it_lies():
    with axes.simulate(8, rank=5):
        mesh = axes.init_mesh("dp=2 cp=2 tp=2", device_type="cpu")
        x = axes.zeros("b@dp s@(cp tp)", mesh=mesh, b=8, s=16)
        text = str(axes.show(x))
        assert "seen from rank 5" in str(axes.show(mesh))
    assert text.startswith("_@dp _@(cp tp)     [8, 16] float32\non dp=2 cp=2 tp=2; rank 5 holds 4 x 4, 64 B\n")
    assert "[5]" in text
    assert "seen from rank 0" in str(axes.show(mesh)), "its job has ended"


def test_who_shows_a_mesh_needs_no_torch():
    code = (
        "import sys, axes\n"
        "mesh = axes.Mesh('dp=2 tp=2')\n"
        "move = axes.transfer({'w': 'a@dp'}, {'w': 'a'}, mesh, mesh, {'w': (4,)})\n"
        "for x in mesh, mesh.sharding('a@dp'), axes.plan('a@dp', 'a', (4,), mesh=mesh), move: axes.show(x).html()\n"
        "assert not {'torch', 'numpy', 'rich'} & set(sys.modules)\n"
        "import axes.pictures.show\n"
        "assert callable(axes.show)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(axes.__file__).parent.parent)}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)


# --- the terminal -----------------------------------------------------------------------------------


class Terminal(io.StringIO):
    """A stream that someone reads."""

    def isatty(self) -> bool:
        return True


def printed(picture: Any, monkeypatch: pytest.MonkeyPatch, **environment: str) -> str:
    """What a picture prints on a terminal of 100 columns that has colours."""
    for name in ("NO_COLOR", "FORCE_COLOR", "COLORTERM", "CLICOLOR", "CLICOLOR_FORCE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"TERM": "xterm-256color", "COLUMNS": "100", "LINES": "30", **environment}.items():
        monkeypatch.setenv(name, value)
    stream = Terminal()
    picture.print(stream)
    return stream.getvalue()


def test_colour_says_nothing_that_the_text_does_not_and_is_left_out_where_it_is_not_wanted(monkeypatch, capsys):
    for name in ("mesh", "sharding of a factor", "plan of several steps", "transfer"):
        picture = CASES[name]()
        found = printed(picture, monkeypatch)
        assert "\x1b[" in found
        plain = re.sub(r" +$", "", re.sub(r"\x1b\[[\d;]*m", "", found), flags=re.MULTILINE)
        assert plain == picture.text(100, 29) + "\n"
    codes = re.findall(r"\x1b\[([\d;]*)m", printed(picture, monkeypatch, NO_COLOR="1"))
    assert {code for found in codes for code in found.split(";")} <= {"0", "1", "2", "7", ""}, "weight is no colour"
    picture.print()
    assert capsys.readouterr().out == repr(picture) + "\n" == picture.text() + "\n", "a pipe gets plain text"
    monkeypatch.setattr(sys, "stdout", Terminal())
    assert "\x1b[" in repr(picture), "at a prompt"
    assert printed(picture, monkeypatch, TERM="dumb") == picture.text() + "\n"


# --- anything ---------------------------------------------------------------------------------------


@settings(max_examples=60)
@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.integers(1, 6), st.data())
def test_any_mesh_and_sharding_can_be_shown_in_any_room(sizes: list[int], per_node: int, data: st.DataObject):
    ranks = data.draw(st.permutations(range(2, 2 + math.prod(sizes))))
    names = [f"a{at}" for at in range(len(sizes))]
    text = " ".join(f"{name}={size}" for name, size in zip(names, sizes, strict=True))
    mesh = Mesh(text, f"all = {' '.join(names[::-1])}", ranks=ranks, ranks_per_node=per_node)
    width, height = data.draw(st.integers(20, 200)), data.draw(st.integers(1, 60))
    split = data.draw(st.permutations(names))
    at = data.draw(st.integers(0, len(split)))
    spec = f"x@({' '.join(split[:at])}) y" + (f" | sum@({' '.join(split[at:])})" if split[at:] else "")
    shape = (data.draw(st.integers(0, 30)), 3)
    for picture in (axes.show(mesh, rank=ranks[-1]), axes.show(mesh.sharding(spec), shape, rank=ranks[-1])):
        found = picture.text(width, height)
        assert max(map(len, found.splitlines())) <= width
        assert found.isascii()
        assert "[" in found or width < 40, "the place of the rank is in brackets"
        ElementTree.fromstring(picture.svg())


def test_a_name_may_have_characters_that_a_document_may_not():
    name = "a\x01b"
    move = axes.transfer({name: "x@a"}, {name: "x"}, Mesh("a=2"), Mesh("b=1", ranks=[2]), {name: (4,)})
    ElementTree.fromstring(axes.show(move).svg())


def main() -> None:
    """Write the snapshots."""
    for old in SNAPSHOTS.iterdir():
        old.unlink()
    for name, case in CASES.items():
        (SNAPSHOTS / f"{name}.txt").write_text(snapshot(case()), encoding="utf-8")


if __name__ == "__main__":
    main()
