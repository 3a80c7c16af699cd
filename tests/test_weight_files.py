"""Weights from safetensors files into sharded modules: what each rank has, what it reads, and what is refused."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from unittest import mock

import pytest
import safetensors
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

import axes
from axes import DesyncError, ShardingError
from tests.test_checkpoint_any_sharding import SHAPES, drawn_grid, possible, values


class Counting:
    """`safetensors.safe_open` that counts the bytes of slices, and gives nothing else of a tensor."""

    taken = 0
    real = safetensors.safe_open

    def __init__(self, *args, **keywords):
        self.file = Counting.real(*args, **keywords)

    def __enter__(self):
        self.file.__enter__()
        return self

    def __exit__(self, *error):
        self.file.__exit__(*error)

    def keys(self):
        return self.file.keys()

    def get_slice(self, name):
        return CountingSlice(self.file.get_slice(name))


class CountingSlice:
    def __init__(self, inner):
        self.inner = inner
        self.get_shape, self.get_dtype = inner.get_shape, inner.get_dtype

    def __getitem__(self, where):
        part = self.inner[where]
        Counting.taken += part.numel() * part.itemsize
        return part


# ------------------------------------------------------------------------------- any sharding


def from_files_onto_any_mesh(folder):
    """What differs, and what a rank read beside its own bytes, over random meshes and shardings."""
    with mock.patch.object(safetensors, "safe_open", Counting):
        return counted(folder)


def counted(folder):
    draw, rank, wrong = random.Random(2), dist.get_rank(), []
    for number in range(6):
        dtypes = [draw.choice([torch.float32, torch.bfloat16, torch.int32]) for _ in range(10)]
        wholes = {f"p{i}": values(draw.choice(SHAPES), 100 * number + i, dtype) for i, dtype in enumerate(dtypes)}
        path = f"{folder}/{number}.safetensors"
        if rank == 0:
            save_file(wholes, path)
        dist.barrier()
        grid, model = drawn_grid(draw), nn.Module()
        cases = {name: possible(draw, grid, tuple(whole.shape)) for name, whole in wholes.items()}
        for name, case in cases.items():
            made = case.sharded(torch.zeros_like(wholes[name]))
            model.register_parameter(name, nn.Parameter(made, requires_grad=made.is_floating_point()))
        Counting.taken, expected = 0, 0
        axes.nn.load_safetensors(model, path)
        for name, case in cases.items():
            if rank in grid.ranks:
                shard = case.shard(wholes[name], rank)
                expected += shard.numel() * shard.itemsize
                if not torch.equal(model.get_parameter(name).detach().to_local(), shard):
                    wrong.append((number, case))
        if Counting.taken != expected:
            wrong.append((number, f"read {Counting.taken} bytes of {expected}"))
    return wrong


def test_a_rank_reads_the_bytes_of_its_shards_and_no_others_under_any_sharding(warm, tmp_path):
    assert warm(from_files_onto_any_mesh, 4, str(tmp_path)) == [[]] * 4


class Mapped(Counting):
    """`safetensors.safe_open` that looks how much of the file has been read into this process when it is closed."""

    resident = 0

    def __exit__(self, *error):
        maps = Path("/proc/self/smaps").read_text().split(" kB\n")
        at = next(i for i, line in enumerate(maps) if "big.safetensors" in line)
        lines = (line for line in maps[at:] if line.startswith("Rss:"))
        Mapped.resident = int(next(lines).split()[1]) * 1024
        super().__exit__(*error)


def test_of_a_file_those_pages_are_read_that_a_shard_lies_in(tmp_path, monkeypatch):
    save_file({"weight": torch.ones(4096, 4096)}, tmp_path / "big.safetensors")
    monkeypatch.setattr(safetensors, "safe_open", Mapped)
    with axes.simulate(4, rank=2), axes.init_mesh("tp=4", device_type="cpu"):
        layer = axes.shard_module(nn.Linear(4096, 4096, bias=False), {"weight": "h@tp e"})
        axes.nn.load_safetensors(layer, tmp_path)
        assert layer.weight.to_local().eq(1).all()
        shard = layer.weight.to_local().nbytes
        assert shard <= Mapped.resident <= 1.5 * shard  # a quarter of the file, and the large pages at its ends


# ------------------------------------------------------------------------------------- models


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
    mesh = axes.init_mesh("dp=2 tp=2", device_type="cpu")
    wrong = []
    for device in ("cpu", "meta"):
        model = axes.shard_module(Tied(device), SPECS, mesh["tp"], k=2)
        loaded = axes.nn.load_safetensors(model, folder, named, ignore="*.inv_freq")
        wrong += [*filled(model), *([] if loaded is model else ["another module"])]
        wrong += [] if model.head.weight is model.embedding.weight else ["untied"]
        model = axes.shard_module(Tied(device), SPECS, mesh["tp"], k=2)
        fully_shard(model, mesh=mesh["dp"].device_mesh, shard_placement_fn=lambda _: Shard(1))
        axes.nn.load_safetensors(model, f"{folder}/model.safetensors.index.json", NAMES, ignore=["*.inv_freq"])
        weight = HUGGING["model.qkv.weight"]
        here = model.qkv.weight
        same = distribute_tensor(weight, here.device_mesh, here.placements).to_local()
        wrong += [*filled(model), *([] if torch.equal(here.to_local(), same) else ["the shard"])]
    return wrong


def test_files_with_an_index_fill_tied_fused_and_fully_sharded_parameters(warm, folder):
    assert warm(into_models, 4, str(folder)) == [[]] * 4


def by_torch(folder):
    mesh, whole = axes.init_mesh("dp=2 tp=2", device_type="cpu"), HUGGING["model.qkv.weight"]
    wrong = []
    for spec in ("(three=3 h@tp) e", "h@(tp dp) e", "h (two=2 e@dp)"):
        found = {name: torch.zeros_like(x) for name, x in HUGGING.items()}
        found["model.qkv.weight"] = axes.shard(torch.zeros_like(whole), spec, mesh=mesh)
        dcp.load(found, storage_reader=HuggingFaceStorageReader(folder))
        wrong += [] if torch.equal(axes.unshard(found["model.qkv.weight"]), whole) else [spec]
    return wrong


def test_torchs_own_reader_of_such_files_fills_factors_too(warm, folder):
    assert warm(by_torch, 4, str(folder)) == [[]] * 4


def uneven_under_fsdp(folder: Path) -> list[str]:
    """What isn't as in the whole tensor, of rows that neither axis divides: `f@(tp fsdp)`, as torch cuts it."""
    mesh, wrong = axes.init_mesh("fsdp=3 tp=2", device_type="cpu", timeout=60), []
    for rows in (7, 13):
        whole = torch.arange(2.0 * rows).view(rows, 2)

        def layer(rows: int = rows) -> nn.Linear:
            made = axes.shard_module(nn.Linear(2, rows, bias=False), {"weight": "f@tp d"}, mesh["tp"])
            return fully_shard(made, mesh=mesh["fsdp"].device_mesh)

        filled, resumed, given = layer(), layer(), layer()
        axes.nn.load_safetensors(filled, folder / f"{rows}.safetensors")
        dcp.save({"w": filled.weight}, checkpoint_id=folder / f"{rows}")
        dcp.load({"w": resumed.weight}, checkpoint_id=folder / f"{rows}")
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_model_state_dict(given, {"weight": whole} if dist.get_rank() == 0 else {}, options=options)
        found = {"file": filled, "checkpoint": resumed, "state dict": given}
        wrong += [f"{rows} {how}" for how, it in found.items() if not torch.equal(axes.unshard(it.weight), whole)]
    return wrong


