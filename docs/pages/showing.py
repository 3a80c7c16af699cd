"""The page about `axes.show`: pictures of meshes, shardings, plans and transfers, as text and as SVG.

This file holds the prose and the code of the page; the library makes the pictures.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from axes.pictures.show import Picture
from docs.pages.page import WRITTEN, Session, block

SHOWN, DRAWN = "<!-- text -->", re.compile(r"<!-- svg (\S+): (.*?) -->")


def text() -> str:
    """The page: after its code each picture that is asked for, as text or as a link to the SVG."""
    return "".join(part for part, _ in _parts()).rstrip() + "\n"


def pictures() -> Iterator[tuple[str, str]]:
    """The name and the SVG of every picture."""
    return (found for _, found in _parts() if found is not None)


def _parts() -> Iterator[tuple[str, tuple[str, str] | None]]:
    """The page part by part, each with the file that belongs to it."""
    session = Session()
    for part in re.split(rf"({SHOWN}|{DRAWN.pattern.replace('(', '(?:')})", PAGE):
        drawn = DRAWN.fullmatch(part)
        if part != SHOWN and drawn is None:
            yield session.page(part), None
            continue
        picture = session.space["picture"]
        assert isinstance(picture, Picture), "the code before a picture makes it"
        if drawn is None:
            yield block(str(picture)), None
        else:
            name, alternative = drawn.groups()
            yield f"![{alternative}](pictures/{name}.svg)", (f"{name}.svg", picture.svg())


PAGE = f"""# Pictures of meshes, shardings, plans and transfers

{WRITTEN}

`axes.show(x)` draws a mesh, a sharding, a plan, a transfer or a DTensor. This page needs no job and no device. Only
the DTensor at the end needs torch.

## A mesh: the coordinate and the groups of each rank

```python
import axes
mesh = axes.Mesh("dp=2 cp=2 tp=4", "fsdp = dp cp", ranks_per_node=8)
picture = axes.show(mesh, rank=5)
```

`print(picture)` writes:

{SHOWN}

The picture shows the ranks as a grid, with the last axis from left to right. One rank, here 5, is in brackets;
`axes.show(mesh.at(5))` draws the same picture. A rank that shares a group with rank 5 has the letter of the group's
axis: `4t` and `[5]` are in one group of `tp`. The table has a row for each name of the mesh, with the coordinate of
rank 5 (`at`), its group, the number of nodes that the group spans, and the groups of all ranks. In the SVG each
letter has a colour:

<!-- svg show-mesh: sixteen ranks as a grid, and the groups of rank 5 -->

The picture of a large mesh leaves out most rows far from the rank. Which of 65,536 ranks does rank 40,000 communicate
with along `tp`?

```python
job = axes.Mesh("pp=4 dp=2048 tp=8", "fsdp = dp tp", ranks_per_node=8)
picture = axes.show(job, rank=40_000)
```

{SHOWN}

Lists of ranks are shortened: `0..7` are the eight ranks from 0 to 7, and `0..56 step 8` are the eight ranks 0, 8, 16
and so on to 56. `..` alone marks rows or columns that are left out. If a row of the grid spans several nodes, a `|`
separates the nodes.

## A sharding: which rank holds which block

```python
sharding = mesh.sharding("batch@dp seq@tp embed | sum@cp")
picture = axes.show(sharding, (8, 10, 16), rank=5)
```

{SHOWN}

Each cell is a block of the tensor, with the ranks that hold the block. `0 4` means that ranks 0 and 4 both hold a
copy. `sum(0 4)` means that each of the two ranks holds one term, and the block is the sum of the terms. Columns are
the blocks of the last split dim, rows are the blocks of the other split dims. Blocks may have different sizes. If one
factor of a dim is split, as in a fused projection, the picture shows the factors of the dim:

```python
fused = axes.Mesh("dp=2 tp=2").sharding("(qkv=3 heads@tp dim) embed@dp", heads=4)
picture = axes.show(fused, (48, 8), rank=1)
```

{SHOWN}

<!-- svg show-factor: a dim of three times four heads, of which a rank has two of each four -->

Blocks on the same ranks have the same colour. Without a shape, `axes.show(sharding)` draws the picture for all shapes
whose dims divide evenly.

