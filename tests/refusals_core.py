"""What expressions, moves, collectives, regions and functions refuse, and what they say; `test_refusals` says how these run."""

from __future__ import annotations

from collections.abc import Sequence


def told(program: str, error: str, cases: Sequence[tuple[str, str]]) -> list[tuple[str, str, str]]:
    """Rows of one kind: what stands in the place of `...` in a program, and what is said of it."""
    return [(program.replace("...", text), error, said) for text, said in cases]


COLLECTIVES = (
    ("psum(L(6, 4), ('tp', 'cp', 'tp'))", "MeshError", "found 'tp' twice"),
    ("psum(L(6, 4), ['tp'])", "MeshError", "an axis is a name like 'tp', or several like ('cp', 'tp'); found ['tp']"),
    (
        "psum(L(6, 4), 'tp', mesh=axes.Mesh('tp=2'))",
        "MeshError",
        "this one has no processes. Make it with axes.init_mesh(...)",
    ),
    ("psum(L(6, 4), 'tp', mesh='tp')", "MeshError", "axes are looked up in an axes mesh; found str"),
    ("psum([1.0], 'tp')", "ShardingError", "psum takes a tensor; found list"),
    ("psum(L(6, 4).to_sparse(), 'tp')", "ShardingError", "psum takes a dense tensor; found one of layout torch.sparse"),
    ("psum(D('a b', 6, 4), 'tp')", "ShardingError", "psum takes this rank's plain tensor; found a DTensor"),
    ("pmean(L(6).long(), 'tp')", "ShardingError", "a mean of integers is no integer; write x.float(), or psum"),
    ("pmax(L(6).cfloat(), 'tp')", "ShardingError", "complex numbers have no order; take x.abs()"),
    ("psum(L(6).to(torch.uint64), 'tp')", "ShardingError", "no sum over ranks for torch.uint64; convert it first"),
    ("all_gather(L(6, 4), 'tp', dim=2)", "ShardingError", "all_gather over dim 2 of a tensor [6, 4]: dims are 0 to 1"),
    ("all_gather(L(6, 4), 'tp', dim=1.0)", "ShardingError", "over dim"),
    ("psum_scatter(L(6, 4), ('dp', 'tp'))", "SizeError", "which doesn't divide into 4 pieces, one for each rank"),
    ("all_to_all(L(6, 4), ('dp', 'tp'), 0, 1)", "SizeError", "dim 0 of [6, 4] has 6 elements"),
    ("all_to_all(L(6, 4), 'tp', 1, '0')", "ShardingError", "all_to_all over dim '0' of a tensor"),
    ("ppermute(L(6), 'tp')", "ShardingError", "ppermute goes by shift=1 or by perm=[(source, target), ...]"),
    ("ppermute(L(6), 'tp', shift=1, perm=[])", "ShardingError", "give one of the two"),
    ("ppermute(L(6), 'tp', shift=0.5)", "ShardingError", "ppermute's shift is a whole number; found 0.5"),
    (
        "ppermute(L(6), 'tp', perm=[(0, 2)])",
        "ShardingError",
        "coordinates 0 to 1 of 'tp', each the source and the target of one at most; found [(0, 2)]",
    ),
    ("ppermute(L(6), 'tp', perm=[(-1, 0)])", "ShardingError", "found [(-1, 0)]"),
    (
        "ppermute(L(6), 'tp', perm=[(0, 1), (1, 1)])",
        "ShardingError",
        "found [(0, 1), (1, 1)]. To send to several, all_gather and slice",
    ),
    ("ppermute(L(6), 'tp', perm=[(0, 1, 2)])", "ShardingError", "pairs"),
    ("ppermute(L(6), 'tp', perm=[(0, 1.0)])", "ShardingError", "a list of pairs"),
)

# fmt: off
FOUR = "axes.all_to_all(L(6, 4), ('cp', 'tp'), ...)"
GOOD = "recv_sizes=[1, 2, 3, 0]"
SIZES = (
    *told(FOUR, "ShardingError", (
        (GOOD, "all_to_all takes send_sizes and recv_sizes together; send_sizes are Python numbers of 0 or more, one for each of the 4"),
        ("send_sizes=[1, 2, 3, 0]", "found None. Of a tensor write .tolist(); a small all_to_all tells ranks"),
        (f"send_sizes=[1, 2, 3, 0], {GOOD}, split_dim=1", "Write split_dim=1, concat_dim=1"),
        (f"send_sizes=[1, 2, 3], {GOOD}", "send_sizes are Python numbers of 0 or more, one for each of the 4 coordinates of"),
        ("send_sizes=[1, 2, 3, 0], recv_sizes=(1, 2, 3, 0, 0)", "recv_sizes are Python numbers of 0 or more, one for each of the 4"),
        (f"send_sizes=[1, 2, 3.0, 0], {GOOD}", "send_sizes are Python numbers of 0 or more, one for each of the 4"),
        ("send_sizes=[1, 2, 3, 0], recv_sizes=[True, 2, 3, 0]", "recv_sizes are Python numbers of 0 or more, one for each"),
        (f"send_sizes=6, {GOOD}", "send_sizes are Python numbers of 0 or more, one for each of the 4"),
        (f"send_sizes=torch.tensor([1, 2, 3, 0]), {GOOD}", "Of a tensor write .tolist()"),
        (f"send_sizes=[1, 2, 4, -1], {GOOD}", "found [1, 2, 4, -1]"),
    )),
    *told(FOUR, "SizeError", (
        (f"send_sizes=[1, 2, 2, 2], {GOOD}", "add up to 7; dim 0 of [6, 4] has 6 elements"),
        (f"send_sizes=[1, 2, 3, 0], {GOOD}, split_dim=1, concat_dim=-1", "add up to 6; dim 1 of [6, 4] has 4"),
    )),
)