def test_rows_that_fsdp_over_tensor_parallelism_does_not_divide_are_filled(warm, tmp_path):
    """torch takes the shards of such a dim to begin elsewhere: parts were overwritten or left as they were."""
    for rows in (7, 13):
        save_file({"weight": torch.arange(2.0 * rows).view(rows, 2)}, tmp_path / f"{rows}.safetensors")
    assert warm(uneven_under_fsdp, 6, tmp_path, timeout=120) == [[]] * 6


def test_a_plain_module_in_one_process_is_filled(folder):
    model = axes.nn.load_safetensors(Tied(), folder, named, "*.inv_freq")
    assert filled(model) == []
    assert model.cache.tolist() == [1, 1, 1]


def test_a_tied_parameter_is_found_under_any_of_its_names(tmp_path):
    save_file(
        {"head.weight": torch.ones(12, 8), "qkv.weight": torch.ones(24, 8), "scale": torch.ones(())},
        tmp_path / "x.safetensors",
    )
    model = axes.nn.load_safetensors(Tied(), tmp_path)
    assert model.embedding.weight.eq(1).all()


def test_a_name_that_is_none_keeps_the_value(folder):
    model = Tied()
    before = model.qkv.weight.clone()
    axes.nn.load_safetensors(model, folder, {**NAMES, "qkv.weight": None}, ["*.inv_freq", "*.qkv.*"])
    assert torch.equal(model.qkv.weight, before)
    assert model.embedding.weight[1, 0] == 8


