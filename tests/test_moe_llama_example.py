"""The Llama with experts is that of one device in plain PyTorch, on meshes with all axes; and its script."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import axes

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "examples"))

import moe_llama  # noqa: E402  (examples aren't a package)
import ten_meshes  # noqa: E402
from llama import rotated  # noqa: E402
from pipelined import Curves, corpus, declaration, largest_difference  # noqa: E402

STEPS = 3
SHORT = {"dtype": "float64", "steps": STEPS, "sequence": 16}


def weights() -> dict[str, Tensor]:
    """The whole parameters with which every mesh begins."""
    options = ten_meshes.on("", ep=1, **SHORT)
    mesh = axes.init_mesh(declaration("", moe_llama.AXES), *moe_llama.READINGS, device_type="cpu", ep=1, etp=1)
    return {name: axes.unshard(p.detach()) for name, p in moe_llama.made(options, mesh).named_parameters()}


def logits(w: dict[str, Tensor], tokens: Tensor, n: moe_llama.MoESize) -> Tensor:
    """The model again, without a mesh: every expert computes every token, and those not chosen count nothing."""
    x = w["embedding"][tokens]
    batch, sequence, _ = x.shape
    here = torch.arange(sequence)
    for layer in range(n.layers):
        p = {name.removeprefix(f"blocks.{layer}."): value for name, value in w.items()}
        h = F.rms_norm(x, (n.d,), p["norm1.weight"])
        q, k, v = ((h @ p[f"attention.w{each}"].T).view(batch, sequence, -1, n.k).transpose(1, 2) for each in "qkv")
        k, v = (each.repeat_interleave(n.h // n.g, dim=1) for each in (k, v))
        scores = rotated(q, here) @ rotated(k, here).transpose(-1, -2) / n.k**0.5
        scores = scores.masked_fill(here[:, None] < here, -torch.inf)
        y = (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)
        x = x + y @ p["attention.wo"].T
        h = F.rms_norm(x, (n.d,), p["norm2.weight"])
        share = (h @ p["mlp.router"].T).softmax(-1)
        chosen = share >= share.topk(n.choices).values[..., -1:]
        share = torch.where(chosen, share, 0)
        share = share / share.sum(-1, keepdim=True)
        gate, up = (torch.einsum("bsd,nfd->bsnf", h, p[f"mlp.experts.{name}"]) for name in ("gate", "up"))
        x = x + torch.einsum("bsnf,nfd,bsn->bsd", F.silu(gate) * up, p["mlp.experts.down"], share)
    return F.rms_norm(x, (n.d,), w["norm.weight"]) @ w["embedding"].T


def in_plain_torch(options: moe_llama.Options) -> Curves:
    """The losses and norms of the same training, of whole tensors and torch's own functions."""
    w = {name: value.clone().requires_grad_() for name, value in axes.launch(weights, 1)[0].items()}
    optimizer = torch.optim.AdamW(w.values(), lr=options.lr)
    text, generator, found = corpus(), torch.Generator().manual_seed(options.seed), Curves([], [])
    for _ in range(options.steps):
        starts = torch.randint(len(text) - options.sequence, (options.batch, 1), generator=generator)
        window = text[starts + torch.arange(options.sequence + 1)]
        y = logits(w, window[:, :-1], moe_llama.MoESize())
        loss = F.cross_entropy(y.flatten(0, 1), window[:, 1:].flatten())
        loss.backward()
        found.norms.append(float(torch.nn.utils.clip_grad_norm_(w.values(), options.clip)))
        optimizer.step()
        optimizer.zero_grad()
        found.losses.append(float(loss.detach()))
    return found


def test_on_three_meshes_losses_and_norms_are_those_of_plain_torch_on_one_device(pool):
    expected = in_plain_torch(ten_meshes.on("", ep=1, **SHORT))
    assert expected.losses[-1] < expected.losses[0] - 0.2
    assert min(expected.norms) > 1.0  # so that clipping matters
    meshes = [
        ten_meshes.on("dp_replicate=2 dp_shard=2 cp=2", ep=2, etp=2, recompute=1),
        ten_meshes.on("pp=4 tp=2", ep=2, microbatches=4),
        ten_meshes.on("pp=2 dp_shard=2 tp=2", ep=4),
    ]
    for options in meshes:
        for found in pool.run(ten_meshes.quietly, replace(options, **SHORT)):
            for many, one in zip(found, expected, strict=True):
                assert largest_difference(many, one) < 1e-9, (options.mesh, many, one)


def test_another_mesh_goes_on_with_a_checkpoint_of_stages_and_experts_as_if_it_had_not_ended(pool, tmp_path):
    def steps(count: int, mesh: str, ep: int, **options: object) -> moe_llama.Options:
        return replace(ten_meshes.on(mesh, ep=ep), **SHORT | {"steps": count, **options})

    folder = {"checkpoint": str(tmp_path / "many")}
    pool.run(ten_meshes.quietly, steps(2, "pp=2 dp_shard=2 tp=2", 4, **folder))
    other = pool.run(ten_meshes.quietly, steps(2, "dp_replicate=2 cp=2 tp=2", 2, resume=1, **folder))[0]
    one = axes.launch(ten_meshes.quietly, 1, steps(4, "", 1))[0]
    for found, expected in zip(other, one, strict=True):
        assert largest_difference(found, expected[2:]) < 1e-9, (found, expected)
    assert abs(one.losses[2] - one.losses[0]) > 0.1  # samples of the first steps, or a fresh optimizer, would be seen


def test_the_script_compares_with_one_device(capsys):
    odd = ["--batch", "4", "--words", "257", "--sequence", "15"]
    assert moe_llama.main(["--mesh", "dp_shard=3", "--ep", "1", "--etp", "3", "--steps", "2", *odd]) == 0
    assert "largest relative difference over 2 steps" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--mesh", "dp=2"], "--mesh has the axes pp, dp_replicate, dp_shard, cp, tp; found 'dp' in 'dp=2'"),
        (["--mesh", "dp_shard=2", "--ep", "4"], "2 doesn't divide by 4"),
        (["--mesh", "tp=3", "--ep", "3"], "tp divides 4 key heads"),
        (["--mesh", "dp_shard=3", "--ep", "3"], "--ep divides 8 experts"),
        (["--mesh", "dp_shard=3", "--ep", "1"], "efsdp=3 their width of 64"),
        (["--mesh", "pp=4", "--ep", "1", "--microbatches", "2"], "as many microbatches"),
    ],
)
def test_what_can_not_be_is_one_line(capsys, arguments, says):
    with pytest.raises(SystemExit) as ended:
        moe_llama.main(arguments)
    assert ended.value.code == 2
    found = capsys.readouterr().err
    assert says in found
    assert len(found.splitlines()) == 1