IDS = "torch.tensor([0, 1, 2])"
FUNCTIONS = (
    *told("axes.softmax(L(3, 4), ...)", "ExpressionError", (
        ("'q k', over='j'", "softmax is over dims of the spec by name; found 'j'; known: q, k"),
        ("'q k', over=''", "softmax is over dims of the spec by name"),
        ("'q (k j)', over='k'", "softmax is over dims of the spec by name; found 'k'"),
        ("'q k@*', over='k'", "'*' doesn't say it"),
    )),
    ("axes.softmax(L(3, 4), 'q k | sum@tp', over='k')", "ShardingError", "softmax isn't linear, so it can't take what"),
    ("axes.softmax(L(3, 4), 'q h k', over='k')", "ShardingError", "has 3 dims, the tensor 2: [3, 4]"),
    ("axes.softmax([1.0], 'k', over='k')", "ShardingError", "axes.softmax takes a tensor; found list"),
    *[(f"axes.{name}(L(4).to({dtype}), 'a', over='a')", "ShardingError", "is of floats") for name in ("softmax", "log_softmax", "logsumexp", "entropy", "argmax", "rms_norm", "layer_norm") for dtype in ("torch.int64", "torch.complex64")],
    ("axes.rms_norm(L(3, 4), 'q k', over='k', weight=L(3))", "SizeError", "rms_norm: 'k' is 4 and 3\nin  q k, k -> q k"),
    ("axes.argmax(L(3, 4), 'q k', over='q k')", "ShardingError", "argmax is over one dim, like 'v'; found 'q k'"),
    ("axes.argmax(L(3, 0), 'q k', over='k')", "SizeError", "argmax: 'k' has no elements"),
    ("axes.argmax(L(3, 4), 'q k@tp', over='k', k=10)", "SizeError", "'k' is 10 in whole and so 5 on this rank; found 4"),
    ("axes.nn.sample(L(3, 4), 'q k', over='k', temperature=-1)", "ShardingError", "temperature is a number from 0; found -1"),
    ("axes.nn.sample(L(3, 4), 'q k', over='j', seed=1)", "ExpressionError", "argmax is over dims of the spec by name; found 'j'"),
    ("axes.topk(L(3, 4), 'q k', 0, over='k')", "ShardingError", "topk's k is a whole number from 1; found 0"),
    ("axes.topk(L(3, 4), 'q k', 5, over='k')", "SizeError", "topk: 'k' has 4 elements, and k is 5"),
    ("axes.topk(D('q k@tp', 3, 4), 'q k@tp', 5, over='k')", "SizeError", "topk: 'k' has 4 elements, and k is 5"),
    ("axes.rms_norm(L(3, 4), 'q k', over='k', q=3)", "SizeError", "isn't a dim that the function works over; known: k"),
    *told(f"axes.cross_entropy(L(3, 4), {IDS}, ...)", "ExpressionError", (
        ("'b v, b'", "cross_entropy is 'logits, labels -> loss'"),
        ("'b v, s -> '", "labels have the names of the logits without the vocabulary"),
        ("'b v, b -> v'", "the loss has names of the labels"),
        ("'b@dp v, b -> '", "and lie alike"),
        ("'b v@tp, b -> | sum@tp'", "what a loss can leave pending"),
        ("'b _, b -> '", "cross_entropy needs a name for each dim"),
    )),
    (f"axes.cross_entropy(L(3, 4), {IDS}, 'b v, b -> ', label_smoothing=1.5)", "ShardingError", "label_smoothing is a number from 0 to 1; found 1.5"),
    (f"axes.cross_entropy(L(3, 4), {IDS}, 'b v, b -> ', ignore_index=[1])", "ShardingError", "cross_entropy's ignore_index is a whole number; found [1]"),
    (f"axes.cross_entropy(L(3, 4), {IDS}, 'b v, b -> ', ignore_index=2**70)", "ShardingError", "cross_entropy's ignore_index is a whole number; found 1180591620717411303424"),
    ("axes.rms_norm(L(3, 4), 'b d', over='d', eps=L(3, 4))", "ShardingError", "rms_norm's eps is a number from 0, like 1e-6; found tensor("),
    ("axes.layer_norm(L(3, 4), 'b d', over='d', eps=None)", "ShardingError", "layer_norm's eps is a number from 0, like 1e-5; found None"),
    (f"axes.cross_entropy(L(3, 4), {IDS}, 'b v, b -> ', z_loss=-1)", "ShardingError", "z_loss is a number from 0, like 1e-4; found -1"),
    ("axes.cross_entropy(D('b@dp v@tp', 4, 8), L(4).long(), 'b@dp v@tp, b@dp -> ', v=9)", "SizeError", "'v' is 8 in the tensor of shape [4, 8], and 9 is given"),
    (f"axes.cross_entropy(L(3, 4), {IDS}, 'b v, b -> ', weight=L(3))", "SizeError", "cross_entropy: 'v' is 4 and 3"),
    (f"axes.cross_entropy(L(3, 4), {IDS}, 'b v, b -> ', weight={IDS})", "ShardingError", "cross_entropy is of floats; found torch.int64"),
    (f"axes.cross_entropy(L(3, 4), {IDS}, 'b v, b -> ', reduction='none')", "ShardingError", "reduction is 'mean' or"),
    ("axes.cross_entropy(L(3, 4), L(3), 'b v, b -> ')", "ShardingError", "labels are whole numbers; found torch.float"),
    (f"axes.cross_entropy(D('b v', 3, 4), {IDS}, 'b v, b -> ')", "ShardingError", "tensor 1 among the arguments is a plain one"),
    ("axes.softmax(D('b@dp v@tp', 4, 8), 'b v', over='v')", "ShardingError", "left side  b v\n  tensor     b@dp v@tp"),
    ("axes.embedding(L(3), L(3, 4), 'b, v d -> b d')", "ShardingError", "ids are whole numbers"),
    (f"axes.embedding({IDS}, L(3, 4).long(), 'a, v d -> a d')", "ShardingError", "is of floats; found torch.int64"),
    (f"axes.embedding({IDS}, L(3, 4), 'a, v d -> a b')", "ExpressionError", "the result has the names of the ids and"),
    (f"axes.embedding({IDS}, L(3, 4), 'a, v d -> a d', v=7)", "SizeError", "'v' is 7 in whole and so 7 on this rank"),
    (f"axes.embedding({IDS}, L(3, 4), 'a, v d -> a d', padding_idx=3)", "SizeError", "a row of the table, which has 3"),
    (f"axes.embedding({IDS}, L(3, 4), 'a, v d -> a d', padding_idx=1.0)", "SizeError", "a row of the table, which has 3; found 1.0"),
)

