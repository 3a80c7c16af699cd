"""The mistakes that a newcomer makes first, also one who knows JAX or DTensor: each gets one clear message, the same on every rank."""

from __future__ import annotations

import tempfile

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import Replicate, Shard

import axes


class MLP(nn.Module):
    def __init__(self, embed: int = 8, hidden: int = 16):
        super().__init__()
        self.norm = nn.RMSNorm(embed)
        self.up = nn.Linear(embed, hidden, bias=False)
        self.down = nn.Linear(hidden, embed, bias=False)

    def forward(self, x):
        y = F.silu(self.up(self.norm(x)))
        return x + axes.einsum(y, self.down.weight, "b s hidden@tp, embed hidden@tp -> b s embed")


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(16, 8), nn.Linear(8, 16, bias=False)
        self.head.weight = self.embed.weight


class Scaled(nn.Module):
    """Has a parameter of its own, and nothing that makes it."""

    def __init__(self):
        super().__init__()
        self.scale, self.up = nn.Parameter(torch.ones(8)), nn.Linear(8, 16)


SPECS = {"up.weight": "hidden@tp embed", "down.weight": "embed hidden@tp", "*": "..."}
NAMES = {"up.weight": "hidden embed", "down.weight": "embed hidden", "*": "..."}
REGION = "b@dp s embed -> b@dp s embed"


def mesh(text: str = "dp=2 tp=2") -> axes.Mesh:
    return axes.init_mesh(text, device_type="cpu")


def layer(features: int) -> nn.Module:
    return nn.Linear(8, features, bias=False)


def unmade() -> nn.Module:
    with torch.device("meta"):
        return Scaled()


def other_checkpoint() -> None:
    with tempfile.TemporaryDirectory() as mine:
        folder = [mine]
        dist.broadcast_object_list(folder)
        try:
            dcp.save({"model": axes.shard_module(MLP(), SPECS, mesh()).state_dict()}, checkpoint_id=folder[0])
            dcp.load({"model": axes.shard_module(MLP(8, 32), SPECS, mesh()).state_dict()}, checkpoint_id=folder[0])
        finally:
            dist.barrier()


def called(model: nn.Module, mesh: axes.Mesh | None, expression: str = REGION) -> None:
    axes.shard_map(model, expression, mesh)(torch.ones(2, 3, 8))


