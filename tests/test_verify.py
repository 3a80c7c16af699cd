"""`axes.verify` finds and names the bugs that people shipped, and raises no alarm on models that are right."""

# Imports from inside: what a wrong tensor is told to be, and how meshes are shrunk, without a process for each.

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

import axes
from axes.nn.diagnosis import Parts, Piece, Tolerance, diagnosed, fitting
from axes.nn.verification import _call, shrunk
from tests import verify_programs as programs
from tests.verify_models import program, tokens_and_labels
from tests.verify_programs import TOKENS

by_hand = functools.partial

full = functools.partial(pytest.param, marks=pytest.mark.full)

SUMS = "whether gradients are summed over ranks, since the program runs no backward"
NONE = "gradients, since the program leaves none and backward can't start from what it returns"

# fmt: off
RIGHT = {
    "Megatron's way on dp, cp and tp": ("dp=2 cp=2 tp=2", program, tokens_and_labels(ignored=3)),
    "sequence parallelism": ("tp=2", by_hand(program, sequence=True), tokens_and_labels()),
    "dropout of parts of the sequence": ("tp=2", by_hand(program, dropout=0.3, sequence=True), tokens_and_labels()),
    "a loss that is a rank's share, untied": ("dp=2 cp=2", by_hand(program, local_loss=True, tied=False), tokens_and_labels()),
    "three ranks of dp": ("dp=3 tp=2", program, tokens_and_labels(rows=6)),
    "without a loss": ("cp=2 tp=2", by_hand(program, sequence=True, trained=False), tokens_and_labels()),
    "FSDP2 with accumulation": ("dp=2", by_hand(programs.fsdp, accumulate=2), ()),
    "FSDP2, evaluated after it": ("dp=2", by_hand(programs.fsdp, evaluated=True), ()),
    "FSDP2 around a module that torch.compile has wrapped": ("dp=2", by_hand(programs.fsdp, dtype="compiled"), ()),
    "parallelize_module under FSDP2": ("dp=2 tp=2", programs.torch_tp, ()),
    "data parallelism by hand, and a step": ("dp=2", by_hand(programs.data_parallel, stepped=True), ()),
    "two stages": ("pp=2", programs.stages, ()),
    "dropout inside of torch's layers": ("dp=2", programs.dropping, ()),
    "DTensors of uneven sizes, one of them pending": ("dp=2 tp=2", programs.dtensors, ()),
    "steps of Adam in bfloat16": ("dp=2", by_hand(programs.adam, dtype=torch.bfloat16, scale=1e6), ()),
    "steps of Adam": ("dp=2", programs.adam, ()),
    "a number": ("dp=2", by_hand(programs.planted, kind="a number", wrong=False), ()),
    "scores beside a mask": ("dp=2", by_hand(programs.planted, kind="scores beside a mask", wrong=False), ()),
}
# fmt: on
MISSED = {"without a loss": SUMS, "scores beside a mask": NONE}
"""Of right programs whose gradients nobody can judge what isn't compared."""
# fmt: off
SOMETIMES = {"three ranks of dp", "FSDP2, evaluated after it", "steps of Adam", "a number", "a loss that is a rank's share, untied"}
# fmt: on


@pytest.mark.parametrize("name", [full(name) if name in SOMETIMES else name for name in RIGHT])
def test_no_alarm_on_a_right_program(name):
    mesh, fn, inputs = RIGHT[name]
    result = axes.verify(fn, *inputs, mesh=mesh, timeout=60)
    assert (result.differences, result.missed) == ((), (MISSED[name],) if name in MISSED else ()), result
    assert result.ok is (None if name in MISSED else True)


NAMED = {"up.*": "f@tp ...", "down.weight": "e f@tp", "*": "..."}


