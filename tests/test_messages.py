"""Mistakes in arguments: each gets one message of axes' own classes, the same on every rank, before anything is sent."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode

import axes
from axes import AxesError, ExpressionError, Mesh, MeshError, ShardingError, SizeError
from tests.hostile import Loud, raising


def layer() -> nn.Module:
    return nn.Linear(8, 16, bias=False)


def plain(*shape: int) -> torch.Tensor:
    return torch.ones(shape)


def made(spec: str, mesh: Mesh | None = None, **sizes: int) -> torch.Tensor:
    return axes.ones(spec, mesh=mesh, **sizes)


SPEC = (
    "an expression is text; found list. Where placements are meant, axes.Sharding.from_placements(mesh, placements, "
    "ndim).spec is their text"
)
EINSUM = "einsum takes tensors and, last, the expression, like axes.einsum(x, w, 'b d, d f -> b f'); found "
MESH = "a mesh is an axes mesh, made by axes.init_mesh; found int: 3"
UNKNOWN = "the mesh has no axis 'tpp'; did you mean 'tp'?"

CYCLE: list[object] = []
CYCLE.append(CYCLE)

MISTAKES: dict[str, tuple[Callable[[Mesh], object], type[axes.AxesError], str]] = {
    "einsum of letters": (
        lambda mesh: axes.einsum(plain(2, 3), plain(3, 2), "ab,bc->ac"),
        SizeError,
        "operand 1, 'ab', has 1 dim; the tensor has 2\nin  ab,bc->ac\nnames are separated by spaces: 'a b, b c -> a c'",
    ),
    "two sizes of a name of an einsum": (
        lambda mesh: axes.einsum(plain(2, 3), plain(2, 2), "b a, a c -> b c"),
        SizeError,
        "'a' is 3, found 2    (dim 0 of [2, 2], operand 2, in  b a, a c -> b c)",
    ),
    "a region inside a region": (
        lambda mesh: axes.shard_map(axes.shard_map(plain, "a@tp -> a@tp"), "a@tp -> a@tp", mesh=mesh)(
            made("a@tp", mesh, a=4)
        ),
        ShardingError,
        "tensor 0 among the arguments is a plain one; what goes into a region is a DTensor, made by axes.shard or "
        "axes.from_local. Inside a region tensors are shards already: there, call the function itself\n  in  shard_map",
    ),
    "an axis twice": (
        lambda mesh: axes.psum(plain(2), ("tp", "tp"), mesh=mesh),
        MeshError,
        "an axis stands once in a product; found 'tp' twice in ('tp', 'tp')",
    ),
    "several axes in one text": (
        lambda mesh: axes.psum(plain(2), "dp tp", mesh=mesh),
        MeshError,
        "several axes are a tuple: write ('dp', 'tp') for 'dp tp'",
    ),
    "no arrow": (
        lambda mesh: axes.rearrange(plain(2, 3), "a b"),
        ExpressionError,
        "rearrange needs '->' and the result behind it\n  a b\n    ^",
    ),
    "two arrows": (
        lambda mesh: axes.repeat(plain(2, 3), "a b -> b a -> a b n", n=2),
        ExpressionError,
        "expected the end of the expression, found '->'\n  a b -> b a -> a b n\n             ^^",
    ),
    "the expression before the tensor": (
        lambda mesh: axes.rearrange("a b -> b a", plain(2, 3)),
        ExpressionError,
        "an expression is text; found Tensor. The tensor comes first, and the expression behind it",
    ),
    "the reduction before the expression": (
        lambda mesh: axes.reduce(plain(2, 3), "sum", "a b -> b"),
        ShardingError,
        "reduce knows sum, mean, max, min, prod, any, all and functions; found 'a b -> b'; the expression comes before it",
    ),
    "an einsum without an arrow": (
        lambda mesh: axes.einsum(plain(2, 3), plain(3, 2), "a b, b c"),
        ExpressionError,
        "einsum needs '->' and the result behind it\n  a b, b c\n         ^",
    ),
    "an option that there isn't": (
        lambda mesh: axes.cross_entropy(plain(2, 3), torch.zeros(2, dtype=torch.int64), "b v, b ->", smoothing=0.1),
        SizeError,
        "there is no option 'smoothing'. The size of a dim is a whole number; found 0.1",
    ),
    "an option that is misspelled": (
        lambda mesh: axes.rearrange(plain(2, 3), "a b -> b a", comm_type=torch.bfloat16),
        SizeError,
        "there is no option 'comm_type'; did you mean 'comm_dtype'? The size of a dim is a whole number; found torch.",
    ),
    "an option of whole numbers that is misspelled": (
        lambda mesh: axes.shard(plain(2, 4), "a b@tp", mesh=mesh, src_rank=0),
        SizeError,
        "a size is given for 'src_rank', which isn't in the spec; did you mean 'source_rank'?",
    ),
    "an option of a mesh that is misspelled": (
        lambda mesh: axes.init_mesh("dp=2 tp=2", device="cpu"),
        SizeError,
        "there is no option 'device'; did you mean 'device_type'? The size of a dim is a whole number; found 'cpu'",
    ),
    "a result of a region that holds itself": (
        lambda mesh: axes.shard_map(lambda x: CYCLE, "a@tp -> a@tp", mesh=mesh)(made("a@tp", mesh, a=4)),
        ShardingError,
        "the function returned a value that holds itself, or is nested too deep\n  in  shard_map 'a@tp -> a@tp'",
    ),
    "a sparse result of a region": (
        lambda mesh: axes.shard_map(torch.Tensor.to_sparse, "a@tp -> a@tp", mesh=mesh)(made("a@tp", mesh, a=4)),
        ShardingError,
        "as result 0 a region takes a dense tensor; found one of layout torch.sparse_coo. Write x.to_dense()\n  in  shard",
    ),
    "a sparse shard of a module's region": (
        lambda mesh: axes.shard_map(layer(), "a@tp b -> a@tp c", mesh=mesh)(plain(2, 8).to_sparse()),
        ShardingError,
        "shard_map 'a@tp b -> a@tp c', as tensor 0, takes a dense tensor; found one of layout torch.sparse_coo",
    ),
    "more pairs than memory": (
        lambda mesh: axes.ppermute(plain(1), "tp", perm=range(10**12), mesh=mesh),
        ShardingError,
        "ppermute's perm is a list of pairs (source, target); found range(0, 1000000000000)",
    ),
    "more pairs than ranks": (
        lambda mesh: axes.ppermute(plain(1), "tp", perm=[(0, 1)] * 10**6, mesh=mesh),
        ShardingError,
        "ppermute over 'tp': coordinate 0 is the source of several pairs; a rank sends to one and receives from one",
    ),
    "one side of a layer": (
        lambda mesh: axes.nn.Rearrange("a b"),
        ExpressionError,
        "axes.nn.Rearrange takes an expression with two sides",
    ),
    "a loss of logits alone": (
        lambda mesh: axes.nn.CrossEntropy("b c ->"),
        ExpressionError,
        "axes.nn.CrossEntropy takes logits and labels, like 'b s v, b s ->'",
    ),
    "a reduction that there isn't": (
        lambda mesh: axes.nn.Reduce("a b -> a", "avg"),
        ShardingError,
        "axes.nn.Reduce knows sum, mean, max, min, prod, any, all and functions; found 'avg'",
    ),
    "a norm over another dim": (
        lambda mesh: axes.nn.RMSNorm("b d", over="e", d=4),
        ExpressionError,
        "a norm is over dims of the spec by name; found 'e'; known: b, d",
    ),
    "specs of a plan that name dims in another order": (
        lambda mesh: axes.plan("f d@tp", "d f@tp", (4, 4), mesh=mesh),
        ShardingError,
        "'f' is dim 0 of 'f d@tp' and dim 1 of 'd f@tp'. Both specs are of one tensor",
    ),
    "specs of a transfer that name dims in another order": (
        lambda mesh: axes.transfer({"w": "f d"}, {"w": "d e"}, mesh, mesh, {"w": (2, 2)}),
        ShardingError,
        "'d' is dim 1 of 'f d' and dim 0 of 'd e'. Both specs are of one tensor",
    ),
    "a dim of a scalar": (
        lambda mesh: axes.all_gather(plain(), "tp", mesh=mesh),
        ShardingError,
        "all_gather over dim 0 of a tensor []: a scalar has no dims; write x[None]",
    ),
    "a dtype by name": (
        lambda mesh: axes.zeros("a", mesh=mesh, a=2, dtype="float32"),
        ShardingError,
        "axes.zeros: dtype is a torch.dtype, like torch.float32; found 'float32'",
    ),
    "the spec of a plain tensor": (
        lambda mesh: axes.spec_of(plain(2)),
        ShardingError,
        "axes.spec_of takes a DTensor; found Tensor",
    ),
    "a Sharding for a spec": (
        lambda mesh: axes.shard(plain(4), mesh.sharding("a@tp"), mesh=mesh),
        ExpressionError,
        "an expression is text; found Sharding; a Sharding's text is its .spec",
    ),
    "a spec whose attributes fail": (
        lambda mesh: axes.shard(plain(4), raising("__getattr__", Loud)(), mesh=mesh),
        ExpressionError,
        "an expression is text; found RaisingGetattr",
    ),
    "a tensor as sizes of a step": (
        lambda mesh: axes.explain(layer(), plain(2, 8), sizes=plain(2)),
        SizeError,
        "sizes",
    ),
    "a shape of more elements than torch counts": (
        lambda mesh: axes.explain("a b -> b a", (2**40, 2**40), mesh=mesh),
        SizeError,
        "a tensor has fewer than 2**63 elements; found the shape [1099511627776, 1099511627776]",
    ),
    "a tensor of more bytes than torch counts": (
        lambda mesh: axes.explain("a b -> b a", (2**31, 2**31), mesh=mesh, dtype="float64"),
        SizeError,
        "a tensor that is computed would have 2**63 bytes or more",
    ),
    "a product of more bytes than torch counts": (
        lambda mesh: axes.explain("a, b -> a b", (2**32,), (2**32,), mesh=mesh),
        SizeError,
        "a tensor",
    ),
    "a mesh of open sizes": (
        lambda mesh: Mesh("dp tp=2"),
        SizeError,
        "the size of 'dp' is open: give it, like dp=2, or the number of ranks",
    ),
    "operands on two devices": (
        lambda mesh: axes.einsum(plain(4, 4), plain(4, 4).to("meta"), "b d@tp, d@tp f -> b f"),
        ShardingError,
        "the operands of einsum lie on one device; found cpu, meta. Write x.to(device)",
    ),
    "a dtype that is a long number": (
        lambda mesh: axes.explain("b d -> b", (8, 8), mesh=mesh, dtype=10**5000),
        ShardingError,
        "dtype is a torch dtype or its name, like 'bfloat16'; found int too long to show",
    ),
    "a size of a long number": (
        lambda mesh: axes.all_to_all(plain(8), "dp", send_sizes=[10**5000, 1], recv_sizes=[1, 1], mesh=mesh),
        SizeError,
        "all_to_all over 'dp': send_sizes are 0 or more, of 63 bits; found list too long to show",
    ),
    "lazy parameters in a list": (
        lambda mesh: axes.rearrange([nn.UninitializedParameter()] * 2, "n b d@tp -> n b d"),
        ShardingError,
        "axes.rearrange takes a tensor; found a lazy parameter that has no shape yet",
    ),
    "parts on two devices": (
        lambda mesh: axes.rearrange([plain(2, 4), plain(2, 4).to("meta")], "a d, b d -> (a + b) d"),
        ShardingError,
        "tensors that are put together lie on one device; found cpu, meta. Write x.to(device)\nin  a d, b d -> (a + b) d",
    ),
    "a lazy shard": (
        lambda mesh: axes.reshard(nn.UninitializedParameter(), "b d@tp -> b d", mesh=mesh),
        ShardingError,
        "axes.reshard takes a tensor; found a lazy parameter that has no shape yet",
    ),
    "a lazy parameter to step": (
        lambda mesh: axes.nn.local_optimizer(torch.optim.SGD, nn.UninitializedParameter(), lr=0.1),
        ShardingError,
        "axes.nn.local_optimizer takes a tensor; found a lazy parameter that has no shape yet",
    ),
    "a lazy learning rate": (
        lambda mesh: axes.nn.local_optimizer(torch.optim.SGD, [plain(4)], lr=nn.UninitializedParameter()),
        ShardingError,
        "axes.nn.local_optimizer takes a tensor; found a lazy parameter that has no shape yet",
    ),
    "a shape that is lazy": (
        lambda mesh: axes.transfer(
            {"w": mesh.sharding("d")}, {"w": mesh.sharding("d")}, shapes={"w": nn.UninitializedParameter()}
        ),
        SizeError,
        "a shape is whole numbers from 0; found <UninitializedParameter>",
    ),
    "parameters with values and without": (
        lambda mesh: axes.nn.clip_grad_norm_([plain(4), plain(4).to("meta")], 1.0),
        ShardingError,
        "axes.nn.clip_grad_norm_ takes tensors with values; found some on the device 'meta'",
    ),
    "a Sharding made by hand": (
        lambda mesh: axes.Sharding(mesh, [0, 1]),
        ShardingError,
        "a Sharding is made by mesh.sharding(text), or by Sharding.from_placements",
    ),
    "a shape of long numbers": (
        lambda mesh: axes.from_local(plain(4), "d@tp", mesh=mesh, shape=(10**5000,)),
        SizeError,
        "a tensor has fewer than 2**63 elements; found the shape list too long to show",
    ),
    "a logical shape of long numbers": (
        lambda mesh: axes.Rules([("d", "tp")]).spec("d", mesh, (10**5000,)),
        SizeError,
        "a tensor has fewer than 2**63 elements; found the shape list too long to show",
    ),
    "a planned shape of long numbers": (
        lambda mesh: axes.plan("d@tp", "d", (10**5000,), mesh=mesh),
        SizeError,
        "a tensor has fewer than 2**63 elements; found the shape list too long to show",
    ),
    "options of a group that are an array": (
        lambda mesh: axes.GroupOptions(pg_options=np.zeros(2)),
        MeshError,
        "GroupOptions.pg_options is the options object of a backend, such as dist.ProcessGroupNCCL.Options(); found array([0., 0.])",
    ),
    "an operation that is an array": (
        lambda mesh: axes.explain("b d -> b", (8, 8), mesh=mesh, op=np.zeros(3)),
        ShardingError,
        "explain knows the reductions sum, mean, max, min, prod, any, all; found array([0., 0., 0.])",
    ),
    "a module without forward": (
        lambda mesh: axes.explain(nn.ModuleList([layer()]), plain(2, 8), mesh=mesh),
        axes.AxesError,
        "axes.explain takes a module that computes something; a ModuleList has no forward",
    ),
    "a logical spec that raises": (
        lambda mesh: axes.Rules([("d", "tp")]).explain(raising("__hash__", ValueError)(), mesh),
        ExpressionError,
        "an expression is text; found RaisingHash",
    ),
    "a logical spec that is no text": (
        lambda mesh: axes.Rules([("d", "tp")]).spec(raising("__hash__", ValueError)(), mesh),
        ExpressionError,
        "an expression is text; found RaisingHash",
    ),
    "a buffer for an expression": (
        lambda mesh: axes.nn.Embedding(nn.Buffer(plain(2)), v=4, d=2),
        ExpressionError,
        "an expression is text; found Tensor",
    ),
    "a buffer for the expression of a product": (
        lambda mesh: axes.nn.Einsum(nn.Buffer(plain(2)), d=2),
        ExpressionError,
        "an expression is text; found Tensor",
    ),
    "a layout of long numbers": (
        lambda mesh: axes.Layout([10**5000, 1], [1, 1]),
        MeshError,
        "sizes and strides of a layout have 63 bits; found ",
    ),
    "a shape beyond all counting, for a transfer": (
        lambda mesh: axes.transfer({"w": "a@x b"}, {"w": "a b@y"}, Mesh("x=2"), Mesh("y=2"), {"w": (8, 10**400)}),
        SizeError,
        "a tensor has fewer than 2**63 elements; found the shape [8, 1000000000000",
    ),
    "a region's expression that can't be hashed": (
        lambda mesh: axes.shard_map(lambda x: x, raising("__hash__", Loud)(), mesh=mesh),
        ExpressionError,
        "an expression is text; found RaisingHash",
    ),
    "rows of eight bits": (
        lambda mesh: axes.embedding(torch.tensor([1]), plain(4, 8).to(torch.float8_e4m3fn), "b, v e -> b e", mesh=mesh),
        ShardingError,
        "embedding: a row outside of a table of torch.float8_e4m3fn can't be made NaN; use floats of 16 bits or more",
    ),
    "a tensor as a way to reduce a loss": (
        lambda mesh: axes.nn.CrossEntropy("b v, b ->", reduction=plain(8).as_subclass(nn.Buffer)),
        ShardingError,
        "cross_entropy's reduction is 'mean' or 'sum'; found Buffer(",
    ),
    "a tensor as an operation": (
        lambda mesh: axes.nn.Reduce("b d -> b", plain(8).as_subclass(nn.Buffer)),
        ShardingError,
        "axes.nn.Reduce knows sum, mean, max, min, prod, any, all and functions; found Buffer(",
    ),
    "a spec that can't be hashed": (
        lambda mesh: axes.to_local(made("a@dp", a=2).requires_grad_(), raising("__hash__", Loud)()),
        ExpressionError,
        "an expression is text; found RaisingHash",
    ),
    "a kind that can't be compared": (
        lambda mesh: axes.explain("b d -> b", (8, 8), mesh=mesh, kind=raising("__eq__", Loud)()),
        ExpressionError,
        "kind is one of ",
    ),
    "a placement that can't be shown": (
        lambda mesh: axes.Sharding.from_placements(mesh, [raising("__repr__", Loud)()] * 2, 2),
        ShardingError,
        "axis 'dp' has ",
    ),
    "a shape beyond all counting, by a rule": (
        lambda mesh: axes.LayoutRules({"w": ("v", "a b -> b a")}).pieces_of("v", {"w": (8, 10**5000)}),
        SizeError,
        "a tensor has fewer than 2**63 elements; found ",
    ),
    "a tensor as a dim to work over": (
        lambda mesh: axes.nn.RMSNorm("b d", over=plain(8).as_subclass(nn.Buffer), d=8),
        ShardingError,
        "over names dims, like 'd' or 'h d'; found Buffer(",
    ),
    "names of weights as a list": (
        lambda mesh: axes.nn.load_safetensors(layer(), "weights", names=["a"]),
        ShardingError,
        "names is a mapping from the module's names to those in the files, like {'weight': 'w'}, or a function of the "
        "module's name; found list",
    ),
    "a path that is a number": (
        lambda mesh: axes.nn.load_safetensors(layer(), path=5),
        ShardingError,
        "path is a file or a folder with safetensors files; found int",
    ),
    "ignored names that are a number": (
        lambda mesh: axes.nn.load_safetensors(layer(), "weights", ignore=5),
        ShardingError,
        "ignore is patterns of names in the files, like ['*.inv_freq']; found 5",
    ),
    "clipping a module": (
        lambda mesh: axes.nn.clip_grad_norm_(layer(), 1.0),
        ShardingError,
        "axes.nn.clip_grad_norm_ takes tensors; found a module, so pass its module.parameters()",
    ),
    "clipping named parameters": (
        lambda mesh: axes.nn.clip_grad_norm_(layer().named_parameters(), 1.0),
        ShardingError,
        "axes.nn.clip_grad_norm_ takes tensors; found tuple; pass module.parameters(), without names",
    ),
    "clipping a number": (
        lambda mesh: axes.nn.clip_grad_norm_(3, 1.0),
        ShardingError,
        "axes.nn.clip_grad_norm_ takes tensors, like module.parameters(); found int",
    ),
    "an optimizer of a module": (
        lambda mesh: axes.nn.local_optimizer(torch.optim.AdamW, layer()),
        ShardingError,
        "axes.nn.local_optimizer takes parameters; found a module, so pass its module.parameters()",
    ),
    "a sharding on a mesh of another number of axes": (
        lambda mesh: Mesh("a=2 b=2").sharding("n@a").on(Mesh("a=4")),
        ShardingError,
        "'n@a' is on Mesh('a=2 b=2'); on Mesh('a=4'), whose axes have other layouts, it can't be the same. "
        "Moving a tensor there is axes.reshard(x, spec, mesh=mesh)",
    ),
    "no expression": (
        lambda mesh: axes.rearrange(plain(2, 2), None),
        ExpressionError,
        "an expression is text; found NoneType",
    ),
    "no expression for a DTensor": (
        lambda mesh: axes.rearrange(made("a", a=2), None),
        ExpressionError,
        "an expression is text; found NoneType",
    ),
    "arguments in the wrong order": (
        lambda mesh: axes.repeat("a -> a", plain(2)),
        ExpressionError,
        "an expression is text; found Tensor",
    ),
    "an einsum of nothing": (lambda mesh: axes.einsum(), ExpressionError, EINSUM + "nothing"),
    "an einsum without an expression": (
        lambda mesh: axes.einsum(plain(2), plain(2)),
        ExpressionError,
        EINSUM + "Tensor, Tensor",
    ),
    "an einsum without tensors": (lambda mesh: axes.einsum("a, a ->"), ExpressionError, EINSUM + "str"),
    "a reduction that is a long text": (
        lambda mesh: axes.reduce(made("a b", a=2, b=2), "a b -> a", "q" * 10**6),
        ShardingError,
        "reduce knows sum, mean, max, min, prod, any, all and functions; found 'qqqq",
    ),
    "a norm over a dim that isn't there": (
        lambda mesh: axes.rms_norm(plain(2, 2), "b d", over="e"),
        ExpressionError,
        "rms_norm is over dims of the spec by name; found 'e'; known: b, d\n  b d\n",
    ),
    "a norm over nothing": (
        lambda mesh: axes.layer_norm(plain(2, 2), "b d", over=None),
        ShardingError,
        "over names dims, like 'd' or 'h d'; found None",
    ),
    "a norm of a list": (
        lambda mesh: axes.layer_norm(plain(2, 2), ["b", "d"], over="d"),
        ExpressionError,
        "an expression is text; found list",
    ),
    "a large epsilon": (
        lambda mesh: axes.rms_norm(plain(2, 2), "b d", over="d", eps=2**64),
        ShardingError,
        "eps is a number from 0, like 1e-5; found 18446744073709551616",
    ),
    "lifting to nothing": (
        lambda mesh: axes.lift(made("a", a=2), None),
        MeshError,
        "a mesh is an axes mesh, made by axes.init_mesh; found NoneType: None",
    ),
    "a number for a mesh": (lambda mesh: axes.shard(plain(2), "a", mesh=3), MeshError, MESH),
    "a number for a mesh, on plain tensors": (
        lambda mesh: axes.rearrange(plain(2, 2), "a b -> b a", mesh=3),
        MeshError,
        MESH,
    ),
    "a dtype as text": (
        lambda mesh: axes.reshard(made("a@tp", a=8), "a", comm_dtype="float16"),
        ShardingError,
        "comm_dtype is a torch.dtype, or two: for values and gradients; found 'float16'",
    ),
    "placements for a spec": (lambda mesh: axes.shard(plain(8), [Shard(0)]), ExpressionError, SPEC),
    "placements for the spec of a shard": (lambda mesh: axes.from_local(plain(8), [Shard(0)]), ExpressionError, SPEC),
    "placements for the spec of zeros": (lambda mesh: axes.zeros([Shard(0)], a=8), ExpressionError, SPEC),
    "a pending truth value": (
        lambda mesh: axes.unshard(DTensor.from_local(torch.tensor(True), mesh.device_mesh, [Replicate(), Partial()])),
        ShardingError,
        "torch.bool isn't reduced by every backend: a sum over 'tp' needs comm_dtype=torch.int64, as "
        "axes.reshard(x, '', comm_dtype=torch.int64)\n",
    ),
    "a lone surrogate": (
        lambda mesh: axes.rearrange(made("a", a=2), "a \ud800 -> a"),
        ExpressionError,
        "a name is an identifier of Python: letters, digits and underscores\n  a \\ud800 -> a\n",
    ),
    "a mesh of another size": (
        lambda mesh: axes.init_mesh("dp=3 tp=2", device_type="cpu"),
        SizeError,
        "the mesh needs 6 ranks, dp=3 * tp=2; this job has 8\nstart as many: torchrun --nproc-per-node 6 ..., "
        "axes.launch(fn, 6), or try it in one process with axes.simulate(6); one size that is left out follows",
    ),
    "a name that is taken": (
        lambda mesh: Mesh("dp=2 cp=2 tp=2").define("dp = cp tp"),
        MeshError,
        "'dp' is a name of the mesh already, of size 2; cp * tp is 4. Give it another name\nin the equation  dp = cp tp",
    ),
    "a name that is taken, in a declaration": (
        lambda mesh: Mesh("dp=2 cp=2 tp=2", "(cp tp) = dp"),
        MeshError,
        "'dp' is a name of the mesh already, of size 2; cp * tp is 4. Give it another name\n",
    ),
    "tensors on two axes": (
        lambda mesh: axes.einsum(
            made("a b@tp", mesh["tp"], a=4, b=4), made("b c@dp", mesh["dp"], b=4, c=4), "a b, b c -> a c"
        ),
        MeshError,
        "the tensors are on two meshes, Mesh('dp=2 tp=4')['tp'] and Mesh('dp=2 tp=4')['dp']; declare both on a mesh "
        "with the axes of both: axes.lift(x, mesh['tp', 'dp'])\nin  a b, b c -> a c",
    ),
    "names without spaces": (
        lambda mesh: axes.einsum(made("a b c", a=2, b=3, c=4), made("a b", a=4, b=5), "bsd,df->bsf"),
        SizeError,
        "operand 1, 'bsd', has 1 dim; the tensor has 3\nin  bsd,df->bsf\n"
        "names are separated by spaces: 'b s d, d f -> b s f'",
    ),
    "one name without spaces": (
        lambda mesh: axes.rearrange(plain(2, 3, 4), "bsd -> b@tp s d", mesh=mesh),
        SizeError,
        "'bsd' has 1 dim; the tensor has 3\nin  bsd -> b@tp s d\nnames are separated by spaces: 'b s d'",
    ),
    "fewer heads than ranks": (
        lambda mesh: axes.shard(plain(16, 8), "(h@tp k) d", h=2),
        ShardingError,
        "2 doesn't divide into 4 parts: h=2@tp is split inside a group:  (h=2@tp k) = 16    (dim of [16, 8] in "
        "'(h=2@tp k) d')\nsplit the axis first, in two steps: declare the mesh with \"(tp) = kv=2 rep\", and shard on "
        "mesh['dp', 'kv', 'rep'], h over kv alone: ranks along rep have the same",
    ),
}
UNKNOWN_AXES: dict[str, Callable[[Mesh], object]] = {
    "axis": lambda mesh: mesh.axis("tpp"),
    "sub-mesh": lambda mesh: mesh["tpp"],
    "sharding": lambda mesh: mesh.sharding("a@tpp"),
    "pending": lambda mesh: mesh.sharding("a | sum@tpp"),
    "shard": lambda mesh: axes.shard(plain(8), "a@tpp"),
    "from_local": lambda mesh: axes.from_local(plain(8), "a@tpp"),
    "ones": lambda mesh: made("a@tpp", a=8),
    "rearrange": lambda mesh: axes.rearrange(made("a", a=8), "a -> a@tpp"),
    "rearrange of a shard": lambda mesh: axes.rearrange(plain(8), "a@tpp -> a"),
    "einsum": lambda mesh: axes.einsum(plain(8), plain(8), "a@tpp, a@tpp -> "),
    "reshard": lambda mesh: axes.reshard(made("a", a=8), "a@tpp"),
    "reshard of a shard": lambda mesh: axes.reshard(plain(8), "a@tpp -> a"),
    "plan": lambda mesh: axes.plan("a@tpp", "a", (8,)),
    "psum": lambda mesh: axes.psum(plain(8), "tpp"),
    "axis_size": lambda mesh: axes.axis_size("tpp"),
    "embedding": lambda mesh: axes.embedding(torch.ones(2).long(), plain(2, 2), "b, v@tpp d -> b d"),
    "dropout": lambda mesh: axes.nn.dropout(plain(8), 0.5, "a@tpp", seed=1),
    "clipping": lambda mesh: axes.nn.clip_grad_norm_(layer().parameters(), 1.0, stages="tpp"),
    "groups": lambda mesh: mesh.create_groups("tpp"),
    "module": lambda mesh: axes.shard_module(layer(), {"*": "a@tpp b"}, mesh),
    "region": lambda mesh: axes.shard_map(lambda x: x, "a@tpp -> a@tpp")(made("a", a=8)),
}
"""An axis that the mesh doesn't have, wherever one is named: one class and one sentence."""


