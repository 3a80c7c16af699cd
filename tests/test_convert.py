"""Converters: JAX says which elements a `PartitionSpec` gives each device, Flax's function what rules mean, transformers'
styles which dim they split."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Replicate

import axes
from axes import convert

ROOT = Path(__file__).resolve().parent.parent

JUDGED_BY_JAX = """
import random
import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
import axes
from axes.convert import from_partition_spec, to_partition_spec
draw = random.Random(0)
for _ in range(1000):
    sizes = draw.choice([(8,), (2, 4), (4, 2), (2, 2, 2)])
    names = "abc"[: len(sizes)]
    mine, theirs = axes.Mesh(" ".join(map("{}={}".format, names, sizes))), Mesh(np.reshape(jax.devices(), sizes), tuple(names))
    placed = [[] for _ in range(draw.randint(0, 3))]
    for axis in draw.sample(names, draw.randint(0, len(names)) if placed else 0):
        draw.choice(placed).append(axis)
    dims, shape = [draw.choice([f"n{at}", "_", f"(h{at} k{at})"]) for at, _ in enumerate(placed)], [draw.choice([8, 16]) for _ in placed]
    entries = [None if not each else each[0] if len(each) == 1 and draw.random() < 0.5 else tuple(each) for each in placed]
    while entries and entries[-1] is None and draw.random() < 0.5:
        entries.pop()
    written = " ".join(f"{dim}@({' '.join(each)})" if each else dim for dim, each in zip(dims, placed))
    converted, back = from_partition_spec(P(*entries), " ".join(dims)), to_partition_spec(written)
    for spec, partition in ((converted, P(*entries)), (written, P(*back))):
        for device, held in NamedSharding(theirs, partition).devices_indices_map(tuple(shape)).items():
            expected = tuple([slice(*each.indices(size)[:2]) for each, size in zip(held, shape)])
            assert mine.sharding(spec).local_indices(shape, rank=device.id) == expected, (spec, partition)
    assert to_partition_spec(converted) == back
print("same")
"""


@pytest.mark.skipif(importlib.util.find_spec("jax") is None, reason="jax says what its partition specs mean")
def test_a_partition_spec_and_its_spec_give_each_device_the_same_elements():
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    env = {**os.environ, **flags, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    done = subprocess.run([sys.executable, "-c", JUDGED_BY_JAX], env=env, capture_output=True, text=True, check=False)
    assert done.stdout == "same\n", done.stderr[-3000:]


def by_flax(names: list[str], rules: Any) -> tuple[Any, ...]:
    """What `flax.linen.logical_to_mesh_axes` gives, after its source."""
    result: list[Any] = ["open"] * len(names)
    for name, assigned in rules:
        if name in names and result[names.index(name)] == "open":
            mine = {assigned} if isinstance(assigned, str) else {*(assigned or ())}
            used = {axis for each in result for axis in ((each,) if isinstance(each, str) else each or ())}
            if not mine & used:
                result[names.index(name)] = assigned
    return tuple([None if each == "open" else each for each in result])


def test_logical_rules_put_dims_where_flax_puts_them_and_come_back():
    draw, mesh = random.Random(0), axes.Mesh("a=2 b=2 c=2")
    for _ in range(1000):
        choices = [None, "a", "b", "c", ("a", "b"), ("c", "a"), ("b", "c", "a")]
        table = tuple([(draw.choice("uvwxyz"), draw.choice(choices)) for _ in range(draw.randint(0, 6))])
        rules = convert.from_logical_rules(draw.choice([table, [list(each) for each in table]]))
        names = draw.sample("uvwxyz", draw.randint(0, 4))
        assert convert.to_partition_spec(rules.spec(" ".join(names), mesh)) == by_flax(names, table)
        assert convert.to_logical_rules(rules) == table
        assert convert.from_logical_rules(rules.rules and convert.to_logical_rules(rules)) == rules


EMBEDDINGS = ["embedding_rowwise", "embedding_colwise"]
LINEAR = ["colwise", "colwise_rep", "colwise_gather_output", "rowwise", "rowwise_rep", "rowwise_split_input"]
STYLES = [
    *((style, {".weight": 2, ".bias": 1}) for style in (*LINEAR, "packed_colwise")),
    *((style, {"": ndim}) for style in (*LINEAR, "packed_colwise", "packed_rowwise") for ndim in (2, 3)),
    *((style, {".weight": 2}) for style in EMBEDDINGS),
    ("replicate", {".weight": 1}),
]
"""Styles with the dims of the parameters that they are about: a module's, or one by its own name."""


@functools.cache
def judged(style: str, own: str, ndim: int, mesh: axes.Mesh) -> tuple[Any, ...]:
    """The placements that a style of transformers gives a parameter."""
    styles = importlib.import_module("transformers.distributed.tensor_parallel").ALL_PARALLEL_STYLES
    module, name = torch.nn.Module(), own.removeprefix(".") or "data"
    module.register_parameter(name, torch.nn.Parameter(torch.ones([8] * ndim)))
    styles[style].shard_param(module, name, mesh.device_mesh)
    return getattr(module._parameters[name], "placements", (Replicate(),))


