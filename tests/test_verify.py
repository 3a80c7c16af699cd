"""`axes.verify` finds and names the bugs that people shipped, and raises no alarm on models that are right."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

import axes
from axes.nn.diagnosis import Parts, Piece, Tolerance, diagnosed, fitting, times_text
from axes.nn.observed import Observed, _Rounding, moved_by
from axes.nn.verification import _call, shrunk
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
    "FSDP2, evaluated after it": ("dp=2", by_hand(programs.fsdp, reshard=None, evaluated=True), ()),
    "HSDP": ("dp_replicate=2 dp_shard=2", programs.hsdp, ()),
    "parallelize_module": ("tp=2", programs.torch_tp, ()),
    "parallelize_module under FSDP2": ("dp=2 tp=2", by_hand(programs.torch_tp, dp=True), ()),
    "parallelize_module with the sequence split": ("tp=2", programs.torch_sequence_parallel, ()),
    "data parallelism by hand": ("dp=2", programs.data_parallel, ()),
    "two stages": ("pp=2", programs.stages, ()),
    **{
        f"dropout inside of {kind}": ("dp=2", by_hand(programs.dropping, kind=kind), ())
        for kind in programs.DROPPING
        if kind != "dropout by hand"
    },
    "DTensors, one of them pending": ("dp=2 tp=2", programs.dtensors, ()),
    "sizes that don't divide": ("dp=2 tp=2", programs.uneven, ()),
    "a module that torch.compile has wrapped": ("dp=2", programs.compiled, ()),
    "a step of an optimizer": ("dp=2", programs.stepped, ()),
    "truth values, integers, and what isn't finite": ("dp=2", programs.exact, ()),
    "steps of Adam": ("dp=2", programs.adam, ()),
    "attention as one compiled graph": ("dp=2", programs.one_graph, ()),
    "steps of Adam in bfloat16": ("dp=2", programs.narrow_adam, ()),
    "steps of Adam in float32": ("dp=2", by_hand(programs.narrow_adam, dtype=torch.float32, scale=1.0), ()),
    "sums that are zero but for rounding": ("dp=2", programs.centered, ()),
    "sums of float32 that are zero but for rounding": ("dp=2", by_hand(programs.centered, dtype=torch.float32), ()),
    "rows that go to two of four experts": ("dp=2", programs.routed, ()),
    "rows of bfloat16 that go to two of four experts": ("dp=2", by_hand(programs.routed, dtype=torch.bfloat16), ()),
    "a pending DTensor, in which each summand has its part of the bias": (
        "dp=2",
        by_hand(programs.summands, divided=True),
        (),
    ),
    "without a loss": ("cp=2 tp=2", by_hand(program, sequence=True, trained=False), tokens_and_labels()),
    "a loss whose graph is gone": ("dp=2", programs.zeroed, ()),
    "counts that are the same on all ranks": ("dp=2", programs.counted, ()),
    "sparse gradients and outputs": ("dp=2", programs.sparse, ()),
    "outputs of its own rows, without backward": ("dp=2", programs.without_backward, ()),
    "outputs of its own rows of FSDP2, without backward": (
        "dp=2",
        by_hand(programs.without_backward, sharded=True),
        (),
    ),
}


SUMS = "whether gradients are summed over ranks, since the program runs no backward"
NONE = "gradients, since the program leaves none and backward can't start from what it returns"
MISSED = {
    "a pending DTensor, in which each summand has its part of the bias": SUMS,
    "without a loss": SUMS,
    "a loss whose graph is gone": NONE,
    "outputs of its own rows, without backward": SUMS,
    "outputs of its own rows of FSDP2, without backward": SUMS,
}
"""Of right programs whose gradients nobody can judge what isn't compared."""


@pytest.mark.parametrize("name", RIGHT)
def test_no_alarm_on_a_right_program(name):
    mesh, fn, inputs = RIGHT[name]
    result = axes.verify(fn, *inputs, mesh=mesh, timeout=60)
    assert (result.differences, result.missed) == ((), (MISSED[name],) if name in MISSED else ()), result
    assert result.ok is (None if name in MISSED else True)