def test_autograd_sees_that_a_parameter_was_filled(tmp_path):
    save_file({"weight": torch.ones(3, 3)}, tmp_path / "x.safetensors")
    model = nn.Linear(3, 3, bias=False)
    y = model(torch.ones(2, 3, requires_grad=True)).sum()
    axes.nn.load_safetensors(model, tmp_path)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


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
        "axes.nn.load_safetensors",
        "in no file",
        "  embedding.weight = head.weight  [12, 8]    asked for 'model.embed_tokens.weight' or 'model.head.weight'",
        "in the files, and nobody takes them (ignore=[...] leaves them)",
        "  'more'",
        "of another shape or dtype than the file's",
        "  scale = 'model.scale': the parameter is torch.float32, the file has torch.int64; only floating point values are converted",
        "  qkv.weight = 'model.qkv.weight': the parameter is [24, 8], the file has [24, 7]",
    ]
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def wrong_path(tmp_path):
    return tmp_path / "nothing"


def not_safetensors(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"no header" * 9)
    return tmp_path


def twice(tmp_path):
    for name in "ab":
        save_file({"w": torch.ones(2)}, tmp_path / f"{name}.safetensors")
    return tmp_path


def no_index(tmp_path):
    (tmp_path / "model.safetensors.index.json").write_text('{"weights": 3}')
    return tmp_path


def not_in_its_file(tmp_path):
    save_file({"w": torch.ones(2)}, tmp_path / "a.safetensors")
    places = dict.fromkeys(["embedding.weight", "qkv.weight", "scale"], "a.safetensors")
    (tmp_path / "x.index.json").write_text(json.dumps({"weight_map": places}))
    return tmp_path / "x.index.json"


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (wrong_path, "can't be read as a safetensors file: No such file"),
        (not_safetensors, "can't be read as a safetensors file"),
        (lambda path: path, "has no safetensors file"),
        (twice, "'w' is in two files, a.safetensors and b.safetensors"),
        (no_index, "can't be read as an index, {\"weight_map\": {name: file}}: KeyError: 'weight_map'"),
        (not_in_its_file, "a.safetensors has no tensor 'scale', which the index says it has"),
    ],
    ids=["path", "bytes", "empty folder", "twice", "index", "not in its file"],
)
def test_files_that_cannot_be_read_are_told(tmp_path, make, text):
    with pytest.raises(ShardingError, match=re.escape(text)):
        axes.nn.load_safetensors(Tied(), make(tmp_path))


def test_other_mistakes_are_told(folder):
    with pytest.raises(ShardingError, match="takes a module; found dict"):
        axes.nn.load_safetensors({}, folder)
    with pytest.raises(ShardingError, match=r"the module has no parameter 'qkv.weigth'; did you mean 'qkv.weight'"):
        axes.nn.load_safetensors(Tied(), folder, {"qkv.weigth": "w"})
    with pytest.raises(ShardingError, match=r"names of 'scale' is the name of a tensor .* found 3"):
        axes.nn.load_safetensors(Tied(), folder, lambda _: 3)
    with pytest.raises(ShardingError, match="the parameter has no memory; shard the module"):
        axes.nn.load_safetensors(Tied("meta"), folder, named, "*.inv_freq")


def refused(folder, others):
    """What each rank is told where rank 2 looks elsewhere, and whether its parameters are as they were."""
    mesh = axes.init_mesh("dp=2 tp=2", device_type="cpu")
    model = axes.shard_module(Tied(), {**SPECS, "qkv.weight": "(three=3 h@tp k) d@dp"}, mesh, k=2)
    before = model.qkv.weight.to_local().clone()
    try:
        axes.nn.load_safetensors(model, others if dist.get_rank() == 2 else folder, named, "*.inv_freq")
    except (ShardingError, DesyncError) as error:
        return type(error).__name__, str(error), torch.equal(model.qkv.weight.to_local(), before)


def test_a_file_that_one_rank_does_not_find_is_an_error_on_all(warm, folder, tmp_path):
    found = warm(refused, 4, str(folder), str(tmp_path / "nothing"))
    assert [kind for kind, _, _ in found] == ["DesyncError", "DesyncError", "ShardingError", "DesyncError"]
    assert all("nothing can't be read as a safetensors file" in text and same for _, text, same in found)
    assert "rank 2 can't take part in load_safetensors over ranks 0..3" in found[0][1]


def test_names_that_no_file_has_are_the_same_error_on_all(warm, folder):
    found = warm(
        refused, 4, str(folder / "model-00001-of-00002.safetensors"), str(folder / "model-00001-of-00002.safetensors")
    )
    assert [kind for kind, _, _ in found] == ["ShardingError"] * 4
    assert len({text for _, text, _ in found}) == 1
    assert all(same for _, _, same in found)
