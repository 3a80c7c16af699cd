"""Mistakes that people make in expressions, and the exact message that each gets.

Every message says what was found, what was expected and, where that is known, what to write
instead. All of them come before anything is sent or created, so they are the same on every rank.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator

import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode

import axes
from axes.algebra.errors import AxesError, ExpressionError, MeshError, ShardingError, SizeError
from axes.algebra.mesh import Mesh
from axes.ops.einops_ops import rearrange, reduce, repeat
from axes.ops.einsum import einsum

Run = Callable[[Mesh], object]


@pytest.fixture
def mesh() -> Iterator[Mesh]:
    with axes.simulate(8):
        yield axes.init_mesh("dp=2 cp=2 tp=2", "cptp = cp tp", device_type="cpu")


def D(mesh: Mesh, spec: str, *shape: int) -> DTensor:
    """A DTensor with this sharding."""
    local = torch.zeros(mesh.sharding(spec).local_shape(shape))
    return axes.from_local(local, spec, mesh=mesh, shape=shape)


def L(*shape: int) -> torch.Tensor:
    """A plain tensor."""
    return torch.zeros(shape)


def mistake(title: str, run: Run, error: type[AxesError], message: str) -> object:
    return pytest.param(run, error, textwrap.dedent(message).strip("\n"), id=title)


MISTAKES = [
    mistake(
        "a typo in an axis",
        lambda m: rearrange(D(m, "b s@tp d", 8, 16, 32), "b s@pt d -> b s d"),
        MeshError,
        """
        the mesh has no axis 'pt'; did you mean 'tp'?
          b s@pt d -> b s d
            ^^^^
        """,
    ),
    mistake(
        "an axis of another mesh",
        lambda m: rearrange(D(m, "b s@tp d", 8, 16, 32), "b s@expert d -> b s d"),
        MeshError,
        """
        the mesh has no axis 'expert'; known: dp, cp, tp, cptp
          b s@expert d -> b s d
            ^^^^^^^^
        """,
    ),
    mistake(
        "a dim name in place of an axis",
        lambda m: rearrange(D(m, "b s d", 8, 16, 32), "b s@d d -> b s d"),
        MeshError,
        """
        the mesh has no axis 'd', but a dim of this name; axes: dp, cp, tp
          b s@d d -> b s d
            ^^^
        """,
    ),
    mistake(
        "a typo in a dim name",
        lambda m: rearrange(D(m, "b seq@tp d", 8, 16, 32), "b seq@tp d -> b sek d"),
        ExpressionError,
        """
        'seq' stands on the left only; rearrange keeps what is there, reduce drops names; did you mean 'sek'?
          b seq@tp d -> b sek d
            ^^^^^^
        """,
    ),
    mistake(
        "a name left out on the right",
        lambda m: rearrange(D(m, "b s@tp d", 8, 16, 32), "b s@tp d -> b s"),
        ExpressionError,
        """
        'd' stands on the left only; rearrange keeps what is there, reduce drops names
          b s@tp d -> b s
                 ^
        """,
    ),
    mistake(
        "a name left out on the left",
        lambda m: rearrange(D(m, "b s@tp", 8, 16), "b s@tp -> b s d"),
        ExpressionError,
        """
        'd' stands on the right only; repeat adds names
          b s@tp -> b s d
                        ^
        """,
    ),
    mistake(
        "a spec that is too short",
        lambda m: rearrange(D(m, "b s@tp d", 8, 16, 32), "b s@tp -> b s"),
        SizeError,
        """
        'b s@tp' has 2 dims; the tensor has 3
        in  b s@tp -> b s
        """,
    ),
    mistake(
        "a spec that is too long",
        lambda m: rearrange(D(m, "b s@tp", 8, 16), "b s@tp d -> b s d"),
        SizeError,
        """
        'b s@tp d' has 3 dims; the tensor has 2
        in  b s@tp d -> b s d
        """,
    ),
    mistake(
        "no arrow",
        lambda m: rearrange(D(m, "b s@tp", 8, 16), "b s@tp"),
        ExpressionError,
        """
        rearrange needs '->' and the result behind it
          b s@tp
               ^
        """,
    ),
    mistake(
        "two results",
        lambda m: rearrange(D(m, "b s@tp", 8, 16), "b s@tp -> b, s"),
        ExpressionError,
        """
        rearrange has one result; found 2
          b s@tp -> b, s
                   ^^^^^
        """,
    ),
    mistake(
        "two operands for one tensor",
        lambda m: rearrange(D(m, "b s@tp", 8, 16), "b, s@tp -> b s"),
        ExpressionError,
        """
        rearrange takes one tensor; found 2 specs
          b, s@tp -> b s
          ^^^^^^^^
        """,
    ),
    mistake(
        "an axis for two dims",
        lambda m: rearrange(L(4, 4), "b@tp s@tp -> b s", mesh=m),
        ShardingError,
        """
        'tp' is used twice: by 'b' and by 's'; an axis splits one dim or is pending
          b@tp s@tp -> b s
               ^^^^
        """,
    ),
    mistake(
        "an axis for two dims on the right",
        lambda m: rearrange(D(m, "b s@tp d", 8, 16, 32), "b s@tp d -> b s@tp d@tp"),
        ShardingError,
        """
        'tp' is used twice: by 's' and by 'd'; an axis splits one dim or is pending
          b s@tp d -> b s@tp d@tp
                        ^^^^
        """,
    ),
    mistake(
        "an axis that splits and is pending",
        lambda m: rearrange(D(m, "b s@tp d", 8, 16, 32), "b s@tp d | sum@tp -> b s d"),
        ShardingError,
        """
        'tp' is used twice: by 's' and by '| sum'; an axis splits one dim or is pending
          b s@tp d | sum@tp -> b s d
            ^^^^
        """,
    ),
    mistake(
        "an alias beside its part",
        lambda m: rearrange(L(4, 4), "b@cptp s@tp -> b s", mesh=m),
        ShardingError,
        """
        'cptp' and 'tp' share ranks: by 'b' and by 's'; an axis splits one dim or is pending
          b@cptp s@tp -> b s
                 ^^^^
        """,
    ),
    mistake(
        "another split than the tensor's",
        lambda m: rearrange(D(m, "b s@(cp tp) d", 8, 16, 32), "b s@tp d -> b s d"),
        ShardingError,
        """
        the tensor isn't sharded as the left side says
          says  b s@tp d
          has   b s@(cp tp) d
        in  b s@tp d -> b s d
        write 'b s@(cp tp) d' on the left, or axes.reshard it before
        """,
    ),
    mistake(
        "another order than the tensor's",
        lambda m: rearrange(D(m, "b s@(cp tp) d", 8, 16, 32), "b s@(tp cp) d -> b s d"),
        ShardingError,
        """
        the tensor isn't sharded as the left side says
          says  b s@(tp cp) d
          has   b s@(cp tp) d
        in  b s@(tp cp) d -> b s d
        write 'b s@(cp tp) d' on the left, or axes.reshard it before
        """,
    ),
    mistake(
        "a split that isn't there",
        lambda m: rearrange(D(m, "b s d", 8, 16, 32), "b s@tp d -> b s d"),
        ShardingError,
        """
        the tensor isn't sharded as the left side says
          says  b s@tp d
          has   b s d
        in  b s@tp d -> b s d
        write 'b s d' on the left, or axes.reshard it before
        """,
    ),
    mistake(
        "a split that isn't mentioned",
        lambda m: rearrange(D(m, "b s@tp d", 8, 16, 32), "b s d -> b s@(cp tp) d"),
        ShardingError,
        """
        the tensor isn't sharded as the left side says
          says  b s d
          has   b s@tp d
        in  b s d -> b s@(cp tp) d
        write 'b s@tp d' on the left, or axes.reshard it before
        """,
    ),
    mistake(
        "a pending sum that isn't mentioned",
        lambda m: rearrange(D(m, "b s d | sum@tp", 8, 16, 32), "b s d -> b s@tp d"),
        ShardingError,
        """
        the tensor isn't sharded as the left side says
          says  b s d
          has   b s d | sum@tp
        in  b s d -> b s@tp d
        write 'b s d | sum@tp' on the left, or axes.reshard it before
        """,
    ),
    mistake(
        "a pending sum that isn't there",
        lambda m: rearrange(D(m, "b s d", 8, 16, 32), "b s d | sum@tp -> b s d"),
        ShardingError,
        """
        the tensor isn't sharded as the left side says
          says  b s d | sum@tp
          has   b s d
        in  b s d | sum@tp -> b s d
        write 'b s d' on the left, or axes.reshard it before
        """,
    ),
    mistake(
        "a pending mean taken for a sum",
        lambda m: rearrange(D(m, "b s d | mean@tp", 8, 16, 32), "b s d | sum@tp -> b s d"),
        ShardingError,
        """
        the tensor isn't sharded as the left side says
          says  b s d | sum@tp
          has   b s d | mean@tp
        in  b s d | sum@tp -> b s d
        write 'b s d | mean@tp' on the left, or axes.reshard it before
        """,
    ),
    mistake(
        "keeping what isn't pending",
        lambda m: rearrange(D(m, "b s@tp d", 8, 16, 32), "b s@tp d -> b s d | sum@tp"),
        ShardingError,
        """
        the right side keeps sum@tp, but the result has nothing pending
          has   b s@tp d
        in  b s@tp d -> b s d | sum@tp
        write '| *' to keep what arises
        """,
    ),
    mistake(
        "an axis that flows in the way",
        lambda m: rearrange(D(m, "b s d@tp", 8, 16, 32), "b s d -> b s@tp d"),
        ShardingError,
        """
        'tp' would split 's' and 'd'
          has   b s d@tp
        in  b s d -> b s@tp d
        'd' came split over it: write 'd@tp' on the left to have it moved
        """,
    ),
    mistake(
        "a split across the names of a group",
        lambda m: rearrange(D(m, "b s@tp", 8, 12), "b (s p) -> b s p", s=3),
        ShardingError,
        """
        tp splits (s p) into 2 parts that don't fall on its names: (s=3 p=4)
          has   b (s p)@tp
        in  b (s p) -> b s p
        write '(s p)@tp' on the left to have it gathered, or choose sizes that divide
        """,
    ),
    mistake(
        "sizes that don't multiply",
        lambda m: rearrange(D(m, "b s@tp", 8, 12), "b (h d)@tp -> b h@tp d", h=5),
        SizeError,
        """
        12 doesn't divide by 5:  h=5 * d = 12    (dim 1 of [8, 12], in  b (h d)@tp -> b h@tp d)
        """,
    ),
    mistake(
        "two sizes left open",
        lambda m: rearrange(D(m, "b s@tp", 8, 12), "b (h k d)@tp -> b h@tp k d", h=2),
        SizeError,
        """
        the sizes of 'k' and 'd' don't follow from  h=2 * k * d = 12    (dim 1 of [8, 12], in  b (h k d)@tp -> b h@tp k d)
        give all but one of them, like k=2
        """,
    ),
    mistake(
        "a size for no name",
        lambda m: rearrange(D(m, "b s@tp", 8, 12), "b (h d)@tp -> b h@tp d", heads=6),
        SizeError,
        """
        a size is given for 'heads', which isn't in the expression; known: b, h, d
        """,
    ),
    mistake(
        "a size that isn't one",
        lambda m: rearrange(D(m, "b s@tp", 8, 12), "b (h d)@tp -> b h@tp d", h=0),
        SizeError,
        """
        the size of 'h' is a whole number from 1 to 281474976710656; found 0
        """,
    ),
    mistake(
        "a place inside and outside",
        lambda m: rearrange(D(m, "b s@tp", 8, 12), "b (h@tp d)@cp -> b h d", h=2),
        ExpressionError,
        """
        a group has '@' inside or outside, not both
          b (h@tp d)@cp -> b h d
            ^^^^^^^^^^^
        """,
    ),
    mistake(
        "a group in a group",
        lambda m: rearrange(D(m, "b s@tp", 8, 12), "b (h (k d))@tp -> b h k d", h=2),
        ExpressionError,
        """
        expected ')': groups don't nest, found '('
          b (h (k d))@tp -> b h k d
               ^
        """,
    ),
    mistake(
        "a reserved sign",
        lambda m: rearrange(D(m, "b s@tp", 8, 12), "b s@[tp] -> b s"),
        ExpressionError,
        """
        '[' is reserved
          b s@[tp] -> b s
              ^
        """,
    ),
    mistake(
        "a name that starts with a digit",
        lambda m: rearrange(D(m, "b s@tp", 8, 12), "b 2s@tp -> b s"),
        ExpressionError,
        """
        a name doesn't start with a digit
          b 2s@tp -> b s
            ^^
        """,
    ),
    mistake(
        "the underscore as a name",
        lambda m: rearrange(D(m, "b s@tp", 8, 12), "b _@tp -> b _"),
        ExpressionError,
        """
        '_' stands in specs only; rearrange needs a name
          b _@tp -> b _
            ^^^^
        """,
    ),
    mistake(
        "a split ellipsis",
        lambda m: rearrange(D(m, "b s@tp", 8, 12), "...@tp -> ..."),
        ExpressionError,
        """
        '...' stands for dims that keep their split; name the dim that is split
          ...@tp -> ...
          ^^^^^^
        """,
    ),
    mistake(
        "a group of any dims on the left",
        lambda m: rearrange(D(m, "b s@tp", 8, 12), "(...)@tp s -> s"),
        ExpressionError,
        """
        '...' in a group on the left leaves its sizes open; name the dims
          (...)@tp s -> s
          ^^^^^^^^
        """,
    ),
    mistake(
        "same on a DTensor",
        lambda m: rearrange(D(m, "b s d", 8, 16, 32), "b s d -> b s d | same@tp"),
        ExpressionError,
        """
        'same' is about gradients of plain tensors; a DTensor has none
          b s d -> b s d | same@tp
                           ^^^^^^^
        """,
    ),
    mistake(
        "an unknown reduction after the bar",
        lambda m: rearrange(D(m, "b s d", 8, 16, 32), "b s d | avg@tp -> b s d"),
        ExpressionError,
        """
        expected one of sum, mean, max, min, same with '@', or '*', after '|', found 'avg'
          b s d | avg@tp -> b s d
                  ^^^
        """,
    ),
    mistake(
        "a plain tensor without a mesh",
        lambda m: rearrange(L(4, 4), "b@tp s -> b s"),
        MeshError,
        """
        axes.rearrange of plain tensors needs a mesh; pass mesh=... or write it inside `with mesh:`
        """,
    ),
    mistake(
        "a plain shard of another size",
        lambda m: rearrange(L(4, 4), "b@tp s -> b s", mesh=m, b=5),
        SizeError,
        """
        the shard of [5, 4] on rank 0 is [3, 4] by 'b@tp s'; found [4, 4]
        in  b@tp s -> b s
        """,
    ),
    mistake(
        "a list as a tensor",
        lambda m: rearrange((L(4, 4),), "b@tp s -> b s", mesh=m),
        ShardingError,
        """
        axes.rearrange with '@' takes a tensor; found tuple
        """,
    ),
    mistake(
        "a hidden pending sum",
        lambda m: reduce(D(m, "b s@cp d", 8, 16, 32), "b s d -> b d", "sum"),
        ShardingError,
        """
        the result would be left pending: sum@cp
          has   b s@cp d
        in  b s d -> b d
        write 's@cp' on the left to have it reduced, or '| sum@cp' or '| *' on the right to keep it
        """,
    ),
    mistake(
        "the max of a pending sum",
        lambda m: reduce(D(m, "b s d | sum@tp", 8, 16, 32), "b s d | sum@tp -> b s", "max"),
        ShardingError,
        """
        'max' doesn't pass a pending sum
          has   b s d | sum@tp
        in  b s d | sum@tp -> b s
        resolve it first: '| sum@tp' on the left of a rearrange
        """,
    ),
    mistake(
        "a mean of uneven means",
        lambda m: reduce(D(m, "b s@cp d", 8, 5, 32), "b s@cp d -> b d | mean@cp", "mean"),
        ShardingError,
        """
        a mean over uneven shards isn't the mean of their means
          has   b s@cp d
        in  b s@cp d -> b d | mean@cp
        write '| sum@cp' on the right; it pends as local sums over the whole size
        """,
    ),
    mistake(
        "a function across ranks",
        lambda m: reduce(D(m, "b s@cp", 8, 16), "b s@cp -> b", torch.logsumexp),
        ShardingError,
        """
        'logsumexp()' doesn't reduce across ranks, and cp splits 's'
          has   b s@cp
        in  b s@cp -> b
        gather it first: 's@cp' on the left of a rearrange
        """,
    ),
    mistake(
        "a product across ranks",
        lambda m: reduce(D(m, "b s@cp", 8, 16), "b s@cp -> b", "prod"),
        ShardingError,
        """
        'prod' doesn't reduce across ranks, and cp splits 's'
          has   b s@cp
        in  b s@cp -> b
        gather it first: 's@cp' on the left of a rearrange
        """,
    ),
    mistake(
        "an unknown reduction",
        lambda m: reduce(D(m, "b s@cp", 8, 16), "b s@cp -> b", "median"),
        ShardingError,
        """
        reduce knows sum, mean, max, min, prod, any, all and functions; found 'median'
        """,
    ),
    mistake(
        "a new name in a reduction",
        lambda m: reduce(D(m, "b s@cp", 8, 16), "b s@cp -> b d", "sum"),
        ExpressionError,
        """
        'd' stands on the right only; repeat adds names
          b s@cp -> b d
                      ^
        """,
    ),
    mistake(
        "a repetition without a size",
        lambda m: repeat(D(m, "b", 8), "b -> b n@tp"),
        SizeError,
        """
        the size of 'n' isn't known from any tensor; give it, like n=2
        in  b -> b n@tp
        """,
    ),
    mistake(
        "a name that repeat drops",
        lambda m: repeat(D(m, "b s", 8, 4), "b s -> b n@tp", n=4),
        ExpressionError,
        """
        's' stands on the left only; repeat adds to what is there, reduce drops names
          b s -> b n@tp
            ^
        """,
    ),
    mistake(
        "too few tensors",
        lambda m: einsum(D(m, "b d", 8, 32), "b d, d f@tp -> b f@tp"),
        ExpressionError,
        """
        the expression has 2 operands; found 1 tensor
          b d, d f@tp -> b f@tp
          ^^^^^^^^^^^^
        """,
    ),
    mistake(
        "operands that disagree",
        lambda m: einsum(D(m, "b s f@tp", 8, 16, 64), D(m, "f d", 64, 32), "b s f, f d -> b s d"),
        ShardingError,
        """
        the operands disagree on 'f': 'f@tp' and 'f'
          operand 1  b s f@tp
          operand 2  f d
        in  b s f, f d -> b s d
        axes.reshard operand 2 to 'f@tp d' before
        """,
    ),
    mistake(
        "operands that disagree in the text",
        lambda m: einsum(D(m, "b s f@tp", 8, 16, 64), D(m, "f d", 64, 32), "b s f@tp, f d -> b s d"),
        ShardingError,
        """
        the operands disagree on 'f': 'f@tp' and 'f'
          operand 1  b s f@tp
          operand 2  f d
        in  b s f@tp, f d -> b s d
        axes.reshard operand 2 to 'f@tp d' before
        """,
    ),
    mistake(
        "an unannounced pending sum",
        lambda m: einsum(
            D(m, "b s f@tp", 8, 16, 64),
            D(m, "f d", 64 // 1, 32).redistribute(placements=D(m, "f@tp d", 64, 32).placements),
            "b s f, f d -> b s d",
        ),
        ShardingError,
        """
        the result would be left pending: sum@tp
          operand 1  b s f@tp
          operand 2  f@tp d
        in  b s f, f d -> b s d
        write 'f@tp' on the left to have it reduced, or '| sum@tp' or '| *' on the right to keep it
        """,
    ),
    mistake(
        "an axis for two names",
        lambda m: einsum(D(m, "b f@tp", 8, 64), D(m, "f@tp d", 64, 32), D(m, "c@tp", 4), "b f@tp, f@tp d, c -> b d c"),
        ShardingError,
        """
        'tp' is wanted by 'f' and by 'c'
          operand 1  b f@tp
          operand 2  f@tp d
          operand 3  c@tp
        in  b f@tp, f@tp d, c -> b d c
        axes.reshard one of them before
        """,
    ),
    mistake(
        "a product of sums",
        lambda m: einsum(
            D(m, "b d | sum@tp", 8, 32), D(m, "d f | sum@tp", 32, 64), "b d | sum@tp, d f | sum@tp -> b f"
        ),
        ShardingError,
        """
        operands 1 and 2 are both pending over 'tp', and a product of sums isn't a sum of products
          operand 1  b d | sum@tp
          operand 2  d f | sum@tp
        in  b d | sum@tp, d f | sum@tp -> b f
        axes.reshard one of them before
        """,
    ),
    mistake(
        "a split axis that is pending elsewhere",
        lambda m: einsum(D(m, "b f@tp", 8, 64), D(m, "f d | sum@tp", 64, 32), "b f@tp, f d | sum@tp -> b d"),
        ShardingError,
        """
        'tp' splits 'f' and is pending in operand 2
          operand 1  b f@tp
          operand 2  f d | sum@tp
        in  b f@tp, f d | sum@tp -> b d
        axes.reshard one of them before
        """,
    ),
    mistake(
        "a diagonal across ranks",
        lambda m: einsum(D(m, "i@tp j", 4, 4), "i@tp i -> i@tp"),
        ShardingError,
        """
        a diagonal needs 'i' unsplit in both places
          has   i@tp i
        in  i@tp i -> i@tp
        axes.reshard the tensor before
        """,
    ),
    mistake(
        "a DTensor and a plain tensor",
        lambda m: einsum(D(m, "b d", 8, 32), L(32, 64), "b d, d f -> b f"),
        ShardingError,
        """
        einsum takes DTensors or plain tensors, not both: operand 2 is plain. Make it a DTensor with axes.shard or axes.from_local, or take the shards of the others with axes.to_local
        """,
    ),
    mistake(
        "tensors that disagree in size",
        lambda m: einsum(D(m, "b d", 8, 32), D(m, "d f@tp", 16, 64), "b d, d f@tp -> b f@tp"),
        SizeError,
        """
        'd' is 32, found 16    (dim 0 of [16, 64], operand 2, in  b d, d f@tp -> b f@tp)
        """,
    ),
    mistake(
        "an expression that isn't last",
        lambda m: einsum("b d, d f@tp -> b f@tp", D(m, "b d", 8, 32), D(m, "d f@tp", 32, 64)),
        ExpressionError,
        """
        einsum takes tensors and, last, the expression, like axes.einsum(x, w, 'b d, d f -> b f'); found str, DTensor, DTensor
        """,
    ),
    mistake(
        "tensors on two meshes",
        lambda m: einsum(D(m, "b d", 8, 32), D(m["tp"], "d f@tp", 32, 64), "b d, d f@tp -> b f@tp"),
        MeshError,
        """
        the tensors are on two meshes, Mesh('dp=2 cp=2 tp=2', 'cptp = cp tp') and Mesh('dp=2 cp=2 tp=2', 'cptp = cp tp')['tp']; declare one on the other's mesh, which has more axes, with axes.lift(x, mesh)
        in  b d, d f@tp -> b f@tp
        """,
    ),
    mistake(
        "an axis that the tensor's mesh lacks",
        lambda m: rearrange(D(m["tp"], "b s@tp", 8, 32), "b s@tp -> b@dp s", mesh=m),
        MeshError,
        """
        axis 'dp' (2:4) isn't made of the axes of Mesh('dp=2 cp=2 tp=2', 'cptp = cp tp')['tp'], on which the tensor is; axes.lift or axes.reshard with mesh= moves it to one that has it
        in  b s@tp -> b@dp s
        """,
    ),
    mistake(
        "a star in a group's place",
        lambda m: rearrange(D(m, "b s@tp", 8, 12), "b (h d)@(* cp) -> b h d", h=4),
        ExpressionError,
        """
        write '*' at the name in (h d)@(* cp) that it is about
          b (h d)@(* cp) -> b h d
            ^^^^^^^^^^^^
        """,
    ),
    mistake(
        "an uneven factor of a group",
        lambda m: rearrange(D(m, "b s@tp d", 8, 5, 6), "b s d -> b (s d)"),
        ShardingError,
        """
        s=5@tp is split into 2 uneven parts inside (s d), and a split factor of a group must divide
        in  b s d -> b (s d)
        """,
    ),
]


@pytest.mark.parametrize(("run", "error", "message"), MISTAKES)
def test_a_mistake_is_told_before_anything_is_sent(mesh: Mesh, run: Run, error: type[AxesError], message: str):
    with CommDebugMode() as sent, pytest.raises(error) as caught:
        run(mesh)
    assert type(caught.value) is error
    assert str(caught.value) == message
    assert sent.get_total_counts() == 0


def test_there_are_at_least_forty():
    assert len(MISTAKES) >= 40


X = "a b@tp"
WRONG_ARGUMENTS: dict[str, tuple[Callable[[DTensor], object], type[AxesError], str]] = {
    "a name for a mesh": (lambda x: axes.reshard(x, "a b", mesh="tp"), MeshError, "found str: 'tp'"),
    "a name for a mesh of an expression": (
        lambda x: axes.rearrange(x, "a b@tp -> a b", mesh="tp"),
        MeshError,
        "found str: 'tp'",
    ),
    "a name for a mesh of a region": (
        lambda x: axes.shard_map(torch.exp, "a b -> a b", mesh="tp")(x),
        MeshError,
        "found str: 'tp'",
    ),
    "a name for a mesh of a plain tensor": (
        lambda x: axes.rearrange(L(4, 8), "a b@tp -> a b", mesh="tp"),
        MeshError,
        "found str: 'tp'",
    ),
    "lifting to nothing": (lambda x: axes.lift(x, None), MeshError, "found NoneType"),
    "a name for a dtype": (lambda x: axes.reshard(x, "a b", comm_dtype="float32"), ShardingError, "found 'float32'"),
    "three dtypes": (
        lambda x: axes.rearrange(x, "a b@tp -> a b", comm_dtype=(torch.float32,) * 3),
        ShardingError,
        "comm_dtype is a torch.dtype, or two",
    ),
    "a mean of integers": (
        lambda x: axes.reduce(x.to(torch.int64), "a b@tp -> a", "mean"),
        ShardingError,
        "a mean of torch.int64 isn't torch.int64; convert it first, or take the sum",
    ),
    "a maximum of complex numbers": (
        lambda x: axes.reduce(x.to(torch.complex64), "a b@tp -> a", "max"),
        ShardingError,
        "torch.complex64 has no order, so no max",
    ),
    "a maximum of nothing": (lambda x: axes.reduce(x[:0], "a b -> b", "max"), SizeError, "over no elements has no"),
    "a list of several shapes": (
        lambda x: axes.rearrange([x, x[:2]], "n a b -> n a b"),
        ShardingError,
        "have one shape and dtype; found [4, 8] torch.float32, [2, 8] torch.float32",
    ),
    "an empty list": (lambda x: axes.rearrange([], "n a@tp -> n a"), ShardingError, "a list of tensors; found none"),
    "a list of text": (lambda x: axes.repeat(["q"], "a@tp -> a@tp n", n=2), ShardingError, "of tensors; found str"),
    "over nothing": (lambda x: axes.softmax(x, X, over=None), ShardingError, "over names dims"),
    "text for eps": (lambda x: axes.layer_norm(x, X, over="b", eps="x"), ShardingError, "eps is a number from 0"),
    "less than nothing for eps": (lambda x: axes.rms_norm(x, X, over="b", eps=-1.0), ShardingError, "found -1.0"),
    "a name for the dtype of zeros": (
        lambda x: axes.zeros("a@tp", a=4, dtype="float32"),
        ShardingError,
        "dtype is a torch.dtype, like torch.float32; found 'float32'",
    ),
    "gradients of integers": (
        lambda x: axes.empty("a@tp", a=4, dtype=torch.int32, requires_grad=True),
        ShardingError,
        "torch.int32 has no gradient",
    ),
    "full of nothing": (lambda x: axes.full("a@tp", None, a=4), ShardingError, "takes a number; found None"),
    "a sparse tensor": (lambda x: axes.shard(torch.eye(4).to_sparse(), X), ShardingError, "of layout torch.sparse_coo"),
    "a nested tensor": (
        lambda x: axes.shard(torch.nested.nested_tensor([L(2), L(3)], layout=torch.jagged), X),
        ShardingError,
        "found a nested one",
    ),
    "a tensor without values": (lambda x: axes.shard(L(4, 8).to("meta"), X), ShardingError, "on the device 'meta'"),
    "the size of an unknown name": (lambda x: axes.reshard(x, "a b", typo=3), ShardingError, "given for 'typo'"),
}


@pytest.mark.parametrize("title", WRONG_ARGUMENTS)
def test_a_wrong_argument_is_told_before_anything_is_sent(mesh: Mesh, title: str):
    run, error, message = WRONG_ARGUMENTS[title]
    with mesh:
        x = D(mesh, X, 4, 8)
        with CommDebugMode() as sent, pytest.raises(error) as caught:
            run(x)
    assert type(caught.value) is error
    assert message in str(caught.value)
    assert sent.get_total_counts() == 0


def test_a_mean_of_complex_numbers_is_one(mesh: Mesh):
    x = axes.shard(torch.tensor([1 + 2j, 3 - 4j]).expand(4, 2), "a@dp b", mesh=mesh)
    assert axes.unshard(axes.reduce(x, "a@dp b -> a", "mean")).tolist() == [2 - 1j] * 4
