"""Checkpoints of tensors that are split by a factor: saved and loaded by torch, against the whole tensors."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

import axes
from axes import ShardingError
from axes.runtime.checkpoint import boxes_of
from tests.conftest import takes_factors

WHOLE = torch.arange(24 * 6.0).view(24, 6) + 0.5

FROM_RANK_0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)

SPECS = {  # by mesh, what a tensor of 24 x 6 may be sharded like
    "dp=2 tp=2": [
        "(three=3 h@tp) e",
        "(three=3 h@tp d=2) e",
        "(three=3 h@tp) e@dp",
        "(four=4 h@dp) e@tp",
        "h@tp e",
        "h@(tp dp) e",
        "h@(dp tp) e",
        "h e@tp",
        "h e",
    ],
    "tp=4": ["(three=3 h@tp) e", "(two=2 h@tp) e", "h@tp e"],
    "tp=2 dp=2": ["(three=3 h@tp) e", "(two=2 h@dp d=3) e@tp", "(h=12@tp x) e@dp", "(two=2 h@dp) (three=3 g@tp)"],
}
CASES = [(mesh, spec) for mesh, specs in SPECS.items() for spec in specs]


def sharded(mesh, spec, whole):
    return axes.shard(whole, spec, mesh=axes.init_mesh(mesh))


def every_pair(folder):
    """Each sharding saved, and loaded under each."""
    wrong = []
    for number, (mesh, spec) in enumerate(CASES):
        saved = {"w": sharded(mesh, spec, WHOLE), "deep": {"b": sharded(mesh, spec, -WHOLE)}, "plain": WHOLE * 2}
        path = f"{folder}/{number}"
        dcp.save(saved, checkpoint_id=path)
        loaded = {
            "w": torch.zeros_like(WHOLE),
            "deep": {"b": torch.zeros_like(WHOLE)},
            "plain": torch.zeros_like(WHOLE),
        }
        dcp.load(loaded, checkpoint_id=path)
        if not (torch.equal(loaded["w"], WHOLE) and torch.equal(loaded["deep"]["b"], -WHOLE)):
            wrong.append((mesh, spec, "as plain tensors"))
        for case in CASES:
            target = {"w": sharded(*case, torch.zeros_like(WHOLE)), "deep": {"b": sharded(*case, torch.zeros(24, 6))}}
            dcp.load(target, checkpoint_id=path)
            for found, whole in ((target["w"], WHOLE), (target["deep"]["b"], -WHOLE)):
                if not torch.equal(found.to_local(), sharded(*case, whole).to_local()):
                    wrong.append((mesh, spec, case))
    return wrong


def test_what_is_saved_under_any_sharding_loads_under_any(world, tmp_path):
    assert world(every_pair, 4, str(tmp_path), timeout=300) == [[]] * 4


def one_run_goes_torchs_way(folder):
    mesh = axes.init_mesh("dp=2 tp=2")
    ours, theirs = ["(three=3 h@tp) e"], ["h@tp e", "h@(tp dp) e", "h e", "(h@tp d=3) e", "(one=1 h@tp) e", "h@dp e@tp"]
    strided = distribute_tensor(WHOLE, mesh.device_mesh, [_StridedShard(0, split_factor=2), Shard(0)])
    assert boxes_of(strided) is None
    empty = axes.shard(torch.zeros(0, 6), "(three=3 h@tp) e", mesh=mesh)
    dcp.save({"empty": empty}, checkpoint_id=f"{folder}/empty")
    return [len(boxes_of(sharded("dp=2 tp=2", spec, WHOLE)) or "") for spec in (*ours, *theirs)]


def test_only_factors_have_several_boxes(world, tmp_path):
    assert world(one_run_goes_torchs_way, 4, str(tmp_path)) == [[3, 0, 0, 0, 0, 0, 0]] * 4


def saved_elsewhere_loaded_here(folder):
    """A checkpoint of whole tensors, as a job without axes writes it."""
    mesh = axes.init_mesh("dp=2 tp=2")
    dcp.save({"w": WHOLE}, checkpoint_id=folder)
    target = axes.shard(torch.zeros(24, 6), "(three=3 h@tp d=2) e", mesh=mesh)
    dcp.load({"w": target}, checkpoint_id=folder)
    whole = f"{folder}/whole.pt"
    dcp.save({"w": axes.shard(WHOLE, "(three=3 h@tp d=2) e", mesh=mesh)}, checkpoint_id=f"{folder}/ours")
    if dist.get_rank() == 0:
        dcp_to_torch_save(f"{folder}/ours", whole)
    dist.barrier()
    return torch.equal(axes.unshard(target), WHOLE), torch.equal(torch.load(whole)["w"], WHOLE)


def test_checkpoints_of_whole_tensors_load_and_ours_convert_to_them(world, tmp_path):
    assert world(saved_elsewhere_loaded_here, 4, str(tmp_path)) == [(True, True)] * 4


def saved_meanwhile(folder):
    x = axes.shard(WHOLE, "(three=3 h@tp) e", mesh=axes.init_mesh("dp=2 tp=2"))
    saving = dcp.async_save({"w": x}, checkpoint_id=folder)
    x.to_local().zero_()
    saving.result()
    dcp.load({"w": x}, checkpoint_id=folder)
    return torch.equal(x.to_local(), axes.shard(WHOLE, "(three=3 h@tp) e", mesh=axes.init_mesh("dp=2 tp=2")).to_local())


def test_a_checkpoint_that_is_written_meanwhile_is_as_good(world, tmp_path):
    assert world(saved_meanwhile, 4, str(tmp_path)) == [True] * 4


def saved_while_training_goes_on(folder):
    """A save in a group of its own: training goes on over the default group, that of the parameters' gradients."""
    mesh = axes.init_mesh("dp=2 tp=2", device_type="cpu")
    model = axes.shard_map(axes.shard_module(nn.Linear(64, 64), {"*": "..."}, mesh), "b@dp d -> b@dp f", mesh)
    x = axes.shard(torch.ones(8, 64), "b@dp d", mesh=mesh)
    own = dist.new_group(backend="gloo")
    saved = {name: p.to_local().clone() for name, p in model.state_dict().items()}
    saving = dcp.async_save(model.state_dict(), checkpoint_id=folder, process_group=own)
    for _ in range(20):
        model(x).sum().backward()
        with torch.no_grad():
            for p in model.parameters():
                p.add_(p.grad)
    saving.result()
    dcp.load(model.state_dict(), checkpoint_id=folder)
    return all(torch.equal(p.to_local(), saved[name]) for name, p in model.state_dict().items())


