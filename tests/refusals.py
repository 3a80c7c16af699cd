"""What people get wrong in arguments, expressions and modules, and what they are told; `test_refusals` says how these run."""

from __future__ import annotations

UNKNOWN = (
    "mesh.axis('tpp')",
    "mesh['tpp']",
    "mesh.sharding('a@tpp')",
    "mesh.sharding('a | sum@tpp')",
    "axes.shard(L(8), 'a@tpp')",
    "axes.from_local(L(8), 'a@tpp')",
    "axes.ones('a@tpp', a=8)",
    "axes.rearrange(D('a', 8), 'a -> a@tpp')",
    "axes.rearrange(L(8), 'a@tpp -> a')",
    "axes.einsum(L(8), L(8), 'a@tpp, a@tpp -> ')",
    "axes.reshard(D('a', 8), 'a@tpp')",
    "axes.reshard(L(8), 'a@tpp -> a')",
    "axes.plan('a@tpp', 'a', (8,))",
    "axes.psum(L(8), 'tpp')",
    "axes.axis_size('tpp')",
    "axes.embedding(torch.ones(2).long(), L(2, 2), 'b, v@tpp d -> b d')",
    "axes.nn.dropout(L(8), 0.5, 'a@tpp', seed=1)",
    "axes.nn.clip_grad_norm_([L(8)], 1.0, stages='tpp')",
    "mesh.create_groups('tpp')",
    "axes.shard_map(lambda x: x, 'a@tpp -> a@tpp')(D('a', 8))",
)
"""Each names an axis `tpp` that the mesh doesn't have: one class and one sentence, wherever that is."""

