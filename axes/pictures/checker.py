"""`python -m axes check`: mistakes in the expressions and specs of a program, found before it runs.

>>> program = 'import axes\\naxes.init_mesh("dp=2 tp=2")\\nx = axes.zeros("b@dp d@tpp", b=4, d=4)'
>>> for line, column, message in mistakes(program):
...     print(f"{line}:{column}: {message}")
3:24: the mesh has no axis 'tpp'; did you mean 'tp'?
  b@dp d@tpp
         ^^^

Arguments of public functions are read where they are literals; f-strings and variables are left alone. The grammar is
checked everywhere. Axes are checked in a file whose meshes are all made from literals: each has to be a name of one of
these meshes. Code under `pytest.raises`, which is expected to fail, isn't looked at.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from axes import ExpressionError, LayoutRules
from axes.extension import (
    Span,
    check_sides,
    parse_declaration,
    parse_equation,
    parse_mesh,
    read,
    read_operation,
    unknown_axis,
)

_CALLS = {
    "mesh*": "Mesh init_mesh Mesh.from_device_mesh",
    "equation*": "mesh.define",
    "axes": "mesh.rearrange mesh.explain",
    "axis*": "Rules axis_index axis_size mesh.axis mesh.get mesh.create_groups",
    "- axis": "psum pmean pmax pmin ppermute all_gather psum_scatter all_to_all",
    "spec": "empty full ones rand randn zeros RMSNorm LayerNorm mesh.sharding",
    "- spec": "shard from_local to_local constrain annotate shard_module softmax log_softmax logsumexp entropy argmax "
    "topk rms_norm layer_norm sample Dropout",
    "- - spec": "dropout",
    "spec spec": "plan transfer",
    "- target": "reshard",
    "- rearrange": "rearrange",
    "- repeat": "repeat",
    "- reduce": "reduce",
    "einsum*": "einsum Einsum",
    "tensors*": "shard_map",
    "tensors": "explain Embedding",
    "- - tensors": "embedding cross_entropy",
    "rule": "LayoutRules",
    "-": "verify clip_grad_norm_ total_norm",
}
"""How the arguments of calls are read, one after the other; with a `*` all of them alike. `-` isn't text of axes."""

_KEYWORDS = {
    "spec": "spec specs source target sources targets results",
    "axis": "axis stages",
    "mesh": "mesh",
    "rule": "rules",
}
_KIND_OF_CALL, _KIND_OF_KEYWORD = (
    {name: kind for kind, names in table.items() for name in names.split()} for table in (_CALLS, _KEYWORDS)
)
_IMPORT = re.compile(r"^\s*(?:from|import)\b.*\baxes\b", re.MULTILINE)

Mistake = tuple[int, int, str]
"""A line and a column of a source, both from 1, and what is wrong there."""

_Texts = tuple[str, list[ast.Constant], bool]
"""How literals of a call are read together; and whether they are about a mesh that is made elsewhere."""


def mistakes_in(paths: Sequence[str]) -> tuple[int, list[dict[str, Any]]]:
    """How many files there are at some paths, those in folders included; and the mistakes in them, as data."""
    files = [file for path in map(Path, paths) for file in (sorted(path.rglob("*.py")) if path.is_dir() else [path])]
    found = list[dict[str, Any]]()
    for file in files:
        try:
            with tokenize.open(file) as opened:
                wrong = mistakes(opened.read())
        except (SyntaxError, ValueError) as error:  # ValueError: bytes that aren't of the file's encoding
            line, column, why = (getattr(error, each, None) for each in ("lineno", "offset", "msg"))
            wrong = [(line or 1, column or 1, f"this isn't Python: {why or error}")]
        found += [{"file": str(file), "line": each[0], "column": each[1], "message": each[2]} for each in wrong]
    return len(files), found


def mistakes(source: str) -> list[Mistake]:
    """The mistakes in the literals of a Python source, in its order; `SyntaxError` where it isn't Python."""
    if not _IMPORT.search(source):
        return []
    found, every = list[Mistake](), [*_Program(ast.parse(source)).texts()]
    meshes = [(kind, literals) for kind, literals, _ in every if kind in ("mesh", "equation", "axes")]
    is_told = all(kind == "mesh" and literals for kind, literals in meshes)
    names = [name for _, literals in meshes for each in literals for name in re.findall(r"[^\W\d]\w*", str(each.value))]
    for kind, literals, elsewhere in every:
        known = dict.fromkeys(names) if is_told and not elsewhere else {}
        for error in _errors(kind, [str(each.value) for each in literals], known):
            literal = next((each for each in literals if each.value == error.text), literals[0])
            found.append((*_place(source, literal, error.start), str(error)))
    return sorted(found)


