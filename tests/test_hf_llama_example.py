"""A Llama of transformers, its code untouched, has one device's values, gradients and tokens on any mesh."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import axes
from tests.explained_steps import Counted, Counter, told

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "examples"))

import hf_llama  # noqa: E402  (examples aren't a package)


def test_it_says_what_it_measured(capsys):
    arguments = ["--mesh", "dp=1 tp=2", "--tokens", "6", "--rounds", "1"]
    assert hf_llama.main(arguments) == 0
    out = capsys.readouterr().out
    assert "6 tokens of 4 samples, the same as one device's: True" in out
    assert "  ratio " in out


def of_any_model() -> dict[str, dict[str, float]]:
    """How far tied and untied models are, in float64, with fewer key heads than ranks; norms in float64 as well."""
    norm = type(hf_llama.plain(hf_llama.Options()).model.norm)
    norm.forward = lambda self, x: F.rms_norm(x, self.weight.shape, self.weight, self.variance_epsilon)
    found = {}
    odd = {"words": 257, "batch": 5}
    for mesh, heads, tied, more in (("dp=1 tp=4", 2, 1, {}), ("dp=2 tp=2", 1, 0, odd), ("dp=2 tp=2", 8, 1, odd)):
        options = hf_llama.Options(mesh=mesh, key_heads=heads, tied=tied, dtype="float64", tokens=8, rounds=1, **more)
        far, right, _ = hf_llama.work(options)
        assert right == [True, True]
        found[f"{mesh}, {heads} key heads, tied={tied}"] = far
    return found


def generated() -> list[list[str]]:
    """What is wrong with the tokens of transformers' own `generate`, prompts padded on the left or not."""
    options, wrong = hf_llama.Options(mesh="dp=2 tp=2"), []
    mesh, one = hf_llama.mesh_of(options), hf_llama.plain(options)
    prompt = torch.randint(3, 250, (4, 8), generator=torch.Generator().manual_seed(1))
    mask = (torch.arange(8) >= torch.tensor([[0], [3], [0], [5]])).long()
    rows = mesh.sharding("b@dp s").local_indices((4, 8))
    settings = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    many = copy.deepcopy(one)
    many.lm_head.register_forward_hook(lambda module, _, y: axes.all_gather(y, "tp", dim=-1))
    hf_llama.on_mesh(many, mesh, "b@dp s -> b@dp t v", attention_mask="b@dp c", position_ids="b@dp s")
    for inputs in ({}, {"attention_mask": mask[rows]}):
        wanted = one.generate(prompt[rows], **inputs, **settings)
        found = many.generate(prompt[rows], **inputs, **settings)
        if wanted.shape[1] <= 8 or not torch.equal(found, wanted):
            wrong.append(f"{list(inputs)}: {found.tolist()} instead of {wanted.tolist()}")
    return wrong


def exact_and_generated() -> tuple[list[list[str]], dict[str, dict[str, float]]]:
    torch.set_num_threads(1)
    return generated(), of_any_model()


def test_values_gradients_and_tokens_are_those_of_one_device(world):
    for wrong, found in world(exact_and_generated, 4, timeout=120):
        assert wrong == []
        for which, far in found.items():
            assert max(far.values()) < 1e-9, (which, far)
            assert ("lm_head.weight" in far) == ("tied=0" in which)


def step_on_mesh() -> tuple[Callable[[], None], axes.Mesh]:
    """Forward and backward, with fewer key heads than ranks of tp."""
    options = hf_llama.Options(mesh="dp=1 tp=4", key_heads=2)
    mesh, one = hf_llama.mesh_of(options), hf_llama.plain(options)
    many = hf_llama.on_mesh(one, mesh)
    with mesh:
        tokens = axes.shard(torch.zeros(4, 16, dtype=torch.long), "b@dp s")

    def step() -> None:
        with mesh:
            axes.cross_entropy(many(tokens, use_cache=False).logits, tokens, "b@dp s v@tp, b@dp s -> ").backward()

    return step, mesh


def counted_step() -> list[Counted]:
    torch.set_num_threads(1)
    step, _ = step_on_mesh()
    with Counter() as counter:
        step()
    return counter.found


def test_its_step_sends_what_is_explained_in_one_process(world):
    counted = world(counted_step, 4, timeout=120)
    for rank in (0, 3):
        with axes.simulate(4, rank):
            step, mesh = step_on_mesh()
            assert told(axes.explain(step, mesh=mesh), mesh) == counted[rank]
        assert len(counted[rank]) > 5


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--mesh", "dp=2 cp=2"], "--mesh has the axes dp and tp; found 'dp=2 cp=2'"),
        (["--mesh", "dp=1 tp=3"], "tp and --key-heads 4 divide 8 heads"),
        (["--key-heads", "3"], "tp and --key-heads 3 divide 8 heads"),
    ],
)
def test_what_can_not_be_is_one_line(arguments, says, capsys):
    with pytest.raises(SystemExit, match="2"):
        hf_llama.main(arguments)
    assert says in capsys.readouterr().err