DROPPED = (
    *[(f"axes.nn.dropout(L(2), {p})", "ShardingError", "p is a probability, from 0 to 1") for p in ("-0.1", "1.5", "'0.1'", "True", "float('nan')")],
    ("axes.nn.Dropout(1.5)", "ShardingError", "p is a probability, from 0 to 1; found"),
    ("axes.nn.Dropout(0.5, 'a@@ b')", "ExpressionError", "a@@ b"),
    ("axes.nn.dropout(L(4, 4), 0.1)", "ShardingError", "needs to know which part of the whole it is; write a spec"),
    ("axes.nn.dropout(D('b@dp s', 4, 4), 0.1, 'b s@dp')", "ShardingError", "isn't sharded as the spec says\n  spec    b s@dp"),
    ("axes.nn.dropout(L(4, 4), 0.1, 'b')", "ShardingError", "the spec 'b' has 1 dims, the tensor 2"),
    ("axes.nn.dropout(L(4), 0.1, 's@tp', s=6)", "ShardingError", "the tensor, 's@tp', is [6] in whole and so [3] on this rank; found [4]"),
    ("axes.nn.dropout(axes.from_local(L(4), 'b | max@tp'), 0.1)", "ShardingError", "pending max or min"),
    ("axes.nn.dropout(torch.arange(3), 0.1, 's')", "ShardingError", "is of floats; found torch"),
    ("axes.nn.dropout(L(3), 0.1, 's', seed=0.5)", "ShardingError", "seed is a whole number of at most 64 bits; found"),
    ("axes.nn.dropout([1.0], 0.1, 's')", "ShardingError", "takes a tensor; found list"),
    ("axes.from_local(L(3), 's@tp', mesh=axes.Mesh('tp=2'))", "MeshError", "axes.from_local 's@tp' needs a mesh that is bound to torch.distributed"),
    ("axes.nn.dropout(L(3), 0.1, 's@tp', mesh=axes.Mesh('tp=2'))", "MeshError", "has no processes"),
    ("torch.func.grad(lambda x: axes.nn.dropout(x, 0.5, 's').sum())(L(3))", "ShardingError", "inside a transform"),
)