def _errors(kind: str, texts: Sequence[str], known: Collection[str]) -> Iterator[ExpressionError]:
    """The mistakes in texts that are read together; with axes that aren't known, where any are."""
    try:
        used = _axes_in(kind, *texts) if texts else []
    except ExpressionError as error:
        yield error
    else:
        for at, (tensor, name, span) in enumerate(used):
            found = next(re.compile(rf"(?<!\w){re.escape(name)}(?!\w)").finditer(texts[0], *span))
            if known and name not in known:
                yield ExpressionError(str(unknown_axis(name, known)), texts[0], *found.span())
            elif (tensor, name) in [each[:2] for each in used[:at]]:
                yield ExpressionError(f"axis '{name}' is used twice; it splits one place", texts[0], *found.span())


def _axes_in(kind: str, text: str, *equations: str) -> list[tuple[int, str, Span]]:
    """The axes that a text uses, each behind the number of the tensor and before the place in which it stands.

    Raises `ExpressionError` for a mistake in the text.
    """
    if kind == "axis":
        return [(0, text, (0, len(text)))]
    if kind == "mesh":
        check_sides([item.name for item in parse_declaration(text)], list(map(parse_equation, equations)))
        return []
    if kind in _PARSERS:
        _PARSERS[kind](text)
        return []
    tree = read(text)
    specs = [*tree.operands, *(tree.results or ())]
    if kind == "spec" or (kind == "target" and tree.results is None):
        specs = [tree.spec]
    elif kind != "tensors":
        operation = "rearrange" if kind == "target" else kind
        read_operation(operation, text, tuple([len(spec.dims) for spec in tree.operands]))
    places = [(number, place) for number, spec in enumerate(specs) for _, place in spec.places]
    return [(number, name, place.span) for number, place in places for name in place.names if name != "*"]


def _rule_of(text: str) -> LayoutRules:
    """A layout rule of this expression, between names that are numbers."""
    left, right = (tuple(map(str, range(side.count(",") + 1))) for side in text.split("->", 1))
    return LayoutRules([(left, (*right, text))])


_PARSERS: dict[str, Callable[[str], object]] = {"equation": parse_equation, "axes": parse_mesh, "rule": _rule_of}


def _place(source: str, literal: ast.Constant, at: int) -> tuple[int, int]:
    """The line and the column, from 1, of a character of a literal; the quote at its end is behind the last one."""
    segment, places, end = str(ast.get_source_segment(source, literal)), list[tuple[int, int]](), (1, 1)
    before = source.split("\n")[literal.lineno - 1].encode()[: literal.col_offset].decode()
    for token in tokenize.generate_tokens(io.StringIO(f"({segment})").readline):
        if token.type == tokenize.STRING:
            prefix, quote, body = re.findall(r"(\w*)('''|\"\"\"|'|\")(.*)\2", token.string, re.DOTALL)[0]
            line, column = token.start[0], token.start[1] + len(prefix + quote)
            escapes = "" if "r" in prefix.lower() else r"\\(?:[0-7]{1,3}|x..|u.{4}|U.{8}|N\{.*?\}|.)|"
            for written in re.findall(f"{escapes}.", body, re.DOTALL):
                places += [(line, column)] * (len(ast.literal_eval(f"'{written}'")) if len(written) > 1 else 1)
                line, column = (line + 1, 0) if written[-1] == "\n" else (line, column + len(written))
            end = line, column
    line, column = [*places, end][at]
    # The parenthesis in front of the segment makes columns of its first line count from 1.
    return literal.lineno + line - 1, column + (len(before) if line == 1 else 1)


