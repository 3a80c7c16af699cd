"""The page "einops with an @": the four rules, and what moves in nine expressions.

Prose and expressions stand here; plans, bytes, pictures, errors and gradients are the library's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import axes
from axes.algebra.expressions import Recipe, gradient, recipe
from axes.algebra.mesh import Mesh
from axes.algebra.plan import Plan, Step
from axes.algebra.sharding import Sharding
from axes.runtime.gradients import transposed
from axes.show.in_svg import svg_of_panel
from axes.show.moves import moves_of_recipe
from docs.pages.page import WRITTEN, Session, block, inline, paragraph, table

SIZES = {"b": 8, "s": 2048, "d": 4096, "f": 8192}
DTYPE = "bfloat16"
TP = Mesh("tp=4")


@dataclass(frozen=True)
class Row:
    """A row of the table. `specs` are the operands as they are, where the text doesn't say it."""

    name: str
    text: str
    why: str
    kind: str = "rearrange"
    op: str = "sum"
    mesh: Mesh = TP
    specs: tuple[str, ...] = ()

    @property
    def operands(self) -> tuple[str, ...]:
        """The specs of the operands."""
        return self.specs or tuple(part.strip() for part in self.text.split("->")[0].split(","))

    @property
    def call(self) -> str:
        """How it is written."""
        tensors = "x, w" if self.kind == "einsum" else "x"
        op = f', "{self.op}"' if self.kind == "reduce" else ""
        return f'axes.{self.kind}({tensors}, "{self.text}"{op})'

    @property
    def shardings(self) -> tuple[Sharding, ...]:
        """How the operands lie."""
        return tuple(self.mesh.sharding(spec) for spec in self.operands)

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """The whole shapes of the operands."""
        return tuple(tuple(SIZES[name] for name in names_of(sharding)) for sharding in self.shardings)

    def on_dtensors(self) -> Recipe:
        """What the expression does to DTensors."""
        return recipe(self.kind, self.text, self.op, self.shardings, self.shapes, self.mesh)

    def on_shards(self) -> Recipe:
        """What it does to plain tensors that hold their shards."""
        shapes = tuple(one.local_shape(shape) for one, shape in zip(self.shardings, self.shapes, strict=True))
        return recipe(self.kind, self.text, self.op, (None,) * len(shapes), shapes, self.mesh)


ROWS = (
    Row(
        "all-gather",
        "b s@tp d -> b s d",
        "What was split is whole. Each rank receives the other three quarters.",
    ),
    Row(
        "all-reduce",
        "b s d | sum@tp -> b s d",
        "Left of the bar is what a rank holds, right of it what hasn't happened yet: the sum over `tp`. "
        "On the right nothing is pending, so it happens.",
    ),
    Row(
        "reduce-scatter",
        "b s d | sum@tp -> b s@tp d",
        "The same sum, of which each rank wants only its part: half the bytes.",
    ),
    Row(
        "all-to-all",
        "b s@tp d -> b s d@tp",
        "The split moves from one dim to another. Each rank keeps a quarter of what it has, and sends a quarter "
        "to each other rank.",
    ),
    Row(
        "slice",
        "b s d -> b s@tp d",
        "Every rank has everything, so it takes its part and sends nothing.",
    ),
    Row(
        "permutation",
        "b s@(cp tp) d -> b s@(tp cp) d",
        "The order of axes in a place is the order of the cuts, major first. In another order the same pieces lie "
        "on other ranks: those whose coordinates differ swap them.",
        mesh=Mesh("cp=2 tp=2"),
    ),
    Row(
        "reduce",
        "b s@cp d -> b d",
        "A reduction over a split dim is a local one, and another over the ranks. Only the small result travels.",
        kind="reduce",
        mesh=Mesh("cp=4"),
    ),
    Row(
        "row-parallel",
        "b s f@tp, f@tp d -> b s@tp d",
        "Each rank multiplies what it has, which gives a summand of the whole product. What becomes of the sum is "
        "on the right: here it is scattered over `s`.",
        kind="einsum",
    ),
    Row(
        "pending",
        "b s f, f d -> b s d | *",
        "Nothing is annotated, so everything flows, and `| *` takes what arises. Both operands came split over `f`: "
        "the product is pending, and nothing is sent until someone wants it.",
        kind="einsum",
        specs=("b s f@tp", "f@tp d"),
    ),
)


