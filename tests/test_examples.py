"""The examples, small: each `main` on ranks that are there already, compared with one device as it does itself; and as scripts."""

from __future__ import annotations

import ast
import importlib
import json
import math
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch.distributed import fsdp

import axes
from tests.conftest import multiplies_batches

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "examples"))

import convert  # noqa: E402  (examples aren't a package)
import support  # noqa: E402
import ten_meshes  # noqa: E402
import weight_layouts  # noqa: E402
from pipelined import largest_difference  # noqa: E402

has_mesh_dims = pytest.mark.skipif(
    not hasattr(fsdp, "DataParallelMeshDims"), reason="torch before 2.13 has no DataParallelMeshDims"
)
EXACT = 1e-9
"""Of numbers around 1 in float64, after some steps of training."""

Worlds = list[list[Any]]


def alone(fn: Callable[..., object], *arguments: object) -> list[object]:
    with axes.simulate(1):
        return [fn(*arguments)]


@pytest.fixture
def worlds(pool, warm, monkeypatch) -> Worlds:
    """What each world gave that an example started, by rank. Its ranks are those of the pool, or this process."""
    found: Worlds = []

    def launch(fn: Callable[..., object], ranks: int, *arguments: object, **_: object) -> list[object]:
        run = {1: lambda: alone(fn, *arguments), 8: lambda: pool.run(fn, *arguments, timeout=120)}
        found.append(run.get(ranks, lambda: warm(fn, ranks, *arguments))())
        return found[-1]

    monkeypatch.setattr(axes, "launch", launch)
    return found


# ------------------------------------------------------------------------- against one device

