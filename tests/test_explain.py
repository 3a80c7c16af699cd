"""`axes.explain` says what happens: what is counted on real ranks, collective by collective, byte by byte."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import axes
from axes.algebra.explanation import Explanation, Section
from axes.runtime import flags
from tests import explained_steps as steps

SNAPSHOTS = Path(__file__).parent / "explained_operations.txt"
"""The text of explanations, one after the other; `python -m tests.test_explain` writes it."""

# --- as it is counted


def test_steps_of_the_examples_send_what_is_said_collective_by_collective(pool):
    names = list(steps.STEPS)
    counted = pool.run(steps.count_steps, names)
    for rank in (0, 7):
        for name, said in steps.tell_steps(names, rank).items():
            assert said == counted[rank][name], (name, rank)
            assert len(counted[rank][name]) > 5


def test_each_example_has_a_step_that_is_counted_or_a_reason():
    examples = {path.stem for path in (Path(__file__).parents[1] / "examples").glob("*.py")}
    assert examples == {*steps.OF_EXAMPLES}
    covered = {name for found in steps.OF_EXAMPLES.values() if isinstance(found, tuple) for name in found}
    assert covered == {*steps.STEPS, *steps.IN_A_JOB} - {"llama in two stages in its job"}


def test_a_step_that_needs_what_other_ranks_send_is_explained_in_its_job(pool):
    every = pool.run(steps.explain_and_count_in_a_job)
    for rank, found in enumerate(every):
        for name, (said, counted) in found.items():
            assert said == counted, (name, rank)
    for name, kind in (
        ("moe_llama", "all_to_all"),
        ("moe, dropless", "all_to_all"),
        ("llama in two stages in its job", "send"),
    ):
        assert any(each == kind and taken != given for each, _, taken, given in every[0][name][1]), name


def test_a_simulated_step_whose_sizes_other_ranks_tell_says_that_it_is_not_exact():
    with axes.simulate(8, 3):
        step, mesh = steps.IN_A_JOB["moe, dropless"]()
        found = axes.explain(step, mesh=mesh)
    assert not found.json()["exact"]
    assert "as if they told what this one does" in " ".join(str(found).split())
    assert all(each.json()["exact"] for each in steps.explain_steps(["llama", "moe with a capacity"], 0).values())


def test_stages_that_ask_one_another_are_refused_in_a_simulated_world():
    def step() -> None:
        options = steps.llama.Options(mesh="pp=2 dp=2 tp=2")
        mesh = steps.mesh_of(options, steps.llama.AXES, "fsdp = dp cp")
        model, loss = steps.llama.made(options, mesh), steps.llama.loss_on(mesh)
        tokens = torch.zeros(4, 64, dtype=torch.long)
        stage = PipelineStage(model, mesh.axis("pp").index, 2, torch.device("cpu"), group=mesh.axis("pp").group)
        ScheduleGPipe(stage, 2, loss_fn=loss).step(*([tokens] if model.first else []), target=tokens)

    # From 2.15 on torch refuses it by itself.
    ours, torchs = "Stages of a pipeline ask one another", "not supported with a fake process group"
    with axes.simulate(8, 4), pytest.raises((axes.AxesError, RuntimeError), match=f"{ours}|{torchs}"):
        axes.explain(step)


def test_in_a_running_job_the_step_runs_and_each_rank_has_its_own_explanation(pool):
    for said, counted, total in pool.run(steps.explain_in_a_job):
        assert said == counted
        assert said
        assert total == 28


def test_each_collective_of_a_llama_has_its_module_its_axes_and_its_line():
    (found,) = steps.explain_steps(["llama"], 5).values()
    assert {each["by"] for each in found.json()["collectives"]} == {"axes", "torch: FSDP2"}
    assert {each["module"].partition(".")[0] for each in found.json()["collectives"]} == {"Llama", "Loss", ""}
    assert all(each["place"] and each["axes"] for each in found.json()["collectives"])
    outside = {each["what"].partition(" of ")[0] for each in found.json()["collectives"] if not each["module"]}
    assert outside == {"the norm"}


def test_operations_send_what_is_said_forward_and_backward(pool):
    counted = pool.run(steps.count_operations)
    for at, each in enumerate(steps.OPERATIONS):
        facts = steps.explain_operation(each).json()
        said = {"forward": facts["communication"], "backward": facts["backward"]}
        said["of shards"] = facts["backward_of_shards"]
        for phase, rows in said.items():
            if rows is None:
                assert (phase, each.op) == ("of shards", "max")
                continue
            wanted = [
                (steps.BY_EXCHANGE.get(row["kind"], row["kind"]), row["bytes_in"])
                for row in rows
                if row["kind"] != "slice"
            ]
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
    assert not flags.watched
    assert not torch.nn.modules.module._global_forward_pre_hooks


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
        f"forward all_reduce dp 32 B {line}, axes.reduce 'b@dp d -> d' "
        "backward nothing is sent in all dp 1 collective 32 B in, 32 B out 20 us"
    )


def test_a_mesh_whose_names_cut_its_axes_is_simulated_as_it_is():
    def step() -> Any:
        return axes.all_gather(torch.ones(2), "rows")

    found = axes.explain(step, mesh=axes.Mesh("dp=4 tp=2", "(dp tp) = rows=2 ep=4").at(5))
    (gathered,) = found.json()["collectives"]
    assert (gathered["axes"], gathered["ranks"]) == (["rows"], "ranks 1, 5")


def test_a_step_that_raises_leaves_nothing_behind():
    with pytest.raises(ZeroDivisionError):
        axes.explain(lambda: 1 // 0, mesh="dp=2")
    assert not torch.distributed.is_initialized()
    assert not flags.watched


# --- an operation


EXPLAINED: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
    (("b s@tp d -> b s d@tp", (8, 2048, 4096)), {"mesh": "dp=4 tp=2", "dtype": torch.bfloat16}),
    (("b@dp s f@tp, f@tp d -> b@dp s@tp d",), {"mesh": "dp=4 tp=2", "b": 8, "s": 2048, "f": 8192, "d": 4096}),
    (("b s@cp (h d)@tp -> b s h d", (4, 7, 12)), {"mesh": "cp=3 tp=2", "h": 4}),
    (("b@dp s@tp -> b@dp", (8, 16)), {"mesh": "dp=4 tp=2", "op": "max"}),
    (("b -> b n@tp", (8,)), {"mesh": "tp=2", "n": 6}),
    (("b s | sum@tp -> b s@tp | same@dp", (8, 16)), {"mesh": "dp=4 tp=2"}),
    (("b@dp s d, d f@tp -> b@dp s f@tp", (8, 64, 32), (32, 48)), {"mesh": "dp=4 tp=2", "kind": "shard_map"}),
    (("(h k + g k + g k) d -> h@tp k d, g@tp k d, g@tp k d", (32, 6)), {"mesh": "dp=2 tp=2", "h": 4, "g": 2}),
    (("h k d@tp, g k d@tp -> (h k + g k) d", (4, 2, 6), (2, 2, 6)), {"mesh": "dp=2 tp=2"}),
    (("h@tp d, g@tp d -> (h@tp + g@tp) d",), {"mesh": "dp=2 tp=2", "h": 4, "g": 2, "d": 6}),
    (("s@fsdp d -> s d", (8, 4)), {"mesh": axes.Mesh("dp=2 cp=2 tp=2", "fsdp = dp cp").at(5), "kind": "reshard"}),
]


def explanations() -> str:
    return "\n\n".join(str(axes.explain(*inputs, **keywords)) for inputs, keywords in EXPLAINED) + "\n"


def test_the_text_is_that_of_the_snapshots_and_at_most_80_columns_wide():
    assert explanations() == SNAPSHOTS.read_text(encoding="utf-8")
    assert max(map(len, explanations().splitlines())) <= 80
    assert explanations().isascii()


def test_html_and_svg_are_whole_and_load_nothing(world):
    x = axes.shard(torch.ones(4, 4), "b@dp d")
    found = [axes.explain(*inputs, **keywords) for inputs, keywords in EXPLAINED]
    found += [world.explain("dp tp -> tp dp"), axes.explain(lambda: axes.rearrange(x, "b@dp d -> b d"))]
    for each in found:
        page, svg = each.html(), each.svg()
        root = ElementTree.fromstring(svg)
        names = [element.tag.partition("}")[2] for element in root.iter()]
        assert root.get("role") == "img"
        assert {"title", "desc"} <= {*names}
        assert root.get("viewBox")
        ElementTree.fromstring(re.sub("<meta [^>]*>", "", page.partition("\n")[2]))
        for text in (page, svg):
            assert "prefers-color-scheme: dark" in text
            assert "<script" not in text
            assert "http" not in text.replace("http://www.w3.org/2000/svg", "")
        assert each._repr_html_() in page
        assert escape(each.heading) in page


def test_json_has_its_version_and_is_data_of_its_own():
    for inputs, keywords in EXPLAINED:
        found = axes.explain(*inputs, **keywords)
        data = found.json()
        assert json.loads(json.dumps(data)) == data
        assert data["schema"] == 1
        data["tensors"].clear()
        assert found.json()["tensors"]


def test_the_local_work_is_that_of_the_call():
    facts = axes.explain("b@dp d, d f@tp -> b@dp f@tp", b=8, d=6, f=4, mesh="dp=4 tp=2").json()
    (product,) = [each for each in facts["local_work"] if each["flop"]]
    assert product["flop"] == 2 * 2 * 6 * 2
    assert [each["shape"] for tensor in facts["tensors"] for each in tensor["local"]] == [[2, 6], [6, 2], [2, 2]]


def test_shards_of_uneven_sizes_are_said_rank_by_rank():
    (operand, _) = axes.explain("b@dp -> b", (5,), mesh="dp=4 tp=2").json()["tensors"]
    assert operand["local"] == [
        {"shape": [2], "ranks": "ranks 0..3"},
        {"shape": [1], "ranks": "ranks 4, 5"},
        {"shape": [0], "ranks": "ranks 6, 7"},
    ]


def test_groups_that_are_there_are_shared_and_names_of_the_same_ranks_said(world):
    mesh = world.define("model = tp")
    assert not axes.explain("b@tp -> b", (4,), mesh=mesh).json()["groups"][0]["exists"]
    world.axis("tp").group  # noqa: B018 - made by being asked for
    (group,) = axes.explain("b@tp -> b", (4,), mesh=mesh).json()["groups"]
    assert (group["axes"], group["also"], group["exists"], group["made_as"]) == (["tp"], ["model"], True, ["tp"])
    assert group["ranks"] == "ranks 2, 3"


def test_a_mesh_may_have_a_million_ranks():
    found = axes.explain("b@dp s@tp -> b s", (1 << 20, 64), mesh="dp=131072 tp=8")
    assert found.json()["communication"][0]["group_size"] == 1 << 20


# --- mistakes


@pytest.mark.parametrize(
    ("inputs", "keywords", "error", "says"),
    [
        (("b s",), {"mesh": "tp=2"}, axes.ExpressionError, "two sides"),
        (("b s@tp -> b s", (4, 8)), {}, axes.MeshError, "needs a mesh"),
        (("b s@tp -> b s",), {"mesh": "tp=2", "b": 4}, axes.SizeError, "the size of 's' is open"),
        (("b ... -> b ...",), {"mesh": "tp=2", "b": 4}, axes.SizeError, "has no name for a size"),
        (("b s@tp -> b s", (4, 8), (8,)), {"mesh": "tp=2"}, axes.SizeError, "has 1 operands, and 2 shapes"),
        (("b s@tp -> b s", torch.ones(4)), {"mesh": "tp=2"}, axes.SizeError, "takes whole shapes"),
        (("b s@xp -> b s", (4, 8)), {"mesh": "tp=2"}, axes.MeshError, "no axis 'xp'"),
        (("b s@tp -> b s", (4, 8)), {"mesh": "tp=2", "kind": "einsum2"}, axes.ExpressionError, "kind is one of"),
        (("b s@tp -> b s", (4, 8)), {"mesh": "tp=2", "kind": "reduce"}, axes.ExpressionError, "this is a rearrange"),
        (("b s@tp -> b", (4, 8)), {"mesh": "tp=2", "op": "median"}, axes.ShardingError, "'median'"),
        (("b s@tp -> b s", (4, 8)), {"mesh": "tp=2", "dtype": "float33"}, axes.ShardingError, "unknown dtype"),
        (("b s@tp -> b s", (4, 8)), {"mesh": "tp=2", "q": 3}, axes.SizeError, "'q'"),
        (("b s@* -> b s", (4, 8)), {"mesh": "tp=2"}, axes.ShardingError, "write it"),
        (("b s | * -> b s", (4, 8)), {"mesh": "tp=2"}, axes.ShardingError, "write what is"),
        (("(f + g) -> f, g@tp", (8,)), {"mesh": "tp=2"}, axes.SizeError, "'f' and 'g' don't follow"),
        (("(f + g) -> f, g",), {"mesh": "tp=2", "f": 4}, axes.SizeError, "the size of 'g' is open"),
        (("(f + f) -> f", (8,)), {"mesh": "tp=2"}, axes.ExpressionError, "each block becomes one tensor"),
        (("f, f -> (f + f)", (4,), (4,)), {"mesh": "tp=2", "kind": "einsum"}, axes.ExpressionError, "a rearrange"),
        (("b@dp -> f@tp", (4,)), {"mesh": "dp=2 tp=2", "kind": "shard_map"}, axes.SizeError, "say it"),
        ((3,), {"mesh": "tp=2"}, axes.AxesError, "expression, a module, a function or a transfer"),
        ((len,), {}, axes.AxesError, "in a simulated world"),
        ((len, []), {"mesh": "tp=2", "b": 3}, axes.AxesError, "are of expressions"),
    ],
)
def test_a_mistake_is_an_error_that_says_what_to_write(inputs, keywords, error, says):
    with pytest.raises(error, match=r"(?s).*") as raised:
        axes.explain(*inputs, **keywords)
    assert says in str(raised.value)
    assert not torch.distributed.is_initialized()


def test_rows_that_are_too_long_go_on_under_themselves():
    found = Explanation("heading", (Section("rows", (("a", "word " * 40), ("bb", "short"))),))
    lines = str(found).splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[2].startswith("  a   word")
    assert lines[3].startswith("      word")


def test_a_title_of_a_table_in_html_is_as_wide_as_the_table():
    page = axes.explain("b s@tp d -> b s d@tp", (8, 16, 4), mesh=axes.Mesh("dp=4 tp=2")).html()
    titles = re.findall(r"<th[^>]*>(?:communication|backward, of DTensors)", page)
    assert [title.partition(">")[0] for title in titles] == ['<th colspan="6"', '<th colspan="6"'], page


if __name__ == "__main__":
    SNAPSHOTS.write_text(explanations(), encoding="utf-8")
    sys.exit(0)