def text() -> str:
    """The page."""
    parts = [Session().page(INTRODUCTION).replace("<!-- table -->", overview()), *map(section, ROWS)]
    return "\n\n".join(parts) + "\n"


def pictures() -> Iterator[tuple[str, str]]:
    """The name and the SVG of every picture."""
    for row in ROWS:
        found = row.on_dtensors()
        moves = moves_of_recipe(found, DTYPE, hidden="b")
        yield f"{row.name}.svg", svg_of_panel(moves, found.text, moves.words)


def overview() -> str:
    """All rows as one table."""
    return table(["expression", "is", "in, out per rank", "backward, local view"], map(_overview_row, ROWS))


def _overview_row(row: Row) -> list[str]:
    steps = steps_of(plans_of(row.on_dtensors()))
    back = steps_of([made for made, _ in local_backward(row.on_shards())])
    call, local = ("", []) if row.kind == "rearrange" else (f"{row.kind} ", [f"{row.kind} on each rank"])
    expression = f"{call}[{inline(row.text)}](#{row.name})"
    return [expression, ", ".join([*local, *kinds(steps)]), moved(steps), listed(kinds(back))]


def section(row: Row) -> str:
    """One row: what it does, with a picture, and its backward in both views."""
    found = row.on_dtensors()
    result = found.result
    mesh = " ".join(f"{axis}={size}" for axis, size in row.mesh.shape.items())
    stays = f"{result.tensor}     {list(found.whole(result.groups))} {DTYPE}\n  nothing moves"
    local = [f"{made}{after}" for made, after in local_backward(row.on_shards())]
    parts = [
        f"### {row.name.capitalize()}",
        f"`{row.call}` on `{mesh}`",
        paragraph(row.why),
        f"![{row.name}: what each rank holds before and after](pictures/{row.name}.svg)",
        block("\n".join(map(str, plans_of(found))) or stays),
        "Backward in the local view:",
        block("\n".join(local) or "nothing moves"),
        "Backward in the global view:",
        global_backward(found),
    ]
    return "\n\n".join(parts)


# --- what the library says --------------------------------------------------------------------------


def plans_of(found: Recipe) -> list[Plan]:
    """What an operation communicates, in order."""
    return [axes.plan(source, target, shape, dtype=DTYPE) for source, target, shape in found.moves]


def local_backward(found: Recipe) -> Iterator[tuple[Plan, str]]:
    """What the gradient of an operation on plain tensors communicates, in order; and what follows it."""
    for source, target, shape in reversed(found.moves):
        one, two = source.at(shape), target.at(shape)
        arriving, middle, _ = transposed(one, two)
        made = axes.plan(replace(arriving, names=source.names), middle, shape, dtype=DTYPE)
        yield made, "" if middle.dims == one.dims else "\n  then within zeros: pending"


def global_backward(found: Recipe) -> str:
    """How the gradients of DTensors come about, by how that of the result arrives."""
    which = ["of operand"] if len(found.inputs) > 1 else []
    head = ["the gradient arrives as", *which, "moves", "in, out per rank", "leaves as"]
    return table(head, (_gradient_row(found, i, way) for way in arrivals(found) for i in range(len(found.inputs))))


def _gradient_row(found: Recipe, index: int, arrived: Sharding) -> list[str]:
    back = gradient(found, index, arrived)
    steps = steps_of(plans_of(back))
    which = [inline(found.inputs[index].tensor.spec)] if len(found.inputs) > 1 else []
    return [inline(arrived.spec), *which, listed(kinds(steps)), moved(steps), inline(back.result.tensor.spec)]


def arrivals(found: Recipe) -> list[Sharding]:
    """Ways in which a gradient may arrive: as the result is, whole, as summands, as an operand is."""
    result = found.result.tensor
    names = names_of(result)
    whole = result.mesh.sharding(" ".join(names))
    sums = tuple([("sum", layout) for layout in result.mesh.layouts])
    ways = [replace(result, pending=()), whole, replace(whole, pending=sums)]
    ways += [replace(i.tensor, pending=()) for i in found.inputs if names_of(i.tensor) == names]
    return list(dict.fromkeys(ways))


def names_of(sharding: Sharding) -> tuple[str, ...]:
    """The names of the dims, none of which is a group here."""
    return tuple(name for (name,) in map(sharding.names_of, range(sharding.ndim)))


