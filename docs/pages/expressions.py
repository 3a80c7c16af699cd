"""The page "einops with an @": the four rules, and what moves in nine expressions.

Prose and expressions stand here; plans, bytes, pictures, errors and gradients are the library's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import axes
from axes.algebra.expressions import Recipe, gradient, recipe
from axes.algebra.expressions.transpose import cotangent, transposed
from axes.algebra.mesh import Mesh
from axes.algebra.plan import Plan, Step
from axes.algebra.sharding import Sharding
from axes.pictures.in_svg import svg_of_panel
from axes.pictures.moves import moves_of_recipe
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
        "The split dim becomes whole. Each rank receives the three quarters that it lacks.",
    ),
    Row(
        "all-reduce",
        "b s d | sum@tp -> b s d",
        "On the left side, `| sum@tp` means that a sum over `tp` is pending. The right side has no `|`, so the "
        "sum is carried out.",
    ),
    Row(
        "reduce-scatter",
        "b s d | sum@tp -> b s@tp d",
        "The sum is carried out, but each rank receives only its part of the sum. This takes half the bytes of an "
        "all-reduce.",
    ),
    Row(
        "all-to-all",
        "b s@tp d -> b s d@tp",
        "The split moves from one dim to another. Each rank keeps a quarter of its shard, and sends one "
        "quarter to each other rank.",
    ),
    Row(
        "slice",
        "b s d -> b s@tp d",
        "Every rank has the whole tensor. So each rank takes its part and sends nothing.",
    ),
    Row(
        "permutation",
        "b s@(cp tp) d -> b s@(tp cp) d",
        "Axes in parentheses cut a dim in their order, the major axis first. If the order changes, the pieces "
        "stay the same but belong to other ranks, so the ranks exchange them.",
        mesh=Mesh("cp=2 tp=2"),
    ),
    Row(
        "reduce",
        "b s@cp d -> b d",
        "Each rank reduces its own part, and then the ranks reduce the results. Only the small result is sent.",
        kind="reduce",
        mesh=Mesh("cp=4"),
    ),
    Row(
        "row-parallel",
        "b s f@tp, f@tp d -> b s@tp d",
        "Each rank multiplies its shards, and gets one term of the product. The terms are summed. The right side "
        "splits dim `s` of the sum over `tp`.",
        kind="einsum",
    ),
    Row(
        "pending",
        "b s f, f d -> b s d | *",
        "No name has an `@`, so every name keeps its split, and `| *` keeps the result pending. In both operands `f` "
        "is split over `tp`. So each rank has one term of the product, and nothing is sent.",
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
    return table(["expression", "steps", "in, out per rank", "backward, local view"], map(_overview_row, ROWS))


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
        padded = f"\n  then each rank pads its part with zeros; the gradient is {cotangent(source).spec}"
        yield made, "" if middle.dims == one.dims else padded


def global_backward(found: Recipe) -> str:
    """How the gradients of DTensors come about, by how that of the result arrives."""
    which = ["for the gradient of operand"] if len(found.inputs) > 1 else []
    head = ["the result's gradient arrives as", *which, "moves", "in, out per rank", "leaves as"]
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

An einops expression names the dims of a tensor before and after an operation. After an `@` come the axes of the mesh
that split the dim. The left side then describes the shards of all ranks before the operation, and the right side the
shards after it. The library finds the communication that leads from the left side to the right side.

```python
import axes
with axes.simulate(4):                                  # four ranks, in this process
    mesh = axes.init_mesh("tp=4", device_type="cpu")
    x = axes.zeros("b s@tp d", mesh=mesh, b=8, s=16, d=32)
    y = axes.rearrange(x, "b s@tp d -> b s d@tp")
    [tuple(t.to_local().shape) for t in (x, y)]
```

Read `@` as "split over". A `|` introduces *pending* reductions (torch's `Partial`): in `b s d | sum@tp` each rank of
`tp` holds one term of a sum. Without `@` and `|`, `axes.rearrange`, `reduce`, `repeat` and `einsum` do what einops
does. They take DTensors (the *global view*: one tensor on all ranks) or plain tensors that hold this rank's shard
(the *local view*). An expression means the same for both.

A name is a Python identifier (`h`, `_h`, `β`, but not `_` alone), and names are separated by white space, line breaks
included. (einops is stricter: it refuses `_h`, `h_` and tabs.) In an einsum, the dims of `...` have the same sizes in
every operand. Only torch tensors are accepted; use einops for arrays of other libraries.

## Four rules

**1. A name that never has an `@` keeps its split.** Below, this is `b`. If a name has an `@` somewhere in the
expression, it is unsplit at every place where it has no `@`. Below, `s` is unsplit on the right side.

```python
with axes.simulate(4):
    mesh = axes.init_mesh("dp=2 tp=2", device_type="cpu")
    x = axes.zeros("b@dp s@tp d", mesh=mesh, b=8, s=16, d=32)
    y = axes.rearrange(x, "b s@tp d -> b s d")
    axes.spec_of(y)
```

Therefore the same expression works with and without data parallelism. (A DTensor has no names for its dims: `spec_of`
writes `_` for each dim.)

**2. The left side is an assertion.** It must match the sharding of the tensor. It causes no communication, with one
exception: if a name is summed (it is missing on the right) and has an axis on the left, the sum is carried out (rule
4). (A plain tensor doesn't know its sharding. For plain tensors the left side declares the sharding.)

```python
with axes.simulate(4):
    mesh = axes.init_mesh("dp=2 tp=2", device_type="cpu")
    x = axes.zeros("b@dp s d@tp", mesh=mesh, b=8, s=16, d=32)
    axes.rearrange(x, "b s@tp d -> b s d")
```

**3. No hidden communication.** Data moves only where the right side differs from the left. If two operands split one
name in different ways, this is an error. The library doesn't gather silently:

```python
with axes.simulate(4):
    mesh = axes.init_mesh("tp=4", device_type="cpu")
    x = axes.zeros("b s f@tp", mesh=mesh, b=8, s=16, f=64)
    w = axes.zeros("f d", mesh=mesh, f=64, d=32)
    axes.einsum(x, w, "b s f, f d -> b s d")
```

**4. No hidden pending reduction.** After a sum over a split dim each rank has one term of the result. The expression
must say whether the result stays pending or the sum is carried out. (A reduction that is pending already, over an
axis that the expression doesn't name, stays pending.) The next expression says neither of the two:

```python
with axes.simulate(4):
    mesh = axes.init_mesh("tp=4", device_type="cpu")
    x = axes.zeros("b s f@tp", mesh=mesh, b=8, s=16, f=64)
    w = axes.zeros("f@tp d", mesh=mesh, f=64, d=32)
    axes.einsum(x, w, "b s f, f d -> b s d")
```

To keep the result pending over `tp`, write `| sum@tp` on the right. `| *` keeps the result pending, whatever the axes
are. To carry the sum out, write the axes of the summed dim on the left: `f@tp`. The right side may also split a dim
of the result, as in `s@tp`:

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

A `*` stands for all axes that split the dim in the tensor. Left of the arrow, `f@*` means that the sum over `f` is
carried out, whatever axes split `f`. Right of the arrow, `s@(* tp)` splits `s` over the axes that split it in the
tensor, and then over `tp`. Rule 1 has an exception. If a name has a `*` somewhere in the expression, a place where
the name has no `@` doesn't mean unsplit. There the name has the axes that split its dim in the tensor. So the code of
a model needn't know which axes split its tensors:

```python
with axes.simulate(4):
    mesh = axes.init_mesh("cp=2 tp=2", device_type="cpu")
    for place in ("", "@tp"):
        x = axes.zeros("b s@cp f" + place, mesh=mesh, b=8, s=16, f=64)
        w = axes.zeros("d f" + place, mesh=mesh, d=32, f=64)
        axes.spec_of(axes.einsum(x, w, "b s f@*, d f@* -> b s d"))
    axes.spec_of(axes.einsum(x, w, "b s f@*, d f@* -> b s@(* tp) d"))
```

A spec without an arrow, as in `shard`, `plan` and `reshard`, is complete: a dim without an `@` is unsplit, and
without a `|` nothing is pending. (`reshard` of a plain tensor is different: it takes both sides, as in `"b s@tp d ->
b s d"`. If [rules](models.md) are set (`axes.use_rules`), `axes.shard` applies them to a spec that has no `@` at
all.) In `reshard`, a `*` keeps the axes that split the dim, and `...` keeps the dims that it stands for as they are.

```python
with axes.simulate(4):
    mesh = axes.init_mesh("cp=2 tp=2", device_type="cpu")
    x = axes.zeros("b@cp s d@tp", mesh=mesh, b=8, s=16, d=32)
    for spec in ("b s@cp d", "b@* s d", "... d", "b@(* tp) s d"):
        axes.spec_of(axes.reshard(x, spec))
```

## Several tensors in one dim

Several tensors are often stored in one dim, such as the gate and up projections of an MLP. If they have the same
size, `rearrange` can make the number of tensors a dim of its own. In the next example this dim is `two`. Each index
of this dim is one tensor. Assignment or `unbind` then separates the tensors:

```python
with axes.simulate(4):
    mesh = axes.init_mesh("tp=4", device_type="cpu")
    both = axes.zeros("(2 f@tp) d", mesh=mesh, f=8, d=5)                # the weights of gate and up
    gate, up = axes.rearrange(both, "(two f@tp) d -> two f@tp d", two=2)
    axes.spec_of(gate), tuple(gate.shape), tuple(gate.to_local().shape)
```

If the sizes differ, separate the tensors with `torch.split` in a *region*: a function that `axes.shard_map` runs on
plain shards. The rows must be stored so that each rank has its part of every tensor. In the expression, `rest=12` and
`q=8` give whole sizes. `q` is a new name that is split: without its size, the ranks would exchange the sizes of their
parts.

```python
def heads(rows):                                         # each key head has two queries, a key and a value
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

In the pictures each rank has a colour and a dashed frame. The frame is the whole tensor (without `b`). The filled
part of the frame is the rank's shard. The colour of this part shows which rank held the data before. A striped part
is a sum over several ranks. Numbers of bytes are those of the busiest rank.

Below each picture is the backward pass. In the *local view* every rank has its own loss, and the backward pass
differentiates the sum of all losses. So the gradient of a replicated tensor is pending: each rank has one term. In
the *global view* there is one loss and one gradient. This gradient may arrive in any sharding, and is reduced only
when an operation needs it reduced. If the gradients of both operands of an einsum need the gradient of the result
gathered or reduced, one collective serves both. The tables for the global view have the sharding of the operand's
gradient in the column "leaves as". [Gradients](gradients.md) has measured results for these operations."""
