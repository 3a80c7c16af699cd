"""`python -m axes check`: mistakes in literals, at their place, in the words that the library has for them when it runs."""

from __future__ import annotations

import doctest
from pathlib import Path

import pytest
import torch

import axes

# Imports from inside: the answer of a command, as data.
from axes.pictures.checker import mistakes, mistakes_in
from tests.test_docs import PAGES, blocks

ROOT = Path(__file__).resolve().parent.parent
HEAD = """import axes
import axes as ax
from axes import einsum, nn, rearrange as r
mesh = axes.init_mesh("dp=2 tp=2", "all = dp tp")
"""
# A `§` marks where the mistake is.
SEEDED = [
    # meshes
    ('axes.Mesh("dp=2 §2tp=2")', "a name doesn't start with a digit"),
    ('axes.Mesh("dp=2 tp=2 §dp")', "'dp' is declared twice"),
    ('axes.Mesh("dp=2 tp=2", "fsdp = dp §tpp")', "one side of an equation has only known names; 'tpp' isn't known"),
    ('axes.Mesh("dp=§0 tp=2")', "a size is a whole number from 1"),
    ('ax.init_mesh("dp=2 §@")', "expected an axis name or the end of the list"),
    ('mesh.define("(both §= dp tp")', "expected an axis name in the group, found '='"),
    ('mesh.rearrange("(a b) tp to a b tp§", a=1)', "expected '->', found the end"),
    ('mesh.axis("§tpp")', "the mesh has no axis 'tpp'; did you mean 'tp'?"),
    ('mesh["dp", "§cp"]', "the mesh has no axis 'cp'; known: "),
    ('mesh.sharding("b@dp d@(tp §tq)")', "the mesh has no axis 'tq'"),
    # specs
    ('axes.shard(x, "b d@§", mesh=mesh)', "expected an axis name, '*' or '(' after '@', found the end"),
    ('axes.shard(x, "b@dp d@§tq", mesh=mesh)', "the mesh has no axis 'tq'"),
    ('axes.shard(x, "b@dp d@§dp", mesh=mesh)', "axis 'dp' is used twice"),
    ('axes.zeros("b d | §summ@tp", mesh=mesh, b=2, d=2)', "expected one of sum, mean, max, min, same with '@', or '*'"),
    ('axes.ones("b@(dp §(tp)) d", mesh=mesh, b=2, d=2)', "expected ')': groups don't nest, found '('"),
    ('ax.full("b §b", 0.0, mesh=mesh, b=2)', "dim 'b' stands twice"),
    ('axes.plan("b@dp s", "b s@§dpp", (4, 4), mesh=mesh)', "the mesh has no axis 'dpp'"),
    ('axes.annotate(torch.nn.Linear(2, 2), {"weight": "f d§]", "bias": "f"})', "']' is reserved"),
    ('axes.shard_module(torch.nn.Linear(2, 2), {\n    "weight": "f d",\n    "bias": "f@§up"}, mesh)', "the mesh has no axis 'up'"),
    ('nn.RMSNorm("b s d@§@tp", over="d", d=4)', "expected an axis name, '*' or '(' after '@', found '@'"),
    # expressions
    ('r(x, "b d -> b d §e", mesh=mesh)', "'e' stands on the right only; repeat adds names"),
    ('r(x, "b §d -> b", mesh=mesh)', "'d' stands on the left only; rearrange keeps what is there"),
    ('r(x, "b §d", mesh=mesh)', "rearrange needs '->' and the result behind it"),
    ("axes.reduce(x, r'b d@dp -> b d§:', 'sum', mesh=mesh)", "':' is reserved"),
    ('einsum(x, x, "b d,"  # "b d@tr"\n    " d f@§tr"\n    " -> b f", mesh=mesh)', "the mesh has no axis 'tr'"),
    ('ax.einsum(*[x, x], """b d, d f\n  -> b §g""", mesh=mesh)', "'g' stands on the right only"),
    ('axes.repeat(x, "b d \\u002d> b n \\\n §+ d", n=2)', "blocks stand in the rules of transfers alone"),
    ('axes.shard_map(lambda x: x, "b d ->§> b d", mesh=mesh)', "'>' is reserved"),
    ('@axes.shard_map("b@§sp d -> b d", mesh=mesh)\ndef f(x):\n    return x\n\nf(axes.ones("b d", mesh=mesh, b=2, d=2))', "the mesh has no axis 'sp'"),
    ('"é"; axes.LayoutRules({("q", "k"): ("qk", "é d, §k d -> (é + r) d")})', "'k' is no name on both sides"),
    ('axes.cross_entropy(x, x, "b v@tp, b ->§>", mesh=mesh)', "'>' is reserved"),
    # collectives
    ('axes.psum(x, ("dp", "§cp"), mesh=mesh)', "the mesh has no axis 'cp'"),
    ('axes.axis_size(axis="§top", mesh=mesh)', "the mesh has no axis 'top'"),
]  # fmt: skip