def steps_of(plans: Sequence[Plan]) -> list[Step]:
    """The steps of several plans."""
    return [step for made in plans for step in made.steps]


def kinds(steps: Sequence[Step]) -> list[str]:
    """What the steps are."""
    return [step.kind for step in steps]


def listed(names: Sequence[str]) -> str:
    """Names in a cell."""
    return ", ".join(names) or "nothing"


def moved(steps: Sequence[Step]) -> str:
    """Bytes in and out of the rank that has most."""
    counts = sum(step.bytes_in for step in steps), sum(step.bytes_out for step in steps)
    return ", ".join(map(_bytes, counts)) if any(counts) else "0"


def _bytes(count: int) -> str:
    return f"{count / 2**20:g} MiB" if count >= 2**20 else f"{count / 2**10:g} KiB"


# --- prose ------------------------------------------------------------------------------------------

INTRODUCTION = f"""# einops with an @

{WRITTEN}

An einops expression says what becomes of the dims of a tensor. With an `@` it also says over which axes of the
mesh each dim is split, and so which part each rank holds, before and after. What has to move follows from that.

```python
import axes
with axes.simulate(4):                                  # four ranks, in this process
    mesh = axes.init_mesh("tp=4", device_type="cpu")
    x = axes.zeros("b s@tp d", mesh=mesh, b=8, s=16, d=32)
    y = axes.rearrange(x, "b s@tp d -> b s d@tp")
    [tuple(t.to_local().shape) for t in (x, y)]
```

Read `@` as "split over". After a `|` stands what is *pending*: `b s d | sum@tp` is a value of which each rank
of `tp` holds a summand. Without `@` and `|`, `axes.rearrange`, `reduce`, `repeat` and `einsum` are einops'. They take
DTensors (the *global view*: one tensor, wherever it lies) or plain tensors that hold this rank's shard (the *local
view*), and the expression means the same.

One text is read the same everywhere. A name is what Python calls an identifier (`h`, `_h`, `β`, but not `_` alone,
and written as Python normalizes it); white space is what Python calls so, tabs and line breaks included. In an
einsum `...` stands for dims of the same sizes in every operand. (einops is stricter: it refuses `_h`, `h_` and tabs.)
Arrays of other libraries are for einops itself.

## Four rules

**1. What you annotate is explicit, what you don't flows.** A name that carries an `@` anywhere is explicit
everywhere: where it has none, it is unsplit. Below that is `s`. A name that never carries one, as `b`, keeps the split
that it came with.

```python
with axes.simulate(4):
    mesh = axes.init_mesh("dp=2 tp=2", device_type="cpu")
    x = axes.zeros("b@dp s@tp d", mesh=mesh, b=8, s=16, d=32)
    y = axes.rearrange(x, "b s@tp d -> b s d")
    axes.spec_of(y)
```

So one expression serves a model with data parallelism and one without, and says only what it is about. (A DTensor
doesn't know the names of its dims: `_` stands for them in what `spec_of` says.)

**2. The left side is an assertion.** What it says of the tensor is checked, and never brought about. (Of a plain
tensor, which doesn't know how it is split, it is a declaration.)

```python
with axes.simulate(4):
    mesh = axes.init_mesh("dp=2 tp=2", device_type="cpu")
    x = axes.zeros("b@dp s d@tp", mesh=mesh, b=8, s=16, d=32)
    axes.rearrange(x, "b s@tp d -> b s d")
```

**3. No hidden communication.** Data moves only where the right side differs from the left. Operands that disagree
on a name that they share are an error, and not a silent gather:

```python
with axes.simulate(4):
    mesh = axes.init_mesh("tp=4", device_type="cpu")
    x = axes.zeros("b s f@tp", mesh=mesh, b=8, s=16, f=64)
    w = axes.zeros("f d", mesh=mesh, f=64, d=32)
    axes.einsum(x, w, "b s f, f d -> b s d")
```

**4. No hidden pending.** A sum over a split dim leaves each rank with a summand. If the result is to stay so, the
expression says it, by naming the axis or with `| *`, which takes whatever arises. If it is to be reduced, the left side
says that the dim is split.

```python
with axes.simulate(4):
    mesh = axes.init_mesh("tp=4", device_type="cpu")
    x = axes.zeros("b s f@tp", mesh=mesh, b=8, s=16, f=64)
    w = axes.zeros("f@tp d", mesh=mesh, f=64, d=32)
    axes.einsum(x, w, "b s f, f d -> b s d")
```

So there are four ways to go on: pending, under either name; reduced; and reduced and scattered.

```python
with axes.simulate(4):
    mesh = axes.init_mesh("tp=4", device_type="cpu")
    x = axes.zeros("b s f@tp", mesh=mesh, b=8, s=16, f=64)
    w = axes.zeros("f@tp d", mesh=mesh, f=64, d=32)
    for right in ("b s d | *", "b s d | sum@tp"):
        axes.spec_of(axes.einsum(x, w, "b s f, f d -> " + right))
    for right in ("b s d", "b s@tp d"):
        axes.spec_of(axes.einsum(x, w, "b s f@tp, f@tp d -> " + right))
```

## Stars, and specs without an arrow

A `*` stands for what a dim is split over, whatever that is. Left of the arrow a sum over `f@*` is resolved over
whatever split f; right of it `s@(* tp)` adds a split. So a model says what it means without knowing the mesh:

```python
with axes.simulate(4):
    mesh = axes.init_mesh("cp=2 tp=2", device_type="cpu")
    for place in ("", "@tp"):
        x = axes.zeros("b s@cp f" + place, mesh=mesh, b=8, s=16, f=64)
        w = axes.zeros("d f" + place, mesh=mesh, d=32, f=64)
        axes.spec_of(axes.einsum(x, w, "b s f@*, d f@* -> b s d"))
    axes.spec_of(axes.einsum(x, w, "b s f@*, d f@* -> b s@(* tp) d"))
```

Where a spec stands alone, as in `shard`, `plan` and `reshard`, it is the whole truth: a bare dim is unsplit, and what
isn't named after a `|` isn't pending. In `reshard` a `*` keeps what the tensor has; `...` stands for dims that stay.

```python
with axes.simulate(4):
    mesh = axes.init_mesh("cp=2 tp=2", device_type="cpu")
    x = axes.zeros("b@cp s d@tp", mesh=mesh, b=8, s=16, d=32)
    for spec in ("b s@cp d", "b@* s d", "... d", "b@(* tp) s d"):
        axes.spec_of(axes.reshard(x, spec))
```

## Several tensors in one dim

Tensors of one size are a dim of their own, which `unbind` or a loop takes apart:

```python
with axes.simulate(4):
    mesh = axes.init_mesh("tp=4", device_type="cpu")
    both = axes.zeros("(2 f@tp) d", mesh=mesh, f=8, d=5)                # gate and up: one product
    gate, up = axes.rearrange(both, "(two f@tp) d -> two f@tp d", two=2)
    axes.spec_of(gate), tuple(gate.shape), tuple(gate.to_local().shape)
```

Of others a rank holds its part of each, which `torch.split` takes apart in a region:

```python
def heads(rows):                                                        # of each key head its two queries, k and v
    q, k, v = rows.unflatten(0, (-1, 12)).split((6, 3, 3), 1)
    return q.reshape(-1, 3, 5), k, v

with axes.simulate(4), axes.init_mesh("tp=4", device_type="cpu"):
    qkv = axes.zeros("(g@tp rest) d", g=4, rest=2 * 3 + 3 + 3, d=5)
    q, k, v = axes.shard_map(heads, "(g@tp rest=12) d -> q=8@tp k d, g@tp k d, g@tp k d")(qkv)
    axes.spec_of(q), tuple(q.shape), tuple(k.shape)
```

## What moves

Nine expressions, on four ranks. All tensors are {DTYPE}, with {", ".join(f"{n}={size}" for n, size in SIZES.items())}.

<!-- table -->

In the pictures each rank has a colour. The dashed frame is the whole tensor (without `b`), what is filled is the part
that the rank holds, in the colour of the rank it comes from; stripes are sums. Bytes are over the links, those of the
rank that has most.

Under each stands the backward, derived from the same expression. In the *local view* every rank has a loss of its own
and their sum counts, so that the gradient of what is replicated is this rank's summand of it: it is pending. In the
*global view* there is one loss and one gradient, which may arrive in any sharding; nothing is reduced before
something needs it. [Gradients](gradients.md) runs all of this."""