def test_dropout_by_hand_is_said_to_make_programs_that_cant_be_compared():
    result = axes.verify(by_hand(programs.dropping, kind="dropout by hand"), mesh="dp=2", timeout=60)
    assert str(result).splitlines()[1] == (
        "  rand_like in 1 (Noise): random numbers, which axes.verify can't turn off as it does dropout; where another "
        "mesh draws others, what follows can't be compared. Turn them off, as by module.eval()"
    )
    assert result.differences[1].name == "1 (Noise)"


def test_no_alarm_on_a_gradient_that_is_zero_but_for_rounding():
    x = torch.linspace(-1, 2, 96).view(4, 3, 8).sin()
    specs = {"query.*": "f@tp ...", "key.*": "f@tp ...", "value.*": "f@tp ..."}
    for dtype in (torch.float32, torch.bfloat16):
        result = axes.verify(programs.KeyBias().to(dtype), x.to(dtype), mesh="dp=2 tp=2", specs=specs)
        assert result.ok, result


def test_no_alarm_on_a_region():
    for region in (programs.region(), programs.region(checkpointed=True)):
        result = axes.verify(region, TOKENS, mesh="dp=2 tp=2", specs=programs.REGION_SPECS)
        assert result.ok, result


def test_no_alarm_on_what_a_program_of_double_precision_computes_in_float32():
    x = torch.linspace(-1, 2, 48).view(6, 8)
    region = axes.shard_map(programs.Narrow(), "b@dp e -> b@dp e")
    result = axes.verify(region, x, mesh="dp=2 tp=2", specs=programs.NARROW_SPECS)
    assert result.ok, result


def test_an_output_in_a_dataclass_is_compared_as_any_other():
    for answer in (False, True):
        result = axes.verify(functools.partial(programs.narrow, answer=answer, reduced=False), mesh="tp=2")
        assert not result.ok
        assert any(each.what == "output" for each in result.differences)


def test_what_a_step_of_an_optimizer_has_made_wrong_is_said_so():
    result = axes.verify(functools.partial(programs.stepped, synchronized=False), mesh="dp=2")
    assert [each.what for each in result.differences[:1]] == ["gradient"], result
    assert "it began as that, so what stepped it isn't the same" in str(result)


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


def test_gradients_are_compared_where_a_forward_pass_follows_them_under_fsdp2():
    wrong = by_hand(programs.fsdp, reshard=None, evaluated=True, divided=False)
    result = axes.verify(wrong, mesh="dp=2", timeout=60)
    assert "are 2 times too large over dp: a mean over dp is missing" in str(result)


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"off": 1}, "output[2]: none of these: largest relative difference 1e-09"),
        ({"off": -1}, "output[2]: none of these: largest relative difference 1e-09"),
        ({"flipped": True}, "output[0]: none of these: largest relative difference 1e+00; right where dp has size 1"),
        ({"finite": True}, "output[3]: not infinite, or no number, where the one device's is"),
    ],
    ids=str,
)
def test_integers_truth_values_and_what_isnt_finite_are_compared_exactly(options, line):
    result = axes.verify(by_hand(programs.exact, **options), mesh="dp=2", timeout=60)
    assert line in str(result)
    assert len(result.differences) == 1


PLANTED = {
    "ids beside a large loss": "output['ids']: none of these: largest relative difference 3e-01; right where dp has size 1",
    "mask beside a large loss": "output['mask']: none of these: largest relative difference 1e+00; right where dp has size 1",
    "count": "output[1]: none of these: largest relative difference 3e-01; right where dp has size 1",
    "flag": "output[1]: zero on every rank",
    "flag of one rank": "output[1]: not the same on the ranks of dp, where it should be",
    "number": "output[1]['loss']: 2 times too large over dp: a mean over dp is missing",
    "share": "output: 2 times too small over dp: divided by dp once too often",
    "missing numbers": "output: 2 times too large over dp: a mean over dp is missing",
    "loss beside a count": "output['loss']: none of these: largest relative difference 5e-01; right where dp has size 1",
    "loss of bfloat16 beside a count": "output['loss']: none of these: largest relative difference 5e-01",
    "scores beside a mask": "output[0]: 5/4 of the right one",
    "scores of float32 beside a mask": "output[0]: 5/4 of the right one",
    "scores in a mask": "output: none of these: largest relative difference",
    "output of no name": "output['z']: there, though one device has none of this name",
}