SMALL = {
    "hf_llama": ("--mesh dp=2@tp=4 --key-heads 2 --tied 0 --batch 5 --tokens 5 --rounds 1", ["one device's: True"]),
    "parallel_dims": ("", ["experts           pp=1 dp_replicate=2 efsdp=1 ep=4"]),
    "train": ("--steps 4 --batch 5 --width 32 --layers 1 --heads 2 --sequence 15", ["difference over 4 steps"]),
}
"""Arguments on eight ranks, and what is said of it, in order. An argument has @ for a space."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=has_mesh_dims if name == "parallel_dims" else ()) for name in SMALL]
)
def test_an_example_on_eight_ranks_is_what_it_is_on_one_device(name, worlds, capfd, tmp_path):
    example, (text, said) = name.partition(",")[0], SMALL[name]
    more = f" --checkpoint {tmp_path}" if example == "train" else ""
    arguments = [word.replace("@", " ") for word in (text + more).split()]
    assert importlib.import_module(example).main(arguments) == 0
    assert {len(world) for world in worlds} <= {1, 8}
    out = capfd.readouterr().out
    for each in said:
        assert each in out
        out = out.partition(each)[2]


EXCHANGES = {"all_gather": 2, "all_to_all": 2}
MOE = {"dp_shard": 2, "cp": 2, "tp": 2}
PATTERNS = {
    "two_layers": (4, (), [{"all_reduce": 1}]),
    "megatron_block": (8, (8, 32, 8, 16), [EXCHANGES]),
    "ulysses": (8, (4, 2, 13), [{"all_to_all": 2}]),
    "ulysses, heads alone": (8, (1, 8, 16), [{}]),
    "ring_attention": (8, (8, 64, torch.float64), [{"all_to_all": 11}]),
    "moe": (8, (MOE | {"ep": 4}, 4, 9, 0.5), [EXCHANGES, {"all_gather": 2, "all_to_all": 3}]),
    "moe, few tokens": (8, (MOE | {"ep": 8}, 16, 8, 0.3), [{"all_to_all": 2}, {"all_to_all": 3}]),
    "moe, no exchange": (8, ({"dp_shard": 8, "cp": 1, "tp": 1, "ep": 1}, 2, 4, 1.0), [{"all_gather": 2}] * 2),
}
"""Ranks and arguments of `compare`, and the collectives of each forward pass."""


@pytest.mark.parametrize("name", PATTERNS)
def test_a_pattern_is_what_it_is_on_one_device(name, warm):
    ranks, arguments, forward = PATTERNS[name]
    every = warm(importlib.import_module(name.partition(",")[0]).compare, ranks, *arguments)
    rows = [found if isinstance(found, list) else [found] for found in every]
    assert [found.forward for found in rows[0]] == forward
    assert all(distance < 1e-4 for row in rows for found in row for distance in found.distance.values())


full = pytest.mark.full

LLAMAS = {
    "llama": ("dp=2 cp=2 tp=2", "--recompute 1", "cp=4 tp=2", "", "--words 257 --batch 5"),
    "llama, stages": ("pp=2 dp=2 tp=2", "", "dp=2 cp=2 tp=2", "", "--tied 1"),
    "moe_llama": ("pp=2 dp_shard=2 tp=2", "--ep 4", "dp_replicate=2 dp_shard=2 cp=2", "--ep 2 --etp 2", "--tied 1"),
}
"""The first mesh and its options, the one that goes on, and the options of both."""


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[multiplies_batches, *[full] * (n == "llama")]) for n in LLAMAS]
)
def test_a_llama_has_the_losses_and_norms_of_one_device_and_another_mesh_goes_on(name, worlds, tmp_path):
    main = importlib.import_module(name.partition(",")[0]).main
    mesh, more, other, others, both = LLAMAS[name]
    options = f"{both} --sequence 16 --dtype float64 --steps 2 --checkpoint {tmp_path}".split()
    assert main(["--mesh", mesh, *more.split(), *options]) == 0
    assert main(["--mesh", other, *others.split(), *options, "--resume", "1"]) == 0
    for many, (one,) in zip(worlds[::2], worlds[1::2], strict=True):
        for rank, found in enumerate(many):
            for ours, theirs in zip(found, one, strict=True):
                assert largest_difference(ours, theirs) < EXACT, f"on rank {rank}: {ours} instead of {theirs}"
    first, second = (one.losses for (one,) in worlds[1::2])
    assert second[0] < first[0] - 0.1  # where it goes on, not where it began


def test_weights_and_text_go_between_two_jobs(capsys):
    rl_sync = importlib.import_module("rl_sync")
    small = "--rounds 2 --steps 2 --batch 5 --prompts 3 --length 3 --width 24 --layers 1 --sequence 15"
    assert rl_sync.main(small.split()) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in lines] == ["round 1", "round 2"]
    assert all(len(line.split("scores differ by ")[1].split("  ", 1)[1]) == 15 + 3 for line in lines)


@full
def test_the_llama_on_ten_meshes_is_that_of_one_device():
    assert ten_meshes.main([]) == 0


def test_a_number_that_is_none_is_no_agreement(capsys):
    assert support.verdict("a.py", [0.0, 1e-6], 1e-5) == 0
    assert support.verdict("a.py", [1e-4], 1e-5) == support.verdict("a.py", [math.nan], 1e-5) == 1
    assert capsys.readouterr().err == "a.py: the distances should be below 1e-05\n" * 2
    assert math.isnan(support.largest([{"x": 1.0}, {"x": math.nan}, {"x": 2.0}])["x"])
    assert math.isnan(largest_difference([1.0, math.nan], [1.0, 1.0]))


# ------------------------------------------------------------------------ checkpoints of others

SIZES = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 4}
SIZES |= {"vocab_size": 40, "intermediate_size": 20}
EXPERTS = {"moe_intermediate_size": 10, "shared_expert_intermediate_size": 14, "num_experts": 5}


def saved(folder: Path, kind: str, **more: object) -> Path:
    """A folder with the weights of a small model of transformers."""
    torch.manual_seed(1)
    sizes = SIZES | more | (EXPERTS | {"num_experts_per_tok": 2} if "Moe" in kind else {})
    model = getattr(transformers, f"{kind}ForCausalLM")(getattr(transformers, f"{kind}Config")(**sizes))
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: x for file in folder.glob("*.safetensors") for name, x in load_file(file).items()}


@pytest.mark.parametrize(
    ("kind", "layout", "more"),
    [
        ("Llama", "llama-megatron", {"tie_word_embeddings": True, "attention_bias": True}),
        pytest.param("Llama", "llama-megatron", {}, marks=full),
        pytest.param("Llama", "llama-vllm", {"attention_bias": True, "mlp_bias": True}, marks=full),
        pytest.param("Qwen2Moe", "qwen-moe-megatron", {}, marks=full),
        ("Qwen2Moe", "qwen-moe-vllm", {}),
        pytest.param("Qwen3Moe", "qwen-moe-megatron", {}, marks=full),
        pytest.param("Qwen3Moe", "qwen-moe-vllm", {}, marks=full),
        ("Qwen3Moe", "qwen-moe-memory", {}),
    ],
    ids=str,
)
def test_a_checkpoint_goes_there_and_back_bit_for_bit_whatever_the_shards_are(tmp_path, kind, layout, more):
    first, largest = saved(tmp_path / "first", kind, **more), 3_000
    there = convert.convert(first, tmp_path / "fused", layout, False, largest)
    convert.convert(tmp_path / "fused", tmp_path / "again", layout, True, 2**30)
    assert convert.differences(first, tmp_path / "again") == []
    assert convert.differences(first, tmp_path / "fused") != []
    files = [load_file(file).values() for file in (tmp_path / "fused").glob("*.safetensors")]
    assert len(files) > 3
    assert all(len(held) == 1 or sum(x.nbytes for x in held) <= largest for held in files)
    whole = sum(x.nbytes for x in tensors(first).values())
    assert there.endswith(f"{whole:,} bytes read of {whole:,}")
    index = json.loads((tmp_path / "fused" / convert.INDEX).read_text())
    assert index["weight_map"].keys() == tensors(tmp_path / "fused").keys()
    assert index["metadata"]["total_size"] == whole
    if layout == "qwen-moe-memory":
        loaded = transformers.Qwen3MoeForCausalLM.from_pretrained(first).state_dict()
        assert {name: x.tolist() for name, x in tensors(tmp_path / "fused").items()} == {
            name: x.tolist() for name, x in loaded.items()
        }


def test_megatron_keeps_the_queries_key_and_value_of_a_key_head_together(tmp_path):
    first = saved(tmp_path / "first", "Llama")
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
    first = saved(tmp_path / "first", "Qwen2Moe")
    convert.convert(first, tmp_path / "fused", "qwen-moe-vllm", False, 2**30)
    mine, theirs = tensors(first), tensors(tmp_path / "fused")
    prefix = "model.layers.1.mlp.experts"
    gate, up, down = (
        torch.stack([mine[f"{prefix}.{e}.{which}_proj.weight"] for e in range(5)]) for which in ("gate", "up", "down")
    )
    assert theirs[f"{prefix}.w13_weight"].equal(torch.cat([gate, up], 1))
    assert theirs[f"{prefix}.w2_weight"].equal(down)
    q, k, v = (mine[f"model.layers.1.self_attn.{x}_proj.bias"] for x in "qkv")
    assert theirs["model.layers.1.self_attn.qkv_proj.bias"].equal(torch.cat([q, k, v]))


def test_what_a_layout_does_not_fit_is_refused_and_a_tensor_without_dims_passes(tmp_path, capsys):
    first = saved(tmp_path / "first", "Llama")
    with pytest.raises(SystemExit, match="has safetensors files already"):
        convert.convert(first, first, "llama-vllm", False, 2**30)
    assert convert.main([str(first), str(tmp_path / "fused"), "--layout", "qwen-moe-vllm"]) == 1
    assert re.search(r"match no tensor[^$]*experts", capsys.readouterr().err)
    held = tensors(first) | {"step": torch.tensor(7)}
    for file in first.glob("*.safetensors"):
        file.unlink()
    save_file(held, first / "model.safetensors")
    convert.convert(first, tmp_path / "step", "llama-vllm", False, 2**30)
    assert tensors(tmp_path / "step")["step"].item() == 7
    save_file(held | {"model.layers.0.mlp.up_proj.weight": torch.ones(20, 24)}, first / "model.safetensors")
    with pytest.raises(SystemExit, match="gate_up_proj"):
        convert.convert(first, tmp_path / "two dtypes", "llama-vllm", False, 2**30)


def test_other_bits_are_a_failure(capsys, monkeypatch):
    monkeypatch.setattr(convert, "differences", lambda one, other: ["lm_head.weight"])
    assert convert.main([]) == 1
    assert "differ: lm_head.weight" in capsys.readouterr().out


def test_a_table_is_less_than_a_screen():
    text = Path(weight_layouts.__file__).read_text(encoding="utf-8").split("\n}\n")
    assert all(len(part[part.index(" = {") :].splitlines()) < 20 for part in text if " = {" in part)


# ---------------------------------------------------------------------- options, and as scripts


@pytest.mark.parametrize(
    ("example", "arguments", "said"),
    [
        ("rl_sync", "--rounds 0", "--rounds is a whole number from 1; found 0"),
        ("moe_llama", "--mesh dp_shard=2 --ep 4", "2 doesn't divide by 4"),
        ("moe_llama", "--mesh pp=4 --ep 1", "as many microbatches"),
        ("llama", "--mesh ep=2", "--mesh has the axes pp, dp, cp, tp; found 'ep' in 'ep=2'"),
        ("llama", "--mesh cp=3", "cp * tp the sequence"),
        ("hf_llama", "--key-heads 3", "tp and --key-heads 3 divide 8 heads"),
        ("rl_sync", "--width 20", "--width divides by 8: 4 heads of an even size"),
        ("train", "--tp 3", "tp=3"),
        ("train", "--checkpoint /dev/null/x", "--checkpoint /dev/null/x can't be made: Not a directory"),
        ("train", "--colour red", "--colour"),
    ],
)
def test_a_bad_option_gets_one_line_that_names_it_from_one_rank(example, arguments, said, capsys, monkeypatch):
    for rank in range(2):
        monkeypatch.setenv("RANK", str(rank))
        with pytest.raises(SystemExit) as ended:
            importlib.import_module(example).main(arguments.split())
        assert ended.value.code == 2
        line = capsys.readouterr().err
        assert (line.startswith(f"{example}.py: "), line.count("\n"), said in line) == (rank == 0,) * 3, line


TORCHRUN = "-m torch.distributed.run --standalone --nproc-per-node"
SHORT = "--sequence 16 --steps 2"


@pytest.mark.parametrize(
    ("command", "said"),
    [
        pytest.param(f"{TORCHRUN} 2 examples/llama.py --mesh dp=2 {SHORT}", "step   2/2", marks=full),
        pytest.param(
            f"{TORCHRUN} 2 examples/train.py {SHORT} --width 32 --dp-replicate 1 --checkpoint TMP",
            "difference over 2 steps",
            marks=full,
        ),
        *(
            pytest.param(f"examples/{command}", said, marks=full)
            for command, said in [
                (f"llama.py --mesh dp=2 {SHORT}", "relative difference"),
                (f"moe_llama.py --mesh dp_shard=3 --ep 1 --etp 3 --batch 4 {SHORT}", "relative difference"),
                ("hf_llama.py --mesh 'dp=1 tp=2' --tokens 6 --rounds 1", "the same as one device's: True"),
                ("two_layers.py", "4 ranks, forward: 1 all_reduce; backward: 3 all_reduce"),
                ("megatron_block.py", "4 ranks, forward: 2 all_gather, 2 all_to_all"),
                ("ulysses.py", "4 ranks, forward: 2 all_to_all; backward: 2 all_to_all"),
                ("ring_attention.py", "4 ranks, forward: 7 all_to_all"),
                ("moe.py", "dropless\n8 ranks, forward: 2 all_gather, 3 all_to_all"),
                (f"train.py {SHORT} --width 32 --ranks 4 --checkpoint TMP", "relative difference"),
                ("rl_sync.py --rounds 1 --steps 2", "round 1"),
                ("convert.py", "bytes read of"),
            ]
        ),
        pytest.param(
            "examples/parallel_dims.py --ranks 6 --dp-replicate 1 --tp 3 --ep 2",
            "experts           pp=1 dp_replicate=1 efsdp=3 ep=2",
            marks=[full, has_mesh_dims],
        ),
    ],
)
def test_the_examples_run_as_scripts(command, said, tmp_path):
    done = subprocess.run(
        [sys.executable, *shlex.split(command.replace("TMP", str(tmp_path)))],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert said in done.stdout


# ------------------------------------------------------------------------ what the page says of them


def lines_of(name: str, names: str) -> int:
    """Lines of code of the definitions with these names: neither empty lines nor comments nor docstrings."""
    text = (ROOT / name).read_text(encoding="utf-8")
    count, found = 0, set()
    for node in ast.parse(text).body:
        name = node.targets[0].id if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) else ""
        if (name := getattr(node, "name", name)) in names.split():
            found.add(name)
            said = [x for x in ast.walk(node) if isinstance(x, ast.Expr) and isinstance(x.value, ast.Constant)]
            left_out = {at for each in said for at in range(each.lineno, each.end_lineno + 1)}
            kept = [at for at in range(node.lineno, node.end_lineno + 1) if at not in left_out]
            count += sum(not re.fullmatch(r"\s*(#.*)?", text.splitlines()[at - 1]) for at in kept)
    assert found == set(names.split())
    return count


def test_the_page_shows_both_programs_as_they_are_and_counts_their_lines():
    page = (ROOT / "docs" / "examples.md").read_text(encoding="utf-8")
    shown = re.findall(r"^```py\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    for text, name in zip(shown, ("examples/llama.py", "tests/bench/llama_by_hand.py"), strict=True):
        assert text in (ROOT / name).read_text(encoding="utf-8"), name
    ours = lines_of("examples/llama.py", "Attention MLP Block SPECS")
    by_hand = lines_of("tests/bench/llama_by_hand.py", "Attention MLP Block Norm cut")
    by_hand += lines_of("tests/bench/megatron_by_hand.py", "gathered scattered summed Gather Scatter SumOfGradients")
    assert f"| axes | {ours} |" in page
    assert f"| by hand | {by_hand} |" in page