@pytest.mark.parametrize(("code", "message"), SEEDED)
def test_a_mistake_is_found_at_its_place_in_the_words_of_the_library(code, message):
    before, after = code.split("§")
    source = f"{HEAD}{before}{after}\n"
    ((line, column, said),) = mistakes(source)
    start = len(HEAD) + len(before)
    assert (line, column) == (source.count("\n", 0, start) + 1, start - source.rfind("\n", 0, start))
    assert said.startswith(message)
    with axes.simulate(4), pytest.raises(axes.AxesError) as raised:
        exec(compile(source, "seeded", "exec"), {"torch": torch, "x": torch.ones(2, 2)})
    assert (said if isinstance(raised.value, axes.ExpressionError) else message) in str(raised.value)


def test_axes_of_rules_and_of_tables_are_looked_up_logical_names_arent():
    tables = (
        'axes.Rules([("tq", "tp"), ("heads", ("tp", "ep"))])',
        'axes.Rules({"tq": None, "heads": ["dq"]}, seq="cp")',
    )
    found = [[message.split(chr(10))[1].strip() for *_, message in mistakes(HEAD + table)] for table in tables]
    assert found == [["ep"], ["dq", "cp"]]


def code_of(page: Path) -> str:
    """The code of a page as one program, without the examples of errors."""
    parser = doctest.DocTestParser()
    texts = [text for _, text in blocks(page.read_text(encoding="utf-8"))]
    examples = [e.source for text in texts for e in parser.get_examples(text) if e.exc_msg is None]
    return "".join([*(text for text in texts if ">>>" not in text), *examples])


def test_there_is_no_false_alarm_in_the_sources_and_pages_of_this_project():
    count, found = mistakes_in([str(ROOT / each) for each in ("axes", "tests", "docs", "examples")])
    refused = ('mask="b s, b"', '"an axis twice": ', "b s@(dp dp) d")  # by tests of what is refused
    lines = [Path(each["file"]).read_text(encoding="utf-8").split("\n")[each["line"] - 1] for each in found]
    assert count > 200
    assert [line for line in lines if not any(each in line for each in refused)] == []
    assert {page.name: wrong for page in PAGES if (wrong := mistakes(code_of(page)))} == {}


LEFT_ALONE = [
    "import einops, torch\nfrom einops import rearrange\nrearrange(x, 'b (h d)')\neinops.rearrange(x, 'b ->')\ntorch.einsum('ij,jk', x, y)",
    "from torch import nn\nnn.softmax(x, 'b@')\ndef f(reduce):\n    from axes import reduce\n    reduce(x, 'b')",
    "fig, axes = plt.subplots()\naxes.shard(x, 'b@')",
    "from elsewhere import axes\naxes.shard(x, 'b@')",
    "axes.shard(x, f'b@{tp}')\naxes.shard(x, spec)\naxes.shard(x, 'b@' + tp)\naxes.reduce(*given, 'sum')",
    "Other.rearrange('b ->')\nx.sharding('b@')\nwith pytest.raises(axes.ExpressionError):\n    axes.shard(x, 'b@')",
    # where a mesh isn't made from literals, its axes aren't known
    "mesh = axes.Mesh('dp=2')\nother = axes.Mesh(text)\naxes.shard(x, 'b@tp')",
    "mesh = axes.Mesh('dp=2')\nother = axes.Mesh.from_device_mesh(device_mesh)\naxes.shard(x, 'b@tp')",
    "mesh = axes.Mesh('dp=2')\nself.mesh.define(names)\naxes.shard(x, 'b@tp')",
    "mesh = axes.Mesh('dp=2')\naxes.shard(x, 'b@tp', mesh=given)",
    "axes.shard(x, 'b@tp')",
    # other meshes of the file, and further names, are known
    "mesh = axes.Mesh('dp=2')\nwith axes.init_mesh('tp=2', 'all = tp') as other:\n    axes.shard(x, 'b@(dp tp all)')",
    "axes.verify(model, x, mesh='tp=2', specs={'w': 'b@tp'})",
    "mesh = init_device_mesh('cpu', (2,))\nmesh['dp']\naxes.Mesh('tp=2')",
]  # fmt: skip


@pytest.mark.parametrize("code", LEFT_ALONE)
def test_what_isnt_ours_or_isnt_known_is_left_alone(code):
    assert mistakes(f"import axes\n{code}") == []