MOVED = (
    *told("axes.reshard(D('b@dp s d', 8, 12, 4), ...)", "ShardingError", (
        ("'b@(tp tp) s d'", "'tp' is used twice"),
        ("'b s@tp d | sum@tp'", "'tp' is used twice"),
        ("'b s d | sum@tp'", "the source has nothing"),
        ("'b (h=5@tp e) d'", "don't multiply to the dim"),
        ("'b (h=3@tp e) d'", "doesn't divide into 2 parts"),
        ("'b s'", "the spec 'b s' has 2 dims, the tensor 3; write a name for each dim, or '...' for the others"),
        ("'... d@tp e f g'", "the spec has 4 dims beside '...', the tensor has 3"),
        ("'b s d | same@tp'", "about gradients of plain tensors"),
        ("'b@dp s d -> b s d'", "write only what it becomes"),
        ("'b@* s@dp d'", "'dp' is used twice"),
        ("'b@(* dp) s d'", "'dp' is used twice"),
        ("'b s (d@* e)'", "in a group write the axes"),
        ("'b ...@tp'", "name the dim that is split"),
    )),
    ("axes.reshard(D('b@dp s | max@tp', 4, 4), 'b s | sum@tp')", "ShardingError", "the target has sum pending over tp, where the source has max\n  source  _@dp _"),
    ("axes.reshard(D('b@dp s | sum@tp', 4, 4), 'b s@tp | *')", "ShardingError", "'tp' is used twice"),
    ("axes.reshard(axes.from_local(L(4).long(), 'n | mean@tp'), 'n |')", "ShardingError", "a mean of int64 isn't int64"),
    ("axes.reshard(L(4).requires_grad_(), 'n | max@tp -> n')", "ShardingError", "a pending max has no gradient where it is resolved", "axes.pmax(x, axis)"),
    ("axes.reshard(D('n', 4), 'n@@tp')", "ExpressionError", "n@@tp\n"),
    ("axes.reshard(D('n', 4), 3)", "ExpressionError", "takes a spec or a Sharding"),
    ("axes.reshard(L(4), 'n@tp')", "ShardingError", "write both sides"),
    ("axes.reshard(L(4, 4), 'm n -> n m')", "ExpressionError", "axes.rearrange"),
    ("axes.reshard([1.0], 'n -> n')", "ShardingError", "takes a tensor"),
    ("axes.reshard(D('n', 4), axes.Mesh('a=2 b=4').sharding('n@a'))", "MeshError", "has no processes"),
    ("axes.reshard(D('n', 4), mesh.sharding('n@dp'), mesh=mesh['dp'])", "MeshError", "leave out mesh="),
    ("other = axes.init_mesh('tp=2 cp=2 dp=2', device_type='cpu'); x = D('n', 4)\nwith other: axes.reshard(x, 'n@dp')", "MeshError", "on which the tensor is, and other ranks on"),
    ("axes.reshard(D('n', 5), 'n@(tp cp)')", "ShardingError", "DTensor"),
    ("axes.reshard(D('n', 4), '(h@tp e)', h=[2])", "SizeError", "found [2]"),
    *[(f"axes.reshard(D('a', {n}), '(h@tp d)', h=4)", "ShardingError", "don't multiply to the dim") for n in (10, 14, 30)],
    ("axes.reshard(L(2), '_@tp -> _')", "ExpressionError", "'_' stands in specs only; reshard needs a name"),
    ("axes.reshard(L(2), '2 -> 2')", "ExpressionError", "reshard takes no number but 1 on the left"),
    *[(f"axes.reshard(axes.from_local(L(4).to({dtype}), 'n | {op}@tp'), 'n')", "ShardingError", said) for dtype, op, said in (
        ("torch.int16", "sum", "comm_dtype=torch.int64"),
        ("torch.float8_e5m2", "sum", "comm_dtype=torch.float32"),
        ("torch.bool", "sum", "comm_dtype=torch.int64"),
        ("torch.int32", "mean", "a mean of int32"),
        ("torch.complex64", "max", "no order"),
    )],
    *[
        (f"axes.reshard(axes.from_local(L(4).to({dtype}), 'n@tp', shape=(8,)), 'n', comm_dtype={wire})", "ShardingError", "comm_dtype")
        for dtype, wire in (("torch.float32", "torch.int32"), ("torch.float32", "torch.complex64"), ("torch.int64", "torch.float32"), ("torch.int64", "torch.int32"), ("torch.complex64", "torch.float32"))
    ],
    *told("axes.reshard({'x': D('i@dp j', 8, 8), 'y': D('i j@tp', 8, 8)}, ...)", "ShardingError", (
        ("'i j'", "takes specs by name; found 'i j'"),
        ("{'x': 'i j'}", "'y' isn't in the specs"),
        ("{'x': 'i j', 'y': 'i j', 'z': 'i'}", "'z' isn't in the tensors"),
        ("{'x': 'i', 'y': 'i j'}", "of the tensor 'x'"),
        ("{'x': 'i j -> i j', 'y': 'i j'}", "write only what it becomes"),
        ("{'x': 'i j', 'y': 'i j'}, async_op=True", "reshard such tensors one by"),
    )),
    ("axes.reshard({'x': D('i', 8), 'y': D('i', 8).requires_grad_()}, {'x': 'i', 'y': 'i'})", "ShardingError", "has no gradient, and 'y' needs one; reshard it by itself"),
    ("axes.reshard({'x': L(2)}, {'x': 'i'})", "ShardingError", "as axes.shard and axes.from_local make them; 'x'"),
    ("axes.reshard({'x': D('i', 8)}, {'x': 3})", "ExpressionError", "takes a spec or a Sharding; found 3"),
    ("axes.reshard({'x': D('i', 8)}, {'x': 'i@pp'})", "MeshError", "'pp'"),
    ("axes.reshard({'x': D('i', 8)}, {'x': '(h d)'}, h=2)", "ShardingError", "Sizes stand in the specs, like '(h=8 d)@tp'"),
    ("axes.reshard(D('i', 8), 'i', mesh=3)", "MeshError", "a mesh is an axes mesh"),
)

