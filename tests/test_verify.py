"""`axes.verify` finds and names the bugs that people shipped, and raises no alarm on models that are right."""

# Imports from inside: the mesh of one device, without a process for it.

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

import axes
from axes.nn.verify import _of_one
from tests import verify_programs as programs
from tests.common import case
from tests.verify_models import program, tokens_and_labels
from tests.verify_programs import TOKENS

by_hand = functools.partial

full = functools.partial(pytest.param, marks=pytest.mark.full)

NONE = "gradients, since the program leaves none and returns no scalar from which backward could start"

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
    "an output that is zero but for rounding": ("dp=2 tp=2", programs.zeros, ()),
    "a number": ("dp=2", by_hand(programs.planted, kind="a number", wrong=False), ()),
    "scores beside a mask": ("dp=2", by_hand(programs.planted, kind="scores beside a mask", wrong=False), ()),
}
# fmt: on
MISSED = {"without a loss": NONE, "scores beside a mask": NONE}
"""What isn't compared of right programs whose gradients nobody can judge."""
# fmt: off
SOMETIMES = {"FSDP2 around a module that torch.compile has wrapped", "three ranks of dp", "FSDP2, evaluated after it", "steps of Adam", "a number", "a loss that is a rank's share, untied"}
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
    with axes.Mesh("dp=2 tp=2"):  # the ambient mesh is the one to check on
        result = axes.verify(programs.Feed(), TOKENS, specs=NAMED)
    assert str(result) == "the same function on 'dp=2 tp=2': 9 outputs and gradients"
    layer = axes.nn.Einsum("b s embed, mlp embed -> b s mlp", embed=8, mlp=12)
    result = axes.verify(layer, x, mesh="tp=2", rules=axes.Rules(mlp="tp", embed=None))
    assert result.ok, result


def test_dropout_by_hand_is_named_by_its_module():
    result = axes.verify(by_hand(programs.dropping, by_hand=True), mesh="dp=2", timeout=60)
    assert str(result.differences[0]).startswith("1 (Noise): its output is different: ")


# Programs with one fault, and how the first line on it begins.
# fmt: off
FAULTS = {
    "missing all-reduce": ("dp=2 tp=2", by_hand(program, bug="missing all-reduce"), "blocks.0.mlp.down: its output is pending over tp (its sum is right), and blocks.0.mlp after it is wrong: an all-reduce over tp is missing between them"),
    "doubled all-reduce": ("dp=2 tp=2", by_hand(program, bug="doubled all-reduce"), "blocks.0.mlp (Mlp): its output is right but that the output of blocks.0.mlp.down is added 2 times"),
    "norm": ("cp=2 tp=2", by_hand(program, bug="norm", sequence=True), "blocks.1.norm1.weight: its gradient is pending over tp (its sum is right)"),
    "bias": ("dp=2 tp=2", by_hand(program, bug="bias"), "blocks.0.mlp (Mlp): its output is right but that blocks.0.mlp.bias is added 2 times"),
    "loss": ("dp=2 cp=2", by_hand(program, bug="loss"), "every gradient: all 16 are 2 times too large"),
    "tie": ("dp=2 tp=2", by_hand(program, bug="tie"), "head.weight: its gradient is different: largest relative difference 6e-01"),
    "dropout": ("dp=2 tp=2", by_hand(program, bug="dropout", dropout=0.3), "blocks.0.dropout (Dropout): drops other elements on each rank of tp, though its input is the same there"),
    "dropout outside of any module": ("tp=2", by_hand(programs.dropped), "the program: drops other elements on each rank of tp, though its input is the same there"),
    "padding that is counted": ("dp=2 cp=2", by_hand(program, bug="padding"), "every gradient: all 16 are 0.9375 times the right one"),
    "FSDP2, not divided and evaluated after it": ("dp=2", by_hand(programs.fsdp, evaluated=True, divided=False), "every gradient: all 8 are 2 times too large over dp, as where a mean over dp is missing"),
    "a step by a rank's own gradients": ("dp=2", by_hand(programs.data_parallel, synchronized=False, stepped=True), "its value began right, and after the program is"),
    "a summand that every rank adds": ("dp=2", by_hand(programs.summands), "output: right but that bias is added 2 times over dp"),
}
# fmt: on


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_a_program_is_found_and_named(fault):
    mesh, fn, line = FAULTS[fault]
    padding = fault.startswith("padding")
    inputs = tokens_and_labels(ignored=2 * padding) if fn.func is program else ()
    result = axes.verify(fn, *inputs, mesh=mesh, timeout=60, **({"reference": program} if padding else {}))
    assert not result
    at = {"a step by a rank's own gradients": -1, "padding that is counted": 1}.get(fault, 0)
    assert line in str(result.differences[at])


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
    "rows in the wrong order": ({"gates.weight": "(two f)@tp e"}, None, "the model (Region): its output is different: largest relative difference 3e-01"),
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
    result = axes.verify(by_hand(program, bug="twice"), *tokens_and_labels(), mesh="dp=2 cp=2")
    assert str(result).splitlines() == [
        "not the same function on 'dp=2 cp=2': 1 differences; start with the first",
        "  blocks.0.mlp.up.weight: its gradient is 2 times too large",
    ]
    assert repr(result).startswith(
        "<Verification: not the same function on 'dp=2 cp=2': 1 differences; start with the first"
    )
    first = result.differences[0]
    assert (first.name, first.what, first.axes) == ("blocks.0.mlp.up.weight", "gradient", ())
    assert round(first.factor, 6) == 2.0


