"""Four models of transformers, trained on one mesh and resumed on another, are those of one device."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.mixtral.modeling_mixtral import MixtralRMSNorm, MixtralTopKRouter
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

import axes
from tests.hf_models import MODELS, on_mesh

ROWS = 5, 5, 3
"""The samples of each step: dp=2 doesn't divide them, and the last batch is smaller."""

Found = list[dict[str, Tensor]]
"""What each step has: its loss, the norm of gradients, gradients and parameters, in whole."""


def trained_and_resumed(name: str, recompute: str, of_mesh: bool, folder: str) -> list[str]:
    """What is wrong with three steps on dp=2 tp=2, and with three more on tp=4."""
    torch.set_num_threads(1)
    in_float64()
    mesh, model, optimizer = on("dp=2 tp=2", name, recompute, of_mesh, seed=0)
    found = trained(name, model, mesh, optimizer, range(3))
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=folder)
    mesh, model, optimizer = on("dp=1 tp=4", name, recompute, of_mesh, seed=1)
    weights, state = get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optimizer": state}, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
    found += trained(name, model, mesh, optimizer, range(3, 6))
    wrong = []
    for step, (mine, wanted) in enumerate(zip(found, trained_on_one_device(name, range(6)), strict=True)):
        assert mine.keys() == wanted.keys()
        for what, x in wanted.items():
            if not torch.allclose(mine[what], x, rtol=1e-9, atol=1e-9):
                wrong.append(f"step {step}, {what}: off by {(mine[what] - x).abs().max():.1e} of {x.abs().max():.1e}")
    return wrong


def on(
    text: str, name: str, recompute: str, of_mesh: bool, seed: int
) -> tuple[axes.Mesh, PreTrainedModel, torch.optim.Optimizer]:
    mesh = axes.init_mesh(text, device_type="cpu")
    model = on_mesh(MODELS[name], on_one_device(name, seed), mesh, recompute, of_mesh)
    return mesh, model, axes.nn.local_optimizer(torch.optim.AdamW, model.parameters(), lr=0.01)


def trained(name: str, model: nn.Module, mesh: axes.Mesh, optimizer: torch.optim.Optimizer, steps: range) -> Found:
    found = []
    for step in steps:
        inputs, labels = batch(name, step)
        optimizer.zero_grad()
        with mesh:
            logits = model(**{key: axes.shard(x, "b@dp s") for key, x in inputs.items()}).logits
            loss = axes.cross_entropy(logits, axes.shard(labels, "b@dp s"), "b@dp s v@tp, b@dp s -> ")
            loss.backward()
        norm = axes.nn.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        found.append(values(model, loss, norm))
    return found


def trained_on_one_device(name: str, steps: range) -> Found:
    model, found = on_one_device(name, seed=0), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in steps:
        inputs, labels = batch(name, step)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(**inputs).logits.flatten(0, 1), labels.flatten())
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        found.append(values(model, loss, norm))
    return found


def on_one_device(name: str, seed: int) -> PreTrainedModel:
    torch.manual_seed(seed)
    model = MODELS[name].make().double().train()
    model.config.use_cache = False
    return model


def batch(name: str, step: int) -> tuple[dict[str, Tensor], Tensor]:
    """Arguments of a model, and labels: samples of different lengths, among whose tokens is that of padding as well."""
    rows, length = ROWS[step % len(ROWS)], 7
    tokens = torch.randint(257, (rows, length + 1), generator=torch.Generator().manual_seed(step))
    tokens = tokens.masked_fill(tokens % 5 == 0, 0)
    mask = (torch.arange(length) < torch.arange(length, length - rows, -1)[:, None]).long()
    ids = tokens[:, :-1] * mask
    if name != "BERT":
        return {"input_ids": ids, "attention_mask": mask}, tokens[:, 1:].masked_fill(mask == 0, -100)
    hidden = (ids % 3 == 0) & (mask == 1)
    inputs = {"input_ids": ids.masked_fill(hidden & (ids > 0), 5), "attention_mask": mask}
    return inputs | {"token_type_ids": tokens[:, 1:] % 2}, ids.masked_fill(~hidden, -100)


