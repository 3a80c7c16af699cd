"""What is wrong with layouts, meshes, text, sizes, shardings, plans, rules and groups; `test_refusals` says how these run.

Most rows are written in families: a program with a place for the mistake, and the mistakes. A row of text ends with the carets
that stand under its place.
"""

from __future__ import annotations

M = "axes.Mesh('dp=2 cp=2 tp=2', 'fsdp = dp cp', 'world = dp cp tp')"
CUT = "axes.Mesh('a=2 b=3', '(a b) = c d', c=3)"
THREE = "axes.Mesh('dp=2 cp=3 tp=4', 'fsdp = dp cp')"
DP8 = "axes.Mesh('dp=8 tp=2')"
LARGEST = 2**48

DECLARATIONS = (
    ("   ", "   ^", "expected an axis name, found the end"),
    ("dp=2 tp dp=2", "        ^^^^", "'dp' is declared twice"),
    ("dp=0", "   ^", "a size is a whole number from 1"),
    ("dp=-2", "   ^^", "a size is a whole number from 1"),
    (f"dp={LARGEST + 1}", "   " + "^" * 15, "a size is a whole number from 1"),
    ("dp=x", "  ^", "found '='"),
    ("2 dp", "^", "found '2'"),
    ("2dp", "^^^", "a name doesn't start with a digit"),
    ("dp _ tp", "   ^", "found '_'"),
    ("dp (tp)", "   ^", "found '('"),
    ("dp-tp", "  ^", "'-' has no meaning here"),
    ("dp.tp", "  ^", "'.' has no meaning here"),
    ("dp ~", "   ^", "'~' is reserved"),
    ("dp;tp", "  ^", "';' is reserved"),
    ("dp:2", "  ^", "':' is reserved; a size is written h=8"),
    ("[dp tp]", "^", "'[' is reserved; write ( )"),
    ("dp tp h²", "      ^^", "a name is an identifier of Python: letters, digits and underscores"),
    ("dp µ", "   ^", "letters, digits and underscores; write 'μ'"),
)
EQUATIONS = (
    ("a", " ^", "expected '=', found the end"),
    ("= a", "^", "expected an axis name, found '='"),
    ("a =", "   ^", "expected an axis name, found the end"),
    ("a = b = c", "      ^", "expected the end of the equation, found '='"),
    ("a b) = c", "   ^", "expected '=', found ')'"),
    ("a = (b (c))", "       ^", "groups don't nest"),
    ("() = a", " ^", "expected an axis name in the group, found ')'"),
    ("a = (b) c", "        ^", "expected the end of the equation, found 'c'"),
    ("a = b b", "      ^", "'b' stands twice in one product"),
    ("a = 4", "     ^", "expected '=', found the end"),  # a=4 is an item
    ("x = dp y", "       ^", "one side of an equation has only known names; 'y' isn't known"),
    ("x = dpp", "    ^^^", "'dpp' isn't known; did you mean 'dp'?"),
)
EXPRESSIONS = (
    ("a -> b -> c", "       ^^", "found '->'"),
    ("(a (b c)) -> a", "   ^", "groups don't nest"),
    ("x=(a b) -> a b", "^", "a group is named on the right of '->' only"),
    ("a a -> a", "  ^", "'a' stands twice on one side"),
    ("... ... -> a", "    ^^^", "'...' stands once on a side"),
    ("a@b -> a", " ^", "found '@'"),
    ("(a ...) -> a", "   ^^^", "found '...'"),
    ("dp -> dp", "^^^", "the mesh has 2 axes (dp tp), the left side describes 1"),
    ("dp tp cp -> dp tp cp", "^^^^^^^^^", "the mesh has 2 axes (dp tp), the left side describes 3"),
    ("tp dp -> dp tp", "^^", "the axis in this place is 'dp', not 'tp'"),
    ("dp_ tp -> dp tp", "^^^", "the axis in this place is 'dp', not 'dp_'; did you mean 'dp'?"),
    ("dp tp -> dp", "      ^^", "'tp' must be on the right, too; for a sub-mesh write mesh[\"dp\"]"),
    ("dp tp -> dp tp cp", "               ^^", "'cp' isn't on the left; a new axis has size one, like pp=1"),
    ("dp tp -> dp tp cp=2", "               ^^^^", "'cp' isn't on the left; a new axis has size one, like pp=1"),
    ("dp tp -> ... dp tp", "         ^^^", "'...' stands on both sides, or on none"),
    ("... tp -> tp", "^^^", "'...' stands on both sides, or on none"),
)
SPECS = (
    ("b s@", "    ^", "expected an axis name, '*' or '(' after '@', found the end"),
    ("b s@tp@cp", "      ^", "found '@'"),
    ("@tp", "^", "expected a dim name, a number, '_', '...' or '(', found '@'"),
    ("b s@(cp", "       ^", "expected ')', found the end"),
    ("b s@(cp (tp))", "        ^", "groups don't nest"),
    ("s@(* *)", "  ^^^^^", "'*' stands once in a place"),
    ("b h d)", "     ^", "found ')'"),
    ("b ((h) d)", "   ^", "groups don't nest"),
    ("(h@tp d)@dp e", "^^^^^^^^^^^", "a group has '@' inside or outside, not both"),
    ("(_ d)", " ^", "found '_'"),
    ("... ...", "    ^^^", "'...' stands once in a spec"),
    ("b | tp", "    ^^", "expected one of sum, mean, max, min, same with '@', or '*', after '|', found 'tp'"),
    ("b | sum", "       ^", "expected '@' and the axes over which 'sum' is pending, found the end"),
    ("b | sum@*", "        ^", "write '| *' for whatever is pending"),
    ("b | * sum@tp", "      ^^^^^^", "'*' stands alone after '|'"),
    ("b=0", "  ^", "a size is a whole number from 1"),
    ("_=3", " ^", "found '='"),
    ("b b", "  ^", "dim 'b' stands twice"),
    ("b s, d", "^^^^^^", "expected one spec, found 2"),
    ("b s -> s b", "    ^^", "expected one spec, found an expression with '->'"),
)