def test_a_save_in_a_group_of_its_own_lets_training_go_on(world, tmp_path):
    assert world(saved_while_training_goes_on, 4, str(tmp_path)) == [True] * 4


# ------------------------------------------------------------------------------ whole models


class Fused(nn.Module):
    def __init__(self, values):
        super().__init__()
        self.qkv = nn.Parameter(values[0].clone())
        self.out = nn.Parameter(values[1].clone())

    def forward(self, x):
        return (x @ self.qkv.t()).tanh() @ self.out


MODEL_SPECS = {
    "factors": ("dp=2 tp=2", ("(three=3 h@tp d=2) e", "(three=3 h@tp) o")),
    "more ranks": ("tp=4", ("(three=3 h@tp) e", "(two=2 h@tp) o")),
    "plain": ("dp=2 tp=2", ("h@tp e", "h o@dp")),
}


def model_of(values, kind):
    """The model with its parameters sharded, the optimizer with a state."""
    declaration, specs = MODEL_SPECS[kind]
    model, mesh = Fused(values), axes.init_mesh(declaration)
    for name, spec in zip(("qkv", "out"), specs, strict=True):
        setattr(model, name, nn.Parameter(axes.shard(getattr(model, name).detach(), spec, mesh=mesh)))
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def trained(values):
    """One device's model and optimizer after two steps."""
    model = Fused(values)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for step in range(2):
        optimizer.zero_grad()
        model(torch.arange(12.0).view(2, 6) / 12 + step).square().sum().backward()
        optimizer.step()
    return model, optimizer


def differences(model, optimizer, expected, its_optimizer):
    """What of a model and its optimizer differs from one device's, shard by shard."""
    wrong = []
    for name, parameter in model.named_parameters():
        reference = expected.get_parameter(name)
        pairs = [("value", parameter, reference)]
        if optimizer is not None:
            mine, theirs = optimizer.state[parameter], its_optimizer.state[reference]
            pairs += [(key, mine[key], theirs[key]) for key in ("exp_avg", "exp_avg_sq")]
            wrong += [(name, "step")] if float(mine["step"]) != float(theirs["step"]) else []
        for what, found, whole in pairs:
            local = distribute_tensor(whole.detach(), found.device_mesh, found.placements).to_local()
            if not torch.equal(found.to_local(), local) or not torch.equal(
                axes.unshard(found.detach()), whole.detach()
            ):
                wrong.append((name, what))
    return wrong


