"""The page about `axes.show`: what it shows of meshes, shardings, plans and transfers, as text and as SVG.

Prose and code stand here; what a picture holds is the library's.
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


PAGE = f"""# Seeing meshes, shardings, plans and transfers

{WRITTEN}

`axes.show(x)` is a picture of a mesh, a sharding, a plan, a transfer or a DTensor. Nothing on this page needs a process
or a device; but for the DTensor at the end it needs no torch.

## A mesh: who is where, and who talks to whom

```python
import axes
mesh = axes.Mesh("dp=2 cp=2 tp=4", "fsdp = dp cp", ranks_per_node=8)
picture = axes.show(mesh, rank=5)
```

`print(picture)` writes

{SHOWN}

The ranks are a grid, the last axis across. It is seen from one rank, in brackets, here 5: `mesh.at(5)` is the same
as `rank=5`. The ranks that share a group with it bear the letter of the axis, so `4t` and `[5]` are in one group
of `tp`. The table has a line for each name of the mesh: the coordinate of the rank (`at`), its group, on how many nodes
that is, and the groups of all ranks. The same as SVG, with colours that say what the letters say:

<!-- svg show-mesh: sixteen ranks as a grid, and the groups of rank 5 -->

What is large is folded around the rank. Which of 65,536 ranks does rank 40,000 talk to along `tp`?

```python
job = axes.Mesh("pp=4 dp=2048 tp=8", "fsdp = dp tp", ranks_per_node=8)
picture = axes.show(job, rank=40_000)
```

{SHOWN}

`0..7` are eight ranks, `0..56 step 8` as well; `..` stands for what is left out, and never for a part of a number.
Where a node ends within a row, a `|` stands.

## A sharding: which rank holds which block

```python
sharding = mesh.sharding("batch@dp seq@tp embed | sum@cp")
picture = axes.show(sharding, (8, 10, 16), rank=5)
```

{SHOWN}

Each place is a block of the tensor, with the ranks that hold it: `0 4` would be copies, `sum(0 4)` are summands of a
sum that hasn't happened. The last of the dims that are split goes across, the others go down. Sizes may be uneven, and
a dim may be a group of which a factor is split, as in a fused projection; then its factors are drawn:

```python
fused = axes.Mesh("dp=2 tp=2").sharding("(qkv=3 heads@tp dim) embed@dp", heads=4)
picture = axes.show(fused, (48, 8), rank=1)
```

{SHOWN}

<!-- svg show-factor: a dim of three times four heads, of which a rank has two of each three -->

Blocks of the same ranks have the same colour. Without a shape the picture is of any that divides.

## A plan: what moves

```python
small = axes.Mesh("dp=2 tp=4")
plan = axes.plan("b@dp s@tp d", "b@dp s d@tp", (8, 2048, 4096), mesh=small, dtype="bfloat16")
picture = axes.show(plan)
```

{SHOWN}

The first rows are the plan's own: bytes `in` and `out` are over the links, for the rank that has most of them; times
are the [cost model's](redistribution.md). Who has something from whom is shown for the group of the rank (`rank=`).
Where a mesh has at most eight ranks, the SVG begins with all:

<!-- svg show-plan: an all-to-all among two groups of four ranks -->

## A transfer: who sends how much to whom

A [transfer](transfer.md) takes many tensors to other ranks. Its picture is read off the `Transfer` that runs:

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

The first rows are the transfer's own: what is `received` in all is what ranks need and don't have. Tensors that lie
alike are one row (`layers.0.up and 60 more`), with how they lie before and after. The board is folded around the rank
(`rank=`) and its partners, and below it stands what that rank does, bucket by bucket. The time is the
[cost model's](redistribution.md), of one bucket after the other.

<!-- svg show-transfer: how much each of four ranks sends to each of four others -->

From 1,024 ranks to 1,024 it takes some tenths of a second, and one screen:

```python
stages, flat = axes.Mesh("fsdp=128 tp=8"), axes.Mesh("dp=16 tp=64", ranks=range(1024, 2048))
shapes = {{f"layers.{{layer}}.up": (16384, 4096) for layer in range(40)}}
large = axes.transfer(dict.fromkeys(shapes, "f@tp d@fsdp"), dict.fromkeys(shapes, "f@tp d"), stages, flat, shapes)
picture = axes.show(large, rank=1500)
```

{SHOWN}

`axes.explain(move)` says the same with all kinds of tensors and all buckets of the rank, `axes.explain(move).json()` as
[data](explain.md#the-data).

## Where it is shown

| | |
| --- | --- |
| at a prompt | it shows itself, as wide as the terminal; in colour |
| in a script | `print(axes.show(x))` is plain text of 80 columns; `axes.show(x).print()` as at a prompt |
| in a notebook | `axes.show(x)`, and a mesh, a sharding, a plan or a transfer by itself |
| in a file | `.text(width=120)`, `.svg()`, and `.html()`, which is a page of its own |

Text is ASCII. A pipe gets no colour, nor does a terminal where `NO_COLOR` is set. SVG and HTML are for light and dark,
for a phone as well; they hold no script, and nothing comes from outside.

## A DTensor: how does it lie?

Its class is torch's, and so is what `print(x)` and a notebook show of it: this rank's tensor, and placements by the
number of a mesh axis. `axes.spec_of(x)` is the same as one line with names, `axes.sharding_of(x)` a `Sharding`, which a
notebook shows by itself, and `axes.show(x)` the picture. `dim 0` is a dim without a name.

```python
with axes.simulate(8, rank=5):
    mesh = axes.init_mesh("dp=2 tp=4", device_type="cpu")
    x = axes.zeros("b@dp s@tp", mesh=mesh, b=4, s=8)
    print(x.placements, "is", axes.spec_of(x))
    picture = axes.show(x)
```

{SHOWN}

Where a notebook should show every DTensor so, IPython is told once, and torch's class stays as it is:
`get_ipython().display_formatter.formatters["text/html"].for_type(DTensor, lambda x: axes.show(x)._repr_html_())`.
"""
