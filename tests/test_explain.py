"""`axes.explain` says what happens: what is counted on real ranks, collective by collective, byte by byte."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import axes
from tests import explained_steps as steps
from tests.test_show import TRANSFERS, whole_and_alone

SNAPSHOTS = Path(__file__).parent / "snapshots" / "explained_operations.txt"
"""The text of explanations, one after the other; `python -m tests.test_explain` writes it."""

FAST = ("llama", "moe with a capacity")

# --- as it is counted


@pytest.mark.parametrize("names", [FAST, pytest.param((*steps.STEPS,), marks=pytest.mark.full)], ids=["some", "all"])
def test_steps_of_the_examples_send_what_is_said_collective_by_collective(pool, names):
    counted = pool.run(steps.count_steps, names)
    for rank in (0, 7):
        for name, said in steps.tell_steps(names, rank).items():
            assert said == counted[rank][name], (name, rank)
            assert len(counted[rank][name]) > 5


@pytest.mark.parametrize(
    "name", [name if name == "moe, dropless" else pytest.param(name, marks=pytest.mark.full) for name in steps.IN_A_JOB]
)
def test_a_step_that_needs_what_other_ranks_send_is_explained_in_its_job(pool, name):
    every = pool.run(steps.explain_and_count_in_a_job, [name])
    for rank, found in enumerate(every):
        said, counted = found[name]
        assert said == counted, rank
    kind = "send" if "stages" in name else "all_to_all"
    assert any(each == kind and taken != given for each, _, taken, given in every[0][name][1])


def test_a_simulated_step_says_where_it_is_not_exact_and_of_each_collective_its_module_and_line():
    with axes.simulate(8, 3):
        step, mesh = steps.IN_A_JOB["moe, dropless"]()
        found = axes.explain(step, mesh=mesh)
    assert not found.json()["exact"]
    assert "as if they told what this one does" in " ".join(str(found).split())
    facts = steps.explain_steps(["llama"], 5)["llama"].json()
    assert facts["exact"]
    assert {each["by"] for each in facts["collectives"]} == {"axes", "torch: FSDP2"}
    assert {each["module"].partition(".")[0] for each in facts["collectives"]} == {"Llama", "Loss", ""}
    assert all(each["axes"] for each in facts["collectives"])
    nowhere = [(each["kind"], each["module"]) for each in facts["collectives"] if not each["place"]]
    assert nowhere == [("reduce_scatter", "Llama")], "what FSDP2 holds back until the pass is over"
    outside = {each["what"].partition(" of ")[0] for each in facts["collectives"] if not each["module"]}
    assert outside == {"the norm"}


def test_operations_send_what_is_said_forward_and_backward(pool):
    counted = pool.run(steps.count_operations)
    for at, each in enumerate(steps.OPERATIONS):
        facts = steps.explain_operation(each).json()
        said = {"forward": facts["communication"], "backward": facts["backward"]}
        said["of shards"] = facts["backward_of_shards"]
        for phase, rows in said.items():
            if rows is None:
                assert phase != "forward"
                assert each.op == "max"
                continue
            wanted = [(steps.BY_EXCHANGE.get(row["kind"], row["kind"]), row["bytes_in"]) for row in rows]
            ranks = [[(kind, received) for kind, _, received, _ in found[at][phase]] for found in counted]
            busiest = [(row[0][0], max(received for _, received in row)) for row in zip(*ranks, strict=True)]
            assert busiest == wanted, (each, phase)


# --- a step: who asked, for which line of which module


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(4, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.up(x)
        return axes.rearrange(h, "b f@tp -> b f")  # line of the gather


def line_of(text: str) -> str:
    """Where a line of this file is, as explanations say it."""
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    return f"test_explain.py:{next(at for at, line in enumerate(lines, 1) if text in line)}"


@pytest.fixture
def world() -> Iterator[axes.Mesh]:
    with axes.simulate(8, 3), axes.init_mesh("dp=4 tp=2", device_type="cpu") as mesh:
        yield mesh


def test_each_collective_has_its_expression_module_and_line_and_a_gradient_those_of_the_forward(world):
    net = axes.shard_module(Net(), {"up.weight": "f@tp d"}, world["tp"])
    x = axes.shard(torch.ones(6, 4), "b d", mesh=world["tp"])

    def step(x: torch.Tensor) -> torch.Tensor:
        y = net(x)
        return axes.reduce(y * y, "b f -> ", "sum")

    x.requires_grad_()
    gathered, summed = axes.explain(step, x).json()["collectives"]
    assert (gathered["kind"], gathered["axes"], gathered["phase"]) == ("all_gather", ["tp"], "forward")
    assert gathered["what"] == "axes.rearrange 'b f@tp -> b f'"
    assert gathered["module"] == "Net"
    assert f"{line_of('# line of the gather')} in forward" in gathered["place"]
    assert (gathered["bytes_in"], gathered["input_bytes"]) == (6 * 4 * 4, 6 * 4 * 4)
    assert (summed["phase"], summed["by"], summed["kind"]) == ("backward", "axes", "all_reduce")


def test_what_torch_sends_unasked_is_marked_and_what_the_program_asks_for_is_not(world):
    mesh = world["tp"].device_mesh
    x = distribute_tensor(torch.ones(4, 6), mesh, [Shard(1)])

    def step() -> None:
        (x @ distribute_tensor(torch.ones(6, 2), mesh, [Replicate()])).relu()  # relu of a pending sum
        torch.distributed.all_reduce(torch.ones(5), group=world.axis("dp").group)  # asked for
        x.full_tensor()

    unasked, asked, full = axes.explain(step).json()["collectives"][-3:]
    assert unasked["by"] == "torch: DTensor"
    assert unasked["what"].startswith("aten.relu")
    assert line_of("# relu of a pending sum") in unasked["place"]
    assert (asked["by"], asked["axes"], asked["bytes_in"]) == ("program", ["dp"], 4 * 8)
    assert line_of("# asked for") in asked["place"]
    assert (full["by"], full["what"]) == ("torch: DTensor", "DTensor.full_tensor")


def test_collectives_by_name_and_what_is_computed_once_more_have_their_lines(world):
    def part(x: torch.Tensor) -> torch.Tensor:
        y = axes.psum(x * x, "tp")  # by name
        return y * y

    def step(x: torch.Tensor) -> torch.Tensor:
        return torch.utils.checkpoint.checkpoint(part, x, use_reentrant=False).sin()

    found = axes.explain(step, torch.ones(4, requires_grad=True)).json()["collectives"]
    assert [each["phase"] for each in found] == ["forward", "backward", "backward"]
    assert all(line_of("# by name") in each["place"] for each in found)
    assert found[0]["what"] == "psum over 'tp' of [4] float32"


def test_a_step_may_run_backward_itself_and_return_its_loss(world):
    net = axes.shard_module(Net(), {"up.weight": "f@tp d"}, world)

    def step(returns: bool) -> torch.Tensor | None:
        loss = net(axes.shard(torch.ones(8, 4), "b@dp d", mesh=world)).square().sum()
        loss.backward()
        return loss if returns else None

    net.zero_grad()
    first, second = (axes.explain(step, returns, mesh=world).json()["collectives"] for returns in (False, True))
    assert first == second
    assert "backward" in {each["phase"] for each in first}
    assert net.up.weight.grad is None, "of a module that a function calls, too"


def test_gradients_and_random_numbers_are_as_before_and_nothing_listens_any_more(world):
    net = axes.shard_module(Net(), {"up.weight": "f@tp d"}, world["tp"])
    kept = net.up.weight.grad = torch.zeros_like(net.up.weight)
    state = torch.random.get_rng_state()
    axes.explain(net, axes.shard(torch.rand(6, 4), "b d", mesh=world["tp"]))
    torch.rand(3)
    torch.random.set_rng_state(state)
    axes.explain(lambda: torch.rand(3))
    assert torch.equal(torch.random.get_rng_state(), state)
    assert net.up.weight.grad is kept
    assert not torch.nn.modules.module._global_forward_pre_hooks
    with pytest.raises(ZeroDivisionError):
        axes.explain(lambda: 1 // 0, mesh=world)


def test_a_world_of_any_size_is_simulated_for_a_step_and_gone_after_it():
    def step() -> Any:
        x = axes.ones("b@dp d", b=131072, d=4).requires_grad_()
        return axes.reduce(x, "b@dp d -> d", "mean").sum()

    found = axes.explain(step, mesh=axes.Mesh("dp=16384 tp=8").at(77_777))
    assert not torch.distributed.is_initialized()
    (only,) = found.json()["collectives"]
    assert (only["axes"], only["group_size"]) == (["dp"], 16384)
    assert found.json()["rank"] == 77_777
    assert found.json()["totals"][0]["collectives"] == 1
    line = only["place"].partition(" in ")[0]
    assert " ".join(str(found).split()) == (
        "a step of step mesh dp=16384 tp=8, seen from rank 77777 "
        f"forward all_reduce dp 32 B 20 us {line}, axes.reduce 'b@dp d -> d' "
        "backward nothing is sent by axes dp 1 x 32 B in, 32 B out 20 us"
    )


# --- an operation


EXPLAINED: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
    (("b s@tp d -> b s d@tp", (8, 2048, 4096)), {"mesh": "dp=4 tp=2", "dtype": torch.bfloat16}),
    (("b@dp s f@tp, f@tp d -> b@dp s@tp d",), {"mesh": "dp=4 tp=2", "b": 8, "s": 2048, "f": 8192, "d": 4096}),
    (("b s@cp (h d)@tp -> b s h d", (4, 7, 12)), {"mesh": "cp=3 tp=2", "h": 4}),
    (("b@dp s@tp -> b@dp", (8, 16)), {"mesh": "dp=4 tp=2", "op": "max"}),
    (("b -> b n@tp", (8,)), {"mesh": "tp=2", "n": 6}),
    (("b s | sum@tp -> b s@tp | same@dp", (8, 16)), {"mesh": "dp=4 tp=2"}),
    (("s@fsdp d -> s d", (8, 4)), {"mesh": axes.Mesh("dp=2 cp=2 tp=2", "fsdp = dp cp").at(5)}),
]


def explanations() -> str:
    return "\n\n".join(str(axes.explain(*inputs, **keywords)) for inputs, keywords in EXPLAINED) + "\n"


def test_the_text_is_that_of_the_snapshots_and_at_most_80_columns_wide():
    assert explanations() == SNAPSHOTS.read_text(encoding="utf-8")
    assert max(map(len, explanations().splitlines())) <= 80
    assert explanations().isascii()


def test_html_svg_and_json_are_whole(world):
    x = axes.shard(torch.ones(4, 4), "b@dp d")
    found = [axes.explain(*inputs, **keywords) for inputs, keywords in EXPLAINED]
    found += [world.explain("dp tp -> tp dp"), axes.explain(lambda: axes.rearrange(x, "b@dp d -> b d"))]
    for each in found:
        whole_and_alone(each)
        data = each.json()
        assert json.loads(json.dumps(data)) == data
        assert (data["schema"], escape(str(each).partition("\n")[0]) in each.html()) == (2, True)
        data.clear()
        assert each.json(), "data of its own"


def test_numbers_of_an_operation_are_those_of_its_shards():
    facts = axes.explain("b@dp d, d f@tp -> b@dp f@tp", b=8, d=6, f=4, mesh="dp=4 tp=2").json()
    assert [each["local_shape"] for each in facts["tensors"]] == [[2, 6], [6, 2], [2, 2]]
    (operand, _) = axes.explain("b@dp -> b", (5,), mesh=axes.Mesh("dp=4 tp=2").at(4)).json()["tensors"]
    assert (operand["local_shape"], operand["largest_shard_bytes"]) == ([1], 8)
    found = axes.explain("b@dp s@tp -> b s", (1 << 20, 64), mesh="dp=131072 tp=8")
    assert found.json()["communication"][0]["group_size"] == 1 << 20


# --- a transfer


def test_a_transfer_is_explained_from_each_rank_bucket_by_bucket_in_the_cost_models_time():
    move, model = TRANSFERS["transfer from pipeline stages"](), axes.CostModel()
    for rank in (0, 5, 13):
        found, steps_of_rank = axes.explain(move.at(rank)), move.at(rank).steps
        facts = found.json()
        assert (facts["schema"], facts["kind"], facts["rank"]) == (2, "transfer", rank)
        for way in ("bytes_in", "bytes_out"):
            assert facts[way] == sum(getattr(step, way) for step in steps_of_rank)
            assert [each[way] for each in facts["steps"]] == [
                getattr(step, way) for step in steps_of_rank if step.ranks
            ]
        assert (facts["partners"], facts["received_in_all"]) == ([*move.at(rank).partners], move.lower_bound)
        assert f"rank {rank}" in str(found)
        assert max(map(len, str(found).splitlines())) <= 80
        whole_and_alone(found)
    assert axes.explain(move.at(99)).json()["rank"] == 0, "who has no part in it sees it from the first rank"
    two, ends = axes.Mesh("x=2"), ({"w": "a@x"}, {"w": "a@x"})
    far = axes.transfer(*ends, two, axes.Mesh("x=2", ranks=[8, 9]), {"w": (2**20,)}, dtype="float32")
    time = 20 + (2**21 / model.inter_node_gbps + 2**21 / model.memory_gbps) / 1e3
    assert axes.explain(far).json()["time_us"] == pytest.approx(time, abs=1e-3)
    with axes.simulate(2), axes.init_mesh("a=2", device_type="cpu") as mesh:
        here = axes.transfer({"w": "f@a d"}, {"w": "f d@a"}, mesh, mesh, {"w": (4, 4)})
        step = axes.explain(here, {"w": axes.ones("f@a d", f=4, d=4)}).json()
        arrived = [each["bytes_in"] for each in step["collectives"] if each["kind"] == "recv"]
        assert (step["kind"], arrived) == ("step", [16])


if __name__ == "__main__":
    SNAPSHOTS.write_text(explanations(), encoding="utf-8")
    sys.exit(0)