PLANTED_GRADIENTS = {
    "small": "small.weight: its gradient is 2 times too large over dp",
    "small beside a large one": "small.weight: its gradient is 2 times too large over dp",
    "small beside a mask": "small.weight: its gradient is 2 times too large over dp",
    "complex": "up.weight: its gradient is 2 times too large over dp",
    "no scalar": "up.weight: its gradient is 2 times too large over dp",
    "one rank": "up.weight: its gradient is 1.001 of the right one where dp is 1, and right elsewhere",
    "frozen": "up.weight: its gradient is there, though on one device the parameter is frozen",
    "tiny": "up.bias: its gradient is 2 times too large over dp",
    "huge": "up.bias: its gradient is 2 times too large over dp",
}


@pytest.mark.parametrize(
    ("fn", "kind", "line"),
    [(programs.planted, *each) for each in PLANTED.items()]
    + [(programs.planted_gradient, *each) for each in PLANTED_GRADIENTS.items()],
    ids=[*PLANTED, *(f"gradient: {kind}" for kind in PLANTED_GRADIENTS)],
)
def test_one_wrong_tensor_is_found_and_named_whatever_is_beside_it(fn, kind, line):
    wrong = axes.verify(by_hand(fn, kind=kind), mesh="dp=2", timeout=60)
    assert line in str(wrong)
    assert len(wrong.differences) == 1


@pytest.mark.parametrize(
    "kind",
    [
        "count",
        "share",
        "number",
        "missing numbers",
        "loss of bfloat16 beside a count",
        "scores of float32 beside a mask",
        "scores in a mask",
    ],
)
def test_no_alarm_on_the_same_programs_without_the_error(kind):
    result = axes.verify(by_hand(programs.planted, kind=kind, wrong=False), mesh="dp=2", timeout=60)
    missed = () if kind in ("count", "number") else (NONE,)  # the others detach what they return
    assert (result.differences, result.missed) == ((), missed), result
    assert result.ok is (None if missed else True)


@pytest.mark.parametrize("fill", [None, -1e9, torch.finfo(torch.float32).min])
def test_a_region_that_forgets_its_sum_is_told_of_its_output_first(fill):
    expression = "b e -> b e" if fill is None else "b e -> b e, q k"
    region = axes.shard_map(programs.Unreduced(fill), expression)
    x = torch.linspace(-1, 2, 24).view(6, 4).sin()
    lines = str(axes.verify(region, x, mesh="tp=2", specs=programs.UNREDUCED_SPECS)).splitlines()
    output = "output" if fill is None else "output[0]"
    assert lines[1] == f"  {output}: pending over tp (its sum is right)"
    assert lines[2] == "  every gradient: all 2 are 2 times too small over tp"


def test_a_summand_of_a_pending_output_that_every_rank_adds_is_named():
    result = axes.verify(programs.summands, mesh="dp=2", timeout=60)
    assert str(result.differences[0]) == "output: pending over dp, as it says, and bias is 2 times in its sum"


def test_what_a_run_leaves_behind_is_no_rounding():
    result = axes.verify(programs.counting, torch.linspace(-1, 2, 12), mesh="dp=2", timeout=60)
    assert [str(each) for each in result.differences] == ["output: 5/4 of the right one (right where dp has size 1)"]


def test_a_program_that_runs_with_its_own_numbers_alone_is_checked_without_measuring_how_rounding_moves_them():
    result = axes.verify(programs.particular, torch.full((4,), 1 / 3, dtype=torch.float64), mesh="dp=2", timeout=60)
    assert [str(each) for each in result.differences] == ["output: 5/4 of the right one (right where dp has size 1)"]
    assert result.missed == ("numbers as rounding moves them: the run that tells how far raised ValueError",)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.complex128], ids=str)
def test_rounding_moves_results_by_their_last_bits_and_leaves_numbers_of_few_bits(dtype):
    exact = torch.tensor([0.0, 1.0, -0.5, torch.inf, torch.nan], dtype=dtype)
    x = torch.linspace(0.1, 0.9, 64, dtype=torch.float64).to(dtype).requires_grad_()
    torch.manual_seed(0)
    drawn = torch.rand(3)
    torch.manual_seed(0)
    with _Rounding(1):
        kept, y, again = exact.clone(), x * 1, torch.rand(3)
        y.abs().sum().backward()
    assert torch.equal(kept.isnan(), exact.isnan())
    assert torch.equal(kept.nan_to_num(), exact.nan_to_num())
    assert torch.allclose(drawn, again, rtol=1e-5), "the program draws the same numbers"
    moved, eps = (y - x).detach().abs() / x.detach().abs(), torch.finfo(dtype).eps
    assert 0 < moved.max() <= 17 * eps
    assert (x.grad.abs() - 1).abs().max() <= 64 * eps


