"""Checkpoints and weight files beside the law `files`, which saves any sharding and loads it as any other.

Here: what FSDP2 shards, saves that are written meanwhile, what is read of safetensors files, and what is refused.
"""

from __future__ import annotations

import copy
import json
import re
import types
from pathlib import Path

import pytest
import safetensors
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

import axes
from axes import DesyncError, ShardingError
from tests.common import case

WHOLE = torch.arange(24 * 8.0).view(24, 8) + 0.5
FROM_RANK_0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
FACTOR = "(three=3 h@tp d=2) e"


def job() -> axes.Mesh:
    return axes.init_mesh("dp=4 tp=2", device_type="cpu")


def given(whole: torch.Tensor) -> dict[str, torch.Tensor]:
    """A state dict that the first rank alone has."""
    return {"weight": whole} if dist.get_rank() == 0 else {}


def linear(whole: torch.Tensor, spec: str, mesh: axes.Mesh) -> nn.Linear:
    """A layer whose weight is sharded so."""
    layer = nn.Linear(whole.shape[1], whole.shape[0], bias=False)
    layer.weight = nn.Parameter(axes.shard(whole, spec, mesh=mesh))
    return layer


def same(found: torch.Tensor, whole: torch.Tensor) -> bool:
    return torch.equal(axes.unshard(found.detach()), whole)


# ------------------------------------------------------------------------------ of torch


def other_formats(folder: str) -> None:
    mesh = job()
    with case("whole tensors, as a job without axes writes them"):
        dcp.save({"w": WHOLE}, checkpoint_id=f"{folder}/whole")
        target = axes.shard(torch.zeros(24, 8), FACTOR, mesh=mesh)
        dcp.load({"w": target}, checkpoint_id=f"{folder}/whole")
        assert same(target, WHOLE)
    with case("one file of torch.save"):
        dcp.save({"w": axes.shard(WHOLE, FACTOR, mesh=mesh)}, checkpoint_id=f"{folder}/ours")
        if dist.get_rank() == 0:
            dcp_to_torch_save(f"{folder}/ours", f"{folder}/whole.pt")
        dist.barrier()
        assert torch.equal(torch.load(f"{folder}/whole.pt")["w"], WHOLE)
    for spec in (FACTOR, "h@(tp dp) e", "h (two=2 e@tp)"):
        with case(f"torch's own reader of safetensors files, {spec}"):
            if dist.get_rank() == 0:
                save_file({"w": WHOLE}, f"{folder}/w.safetensors")
            dist.barrier()
            target = axes.shard(torch.zeros(24, 8), spec, mesh=mesh)
            dcp.load({"w": target}, storage_reader=HuggingFaceStorageReader(folder))
            assert same(target, WHOLE)
    with case("files that have room for one part of a tensor"):
        writer = HuggingFaceStorageWriter(path=f"{folder}/no", save_distributed=True)
        with pytest.raises(dcp.CheckpointException, match="'w' is split by a factor of a dim"):
            dcp.save({"w": axes.shard(WHOLE, "(three=3 h@tp) e", mesh=mesh)}, storage_writer=writer)
    placements = [_StridedShard(0, split_factor=3), _StridedShard(0, split_factor=5)]
    x = DTensor.from_local(torch.zeros(3, 8), mesh.device_mesh, placements, shape=torch.Size((24, 8)), stride=(8, 1))
    for act, path in ((dcp.save, "none"), (dcp.load, "whole")):
        told = pytest.raises(dcp.CheckpointException, match="doesn't fit what other axes split already")
        with case(f"placements that no spec says, {act.__name__}"), told:
            act({"w": x}, checkpoint_id=f"{folder}/{path}")


def test_files_of_torchs_are_read_and_ours_convert_to_them(pool, tmp_path):
    pool.run(other_formats, str(tmp_path))


def meanwhile(folder: str) -> None:
    """A save in a group of its own: training goes on over the default group, that of the parameters' gradients."""
    mesh = job()
    model = axes.shard_map(axes.shard_module(nn.Linear(64, 64), {"*": "..."}, mesh), "b@dp d -> b@dp f", mesh)
    x = axes.shard(torch.ones(8, 64), "b@dp d", mesh=mesh)
    state = {**model.state_dict(), "factor": axes.shard(WHOLE, "(three=3 h@tp) e", mesh=mesh)}
    saved = {name: p.to_local().clone() for name, p in state.items()}
    saving = dcp.async_save(state, checkpoint_id=folder, process_group=dist.new_group(backend="gloo"))
    state["factor"].to_local().zero_()
    for _ in range(5):
        model(x).sum().backward()
        with torch.no_grad():
            for p in model.parameters():
                p.add_(p.grad)
    saving.result()
    dcp.load(state, checkpoint_id=folder)
    for name, p in state.items():
        assert torch.equal(p.to_local(), saved[name]), name


