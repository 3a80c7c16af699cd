"""A Llama whose MLPs are mixtures of experts: no token is dropped, and the losses are those of one device on any mesh.

    python examples/moe_llama.py --mesh "pp=2 dp_shard=2 tp=2" --ep 4      # eight local processes, then one

One mesh has both views of the same ranks. Dense layers see `pp dp_replicate dp_shard cp tp`, experts see
`pp dp_replicate efsdp ep etp`, which is one equation:

    "(dp_shard cp tp) = efsdp ep etp"

A rank has the experts of its `ep`, and of their hidden dim the part of its `etp`; FSDP2 shards what it has over
`efsdp`. Attention and loss are those of llama.py, the training that of pipelined.py. ten_meshes.py trains it on ten.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

import torch
from llama import SPECS as DENSE
from llama import Block, Llama, Size, loss_on, weight
from llama import what_is_wrong as what_is_wrong_with_the_dense
from pipelined import Curves, Training, compared, declaration, mesh_of, stage_of, summed, trained
from support import flag, read_options
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.nn import functional as F

import axes

AXES = "pp", "dp_replicate", "dp_shard", "cp", "tp"
READINGS = (
    "dp = dp_replicate dp_shard",  # ranks with other samples
    "fsdp = dp_shard cp",  # dense parameters are stored over it
    "(dp_shard cp tp) = efsdp ep etp",  # the same ranks for experts: stored over efsdp, spread over ep, cut over etp
)
SPECS = {"*.experts.*": "n@ep f@etp d"} | {
    name: spec for name, spec in DENSE.items() if name not in ("*.gate", "*.up", "*.down")
}


# ------------------------------------------------------------------------------------ the model


@dataclass(frozen=True)
class MoESize(Size):
    layers: int = 4
    f: int = 64
    experts: int = 8
    choices: int = 2


class Experts(nn.Module):
    """The experts of this rank, on tokens in their order: `counts` of them for each expert."""

    def __init__(self, n: MoESize):
        super().__init__()
        self.gate, self.up, self.down = (weight(n.experts, n.f, n.d) for _ in range(3))

    def forward(self, x: Tensor, counts: list[int]) -> Tensor:
        each = zip(x.split(counts), self.gate, self.up, self.down, strict=True)
        return torch.cat([(F.silu(x @ gate.T) * (x @ up.T)) @ down for x, gate, up, down in each])


class MoE(nn.Module):
    """A router sends each token to the experts that it prefers, wherever they are; moe.py draws how."""

    def __init__(self, n: MoESize):
        super().__init__()
        self.router, self.experts, self.n = weight(n.experts, n.d), Experts(n), n

    def forward(self, x: Tensor) -> Tensor:  # s@(cp tp) b@dp d: every rank has other tokens
        tokens = x.flatten(0, 1)
        share, expert = F.linear(tokens, self.router).softmax(-1).topk(self.n.choices)
        share = share / share.sum(-1, keepdim=True)
        expert, order = expert.flatten().sort(stable=True)
        token = order // self.n.choices  # of each choice, in the order of experts

        # How many tokens go to each expert, and how many come from each rank. All of etp have parts of an expert.
        ranks, parts, everyone = axes.axis_size("ep"), axes.axis_size("etp"), ("ep", "etp")
        leaving = expert.bincount(minlength=self.n.experts).view(ranks, -1)  # [to ep, expert there]
        arriving = axes.all_to_all(leaving.repeat_interleave(parts, 0), everyone)  # [from, expert here]
        to, of = leaving.sum(1).tolist(), arriving.sum(1).tolist()
        sizes = {"send_sizes": [count for count in to for _ in range(parts)], "recv_sizes": of}
        back = {"send_sizes": of, "recv_sizes": sizes["send_sizes"]}

        copies = torch.cat([some for some in tokens[token].split(to) for _ in range(parts)])
        arrived = axes.all_to_all(copies, everyone, **sizes)
        here = torch.arange(arriving.shape[1], device=x.device).repeat(len(of)).repeat_interleave(arriving.flatten())
        by_expert = here.argsort(stable=True)
        results = self.experts(arrived[by_expert], arriving.sum(0).tolist())
        results = axes.all_to_all(results[by_expert.argsort()], everyone, **back)

        # A choice has a summand of its result from each rank of etp.
        summands = results.split([count * parts for count in to])
        results = torch.cat([some.view(parts, -1, some.shape[-1]).sum(0) for some in summands])
        weighed = results * share.flatten()[order][:, None]
        return torch.zeros_like(tokens).index_add(0, token, weighed).view_as(x)


class MoEBlock(Block):
    def __init__(self, n: MoESize):
        super().__init__(n)
        self.mlp = MoE(n)


# ----------------------------------------------------------------------------------- on a mesh


def made(options: Options, mesh: axes.Mesh) -> nn.Module:
    """This rank's stage: dense parameters on the dense names, experts on the sparse ones."""
    with torch.device("meta"):
        model = Llama(MoESize(v=options.words), MoEBlock, bool(options.tied), bool(options.recompute))
    model = stage_of(model, mesh).to(getattr(torch, options.dtype))
    torch.manual_seed(options.seed)
    axes.shard_module(model, SPECS, {"*.experts.*": mesh["ep", "etp"], "*": mesh["tp"]})
    axes.shard_map(model, model.expression, mesh["dp", "cp", "tp"])
    dense, sparse = (mesh["dp_replicate", names].device_mesh for names in ("fsdp", "efsdp"))
    for block in model.blocks.values():
        # Experts are stored by their last dim: ep and etp split the others.
        fully_shard(block.mlp.experts, mesh=sparse, shard_placement_fn=lambda _: Shard(2))
        fully_shard(block, mesh=dense)
    return summed(fully_shard(model, mesh=dense))


def train(options: Options) -> Curves:
    """What each rank does."""
    sizes = {"ep": options.ep, "etp": options.etp} if options.mesh else {"ep": 1, "etp": 1}
    mesh = mesh_of(options, AXES, *READINGS, **sizes)
    return trained(options, mesh, made(options, mesh), loss_on(mesh, options.words))


# ------------------------------------------------------------------------------------ command line


@dataclass(frozen=True)
class Options(Training):
    """Train a Llama with mixtures of experts on a mesh, and on one device, and compare."""

    mesh: str = flag("pp=2 dp_shard=2 tp=2", f"of the axes {', '.join(AXES)}, with their sizes")
    ep: int = flag(2, "ranks that share the experts")
    etp: int = flag(1, "ranks that share each expert")


def what_is_wrong(options: Options) -> str | None:
    """What can't be, as far as one process can tell."""
    if wrong := what_is_wrong_with_the_dense(options, AXES, MoESize()):
        return wrong
    try:
        mesh = axes.Mesh(declaration(options.mesh, AXES), *READINGS, ep=options.ep, etp=options.etp)
    except axes.AxesError as error:
        return " ".join(str(error).split())
    n = MoESize()
    if n.experts % options.ep or n.d % mesh.names["efsdp"]:
        return f"--ep divides {n.experts} experts, and efsdp={mesh.names['efsdp']} their width of {n.d}, for FSDP2"
    return None


def main(arguments: list[str] | None = None) -> int:
    options = read_options("moe_llama.py", Options, what_is_wrong, arguments)
    return compared(options, train, AXES)


if __name__ == "__main__":
    sys.exit(main())