def test_no_alarm_on_modules():
    x = programs.inputs(4, 3, 8).requires_grad_()
    for dtype in (torch.float32, torch.bfloat16):  # the bias of keys has a gradient that is zero but for rounding
        specs = {"query.*": "f@tp ...", "key.*": "f@tp ...", "value.*": "f@tp ..."}
        result = axes.verify(programs.KeyBias().to(dtype), x.detach().to(dtype), mesh="dp=2 tp=2", specs=specs)
        assert result.ok, result
    result = axes.verify(programs.region(), x, mesh="dp=2 tp=2", specs=programs.REGION)
    assert result.ok, result
    assert result.compared == 4, "an output, two parameters and an input"
    with axes.Mesh("dp=64 tp=8"):  # the ambient mesh is the one to check on
        result = axes.verify(programs.Feed(), TOKENS, specs=NAMED)
    assert str(result) == "the same function on 'dp=2 tp=2': 9 outputs and gradients"
    layer = axes.nn.Einsum("b s embed, mlp embed -> b s mlp", embed=8, mlp=12)
    result = axes.verify(layer, x, mesh="tp=2", rules=axes.Rules(mlp="tp", embed=None))
    assert result.ok, result


def test_dropout_by_hand_is_said_to_make_programs_that_cant_be_compared():
    result = axes.verify(by_hand(programs.dropping, by_hand=True), mesh="dp=2", timeout=60)
    assert str(result).splitlines()[1] == (
        "  rand_like in 1 (Noise): random numbers, which axes.verify can't turn off as it does dropout; where another "
        "mesh draws others, what follows can't be compared. Turn them off, as by module.eval()"
    )


# Bugs: the program, what it needs, and what its first line says.
# fmt: off
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
    "norm": ("cp=2 tp=2", {"sequence": True}, "blocks.1.norm1.weight: its gradient is pending over tp (its sum is right)"),
    "bias": ("dp=2 tp=2", {}, "blocks.0.mlp (Mlp): its output is right but that blocks.0.mlp.bias is added 2 times over tp"),
    "loss": ("dp=2 cp=2", {}, "every gradient: all 15 are 2 times too large over cp: a mean over cp is missing"),
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
# fmt: on


@pytest.mark.parametrize("bug", WRONG)
def test_a_bug_is_found_and_named(bug):
    mesh, options, line = WRONG[bug]
    result = axes.verify(by_hand(program, bug=bug, **options), *tokens_and_labels(), mesh=mesh, timeout=60)
    assert not result
    assert str(result).splitlines()[1].strip() == line


# Programs with one fault, and the first line on it.
# fmt: off
FAULTS = {
    "padding that is counted": (
        "dp=2 cp=2",
        by_hand(program, bug="padding"),
        "every gradient: all 15 are 15/16 of the right one: of the 32 labels in inputs[1] 2 are ignored (negative), "
        "but counted",
    ),
    "FSDP2, not divided and evaluated after it": (
        "dp=2",
        by_hand(programs.fsdp, evaluated=True, divided=False),
        "every gradient: all 8 are 2 times too large over dp: a mean over dp is missing",
    ),
    "a step by a rank's own gradients": (
        "dp=2",
        by_hand(programs.data_parallel, synchronized=False, stepped=True),
        "it began as that, so what stepped it isn't the same",
    ),
    "a summand that every rank adds": ("dp=2", programs.summands, "output: pending over dp, as it says, and bias is 2 times in its sum"),
}
# fmt: on


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_a_program_is_found_and_named(fault):
    mesh, fn, line = FAULTS[fault]
    inputs, more = ((tokens_and_labels(ignored=2)), {"reference": program}) if "padding" in fault else ((), {})
    result = axes.verify(fn, *inputs, mesh=mesh, timeout=60, **more)
    assert not result
    assert line in str(result)


@pytest.mark.parametrize(
    ("fn", "kind", "line"),
    [(programs.planted, kind, line) for kind, (_, line) in programs.PLANTED.items()]
    + [(programs.planted_gradient, *each) for each in programs.GRADIENTS.items()],
    ids=[*programs.PLANTED, *(f"gradient: {kind}" for kind in programs.GRADIENTS)],
)
def test_one_wrong_tensor_is_found_and_named_whatever_is_beside_it(fn, kind, line):
    wrong = axes.verify(by_hand(fn, kind=kind), mesh="dp=2", timeout=60)
    assert line in str(wrong)
    assert len(wrong.differences) == 1