def test_what_a_run_leaves_behind_is_no_rounding():
    result = axes.verify(programs.counting, programs.inputs(12), mesh="dp=2", timeout=60)
    assert [str(each) for each in result.differences] == ["output: 1.25 times the right one"]


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
    assert repr(result).startswith(f"<Verification: the same but for {text}, on 'dp=2'")
    if kind == "input":
        result = axes.verify(by_hand(programs.unseen, kind=kind, wrong=True), x, mesh="dp=2", timeout=60)
        assert result.ok is False
        assert str(result).splitlines()[0].endswith(" (not compared: the gradient of inputs[0])")


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

MESHES = [
    "dp=2 tp=1",
    "dp=2 cp=2; fsdp = dp cp",
    "dp=2 cp=4; (dp cp) = edp=4 ep=2",
    "dp=2 tp=4; all = dp tp; tp = kv=2 rep=2",
]


@pytest.mark.parametrize("text", MESHES)
def test_one_device_has_all_names_of_the_mesh(text):
    mesh = axes.Mesh(*text.split("; "))
    found = _of_one(mesh)
    assert (found.axis_names, found.names) == (mesh.axis_names, dict.fromkeys(mesh.names, 1))


def named(mesh):
    """The sum over a name that cuts the axes, and over one that is made of them."""
    with mesh:
        return axes.psum(torch.ones(2) / mesh.axis("ep").size, "ep"), mesh.names["all"] / mesh.size


def test_further_names_mean_on_the_ranks_as_on_the_mesh():
    mesh = axes.Mesh("dp=2 cp=2", "(dp cp) = edp=2 ep=2", "all = dp cp")
    assert axes.verify(named, mesh=mesh, timeout=60).ok


@pytest.mark.parametrize("mesh", [axes.Mesh("dp=64 tp=8"), axes.Mesh("dp=2 tp=2")["tp"], "dp=2 tp=2 cp=2 pp=2"])
def test_a_mesh_that_isnt_small_is_refused_with_one_that_is(mesh):
    with pytest.raises(axes.MeshError, match="pass a small mesh with the same names"):
        axes.verify(named, mesh=mesh)


# What tensors are told to be: a program returns all of these at once.

WHOLE = torch.arange(1.0, 25.0, dtype=torch.float64).view(6, 4).sin()
ROWS, ONES, INTEGERS = WHOLE.view(3, 2, 4), torch.ones(6, 4, dtype=torch.float64), torch.tensor([2**62, 2**62 + 1])
GAPS = torch.where(WHOLE > 0.9, torch.nan, WHOLE)