MESHES = (
    ("axes.Mesh('dp=2 tp=2', 'dp = tp')", "MeshError", "'dp' already is the layout 2:2, not 2:1; take another name\n  dp = tp\n  ^^"),
    ("axes.Mesh('dp=2 tp=2', '(dp tp) = a dp')", "MeshError", "'dp' already is the layout 2:2, not 2:1; take another name\n  (dp tp) = a dp\n              ^^"),
    ("axes.Mesh('a=2 b=3', '(a b) = c d', 'x = a d', c=3)", "MeshError", "overlap or don't divide"),
    ("axes.Mesh('dp=2', ranks_per_node=0)", "MeshError", "ranks_per_node is a whole number from 1; found 0"),
    ("mesh['dp', 'dp']", "MeshError", "a mesh has each axis once; found 'dp' twice in (dp, dp)"),
    ("mesh.get('dp', 'dp')", "MeshError", "a mesh has each axis once"),
    ("mesh[()]", "MeshError", "a mesh is indexed by one or more axis names; found ()"),
    ("mesh[0]", "MeshError", "a mesh is indexed by one or more axis names; found 0"),
    (f"{M}['fsdp', 'cp']", "MeshError", "axes 'fsdp' (4:2) and 'cp' (2:2) share ranks"),
    (f"{CUT}['a', 'c']", "MeshError", "axes 'a' (2:3) and 'c' (3:2) share ranks"),
    (f"{CUT}['a', 'd']", "MeshError", "can't be in one mesh, since their layouts have no common digits: 2:3, 2:1"),
    ("axes.Mesh('dp=2 tp=2').at(9)['tp'].ranks", "MeshError", "isn't in any of the meshes of", "mesh.at(rank)"),
    ("axes.Mesh('dp=2 tp=2', 'y = x', 'x = dp tp')", "ExpressionError", "isn't known"),
    ("axes.Mesh('dp=8').define('y = dp=2')", "MeshError", "'dp' has size 8 in the mesh; found dp=2"),
    (f"{DP8}.rearrange('dp tp -> dp=(dp tp)')", "MeshError", "'dp' already is the layout 8:2, not 16:1; take another name\n  dp tp -> dp=(dp tp)\n           ^^^^^^^^^^"),
    (f"{THREE}.rearrange('dp cp tp -> fsdp=(cp dp) tp')", "MeshError", "'fsdp' already is the layout 6:4, not (3:4, 2:12)"),
    (f"{DP8}.define('(dp) = p q', p=2).rearrange('(q p) tp -> p q tp')", "MeshError", "'q' already is the layout 4:2, not 4:4"),
    ("axes.Mesh('a=2 b=3', 'x = b a')['x',].rearrange('(p=2 q=3) -> p q')", "SizeError", "(3:1, 2:3) doesn't split into (2, 3): it cuts 2:3"),
    ("axes.Mesh('dp=2 tp=1').rearrange('(tp dp) ... -> tp dp ...')", "MeshError", "a mesh has each axis once; found 'tp' twice in (tp, dp, tp)"),
    (f"{DP8}.rearrange('dp tp -> x=(dp) x=(tp)')", "MeshError", "'x' already is the layout 8:2, not 2:1; take another name\n  dp tp -> x=(dp) x=(tp)\n                  ^^^^^^"),
    *((f"axes.Mesh('dp=2').{use}", "MeshError", "a mesh that is bound to torch.distributed", "axes.init_mesh") for use in ("device_mesh", "create_groups()", "axis('dp').group")),
    *((f"axes.Mesh('dp=2').at({rank})", "MeshError", "a rank is a whole number from 0; found") for rank in ("-1", "1.0", "None", "True", "2**48")),
    *((f"axes.use_mesh({wrong}).__enter__()", "MeshError", "an axes mesh, made by") for wrong in ("'dp=2'", "3")),
    *(
        (f"axes.Mesh('dp', ranks={ranks})", "MeshError", said)
        for ranks, said in (
            ("[]", "at least one rank"),
            ("[0, 1, 1, 2]", "found 1 more than once"),
            ("[*range(200_000), 199_999]", "found 199999 more than once"),
            ("[0, -1]", "all of them from 0 and below 2**48"),
            ("[0, 1.0]", "distinct integers; found"),
            ("[0, True]", "distinct integers; found"),
            ("5", "distinct integers; found 5"),
            ("'0123'", "found '0123'"),
            ("{0, 1}", "found {0, 1}"),
            ("{0: 1}", "found {0: 1}"),
            ("torch.arange(4).view(2, 2).numpy()", "distinct integers; found"),
            ("range(10**30)", "all of them from 0 and below 2**48"),
            ("[0, 10**5000, -(10**5000)]", "too long to show"),
        )
    ),
)  # fmt: skip
LAYOUTS = (
    *((f"axes.Layout({of})", "MeshError", said) for of, said in (
        ("(2,), ()", "as many strides as sizes"),
        ("(0,), (1,)", "at least 1"),
        ("(2, 2), (1, 1)", "overlap or don't divide"),
        ("(2,), (1.0,)", "whole numbers"),
        ("(2**64,), (1,)", "63 bits"),
    )),
    *((f"axes.Layout((8,), (1,)).offset({at})", "MeshError", f"coordinate {at} is outside 0..7") for at in (-1, 8)),
    *((f"axes.Layout((8,), (1,)).split({sizes})", "SizeError", "has size 8") for sizes in ((), (3,), (4, 4), (8, 0), (-2, -4))),
    ("axes.plan('a', 'a', (4,), axes.Mesh('x=2'), cost_model='fast')", "ShardingError", "cost_model is an axes.CostModel; found 'fast'"),
    ("axes.Layout((2, 3), (6, 1)).split((3, 2))", "SizeError", "it cuts 3:1"),
    ("axes.Layout((4,), (2,)).complement(12)", "MeshError", "12:1 and 4:2 have no common digits: 12 isn't a multiple of 8"),
    ("axes.Layout((2,), (1,)).coordinate(-1)", "MeshError", "a position is a whole number from 0; found -1"),
)  # fmt: skip
SIZES = (
    ("axes.Mesh('dp tp=3', ranks=range(8))", "SizeError", "8 doesn't divide by 3:  dp * tp=3 = 8    (the axes multiply to the 8 ranks; a size that is left out follows)"),
    ("axes.Mesh('dp=2 tp=2', ranks=range(8))", "SizeError", "dp=2 * tp=2 is 4, not 8    (the axes multiply to the 8 ranks; a size that is left out follows)"),
    ("axes.Mesh('dp=16 tp', ranks=range(8))", "SizeError", "8 doesn't divide by 16:  dp=16 * tp = 8"),
    ("axes.Mesh('dp tp', ranks=range(8))", "SizeError", "the sizes of 'dp' and 'tp' don't follow from  dp * tp = 8", "give all but one of them, like dp=2"),
    ("axes.Mesh('dp tp=2')", "SizeError", "the size of 'dp' is open: give it, like dp=2, or the number of ranks"),
    ("axes.Mesh('dp=4 tp=2', '(dp tp) = a ep', ep=3)", "SizeError", "8 doesn't divide by 3:  dp=4 * tp=2 = a * ep=3    ((dp tp) = a ep)"),
    ("axes.Mesh('dp=4 tp=2', 'x = dp tp', x=4)", "SizeError", "4 isn't 8:  x=4 = dp=4 * tp=2    (x = dp tp)"),
    ("axes.Mesh('dp=2', dp=4)", "SizeError", "'dp' is given two sizes: 4 and 2"),
    ("axes.Mesh('dp', sizes={'dp': 3}, dp=2)", "SizeError", "'dp' is given two sizes: 2 and 3"),
    (f"{DP8}.rearrange('(a b) tp -> a b tp')", "SizeError", "the sizes of 'a' and 'b' don't follow from  a * b = 8"),
    (f"{DP8}.rearrange('(a=3 b) tp -> a b tp')", "SizeError", "8 doesn't divide by 3:  a=3 * b = 8    (axis 'dp' has size 8)"),
    (f"{DP8}.rearrange('dp tp -> x=(dp tp)', x=8)", "SizeError", "8 isn't 16:  x=8 = dp=8 * tp=2    (x=(dp tp))"),
    ("mesh.sharding('(h=4@tp d)', h=2)", "SizeError", "'h' is given two sizes: 2 and 4"),
    (f"axes.Mesh('a={2**24} b={2**24} c={2**24}', 'x = a b c')", "SizeError", f"a mesh has at most {LARGEST} ranks; its axes have {2**72}"),
    (f"axes.Mesh('a={2**24} b={2**24} c={2**24}')", "SizeError", f"a mesh has at most {LARGEST} ranks; its axes have {2**72}"),
    ("axes.Mesh(' '.join(f'a{i}=1' for i in range(40)), ranks=range(2))", "SizeError", "a0=1 * a1=1", "a11=1 * ... is 1, not 2 "),
    ("axes.Mesh('dp_shard tp', dp_shrad=2)", "SizeError", "a size is given for 'dp_shrad', which is no option and isn't in the expression; did you mean 'dp_shard'?"),
    ("axes.Mesh('dp tp', qqq=2)", "SizeError", "a size is given for 'qqq', which is no option and isn't in the expression; known: dp, tp"),
    ("axes.Mesh('dp tp', sizes={3: 2})", "SizeError", "a size is given for '3', which"),
    (f"{DP8}.define('x = dp', y=2)", "SizeError", "a size is given for 'y', which"),
    ("mesh.sharding('heads', head=2)", "SizeError", "a size is given for 'head', which is no option and isn't in the spec; did you mean 'heads'?"),
    *((f"axes.Mesh('x=8').rearrange('(a b) -> a b', sizes={sizes})", "SizeError", "sizes is a mapping from names to sizes; found") for sizes in ("5", "'ab'", "[('a', 2)]", "{'a'}")),
    *((f"axes.Mesh('x=8').rearrange('(a b) -> a b', a={size})", "SizeError", "'a'") for size in ("0", "-2", "2.0", "'2'", "True", str(LARGEST + 1), "10**5000", "[2]", "float('nan')")),
)  # fmt: skip
SHARDINGS = (
    *((f"{M}.sharding({spec!r})", kind, said) for spec, kind, said in (
        ("b@ddp", "MeshError", "the mesh has no axis 'ddp'; did you mean 'dp'?"),
        ("b@dp s@dp", "ShardingError", "axis 'dp' is used twice: in b@dp and in s@dp; each axis splits one place or is pending"),
        ("b@(dp dp)", "ShardingError", "axis 'dp' is used twice"),
        ("b@dp | sum@dp", "ShardingError", "axis 'dp' is used twice: in b@dp and in sum@dp"),
        ("b@fsdp s@cp", "ShardingError", "axes 'fsdp' and 'cp' share ranks: in b@fsdp and in s@cp"),
        ("...", "ShardingError", "'...' stands for dims of a tensor; without one, write every dim (or '_')"),
        ("(... d)", "ShardingError", "'...' stands for whole dims that aren't split"),
        ("b s@(cp *) d", "ShardingError", "'*' is what a tensor has"),
        ("b | *", "ShardingError", "'| *' is whatever arises; a sharding says what is pending, like '| sum@tp'"),
        ("b | same@tp", "ShardingError", "'same' is about gradients of plain tensors"),
    )),
    ("mesh.sharding('b s@(cp *) d')", "ShardingError", "\n  b s@(cp *) d\n      ^^^^^^"),
    (f"{M}['dp', 'tp'].sharding('b@fsdp')", "ShardingError", "axis 'fsdp' isn't made of the axes of"),
    (f"{CUT}.sharding('x@a y@d')", "ShardingError", "axes of one sharding are digits of the same factorization; 2:3 and 2:1 have no common digits"),
    *((f"{M}.sharding({spec!r}).local_shape({shape})", kind, said) for spec, shape, kind, said in (
        ("b s", (4,), "ShardingError", "the spec 'b s' has 2 dims, the tensor 1: [4]"),
        ("s=4", (5,), "SizeError", "the sizes don't multiply to the dim:  s=4 = 5    (dim of [5] in 's=4')"),
        ("(a=2 b@tp)", (7,), "SizeError", "the sizes don't multiply to the dim:  (a=2 b@tp) = 7"),
        ("(a=4 b=2)@tp", (6,), "SizeError", "the sizes don't multiply to the dim:  (a=4 b=2)@tp = 6"),
        ("(a=2 h@tp)", (6,), "ShardingError", "3 doesn't divide into 2 parts: h@tp is split inside a group"),
        ("(a@tp b)", (6,), "SizeError", "more than one size is missing in  (a@tp b) = 6"),
        ("b", (-1,), "SizeError", "a shape is whole numbers from 0; found (-1,)"),
    )),
    ("mesh.sharding('b@dp').local_indices((4,), 8)", "MeshError", "isn't one of the ranks of"),
    *((f"mesh.sharding('b@dp').local_indices((4,), {rank})", "MeshError", "a rank is a whole number from 0; found") for rank in (-1, 10**30)),
    *((f"{mesh}.sharding({spec!r}).placements", "ShardingError", said) for mesh, spec, said in (
        ("axes.Mesh('dp=4 tp=2', '(dp) = a b', a=2)", "s@a t@b", "'a' isn't a product of whole axes of Mesh('dp=4 tp=2'), so DTensor can't express it"),
        ("axes.Mesh('dp=2 tp=8', '(tp) = a b c', a=2, b=2)", "s@b", "use a sub-mesh that has these axes: mesh['b']"),
        (M, "(qkv h@tp d=2)", "DTensor needs the sizes of the factors in front of 'tp' in (qkv h@tp d=2); write them: qkv=... h=..."),
        (M, "(qkv=3 h@(dp tp) d)", "two axes on a dim with an unsplit factor in front; make the factor in front a dim of its own"),
        (M, "s@(cp dp) (qkv=3 h@tp d=2)", "DTensor can't gather s@(cp dp), whose axes aren't in the mesh's order, beside (qkv=3 h@tp d=2)"),
    )),
    *((f"from torch.distributed.tensor import *; axes.Sharding.from_placements(mesh, {placements}, {ndim})", "ShardingError", said) for placements, ndim, said in (
        ("[Shard(0)]", 1, "has 3 axes; found 1 placements"),
        ("[Shard(2), Replicate(), Replicate()]", 2, "is about dim 2 of a tensor with 2 dims"),
        ("[Partial('product'), Replicate(), Replicate()]", 2, "a pending 'product' has no name in axes; resolve it first"),
    )),
    ("axes.shard(L(5), 's@(tp cp)')", "ShardingError", "uneven parts, which DTensor on", "would cut in another way; make the size a multiple of 4"),
)  # fmt: skip
PLANS = (
    *((f"axes.plan({source!r}, {target!r}, (8, 8))", "ShardingError", said, *more) for source, target, said, *more in (
        ("s d", "s d | sum@tp", "pending over tp, where the source has nothing", "\n  source  s d\n  target  s d | sum@tp"),
        ("s d | sum@cp", "s d | sum@(cp tp)", "the target has sum pending over tp, where the source has nothing"),
        ("s d | max@tp", "s d | sum@tp", "sum pending over tp, where the source has max"),
        ("s d | sum@cp max@tp", "s d | sum@cp", "innermost first"),
        ("s d | sum@cp max@tp", "s d | max@tp sum@cp", "keep their order"),
        ("s d", "s d e", "has 3 dims"),
    )),
    ("axes.plan('s@tp', 's@(dp tp)', (8,), source_mesh=mesh['tp'], target_mesh=mesh)", "ShardingError", "axes.from_local on the target's mesh"),
    ("axes.plan('s@tp', 's@x', (8,), source_mesh=mesh['tp'], target_mesh=axes.Mesh('x=2', ranks=range(8, 10)))", "ShardingError", "must be whole"),
    ("axes.plan('s | sum@tp', 's | sum@x', (8,), source_mesh=mesh, target_mesh=axes.Mesh('x=2', ranks=range(8, 10)))", "ShardingError", "other axes"),
    ("axes.plan('d', '(h=3@tp k)', (12,))", "ShardingError", "3 doesn't divide into 2 parts: h=3@tp is split inside a group"),
    ("axes.plan('d | mean@tp', 'd', (8,), dtype='int64')", "ShardingError", "a mean of int64"),
    ("axes.plan('d | max@tp', 'd', (8,), dtype='complex64')", "ShardingError", "no order"),
    ("axes.plan('d', 'd', (8,), dtype='float7')", "ShardingError", "unknown dtype"),
)  # fmt: skip
RULES = (
    *((f"axes.Rules({rules}).spec({rest})", kind, said) for rules, rest, kind, said in (
        ("batch='dp'", "'batch sequence', mesh", "ShardingError", "no rule is about 'sequence'"),
        ("seq='cp'", "'sec', mesh", "ShardingError", "did you mean 'seq'"),
        ("batch='pp'", "'batch', mesh", "MeshError", "declare it with size 1 ('pp=1')"),
        ("batch=('fsdp', 'dp')", f"'batch', {M}", "MeshError", "which share ranks"),
        ("h='tp', k=None", "'(h k)', mesh, (8,)", "SizeError", "give all but one of them, like h=2"),
        ("h='tp'", "'h', mesh, (8, 2)", "ShardingError", "has 1 dims, the tensor 2"),
        ("h='tp'", "'h', mesh, (8,), z=2", "SizeError", "isn't in the expression"),
    )),
    *((f"axes.Rules({rules})", "ShardingError", said) for rules, said in (
        ("batch=3", "an axis, a tuple of axes, or None; found 3"),
        ("batch=('dp', 'dp')", "has an axis twice"),
        ("[('batch', 'dp', 'tp')]", "a rule is a pair"),
        ("[('a b', 'dp')]", "a logical name is a name"),
        ("[('...', 'dp')]", "its axes are None"),
    )),
    ("without_mesh(axes.Rules(h='tp').spec, 'h')", "MeshError", "Rules.spec needs a mesh"),
    ("axes.use_rules({'h': 'tp'}).__enter__()", "ShardingError", "use_rules takes axes.Rules; found dict"),
)  # fmt: skip
FUSE = "axes.LayoutRules({('*.q', '*.k', '*.v'): ('*.qkv', '(h k) d, (g k) d, (g k) d -> (h k + g k + g k) d')})"
QKV = "{'0.q': (32, 5), '0.k': (8, 5), '0.v': (8, 5), "
APPLIED = (
    (FUSE, "{'0.q': (32, 5), '0.k': (8, 5)}", "ShardingError", "takes 0.q together with 0.v, which isn't there"),
    (FUSE, QKV + "'0.v': (8, 6)}", "SizeError", "'d' is 5, found 6"),
    (FUSE, QKV + "'0.v': (12, 5)}", "SizeError", "'(g k)' is 8, found 12"),
    (FUSE, QKV + "'0.q': (32, 5, 1)}", "SizeError", "'(h k) d' has 2 dims; the tensor has 3"),
    (FUSE, QKV + "'0.qkv': (1,)}", "ShardingError", "two tensors would be '0.qkv': 0.q and 0.qkv"),
    (FUSE, QKV + "'x': (-1,)}", "SizeError", "a shape is whole numbers from 0; found (-1,)"),
    (FUSE, "[1]", "ShardingError", "shapes are a mapping from names to shapes"),
    ("{'layers.*.up.w': '*'}", "{'layers.0.upp.w': (1,)}", "ShardingError", "did you mean 'layers.*.upp.w'?"),
    ("{'*.w': '*.x', '0.w': 'y'}", "{'0.w': (1,)}", "ShardingError", "0.w -> y: behind a wider one, *.w -> *.x"),
    ("{'a': 'x', 'b': 'x'}", "{'a': (1,), 'b': (1,)}", "ShardingError", "two tensors would be 'x': a and b"),
    ("{'a': ('x', 'x')}", "{'a': (1,)}", "ShardingError", "makes 'x', twice"),
    ("{'*.*': '**'}", "{'a.b': (1,)}", "ShardingError", "reads as another rule's"),
    ("{None: 'b', 'a': 'b'}", "{'a': (2,)}", "ShardingError", "'b' would keep its values, by the layout rules, and be"),
    ("{'{e}.up': 'up'}", "{'1000000000.up': (3, 4)}", "ShardingError", "match no tensor"),
    (
        "{'{e}.up': 'up'}",
        "{'0.up': (3, 4), '2.up': (3, 4)}",
        "ShardingError",
        "takes 0.up together with 1.up, which isn't there",
    ),
    ("{'{e}.up': 'up'}", "{'0.up': (3, 4), '1.up': (3, 5)}", "ShardingError", "0.up is [3, 4] and 1.up is [3, 5]"),
    ("{'q': ('q', '(h two=2) d -> (two h) d')}", "{'q': (7, 5)}", "SizeError", "7 doesn't divide by 2"),
    ("{'b?': 'x', 'c?': 'x'}", "{'b': (3,), 'c': (3,)}", "ShardingError", "two tensors would be 'x': b and c"),
)
TABLES = (
    ("['ab']", "ShardingError", "layout rules are a mapping from names to names, or pairs; found ['ab']"),
    ("{'a b': 'c'}", "ShardingError", "a layout rule is names: names, or names: (names, expression)", "found 'a b': 'c'"),
    ("{3: 'a'}", "ShardingError", "found 3: 'a'"),
    ("{'a': ()}", "ShardingError", "found 'a': ()"),
    ("{None: None}", "ShardingError", "None for names on one side alone; found None: None"),
    ("{('b', 'c'): 'a'}", "ShardingError", "(names, expression)", "found ('b', 'c'): 'a'"),
    ("{('b', 'c'): ('a', 'x y -> x y')}", "ExpressionError", "1 tensors stand for 2 names, of the rule b, c -> a"),
    ("{('b', 'c'): ('a', 'x d, y d -> x d')}", "ExpressionError", "the left side is 2 tensors, blocks counted"),
    ("{'b': ('a', 'x@tp d -> x d')}", "ExpressionError", "write '@' and '|' in their specs"),
    ("{'b': ('a', 'x d | sum@tp -> x d')}", "ExpressionError", "write '@' and '|' in their specs"),
    ("{'b.{e}': ('a', 'x d -> x d')}", "ExpressionError", "'b.{e}' stands for tensors that are one, whose first dims are the numbers in the names, each once: write 'e ...'"),
    ("{'b.{e}': ('a', '... e -> e ...')}", "ExpressionError", "whose first dims are the numbers in the names, each once: write 'e ...'"),
    ("{'b.{e}.{e}': 'a'}", "ExpressionError", "each once: write 'e ...'"),
    ("{'b.*': 'a'}", "ShardingError", "write {e} for a number that becomes a dim e"),
    ("{'a': ('b', 'x -> ')}", "ExpressionError", "'x' is no name on both sides"),
    ("{'a': ('b', 'x -> 2 x')}", "ExpressionError", "'2' is no name on both sides", "takes no number but 1"),
    ("{'a': ('b', 'x -> x y')}", "ExpressionError", "'y' is no name on both sides; a layout rule keeps all names"),
    ("{'q': ('q', '(h two=2) d -> (two h) d')}, two=3", "SizeError", "'two' is given two sizes: 3 and 2"),
    ("{'q': ('q', '(h two=2) d -> (two h) d')}, hh=3", "SizeError", "a size is given for 'hh'", "did you mean 'h'"),
)  # fmt: skip
GROUPS = (
    *((f"axes.init_mesh('dp=2 tp=4', 'ep = tp', device_type='cpu', options={options})", "MeshError", *said) for options, *said in (
        ("{'tpp': axes.GroupOptions()}", "did you mean 'tp'"),
        ("{'tp': 'gloo'}", "found 'gloo'"),
        ("{'tp': axes.GroupOptions('nonsense')}", "torch has no backend 'nonsense' that serves 'cpu'"),
        ("{'tp': axes.GroupOptions(timeout=5), 'ep': axes.GroupOptions(timeout=6)}", "'tp' and 'ep' are the same ranks and share one group", "timeout=0:00:05 and timeout=0:00:06", "axes.init_mesh('ep', options={'ep': GroupOptions(..., lane='ep')})"),
        ("['tp']", "mapping"),
    )),
    *((f"axes.GroupOptions(timeout={wrong})", "MeshError", "positive timedelta or number of seconds") for wrong in ("0", "-1", "True", "'5'", "float('nan')", "[]")),
    *((f"axes.init_mesh('dp', device_type='cpu', ranks={ranks})", "MeshError", said) for ranks, said in (("[7, 8]", "world has 8 ranks"), ("[7, 7]", "more than once"), ("7", "sequence of distinct integers"))),
    ("axes.Mesh('dp=2').abort()", "MeshError", "has no processes"),
    ("axes.Mesh.from_device_mesh(torch.ones(2))", "MeshError", "found Tensor"),
    *((f"axes.simulate({world}).__enter__()", "AxesError", said) for world, said in (("0", "1 to 4,194,304 ranks, a whole number; found 0"), ("10**12", "found 1000000000000"), ("8.0", "found 8.0"), ("True", "found True"), ("8, 8", "ranks 0 to 7, whole numbers; found 8"), ("8, -1", "found -1"), ("8, None", "found None"))),
)  # fmt: skip