PLANNED = (
    ("axes.plan('n@tp', 'n', (4,), q=2)", "SizeError", "isn't in the specs"),
    ("axes.plan('n@tp', 'n m', (4,))", "ShardingError", "dims"),
    ("axes.plan('n@tp', 'n', (4,), dtype='float31')", "ShardingError", "unknown dtype"),
    *[
        (program.replace("...", dtype), "ShardingError", "dtype is a torch dtype or its name, like 'bfloat16'; found ")
        for dtype in ("3", "L(1)", "raising('__repr__')")
        for program in ("axes.plan('n@tp', 'n', (4,), dtype=...)", "axes.explain('n@tp -> n', (4,), dtype=...)", "axes.transfer({'w': 'n@tp'}, {'w': 'n'}, mesh, mesh, {'w': (4,)}, dtype={'w': ...})")
    ],
    ("axes.plan('(a=2 b)@tp c', '(a=4 b) c', (8, 8))", "SizeError", "'a' is given two sizes: 2 in '(a=2 b)@tp c' and 4 in"),
)

X = "x = L(4, 2).requires_grad_(); w = D('b@dp d', 8, 2).requires_grad_(); "
CROSSED = (
    (X + "axes.from_local(x, 'b d')", "ShardingError", "replicated over 'dp' (2 ranks) and 'cp' (2 ranks) and 'tp' (2 ranks)", "'b d | same@(dp cp tp)'"),
    (
        X + "axes.from_local(x, 'b@(dp cp) d')",
        "ShardingError",
        "replicated over 'tp' (2 ranks).\nSay how the ranks use their copies:\n  - all in the same way",
        'grad="whole"',
        "each in its own way, so that the gradients add up:",
        'grad="summed"',
        "'b@(dp cp) d | same@tp'",
    ),
    (X + "axes.from_local(x, 'b d | sum@tp', grad=None)", "ShardingError", "'b d | sum@tp same@(dp cp)'"),
    (X + "axes.from_local(x, 'b@dp d | same@tp')", "ShardingError", "replicated over 'cp' (2 ranks).", "'b@dp d | same@tp same@cp'"),
    (X + "axes.to_local(w)", "ShardingError", 'axes.to_local(x, grad="whole")', "'_@dp _ | same@(cp tp)'"),
    (X + "axes.to_local(w, 'b@dp d | same@cp')", "ShardingError", "replicated over 'tp' (2 ranks)."),
    (X + "axes.to_local(w, 'b d')", "ShardingError", "isn't sharded as the spec says\n  spec    b d\n  tensor  _@dp _", "axes.reshard(x, 'b d')"),
    (X + "axes.to_local(w, 'b@dp')", "ShardingError", "the spec 'b@dp' has 1 dims, the tensor 2: [8, 2]"),
    (X + "axes.to_local(w, 'b@dp d | same@dp')", "ShardingError", "axis 'dp' is used twice"),
    (X + "axes.from_local(x, 'b@tp d | same@tp')", "ShardingError", "axis 'tp' is used twice"),
    (X + "axes.to_local(w, grad='sum')", "ShardingError", "axes.to_local: grad is 'whole' or 'summed'; found 'sum'"),
    (X + "axes.from_local(x.detach(), 'b d', grad=True)", "ShardingError", "axes.from_local: grad is 'whole' or 'summed'; found True"),
    (X + "axes.shard(x * 2, 'n d', source_rank=0)", "ShardingError", "leave out source_rank"),
    (X + "axes.shard(x, 'n d | sum@tp')", "ShardingError", "a whole tensor has nothing pending"),
    ("axes.shard(L(4), 'a@tp', source_rank='1')", "MeshError", "source_rank is a whole number from 0"),
    ("axes.from_local(L(1), 'n | sum@tp max@dp')", "ShardingError", "'| sum@tp max@dp' is resolved in the order in which it stands, and DTensor keeps only that of the mesh", "resolve sum@tp first, or use the sub-mesh mesh['tp', 'dp']"),
)

