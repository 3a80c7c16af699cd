"""Patterns of names: what a table finds is what trying all of its patterns in order finds."""

from __future__ import annotations

import fnmatch

from hypothesis import given, settings
from hypothesis import strategies as st

from axes.algebra.layout_rules import LayoutRules
from axes.algebra.name_patterns import NamePatterns

WORDS = st.sampled_from(["a", "b", "ab", "layers", "0", "10", "", "A", "[", "]", "!", "a]", "-"])
MARKS = st.sampled_from(["*", "**", "?", "[a-b]", "[!a]", "[.]", "[a.b]", "[]]", "[", "]", "*a", "a*", "?b", "[!.]x"])
names = st.lists(WORDS, min_size=1, max_size=5).map(".".join)
patterns = st.tuples(
    st.lists(WORDS | MARKS, min_size=1, max_size=5), st.lists(st.sampled_from([".", ".", ".", ""]), min_size=5)
).map(lambda drawn: "".join([part + dot for part, dot in zip(*drawn, strict=False)]).removesuffix("."))


@settings(max_examples=300, deadline=None)
@given(st.lists(patterns, max_size=12), st.lists(names | patterns, min_size=1, max_size=6))
def test_a_table_finds_what_trying_all_patterns_finds(every: list[str], asked: list[str]):
    table = NamePatterns(every)
    for name in asked:
        brute = [number for number, pattern in enumerate(every) if fnmatch.fnmatchcase(name, pattern)]
        assert list(table.numbers(name)) == brute
        assert table.first(name) == (every[brute[0]] if brute else None)


def test_a_name_is_held_against_few_of_many_patterns(monkeypatch):
    every = [f"model.layers.{layer}.*.experts.{expert}.*" for layer in range(20) for expert in range(50)]
    table, tried = NamePatterns([*every, "*.experts.7.up", "model.*.norm", "*"]), []
    match = NamePatterns._match
    monkeypatch.setattr(NamePatterns, "_match", lambda self, *each: tried.append(each) or match(self, *each))
    assert table.first("model.layers.3.mlp.experts.49.up") == "model.layers.3.*.experts.49.*"
    assert table.first("model.x.norm") == "model.*.norm"
    assert table.first("x") == "*"
    assert len(tried) < 100


def test_rules_with_a_pattern_for_each_of_many_names_are_found_by_their_words():
    table = {f"model.*.experts.{e}.up": f"*.{e}.w" for e in range(100)} | {"model.*.experts.{e}.down": "*.down"}
    shapes = {f"model.0.experts.{e}.{which}": (2,) for e in range(100) for which in ("up", "down")}
    change = LayoutRules(table).applied(shapes)
    assert change.targets == {**{f"0.{e}.w": (2,) for e in range(100)}, "0.down": (100, 2)}
    assert change.inverse.targets == shapes
