"""The examples, small: what they claim on eight ranks, their options, and themselves as scripts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.distributed import fsdp

import axes

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "examples"))

import megatron_block  # noqa: E402  (examples aren't a package)
import moe  # noqa: E402
import ulysses  # noqa: E402

EXACT = 1e-12
"""Of numbers around 1 in float64."""


# ------------------------------------------------------------------------------------- Megatron

SMALL = megatron_block.Size(width=32, heads=8, sequence=16, batch=2)


def trained(steps: int) -> tuple[dict[str, list[float]], dict[str, float]]:
    """The losses of each version, and how far its weights are from those by hand in the end."""
    with axes.init_mesh("tp", device_type="cpu") as mesh:
        trainings = megatron_block.versions(mesh, SMALL, torch.float64)
        losses = {name: [training.step() for _ in range(steps)] for name, training in trainings.items()}
    by_hand = trainings["by hand"].weights
    distances = {}
    for name, training in trainings.items():
        pairs = [
            (axes.to_local(w.detach()) if name == "DTensors" else w, by_hand[at]) for at, w in training.weights.items()
        ]
        distances[name] = max(float((ours - theirs).detach().abs().max()) for ours, theirs in pairs)
    return losses, distances


def test_a_block_in_six_expressions_trains_as_by_hand_and_as_on_one_device(pool):
    with axes.simulate(1), axes.init_mesh("tp", device_type="cpu") as mesh:
        one = megatron_block.versions(mesh, SMALL, torch.float64)["plain shards"]
        wanted = torch.tensor([one.step() for _ in range(6)])
    assert wanted[-1] < wanted[0]
    for losses, distances in pool.run(trained, 6):
        assert list(losses) == ["by hand", "plain shards", "DTensors"]
        for name, found in losses.items():
            torch.testing.assert_close(torch.tensor(found), wanted, rtol=EXACT, atol=0, msg=name)
        assert max(distances.values()) < EXACT, distances


@pytest.mark.parametrize("ranks", [2, 8])
def test_a_block_in_six_expressions_sends_what_is_sent_by_hand(ranks):
    by_hand = {"all_gather": 4, "all_reduce": 3, "reduce_scatter": 4}
    assert megatron_block.collectives(ranks, SMALL) == dict.fromkeys(("by hand", "plain shards", "DTensors"), by_hand)


ODD = megatron_block.Size(width=9, heads=8, sequence=15, batch=3)
"""On eight ranks neither the sequence nor the 36 hidden units divide."""


def global_steps() -> list[float]:
    with axes.init_mesh("tp", device_type="cpu") as mesh:
        training = megatron_block.versions(mesh, ODD, torch.float64)["DTensors"]
        return [training.step() for _ in range(3)]


def test_the_global_view_of_a_block_trains_as_on_one_device_where_sizes_do_not_divide(pool):
    with axes.simulate(1):
        wanted = torch.tensor(global_steps())
    for losses in pool.run(global_steps):
        torch.testing.assert_close(torch.tensor(losses), wanted, rtol=EXACT, atol=0)


def test_one_rank_alone_sends_nothing_but_what_is_sent_by_hand():
    found = megatron_block.collectives(1, SMALL)
    assert found["plain shards"] == found["DTensors"] == {}


def test_other_losses_and_other_collectives_are_failures(capsys, monkeypatch):
    def main(other: float, collectives: int) -> int:
        names = "by hand", "plain shards"
        losses = dict(zip(names, ([2.0, 1.0], [2.0, other]), strict=True))
        sent = dict(zip(names, ({"all_gather": 4}, {"all_gather": collectives}), strict=True))
        monkeypatch.setattr(axes, "launch", lambda *arguments: [(losses, {name: [1.0, 2.0] for name in names})])
        monkeypatch.setattr(megatron_block, "collectives", lambda *arguments: sent)
        return megatron_block.main([])

    assert main(1.0, 4) == 0
    assert "1.00 times by hand" in capsys.readouterr().out
    assert main(1.1, 4) == main(float("nan"), 4) == main(1.0, 5) == 1
    lines = capsys.readouterr().err.splitlines()
    assert (
        lines[0] == "megatron_block.py: the losses of plain shards differ by 1.0e-01 from those by hand; expected 1e-05"
    )
    assert lines[-1] == "megatron_block.py: plain shards sent other collectives than those by hand"


# -------------------------------------------------------------------------------------- Ulysses


@pytest.mark.parametrize(("cp", "tp", "sent"), [(8, 1, 4), (4, 2, 4), (2, 4, 4), (1, 8, 0)])
@pytest.mark.parametrize("sequence", [16, 13])
def test_ulysses_is_attention_with_its_gradients_in_both_views(pool, cp, tp, sent, sequence):
    for found in pool.run(ulysses.compare, cp, tp, sequence, 16, torch.float64):
        assert list(found) == ["DTensors", "plain shards"]
        for distance in found.values():
            assert distance.pop("collectives") == sent  # one there and one back, forward and backward
            assert list(distance) == ["out", "dq", "dk", "dv"]
            assert max(distance.values()) < EXACT, distance


def test_ulysses_in_single_precision_is_within_its_limit(pool):
    for found in pool.run(ulysses.compare, 4, 2, 16, 8):
        assert max(distance[name] for distance in found.values() for name in ("out", "dq", "dk", "dv")) < 1e-5


def test_a_distance_is_that_of_shards_where_they_lie():
    assert ulysses.distance(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.5])) == 0.5
    with axes.simulate(2), axes.init_mesh("cp", device_type="cpu") as mesh:
        x, y = (axes.shard(torch.tensor([1.0, end]), "s@cp", mesh=mesh) for end in (2.0, 4.0))
        assert ulysses.distance(x, y) == 0.0  # the difference is on the other rank


def test_attention_that_is_off_is_a_failure(capsys, monkeypatch):
    def main(off: float) -> int:
        near = {"plain shards": {"out": 0.0, "dq": 1e-7, "collectives": 4}}
        far = {"plain shards": {"out": 0.0, "dq": off, "collectives": 4}}
        monkeypatch.setattr(axes, "launch", lambda *arguments: [near, far])
        return ulysses.main([])

    assert main(1e-6) == 0
    assert capsys.readouterr().out == (
        "2 ranks, plain shards: 4 collectives; distance to one device: out 0.0e+00  dq 1.0e-06\n"
    )
    assert main(1e-4) == main(float("nan")) == 1
    assert "below 1e-05" in capsys.readouterr().err


# -------------------------------------------------------------------------------------- experts


@pytest.mark.parametrize(
    ("sizes", "experts", "sequence", "factor"),
    [
        ({"dp_shard": 4, "cp": 1, "tp": 2, "ep": 4}, 8, 8, 1.0),  # ep is tp and half of dp_shard
        ({"dp_shard": 2, "cp": 2, "tp": 2, "ep": 4}, 4, 8, 0.5),  # ep is cp and tp
        ({"dp_shard": 8, "cp": 1, "tp": 1, "ep": 2}, 6, 4, 1.25),
        ({"dp_shard": 2, "cp": 2, "tp": 2, "ep": 8}, 16, 8, 0.3),  # some experts that no token of a rank chose
        ({"dp_shard": 2, "cp": 2, "tp": 2, "ep": 4}, 4, 9, 0.5),  # some ranks have more tokens than others
    ],
    ids=str,
)
def test_experts_on_eight_ranks_are_those_of_one_process(pool, sizes, experts, sequence, factor):
    for found in pool.run(moe.compare, sizes, experts, sequence, factor, torch.float64):
        capacity, dropless = found["capacity"], found["dropless"]
        assert max(*capacity.distance.values(), *dropless.distance.values()) < EXACT, found
        assert list(capacity.distance) == ["out", "dx", "drouter", "dup", "ddown"]
        assert capacity.dropped > 0
        assert dropless.dropped == 0
        assert capacity.forward["all_to_all"] == 2
        assert dropless.forward["all_to_all"] == 3  # and the counts
        gathered = 0 if sizes["ep"] == 8 else 2  # the experts' matrices, where efsdp splits them
        for variant in found.values():
            assert variant.backward["all_to_all"] == 2 + gathered  # over gloo a reduce-scatter is an exchange
            assert variant.forward.get("all_gather", 0) == gathered


def test_experts_whose_width_and_tokens_do_not_divide_are_those_of_one_process(warm):
    sizes = {"dp_shard": 3, "cp": 1, "tp": 2, "ep": 2}
    for found in warm(moe.compare, 6, sizes, 4, 5, 1.0, torch.float64):
        for variant in found.values():
            assert max(variant.distance.values()) < EXACT, found


def test_without_ep_no_token_travels(pool):
    sizes = {"dp_shard": 8, "cp": 1, "tp": 1, "ep": 1}
    for found in pool.run(moe.compare, sizes, 2, 4, 1.0, torch.float64):
        for variant in found.values():
            assert max(variant.distance.values()) < EXACT
            assert "all_to_all" not in variant.forward
            assert variant.backward["all_to_all"] == 2  # the reduce-scatters of the experts' matrices


def test_with_room_for_all_nothing_is_dropped(pool):
    sizes = {"dp_shard": 4, "cp": 1, "tp": 2, "ep": 4}
    for found in pool.run(moe.compare, sizes, 4, 4, 4.0, torch.float64):
        assert found["capacity"].dropped == 0
        assert max(found["capacity"].distance.values()) < EXACT


def test_places_count_within_each_run():
    ids = torch.tensor([0, 0, 2, 2, 2, 5])
    assert moe.places(ids).tolist() == [0, 1, 0, 1, 2, 0]
    assert moe.places(ids[:0]).tolist() == []


def test_choices_stand_in_the_order_of_experts_and_of_tokens():
    x, router = torch.randn(40, 6), torch.randn(6, 4)
    chosen = moe.choose(x, router)
    keys = [(int(e), int(t)) for e, t in zip(chosen.expert, chosen.token, strict=True)]
    assert keys == sorted(set(keys))
    assert chosen.token.bincount().tolist() == [moe.CHOICES] * 40
    probabilities = (x @ router).softmax(-1)
    torch.testing.assert_close(chosen.weight, probabilities[chosen.token, chosen.expert])
    assert bool((chosen.weight >= probabilities.median(-1).values[chosen.token]).all())


def test_experts_that_are_off_are_a_failure(capsys, monkeypatch):
    def main(off: float) -> int:
        every = [{"dropless": moe.Found({"out": each}, {"all_to_all": 2}, {}, 0)} for each in (0.0, off)]
        monkeypatch.setattr(axes, "launch", lambda *arguments: every)
        return moe.main([])

    assert main(1e-6) == 0
    assert "forward   2 all_to_all\n  backward  nothing" in capsys.readouterr().out
    assert main(1e-4) == main(float("nan")) == 1
    assert "below 1e-05" in capsys.readouterr().err


# ---------------------------------------------------------------------- options, and as scripts


@pytest.mark.parametrize(
    ("example", "arguments", "said"),
    [
        (megatron_block, "--ranks 0", "--ranks is a whole number from 1; found 0"),
        (megatron_block, "--ranks 65", "--ranks 65"),
        (megatron_block, "--ranks many", "invalid int value: 'many'"),
        (megatron_block, "--ranks 3", "--heads 8 doesn't divide over --ranks 3"),
        (megatron_block, "--ranks 4 --sequence 30", "--sequence 30"),
        (megatron_block, "--ranks 8 --width 1", "--width 1"),
        (megatron_block, "--steps -1", "--steps"),
        (ulysses, "--cp 0", "--cp is a whole number from 1; found 0"),
        (ulysses, "--cp 16 --tp 16", "64"),
        (ulysses, "--heads 6", "--heads 6 isn't a multiple of --cp 2 times --tp 2: a rank has whole heads"),
        (ulysses, "--colour red", "--colour"),
        (moe, "--ep 3", "ep=3"),
        (moe, "--dp-shard 0", "--dp-shard"),
        (moe, "--dp-shard 64", "128 ranks"),
        (moe, "--experts 6", "--experts 6 isn't a multiple of --ep 4"),
        (moe, "--experts 1 --ep 1", "--experts 1"),
        (moe, "--factor nan", "--factor"),
        (moe, "--factor 0", "--factor"),
    ],
)
def test_a_bad_option_of_an_example_gets_one_line_that_names_it(example, arguments, said, capsys):
    with pytest.raises(SystemExit) as ended:
        example.read_options(arguments.split())
    assert ended.value.code == 2
    line = capsys.readouterr().err
    assert line.startswith(f"{example.__name__}.py: ")
    assert line.count("\n") == 1
    assert said in line


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("megatron_block.py --steps 6 --width 32 --heads 2 --sequence 8", "times by hand"),
        ("ulysses.py --cp 2 --tp 1 --sequence 8 --heads 2", "2 ranks, plain shards: 4 collectives"),
        pytest.param(
            "parallel_dims.py --ranks 6 --dp-replicate 1 --tp 3 --ep 2",
            "experts           pp=1 dp_replicate=1 efsdp=3 ep=2",
            marks=pytest.mark.skipif(
                not hasattr(fsdp, "DataParallelMeshDims"), reason="torch before 2.13 has no DataParallelMeshDims"
            ),
        ),
        ("moe.py --dp-shard 2 --tp 1 --ep 2 --experts 4 --sequence 4", "dropless: 0 choices of 64 dropped"),
    ],
)
def test_the_examples_run_as_scripts(command, said):
    done = subprocess.run(
        [sys.executable, *f"examples/{command}".split()],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=150,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert said in done.stdout