def raised(program: Callable[[Mesh], object], rank: int) -> Exception:
    """What a program raises on a rank of eight, which has sent nothing by then."""
    with axes.simulate(8, rank=rank), axes.init_mesh("dp=2 tp=4", device_type="cpu") as mesh, CommDebugMode() as sent:
        with pytest.raises(Exception) as found:  # noqa: PT011, the caller compares class and message
            program(mesh)
        assert not sent.get_total_counts()
    return found.value


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_gets_one_message_of_axes_own_on_every_rank(mistake):
    program, kind, message = MISTAKES[mistake]
    first, last = (raised(program, rank) for rank in (0, 7))
    assert type(first) is kind
    assert str(first).startswith(message)
    assert len(str(first)) <= 2_000
    assert (type(last), str(last)) == (type(first), str(first))


def test_an_axis_that_is_split_as_the_message_says_takes_fewer_heads():
    mesh = Mesh("dp=2 tp=4", "(tp) = kv=2 rep")
    assert mesh.sharding("(h@kv k) d", h=2).local_shape((16, 8)) == (8, 8)


@pytest.mark.parametrize("where", UNKNOWN_AXES)
def test_an_unknown_axis_is_one_error_wherever_it_is_named(where):
    found = raised(UNKNOWN_AXES[where], 0)
    assert type(found) is MeshError
    assert UNKNOWN in str(found)


