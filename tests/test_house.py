"""The house rules that a machine can check: lint, types, layers and private API.

Nothing imports what is above it (the order of `LAYERS`), the algebra needs the
standard library alone, and one file holds every use of torch's private API. The checks read the
syntax trees, so an import inside a function counts as well.
"""

from __future__ import annotations

import ast
import doctest
import functools
import graphlib
import re
import shutil
import subprocess
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path

import pytest

import axes
import axes.extension
from tests.test_docs import PAGES, blocks

ROOT = Path(__file__).resolve().parent.parent
LAYERS = ("algebra", "convert", "runtime", "ops", "extension", "launching", "transfers", "nn", "debugging", "pictures")
PRIVATE = Path("axes/runtime/torch_private.py")
MODULES = sorted(path.relative_to(ROOT) for path in (ROOT / "axes").rglob("*.py"))
TESTS = sorted((ROOT / "tests").glob("*.py"))


def run(*command: str) -> None:
    done = subprocess.run([sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-6000:]}{done.stderr[-2000:]}"


def test_ruff_finds_nothing():
    run("ruff", "check", "--no-cache", "--output-format=concise", ".")


def test_everything_is_formatted():
    run("ruff", "format", "--no-cache", "--check", ".")


def test_the_types_check():
    run("mypy", "--no-error-summary")


@functools.cache
def tree(path: Path) -> ast.Module:
    return ast.parse((ROOT / path).read_text(encoding="utf-8"), filename=str(path))


def runs_for_types_only(node: ast.If) -> bool:
    test = node.test
    return (isinstance(test, ast.Name) and test.id == "TYPE_CHECKING") or (
        isinstance(test, ast.Attribute) and test.attr == "TYPE_CHECKING"
    )


