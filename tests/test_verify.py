"""`axes.verify` finds and names the bugs that people shipped, and raises no alarm on models that are right."""

from __future__ import annotations

import functools

import pytest
import torch

import axes
from tests import verify_programs as programs
from tests.test_module_regions import TOKENS
from tests.verify_models import program, tokens_and_labels

by_hand = functools.partial


RIGHT = {
    "Megatron's way on dp, cp and tp": ("dp=2 cp=2 tp=2", program, tokens_and_labels(ignored=3)),
    "with the sequence split over tp": ("cp=2 tp=2", by_hand(program, sequence=True), tokens_and_labels()),
    "experts over ep": ("dp=2 tp=2 ep=2", program, tokens_and_labels()),
    "experts over ep under sequence parallelism": (
        "tp=2 ep=2",
        by_hand(program, sequence=True),
        tokens_and_labels(),
    ),
    "untied": ("dp=2 tp=2", by_hand(program, tied=False), tokens_and_labels()),
    "dropout that is the same over tp": ("dp=2 tp=2", by_hand(program, dropout=0.3), tokens_and_labels()),
    "dropout of parts of the sequence": ("tp=2", by_hand(program, dropout=0.3, sequence=True), tokens_and_labels()),
    "a loss that is a rank's share": ("dp=2 cp=2", by_hand(program, local_loss=True), tokens_and_labels()),
    "three ranks of dp": ("dp=3 tp=2", program, tokens_and_labels(rows=6)),
    "FSDP2": ("dp=2", programs.fsdp, ()),
    "FSDP2 with accumulation": ("dp=4", by_hand(programs.fsdp, reshard=False, accumulate=2), ()),
    "HSDP": ("dp_replicate=2 dp_shard=2", programs.hsdp, ()),
    "parallelize_module": ("tp=2", programs.torch_tp, ()),
    "parallelize_module under FSDP2": ("dp=2 tp=2", by_hand(programs.torch_tp, dp=True), ()),
    "parallelize_module with the sequence split": ("tp=2", programs.torch_sequence_parallel, ()),
    "data parallelism by hand": ("dp=2", programs.data_parallel, ()),
    "two stages": ("pp=2", programs.stages, ()),
    "DTensors, one of them pending": ("dp=2 tp=2", programs.dtensors, ()),
    "sizes that don't divide": ("dp=2 tp=2", programs.uneven, ()),
}


@pytest.mark.parametrize("name", RIGHT)
def test_no_alarm_on_a_right_program(name):
    mesh, fn, inputs = RIGHT[name]
    result = axes.verify(fn, *inputs, mesh=mesh, timeout=60)
    assert result.ok, result


def test_no_alarm_on_a_region():
    for region in (programs.region(), programs.region(checkpointed=True)):
        result = axes.verify(region, TOKENS, mesh="dp=2 tp=2", specs=programs.REGION_SPECS)
        assert result.ok, result


def test_no_alarm_on_a_region_that_is_the_same_over_an_axis():
    x = torch.linspace(-2, 3, 32).view(4, 8).requires_grad_()
    specs = {"up.*": "f@tp ...", "down.weight": "e f@tp", "*": "..."}
    result = axes.verify(programs.same_region(), x, mesh="dp=2 tp=2", specs=specs)
    assert result.ok, result
    assert result.compared == 8, "an output, six parameters and an input"


def test_no_alarm_on_a_plain_module_whose_parameters_alone_are_sharded():
    specs = {"up.*": "f@tp ...", "down.weight": "e f@tp", "*": "..."}
    result = axes.verify(programs.Feed(), TOKENS, mesh="dp=64 tp=8", specs=specs, timeout=60)
    assert result.ok, result
    assert str(result) == "the same function on 'dp=2 tp=2': 9 outputs and gradients"


def test_no_alarm_on_layers_with_logical_names():
    rules = axes.Rules(mlp="tp", embed=None)
    result = axes.verify(programs.Named(), torch.randn(4, 3, 8, requires_grad=True), mesh="tp=2", rules=rules)
    assert result.ok, result


# Bugs: the program, what it needs, and what its first line says.
WRONG = {
    "missing all-reduce": (
        "dp=2 tp=2",
        {},
        "blocks.0.mlp.down: its output is pending over tp (its sum is right), and blocks.0.mlp after it is wrong: an all-reduce over tp is missing after it",
    ),
    "doubled all-reduce": (
        "dp=2 tp=2",
        {},
        "blocks.0.mlp (Mlp): its output is right but that the output of blocks.0.mlp.down is added 2 times over tp",
    ),
    "norm": (
        "cp=2 tp=2",
        {"sequence": True},
        "blocks.1.norm1.weight: its gradient is pending over tp (its sum is right)",
    ),
    "gates": ("dp=2 tp=2", {}, "blocks.0.moe.router (Router): its output is 2 times too large over tp"),
    "bias": (
        "dp=2 tp=2",
        {},
        "blocks.0.mlp (Mlp): its output is right but that blocks.0.mlp.bias is added 2 times over tp",
    ),
    "loss": ("dp=2 cp=2", {}, "every gradient: all 29 are 2 times too large over cp: a mean over cp is missing"),
    "experts": ("tp=2 ep=2", {}, "blocks.0.moe.up: its gradient is 2 times too large over tp"),
    "rows": (
        "tp=2",
        {},
        "blocks.0.attention.qkv.weight has its rows in another order than forward takes them in: they lie as '_@tp _', and as '(x=3 y@tp) _' blocks.0.attention.out (Linear) is right",
    ),
    "tie": (
        "dp=2 tp=2",
        {},
        "head.weight: its gradient is that through head alone: the use in embedding isn't counted, though both are one tied weight",
    ),
    "dropout": (
        "dp=2 tp=2",
        {"dropout": 0.3},
        "blocks.0.dropout (Dropout): its output is different between the ranks of tp, where it should be the same: dropout draws differently",
    ),
}


@pytest.mark.parametrize("bug", WRONG)
def test_a_bug_is_found_and_named(bug):
    mesh, options, line = WRONG[bug]
    result = axes.verify(by_hand(program, bug=bug, **options), *tokens_and_labels(), mesh=mesh, timeout=60)
    assert not result
    assert str(result).splitlines()[1].strip() == line


def test_a_padding_token_that_is_counted_is_found_and_named():
    result = axes.verify(
        by_hand(program, bug="padding"), *tokens_and_labels(ignored=2), mesh="dp=2 cp=2", reference=program
    )
    assert str(result.differences[0]) == (
        "every gradient: all 29 are 15/16 of the right one: of the 32 labels in inputs[1] 2 are ignored (negative), "
        "but counted"
    )


def test_gradients_of_hsdp_that_are_averaged_twice_are_found_and_named():
    result = axes.verify(by_hand(programs.hsdp, twice=True), mesh="dp_replicate=2 dp_shard=2")
    assert str(result.differences[0]) == (
        "every gradient: all 8 are 2 times too small over dp_replicate: divided by dp_replicate once too often"
    )


def test_rows_of_a_region_in_the_wrong_order_are_found_and_named():
    specs = programs.REGION_SPECS | {"*.qkv.weight": "(three h k)@tp e"}
    result = axes.verify(programs.region(), TOKENS, mesh="dp=2 tp=2", specs=specs)
    assert str(result.differences[0]).startswith(
        "blocks.0.attention.qkv.weight has its rows in another order than forward takes them in: they lie as '_@tp _'"
    )