def test_a_tp_plan_splits_what_transformers_splits_and_comes_back():
    pytest.importorskip("transformers.distributed.tensor_parallel", reason="transformers says what its styles split")
    draw = random.Random(0)
    with axes.simulate(4), axes.init_mesh("tp=4", device_type="cpu") as mesh:
        for _ in range(1000):
            plan, shapes, expected = {}, {}, {}
            for number in range(draw.randint(1, 4)):
                path = f"model.layers.*.m{number}.proj2"
                plan[path], owned = draw.choice(STYLES)
                for own, ndim in owned.items():
                    expected[path + own] = judged(plan[path], own, ndim, mesh)
                    shapes |= {(path + own).replace("*", str(at)): (8,) * ndim for at in range(draw.randint(1, 3))}
            specs = convert.from_tp_plan(plan, shapes)
            assert {name: mesh.sharding(spec).placements for name, spec in specs.items()} == expected
            tables = [name for name, style in plan.items() if style in EMBEDDINGS]
            again = convert.to_tp_plan(specs, embeddings=tables)
            assert convert.from_tp_plan(again, shapes) == specs
            plain = {name: re.sub("_(rep|gather_output|split_input)$", "", style) for name, style in plan.items()}
            assert again == {name: style for name, style in plain.items() if style != "replicate"}


def test_the_plan_of_llama_shards_it():
    transformers = pytest.importorskip("transformers", reason="the model is transformers'")
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 4, "vocab_size": 32}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(num_hidden_layers=2, **sizes))
    specs = convert.from_tp_plan(model.tp_plan, {name: p.shape for name, p in model.named_parameters()})
    with axes.simulate(4), axes.init_mesh("dp=2 tp=2", device_type="cpu") as mesh:
        found = axes.shard_module(model, specs, mesh).model.layers[1].mlp
        assert [axes.spec_of(x.weight) for x in (found.up_proj, found.down_proj, model.model.norm)] == [
            "_@tp _",
            "_ _@tp",
            "_",
        ]


REFUSED = [
    ("from_partition_spec(('dp',), 'b@dp d')", "dims are a name for each dim and nothing else"),
    ("from_partition_spec(('dp', 'tp', None), 'b d')", "at most 2 for 'b d'; found ('dp', 'tp', None)"),
    ("from_partition_spec(('dp', 3), 'b d')", "found 3 for 'd'"),
    ("from_partition_spec(('dp', ('tp', 'dp')), 'b d')", "an axis splits one dim; found one twice"),
    ("to_partition_spec('b (h@tp k)')", "where it divides, '(h k)@tp' splits the same elements"),
    ("to_partition_spec('... d@tp')", "write a name for each dim"),
    ("to_partition_spec('b d | sum@tp')", "in JAX write P(..., unreduced={'tp'})"),
    ("from_logical_rules(3)", "rules are a mapping from logical names to axes, or pairs"),
    ("to_logical_rules({'b': 'dp'})", "to_logical_rules takes axes.Rules; found dict"),
    ("from_tp_plan({'l.*.up': 'colwise'}, {'model.l.0.up.weight': (8, 4)})", "'l.*.up' beside 'model.l.*.up.weight'; give"),
    ("from_tp_plan({'m': 'colwis'}, {'m.weight': (4, 4)})", "did you mean 'colwise'?"),
    ("from_tp_plan({'m': 'ep_dispatch_experts'}, {'m.weight': (4, 4)})", "write the spec: 'e@ep f d'"),
    ("from_tp_plan({'l.*': 'colwise'}, {'l.0.w': (4, 4), 'l.1.w': (4,)})", "need two specs: '_@tp _' and '_@tp'"),
    ("from_tp_plan({'m': 'colwise'}, {'m.weight': (4, 4)}, 't p')", "axis is the name of a mesh axis, like 'tp'"),
    ("from_tp_plan('colwise', {})", "a tp_plan is a mapping from names to styles"),
    ("to_tp_plan({'*.up.weight': 'f@tp d'})", "names modules in full, with a '*' for each number"),
    ("to_tp_plan({'up.weight': 'f@tp d'}, embeddings=range(10**15))", "embeddings are names of modules, like ['model.embed_tokens']; found range(0, 1000000000000000)"),
    ("to_tp_plan({'model.embed.weight': 'v@tp d'}, embeddings=['model.embedd'])", "specs have no embedding 'model.embedd'; did you mean 'model.embed'?"),
    ("to_tp_plan({'up.weight': 'f@dp d'})", "no style of transformers splits 'up.weight' as 'f@dp d'"),
    ("to_tp_plan({'up.weight': 'f@tp d', 'up.bias': 'f'})", "'colwise' splits the bias as well"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "says"), REFUSED)
def test_what_has_no_counterpart_says_so(call, says):
    with pytest.raises(axes.AxesError) as raised:
        eval(call, vars(convert))
    assert says in str(raised.value)