BLOCKS = (
    *[(f"axes.{call}", "ExpressionError", "blocks stand in the rules of transfers alone", "torch.split", "torch.cat") for call in (
        "rearrange(D('n@tp d', 16, 4), '(f + f) d -> f d, f d')",
        "rearrange([D('n d', 8, 4), D('n d', 8, 4)], 'q d, k d -> (q + k) d')",
        "rearrange(L(4, 4), '(a@tp + b@tp) d -> a@tp d, b@tp d', a=2)",
        "rearrange(L(4, 4), '(a + b) d')",
        "einsum(L(4, 4), L(4, 4), '(a + b) d, d e -> e')",
        "reduce(L(4, 4), '(a + b) d -> d', 'sum')",
        "repeat(L(4, 4), '(a + b) d -> a d n', n=2)",
        "reshard(L(2), '(a + b)@tp -> (a + b)')",
    )],
    ("axes.shard(L(16, 4), '(h@tp + g@tp) d')", "ExpressionError", "blocks stand in the rules of transfers alone"),
)

EINOPS = (
    *[(f"axes.{call}", error, said) for call, error, said in (
        ("rearrange(L(6, 2), 'b b -> b b')", "ExpressionError", "'b' stands twice in one tensor"),
        ("rearrange(L(6, 2), 'b (h (w c)) -> b h w c')", "ExpressionError", "groups don't nest"),
        ("rearrange(L(6, 2), '(b1 b2) h -> b1 b2 h')", "SizeError", "the sizes of 'b1' and 'b2' don't follow from"),
        ("rearrange(L(6, 2), '(b1 b2) h -> b1 b2 h', b1=5)", "SizeError", "6 doesn't divide by 5"),
        ("rearrange(L(6, 2), 'b h -> h b', q=5)", "SizeError", "a size is given for 'q', which is no option and isn't in"),
        ("rearrange(L(6, 2), '(b ...) c -> b ... c')", "ExpressionError", "'...' in a group on the left leaves its"),
        ("rearrange(L(6, 2), 'b 2 -> b')", "ExpressionError", "rearrange takes no number but 1 on the left"),
        ("rearrange(L(6, 2), 'b h -> b h ...')", "ExpressionError", "'...' is in the result and in no operand"),
        ("repeat(L(6, 2), 'b h -> b h d')", "SizeError", "the size of 'd' isn't known from any tensor; give it, like d="),
        ("repeat(L(6, 2), 'b h -> b d', d=2)", "ExpressionError", "'h' stands on the left only; repeat adds to what"),
        ("rearrange(L(6, 2), 'b h - > h b')", "ExpressionError", "'-' has no meaning here"),
        ("rearrange(L(6, 2).numpy(), 'b h -> h b')", "ShardingError", "axes.rearrange takes a tensor; found ndarray. Make an array one, by torch.as_tensor"),
        ("reduce(L(6, 2), 'b h -> b x', 'sum')", "ExpressionError", "'x' stands on the right only"),
        ("reduce(L(6, 2), 'b h -> b', 'median')", "ShardingError", "and functions; found 'median'"),
        ("reduce(L(6, 2), 'a@tp b -> a@tp', lambda x, dims: x)", "ShardingError", "without dims (1,) that is [6]; found a tensor of [6, 2]"),
        ("reduce(D('a@tp b', 6, 2), 'a@tp b -> a@tp', lambda x, dims: 1.0)", "ShardingError", "that is [3]; found 1.0"),
        ("reduce(D('a@tp', 8).requires_grad_(), 'a@tp -> | max@tp', 'max').backward()", "ShardingError", "resolved in the same expression; found max@tp pending"),
        ("reduce(torch.arange(4), 'b@dp -> ', 'mean')", "ShardingError", "a mean of torch.int64 isn't"),
        *[(f"reduce(L(5, 3), 'b@dp s -> s | {left}', 'mean')", "SizeError", "needs the whole size of 'b', and a shard shows") for left in ("mean@dp", "sum@dp", "*")],
        ("reduce(L(5, 3), 'b@dp s@(cp tp) -> | sum@cp', 'mean')", "SizeError", "whole size of 'b' and 's'"),
        ("reduce(L(4, 3), '(b t)@dp s -> t s', 'mean', t=2)", "SizeError", "needs the whole size of 'b'"),
    )],
    *[(f"axes.einsum(D('a@tp e', 16, 5), D('(a@tp i=2) f', {rows}, 3), 'a e, a f -> a e f')", "SizeError", f"'a' is 16, found {rows}") for rows in (4, 8, 12)],
)

