"""The main example, small: its model, its options, and a few steps on eight ranks against one."""

from __future__ import annotations

import dataclasses
import fnmatch
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "examples"))

import train  # noqa: E402  (examples aren't a package)
import transformer  # noqa: E402

SMALL = train.Options(steps=6, batch=8, width=32, layers=1, heads=2, sequence=16)
SIZE = SMALL.size


# ------------------------------------------------------------------------------------- the model


def test_attention_is_causal():
    model = transformer.Transformer(SIZE)
    tokens = torch.arange(16)[None]
    later = tokens.clone()
    later[0, 10:] = 200
    changed = (model(tokens) != model(later)).any(-1)[0]
    assert not changed[:10].any()
    assert changed[10:].all()


def test_the_rotary_embedding_knows_distances_alone():
    heads = transformer.Heads(SIZE)
    query, key = torch.randn(2, 1, 1, 1, heads.head_dim)
    queries, keys = (heads.rotate(x.expand(1, 1, 16, -1))[0, 0] for x in (query, key))
    products = queries @ keys.T
    for distance in range(16):
        same = products.diagonal(-distance)
        torch.testing.assert_close(same, same[:1].expand_as(same), rtol=1e-4, atol=1e-5)


def test_heads_are_independent_so_each_rank_can_hold_its_own():
    heads = transformer.Heads(SIZE)
    query, key, value = torch.randn(3, 2, 16, 32)
    halves = [heads(*(x.chunk(2, -1)[i] for x in (query, key, value))) for i in range(2)]
    torch.testing.assert_close(heads(query, key, value), torch.cat(halves, -1))


@pytest.mark.parametrize("width", [2, 8, 40, 128, 1000])
def test_the_hidden_size_is_about_eight_thirds_of_the_width(width):
    hidden = transformer.Size(width=width).hidden
    assert hidden % 32 == 0
    assert 0 <= hidden - 8 * width / 3 < 32


def test_one_seed_is_one_model_and_another_seed_another():
    one, same, other = (transformer.Transformer(SIZE, seed).head.weight for seed in (1, 1, 2))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


def test_a_written_line_starts_with_its_prompt_and_is_one_line():
    model = transformer.Transformer(SIZE)
    line = transformer.write(model, b"The ", 40, sequence=16)
    assert line.startswith("The ")
    assert 4 <= len(line) <= 44
    assert line.isprintable()
    assert line == transformer.write(model, b"The ", 40, sequence=16)
    assert line != transformer.write(model, b"The ", 40, sequence=16, seed=1)


# ------------------------------------------------------------------------------------ the options


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--steps 0", "--steps is a whole number from 1; found 0"),
        ("--steps many", "--steps"),
        ("--ranks 6", "6"),
        ("--tp 3", "tp=3"),
        ("--heads 3", "--heads 3 doesn't divide over --tp 2: ranks share whole heads"),
        ("--width 100", "--width 100"),
        ("--lr nan", "--lr"),
        ("--lr 0", "--lr"),
        ("--sequence 1000000", "--sequence 1000000"),
        ("--device tpu", "tpu"),
        ("--ranks 4096 --batch 4096", "4096"),
        ("--checkpoint /dev/null/x", "--checkpoint"),
        ("--prompt=", "--prompt"),
        ("--colour red", "--colour"),
    ],
)
def test_a_bad_option_gets_one_line_that_names_it(arguments, said, capsys):
    with pytest.raises(SystemExit) as ended:
        train.read_options(arguments.split())
    assert ended.value.code == 2
    line = capsys.readouterr().err
    assert line.startswith("train.py: ")
    assert line.count("\n") == 1
    assert said in line


def test_no_gpu_is_said_in_one_line(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(SystemExit):
        train.read_options(["--device", "cuda"])
    assert capsys.readouterr().err == "train.py: --device cuda needs a GPU per rank: 8, found 1\n"


def test_the_command_itself_ends_with_status_2_and_one_line():
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "train.py"), "--tp", "3"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)


def test_under_torchrun_only_the_first_rank_complains(capsys, monkeypatch):
    monkeypatch.setenv("RANK", "3")
    with pytest.raises(SystemExit) as ended:
        train.read_options(["--steps", "0"])
    assert ended.value.code == 2
    assert capsys.readouterr().err == ""


def test_good_options_are_read(tmp_path):
    options = train.read_options(["--dp-replicate", "1", "--checkpoint", str(tmp_path / "a" / "b")])
    assert options.axis_sizes == {"dp_replicate": 1, "tp": 2}
    assert options.checkpoint.is_dir()


# --------------------------------------------------------------------------------------- training


def test_every_parameter_has_a_spec_and_every_spec_a_parameter():
    model = transformer.Transformer(SIZE)
    names = [name for name, _ in model.named_parameters()]
    for name in names:
        assert any(fnmatch.fnmatch(name, pattern) for pattern in train.SPECS), name
    for pattern in train.SPECS:
        assert any(fnmatch.fnmatch(name, pattern) for name in names), pattern


def test_the_text_is_long_and_english():
    text = bytes(train.corpus().tolist()).decode()
    assert len(text) > 400_000
    assert " the " in text


def test_the_learning_rate_warms_up_and_falls_to_a_tenth():
    options = train.Options()
    rates = [train.learning_rate(options, step) for step in range(options.steps)]
    assert rates[0] < max(rates) / 10
    assert 0.95 * options.lr < max(rates) <= options.lr
    assert rates[-1] == pytest.approx(options.lr / 10, rel=0.01)


def test_one_process_learns(capsys):
    losses = train.train(dataclasses.replace(SMALL, steps=60)).losses
    assert losses[0] == pytest.approx(5.545, abs=0.2)  # log 256: nothing is known yet
    assert losses[-1] < 4.0
    assert "step  60/60" in capsys.readouterr().out


@pytest.mark.parametrize(
    "layout",
    [
        {"dp_replicate": 2, "tp": 2, "batch": 5, "sequence": 15},
        {"dp_replicate": 1, "tp": 2},
    ],
    ids=str,
)
def test_eight_ranks_learn_what_one_learns_and_one_reads_their_checkpoint(layout, world, tmp_path, capfd):
    options = dataclasses.replace(SMALL, checkpoint=tmp_path, **layout)
    every = world(train.train_on_mesh, 8, options)
    printed = capfd.readouterr().out
    one = train.train(options)
    assert all(losses == every[0] for losses in every)
    torch.testing.assert_close(torch.tensor(every[0]), torch.tensor(one.losses), rtol=1e-5, atol=0.0)

    model = train.read_checkpoint(options)
    for (name, ours), (_, theirs) in zip(model.named_parameters(), one.model.named_parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4, msg=name)

    assert "dp_replicate" in printed.split("communicators")[0]
    shown = printed.split("communicators")[1]
    assert "ranks 0 1 | 2 3 | 4 5 | 6 7" in shown  # tp
    assert shown.count("batch") == 1


def test_curves_that_differ_are_a_failure(capsys, monkeypatch):
    one = train.Trained(transformer.Transformer(SIZE), [5.0, 4.0], 1.0)
    monkeypatch.setattr(train, "train", lambda options: one)
    monkeypatch.setattr(train, "read_checkpoint", lambda options: one.model)
    monkeypatch.setattr(train, "write", lambda *arguments: "a line")
    assert train.compare(SMALL, [5.0, 4.0], 8) == 0
    assert train.compare(SMALL, [5.0, 4.1], 8) == 1
    assert train.compare(SMALL, [5.0, float("nan")], 8) == 1
    assert "differ by more than 0.001" in capsys.readouterr().err