class _Program:
    """What the names of a program mean, where that is one thing in the whole file: public names of axes, and meshes."""

    def __init__(self, tree: ast.AST):
        self.nodes = defaultdict[type, list[Any]](list)
        for node in ast.walk(tree):
            self.nodes[type(node)].append(node)
        bound = [
            (each.asname or each.name.partition(".")[0], each.name if each.asname else each.name.partition(".")[0])
            for node in self.nodes[ast.Import]
            for each in node.names
        ]
        bound += [
            (each.asname or each.name, f"{'.' * node.level}{node.module}.{each.name}")
            for node in self.nodes[ast.ImportFrom]
            for each in node.names
        ]
        bound += [(node.id, "") for node in self.nodes[ast.Name] if isinstance(node.ctx, ast.Store)]
        bound += [(node.arg, "") for node in self.nodes[ast.arg]]
        self.meanings = dict[str, str]()
        for name, meaning in bound:
            self.meanings[name] = meaning if self.meanings.get(name, meaning) == meaning else ""
        self.meshes = {each.arg for each in self.nodes[ast.arg] if self.public(each.annotation) == "Mesh"}
        pairs = [(each.optional_vars, each.context_expr) for each in self.nodes[ast.withitem]]
        pairs += [(target, each.value) for each in self.nodes[ast.Assign] for target in each.targets]
        self.meshes |= {_last_name(target) for target, value in pairs if self.is_mesh(value)}
        self.meshes -= {"", *(_last_name(target) for target, value in pairs if not self.is_mesh(value))}

    def public(self, node: ast.AST | None) -> str:
        """What an expression is called below `axes` and `axes.nn`; nothing where it is of another module."""
        names = list[str]()
        while isinstance(node, ast.Attribute):
            names.append(node.attr)
            node = node.value
        dotted = ".".join([self.meanings.get(_last_name(node), ""), *reversed(names)])
        return dotted.removeprefix("axes.").removeprefix("nn.") if dotted.startswith("axes.") else ""

    def is_mesh(self, node: ast.AST) -> bool:
        """Whether an expression makes a mesh, or is a name that always stands for one."""
        if isinstance(node, ast.Call):
            return self.public(node.func) in ("Mesh", "init_mesh")
        return _last_name(node) in self.meshes

    def texts(self) -> Iterator[_Texts]:
        """All that the program writes as text of axes, but where it is expected to fail."""
        failing = {
            id(node)
            for block in self.nodes[ast.With]
            if "aises(" in ast.unparse(block.items[0])
            for node in ast.walk(block)
        }
        for call in [each for each in self.nodes[ast.Call] if id(each) not in failing]:
            method = call.func.attr if isinstance(call.func, ast.Attribute) else ""
            called = f"mesh.{method}" if method and self.is_mesh(call.func.value) else self.public(call.func)
            yield from self._arguments(call, called) if called in _KIND_OF_CALL else ()
            if method in ("define", "rearrange") and not self.meanings.get(_last_name(call.func.value)):
                yield "axes", [], False  # any mesh may have further names
        for node in [each for each in self.nodes[ast.Subscript] if id(each) not in failing]:
            yield from [("axis", [each], False) for each in _strings(node.slice) if self.is_mesh(node.value)]

    def _arguments(self, call: ast.Call, called: str) -> Iterator[_Texts]:
        """The texts among the arguments of a call."""
        kinds, others = _KIND_OF_CALL[called], {"shard_map": "spec", "Rules": "axis"}.get(called, "-")
        literals = [each for argument in call.args for each in _strings(argument)]
        if kinds == "mesh*":
            yield "mesh", literals if len(literals) == len(call.args) else [], False
            return
        elsewhere = any(
            each.arg == "mesh" and not (_strings(each.value) or self.is_mesh(each.value)) for each in call.keywords
        )
        is_starred = any(isinstance(each, ast.Starred) for each in call.args)
        words = [kinds[:-1]] * len(call.args) if kinds[-1] == "*" else [] if is_starred else kinds.split()
        pairs = [*zip(words, call.args, strict=False)]
        pairs += [(_KIND_OF_KEYWORD.get(str(each.arg), others), each.value) for each in call.keywords]
        for kind, argument in [pair for pair in pairs if pair[0] != "-"]:
            literals = [each for each in _strings(argument) if kind != "rule" or "->" in str(each.value)]
            yield from [(kind, [each], elsewhere) for each in literals]


def _strings(node: ast.AST | None) -> list[ast.Constant]:
    """The texts of an argument: itself, those of a tuple, the values of a table, which may be written as pairs."""
    if isinstance(node, ast.Constant):
        return [node] if isinstance(node.value, str) else []
    parts = node.values if isinstance(node, ast.Dict) else node.elts if isinstance(node, ast.Tuple | ast.List) else []
    seconds = [each.elts[1] if isinstance(each, ast.Tuple) and len(each.elts) == 2 else each for each in parts]
    return [text for each in seconds for text in _strings(each)]


def _last_name(node: ast.AST | None) -> str:
    """`mesh` of `mesh` and of `self.mesh`; nothing of other expressions."""
    return str(getattr(node, "id", None) or getattr(node, "attr", ""))