def whole_state_dicts():
    values = [WHOLE / 100, WHOLE.flip(0) / 100]
    expected, its_optimizer = trained(values)
    state, optimizer_state = get_model_state_dict(expected), get_optimizer_state_dict(expected, its_optimizer)
    wrong = []
    for kind, broadcast, offload in itertools.product(MODEL_SPECS, (False, True), (False, True)):
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=broadcast, cpu_offload=offload)
        model, optimizer = model_of([torch.zeros(24, 6)] * 2, kind)
        has = not broadcast or dist.get_rank() == 0
        set_model_state_dict(model, dict(state) if has else {}, options=options)
        set_optimizer_state_dict(model, optimizer, optimizer_state if has else {}, options=options)
        wrong += [(kind, broadcast, offload, *each) for each in differences(model, optimizer, expected, its_optimizer)]
        back = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=offload))
        if (not offload or dist.get_rank() == 0) and any(not torch.equal(back[name], state[name]) for name in state):
            wrong.append((kind, broadcast, offload, "back"))
        states = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))
        for name, each in optimizer_state["state"].items():
            if any(not torch.equal(states["state"][name][key], each[key]) for key in each):
                wrong.append((kind, broadcast, offload, "optimizer back", name))
    return wrong


@takes_factors
def test_whole_state_dicts_of_models_and_optimizers_go_in_and_come_out(world):
    assert world(whole_state_dicts, 4) == [[]] * 4


def onto_nothing():
    """Parameters on the meta device get their memory when the state dict comes."""
    values = [WHOLE / 100, WHOLE.flip(0) / 100]
    model, _ = model_of([torch.zeros(24, 6)] * 2, "factors")
    for name in ("qkv", "out"):
        setattr(model, name, nn.Parameter(getattr(model, name).detach().to("meta")))
    state = {"qkv": values[0], "out": values[1]} if dist.get_rank() == 0 else {}
    set_model_state_dict(model, state, options=FROM_RANK_0)
    return [
        torch.equal(axes.unshard(getattr(model, n).detach()), v) for n, v in zip(("qkv", "out"), values, strict=True)
    ]


def test_parameters_without_memory_are_filled(world):
    assert world(onto_nothing, 4) == [[True, True]] * 4


def a_training_run_goes_on_elsewhere(folder):
    """Saved on tp=2 after training, loaded on tp=4 and on plain shards; optimizer and all."""
    values = [WHOLE / 100, WHOLE.flip(0) / 100]
    expected, its_optimizer = trained(values)
    model, optimizer = model_of([torch.zeros(24, 6)] * 2, "factors")
    options = StateDictOptions(full_state_dict=True)
    set_model_state_dict(model, get_model_state_dict(expected), options=options)
    set_optimizer_state_dict(model, optimizer, get_optimizer_state_dict(expected, its_optimizer), options=options)
    states = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.save(states, checkpoint_id=folder)
    wrong = []
    for kind in MODEL_SPECS:
        other, its = model_of([torch.zeros(24, 6)] * 2, kind)
        states = {"model": get_model_state_dict(other), "optimizer": get_optimizer_state_dict(other, its)}
        dcp.load(states, checkpoint_id=folder)
        set_model_state_dict(other, states["model"])
        set_optimizer_state_dict(other, its, states["optimizer"])
        wrong += [(kind, *each) for each in differences(other, its, expected, its_optimizer)]
    return wrong


def test_a_training_run_goes_on_under_another_sharding(world, tmp_path):
    assert world(a_training_run_goes_on_elsewhere, 4, str(tmp_path)) == [[]] * 4


# --------------------------------------------------------------------------------- what can't be


def fsdp_over_a_factor(folder):
    mesh, texts = axes.init_mesh("dp=2 tp=2"), []
    for factor in (2, 3, 4):
        model = nn.Linear(6, 24, bias=False)
        model.weight = nn.Parameter(axes.shard(WHOLE, f"(factor={factor} h@tp) e", mesh=mesh["tp"]))
        fully_shard(model, mesh=mesh["dp"].device_mesh)
        dcp.save({"weight": WHOLE}, checkpoint_id=f"{folder}/{factor}")
        whole = {"weight": WHOLE} if dist.get_rank() == 0 else {}
        for act in (
            lambda m: dcp.save(m.state_dict(), checkpoint_id=f"{folder}/none"),
            lambda m, f=factor: dcp.load(m.state_dict(), checkpoint_id=f"{folder}/{f}"),
            lambda m, w=whole: set_model_state_dict(m, w, options=FROM_RANK_0),
            lambda m: axes.unshard(m.weight.detach()),
        ):
            try:
                act(model)
            except (ShardingError, dcp.CheckpointException) as error:
                texts.append(str(error))
    return texts


def test_fsdp_on_the_dim_of_a_factor_is_an_error_wherever_its_placements_are_read(world, tmp_path):
    for texts in world(fsdp_over_a_factor, 4, str(tmp_path)):
        assert len(texts) == 3 * 4
        assert all("is split by two axes and by a factor" in t or "doesn't fit what other axes" in t for t in texts)