def test_noise_is_measured_of_tensors_of_one_shape_alone():
    def seen(**outputs: torch.Tensor) -> Observed:
        return Observed(outputs={name: Piece(x) for name, x in outputs.items()})

    one = seen(same=torch.zeros(3), longer=torch.zeros(3), infinite=torch.zeros(3), missing=torch.zeros(3))
    other = seen(same=torch.ones(3), longer=torch.ones(4), infinite=torch.full((3,), torch.inf), new=torch.ones(3))
    assert moved_by(one, other) == {("outputs", "same"): 1.0}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_module_of_a_narrow_dtype_is_judged_in_double_precision(dtype):
    region = axes.shard_map(programs.Gate(dtype), "b d -> , ")
    x = torch.linspace(-1, 2, 48, dtype=dtype).view(6, 8)
    result = axes.verify(region, x, mesh="tp=2", specs={"*": "..."})
    assert [str(each) for each in result.differences] == ["gate: its gradient is 2 times too large over tp"]


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("method", "the gradients of what belongs to no module that is called or returned (tensors: 1)"),
        ("modules", "the parameters of Linear, which is called but not part of the module that is returned"),
        ("input", "the gradient of inputs[0]"),
    ],
)
def test_what_isnt_compared_is_said(kind, text):
    x = torch.linspace(-1, 2, 48).view(6, 8).requires_grad_(kind == "input")
    result = axes.verify(by_hand(programs.unseen, kind=kind), x, mesh="dp=2", timeout=60)
    assert result.ok is None
    assert not result
    assert result.missed == (text,)
    assert str(result).startswith(f"the same but for {text}, on 'dp=2': ")
    assert repr(result) == f"<Verification on 'dp=2': the same but for {text}>"


def test_a_module_whose_gradients_nobody_can_judge_is_not_ok():
    result = axes.verify(programs.Unrecorded(), TOKENS, mesh="dp=2", specs={"*": "..."})
    assert (result.differences, result.missed, result.ok) == ((), (NONE,), None)


def test_what_isnt_compared_is_said_beside_what_differs():
    x = torch.linspace(-1, 2, 48).view(6, 8).requires_grad_()
    result = axes.verify(by_hand(programs.unseen, kind="input", wrong=True), x, mesh="dp=2", timeout=60)
    assert result.ok is False
    assert str(result).endswith("\n  not compared: the gradient of inputs[0]")


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


def test_a_module_inside_a_region_is_named():
    region = programs.region()
    del region.blocks[1].down
    region.blocks[1].down = programs.Scaled()
    result = axes.verify(region, TOKENS, mesh="dp=2 tp=2", specs=programs.REGION_SPECS)
    assert str(result.differences[0]) == "blocks.1.down (Scaled): its output is pending over tp (its mean is right)"


def test_a_report_names_the_whole_and_then_the_first_thing_to_look_at():
    result = axes.verify(by_hand(program, bug="experts"), *tokens_and_labels(), mesh="tp=4 ep=2")
    assert str(result).splitlines() == [
        "not the same function on 'tp=2 ep=2': 2 differences, the first to look at first",
        "  blocks.0.moe.up: its gradient is 2 times too large over tp",
        "  blocks.0.moe.down: its gradient is 2 times too large over tp",
    ]
    assert repr(result).startswith("<Verification on 'tp=2 ep=2': 2 differences, first: blocks.0.moe.up: its gradient")
    first = result.differences[0]
    assert (first.name, first.what, first.axes, round(first.factor, 6)) == ("blocks.0.moe.up", "gradient", ("tp",), 2.0)


# Meshes.