ROWS: tuple[tuple[str, ...], ...] = (
    *((program, "MeshError", "the mesh has no axis 'tpp'; did you mean 'tp'?") for program in UNKNOWN),
    (
        'axes.einsum(L(2, 3), L(2, 2), "b a, a c -> b c")',
        "SizeError",
        "'a' is 3, found 2    (dim 0 of [2, 2], operand 2, in  b a, a c -> b c)",
    ),
    (
        'axes.psum(L(2), ("tp", "tp"))',
        "MeshError",
        "an axis stands once in a product; found 'tp' twice in ('tp', 'tp')",
    ),
    ('axes.psum(L(2), "dp tp")', "MeshError", "several axes are a tuple: write ('dp', 'tp') for 'dp tp'"),
    (
        'axes.repeat(L(2, 3), "a b -> b a -> a b n", n=2)',
        "ExpressionError",
        "expected the end of the expression, found '->'",
    ),
    (
        'axes.rearrange("a b -> b a", L(2, 3))',
        "ExpressionError",
        "an expression is text; found Tensor. The tensor comes first, and the expression behind it",
    ),
    (
        'axes.reduce(L(2, 3), "sum", "a b -> b")',
        "ShardingError",
        "reduce knows sum, mean, max, min, prod, any, all and functions; found 'a b -> b'; the expression comes before it",
    ),
    ('axes.einsum(L(2, 3), L(3, 2), "a b, b c")', "ExpressionError", "einsum needs '->' and the result behind it"),
    (
        'axes.cross_entropy(L(2, 3), torch.zeros(2, dtype=torch.int64), "b v, b ->", smoothing=0.1)',
        "SizeError",
        "there is no option 'smoothing'. The size of a dim is a whole number; found 0.1",
    ),
    (
        'axes.rearrange(L(2, 3), "a b -> b a", comm_type=torch.bfloat16)',
        "SizeError",
        "there is no option 'comm_type'; did you mean 'comm_dtype'? The size of a dim is a whole number; found torch.bfloat16",
    ),
    (
        'axes.shard(L(2, 4), "a b@tp", src_rank=0)',
        "SizeError",
        "a size is given for 'src_rank', which isn't in the spec; did you mean 'source_rank'?",
    ),
    (
        'axes.init_mesh("dp=2 tp=2", device="cpu")',
        "SizeError",
        "there is no option 'device'; did you mean 'device_type'? The size of a dim is a whole number; found 'cpu'",
    ),
    (
        'axes.shard_map(torch.Tensor.to_sparse, "a@tp -> a@tp")(axes.ones("a@tp", a=4))',
        "ShardingError",
        "as result 0 a region takes a dense tensor; found one of layout torch.sparse_coo. Write x.to_dense()",
    ),
    (
        'axes.ppermute(L(1), "tp", perm=range(10**12))',
        "ShardingError",
        "ppermute's perm is a list of pairs (source, target); found range(0, 1000000000000)",
    ),
    (
        'axes.ppermute(L(1), "tp", perm=[(0, 1)] * 10**6)',
        "ShardingError",
        "ppermute over 'tp': coordinate 0 is the source of several pairs; a rank sends to one and receives from one. To send to several, all_gather and slice",
    ),
    (
        'axes.nn.Rearrange("a b")',
        "ExpressionError",
        "axes.nn.Rearrange takes an expression with two sides, like 'b s d -> s b d'",
    ),
    (
        'axes.nn.CrossEntropy("b c ->")',
        "ExpressionError",
        "axes.nn.CrossEntropy takes logits and labels, like 'b s v, b s ->'",
    ),
    (
        'axes.nn.Reduce("a b -> a", "avg")',
        "ShardingError",
        "axes.nn.Reduce knows sum, mean, max, min, prod, any, all and functions; found 'avg'",
    ),
    (
        'axes.nn.RMSNorm("b d", over="e", d=4)',
        "ExpressionError",
        "a norm is over dims of the spec by name; found 'e'; known: b, d",
    ),
    (
        'axes.plan("f d@tp", "d f@tp", (4, 4))',
        "ShardingError",
        "'f' is dim 0 of 'f d@tp' and dim 1 of 'd f@tp'. Both specs are of one tensor, whose dims stay where they are; to rearrange them use axes.rearrange, or a rule of a transfer",
    ),
    (
        'axes.transfer({"w": "f d"}, {"w": "d e"}, mesh, mesh, {"w": (2, 2)})',
        "ShardingError",
        "'d' is dim 1 of 'f d' and dim 0 of 'd e'. Both specs are of one tensor, whose dims stay where they are; to rearrange them use axes.rearrange, or a rule of a transfer",
    ),
    (
        'axes.all_gather(L(), "tp")',
        "ShardingError",
        "all_gather over dim 0 of a tensor []: a scalar has no dims; write x[None]",
    ),
    (
        'axes.zeros("a", a=2, dtype="float32")',
        "ShardingError",
        "axes.zeros: dtype is a torch.dtype, like torch.float32; found 'float32'",
    ),
    ("axes.spec_of(L(2))", "ShardingError", "axes.spec_of takes a DTensor; found Tensor"),
    (
        'axes.shard(L(4), mesh.sharding("a@tp"))',
        "ExpressionError",
        "an expression is text; found Sharding; a Sharding's text is its .spec",
    ),
    ('axes.shard(L(4), raising("__getattr__"))', "ExpressionError", "an expression is text; found RaisingGetattr"),
    (
        "axes.explain(torch.nn.Linear(8, 16), L(2, 8), sizes=L(2))",
        "SizeError",
        "sizes is a mapping from names to sizes; found Tensor",
    ),
    (
        'axes.explain("a b -> b a", (2**40, 2**40))',
        "SizeError",
        "a tensor has fewer than 2**63 elements; found the shape [1099511627776, 1099511627776]",
    ),
    (
        'axes.explain("a b -> b a", (2**31, 2**31), dtype="float64")',
        "SizeError",
        "a tensor that is computed would have 2**63 bytes or more, which torch can't count",
    ),
    ('axes.Mesh("dp tp=2")', "SizeError", "the size of 'dp' is open: give it, like dp=2, or the number of ranks"),
    (
        'axes.einsum(L(4, 4), L(4, 4).to("meta"), "b d@tp, d@tp f -> b f")',
        "ShardingError",
        "the operands of einsum lie on one device; found cpu, meta. Write x.to(device)",
    ),
    (
        'axes.rearrange([torch.nn.UninitializedParameter()] * 2, "n b d@tp -> n b d")',
        "ShardingError",
        "axes.rearrange takes a tensor; found a lazy parameter that has no shape yet",
    ),
    (
        'axes.rearrange([L(2, 4), L(2, 4).to("meta")], "a d, b d -> (a + b) d")',
        "ShardingError",
        "tensors that are put together lie on one device; found cpu, meta. Write x.to(device)",
    ),
    (
        "axes.nn.local_optimizer(torch.optim.SGD, [L(4)], lr=torch.nn.UninitializedParameter())",
        "ShardingError",
        "axes.nn.local_optimizer takes a tensor; found a lazy parameter that has no shape yet",
    ),
    (
        'axes.transfer({"w": mesh.sharding("d")}, {"w": mesh.sharding("d")}, shapes={"w": torch.nn.UninitializedParameter()})',
        "SizeError",
        "a shape is whole numbers from 0; found <UninitializedParameter>",
    ),
    (
        'axes.nn.clip_grad_norm_([L(4), L(4).to("meta")], 1.0)',
        "ShardingError",
        "axes.nn.clip_grad_norm_ takes tensors with values; found some on the device 'meta'",
    ),
    (
        "axes.Sharding(mesh, [0, 1])",
        "ShardingError",
        "a Sharding is made by mesh.sharding(text), or by Sharding.from_placements",
    ),
    (
        'axes.from_local(L(4), "d@tp", shape=(10**5000,))',
        "SizeError",
        "a tensor has fewer than 2**63 elements; found the shape list too long to show",
    ),
    (
        "axes.explain(torch.nn.ModuleList([torch.nn.Linear(8, 16)]), L(2, 8))",
        "AxesError",
        "axes.explain takes a module that computes something; a ModuleList has no forward",
    ),
    (
        'axes.Rules([("d", "tp")]).explain(raising("__hash__"), mesh)',
        "ExpressionError",
        "an expression is text; found RaisingHash",
    ),
    ("axes.nn.Embedding(torch.nn.Buffer(L(2)), v=4, d=2)", "ExpressionError", "an expression is text; found Tensor"),
    (
        "axes.Layout([10**5000, 1], [1, 1])",
        "MeshError",
        "sizes and strides of a layout have 63 bits; found tuple too long to show and (1, 1)",
    ),
    ('axes.shard_map(lambda x: x, raising("__hash__"))', "ExpressionError", "an expression is text; found RaisingHash"),
    (
        'axes.embedding(torch.tensor([1]), L(4, 8).to(torch.float8_e4m3fn), "b, v e -> b e")',
        "ShardingError",
        "embedding: a row outside of a table of torch.float8_e4m3fn can't be made NaN; use floats of 16 bits or more",
    ),
    (
        'axes.nn.CrossEntropy("b v, b ->", reduction=L(8).as_subclass(torch.nn.Buffer))',
        "ShardingError",
        "cross_entropy's reduction is 'mean' or 'sum'; found Buffer([1., 1., 1., 1., 1., 1., 1., 1.])",
    ),
    (
        'axes.explain("b d -> b", (8, 8), kind=raising("__eq__"))',
        "ExpressionError",
        "kind is one of rearrange, reduce, repeat, einsum, reshard, shard_map; found RaisingEq",
    ),
    (
        'axes.LayoutRules({"w": ("v", "a b -> b a")}).pieces_of("v", {"w": (8, 10**5000)})',
        "SizeError",
        "a tensor has fewer than 2**63 elements; found 'w' list too long to show",
    ),
    (
        'axes.nn.load_safetensors(torch.nn.Linear(8, 16), "weights", names=["a"])',
        "ShardingError",
        "names is a mapping from the module's names to those in the files, like {'weight': 'w'}, or a function of the module's name; found list",
    ),
    (
        "axes.nn.load_safetensors(torch.nn.Linear(8, 16), path=5)",
        "ShardingError",
        "path is a file or a folder with safetensors files; found int",
    ),
    (
        'axes.nn.load_safetensors(torch.nn.Linear(8, 16), "weights", ignore=5)',
        "ShardingError",
        "ignore is patterns of names in the files, like ['*.inv_freq']; found 5",
    ),
    (
        "axes.nn.clip_grad_norm_(torch.nn.Linear(8, 16), 1.0)",
        "ShardingError",
        "axes.nn.clip_grad_norm_ takes tensors; found a module, so pass its module.parameters()",
    ),
    (
        "axes.nn.clip_grad_norm_(torch.nn.Linear(8, 16).named_parameters(), 1.0)",
        "ShardingError",
        "axes.nn.clip_grad_norm_ takes tensors; found tuple; pass module.parameters(), without names",
    ),
    (
        "axes.nn.clip_grad_norm_(3, 1.0)",
        "ShardingError",
        "axes.nn.clip_grad_norm_ takes tensors, like module.parameters(); found int",
    ),
    (
        "axes.nn.local_optimizer(torch.optim.AdamW, torch.nn.Linear(8, 16))",
        "ShardingError",
        "axes.nn.local_optimizer takes parameters; found a module, so pass its module.parameters()",
    ),
    (
        'axes.Mesh("a=2 b=2").sharding("n@a").on(axes.Mesh("a=4"))',
        "ShardingError",
        "'n@a' is on Mesh('a=2 b=2'); on Mesh('a=4'), whose axes have other layouts, it can't be the same. Moving a tensor there is axes.reshard(x, spec, mesh=mesh)",
    ),
    (
        "axes.rearrange(L(2, 2), None)",
        "ExpressionError",
        "an expression is text; found NoneType. The tensor comes first, and the expression behind it",
    ),
    (
        "axes.einsum(L(2), L(2))",
        "ExpressionError",
        "einsum takes tensors and, last, the expression, like axes.einsum(x, w, 'b d, d f -> b f'); found Tensor, Tensor",
    ),
    (
        'axes.einsum("a, a ->")',
        "ExpressionError",
        "einsum takes tensors and, last, the expression, like axes.einsum(x, w, 'b d, d f -> b f'); found str",
    ),
    (
        'axes.reduce(axes.ones("a b", a=2, b=2), "a b -> a", "q" * 10**6)',
        "ShardingError",
        "reduce knows sum, mean, max, min, prod, any, all and functions; found 'qqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqq...",
    ),
    (
        'axes.rms_norm(L(2, 2), "b d", over="e")',
        "ExpressionError",
        "rms_norm is over dims of the spec by name; found 'e'; known: b, d",
    ),
    (
        'axes.rms_norm(L(2, 2), "b d", over="d", eps=2**64)',
        "ShardingError",
        "eps is a number from 0, like 1e-5; found 18446744073709551616",
    ),
    (
        'axes.lift(axes.ones("a", a=2), None)',
        "MeshError",
        "a mesh is an axes mesh, made by axes.init_mesh; found NoneType: None",
    ),
    (
        'axes.rearrange(L(2, 2), "a b -> b a", mesh=3)',
        "MeshError",
        "a mesh is an axes mesh, made by axes.init_mesh; found int: 3",
    ),
    (
        'axes.rearrange(axes.ones("a", a=2), "a \\ud800 -> a")',
        "ExpressionError",
        "a name is an identifier of Python: letters, digits and underscores\n  a \\ud800 -> a\n    ^^^^^^",
    ),
    (
        'axes.init_mesh("dp=3 tp=2", device_type="cpu")',
        "SizeError",
        "the mesh needs 6 ranks, dp=3 * tp=2; this job has 8\nstart as many: torchrun --nproc-per-node 6 ..., axes.launch(fn, 6), or try it in one process with axes.simulate(6); one size that is left out follows from the ranks",
    ),
    (
        'axes.Mesh("dp=2 cp=2 tp=2", "(cp tp) = dp")',
        "MeshError",
        "'dp' is a name of the mesh already, of size 2; cp * tp is 4. Give it another name",
    ),
    (
        'axes.einsum(axes.ones("a b c", a=2, b=3, c=4), axes.ones("a b", a=4, b=5), "bsd,df->bsf")',
        "SizeError",
        "operand 1, 'bsd', has 1 dim; the tensor has 3\nin  bsd,df->bsf\nnames are separated by spaces: 'b s d, d f -> b s f'",
    ),
    ('axes.rearrange([], "n a@tp -> n a")', "ShardingError", "axes.rearrange takes a list of tensors; found none"),
    ('axes.repeat(["q"], "a@tp -> a@tp n", n=2)', "ShardingError", "axes.repeat takes a list of tensors; found str"),
    (
        'axes.empty("a@tp", a=4, dtype=torch.int32, requires_grad=True)',
        "ShardingError",
        "axes.empty: torch.int32 has no gradient; found requires_grad=True",
    ),
    ('axes.full("a@tp", None, a=4)', "ShardingError", "axes.full takes a number; found None"),
    (
        'axes.shard(torch.eye(4).to_sparse(), "a b@tp")',
        "ShardingError",
        "axes.shard takes a dense tensor; found one of layout torch.sparse_coo. Write x.to_dense()",
    ),
    (
        'axes.shard(torch.nested.nested_tensor([L(2), L(3)], layout=torch.jagged), "a b@tp")',
        "ShardingError",
        "axes.shard takes a dense tensor; found a nested one",
    ),
    (
        'axes.shard(L(4, 8).to("meta"), "a b@tp")',
        "ShardingError",
        "axes.shard takes a tensor with values; found one on the device 'meta'",
    ),
    (
        'axes.rearrange(D("b s@tp d", 8, 16, 32), "b s@pt d -> b s d")',
        "MeshError",
        "the mesh has no axis 'pt'; did you mean 'tp'?\n  b s@pt d -> b s d\n    ^^^^",
    ),
    (
        'axes.rearrange(D("b s@tp d", 8, 16, 32), "b s@expert d -> b s d")',
        "MeshError",
        "the mesh has no axis 'expert'; known: dp, cp, tp",
    ),
    (
        'axes.rearrange(D("b s d", 8, 16, 32), "b s@d d -> b s d")',
        "MeshError",
        "the mesh has no axis 'd', but a dim of this name; axes: dp, cp, tp",
    ),
    (
        'axes.rearrange(D("b seq@tp d", 8, 16, 32), "b seq@tp d -> b sek d")',
        "ExpressionError",
        "'seq' stands on the left only; rearrange keeps what is there, reduce drops names; did you mean 'sek'?\n  b seq@tp d -> b sek d\n    ^^^^^^",
    ),
    (
        'axes.rearrange(D("b s@tp d", 8, 16, 32), "b s@tp d -> b s")',
        "ExpressionError",
        "'d' stands on the left only; rearrange keeps what is there, reduce drops names",
    ),
    (
        'axes.rearrange(D("b s@tp", 8, 16), "b s@tp -> b s d")',
        "ExpressionError",
        "'d' stands on the right only; repeat adds names",
    ),
    ('axes.rearrange(D("b s@tp d", 8, 16, 32), "b s@tp -> b s")', "SizeError", "'b s@tp' has 2 dims; the tensor has 3"),
    ('axes.rearrange(D("b s@tp", 8, 16), "b s@tp d -> b s d")', "SizeError", "'b s@tp d' has 3 dims; the tensor has 2"),
    (
        'axes.rearrange(D("b s@tp", 8, 16), "b s@tp")',
        "ExpressionError",
        "rearrange needs '->' and the result behind it",
    ),
    ('axes.rearrange(D("b s@tp", 8, 16), "b s@tp -> b, s")', "ExpressionError", "rearrange has one result; found 2"),
    (
        'axes.rearrange(D("b s@tp", 8, 16), "b, s@tp -> b s")',
        "ExpressionError",
        "rearrange takes one tensor; found 2 specs",
    ),
    (
        'axes.rearrange(L(4, 4), "b@tp s@tp -> b s")',
        "ShardingError",
        "'tp' is used twice: by 'b' and by 's'; an axis splits one dim or is pending",
    ),
    (
        'axes.rearrange(D("b s@tp d", 8, 16, 32), "b s@tp d | sum@tp -> b s d")',
        "ShardingError",
        "'tp' is used twice: by 's' and by '| sum'; an axis splits one dim or is pending",
    ),
    (
        'axes.rearrange(D("b s@(cp tp) d", 8, 16, 32), "b s@tp d -> b s d")',
        "ShardingError",
        "the tensor isn't sharded as the left side says",
        "write 'b s@(cp tp) d' on the left, or axes.reshard it before",
    ),
    (
        'axes.rearrange(D("b s d", 8, 16, 32), "b s@tp d -> b s d")',
        "ShardingError",
        "the tensor isn't sharded as the left side says\n  says  b s@tp d\n  has   b s d\nin  b s@tp d -> b s d\nwrite 'b s d' on the left, or axes.reshard it before",
    ),
    (
        'axes.rearrange(D("b s@tp d", 8, 16, 32), "b s d -> b s@(cp tp) d")',
        "ShardingError",
        "the tensor isn't sharded as the left side says",
        "write 'b s@tp d' on the left, or axes.reshard it before",
    ),
    (
        'axes.rearrange(D("b s d | sum@tp", 8, 16, 32), "b s d -> b s@tp d")',
        "ShardingError",
        "the tensor isn't sharded as the left side says",
        "write 'b s d | sum@tp' on the left, or axes.reshard it before",
    ),
    (
        'axes.rearrange(D("b s d", 8, 16, 32), "b s d | sum@tp -> b s d")',
        "ShardingError",
        "the tensor isn't sharded as the left side says",
        "write 'b s d' on the left, or axes.reshard it before",
    ),
    (
        'axes.rearrange(D("b s d | mean@tp", 8, 16, 32), "b s d | sum@tp -> b s d")',
        "ShardingError",
        "the tensor isn't sharded as the left side says\n  says  b s d | sum@tp\n  has   b s d | mean@tp\nin  b s d | sum@tp -> b s d\nwrite 'b s d | mean@tp' on the left, or axes.reshard it before",
    ),
    (
        'axes.rearrange(D("b s@tp d", 8, 16, 32), "b s@tp d -> b s d | sum@tp")',
        "ShardingError",
        "the right side keeps sum@tp, but the result has nothing pending\n  has   b s@tp d\nin  b s@tp d -> b s d | sum@tp\nwrite '| *' to keep what arises",
    ),
    (
        'axes.rearrange(D("b s d@tp", 8, 16, 32), "b s d -> b s@tp d")',
        "ShardingError",
        "'tp' would split 's' and 'd'\n  has   b s d@tp\nin  b s d -> b s@tp d\n'd' came split over it: write 'd@tp' on the left to have it moved",
    ),
    (
        'axes.rearrange(D("b s@tp", 8, 12), "b (s p) -> b s p", s=3)',
        "ShardingError",
        "tp splits (s p) into 2 parts that don't fall on its names: (s=3 p=4)\n  has   b (s p)@tp\nin  b (s p) -> b s p\nwrite '(s p)@tp' on the left to have it gathered, or choose sizes that divide",
    ),
    (
        'axes.rearrange(D("b s@tp", 8, 12), "b (h d)@tp -> b h@tp d", h=5)',
        "SizeError",
        "12 doesn't divide by 5:  h=5 * d = 12    (dim 1 of [8, 12], in  b (h d)@tp -> b h@tp d)",
    ),
    (
        'axes.rearrange(D("b s@tp", 8, 12), "b (h k d)@tp -> b h@tp k d", h=2)',
        "SizeError",
        "the sizes of 'k' and 'd' don't follow from  h=2 * k * d = 12    (dim 1 of [8, 12], in  b (h k d)@tp -> b h@tp k d)\ngive all but one of them, like k=2",
    ),
    (
        'axes.rearrange(D("b s@tp", 8, 12), "b (h d)@tp -> b h@tp d", heads=6)',
        "SizeError",
        "a size is given for 'heads', which isn't in the expression; known: b, h, d",
    ),
    (
        'axes.rearrange(D("b s@tp", 8, 12), "b (h d)@tp -> b h@tp d", h=0)',
        "SizeError",
        "the size of 'h' is a whole number from 1 to 281474976710656; found 0",
    ),
    (
        'axes.rearrange(D("b s@tp", 8, 12), "b (h@tp d)@cp -> b h d", h=2)',
        "ExpressionError",
        "a group has '@' inside or outside, not both",
    ),
    (
        'axes.rearrange(D("b s@tp", 8, 12), "b (h (k d))@tp -> b h k d", h=2)',
        "ExpressionError",
        "expected ')': groups don't nest, found '('",
    ),
    ('axes.rearrange(D("b s@tp", 8, 12), "b s@[tp] -> b s")', "ExpressionError", "'[' is reserved"),
    ('axes.rearrange(D("b s@tp", 8, 12), "b 2s@tp -> b s")', "ExpressionError", "a name doesn't start with a digit"),
    (
        'axes.rearrange(D("b s@tp", 8, 12), "b _@tp -> b _")',
        "ExpressionError",
        "'_' stands in specs only; rearrange needs a name",
    ),
    (
        'axes.rearrange(D("b s@tp", 8, 12), "...@tp -> ...")',
        "ExpressionError",
        "'...' stands for dims that keep their split; name the dim that is split",
    ),
    (
        'axes.rearrange(D("b s@tp", 8, 12), "(...)@tp s -> s")',
        "ExpressionError",
        "'...' in a group on the left leaves its sizes open; name the dims",
    ),
    (
        'axes.rearrange(D("b s d", 8, 16, 32), "b s d -> b s d | same@tp")',
        "ExpressionError",
        "'same' is about gradients of plain tensors; a DTensor has none",
    ),
    (
        'axes.rearrange(D("b s d", 8, 16, 32), "b s d | avg@tp -> b s d")',
        "ExpressionError",
        "expected one of sum, mean, max, min, same with '@', or '*', after '|', found 'avg'\n  b s d | avg@tp -> b s d\n          ^^^",
    ),
    (
        'axes.rearrange(L(4, 4), "b@tp s -> b s", b=6)',
        "SizeError",
        "the shard of [6, 4] on rank N is [3, 4] by 'b@tp s'; found [4, 4]",
    ),
    (
        'axes.rearrange((L(4, 4),), "b@tp s -> b s")',
        "ShardingError",
        "axes.rearrange with '@' takes a tensor; found tuple",
    ),
    (
        'axes.reduce(D("b s@cp d", 8, 16, 32), "b s d -> b d", "sum")',
        "ShardingError",
        "the result would be left pending: sum@cp\n  has   b s@cp d\nin  b s d -> b d\nwrite 's@cp' on the left to have it reduced, or '| sum@cp' or '| *' on the right to keep it",
    ),
    (
        'axes.reduce(D("b s d | sum@tp", 8, 16, 32), "b s d | sum@tp -> b s", "max")',
        "ShardingError",
        "'max' doesn't pass a pending sum",
        "resolve it first: '| sum@tp' on the left of a rearrange",
    ),
    (
        'axes.reduce(D("b s@cp d", 8, 5, 32), "b s@cp d -> b d | mean@cp", "mean")',
        "ShardingError",
        "a mean over uneven shards isn't the mean of their means",
        "write '| sum@cp' on the right; it pends as local sums over the whole size",
    ),
    (
        'axes.reduce(D("b s@cp", 8, 16), "b s@cp -> b", torch.logsumexp)',
        "ShardingError",
        "'logsumexp()' doesn't reduce across ranks, and cp splits 's'",
        "gather it first: 's@cp' on the left of a rearrange",
    ),
    (
        'axes.reduce(D("b s@cp", 8, 16), "b s@cp -> b d", "sum")',
        "ExpressionError",
        "'d' stands on the right only; repeat adds names",
    ),
    (
        'axes.repeat(D("b", 8), "b -> b n@tp")',
        "SizeError",
        "the size of 'n' isn't known from any tensor; give it, like n=2",
    ),
    (
        'axes.repeat(D("b s", 8, 4), "b s -> b n@tp", n=4)',
        "ExpressionError",
        "'s' stands on the left only; repeat adds to what is there, reduce drops names",
    ),
    (
        'axes.einsum(D("b d", 8, 32), "b d, d f@tp -> b f@tp")',
        "ExpressionError",
        "the expression has 2 operands; found 1 tensor",
    ),
    (
        'axes.einsum(D("b s f@tp", 8, 16, 64), D("f d", 64, 32), "b s f, f d -> b s d")',
        "ShardingError",
        "the operands disagree on 'f': 'f@tp' and 'f'\n  operand 1  b s f@tp\n  operand 2  f d\nin  b s f, f d -> b s d\naxes.reshard operand 2 to 'f@tp d' before",
    ),
    (
        'axes.einsum(D("b s f@tp", 8, 16, 64), D("f d", 64 // 1, 32).redistribute(placements=D("f@tp d", 64, 32).placements), "b s f, f d -> b s d")',
        "ShardingError",
        "the result would be left pending: sum@tp",
        "write 'f@tp' on the left to have it reduced, or '| sum@tp' or '| *' on the right to keep it",
    ),
    (
        'axes.einsum(D("b f@tp", 8, 64), D("f@tp d", 64, 32), D("c@tp", 4), "b f@tp, f@tp d, c -> b d c")',
        "ShardingError",
        "'tp' is wanted by 'f' and by 'c'\n  operand 1  b f@tp\n  operand 2  f@tp d\n  operand 3  c@tp\nin  b f@tp, f@tp d, c -> b d c\naxes.reshard one of them before",
    ),
    (
        'axes.einsum(D("b d | sum@tp", 8, 32), D("d f | sum@tp", 32, 64), "b d | sum@tp, d f | sum@tp -> b f")',
        "ShardingError",
        "operands 1 and 2 are both pending over 'tp', and a product of sums isn't a sum of products",
        "axes.reshard one of them before",
    ),
    (
        'axes.einsum(D("b f@tp", 8, 64), D("f d | sum@tp", 64, 32), "b f@tp, f d | sum@tp -> b d")',
        "ShardingError",
        "'tp' splits 'f' and is pending in operand 2",
        "axes.reshard one of them before",
    ),
    (
        'axes.einsum(D("i@tp j", 4, 4), "i@tp i -> i@tp")',
        "ShardingError",
        "a diagonal needs 'i' unsplit in both places",
        "axes.reshard the tensor before",
    ),
    (
        'axes.einsum(D("b d", 8, 32), L(32, 64), "b d, d f -> b f")',
        "ShardingError",
        "einsum takes DTensors or plain tensors, not both: operand 2 is plain. Make it a DTensor with axes.shard or axes.from_local, or take the shards of the others with axes.to_local",
    ),
    (
        'axes.einsum(D("b d", 8, 32), D("d f@tp", 16, 64), "b d, d f@tp -> b f@tp")',
        "SizeError",
        "'d' is 32, found 16    (dim 0 of [16, 64], operand 2, in  b d, d f@tp -> b f@tp)",
    ),
    (
        'axes.einsum(D("b d", 8, 32), D("d f@tp", 32, 64, mesh=mesh["tp"]), "b d, d f@tp -> b f@tp")',
        "MeshError",
        "the tensors are on two meshes, Mesh('dp=2 cp=2 tp=2') and Mesh('dp=2 cp=2 tp=2')['tp']; declare one on the other's mesh, which has more axes, with axes.lift(x, mesh)",
    ),
    (
        'axes.rearrange(D("b s@tp", 8, 32, mesh=mesh["tp"]), "b s@tp -> b@dp s")',
        "MeshError",
        "axis 'dp' (2:4) isn't made of the axes of Mesh('dp=2 cp=2 tp=2')['tp'], on which the tensor is; axes.lift or axes.reshard with mesh= moves it to one that has it",
    ),
    (
        'axes.rearrange(D("b s@tp", 8, 12), "b (h d)@(* cp) -> b h d", h=4)',
        "ExpressionError",
        "write '*' at the name in (h d)@(* cp) that it is about",
    ),
    (
        'axes.rearrange(D("b s@tp d", 8, 5, 6), "b s d -> b (s d)")',
        "ShardingError",
        "s=5@tp is split into 2 uneven parts inside (s d), and a split factor of a group must divide",
    ),
    ("axes.rearrange(L(4, 4), 'b@(cp tp) s@tp -> b s')", "ShardingError", "'tp' is used twice: by 'b' and by 's'"),
    (
        "axes.rearrange(L(4, 4), 'b@cptp s@tp -> b s', mesh=mesh.define('cptp = cp tp'))",
        "ShardingError",
        "'cptp' and 'tp' share ranks: by 'b' and by 's'; an axis splits one dim or is pending",
    ),
    (
        "without_mesh(axes.rearrange, L(4, 4), 'b@tp s -> b s')",
        "MeshError",
        "axes.rearrange of plain tensors needs a mesh; pass mesh=... or write it inside `with mesh:`",
    ),
    (
        "axes.shard_map(axes.shard_map(L, 'a@tp -> a@tp'), 'a@tp -> a@tp')(D('a@tp', 4))",
        "ShardingError",
        "tensor 0 among the arguments is a plain one; what goes into a region is a DTensor",
        "Inside a region tensors are shards already: there, call the function itself",
    ),
    (
        "a = []; a.append(a); axes.shard_map(lambda x: a, 'a@tp -> a@tp')(D('a@tp', 4))",
        "ShardingError",
        "the function returned a value that holds itself, or is nested too deep\n  in  shard_map 'a@tp -> a@tp'",
    ),
    (
        "import numpy; axes.GroupOptions(pg_options=numpy.zeros(2))",
        "MeshError",
        "GroupOptions.pg_options is the options object of a backend, such as dist.ProcessGroupNCCL.Options(); found array([0., 0.])",
    ),
    (
        "import numpy; axes.explain('b d -> b', (8, 8), op=numpy.zeros(3))",
        "ShardingError",
        "explain knows the reductions sum, mean, max, min, prod, any, all; found array([0., 0., 0.])",
    ),
    (
        "from torch.distributed.tensor import Shard; axes.shard(L(8), [Shard(0)])",
        "ExpressionError",
        "an expression is text; found list. Where placements are meant, axes.Sharding.from_placements(mesh, placements, ndim).spec is their text",
    ),
    ("axes.Sharding.from_placements(mesh, [raising('__repr__')] * 3, 2)", "ShardingError", "axis 'dp' has "),
    (
        "axes.unshard(axes.from_local(torch.tensor(True), '| sum@tp'))",
        "ShardingError",
        "torch.bool isn't reduced by every backend: a sum over 'tp' needs comm_dtype=torch.int64",
    ),
    (
        "axes.shard_map(torch.exp, 'a b -> a b', mesh='tp')(D('a b', 4, 8))",
        "MeshError",
        "a mesh is an axes mesh, made by axes.init_mesh; found str: 'tp'",
    ),
    (
        "axes.shard(L(4, 4), 'b@dp d', mesh=mesh.device_mesh)",
        "MeshError",
        "a mesh is an axes mesh",
        "axes.Mesh.from_device_mesh makes one of torch's",
    ),
    (
        "axes.init_mesh((2, 2), ('dp', 'tp'))",
        "ExpressionError",
        "an expression is text; found tuple. A mesh is declared by names and sizes, like 'dp=2 tp=4'",
    ),
    (
        "axes.init_mesh('dp tp=3', device_type='cpu')",
        "SizeError",
        "8 doesn't divide by 3:  dp * tp=3 = 8    (the axes over the 8 ranks)\nthe sizes of the axes multiply",
    ),
    (
        "axes.reshard(D('a b@tp', 4, 8), 'a b', comm_dtype='float32')",
        "ShardingError",
        "comm_dtype is a torch.dtype, or two: for values and gradients; found 'float32'",
    ),
    (
        "axes.rearrange(D('a b@tp', 4, 8), 'a b@tp -> a b', comm_dtype=(torch.float32,) * 3)",
        "ShardingError",
        "comm_dtype is a torch.dtype, or two",
    ),
    (
        "axes.reduce(D('a b@tp', 4, 8).to(torch.int64), 'a b@tp -> a', 'mean')",
        "ShardingError",
        "a mean of torch.int64 isn't torch.int64; convert it first, or take the sum",
    ),
    (
        "axes.reduce(D('a b@tp', 4, 8).to(torch.complex64), 'a b@tp -> a', 'max')",
        "ShardingError",
        "torch.complex64 has no order, so no max",
    ),
    ("axes.reduce(D('a b@tp', 4, 8)[:0], 'a b -> b', 'max')", "SizeError", "over no elements has no"),
    (
        "x = D('a b@tp', 4, 8); axes.rearrange([x, x[:2]], 'n a b -> n a b')",
        "ShardingError",
        "have one shape and dtype; found [4, 8] torch.float32, [2, 8] torch.float32",
    ),
    (
        "axes.softmax(D('a b@tp', 4, 8), 'a b@tp', over=None)",
        "ShardingError",
        "over names dims, like 'd' or 'h d'; found None",
    ),
    (
        "axes.layer_norm(D('a b@tp', 4, 8), 'a b@tp', over='b', eps='x')",
        "ShardingError",
        "eps is a number from 0, like 1e-5; found 'x'",
    ),
    (
        "axes.rms_norm(D('a b@tp', 4, 8), 'a b@tp', over='b', eps=-1.0)",
        "ShardingError",
        "eps is a number from 0, like 1e-5; found -1.0",
    ),
    ("axes.reshard(D('a b@tp', 4, 8), 'a b', typo=3)", "ShardingError", "given for 'typo'"),
    (
        "big = axes.Mesh('dp=2 tp=4'); axes.shard(L(16, 8), '(h@tp k) d', h=2, mesh=big)",
        "ShardingError",
        "2 doesn't divide into 4 parts: h=2@tp is split inside a group:  (h=2@tp k) = 16    (dim of [16, 8] in '(h=2@tp k) d')",
        "split the axis first, in two steps: declare the mesh with \"(tp) = kv=2 rep\", and shard on mesh['dp', 'kv', 'rep'], h over kv alone: ranks along rep have the same",
    ),
    (
        "axes.shard_module(MLP(), {'up.weight': 'h@tp e', 'down.weight': 'e h@tp'})",
        "ShardingError",
        "no pattern or annotation is about\n  norm.weight  [8]\nname them, or say of all others that they are whole on every rank: {..., '*': '...'}",
    ),
    (
        "axes.shard_module(MLP(), {'up.weight': 'hidden@tpp embed', '*': '...'})",
        "MeshError",
        "up.weight [16, 8], 'hidden@tpp embed': the mesh has no axis 'tpp'; did you mean 'tp'?",
    ),
    (
        "axes.shard_module(torch.nn.Linear(8, 12), {'weight': '(heads@(cp tp) k) embed', '*': '...'}, heads=6)",
        "ShardingError",
        "weight [12, 8], '(heads@(cp tp) k) embed': 6 doesn't divide into 4 parts",
    ),
    (
        "axes.shard_module(MLP(hidden=32), {'*': '...'}).load_state_dict(MLP().state_dict())",
        "RuntimeError",
        "size mismatch for up.weight",
    ),
    (
        "axes.shard_module(MLP(), {'*': '...'}, rules=axes.Rules(hidden='ep', embed=None))",
        "MeshError",
        "the rule hidden=ep names an axis that Mesh('dp=2 cp=2 tp=2') doesn't have; known: dp, cp, tp\ndeclare it with size 1 ('ep=1'), or leave it out of the rule",
    ),
    (
        "axes.shard_map(axes.shard_module(MLP(), {'*': '...'}, m := axes.init_mesh('dp', device_type='cpu')), 'b@dp s embed -> b@dp s embed', m)(L(2, 3, 8))",
        "MeshError",
        "the mesh has no axis 'tp'; known: dp\n  b s hidden@tp, embed hidden@tp -> b s embed\n",
    ),
    (
        "axes.shard_module(axes.shard_module(MLP(), {'*': '...'}), {'*': '...'})",
        "ShardingError",
        "norm.weight is sharded already; shard_module takes a module of plain tensors. Say all specs in one call, or make the module anew",
    ),
    (
        "without_mesh(axes.shard_module, MLP(), {'*': '...'})",
        "MeshError",
        "axes.shard_module needs a mesh; pass mesh=... or write it inside `with mesh:`",
    ),
    (
        "axes.shard_module(MLP(), {'up.weight': 'hidden embed', '*': '...'}, rules=axes.Rules(hiden='tp', embed=None))",
        "ShardingError",
        "up.weight [16, 8], 'hidden embed': no rule is about 'hidden'; did you mean 'hiden'?\n  hidden embed\n  ^^^^^^\nwrite hidden=None for a dim that stays whole, or a last rule ('...', None) for all others",
    ),
    (
        "axes.shard_module(MLP(), {'up.weight': 'hidden embed', '*': '...'}, rules=axes.Rules([('hiden', 'tp'), ('...', None)]))",
        "ShardingError",
        "the rule hiden=tp is about no dim of a parameter; did you mean 'hidden'?",
        "stay whole by the last rule, ('...', None); where that is meant, write embed=None",
    ),
    (
        "axes.shard_module(MLP(), {'*.upp.weight': 'hidden@tp embed', '*': '...'})",
        "ShardingError",
        "no parameter or buffer matches\n  '*.upp.weight'; did you mean 'up.weight'?",
    ),
    (
        "axes.shard_module(MLP(), {'*': '...', 'up.weight': 'hidden@tp embed'})",
        "ShardingError",
        "the pattern 'up.weight' never applies: '*' stands before it and matches all that it does; the first that matches applies, so put 'up.weight' before '*'",
    ),
    (
        "m = MLP(); m.head = torch.nn.Linear(8, 16, bias=False); m.head.weight = m.up.weight; axes.shard_module(m, {'up.*': 'v@tp d', 'head.*': 'v d@tp', '*': '...'})",
        "ShardingError",
        "one tensor under 2 names, tied, has two specs:\n  up.weight  v@tp d    (up.*)\n  head.weight  v d@tp    (head.*)\ngive it one",
    ),
)

AFTERWARDS = (
    (
        "axes.shard_module(torch.nn.ParameterDict({'scale': L(8)}).to('meta'), {'*': '...'})",
        "ShardingError",
        "no initializer makes  scale\nthe modules that hold them have no reset_parameters() that fills them, and the root no init_weights(); write one, or make the module on a device",
    ),
    (
        "axes.shard_map(MLP().to('meta'), 'b@dp s e -> b@dp s e')(L(2, 3, 8))",
        "ShardingError",
        "has no values, it is on the device meta; axes.shard_module(module, ...) makes what was made there, each rank its shards\n  in  shard_map",
    ),
    (
        "axes.shard_map(MLP(), 'b@dp s e -> b@dp s e')(L(2, 3, 8))",
        "ShardingError",
        "what came would be this rank's summand of its gradient\nmake its parameters DTensors before: axes.shard_module(module, {'down.weight': 'i j', ...}, mesh=mesh)",
    ),
)