def test_a_checkpoint_that_is_written_while_training_goes_on_is_as_good(pool, tmp_path):
    pool.run(meanwhile, str(tmp_path))


def loaded_since() -> None:
    mesh = job()
    model = linear(torch.ones(24, 8), "(three=3 h@tp) e", mesh)
    loss = (model.weight * model.weight).sum()
    set_model_state_dict(model, given(WHOLE), options=FROM_RANK_0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    for spec in ("(three=3 h@tp) e", "h@dp e"):
        model.weight = nn.Parameter(axes.shard(torch.zeros(24, 8), spec, mesh=mesh).to("meta"))
        set_model_state_dict(model, given(WHOLE), options=FROM_RANK_0)
        assert same(model.weight, WHOLE), "a parameter without memory gets it"


def test_backward_refuses_what_was_loaded_since_it_was_saved_and_what_has_no_memory_gets_it(pool):
    pool.run(loaded_since)


# ------------------------------------------------------------------------------ under FSDP2


def under_fsdp(folder: str) -> None:
    """Each saved, loaded by a plain tensor, and filled from a state dict, a file and the checkpoint."""
    mesh, dp = job(), job()["dp"].device_mesh
    for number, (rows, spec, dim) in enumerate(
        [(24, FACTOR, 1), (24, "h@tp e", 0), (7, "h@tp e", 0), (13, "h@tp e", 0)]
    ):
        with case(f"{rows} rows, {spec}, FSDP2 on dim {dim}"):
            whole, path = WHOLE[:rows] if rows < 24 else WHOLE, f"{folder}/{number}"

            def layer(value: torch.Tensor, spec: str = spec, dim: int = dim) -> nn.Linear:
                return fully_shard(linear(value, spec, mesh["tp"]), mesh=dp, shard_placement_fn=lambda _: Shard(dim))

            model, target = layer(whole), {"weight": torch.zeros_like(whole)}
            dcp.save(model.state_dict(), checkpoint_id=path)
            dcp.load(target, checkpoint_id=path)
            assert torch.equal(target["weight"], whole)
            if dist.get_rank() == 0:
                save_file({"weight": whole}, f"{path}.safetensors")
            dist.barrier()
            for way in ("a checkpoint", "a state dict", "a file"):
                with case(way):
                    model = layer(torch.zeros_like(whole))
                    if way == "a checkpoint":
                        dcp.load(model.state_dict(), checkpoint_id=path)
                    elif way == "a file":
                        axes.nn.load_safetensors(model, f"{path}.safetensors")
                    else:
                        set_model_state_dict(model, given(whole), options=FROM_RANK_0)
                    assert same(model.weight, whole)


def test_what_fsdp_shards_over_tensor_parallelism_is_saved_and_filled(pool, tmp_path):
    """torch takes the shards of a dim that isn't divided to begin elsewhere: parts were overwritten or left."""
    pool.run(under_fsdp, str(tmp_path))


def over_a_factor(folder: str) -> None:
    mesh = job()
    model = linear(WHOLE, "(two=2 h@tp) e", mesh["tp"])
    fully_shard(model, mesh=mesh["dp"].device_mesh)
    dcp.save({"weight": WHOLE}, checkpoint_id=f"{folder}/whole")
    acts = {
        "save": lambda: dcp.save(model.state_dict(), checkpoint_id=f"{folder}/none"),
        "load": lambda: dcp.load(model.state_dict(), checkpoint_id=f"{folder}/whole"),
        "fill": lambda: set_model_state_dict(model, given(WHOLE), options=FROM_RANK_0),
        "unshard": lambda: axes.unshard(model.weight.detach()),
    }
    for name, act in acts.items():
        with case(name), pytest.raises((ShardingError, dcp.CheckpointException)) as error:
            act()
        assert re.search("is split by two axes and by a factor|doesn't fit what other axes", str(error.value)), name


def test_fsdp_on_the_dim_of_a_factor_is_an_error_wherever_its_placements_are_read(pool, tmp_path):
    pool.run(over_a_factor, str(tmp_path))


# ------------------------------------------------------------------------------ safetensors files


class CountingSlice:
    """A slice of a file's tensor that counts the bytes which are taken."""

    taken = 0

    def __init__(self, inner):
        self.inner, self.get_shape, self.get_dtype = inner, inner.get_shape, inner.get_dtype

    def __getitem__(self, where):
        part = self.inner[where]
        CountingSlice.taken += part.nbytes
        return part


def counting(*args, real=safetensors.safe_open, **keywords):
    """`safetensors.safe_open` that gives slices, and nothing else of a tensor."""
    file = real(*args, **keywords)
    return types.SimpleNamespace(keys=file.keys, get_slice=lambda name: CountingSlice(file.get_slice(name)))


@pytest.mark.parametrize("rank", [0, 3, 6])
@pytest.mark.parametrize("spec", ["h@tp e", "h@(tp dp) e", FACTOR, "(two=2 h@dp) (four=4 e@tp)", "h e@dp", "h e"])
def test_a_rank_reads_the_bytes_of_its_shards_and_no_others(tmp_path, monkeypatch, spec, rank):
    save_file({"weight": WHOLE}, tmp_path / "model.safetensors")
    monkeypatch.setattr(safetensors, "safe_open", counting)
    monkeypatch.setattr(CountingSlice, "taken", 0)
    with axes.simulate(8, rank=rank), job() as mesh:
        model = axes.nn.load_safetensors(linear(torch.zeros(24, 8), spec, mesh), tmp_path)
        part = axes.shard(WHOLE, spec).to_local()
        assert torch.equal(model.weight.to_local(), part)
        assert CountingSlice.taken == part.nbytes


class Tied(nn.Module):
    """An embedding whose weight is the head's, a fused projection, and a buffer."""

    def __init__(self, device="cpu"):
        super().__init__()
        with torch.device(device):
            self.embedding = nn.Embedding(12, 8)
            self.qkv = nn.Linear(8, 24, bias=False)
            self.head = nn.Linear(8, 12, bias=False)
            self.register_buffer("scale", torch.ones(()))
            self.register_buffer("cache", torch.ones(3), persistent=False)
        self.head.weight = self.embedding.weight

    def reset_parameters(self):
        nn.init.ones_(self.scale)
        nn.init.ones_(self.cache)


SPECS = {"embedding.weight": "v@tp d", "qkv.weight": "(three=3 h@tp k) d", "*": "..."}

HUGGING = {
    "model.embed_tokens.weight": torch.arange(96.0).view(12, 8).bfloat16(),
    "model.qkv.weight": -torch.arange(192.0).view(24, 8),
    "model.scale": torch.tensor(2.5),
    "model.rotary.inv_freq": torch.ones(4),
}

NAMES = {"embedding.weight": "model.embed_tokens.weight", "qkv.weight": "model.qkv.weight", "scale": "model.scale"}


def named(name):
    return NAMES.get(name, f"model.{name}")


@pytest.fixture
def folder(tmp_path):
    """The tensors in two files with an index."""
    first = {name: tensor for name, tensor in HUGGING.items() if "embed" in name}
    save_file(first, tmp_path / "model-00001-of-00002.safetensors")
    save_file(
        {name: tensor for name, tensor in HUGGING.items() if name not in first},
        tmp_path / "model-00002-of-00002.safetensors",
    )
    places = {name: f"model-0000{1 if name in first else 2}-of-00002.safetensors" for name in HUGGING}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return tmp_path


def filled(model):
    """What isn't as the files say."""
    pairs = [
        (model.embedding.weight, HUGGING["model.embed_tokens.weight"].float()),
        (model.qkv.weight, HUGGING["model.qkv.weight"]),
        (model.scale, HUGGING["model.scale"]),
    ]
    return [
        list(whole.shape)
        for found, whole in pairs
        if not torch.equal(axes.unshard(found.detach()) if hasattr(found, "placements") else found, whole)
    ]


def into_models(folder):
    mesh, wrong = job(), []
    for device in ("cpu", "meta"):
        model = axes.shard_module(Tied(device), SPECS, mesh["tp"], k=2)
        loaded = axes.nn.load_safetensors(model, folder, named, ignore="*.inv_freq")
        wrong += [*filled(model), *([] if loaded is model else ["another module"])]
        wrong += [] if model.head.weight is model.embedding.weight else ["untied"]
        model = axes.shard_module(Tied(device), SPECS, mesh["tp"], k=2)
        fully_shard(model, mesh=mesh["dp"].device_mesh, shard_placement_fn=lambda _: Shard(1))
        axes.nn.load_safetensors(model, folder, NAMES, ignore=["*.inv_freq"])
        weight = HUGGING["model.qkv.weight"]
        here = model.qkv.weight
        part = distribute_tensor(weight, here.device_mesh, here.placements).to_local()
        wrong += [*filled(model), *([] if torch.equal(here.to_local(), part) else ["the shard"])]
    return wrong


def test_files_with_an_index_fill_tied_fused_and_fully_sharded_parameters(pool, folder):
    assert pool.run(into_models, str(folder)) == [[]] * 8


def out_of_models(folder):
    """What is read of files that ranks have written together, of a module sharded in several ways."""
    mesh, wrong = job(), []
    torch.manual_seed(0)
    whole = Tied().double()
    kinds = {
        "fused": (SPECS, mesh["tp"], {}),
        "columns": ({"embedding.weight": "v d@(tp dp)", "qkv.weight": "f@dp d@tp", "*": "..."}, mesh, {}),
        "uneven": ({"embedding.weight": "v@(dp tp) d", "qkv.weight": "f d@(dp tp)", "*": "..."}, mesh, {}),
        "fully sharded": (
            SPECS,
            mesh["tp"],
            {"mesh": mesh["dp"].device_mesh, "shard_placement_fn": lambda _: Shard(1)},
        ),
        "by fully_shard alone": (None, None, {"reshard_after_forward": True}),
        "plain": (None, None, {}),
    }
    for kind, (specs, place, fsdp) in kinds.items():
        model, again = copy.deepcopy(whole), Tied().double()
        for each in (model, again) if specs is not None else ():
            axes.shard_module(each, specs, place, **({"k": 2} if specs is SPECS else {}))
        if fsdp:
            fully_shard(model, **fsdp)
        path = Path(folder, kind)
        axes.nn.save_safetensors(model, path, named)
        found = load_file(path / "model.safetensors")
        wanted = {named(name): x for name, x in whole.state_dict().items() if name != "head.weight"}
        wrong += [f"{kind}: {name}" for name in wanted.keys() ^ found.keys()]
        wrong += [f"{kind}: {name}" for name, x in wanted.items() if not torch.equal(found[name], x)]
        axes.nn.load_safetensors(again, path, named)
        pairs = zip(again.state_dict().values(), model.state_dict().values(), strict=True) if not fsdp else ()
        wrong += [f"{kind}, loaded" for one, other in pairs if not torch.equal(local_of(one), local_of(other))]
    return wrong


def local_of(x):
    return x.to_local() if hasattr(x, "placements") else x


def test_what_ranks_write_together_is_what_one_process_would(pool, tmp_path):
    assert pool.run(out_of_models, str(tmp_path)) == [[]] * 8


def failing(folder):
    """What each rank is told where paths or modules differ, and where one rank can't write."""
    rank, found, mesh = dist.get_rank(), [], job()
    model = axes.shard_module(Tied(), SPECS, mesh["tp"], k=2)
    half = axes.shard_module(nn.Linear(4, 8, bias=False), {"weight": "f@tp d"}, mesh["tp"])
    for path, what, names in (
        ("/proc/nowhere", model, named),
        (f"{folder}/{rank == 5}", model, named),
        (f"{folder}/stages", half if rank // 2 else nn.Linear(2, 2), None),
        (f"{folder}/apart", half, (lambda name: f"{rank % 2}.{name}")),
    ):
        try:
            axes.nn.save_safetensors(what, path, names)
        except (ShardingError, DesyncError) as error:
            found.append(f"{type(error).__name__}: {error}")
    axes.nn.save_safetensors(half, f"{folder}/{mesh['tp'].ranks[0]}.safetensors", mesh=mesh["tp"])
    return found


def test_one_rank_that_fails_ends_a_save_for_all_and_leaves_no_file_that_looks_whole(pool, tmp_path):
    for nowhere, *differing in pool.run(failing, str(tmp_path)):
        for said in differing:
            assert said.startswith("DesyncError: ranks disagree in save_safetensors over ranks 0..7:")
            assert said.endswith("all ranks call it with the same module and path")
        assert nowhere.startswith("ShardingError: axes.nn.save_safetensors: FileNotFoundError: ")
        assert len(differing) == 3
    assert {file.name: load_file(file).keys() for file in tmp_path.rglob("*.safetensors*")} == {
        f"{2 * at}.safetensors": {"weight"} for at in range(4)
    }


def test_a_plain_module_in_one_process_is_filled_and_autograd_sees_it(folder):
    model = Tied()
    y = model.qkv(torch.ones(2, 8, requires_grad=True)).sum()
    axes.nn.load_safetensors(model, folder, named, "*.inv_freq")
    assert filled(model) == []
    assert model.cache.tolist() == [1, 1, 1]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


def test_a_tied_parameter_is_found_under_any_of_its_names_and_one_without_a_name_keeps_its_value(tmp_path):
    save_file({"head.weight": torch.ones(12, 8), "scale": torch.ones(())}, tmp_path / "x.safetensors")
    model = Tied()
    before = model.qkv.weight.clone()
    axes.nn.load_safetensors(model, tmp_path, {"qkv.weight": None})
    assert model.embedding.weight.eq(1).all()
    assert torch.equal(model.qkv.weight, before)


# ------------------------------------------------------------------------------------- refused


def test_everything_that_does_not_fit_is_told_at_once_and_nothing_is_changed(tmp_path):
    save_file(
        {
            "model.qkv.weight": torch.ones(24, 7),
            "model.scale": torch.ones((), dtype=torch.int64),
            "more": torch.ones(2),
        },
        tmp_path / "model.safetensors",
    )
    model = Tied()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(ShardingError) as error:
        axes.nn.load_safetensors(model, tmp_path, named)
    assert str(error.value).splitlines() == [
        "axes.nn.load_safetensors: 4 tensors don't fit (floats are converted)",
        "  scale is torch.float32 [], and 'model.scale' in the files I64 []",
        "  embedding.weight = head.weight is torch.float32 [12, 8], and no file has 'model.embed_tokens.weight' or 'model.head.weight'",
        "  qkv.weight is torch.float32 [24, 8], and 'model.qkv.weight' in the files F32 [24, 7]",
        "  'more' is in the files, and nobody takes it; ignore=['more'] leaves it",
    ]
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def saved(path: Path, tensors: str) -> None:
    save_file({name: torch.ones(2) for name in tensors}, path)


# fmt: off
UNREADABLE = {
    "nothing": (lambda at: None, "can't be read as a safetensors file: No such file"),
    "bytes.safetensors": (lambda at: at.write_bytes(b"no header" * 9), "can't be read as a safetensors file"),
    "empty": (lambda at: at.mkdir(), "empty can't be read as a safetensors file"),
    "twice": (lambda at: (at.mkdir(), *(saved(at / f"{name}.safetensors", "w") for name in "ab")), "b.safetensors and in another file beside it; pass one file"),
}
# fmt: on


@pytest.mark.parametrize("name", UNREADABLE)
def test_files_that_cannot_be_read_are_told(tmp_path, name):
    make, text = UNREADABLE[name]
    make(tmp_path / name)
    with pytest.raises(ShardingError, match=re.escape(text)):
        axes.nn.load_safetensors(Tied(), tmp_path / name)


@pytest.mark.parametrize(
    ("device", "names", "text"),
    [
        ("cpu", {"qkv.weight": "w"}, "qkv.weight is torch.float32 .24, 8., and no file has 'w'"),
        ("meta", named, "has no values, on the device 'meta'"),
    ],
)
def test_names_and_modules_that_cannot_be_filled_are_told(folder, device, names, text):
    with pytest.raises(ShardingError, match=text):
        axes.nn.load_safetensors(Tied(device), folder, names, "*.inv_freq")


def refused(folder):
    """What a rank is told of a file that lacks tensors, and whether its parameters are as they were."""
    mesh = job()
    model = axes.shard_module(Tied(), {**SPECS, "qkv.weight": "(three=3 h@tp k) d@dp"}, mesh, k=2)
    before = model.qkv.weight.to_local().clone()
    with pytest.raises(ShardingError, match="2 tensors don't fit"):
        axes.nn.load_safetensors(model, folder, named, "*.inv_freq")
    return torch.equal(model.qkv.weight.to_local(), before)


def test_a_file_that_lacks_tensors_changes_nothing_on_any_rank(pool, folder):
    assert pool.run(refused, str(folder / "model-00001-of-00002.safetensors")) == [True] * 8