@pytest.mark.parametrize(
    ("mesh", "small", "call"),
    [
        (axes.Mesh("dp=8 tp=4"), [[2, 2]], ("dp=2 tp=2",)),
        (axes.Mesh("dp=9 tp=1"), [[3, 1]], ("dp=3 tp=1",)),
        (axes.Mesh("dp=4 cp=4 tp=2", "fsdp = dp cp"), [[2, 2, 2]], ("dp=2 cp=2 tp=2", "fsdp = dp cp")),
        (
            axes.Mesh("pp=2 dp=4 cp=4", "(dp cp) = edp=8 ep=2"),
            [[2, 2, 2]],
            ("pp=2 dp=2 cp=2", "(dp cp) = edp=2 ep=2"),
        ),
        (axes.Mesh("dp=8 tp=4")["tp"], [[2]], ("tp=2",)),
        (
            axes.Mesh("dp=2 tp=4", "all = dp tp", "tp = kv=2 rep=2")["tp", "dp"],
            [[2, 2]],
            ("dp=2 tp=2", "all = dp tp", "tp = kv=1 rep=2"),
        ),
        (
            axes.Mesh("dp=2 tp=4", "tp = a=2 b=2").rearrange("... -> ... pp=1"),
            [[2, 2, 1]],
            ("dp=2 tp=2 pp=1", "tp = a=1 b=2"),
        ),
        (axes.Mesh("dp=2 tp=2", "(dp tp) = pp=1 all=4"), [[2, 2]], ("dp=2 tp=2", "(dp tp) = pp=1 all=4")),
        (axes.Mesh("dp=2 tp=2 pp=1", "all = dp tp")["tp", "dp"], [[2, 2]], ("dp=2 tp=2", "(dp tp) = pp=1 all=4")),
        (axes.Mesh("a=2 b=2 c=2 d=2"), [[2, 2, 2, 1], [2, 2, 1, 2], [2, 1, 2, 2]], ("a=2 b=2 c=2 d=1",)),
    ],
)
def test_axes_are_shrunk_to_two_or_three(mesh, small, call):
    found = shrunk(mesh)
    assert [list(each.values()) for each in found] == small
    assert _call(mesh, found[0]) == call
    made = axes.Mesh(*call)
    assert {name: made.shape[name] for name in mesh.shape} == found[0]


# Errors of use.


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (
            lambda: axes.verify(3, mesh="tp=2"),
            "takes a module, or a function that builds, shards and runs one; found as program 3",
        ),
        (
            lambda: axes.verify(nn.Linear, mesh="tp=2"),
            "takes a module, not its class: write axes.verify(Linear(...), ...)",
        ),
        (lambda: axes.verify(program, mesh=2), "mesh= is an axes mesh or its declaration, like 'dp=2 tp=2'; found 2"),
        (lambda: axes.verify(program), "axes.verify needs a mesh; pass mesh='dp=2 tp=2' or write it inside"),
        (lambda: axes.verify(program, mesh="tp"), "tp"),
        (
            lambda: axes.verify(program, mesh="tp=2", specs={"*": "..."}),
            "specs= are for a module; a function shards what it makes by itself",
        ),
        (
            lambda: axes.verify(program, mesh="tp=2", heads=4),
            "sizes are for specs of a module; found 'heads' beside a function",
        ),
        (
            lambda: axes.verify(program, mesh="tp=2", rtol=-1.0),
            "rtol is a number that isn't negative, or None; found -1.0",
        ),
        (lambda: axes.verify(program, mesh="tp=2", atol=True), "atol is a number that isn't negative, or None; found"),
        (lambda: axes.verify(program, mesh="tp=2", timeout=-1), "the timeout is a positive number of seconds, or None"),
        (lambda: axes.verify(nn.Linear(2, 2), torch.ones(2, 2), mesh="tp=2"), "no pattern or annotation is about"),
        (lambda: axes.verify(program, mesh="tp=2", reference=3), "found as reference 3"),
        (lambda: axes.verify(str.title, "a", mesh="tp=2"), "has nothing to compare: the program returned no tensor"),
        (lambda: axes.verify(programs.nested, mesh="tp=2"), "can't compare nested tensors; return x.to_padded_tensor"),
    ],
)
def test_what_cant_be_checked_is_said(call, text):
    with pytest.raises(axes.AxesError) as error:
        call()
    assert text in str(error.value)


def test_the_ambient_mesh_is_the_one_to_check_on():
    with axes.Mesh("dp=64 tp=8"):
        result = axes.verify(nn.Linear(4, 8), torch.ones(2, 4), specs={"*": "f@tp ..."})
    assert result.ok
    assert list(result.meshes) == ["dp=2 tp=2"]