def fsdp_on_another_dim(folder):
    mesh = axes.init_mesh("dp=2 tp=2")
    model = nn.Linear(6, 24, bias=False)
    model.weight = nn.Parameter(axes.shard(WHOLE, "(three=3 h@tp) e", mesh=mesh["tp"]))
    fully_shard(model, mesh=mesh["dp"].device_mesh, shard_placement_fn=lambda _: Shard(1))
    dcp.save(model.state_dict(), checkpoint_id=folder)
    target = {"weight": torch.zeros(24, 6)}
    dcp.load(target, checkpoint_id=folder)
    whole = {"weight": -WHOLE} if dist.get_rank() == 0 else {}
    set_model_state_dict(model, whole, options=FROM_RANK_0)
    return torch.equal(target["weight"], WHOLE), torch.equal(axes.unshard(model.weight.detach()), -WHOLE)


def test_fsdp_on_another_dim_is_saved_and_loaded(world, tmp_path):
    assert world(fsdp_on_another_dim, 4, str(tmp_path)) == [(True, True)] * 4


def fsdp_over_tensor_parallel(folder):
    """torch's own strided shards, as they were."""
    mesh = axes.init_mesh("dp=2 tp=2")
    model = nn.Linear(6, 24, bias=False)
    model.weight = nn.Parameter(distribute_tensor(WHOLE, mesh["tp"].device_mesh, [Shard(0)]))
    fully_shard(model, mesh=mesh["dp"].device_mesh)
    kinds = [type(placement) for placement in model.weight.placements]
    dcp.save(model.state_dict(), checkpoint_id=folder)
    target = {"weight": torch.zeros(24, 6)}
    dcp.load(target, checkpoint_id=folder)
    set_model_state_dict(model, {"weight": -WHOLE} if dist.get_rank() == 0 else {}, options=FROM_RANK_0)
    return (
        kinds == [_StridedShard, Shard],
        torch.equal(target["weight"], WHOLE),
        torch.equal(model.weight.full_tensor(), -WHOLE),
    )


def test_fsdps_own_strided_shards_are_as_before(world, tmp_path):
    assert world(fsdp_over_tensor_parallel, 4, str(tmp_path)) == [(True, True, True)] * 4


def no_spec_says_it(folder):
    mesh = axes.init_mesh("dp=2 tp=2")
    placements = [_StridedShard(0, split_factor=3), _StridedShard(0, split_factor=5)]
    x = DTensor.from_local(torch.zeros(6, 6), mesh.device_mesh, placements, shape=torch.Size((24, 6)), stride=(6, 1))
    texts = []
    for act in (dcp.save, dcp.load):
        dcp.save({"w": WHOLE}, checkpoint_id=f"{folder}/whole")
        try:
            act({"w": x}, checkpoint_id=f"{folder}/{'whole' if act is dcp.load else 'none'}")
        except dcp.CheckpointException as error:  # torch wraps what was raised on each rank
            texts.append(str(error))
    return texts


def test_placements_that_no_spec_says_are_an_error_on_every_rank(world, tmp_path):
    for texts in world(no_spec_says_it, 4, str(tmp_path)):
        assert len(texts) == 2
        assert all("doesn't fit what other axes split already" in text for text in texts)


def safetensors_files(folder):
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter

    mesh = axes.init_mesh("dp=2 tp=2")
    x = axes.shard(WHOLE, "(three=3 h@tp) e", mesh=mesh)
    try:
        dcp.save({"w": x}, storage_writer=HuggingFaceStorageWriter(path=folder, save_distributed=True))
    except dcp.CheckpointException as error:  # torch wraps what was raised on each rank
        return str(error)
    return None


def test_files_that_have_room_for_one_part_of_a_tensor_are_refused(world, tmp_path):
    for text in world(safetensors_files, 4, str(tmp_path)):
        assert "'w' is split by a factor of a dim" in text


def test_a_part_that_a_rank_does_not_have_is_an_error():
    from torch.distributed.checkpoint.metadata import MetadataIndex

    with axes.simulate(2), axes.init_mesh("tp=2") as mesh:
        x = axes.shard(WHOLE, "(three=3 h@tp) e", mesh=mesh)
        assert x.__get_tensor_shard__(MetadataIndex("w", torch.Size((8, 0)))).shape == (4, 6)
        with pytest.raises(ShardingError, match=r"this rank has parts at \[\[0, 0\], \[8, 0\], \[16, 0\]\]"):
            x.__get_tensor_shard__(MetadataIndex("w", torch.Size((4, 0))))
        replicated = distribute_tensor(WHOLE, mesh.device_mesh, [Replicate()])
        assert len(replicated.__create_chunk_list__()) == 1