def imports(node: ast.AST, typing: bool = True) -> Iterator[str]:
    """Dotted names that `node` imports: `a.b` for `import a.b`, `a.b.c` for `from a.b import c`.

    Those under `if TYPE_CHECKING:` are left out where `typing` is false.
    """
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and runs_for_types_only(child) and not typing:
            continue
        if isinstance(child, ast.Import):
            yield from (alias.name for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            yield from (f"{'.' * child.level}{child.module}.{alias.name}" for alias in child.names)
        else:
            yield from imports(child, typing)


HOMES = {f"axes.{name}": f"{module}.{name}" for module, names in axes._HOME.items() for name in names}
"""Public names, and where they are defined."""


def layer(dotted: str) -> int | None:
    """The height of `axes.<layer>...`; the package itself is above all of its layers."""
    parts = HOMES.get(dotted, dotted).split(".")
    if parts[0] != "axes":
        return None
    named = parts[1] if len(parts) > 1 else ""
    return LAYERS.index(named) if named in LAYERS else len(LAYERS)


def module_name(path: Path) -> str:
    return ".".join(path.with_suffix("").parts).removesuffix(".__init__")


def test_imports_are_written_out():
    assert not [f"{path} imports {name}" for path in MODULES for name in imports(tree(path)) if name[0] == "."]


def test_no_module_imports_what_is_above_it():
    wrong = [
        f"{path} imports {name}"
        for path in MODULES
        for name in imports(tree(path))
        for theirs, own in [(layer(name), layer(module_name(path)))]
        if theirs is not None and own is not None and theirs > own
    ]
    assert not wrong, "\n".join(wrong)


AROUND = ("debugging", "launching", "nn", "pictures", "transfers")
"""Packages around the core. They are built as a third party's package would be."""


@pytest.mark.parametrize("folder", AROUND)
def test_a_package_around_the_core_imports_public_names_and_those_of_the_extension_alone(folder):
    doors = {f"axes.{name}" for name in axes.__all__} | {f"axes.extension.{name}" for name in extension_names()}
    found = {
        f"{path} imports {name}"
        for path in (path for path in MODULES if path.parts[1] == folder)
        for name in imports(tree(path))
        if name.partition(".")[0] == "axes" and not name.startswith(f"axes.{folder}.") and name not in doors
    }
    assert not found


def extension_names() -> set[str]:
    """The names that `axes.extension` imports from where they are defined, and those that it defines."""
    first, second = (tree(Path(f"axes/extension/{name}.py")) for name in ("__init__", "builders"))
    of_algebra = {name for node in first.body for name in bound_names(node)}
    (typed,) = [node for node in first.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    of_builders = {name for node in typed.body for name in bound_names(node)}
    bound = {name for node in second.body for name in bound_names(node)}
    assert of_builders <= bound | {node.name for node in second.body if isinstance(node, ast.FunctionDef)}
    return of_algebra | of_builders


def bound_names(node: ast.stmt) -> set[str]:
    """What `node` imports from modules of axes, by the names that it has afterwards."""
    ours = isinstance(node, ast.ImportFrom) and str(node.module).startswith("axes.")
    return {alias.asname or alias.name for alias in node.names} if ours else set()


def test_the_extension_has_no_name_that_no_package_imports():
    """A name that one package needed, and none needs any more, goes."""
    used = {
        name.removeprefix("axes.extension.")
        for path in MODULES
        if path.parts[1] in AROUND
        for name in imports(tree(path))
        if name.startswith("axes.extension.")
    }
    assert not extension_names() - used - {*axes.extension.__all__}


NAMES = {module_name(path): path for path in MODULES}


def module_of(name: str) -> str | None:
    """The module of axes that an import of `name` runs, if any."""
    name = HOMES.get(name, name)
    found = name if name in NAMES else name.rpartition(".")[0]
    return found if found in NAMES and found != "axes" else None


def graph(typing: bool) -> dict[str, set[str]]:
    """Which module imports which, inside functions too; with `typing` also what only type checkers import."""
    return {
        module: {theirs for name in imports(tree(path), typing) if (theirs := module_of(name))}
        for module, path in NAMES.items()
        if module != "axes"
    }


def circle(edges: Mapping[str, Collection[str]]) -> list[str]:
    """Modules each of which imports the next, the last the first; none where there is no circle."""
    try:
        tuple(graphlib.TopologicalSorter(edges).static_order())
    except graphlib.CycleError as error:
        return error.args[1][::-1]
    return []


def test_no_import_is_part_of_a_circle():
    assert not circle(graph(typing=False))


# A sharding has a mesh, and a mesh makes shardings. Below the mesh only type checkers are told of it.
NAMED_BELOW = {
    "axes.algebra.sharding": {"axes.algebra.mesh"},
    "axes.algebra.specs": {"axes.algebra.mesh"},
}


def test_no_import_for_types_is_part_of_a_circle_but_those_of_the_mesh():
    running, typed = graph(typing=False), graph(typing=True)
    for_types = {module: typed[module] - running[module] for module in typed if typed[module] - running[module]}
    assert {module: for_types[module] for module in NAMED_BELOW} == NAMED_BELOW
    assert not circle({module: theirs - NAMED_BELOW.get(module, set()) for module, theirs in typed.items()})


def repeated(found: Iterable[tuple[str, Path]]) -> dict[str, list[str]]:
    """Names that several files have, with these files."""
    files: dict[str, set[str]] = {}
    for name, path in found:
        files.setdefault(name, set()).add(str(path))
    return {name: sorted(where) for name, where in files.items() if len(where) > 1}


def test_a_file_has_one_name_in_the_whole_library():
    assert not repeated((path.name, path) for path in MODULES if path.name != "__init__.py")


def test_a_class_has_one_name_in_the_whole_library():
    assert not repeated(
        (node.name, path) for path in MODULES for node in ast.walk(tree(path)) if isinstance(node, ast.ClassDef)
    )


# Public functions that say in names what one of the same name does to layouts, lines or what torch keeps.
SAID_TWICE = {
    "all_gather": ["axes/ops/collectives.py", "axes/runtime/axis_groups.py"],
    "all_to_all": ["axes/ops/collectives.py", "axes/runtime/axis_groups.py"],
}


def test_a_function_has_one_name_in_the_whole_library():
    functions = [(node.name, path) for path in MODULES for node in tree(path).body if isinstance(node, ast.FunctionDef)]
    assert repeated((name, path) for name, path in functions if not name.startswith("_")) == SAID_TWICE


# What a function may import, and why it isn't imported at the top of the file.
IMPORTED_LATE = {
    "axes/pictures/cli.py": [
        "axes.pictures.explain",
        "axes.pictures.lock",
    ],  # import torch, which no other verb waits for
    "axes/nn/safetensors.py": ["safetensors"],  # an extra: who reads such files has installed it
    "axes/launching/launch.py": ["torch.cuda"],  # a launch on CPUs needs no torch in the launching process
    "axes/runtime/checkpoint.py": ["torch.distributed.checkpoint"],  # takes a second, and who saves has imported it
    "axes/runtime/torch_private.py": [
        "torch._dynamo",  # takes a second, and a mesh needs none of it
        "torch._functorch._aot_autograd",  # the same
        "torch.distributed.pipelining",  # the same; who explains stages has imported it
    ],
}


def test_functions_import_nothing_that_the_file_could():
    functions = [
        (path, name)
        for path in MODULES
        for node in ast.walk(tree(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for name in imports(node)
    ]
    wrong = [
        f"{path} imports {name} inside a function"
        for path, name in functions
        if not any(f"{name}.".startswith(f"{late}.") for late in IMPORTED_LATE.get(str(path), []))
    ]
    assert not wrong, "\n".join(wrong)


def test_the_floors_need_no_other_libraries():
    """The algebra needs the standard library alone, and nobody einops."""
    found = [(path, path.parts[1], name.split(".")[0]) for path in MODULES for name in imports(tree(path))]
    wrong = [
        f"{path} imports {name}"
        for path, floor, name in found
        if (floor == "algebra" and name not in {*sys.stdlib_module_names, "axes"}) or name == "einops"
    ]
    assert not wrong, "\n".join(wrong)


def is_private(part: str) -> bool:
    return part.startswith("_") and not (part.startswith("__") and part.endswith("__"))


def torch_names(module: ast.Module) -> set[str]:
    """Local names that torch or a part of it is bound to."""
    found = set()
    for node in ast.walk(module):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "torch":
                    found.add(alias.asname or "torch")
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            found.update(alias.asname or alias.name for alias in node.names)
    return found


def dotted(node: ast.Attribute) -> list[str]:
    """`torch.distributed._x` as its parts; no parts where it doesn't start at a name."""
    parts: list[str] = []
    at: ast.expr = node
    while isinstance(at, ast.Attribute):
        parts.append(at.attr)
        at = at.value
    return [at.id, *reversed(parts)] if isinstance(at, ast.Name) else []


def private_uses(module: ast.Module) -> Iterator[str]:
    for name in imports(module):
        parts = name.split(".")
        if parts[0] == "torch" and any(map(is_private, parts)):
            yield f"imports {name}"
    roots = torch_names(module)
    for node in ast.walk(module):
        if isinstance(node, ast.Attribute):
            parts = dotted(node)
            if parts and parts[0] in roots and any(map(is_private, parts[1:])):
                yield f"line {node.lineno} uses {'.'.join(parts)}"


# Attributes of torch's objects that carry no leading module: `tensor._local_tensor`.
PRIVATE_ATTRIBUTES = {
    "_local_tensor",
    "_spec",
    "_get_or_create_default_group",
    "_init_backend",
    "_dim_group_names",
    "_rank_map",
    "_layout",
    "_root_mesh",
    "_flatten_mapping",
    "_flatten",
    "_unflatten",
    "_concatenate",
    "_pg_registry",
    "_get_root_mesh",
    "_set_group_name",
    "_set_group_desc",
    "_register_backend",
}


def test_torch_private_api_is_used_in_one_file_alone():
    wrong = [f"{path} {use}" for path in MODULES if path != PRIVATE for use in private_uses(tree(path))]
    assert not wrong, "\n".join(wrong)


def test_no_private_attribute_of_a_torch_object_is_read_elsewhere():
    wrong = [
        f"{path} line {node.lineno} uses .{node.attr}"
        for path in MODULES
        if path != PRIVATE and path.parts[1] != "algebra"
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Attribute) and node.attr in PRIVATE_ATTRIBUTES
    ]
    assert not wrong, "\n".join(wrong)


def test_the_searches_find_what_they_are_for():
    assert set(circle({"a": ["b"], "b": ["c"], "c": ["b"]})) == {"b", "c"}
    private = "from torch.distributed import _x", "import torch\ntorch.distributed._x.y"
    assert all(list(private_uses(ast.parse(text))) for text in private)
    assert not list(private_uses(ast.parse("import torch\ntorch.__version__")))
    beyond = "from axes.algebra.plan import plan", "import axes\naxes.algebra.plan", "mesh._with()"
    assert all(list(beyond_the_public_names(ast.parse(text))) for text in beyond)


def test_importing_the_algebra_imports_no_torch():
    code = (
        "import sys, pkgutil, importlib, axes.algebra\n"
        "for found in pkgutil.walk_packages(axes.algebra.__path__, 'axes.algebra.'):\n"
        "    importlib.import_module(found.name)\n"
        "heavy = {'torch', 'numpy', 'einops'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "axes.Mesh('dp=4 tp=8').sharding('batch@dp embed@tp').spec\n"
        "heavy = {'torch', 'numpy', 'einops'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


# The public surface.


def test_dir_lists_the_public_names_alone():
    assert dir(axes) == sorted(axes.__all__)
    assert {"algebra", "runtime"} <= vars(axes).keys(), "the submodules are imported, and dir doesn't list them"
    assert all(getattr(axes, name) is not None for name in dir(axes))


def test_type_checkers_are_told_the_names_that_there_are():
    body = tree(Path("axes/__init__.py")).body
    (typed,) = [node for node in body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    assert sorted(name.rpartition(".")[2] for name in imports(typed)) == list(axes.__all__)


def page_code(page: Path) -> list[ast.Module]:
    """The Python of a page: its programs, and what its doctests type in."""
    text = [block for _, block in blocks(page.read_text(encoding="utf-8"))]
    parser = doctest.DocTestParser()
    return [
        ast.parse("".join(e.source for e in parser.get_examples(block)) if block.startswith(">>>") else block)
        for block in text
    ]


def beyond_the_public_names(module: ast.Module) -> Iterator[str]:
    """What a page's code uses that isn't public: a module below axes, a name of axes that isn't there, private API."""
    for name in imports(module):
        parts = name.split(".")
        if any(map(is_private, parts)) or (parts[0] == "axes" and parts[1:] and parts[1] not in axes.__all__):
            yield f"imports {name}"
    for node in ast.walk(module):
        if isinstance(node, ast.Attribute):
            parts = dotted(node)
            if parts[:1] == ["axes"] and len(parts) == 2 and parts[1] not in axes.__all__:
                yield f"uses {'.'.join(parts)}"
            if is_private(node.attr):
                yield f"uses .{node.attr}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_code_of_a_page_uses_public_names_alone(page):
    assert not [use for module in page_code(page) for use in beyond_the_public_names(module)]


def test_the_functions_that_the_page_of_the_house_links_are_where_it_says():
    page = (ROOT / "docs" / "house.md").read_text(encoding="utf-8")
    links = re.findall(r"\[`(\w+)`\]\(\.\./(axes/[^)]+)\)", page)
    defined = {
        (node.name, str(path))
        for path in MODULES
        for node in tree(path).body
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
    }
    assert len(links) > 20
    assert not set(links) - defined


def test_the_readme_is_one_screen():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 70


def test_no_test_measures_speed():
    """Work is counted (`tests.counting`), and time is in `make bench`. A clock is for limits alone: `time.monotonic`; and
    half a second of a thread, after which no wrong input may still be thought about."""
    asked = re.compile(r"\b(process_time|perf_counter|thread_time|timeit)\b")
    files = [path for path in TESTS if path.name not in ("test_house.py", "test_hostile.py")]
    assert not [path.name for path in files if asked.search(path.read_text())]


def test_an_example_is_a_file_of_a_few_screens():
    lengths = {
        path.name: len(path.read_text(encoding="utf-8").splitlines()) for path in (ROOT / "examples").glob("*.py")
    }
    assert not {name: length for name, length in lengths.items() if length >= 250}


def test_the_algebras_one_stub_is_of_what_it_hands_on():
    """Stubs could say what the code doesn't: there is one, for the types of torch that the algebra never looks into."""
    assert [path.relative_to(ROOT) for path in (ROOT / "axes").rglob("*.pyi")] == [Path("axes/algebra/opaque.pyi")]
    stub = tree(Path("axes/algebra/opaque.pyi"))
    code = tree(Path("axes/algebra/opaque.py"))
    named = {alias.asname for node in stub.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert named == {ast.unparse(node.target) for node in code.body if isinstance(node, ast.AnnAssign)}
    assert all(name.split(".")[0] == "torch" for name in imports(stub))


def test_every_pin_is_exact_and_every_dependency_is_pinned():
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert all(line.count("==") == 1 for line in pins), pins
    names = {line.split("==")[0].lower() for line in pins}
    assert {"torch", "einops", "pytest", "hypothesis", "ruff", "mypy", "pyright", "numpy"} <= names


def test_another_torch_gets_an_environment_and_pins_of_its_own():
    make = shutil.which("make")
    assert make is not None
    done = subprocess.run(
        [make, "--dry-run", "--always-make", "test", "TORCH=2.11.0"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert ".venv-2.11.0/bin/python -m pytest" in done.stdout
    assert "s/^torch==.*/torch==2.11.0/" in done.stdout


# The tests.


def inside_imports(path: Path) -> set[str]:
    """What a test uses below axes' public names: imports, attributes of `axes`, and texts of monkeypatch."""
    found = {name for name in imports(tree(path)) if name.startswith("axes.") and name not in PUBLIC}
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Attribute) and (parts := dotted(node))[:1] == ["axes"] and parts[1] in LAYERS:
            found |= {".".join(parts[:2])} - PUBLIC
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            found |= {node.value} if re.fullmatch(r"axes\.(algebra|runtime|ops|show)\.[\w.]+", node.value) else set()
    return found


PUBLIC = {
    "axes.convert",
    "axes.nn",
    "axes.extension",
    *(f"axes.{name}" for name in axes.__all__),
    *(f"axes.convert.{name}" for name in axes.convert.__all__),
    *(f"axes.nn.{name}" for name in axes.nn.__all__),
}
MOST_INSIDE = 15


def test_few_tests_import_from_inside_and_say_why():
    files = [path for path in TESTS if path.name != "test_house.py"]
    inside = {path.name: names for path in files if (names := inside_imports(path))}
    below = {
        name: [each for each in names if re.match(r"axes\.(runtime|ops)\b", each)] for name, names in inside.items()
    }
    assert not {name: names for name, names in below.items() if names}
    silent = [name for name in inside if "# Imports from inside: " not in (ROOT / "tests" / name).read_text("utf-8")]
    assert not silent
    assert len(inside) <= MOST_INSIDE, sorted(inside)


MOST_STATEMENTS = 14_500  # of the tests without their benchmarks


def test_the_tests_are_few():
    assert sum(isinstance(node, ast.stmt) for path in TESTS for node in ast.walk(tree(path))) <= MOST_STATEMENTS