TAKEN = "axes.shard_map(lambda *xs: xs[0], '...')"
REGIONS = (
    *told(TAKEN, "ExpressionError", (
        ("b@dp d", "a region says what goes in and what comes out"),
        ("b@dp -> b@", "an axis name, '*' or '(' after '@'"),
        ("(b c)@* -> b", "a region has no '*': a name without '@' keeps the split that it has"),
        ("b -> b@(* tp)", "of others write the axes"),
        ("b | * -> b", "and what is pending, '| sum@tp'"),
    )),
    ("axes.shard_map(torch.neg, '...@tp -> b')", "ExpressionError", "flows; name the dim that is split"),
    ("axes.shard_map(torch.neg)", "ExpressionError", "takes a function and an expression"),
    ("axes.shard_map('b -> b', torch.neg)", "ExpressionError", "takes a function and an expression"),
    ("axes.shard_map(3, 'b -> b')", "ExpressionError", "found int and str"),
    *[(f"axes.shard_map({body}, '{text}')({given})", error, said, text) for text, given, body, error, said in (
        ("b d, d f -> b d", "D('b@dp d', 4, 6)", "lambda *x: x[0]", "ShardingError", "is called with 1 tensors, and the left side has 2 specs"),
        ("b@dp d -> b@dp d, d", "D('b@dp d', 4, 6)", "lambda x: x", "ShardingError", "returned 1 tensors, and the right side has 2 specs"),
        ("b@dp d -> ", "D('b@dp d', 4, 6)", "lambda x: x", "ShardingError", "result 0 has 2 dims, its spec '' 0"),
        ("b@dp -> b@dp", "D('b@dp d', 4, 6)", "lambda x: x", "ShardingError", "tensor 0 has 2 dims, its spec 'b@dp' 1"),
        ("b@cp d -> b@cp d", "D('b@dp d', 4, 6)", "lambda x: x", "ShardingError", "left side  b@cp d\n  tensor     b@dp d"),
        ("b d -> b@dp d", "D('b@dp d', 4, 6)", "lambda x: x", "ShardingError", "tensor 0 isn't sharded as the left side says"),
        ("b d -> b d", "D('b d | sum@cp', 4, 6)", "lambda x: x", "ShardingError", "tensor     b d | sum@cp"),
        ("b d | same@cp -> b d", "D('b d | sum@cp', 4, 6)", "lambda x: x", "ShardingError", "tensor     b d | sum@cp"),
        ("b@dp d | same@dp -> b@dp d", "D('b@dp d', 4, 6)", "lambda x: x", "ShardingError", "axis 'dp' is used twice: in b@dp and in same@dp"),
        ("b@dp d -> b@dp d | same@dp", "D('b@dp d', 4, 6)", "lambda x: x", "ShardingError", "axis 'dp' is used twice"),
        ("b@dp d -> b@dp d@dp", "D('b@dp d', 4, 6)", "lambda x: x", "ShardingError", "axis 'dp' is used twice"),
        ("b d, b f -> b d", "D('b@dp d', 4, 6), D('b f', 4, 6)", "lambda x, y: x", "ShardingError", "the tensors disagree on how 'b' is split"),
        ("b d, b f -> b d", "D('b d', 5, 6), D('b f', 6, 2)", "lambda x, y: x", "SizeError", "'b' has two sizes, 5 and 6"),
        ("b=8 d -> b d", "D('b d', 4, 6)", "lambda x: x", "SizeError", "'b' has two sizes, 8 and 4"),
        ("_ 3 -> _ 3", "D('b d', 4, 6)", "lambda x: x", "SizeError", "a dim is written as 3, and has 6 elements"),
        ("b@dp d -> b@dp d", "D('b@dp d', 4, 6)", "lambda x: x[:1]", "ShardingError", "is [4, 6] in whole and so [2, 6] on this rank; found [1, 6]"),
        ("b@dp d -> b d", "D('b@dp d', 4, 6)", "lambda x: x", "ShardingError", "is [4, 6] in whole and so [4, 6] on this rank; found [2, 6]"),
        ("b d -> (b d)", "D('b@dp d', 4, 6)", "lambda x: x.flatten()", "ShardingError", "(b d) on the right was part of 'b' on the left, which is b@dp"),
        ("(b c) d -> b c d", "D('b@dp d', 4, 6)", "lambda x: x.unflatten(0, (2, 1))", "ShardingError", "b on the right was part of '(b c)' on the left"),
        ("b@dp d -> b@dp d", "D('b@dp d', 4, 6)", "lambda x: D('b@dp d', 4, 6)", "ShardingError", "the function returned a DTensor"),
    )],
    ("axes.shard_map(lambda x, y: x, 'b d, b d -> b d')(D('b d', 4, 6), L(4, 6))", "ShardingError", "tensor 1 among the arguments is a plain one"),
    ("axes.shard_map(lambda x: axes.psum(x, 'tq'), 'b -> b')(D('b', 4))", "MeshError", "the mesh has no axis 'tq'"),
    *[(f"axes.shard_map(torch.neg, 'n -> n', check={check})", "ShardingError", "check is True or False; found ") for check in ("1", "-1e-6", "1.0", "float('nan')", "'1e-6'", "None")],
    *[(f"axes.shard_map(lambda t: {result}, 'n -> n')({given})", "ShardingError", said, "torch.export.register_dataclass(...)", "shard_map 'n -> n'") for result, given, said in (
        ("{t}", "D('n', 4)", "the function returned a value of type set, in which a region can't see tensors"),
        ("[t, map(abs, [t])]", "D('n', 4)", "the function returned a value of type map"),
        ("{'a': t, 'b': object()}", "D('n', 4)", "the function returned a value of type object"),
        ("(t, torch.nn.Linear)", "D('n', 4)", "the function returned a value of type type"),
    )],
)
SPECS = (
    "mesh.sharding('SPEC')",
    "axes.shard(L(4, 4), 'SPEC')",
    "axes.from_local(L(4, 4), 'SPEC')",
    "axes.to_local(D('a b', 4, 4), 'SPEC')",
    "axes.zeros('SPEC', sizes=dict(a=4, b=4))",
    "axes.rand('SPEC', sizes=dict(a=4, b=4))",
    "axes.plan('SPEC', '_ _', (4, 4))",
    "axes.plan('_ _', 'SPEC', (4, 4))",
    "axes.transfer({'w': 'SPEC'}, {'w': '_ _'}, shapes={'w': (4, 4)}, source_mesh=mesh, target_mesh=mesh)",
    "axes.transfer({'w': '_ _'}, {'w': 'SPEC'}, shapes={'w': (4, 4)}, source_mesh=mesh, target_mesh=mesh)",
    "axes.shard_module(torch.nn.Linear(4, 4), {'weight': 'SPEC'})",
    "axes.constrain(D('a b', 4, 4), 'SPEC', rules=axes.Rules(a=None, b=None))",
    "axes.reshard(D('a b', 4, 4), 'SPEC')",
    "axes.reshard({'w': D('a b', 4, 4)}, {'w': 'SPEC'})",
    "axes.reshard(L(4, 4), 'SPEC -> NAMES')",
    "axes.shard_map(lambda x: x, 'SPEC -> c d')(D('a b', 4, 4))",
    "axes.shard_map(lambda x: x, 'c d -> SPEC')(D('a b', 4, 4))",
    "axes.rearrange(D('a b', 4, 4), 'SPEC -> NAMES')",
    "axes.rearrange(D('a b', 4, 4), 'NAMES -> SPEC')",
    "axes.rearrange(L(4, 4), 'SPEC -> NAMES')",
    "axes.reduce(D('a b', 4, 4), 'SPEC -> a', 'sum')",
    "axes.repeat(D('a b', 4, 4), 'NAMES -> SPEC')",
    "axes.einsum(D('a b', 4, 4), 'NAMES -> SPEC')",
    "axes.explain('SPEC -> NAMES', (4, 4))",
    "axes.softmax(D('a b', 4, 4), 'SPEC', over='a')",
    "axes.layer_norm(D('a b', 4, 4), 'SPEC', over='a')",
    "axes.nn.Einsum('NAMES, b c -> SPEC', b=4, c=4)(L(4, 4))",
    "axes.nn.dropout(L(4, 4), 0.5, 'SPEC', seed=1)",
)
"""Doors that take the text of a tensor of two dims, SPEC, and names that go with it: each says the same of a mistake."""