def test_a_script_without_a_launcher_is_told_how_many_processes_it_needs():
    with pytest.raises(
        SizeError, match=r"^the mesh needs 4 ranks, dp=2 \* tp=2; this job has 1\nstart as many: "
    ) as found:
        axes.init_mesh("dp=2 tp=2", device_type="cpu")
    assert "torchrun --nproc-per-node 4 ..., axes.launch(fn, 4), or try it in one process" in str(found.value)
    with axes.simulate(4), axes.init_mesh("dp=2 tp=2", device_type="cpu") as mesh:
        assert axes.unshard(axes.shard(torch.ones(4), "a@(dp tp)")).shape == (mesh.size,)


@pytest.mark.parametrize(
    "mistake", [{"dp": 3}, {"ranks": [0, 1]}, {"device_type": "cpus"}, {"options": 3}, {"timeout": -1}], ids=str
)
def test_a_mistake_without_a_launcher_leaves_no_world(mistake):
    with pytest.raises(AxesError):
        axes.init_mesh("dp", **mistake)
    assert not dist.is_initialized()


def test_a_mistake_leaves_a_world_that_was_there_before():
    with axes.init_mesh("dp", device_type="cpu"):
        with pytest.raises(SizeError):
            axes.init_mesh("dp=2", device_type="cpu")
        assert axes.psum(torch.ones(()), "dp").item() == 1
    axes.destroy_process_groups()


@pytest.mark.parametrize("kind", [MeshError, SizeError, ExpressionError])
def test_a_message_is_short_and_can_be_printed(kind):
    text = str(kind("begins " + "\ud800" * 10**6 + " ends"))
    assert len(text.encode()) == 2_000
    assert text.startswith("begins \\ud800")
    assert text.endswith(" ends")
    assert len(str(kind("b" * 10**6))) == 2_000
    assert str(kind("ä: all of it")) == "ä: all of it"


@pytest.mark.parametrize(
    "made_of", [raising("__str__", Loud)(), raising("__repr__", Loud)(), 10**5000], ids=["str", "repr", "digits"]
)
def test_an_error_of_anything_can_be_written(made_of):
    assert str(MeshError(made_of))
    assert repr(MeshError(made_of, made_of))
    assert repr(MeshError("all of it")) == "MeshError('all of it')"
    with pytest.raises(TypeError, match=r"^the message of an error is a string; found "):
        ExpressionError(made_of, "b d")