# fmt: off
TOLD = [
    # the whole tensor, what the rank of `dp=2 tp=2` at this place returns in its stead, and how what is told begins
    (WHOLE, lambda d, t: WHOLE, ""),
    (WHOLE, lambda d, t: WHOLE.chunk(2)[t], ""),
    (WHOLE, lambda d, t: (WHOLE[:4], WHOLE[4:])[t], "of shape [2, 4] and [4, 4] where it should be [6, 4], or parts of that"),
    (WHOLE[:4], lambda d, t: WHOLE[:4].chunk(2)[t].chunk(2)[d], ""),
    (WHOLE * 0, lambda d, t: (WHOLE * 0).chunk(2, 1)[t], ""),
    (WHOLE, lambda d, t: axes.from_local(WHOLE.chunk(2)[t], "a@tp b"), ""),
    (WHOLE, lambda d, t: axes.from_local(WHOLE / 2, "a b | sum@tp"), ""),
    (WHOLE, lambda d, t: WHOLE * (0.25, 0.75)[t], "pending over tp (its sum is right)"),
    (WHOLE, lambda d, t: WHOLE * (0.5, 1.5)[t], "pending over tp (its mean is right)"),
    (WHOLE, lambda d, t: (3 * WHOLE - WHOLE.cos(), WHOLE.cos())[t], "pending over tp, and its sum is 3 times too large"),
    (WHOLE, lambda d, t: (t * 3 * WHOLE + (1 - 2 * t) * WHOLE.cos())[3 * d : 3 * d + 3], "pending over tp, and its sum is 3 times too large"),
    (WHOLE, lambda d, t: WHOLE * (1 + t), "pending over tp, and its sum is 3 times too large"),
    (WHOLE, lambda d, t: WHOLE * (1 + d + t), "pending over dp and tp, and its sum is 8 times too large"),
    (WHOLE, lambda d, t: WHOLE * (1 + 1e-5), "1.00001 times the right one"),
    (WHOLE, lambda d, t: WHOLE * 2, "2 times too large"),
    (WHOLE * 1e200, lambda d, t: WHOLE * 2e200, "2 times too large"),
    (WHOLE * 1e-200, lambda d, t: WHOLE * 2e-200, "2 times too large"),
    (GAPS, lambda d, t: GAPS * 2, "2 times too large"),
    (WHOLE.bfloat16(), lambda d, t: (WHOLE * 2.002).bfloat16(), "2 times too large"),
    (WHOLE, lambda d, t: WHOLE.chunk(2)[t] / 2, "2 times too small"),
    (WHOLE, lambda d, t: -WHOLE, "-1 times the right one"),
    (WHOLE, lambda d, t: WHOLE * 1.25, "1.25 times the right one"),
    (WHOLE, lambda d, t: WHOLE * 0, "zero on every rank"),
    (WHOLE, lambda d, t: WHOLE / 0, "different: largest relative difference inf"),
    (WHOLE, lambda d, t: WHOLE[:5], "of shape [5, 4] where it should be [6, 4], or parts of that"),
    (WHOLE, lambda d, t: WHOLE.chunk(2)[1 - t], "different: "),
    (WHOLE, lambda d, t: ROWS[:, t], ""),  # of plain outputs the order of rows isn't compared
    (WHOLE, lambda d, t: axes.from_local(ROWS[:, t], "a@tp b"), "different: "),
    (WHOLE, lambda d, t: axes.from_local(WHOLE.chunk(2)[1 - t], "a@tp b"), "different: "),
    (WHOLE, lambda d, t: axes.from_local((WHOLE, WHOLE.cos())[t], "a b | sum@tp"), "different: "),
    (WHOLE, lambda d, t: axes.from_local((WHOLE, WHOLE.cos())[t], "a b | mean@tp"), "different: "),
    (WHOLE, lambda d, t: axes.from_local((WHOLE + 0.1 * t * WHOLE.cos()).chunk(2)[d], "a@dp b"), "not the same on the ranks of tp, where it should be"),
    # any number is a multiple of a constant one
    (ONES, lambda d, t: ONES * (0.4, 0.438079)[t], "not the same on the ranks of tp, where it should be"),
    (ONES, lambda d, t: ONES * 1.7, "different: "),
    (ONES, lambda d, t: ONES * (0.9, 1.1)[t], "pending over tp (its mean is right)"),
    (ONES, lambda d, t: ONES / 2, "2 times too small"),
    (ONES, lambda d, t: ONES * 2 / 3, "different: "),
    (INTEGERS, lambda d, t: INTEGERS + 1 + t, "not the same on the ranks of tp, where it should be"),  # a sum that overflows is no multiple
]
# fmt: on


def all_at_once(mesh):
    with mesh:
        places = [mesh.coordinate[name] for name in ("dp", "tp")]
        return [whole if mesh.size == 1 else parts(*places) for whole, parts, _ in TOLD]


def test_each_of_many_tensors_is_told_what_it_is_instead():
    found = {each.name: str(each) for each in axes.verify(all_at_once, mesh="dp=2 tp=2", timeout=60).differences}
    for at, (_, _, text) in enumerate(TOLD):
        told = found.get(name := f"output[{at}]", "")
        with case(f"{told!r}, which is {text!r}"):
            assert told.startswith(f"{name}: {text}") if text else not told


class Gated(nn.Module):
    """Two products of the same input, multiplied."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(4, 8, bias=False), nn.Linear(4, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.gate(x) * self.up(x)


def test_an_error_inside_a_module_says_which_and_how_its_parameters_are_sharded():
    region = axes.shard_map(nn.Sequential(Gated()), "b d -> b f@tp")
    with pytest.raises(RuntimeError, match="must match the size") as caught:
        axes.verify(region, torch.ones(2, 4), mesh="tp=2", specs={"*.gate.weight": "f@tp d", "*.up.weight": "f d"})
    assert "in 0 (Gated); parameters: gate.weight '_@tp _', up.weight '_ _'" in "\n".join(caught.value.__notes__)