# The diagnosis alone: tensors of ranks that never ran.


WHOLE = torch.arange(1.0, 25.0, dtype=torch.float64).view(6, 4).sin()
EXACT = Tolerance(1e-9, 0.0)


def held(*parts: torch.Tensor) -> Parts:
    return Parts({"tp": len(parts)}, {(i,): Piece(x) for i, x in enumerate(parts)})


def said(*parts: torch.Tensor, index=None, pending="") -> Parts:
    """DTensors of shape 6 4: rows split over tp, or whole."""
    runs = [((0, 3),), ((3, 6),)] if index is None else index
    pieces = {(i,): Piece(x, (6, 4), (runs[i], ((0, 4),)), {"tp": pending}) for i, x in enumerate(parts)}
    return Parts({"tp": 2}, pieces)


def four(make) -> Parts:
    """Ranks of dp=2 tp=2."""
    return Parts({"dp": 2, "tp": 2}, {(d, t): Piece(make(d, t)) for d in range(2) for t in range(2)})


def test_every_layout_that_is_right_is_found():
    assert [str(each) for each in fitting(held(WHOLE, WHOLE), WHOLE, EXACT)] == ["_ _"]
    assert [str(each) for each in fitting(held(WHOLE[:3], WHOLE[3:]), WHOLE, EXACT)] == ["_@tp _"]
    assert [str(each) for each in fitting(held(WHOLE[:4], WHOLE[4:]), WHOLE, EXACT)] == ["_@tp _"], "in any sizes"
    reverse = four(lambda d, t: WHOLE[:4].chunk(2)[t].chunk(2)[d])
    assert [str(each) for each in fitting(reverse, WHOLE[:4], EXACT)] == ["_@(tp dp) _"]
    assert not fitting(held(WHOLE[3:], WHOLE[:3]), WHOLE, EXACT)


def test_zeros_are_right_wherever_they_lie():
    zeros = torch.zeros(4, 4)
    assert [str(each) for each in fitting(held(zeros[:2], zeros[2:]), zeros, EXACT)] == ["_@tp _"]
    assert [str(each) for each in fitting(held(zeros[:, :2], zeros[:, 2:]), zeros, EXACT)] == ["_ _@tp"]


ROWS = WHOLE.view(3, 2, 4)
DIAGNOSES = {
    "pending over tp (its sum is right)": held(WHOLE * 0.25, WHOLE * 0.75),
    "pending over tp (its mean is right)": held(WHOLE * 0.5, WHOLE * 1.5),
    "pending over tp, and its sum is 3 times too large": held(3 * WHOLE - WHOLE.cos(), WHOLE.cos()),
    "2 times too large where tp is 1, and right elsewhere": held(WHOLE, WHOLE * 2),
    "right on some ranks, and a multiple of the right one on others": held(WHOLE, WHOLE * 2, WHOLE * 3),
    "too large by 1e-05 of itself": held(WHOLE * (1 + 1e-5), WHOLE * (1 + 1e-5)),
    "2 times too large": held(WHOLE * 2, WHOLE * 2),
    "2 times too small": held(WHOLE[:3] / 2, WHOLE[3:] / 2),
    "negative": held(-WHOLE, -WHOLE),
    "5/4 of the right one": held(WHOLE * 1.25, WHOLE * 1.25),
    "zero on every rank": held(WHOLE * 0, WHOLE * 0),
    "not finite": held(WHOLE / 0, WHOLE / 0),
    "rows in another order along dim 0 (as '(x=3 y@tp) _')": held(ROWS[:, 0], ROWS[:, 1]),
    "whole where it should be split": said(WHOLE, WHOLE),
    "of shape [5, 4] where it should be [6, 4], or parts of that": held(WHOLE[:5], WHOLE[:5]),
}


@pytest.mark.parametrize("text", DIAGNOSES)
def test_a_tensor_is_told_what_it_is_instead(text):
    assert diagnosed(DIAGNOSES[text], WHOLE, EXACT).text == text