# fmt: off
REGIONS = {
    "rows in the wrong order": (
        {"gates.weight": "(two f)@tp e"},
        None,
        "gates.weight has its rows in another order than forward takes them in: they lie as '_@tp _'",
    ),
    "a module inside": ({}, programs.Unreduced(12, 8, bias=False), "down (Unreduced): its output is pending over tp (its mean is right)"),
}
# fmt: on


@pytest.mark.parametrize("fault", REGIONS)
def test_a_fault_inside_a_region_is_found_and_named(fault):
    specs, down, line = REGIONS[fault]
    x = programs.inputs(4, 3, 8)
    result = axes.verify(programs.region(down), x, mesh="dp=2 tp=2", specs=programs.REGION | specs)
    assert str(result.differences[0]).startswith(line)


def test_a_report_names_the_whole_and_then_the_first_thing_to_look_at():
    result = axes.verify(by_hand(program, bug="twice"), *tokens_and_labels(), mesh="dp=2 cp=4")
    assert str(result).splitlines() == [
        "not the same function on 'dp=2 cp=2': 1 differences, the first to look at first",
        "  blocks.0.mlp.up.weight: its gradient is 2 times too large over cp",
    ]
    assert repr(result).startswith(
        "<Verification on 'dp=2 cp=2': 1 differences, first: blocks.0.mlp.up.weight: its gra"
    )
    first = result.differences[0]
    assert (first.name, first.what, first.axes) == ("blocks.0.mlp.up.weight", "gradient", ("cp",))
    assert round(first.factor, 6) == 2.0


def test_what_a_run_leaves_behind_is_no_rounding():
    result = axes.verify(programs.counting, programs.inputs(12), mesh="dp=2", timeout=60)
    assert [str(each) for each in result.differences] == ["output: 5/4 of the right one (right where dp has size 1)"]


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("modules", "the parameters of Linear, which is called but not part of the module that is returned"),
        ("input", "the gradient of inputs[0]"),
    ],
)
def test_what_isnt_compared_is_said(kind, text):
    x = programs.inputs(6, 8).requires_grad_(kind == "input")
    result = axes.verify(by_hand(programs.unseen, kind=kind), x, mesh="dp=2", timeout=60)
    assert result.ok is None
    assert not result
    assert result.missed == (text,)
    assert str(result).startswith(f"the same but for {text}, on 'dp=2': ")
    assert repr(result) == f"<Verification on 'dp=2': the same but for {text}>"
    if kind == "input":
        result = axes.verify(by_hand(programs.unseen, kind=kind, wrong=True), x, mesh="dp=2", timeout=60)
        assert result.ok is False
        assert str(result).endswith("\n  not compared: the gradient of inputs[0]")


@pytest.mark.parametrize(
    ("fn", "inputs", "text"),
    [
        (str.title, ("a",), "has nothing to compare: the program returned no tensor"),
        (programs.nested, (), "can't compare nested tensors; return x.to_padded_tensor"),
        (nn.Linear(2, 2), (torch.ones(2, 2),), "no pattern or annotation is about"),
    ],
)
def test_what_cant_be_compared_is_said(fn, inputs, text):
    with pytest.raises(axes.AxesError, match=text):
        axes.verify(fn, *inputs, mesh="tp=2")


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
    places = [(d, t, c) for d in range(4) for t in range(2) for c in range(2)]
    several = Parts({"dp": 4, "tp": 2, "cp": 2}, {place: Piece(WHOLE * 4) for place in places})
    assert diagnosed(several, WHOLE, EXACT).axes == ("dp",), "one axis is likelier than two"


def test_a_pending_dtensor_with_a_wrong_sum_is_told_so():
    everywhere = [((0, 6),)] * 2
    for op, word in (("sum", "sum"), ("avg", "mean")):
        wrong = said(WHOLE, WHOLE.cos(), index=everywhere, pending=op)
        text = diagnosed(wrong, WHOLE, EXACT).text
        assert text.startswith(f"pending over tp, as it says, but its {word} is wrong (largest relative difference")
