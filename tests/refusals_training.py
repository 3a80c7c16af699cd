"""What people get wrong with models, layers, optimizers, clipping, files and `axes.verify`; `test_refusals` says how these run."""

from __future__ import annotations

W = "W = axes.ones('a@dp b', a=4, b=4, requires_grad=True)"
LINEAR = "m = torch.nn.Linear(4, 6)"
SHARD = "axes.shard_module(m, "
OPTIMIZER = "axes.nn.local_optimizer(torch.optim"
P = "[torch.ones(4, 4, requires_grad=True)]"
RULES = "axes.Rules(mlp='tp', embed=None)"

ROWS: tuple[tuple[str, ...], ...] = (
    # optimizers
    (f"{OPTIMIZER}.Adafactor, {P})", "ShardingError", "Adafactor isn't known to step each element by its own history"),
    (f"{OPTIMIZER}.Muon, {P})", "ShardingError", "Muon isn't known to step each element by its own history", "elementwise=True"),
    (f"{OPTIMIZER}.AdamW, {P}, elementwise=False)", "ShardingError", "AdamW is said, by elementwise=False, not to step each element by its own history"),
    (f"{W}; {OPTIMIZER}.SGD, [W], lr=D('', ))", "ShardingError", "the option 'lr' is ", "and no DTensor"),
    (f"{W}; o = {OPTIMIZER}.SGD, [W], lr=0.1); o.param_groups[0]['lr'] = torch.ones(5); W.grad = W.detach(); o.step()", "ShardingError", "the option 'lr' is ", "steps on shards take one number"),
    ("W = D('a@tp b', 3, 2).requires_grad_(); o = axes.nn.local_optimizer(torch.optim.Adafactor, [W], elementwise=True); W.grad = W.detach(); o.step()", "ShardingError", "the step of Adafactor keeps state 'row_var' of a parameter of shape [3, 2] that is neither"),
    (f"{OPTIMIZER}.AdamW, {P}, 1e-3)", "ShardingError", "elementwise"),
    (f"axes.nn.local_optimizer(type('Own', (torch.optim.AdamW,), {{}}), {P})", "ShardingError", "Own isn't known to step each element by its own history"),
    (f"{OPTIMIZER}.SGD, {P}, differentiable=True)", "ShardingError", "differentiable=True needs steps that autograd sees"),
    (f"{OPTIMIZER}.SGD({P}), {P})", "ShardingError", "takes a class of optimizers"),
    (f"axes.nn.local_optimizer(torch.nn.Linear, {P})", "ShardingError", "takes a class of optimizers"),
    (f"{OPTIMIZER}.AdamW, {P}, lr=-1.0)", "ValueError", "Invalid learning rate"),
    (f"{OPTIMIZER}.AdamW, [])", "ValueError", "empty parameter list"),
    (f"{OPTIMIZER}.AdamW, [{{'params': set({P})}}])", "TypeError", "ordered collections"),
    (f"{OPTIMIZER}.AdamW, {P}, momentum=0.9)", "TypeError", "unexpected keyword argument"),
    (f"{W}; {OPTIMIZER}.SGD, [W], lr=0.1, dampening=torch.ones(4))", "ShardingError", "the option 'dampening' is ", "steps on shards take one number"),
    (f"from tests.own_optimizers import Everywhere; axes.nn.local_optimizer(Everywhere, {P}, elementwise=True).step()", "ShardingError", "keeps state of 'steps', which is none of the parameters"),
    (f"{W}; o = {OPTIMIZER}.SGD, [W], lr=0.1); W.grad = torch.ones(4, 4); o.step()", "ShardingError", "the gradient of a DTensor of shape [4, 4] is a plain tensor"),
    # clipping
    (f"{W}; W.grad = torch.ones(4, 4); axes.nn.clip_grad_norm_([W], 1.0)", "ShardingError", "the gradient of a DTensor of shape [4, 4] is a plain tensor"),
    ("axes.nn.clip_grad_norm_([L(2)], 1.0, 0)", "ShardingError", "norm_type is a number above 0"),
    ("axes.nn.clip_grad_norm_([L(2)], 1.0, -float('inf'))", "ShardingError", "norm_type is a number above 0"),
    ("axes.nn.clip_grad_norm_([L(2)], 1.0, 'two')", "ShardingError", "norm_type is a number above 0"),
    ("axes.nn.clip_grad_norm_([L(2)], -1.0)", "ShardingError", "max_norm is a number from 0"),
    ("axes.nn.clip_grad_norm_([1.0], 1.0)", "ShardingError", "takes tensors, like module.parameters(); found float"),
    ("axes.nn.clip_grad_norm_([L(2)], 1.0, copies=[L(2)])", "ShardingError", "isn't one of the parameters"),
    ("without_mesh(lambda: axes.nn.clip_grad_norm_([L(2)], 1.0, stages='pp'))", "MeshError", "needs a mesh"),
    ("axes.nn.clip_grad_norm_([], 1.0, stages='pp', mesh=axes.Mesh('pp=2'))", "MeshError", "bound to torch.distributed"),
    ("m = mesh.define('(dp cp) = pp=4', 'pp = outer inner=2'); axes.nn.clip_grad_norm_([D('n@inner', 4, mesh=m['inner', 'tp'])], 1.0, stages='pp', mesh=m)", "MeshError", "has a part of the axes that `stages` names"),
    # layers
    ("axes.nn.Einsum('b d -> b d', d=2)", "ExpressionError", "Einsum is 'input, weight -> result'"),
    ("axes.nn.Einsum('b d, d f -> b f', d=2)", "SizeError", "'f' needs a size, like f=8"),
    ("axes.nn.Einsum('b d, d f -> b f', d=2, f=-3)", "SizeError", "the size of 'f' is a whole number from 1"),
    ("axes.nn.Embedding('b, v d -> b d', d=2)", "SizeError", "'v' needs a size"),
    ("axes.nn.Embedding('b, v d -> b d', padding_idx=4, v=4, d=2)", "SizeError", "a row of the table, which has 4"),
    ("axes.nn.Embedding.from_module(type('Scaled', (torch.nn.Embedding,), {})(4, 2), 'b, v d -> b d')", "ShardingError", "found Scaled(4, 2), whose forward may do more"),
    ("axes.nn.Embedding.from_module(torch.nn.Embedding(4, 2, sparse=True), 'b, v d -> b d')", "ShardingError", "without further options; found Embedding(4, 2, sparse=True)"),
    ("axes.nn.RMSNorm('b d', over='d')", "SizeError", "'d' needs a size"),
    # models
    (f"{LINEAR}; {SHARD}{{'*': '...'}}, heads=3)", "SizeError", "a size is given for 'heads', which is no option and isn't in any spec"),
    (f"{LINEAR}; {SHARD}{{'weight': 'mlp', '*': '...'}}, rules={RULES})", "ShardingError", "weight [6, 4], 'mlp' (weight): the spec 'mlp' has 1 dims, the tensor 2"),
    ("axes.shard_module(MLP(), {'*.weight': 'a@tp b', '*': '...'})", "ShardingError", "norm.weight [8], 'a@tp b' (*.weight): the spec 'a@tp b' has 2 dims, the tensor 1: [8]; write a name for each dim, or '...' for the others"),
    (f"{LINEAR}; {SHARD}{{'*': '...'}}, {{'wei*': mesh['tp']}})", "ShardingError", "no pattern of mesh= is about\n  bias  [6]\n", "'*': mesh"),
    (f"{LINEAR}; {SHARD}{{'*': '...'}}, {{'wieght': mesh['tp'], '*': mesh}})", "ShardingError", "these patterns never apply: 'wieght'\n", "names are weight, bias"),
    (f"{LINEAR}; {SHARD}{{'*': '...'}}, {{'*': mesh['tp'], 'w*': mesh['dp']}})", "ShardingError", "these patterns never apply: 'w*'"),
    ("m = MLP(); m.head = m.up; m.down = torch.nn.Linear(8, 16); m.down.weight = m.up.weight; axes.shard_module(m, {'*': '...'}, {'down.*': mesh['tp'], '*': mesh['dp']})", "ShardingError", "tied, has two meshes"),
    (f"{LINEAR}; {SHARD}{{'*': '...'}}, {{'*': mesh.device_mesh}})", "MeshError", "a mesh is an axes mesh"),
    (f"{LINEAR}; axes.shard_module(m.weight, {{'*': '...'}})", "ShardingError", "axes.shard_module takes a module; found Parameter"),
    (f"{LINEAR}; {SHARD}{{'bias': 'a | sum@tp', '*': '...'}})", "ShardingError", "bias [6]", "a parameter has nothing pending"),
    ("axes.constrain(D('a', 4), 'a')", "ShardingError", "needs rules"),
    (f"axes.constrain(L(4), 'a', rules={RULES})", "ShardingError", "axes.constrain takes a DTensor; found Tensor"),
    ("with axes.use_rules(axes.Rules(batch='dp')): axes.shard(L(4, 6), 'batch model')", "ShardingError", "no rule is about 'model'"),
    (f"{LINEAR}; axes.annotate(m, {{'wait': 'a b'}})", "ShardingError", "Linear has no parameter or buffer 'wait'"),
    ("axes.shard_module(torch.nn.Linear(4, 6), {'weight': 'heads embed', 'bias': 'heads'}, rules=axes.Rules([('heads', ('dp', 'tp')), ('heads', 'dp'), ('embed', None)], strict=True))", "SizeError", "weight [6, 4], 'heads embed' (weight): the rule heads=(dp tp) is strict: 6 doesn't divide into 4 parts\n  heads embed\n  ^^^^^\nwrite a size that divides, other axes, or heads=None; rules that aren't strict leave it whole"),
    ("axes.Rules([('heads', 'tp')], strict='yes')", "ShardingError", "strict is True or False; found 'yes'"),
    # files
    ("axes.nn.save_safetensors(3, 'weights')", "ShardingError", "axes.nn.save_safetensors takes a module; found int"),
    # verify
    ("axes.verify(3, mesh='tp=2')", "AxesError", "takes a module, or a function that builds, shards and runs one; found as program 3"),
    ("axes.verify(torch.nn.Linear, mesh='tp=2')", "AxesError", "takes a module, not its class: write axes.verify(Linear(...), ...)"),
    ("axes.verify(print, mesh=2)", "MeshError", "mesh= is an axes mesh or its declaration, like 'dp=2 tp=2'; found 2"),
    ("without_mesh(axes.verify, print)", "MeshError", "axes.verify needs a mesh; pass mesh=... or write it inside"),
    ("axes.verify(print, mesh='tp')", "SizeError", "tp"),
    ("axes.verify(print, mesh='tp=2', specs={'*': '...'})", "AxesError", "specs= are for a module; a function shards what it makes by itself"),
    ("axes.verify(print, mesh='tp=2', heads=4)", "SizeError", "sizes are for specs of a module; found 'heads' beside a function"),
    ("axes.verify(print, mesh='tp=2', rtol=-1.0)", "AxesError", "rtol is a number that isn't negative, or None; found -1.0"),
    ("axes.verify(print, mesh='tp=2', atol=True)", "AxesError", "atol is a number that isn't negative, or None; found"),
    ("axes.verify(print, mesh='tp=2', timeout=-1)", "AxesError", "the timeout is None or a positive number of seconds"),
    ("axes.verify(print, mesh='tp=2', reference=3)", "AxesError", "found as reference 3"),
    ("axes.verify(axes.shard_module(MLP(), {'*': '...'}), mesh='tp=2')", "ShardingError", "norm.weight is sharded already"),
    ("axes.verify(axes.shard_map(torch.nn.Linear(2, 2), 'b d -> b d', axes.Mesh('tp=4')), mesh='tp=2')", "MeshError", "write shard_map(module, expression) without mesh="),
    ("axes.verify(print, D('a', 4), mesh='tp=2')", "ShardingError", "found a DTensor"),
)  # fmt: skip

AFTERWARDS = (
    ("axes.nn.save_safetensors(torch.nn.Linear(4, 6), 'weights', lambda name: 'w')", "ShardingError", "can't be in the file as 'w': two parameters have this name"),
    ("axes.nn.save_safetensors(torch.nn.Linear(4, 6, device='meta'), 'weights')", "ShardingError", "weight has no values, on the device 'meta'"),
    ("m = type('M', (torch.nn.Module,), {'reset_parameters': lambda self: self.gain.exponential_()})(); m.gain = torch.nn.Parameter(torch.empty(4, device='meta')); axes.shard_module(m, {'*': '...'})", "ShardingError", "exponential_ of gain: random values"),
)  # fmt: skip