def test_a_dtensor_is_right_only_as_it_says():
    assert fitting(said(WHOLE[:3], WHOLE[3:]), WHOLE, EXACT)
    assert not fitting(said(WHOLE[3:], WHOLE[:3]), WHOLE, EXACT)
    everywhere = [((0, 6),)] * 2
    assert fitting(said(WHOLE * 0.5, WHOLE * 0.5, index=everywhere, pending="sum"), WHOLE, EXACT)
    assert diagnosed(said(WHOLE / 4, WHOLE * 3 / 4, index=everywhere), WHOLE, EXACT).axes == ("tp",)
    assert diagnosed(said(ROWS[:, 0], ROWS[:, 1]), WHOLE, EXACT).kind == "order"


def test_a_difference_of_ranks_names_their_axis():
    other = four(lambda d, t: WHOLE + 0.1 * t * WHOLE.cos())
    found = diagnosed(other, WHOLE, EXACT)
    assert (found.kind, found.axes) == ("differs", ("tp",))


def test_an_axis_that_splits_a_dtensor_isnt_blamed_for_another():
    pieces = {
        (d, t): Piece(
            WHOLE[3 * d : 3 * d + 3] + 0.1 * t * WHOLE[3 * d : 3 * d + 3].cos(),
            (6, 4),
            (((3 * d, 3 * d + 3),), ((0, 4),)),
            {"dp": "", "tp": ""},
        )
        for d in range(2)
        for t in range(2)
    }
    found = diagnosed(Parts({"dp": 2, "tp": 2}, pieces), WHOLE, EXACT)
    assert (found.kind, found.axes) == ("differs", ("tp",))


@pytest.mark.parametrize("scale", [1e-200, 1.0, 1e200])
def test_a_factor_is_found_in_numbers_of_any_size(scale):
    missing = torch.where(WHOLE > 0.9, torch.nan, WHOLE)
    for whole in (WHOLE * scale, missing * scale):
        assert diagnosed(held(whole * 2, whole * 2), whole, EXACT).text == "2 times too large"


def test_both_at_once_are_told_both():
    found = diagnosed(four(lambda d, t: (t * 3 * WHOLE + (1 - 2 * t) * WHOLE.cos())[3 * d : 3 * d + 3]), WHOLE, EXACT)
    assert found.text == "pending over tp, and its sum is 3 times too large"


def test_any_number_is_a_multiple_of_a_constant_one():
    ones = torch.ones(6, 4, dtype=torch.float64)
    for whole in (ones, 3 * ones, torch.where(WHOLE > 0.9, 2.0, 0.0).double()):
        assert diagnosed(held(whole * 0.4, whole * 0.438079), whole, EXACT).kind == "differs"
        assert diagnosed(held(whole * 1.7, whole * 1.7), whole, EXACT).kind == "none"
        assert diagnosed(held(whole * 0.9, whole * 1.1), whole, EXACT).text == "pending over tp (its mean is right)"
        assert diagnosed(held(whole / 2, whole / 2), whole, EXACT).text == "2 times too small"
    thirds = Parts({"dp": 2, "tp": 3}, {(d, t): Piece(ones * 2 / 3) for d in range(2) for t in range(3)})
    assert diagnosed(thirds, ones, EXACT).text == "2/3 of the right one"


def test_a_sum_of_integers_that_overflows_is_no_multiple():
    whole = torch.tensor([2**62, 2**62 + 1])
    assert diagnosed(held(whole, whole + 1), whole, Tolerance(0.0, 0.0)).kind == "differs"


def test_a_factor_of_narrow_numbers_is_the_one_that_sizes_give():
    found = diagnosed(held(WHOLE * 2.002, WHOLE * 2.002), WHOLE, Tolerance(3e-2, 0.0))
    assert (found.text, found.factor, found.axes) == ("2 times too large", 2.0, ("tp",))


def test_a_pending_dtensor_with_a_wrong_sum_is_told_so():
    everywhere = [((0, 6),)] * 2
    for op, word in (("sum", "sum"), ("avg", "mean")):
        wrong = said(WHOLE, WHOLE.cos(), index=everywhere, pending=op)
        text = diagnosed(wrong, WHOLE, EXACT).text
        assert text.startswith(f"pending over tp, as it says, but its {word} is wrong (largest relative difference")


def test_factors_are_told_in_words():
    assert [times_text(x) for x in (2, 0.25, 0.9375, 1.3333333333, -1)] == [
        "2 times too large",
        "4 times too small",
        "15/16 of the right one",
        "4/3 of the right one",
        "negative",
    ]