## A plan: the moves between ranks

```python
small = axes.Mesh("dp=2 tp=4")
plan = axes.plan("b@dp s@tp d", "b@dp s d@tp", (8, 2048, 4096), mesh=small, dtype="bfloat16")
picture = axes.show(plan)
```

{SHOWN}

The first rows are those of `print(plan)`. `in` and `out` are the bytes that the busiest rank receives and sends; the
times are estimates of the [cost model](redistribution.md). The last table shows the bytes that the ranks of one group
send to each other. `rank=` chooses a rank, and the table shows the group of this rank. On a mesh of up to eight
ranks, the SVG begins with the moves of all ranks:

<!-- svg show-plan: an all-to-all among two groups of four ranks -->

## A transfer: who sends how much to whom

A [transfer](transfer.md) moves many tensors to other ranks. `axes.show` takes the `Transfer`:

```python
trainer, server = axes.Mesh("fsdp=4"), axes.Mesh("dp=2 tp=2", ranks=range(4, 8))
move = axes.transfer(
    {{"up": "f@fsdp d", "down": "d@fsdp f", "norm": "d@fsdp"}},
    {{"up": "f@tp d", "down": "d f@tp", "norm": "d"}},
    trainer, server,
    {{"up": (16384, 4096), "down": (4096, 16384), "norm": (4096,)}},
    dtype="bfloat16",
)
picture = axes.show(move, rank=5)
```

{SHOWN}

The first rows are those of `print(move)`. `received` counts the elements that ranks need and don't have. Tensors with
the same specs share a row, such as `layers.0.up and 39 more` in the next picture. A row has the spec before the move,
and the row below it (`->`) the spec after it. The last table has up to six buckets of one rank, which `rank=`
chooses. A bucket is one exchange of many tensors. The time is the sum over all buckets, estimated by the [cost
model](redistribution.md).

<!-- svg show-transfer: how much each of four ranks sends to each of four others -->

A picture of a transfer from 1,024 ranks to 1,024 takes some tenths of a second, and fits on one screen:

```python
stages, flat = axes.Mesh("fsdp=128 tp=8"), axes.Mesh("dp=16 tp=64", ranks=range(1024, 2048))
shapes = {{f"layers.{{layer}}.up": (16384, 4096) for layer in range(40)}}
large = axes.transfer(dict.fromkeys(shapes, "f@tp d@fsdp"), dict.fromkeys(shapes, "f@tp d"), stages, flat, shapes)
picture = axes.show(large, rank=1500)
```

{SHOWN}

`axes.explain(move)` prints the same text. `axes.explain(move).json()` has the same content as
[data](explain.md#the-data), with all buckets of the rank.

## Where a picture appears

| | |
| --- | --- |
| at a prompt | `axes.show(x)` prints itself in colour, as wide as the terminal |
| in a script | `print(axes.show(x))` prints plain text of 80 columns; `axes.show(x).print()` prints as at a prompt |
| in a notebook | `axes.show(x)`, and also a mesh, a sharding, a plan or a transfer as the value of a cell |
| in a file | `.text(width=120)`, `.svg()`, and `.html()`, a whole page |

The text is ASCII. It has no colours in a pipe, or with `NO_COLOR` in the environment. SVG and HTML follow the
reader's light or dark mode and fit a phone. They contain no script and load nothing.

## A DTensor: its sharding

torch prints a DTensor as its local tensor and a list of placements without the names of axes. `axes.spec_of(x)`
returns the spec with the names of the axes. `axes.sharding_of(x)` returns a `Sharding`, which a notebook draws.
`axes.show(x)` draws the picture. In this picture the dims are `dim 0` and `dim 1`, because a DTensor has no names for
its dims.

```python
with axes.simulate(8, rank=5):
    mesh = axes.init_mesh("dp=2 tp=4", device_type="cpu")
    x = axes.zeros("b@dp s@tp", mesh=mesh, b=4, s=8)
    print(x.placements, "is", axes.spec_of(x))
    picture = axes.show(x)
```

{SHOWN}

To draw every DTensor in a notebook, register the picture with IPython once. This doesn't change torch's class:
`get_ipython().display_formatter.formatters["text/html"].for_type(DTensor, lambda x: axes.show(x)._repr_html_())`.
"""