NUMBERS = (
    ("mesh.sharding('b@dp').local_shape((4,), rank=...)", "MeshError", "a rank is a whole number from 0"),
    ("mesh.axis('tp').ranks_of(...)", "MeshError", "a rank is a whole number from 0"),
    ("axes.Sharding.from_placements(mesh, mesh.sharding('b@dp').placements, ...)", "SizeError", "ndim is a whole number from 0"),
    ("axes.Mesh('dp=2', ranks_per_node=...)", "MeshError", "ranks_per_node is a whole number from 1"),
    ("axes.launch(print, ...)", "AxesError", "world size is a number of processes"),
    ("axes.simulate(..., rank=0).__enter__()", "AxesError", "simulate makes a world of 1 to 4,194,304 ranks"),
    ("axes.simulate(4, rank=...).__enter__()", "AxesError", "a world of 4 has ranks 0 to 3, whole numbers"),
)
DOORS = (
    *[(door.replace("SPEC", "a@tp a").replace("NAMES", "a a"), "ExpressionError", "'a' stands twice in one tensor", "^") for door in SPECS],
    *[(door.replace("SPEC", "a@tp b@tp").replace("NAMES", "a b"), "ShardingError", "'tp' is used twice") for door in SPECS],
    *[row for program, error, said in NUMBERS for row in told(program, error, [(wrong, said) for wrong in ("1.0", "'1'", "True", "[2]")])],
)
# fmt: on

ROWS: tuple[tuple[str, ...], ...] = (
    *((f"axes.{program}", *rest) for program, *rest in COLLECTIVES),
    *SIZES,
    *FUNCTIONS,
    *DROPPED,
    *MOVED,
    *PLANNED,
    *CROSSED,
    *BLOCKS,
    *EINOPS,
    *REGIONS,
    *DOORS,
)
