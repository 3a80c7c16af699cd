"""Mistakes that need no ranks, of transfers, links, launching, pictures, explanations and traces: see `tests.test_refusals`.

A row: a program, run in `axes.simulate(8)` with the names `axes`, `torch` and `mesh`; the class of its error; a part of what it says.
"""

from __future__ import annotations

TRANSFER = "axes.transfer({'a': 'd'}, {'a': 'd'}, mesh, mesh, {'a': (2,)}"
RULES = "axes.transfer({'a': 'd'}, {'b': 'd'}, mesh, mesh, {'a': (4,)}, rules="
EXPLAIN = "axes.explain('b s@tp -> b s', (4, 8), mesh='tp=2'"

ROWS = (
    # transfers
    ("axes.transfer({'a': 'd'}, {'b': 'd'}, mesh, mesh, {'a': (2,)})", "ShardingError", "targets lack 'a', which sources become; known: b; both sides have the same names"),
    ("axes.transfer({'a': 'd'}, {'a': 'd'}, mesh, mesh, {})", "ShardingError", "shapes lacks 'a'"),
    ("axes.transfer({'a': 'd'}, {'a': 'd'}, mesh, mesh)", "ShardingError", "shapes of axes.transfer map a name"),
    ("axes.transfer(['d'], {'a': 'd'}, mesh, mesh, {})", "ShardingError", "sources of axes.transfer map a name"),
    ("axes.transfer({'a': 'd'}, {'a': 3}, mesh, mesh, {'a': (2,)})", "ShardingError", "a tensor lies by a spec"),
    ("axes.transfer({'a': 'd'}, {'a': 'd'}, {'b': mesh}, mesh, {'a': (2,)})", "MeshError", "no pattern of source_mesh"),
    ("axes.transfer({'a': 'd'}, {'a': 'd'}, {1: mesh}, mesh, {'a': (2,)})", "ShardingError", "map patterns of names"),
    ("without_mesh(axes.transfer, {'a': 'd'}, {'a': 'd'}, None, None, {'a': (2,)})", "MeshError", "axes.transfer needs a mesh"),
    ("axes.transfer({'a': 'd@tp'}, {'a': 'd'}, mesh['tp'], mesh, {'a': (4,)})", "MeshError", "is another one on each rank"),
    ("axes.transfer({'a': 'd | sum@tp'}, {'a': 'd'}, mesh, mesh, {'a': (2,)})", "ShardingError", "pending"),
    ("axes.transfer({'a': 'd e'}, {'a': 'd'}, mesh, mesh, {'a': (2,)})", "ShardingError", "of the tensor 'a', [2]"),
    (f"{TRANSFER}, bucket_mb=0)", "SizeError", "bucket_mb is"),
    (f"{TRANSFER}, h=2)", "SizeError", "a size is given for 'h'"),
    (f"{TRANSFER}, dtype={{'b': 'float32'}})", "ShardingError", "'b' of dtype= matches no target"),
    (f"{TRANSFER}).at(1.5)", "MeshError", "a rank is a whole number"),
    ("m = axes.Mesh('x=2'); axes.transfer({'a': 'd'}, {'a': 'd'}, m, m, {'a': (2,)})({})", "MeshError", "have no processes"),
    # by layout rules
    (f"{RULES}{{'a': 'c'}})", "ShardingError", "targets lack 'c', which sources become"),
    ("axes.transfer({'a': 'd'}, {'b': 'd', 'c': 'd'}, mesh, mesh, {'a': (4,)}, rules={'a': 'b'})", "ShardingError", "no source becomes 'c' of targets"),
    (f"{RULES}{{'x': 'b'}})", "ShardingError", "layout rules that match no tensor"),
    (f"{RULES}['ab'])", "ShardingError", "layout rules are a mapping"),
    ("axes.transfer({'a': 'd'}, {'b': 'd e'}, mesh, mesh, {'a': (4,)}, rules={'a': 'b'})", "ShardingError", "of the tensor 'b', [4]"),
    (f"{RULES}{{'a': ('b', '(h k) -> (k h)')}})", "SizeError", "the sizes of 'h' and 'k' don't follow"),
    (f"{RULES}{{'a': ('b', '(h k) -> (k h)')}}, h=3)", "SizeError", "3"),
    (f"{RULES}axes.LayoutRules({{'a': ('b', '(h k) -> (k h)')}}, h=4), h=2)", "SizeError", "'h' is given two sizes: 4 and 2"),
    ("x = torch.ones(4); axes.transfer({'a': 'd', 'c': 'd'}, {'b': 'd'}, mesh, mesh, {'a': x, 'c': x.double()}, rules={('a', 'c'): ('b', 'd, d -> (d + d)')})", "ShardingError", "say which it becomes"),
    # launching
    ("axes.launch(abs, 0)", "AxesError", "1 to 256 processes on this machine, not 0"),
    ("axes.launch(abs, 10**9)", "AxesError", "axes.simulate makes a world of any size"),
    ("axes.launch(abs, 2.0)", "AxesError", "a number of processes, not 2.0"),
    ("axes.launch(abs, True)", "AxesError", "a number of processes, not True"),
    ("axes.launch('abs', 2)", "AxesError", "a function to run on every rank, not 'abs'"),
    ("axes.launch(abs, 2, device_type='tpu')", "AxesError", "device types 'cpu' or 'cuda', not 'tpu'"),
    ("axes.launch(abs, 99, device_type='cuda')", "AxesError", "99 ranks need a GPU each, and torch finds"),
    ("axes.launch(abs, 2, timeout=0)", "AxesError", "None or a positive number of seconds, not 0"),
    ("axes.launch(abs, 2, timeout=float('nan'))", "AxesError", "not nan"),
    ("axes.launch(abs, 2, timeout='5')", "AxesError", "not '5'"),
    # pictures
    ("axes.show(3)", "ShardingError", "axes.show takes a Mesh, a Sharding, a Plan, a Transfer or a DTensor; found int: 3"),
    ("axes.show('dp=2 tp=4')", "ShardingError", "read the text first: axes.Mesh(text), mesh.sharding(text) or axes.plan(source, target, shape)"),
    ("axes.show(torch.ones(2))", "ShardingError", "a plain tensor lies on this rank alone; axes.shard(x, spec, mesh=mesh) makes a DTensor of it"),
    ("axes.show(mesh, (8, 8))", "ShardingError", "axes.show takes a shape with a Sharding alone; found (8, 8) with a Mesh"),
    ("axes.show(mesh.sharding('a b'), (8, 10**5000))", "SizeError", "a tensor has fewer than 2**63 elements; found the shape"),
    ("axes.show(mesh.sharding('a'), (8, 8))", "ShardingError", "the spec 'a' has 1 dims, the tensor 2: [8, 8]"),
    ("axes.show(mesh.sharding('a'), '8')", "SizeError", "a shape is whole numbers from 0; found '8'"),
    ("axes.show(mesh, rank=8)", "MeshError", "rank 8 isn't one of the ranks of"),
    ("axes.show(axes.plan('a', 'a', (8,), source_mesh=axes.Mesh('d=4'), target_mesh=axes.Mesh('t=2', ranks=range(4, 6))), rank=8)", "MeshError", "rank 8 isn't one of the ranks of Mesh('d=4') or Mesh('t=2', ranks=range(4, 6))"),
    (f"axes.show({TRANSFER}), rank=8)", "MeshError", "rank 8 isn't one of the ranks of the transfer: 0..7"),
    ("axes.show(mesh.sharding('a'), rank='0')", "MeshError", "rank is a whole number from 0; found '0'"),
    # explanations
    ("axes.explain('b s', mesh='tp=2')", "ExpressionError", "two sides"),
    ("axes.explain('b s@tp -> b s', mesh='tp=2', b=4)", "SizeError", "'s' needs a size in 'b=4 s@tp', like s=8"),
    ("axes.explain('b ... -> b ...', mesh='tp=2', b=4)", "ShardingError", "'...' stands for dims of a tensor"),
    ("axes.explain('b s@tp -> b s', (4, 8), (8,), mesh='tp=2')", "SizeError", "has 1 operands, and 2 shapes"),
    ("axes.explain('b s@tp -> b s', torch.ones(4), mesh='tp=2')", "SizeError", "a shape is whole numbers from 0"),
    ("axes.explain('b s@xp -> b s', (4, 8), mesh='tp=2')", "MeshError", "no axis 'xp'"),
    (f"{EXPLAIN}, kind='reduce')", "SizeError", "there is no option 'kind'"),
    ("axes.explain('b s@tp -> b', (4, 8), mesh='tp=2', op='median')", "ShardingError", "'median'"),
    (f"{EXPLAIN}, dtype='float33')", "ShardingError", "unknown dtype"),
    (f"{EXPLAIN}, q=3)", "SizeError", "'q'"),
    ("axes.explain('b s@* -> b s', (4, 8), mesh='tp=2')", "ShardingError", "a sharding names its axes"),
    ("axes.explain('b s | * -> b s', (4, 8), mesh='tp=2')", "ShardingError", "a sharding says what is pending"),
    ("axes.explain('(f + f) -> f', (8,), mesh='tp=2')", "ExpressionError", "blocks stand in the rules of transfers alone"),
    ("axes.explain('b@dp -> b, b', (4,), mesh='dp=2')", "ExpressionError", "axes.explain(axes.shard_map(fn, expression), x)"),
    ("axes.explain(3, mesh='tp=2')", "AxesError", "expression, a module, a function or a transfer"),
    ("axes.explain(len, [], mesh='tp=2', b=3)", "AxesError", "are of expressions"),
    (f"axes.explain({TRANSFER}), mesh='dp=2')", "AxesError", "a transfer has its meshes and sizes"),
    # checks and traces
    ("axes.debug(check='yes')", "AxesError", "True or False; found"),
    ("axes.debug(trace=3)", "AxesError", "axes.debug(trace=): the path of a file, or ''; found"),
    ("axes.debug(trace='/nowhere/t')", "AxesError", "No such file or directory"),
    ("axes.debug(trace='/dev/null/t')", "AxesError", "Not a directory"),
    ("axes.debug(trace='a\\0b')", "AxesError", "is no path of a file (embedded null byte)"),
    ("axes.debug(trace='/')", "AxesError", "the trace can't be written: '/' is a folder; write the path of a file"),
    ("axes.debug(trace='/tmp')", "AxesError", "the trace can't be written: '/tmp' is a folder; write the path of a file"),
    # links
    ("axes.connect(torch.distributed.HashStore(), 'c', mesh, peers=('a', 'b'))", "MeshError", "'c' isn't among the peers"),
    ("axes.connect(torch.distributed.HashStore(), 'a', mesh, peers=('a',))", "MeshError", "two or more words, all different"),
)  # fmt: skip
