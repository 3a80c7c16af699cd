"""examples/convert.py and the tables of examples/weight_layouts.py, on models of transformers."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import axes

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "examples"))

import convert  # noqa: E402  (examples aren't a package)
import weight_layouts as tables  # noqa: E402

SMALL = {
    "vocab_size": 40,
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "intermediate_size": 20,
    "moe_intermediate_size": 10,
    "shared_expert_intermediate_size": 14,
    "num_experts": 5,
    "num_experts_per_tok": 2,
}
KINDS = {"llama": "Llama", "qwen2": "Qwen2Moe", "qwen3": "Qwen3Moe"}


def model_of(kind: str, **more: object) -> torch.nn.Module:
    name = KINDS[kind]
    config = getattr(transformers, f"{name}Config")
    wanted = {each: size for each, size in SMALL.items() if kind != "llama" or "moe" not in each}
    return getattr(transformers, f"{name}ForCausalLM")(config(**wanted, **more))


def saved(folder: Path, kind: str, **more: object) -> Path:
    torch.manual_seed(1)
    model_of(kind, **more).to(torch.bfloat16).save_pretrained(folder)
    return folder


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: x for file in folder.glob("*.safetensors") for name, x in load_file(file).items()}


@pytest.mark.parametrize(
    ("kind", "layout", "more"),
    [
        ("llama", "llama-megatron", {}),
        ("llama", "llama-megatron", {"tie_word_embeddings": True, "attention_bias": True}),
        ("llama", "llama-vllm", {"attention_bias": True, "mlp_bias": True}),
        ("qwen2", "qwen-moe-megatron", {}),
        ("qwen2", "qwen-moe-vllm", {}),
        ("qwen3", "qwen-moe-megatron", {}),
        ("qwen3", "qwen-moe-vllm", {}),
        ("qwen3", "qwen-moe-memory", {}),
    ],
    ids=str,
)
def test_a_checkpoint_goes_there_and_back_bit_for_bit_whatever_the_shards_are(tmp_path, kind, layout, more):
    first = saved(tmp_path / "first", kind, **more)
    largest = 3_000
    there = convert.convert(first, tmp_path / "fused", layout, False, largest)
    convert.convert(tmp_path / "fused", tmp_path / "again", layout, True, 2**30)
    assert convert.differences(first, tmp_path / "again") == []
    assert convert.differences(first, tmp_path / "fused") != []
    files = list((tmp_path / "fused").glob("*.safetensors"))
    assert len(files) > 3
    for file in files:
        held = load_file(file).values()
        assert len(held) == 1 or sum(x.nbytes for x in held) <= largest
    whole = sum(x.nbytes for x in tensors(first).values())
    assert there.endswith(f"{whole:,} bytes read of {whole:,}")
    index = json.loads((tmp_path / "fused" / convert.INDEX).read_text())
    assert index["weight_map"].keys() == tensors(tmp_path / "fused").keys()
    assert index["metadata"]["total_size"] == whole


def test_megatron_keeps_the_queries_key_and_value_of_a_key_head_together(tmp_path):
    first = saved(tmp_path / "first", "llama")
    convert.convert(first, tmp_path / "fused", "llama-megatron", False, 2**30)
    mine, theirs = tensors(first), tensors(tmp_path / "fused")
    for layer in range(2):
        q, k, v = (mine[f"model.layers.{layer}.self_attn.{x}_proj.weight"].view(2, -1, 24) for x in "qkv")
        here = f"decoder.layers.{layer}"
        assert theirs[f"{here}.self_attention.linear_qkv.weight"].equal(torch.cat([q, k, v], 1).flatten(0, 1))
        both = [mine[f"model.layers.{layer}.mlp.{x}_proj.weight"] for x in ("gate", "up")]
        assert theirs[f"{here}.mlp.linear_fc1.weight"].equal(torch.cat(both))
    assert not any(name.startswith("model.") for name in theirs)


def test_vllm_keeps_experts_stacked(tmp_path):
    first = saved(tmp_path / "first", "qwen2")
    convert.convert(first, tmp_path / "fused", "qwen-moe-vllm", False, 2**30)
    mine, theirs = tensors(first), tensors(tmp_path / "fused")
    prefix = "model.layers.1.mlp.experts"

    def stacked(which: str) -> torch.Tensor:
        return torch.stack([mine[f"{prefix}.{e}.{which}_proj.weight"] for e in range(5)])

    assert theirs[f"{prefix}.w13_weight"].equal(torch.cat([stacked("gate"), stacked("up")], 1))
    assert theirs[f"{prefix}.w2_weight"].equal(stacked("down"))
    q, k, v = (mine[f"model.layers.1.self_attn.{x}_proj.bias"] for x in "qkv")
    assert theirs["model.layers.1.self_attn.qkv_proj.bias"].equal(torch.cat([q, k, v]))


def test_the_experts_in_memory_are_those_of_the_model_that_transformers_loads(tmp_path):
    first = saved(tmp_path / "first", "qwen3")
    convert.convert(first, tmp_path / "fused", "qwen-moe-memory", False, 2**30)
    loaded = transformers.Qwen3MoeForCausalLM.from_pretrained(first).state_dict()
    found = tensors(tmp_path / "fused")
    assert found.keys() == loaded.keys()
    assert all(loaded[name].equal(x) for name, x in found.items())


@pytest.mark.parametrize(
    ("kind", "layout"), [("llama", "llama-megatron"), ("llama", "llama-vllm"), ("qwen2", "qwen-moe-vllm")]
)
def test_the_tables_know_the_names_of_a_model_on_no_device(kind, layout):
    with torch.device("meta"):
        state = {name: tuple(x.shape) for name, x in model_of(kind).state_dict().items()}
    memory = axes.LayoutRules(tables.QWEN_MOE_TO_MEMORY)
    shapes = memory.inverse.applied(state).targets if kind != "llama" else state
    table, names = tables.TABLES[layout]
    change = axes.LayoutRules(table, sizes={name: {"h": 6, "g": 2, "k": 4}[name] for name in names.split()}).applied(
        shapes
    )
    assert change.unused == change.equal == ()
    assert sum(torch.Size(shape).numel() for shape in change.targets.values()) == sum(
        torch.Size(shape).numel() for shape in state.values()
    )
    same = set(change.targets) & set(shapes)
    assert not same or layout.endswith("vllm")


def test_a_table_is_less_than_a_screen():
    text = (ROOT / "examples" / "weight_layouts.py").read_text().split("\n}\n")
    assert all(len(part[part.index(" = {") :].splitlines()) < 20 for part in text if " = {" in part)


def test_a_folder_that_has_weights_already_and_a_layout_that_does_not_fit_are_refused(tmp_path, capsys):
    first = saved(tmp_path / "first", "llama")
    with pytest.raises(SystemExit, match="has safetensors files already"):
        convert.convert(first, first, "llama-vllm", False, 2**30)
    assert convert.main([str(first), str(tmp_path / "fused"), "--layout", "qwen-moe-vllm"]) == 1
    said = capsys.readouterr().err
    assert "about no tensor" in said
    assert "experts" in said


def test_a_tensor_of_two_dtypes_is_refused_and_one_without_dims_passes(tmp_path):
    first = saved(tmp_path / "first", "llama")
    held = tensors(first) | {"step": torch.tensor(7)}
    for file in first.glob("*.safetensors"):
        file.unlink()
    save_file(held, first / "model.safetensors")
    convert.convert(first, tmp_path / "fused", "llama-vllm", False, 2**30)
    assert tensors(tmp_path / "fused")["step"].item() == 7
    save_file(held | {"model.layers.0.mlp.up_proj.weight": torch.ones(20, 24)}, first / "model.safetensors")
    with pytest.raises(SystemExit, match="gate_up_proj"):
        convert.convert(first, tmp_path / "other", "llama-vllm", False, 2**30)


def test_other_bits_are_a_failure(capsys, monkeypatch):
    monkeypatch.setattr(convert, "differences", lambda one, other: ["lm_head.weight"])
    assert convert.main([]) == 1
    assert "differ: lm_head.weight" in capsys.readouterr().out