ROWS: tuple[tuple[str, ...], ...] = (
    *(
        (f"{call}{text!r})", "ExpressionError", said, f"\n  {text if len(text) < 70 else ''}", f"\n  {carets}")
        for call, rows in (
            ("axes.Mesh(", DECLARATIONS),
            ("axes.Mesh('dp=2 tp=2', ", EQUATIONS),
            (f"{DP8}.rearrange(", EXPRESSIONS),
            ("mesh.sharding(", SPECS),
        )
        for text, carets, said in rows
    ),
    *((f"{call}({wrong})", "ExpressionError", "an expression is text; found") for call in ("axes.Mesh", "mesh.rearrange", "mesh.define", "mesh.sharding") for wrong in ("None", "b'dp'", "['dp']")),
    ("mesh.sharding('a ' * 5000 + ']' + ' b' * 5000)", "ExpressionError", "']' is reserved", "\n  ...", "] b", "...\n  ", "^"),
    *MESHES, *LAYOUTS, *SIZES, *SHARDINGS, *PLANS, *RULES,
    *((f"{table if 'LayoutRules' in table else f'axes.LayoutRules({table})'}.applied({shapes})", kind, said) for table, shapes, kind, said in APPLIED),
    *((f"axes.LayoutRules({table})", kind, *said) for table, kind, *said in TABLES),
    *GROUPS,
)  # fmt: skip