MISTAKES = {
    "a mesh as JAX has it": (
        lambda: axes.init_mesh((2, 2), ("dp", "tp")),
        "ExpressionError: an expression is text; found tuple. A mesh is declared by names and sizes, like 'dp=2 tp=4'",
    ),
    "torch's mesh": (
        lambda: axes.shard(torch.ones(4, 4), "b@dp d", mesh=mesh().device_mesh),
        "\naxes.Mesh.from_device_mesh makes one of torch's",
    ),
    "torch's placements": (
        lambda: axes.shard(torch.ones(4, 4), [Shard(0), Replicate()], mesh=mesh()),
        "ExpressionError: an expression is text; found list. Where placements are meant, axes.Sharding.from_placements(mesh, placements, ndim).spec is their text",
    ),
    "an uncovered parameter": (
        lambda: axes.shard_module(MLP(), {"up.weight": "hidden@tp embed", "down.weight": "embed hidden@tp"}, mesh()),
        "ShardingError: no pattern or annotation is about\n  norm.weight  [8]\nname them, or say of all others that they are whole on every rank: {..., '*': '...'}",
    ),
    "an unknown axis": (
        lambda: axes.shard_module(MLP(), {**SPECS, "up.weight": "hidden@tpp embed"}, mesh()),
        "MeshError: up.weight [16, 8], 'hidden@tpp embed': the mesh has no axis 'tpp'; did you mean 'tp'?",
    ),
    "heads that don't divide": (
        lambda: axes.shard_module(layer(12), {"weight": "(heads@tp k) embed"}, mesh("dp tp=4"), heads=6),
        "ShardingError: weight [12, 8], '(heads@tp k) embed': 6 doesn't divide into 4 parts: heads=6@tp is split inside a group:  (heads=6@tp k) = 12",
    ),
    "fewer heads than ranks": (
        lambda: axes.shard_module(layer(16), {"weight": "(heads@tp k) embed"}, mesh("dp tp=4"), heads=2),
        "ShardingError: weight [16, 8], '(heads@tp k) embed': 2 doesn't divide into 4 parts",
    ),
    "another number of ranks": (
        lambda: mesh("dp=2 tp=4"),
        "SizeError: the mesh needs 8 ranks, dp=2 * tp=4; this job has 4\nstart as many: torchrun --nproc-per-node 8 ..., axes.launch(fn, 8)",
    ),
    "a size that doesn't divide the ranks": (
        lambda: mesh("dp tp=3"),
        "SizeError: 4 doesn't divide by 3:  dp * tp=3 = 4    (the axes over the 4 ranks)\nthe sizes of the axes multiply",
    ),
    "a checkpoint of another shape": (
        other_checkpoint,
        "ValueError: Size mismatch between saved torch.Size([16, 8]) and current: torch.Size([32, 8]) for model.up.weight",
    ),
    "a state dict of another shape": (
        lambda: axes.shard_module(MLP(8, 32), SPECS, mesh()).load_state_dict(
            axes.shard_module(MLP(), SPECS, mesh()).state_dict()
        ),
        "size mismatch for up.weight: copying a param with shape torch.Size([16, 8]) from checkpoint, the shape in current model is torch.Size([32, 8]).",
    ),
    "an axis that the mesh hasn't": (
        lambda: axes.shard_module(MLP(), SPECS, mesh("dp=4")),
        "MeshError: up.weight [16, 8], 'hidden@tp embed': the mesh has no axis 'tp'; known: dp",
    ),
    "an axis of a rule that the mesh hasn't": (
        lambda: axes.shard_module(MLP(), NAMES, mesh("dp=4"), axes.Rules(hidden="tp", embed=None)),
        "the rule hidden=tp names an axis that Mesh('dp=4') doesn't have; known: dp\ndeclare it with size 1 ('tp=1'), or leave it out of the rule",
    ),
    "an axis inside of a region that the mesh hasn't": (
        lambda: called(axes.shard_module(MLP(), {"*": "..."}, mesh("dp=4")), mesh("dp=4")),
        "MeshError: the mesh has no axis 'tp'; known: dp\n  b s hidden@tp, embed hidden@tp -> b s embed\n",
    ),
    "sharded twice": (
        lambda: axes.shard_module(axes.shard_module(MLP(), SPECS, mesh()), SPECS, mesh()),
        "ShardingError: norm.weight is sharded already; shard_module takes a module of plain tensors. Say all specs in one call, or make the module anew",
    ),
    "no mesh": (
        lambda: axes.shard_module(MLP(), SPECS),
        "MeshError: axes.shard_module needs a mesh; pass mesh=... or write it inside `with mesh:`",
    ),
    "no mesh for a region": (
        lambda: called(axes.shard_module(MLP(), SPECS, mesh()), None),
        "on plain tensors needs a mesh; pass mesh=... or write it inside `with mesh:`",
    ),
    "a name without a rule": (
        lambda: axes.shard_module(MLP(), NAMES, mesh(), axes.Rules(hiden="tp", embed=None)),
        "ShardingError: up.weight [16, 8], 'hidden embed': no rule is about 'hidden'; did you mean 'hiden'?\n  hidden embed\n  ^^^^^^\nwrite hidden=None for a dim that stays whole, or a last rule ('...', None) for all others",
    ),
    "a rule that is never used": (
        lambda: axes.shard_module(MLP(), NAMES, mesh(), axes.Rules([("hiden", "tp"), ("...", None)])),
        "ShardingError: the rule hiden=tp is about no dim of a parameter; did you mean 'hidden'?\nembed, hidden stay whole by the last rule, ('...', None); where that is meant, write embed=None",
    ),
    "a pattern that matches nothing": (
        lambda: axes.shard_module(MLP(), {**SPECS, "*.upp.weight": "hidden@tp embed"}, mesh()),
        "ShardingError: no parameter or buffer matches\n  '*.upp.weight'; did you mean 'up.weight'?",
    ),
    "a pattern behind a wider one": (
        lambda: axes.shard_module(MLP(), {"*": "...", "up.weight": "hidden@tp embed"}, mesh()),
        "ShardingError: the pattern 'up.weight' never applies: '*' stands before it and matches all that it does; the first that matches applies, so put 'up.weight' before '*'",
    ),
    "a tied weight with two specs": (
        lambda: axes.shard_module(Tied(), {"embed.weight": "v@tp d", "head.weight": "v d@tp"}, mesh()),
        "ShardingError: one tensor under 2 names, tied, has two specs:\n  embed.weight  v@tp d    (embed.weight)\n  head.weight  v d@tp    (head.weight)\ngive it one",
    ),
    "a parameter on meta that nothing makes": (
        lambda: axes.shard_module(unmade(), {"*": "..."}, mesh()),
        "ShardingError: no initializer makes  scale\nthe modules that hold them have no reset_parameters() that fills them, and the root no init_weights(); write one, or make the module on a device",
    ),
    "a region of a model on meta": (
        lambda: called(unmade(), mesh()),
        "ShardingError: 'scale' has no values, it is on the device meta; axes.shard_module(module, ...) makes what was made there, each rank its shards\n  in  shard_map",
    ),
    "a region of a model that isn't sharded": (
        lambda: called(MLP(), mesh()),
        "what came would be this rank's summand of its gradient\nmake its parameters DTensors before: axes.shard_module(module, {'down.weight': 'i j', ...}, mesh=mesh)",
    ),
}
"""What a newcomer writes, and what is said; on four ranks."""


def said() -> dict[str, str]:
    found = {}
    for name, (program, _) in MISTAKES.items():
        try:
            found[name] = f"nothing: {program()}"
        except (Exception, dcp.CheckpointException) as error:
            found[name] = f"{type(error).__name__}: {error}"
        dist.barrier()
    return found


@pytest.fixture(scope="module")
def messages(world) -> list[dict[str, str]]:
    return world(said, 4)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_gets_one_clear_message_on_every_rank(mistake, messages):
    for rank in messages:
        assert MISTAKES[mistake][1] in rank[mistake]
        assert rank[mistake] == messages[0][mistake] or "CheckpointException" in rank[mistake]