def values(model: nn.Module, loss: Tensor, norm: Tensor) -> dict[str, Tensor]:
    found = {"loss": loss, "norm": norm}
    for name, p in model.named_parameters():
        name = name.replace("_checkpoint_wrapped_module.", "")
        found |= {f"gradient of {name}": p.grad, name: p}
    with torch.no_grad():
        return {name: axes.unshard(x) if isinstance(x, DTensor) else x.clone() for name, x in found.items()}


def written_back(name: str, folder: str) -> list[str]:
    """What transformers loads of files that ranks have written, of a model that they have read and trained a step."""
    torch.set_num_threads(1)
    in_float64()
    (step,), wanted = trained_on_one_device(name, range(1)), on_one_device(name, seed=0)
    mesh, model, optimizer = on("dp=2 tp=2", name, "", False, seed=1)
    axes.nn.load_safetensors(model, f"{folder}/theirs")
    trained(name, model, mesh, optimizer, range(1))
    if mesh.rank == 0:
        wanted.config.save_pretrained(f"{folder}/ours")
    axes.nn.save_safetensors(model, f"{folder}/ours")
    found = type(wanted).from_pretrained(f"{folder}/ours", dtype=torch.float64)
    whole = {key: axes.unshard(x) if isinstance(x, DTensor) else x for key, x in model.named_parameters()}
    return [key for key, x in found.named_parameters() if not torch.equal(x, whole[key])] + [
        f"{key} after the step"
        for key, x in found.named_parameters()
        if not torch.allclose(x, step[key], rtol=1e-9, atol=1e-9)
    ]


def in_float64() -> None:
    """Have norms and routers compute in the dtype of their input. In transformers they take float32, whatever it is."""

    def norm(self: nn.Module, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.variance_epsilon)

    def shifted(self: nn.Module, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, 1 + self.weight, self.eps)

    def routed(self: nn.Module, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = F.linear(x.reshape(-1, self.hidden_dim), self.weight)
        scores, chosen = logits.softmax(-1).topk(self.top_k)
        return logits, scores / scores.sum(-1, keepdim=True), chosen

    Qwen3RMSNorm.forward = MixtralRMSNorm.forward = norm
    Gemma3RMSNorm.forward = shifted
    MixtralTopKRouter.forward = routed


CASES = list(itertools.product(MODELS, ("transformers", "torchtitan"), (False, True)))
OFTEN = "Gemma 3", "torchtitan", True
"""The one case of every run: a table that is tied, padded and scaled, and parameters that lie on dp as well."""


def check(run: Callable[..., object], folder: Path, name: str, recompute: str, of_mesh: bool) -> None:
    if of_mesh and not hasattr(fsdp, "DataParallelMeshDims"):
        pytest.skip("torch before 2.13 has no DataParallelMeshDims")
    assert run(trained_and_resumed, 4, name, recompute, of_mesh, str(folder), timeout=180) == [[]] * 4


def test_training_under_fsdp2_and_resuming_on_another_mesh_is_that_of_one_device(warm, tmp_path):
    check(warm, tmp_path, *OFTEN)


@pytest.mark.full
@pytest.mark.parametrize(("name", "recompute", "of_mesh"), [case for case in CASES if case != OFTEN])
def test_so_it_is_for_every_model_and_every_order_of_checkpoints(warm, tmp_path, name, recompute, of_mesh):
    check(warm, tmp_path, name, recompute, of_mesh)


@pytest.mark.parametrize("name", ["Mixtral", pytest.param("Qwen3", marks=pytest.mark.full)])
def test_what_ranks_have_read_trained_and_written_back_transformers_loads(warm, tmp_path, name):
    on_one_device(name, seed=0).save_pretrained(tmp_path / "theirs", save_original_format=False)
    assert warm(written_back, 4, name, str(tmp_path), timeout=180) == [[]] * 4
