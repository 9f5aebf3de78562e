"""torch's own samples and error inputs (OpInfo) for every op of the table, against eager torch on the CPU.

One launch computes a sample in every dtype: the kernel compiles once, and each result is compared by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, reduce
from typing import Any

import pytest
import torch
from accuracy import assert_close_to_eager, assert_form, outcome
from functors import poison, unpoison
from tiers import choose
from torch.testing._internal import common_utils
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import OpInfo
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

import fuser
from fuser.dtypes import DTYPES
from fuser.kernel_spec import MAX_OUTPUTS
from fuser.ops import OPS, dtype_kind

pytestmark = [
    pytest.mark.cpu,
    pytest.mark.filterwarnings("ignore:ComplexHalf support:UserWarning", "ignore:where received a uint8:UserWarning"),
]


ATEN = torch.ops.aten
Args = tuple[Any, ...]
Kwargs = dict[str, Any]


@dataclass(frozen=True, eq=False)
class Subject:
    """A function of torch's, and where its samples come from."""

    # Name in fuser's table.
    name: str
    info: OpInfo
    # A function, or the name of a method.
    target: Callable[..., Any] | str
    # Makes the arguments of the target from a sample's.
    adapt: Callable[[Args, Kwargs], tuple[Args, Kwargs]] = lambda args, kwargs: (args, kwargs)


def _grad_first(args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
    # A backward op takes a gradient, then the forward's input (or result, which is as good a sample).
    x = args[0]
    wide = x.to(torch.complex128 if x.dtype.is_complex else torch.float64)
    return (torch.sin(wide * 3 + 1).to(x.dtype), x), kwargs


def _grad_and_threshold(args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
    return (*_grad_first(args, kwargs)[0], 0), {}


def _dtype_only(args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
    # ``x.to`` has many forms; what fuses is the cast below them.
    dtypes = [item for item in (*args, *kwargs.values()) if isinstance(item, torch.dtype)]
    return args[:1], {"dtype": dtypes[0] if dtypes else torch.float16}


def _number_value(args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
    # A tensor's one value is read from the device by torch, and by nobody else.
    x, mask, value = args
    # Complex ones are not fused, and no error.
    return (x, mask, (value.item() if isinstance(value, torch.Tensor) else value).real), kwargs


def _without_kwargs(args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
    return args, {}


# Bound in graphs of ATen alone: test_ops and test_arrangements have them.
IN_GRAPHS = {
    "clone", "contiguous", "elu_backward", "elu_result_backward", "fill", "fmax", "fmin", "glu",
    "glu_backward_first", "glu_backward_second",
    "hardshrink", "hardsigmoid_backward", "hardswish_backward", "hardtanh_backward", "heaviside", "isneginf",
    "isposinf", "leaky_relu_backward", "left_shift", "log_sigmoid_backward", "logit_backward", "mish_backward",
    "nan_to_num", "native_dropout_backward", "prelu", "right_shift", "shrink_backward", "signbit", "softplus_backward",
    "softshrink", "threshold", "tril", "triu", "div_trunc", "div_trunc_number", "binary_cross_entropy",
    "log_sigmoid", "masked_put",
    "binary_cross_entropy_backward", "mse_loss_backward", "smooth_l1_loss_backward", "huber_loss_backward",
}  # fmt: skip


# Under the names of their overloads, which reduce by a number.
LOSSES = ("mse_loss", "smooth_l1_loss", "huber_loss")


def _unreduced(args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
    # What each element comes to: a sum or a mean is another op.
    return args, {name: value for name, value in kwargs.items() if name in {"beta", "delta"}} | {"reduction": 0}


def _info(name: str, variant: str = "") -> OpInfo:
    return next(item for item in op_db if item.name == name and item.variant_test_name == variant)


def _subjects() -> Iterator[Subject]:
    activations = "relu silu gelu leaky_relu elu softplus mish hardtanh hardsigmoid hardswish".split()
    names = {name: name for name in OPS} | {name: f"nn.functional.{name}" for name in activations}
    for name in LOSSES:
        yield Subject(name, _info(f"nn.functional.{name}"), getattr(ATEN, name).default, _unreduced)
    derived = {*LOSSES, "div", "div_number", "pow_number", "gelu_tanh", "to", "convert", "masked_fill"}
    for name, own in names.items():
        if name not in derived | IN_GRAPHS and not name.endswith("_backward"):
            info = _info(own)
            yield Subject(name, info, torch.where if name == "where" else info.op)
    yield Subject("div", _info("div", "no_rounding_mode"), torch.div, _without_kwargs)
    for name in ("add", "mul", "sub"):
        yield Subject(name, _info(f"__r{name}__"), f"__r{name}__")
    yield Subject("sub", _info("rsub"), torch.rsub)
    for name, forward in (("sigmoid", "sigmoid"), ("tanh", "tanh"), ("silu", "nn.functional.silu")):
        yield Subject(f"{name}_backward", _info(forward), getattr(ATEN, f"{name}_backward").default, _grad_first)
    yield Subject("gelu_backward", _info("nn.functional.gelu"), ATEN.gelu_backward.default, _grad_first)
    yield Subject(
        "threshold_backward", _info("nn.functional.relu"), ATEN.threshold_backward.default, _grad_and_threshold
    )
    composed = {"selu": "elu", "celu": "elu", "relu6": "hardtanh", "softsign": "div", "tanhshrink": "sub"}
    for variant, name in composed.items():
        info = _info(f"nn.functional.{variant}")
        yield Subject(name, info, info.op)
    yield Subject("masked_fill", _info("masked_fill"), torch.masked_fill, _number_value)
    yield Subject("to", _info("to"), ATEN._to_copy.default, _dtype_only)


SUBJECTS = {f"{item.name}-{item.info.name}": item for item in _subjects()}


@dataclass(frozen=True)
class Call:
    """One call of a target; tensors are apart from the rest of the arguments."""

    subject: Subject
    tensors: tuple[torch.Tensor, ...]
    # The arguments with a ``None`` at the place of each tensor.
    leaves: tuple[Any, ...]
    structure: Any

    @staticmethod
    def make(subject: Subject, args: Args, kwargs: Kwargs) -> Call:
        leaves, structure = tree_flatten(subject.adapt(args, kwargs))
        tensors = tuple(item for item in leaves if isinstance(item, torch.Tensor))
        return Call(subject, tensors, tuple(leaves), structure)

    def fill(self, values: Iterator[Any]) -> tuple[Args, Kwargs]:
        leaves = [next(values) if isinstance(item, torch.Tensor) else item for item in self.leaves]
        args, kwargs = tree_unflatten(leaves, self.structure)
        return args, kwargs

    def eager(self, tensors: tuple[torch.Tensor, ...]) -> Any:
        (first, *args), kwargs = self.fill(iter(tensors))
        target = self.subject.target
        return getattr(first, target)(*args, **kwargs) if isinstance(target, str) else target(first, *args, **kwargs)

    def __str__(self) -> str:
        args, kwargs = self.fill(f"{str(item.dtype)[6:]}{list(item.shape)}{item.stride()}" for item in self.tensors)
        return f"{self.subject.info.name}{args} {kwargs}"


def fuse_calls(calls: list[Call]) -> torch.fx.GraphModule:
    """Return one graph that makes all calls, with fusion nodes."""
    graph = torch.fx.Graph()
    places = [graph.placeholder(f"x{place}") for place in range(sum(len(call.tensors) for call in calls))]
    values = iter(places)
    nodes = []
    for call in calls:
        args, kwargs = call.fill(values)
        kind = "call_method" if isinstance(call.subject.target, str) else "call_function"
        nodes.append(graph.create_node(kind, call.subject.target, args, kwargs))
    graph.output(tuple(nodes))
    return fuser.fx.fuse_graph(torch.fx.GraphModule(torch.nn.Module(), graph))


def run_fused(calls: list[Call]) -> Any:
    return fuse_calls(calls)(*(tensor for call in calls for tensor in call.tensors))


def is_served(call: Call) -> bool:
    """Whether a kernel serves the dtypes; others run in eager torch, with a reason."""
    operands = [
        item for item in (*call.tensors, *call.leaves) if isinstance(item, torch.Tensor | int | float | complex)
    ]
    if call.subject.name == "where":
        condition, *operands = operands
        if condition.dtype is not torch.bool:
            return False
    if call.subject.name in {"hardtanh", "masked_fill"}:
        # Their numbers take no part in promotion.
        operands = operands[:1]
    common = reduce(torch.promote_types, [torch.result_type(item, operands[0]) for item in operands])
    return dtype_kind(common) in OPS[call.subject.name].kinds


def same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))


def compare(call: Call, got: Any, wanted: Any) -> None:
    what = str(call)
    assert isinstance(got, torch.Tensor), f"{what}: {got!r}"
    assert_form(got, wanted, what)
    wide = tree_map_only(torch.Tensor, lambda x: x.double() if x.dtype.is_floating_point else x, call.tensors)
    assert_close_to_eager(call.subject.name, got, wanted, outcome(call.eager, wide), call.tensors, what)


def check(calls: list[Call]) -> None:
    """Run calls of one sample, in several dtypes, in one launch where kernels serve them, and compare each."""
    together = []
    for call in calls:
        wanted = outcome(call.eager, call.tensors)
        if isinstance(wanted, Exception):
            got = outcome(run_fused, [call])
            assert isinstance(got, type(wanted)), f"{call}: {got!r} instead of {wanted!r}"
        elif not is_served(call):
            before = fuser.stats()["fallbacks"]
            (got,) = run_fused([call])
            assert_form(got, wanted, str(call))
            assert same_bytes(got, wanted), str(call)
            assert fuser.stats()["fallbacks"] != before, f"{call}: ran in eager torch without a reason"
        else:
            together.append((call, wanted))
    for begin in range(0, len(together), MAX_OUTPUTS):
        chosen = together[begin : begin + MAX_OUTPUTS]
        before = fuser.stats()
        results = run_fused([call for call, _ in chosen])
        after = fuser.stats()
        assert after["fallbacks"] == before["fallbacks"], after["fallbacks"]
        has_elements = chosen[0][1].numel() > 0
        assert (after["launches"] > before["launches"]) == has_elements, f"{chosen[0][0]}: ran in eager torch"
        for (call, wanted), got in zip(chosen, results, strict=True):
            compare(call, got, wanted)


def dtypes_of(info: OpInfo) -> list[torch.dtype]:
    return sorted((dtype for dtype in info.dtypes if dtype in DTYPES), key=str)


# torch looks for a unittest among the callers of each sample: all of the frames, with their sources.
common_utils.extract_test_fn = lambda: None


@cache
def samples_of(subject: Subject) -> list[list[Call]]:
    """Return for each of the chosen samples its calls in all dtypes; samples of some dtypes may be fewer."""
    found: dict[int, list[Call]] = {}
    for dtype in dtypes_of(subject.info):
        torch.manual_seed(0)
        for place, sample in enumerate(subject.info.sample_inputs("cpu", dtype)):
            for step, variant in enumerate((sample, sample.noncontiguous())):
                call = Call.make(subject, (variant.input, *variant.args), variant.kwargs)
                found.setdefault(2 * place + step, []).append(call)
    return [calls for _, calls in sorted(found.items())]


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    poison()
    yield
    unpoison()


def test_every_op_has_samples() -> None:
    # These two are forms of "div" and "pow" with a number, which their samples have.
    # "convert" alone stays torch's.
    missing = set(OPS) - {item.name for item in SUBJECTS.values()} - {"div_number", "pow_number", "convert"}
    missing -= IN_GRAPHS
    # The samples of "gelu" have approximate="tanh" too, and so do those of its derivative.
    assert missing == {"gelu_tanh", "gelu_tanh_backward"}


@pytest.mark.one_in(8)
@pytest.mark.parametrize("name", SUBJECTS, ids=str)
def test_samples(name: str, tier: int) -> None:
    samples = samples_of(SUBJECTS[name])
    # In tier 2 one sample of each op (in every dtype), and of two names of an op hardly ever the same.
    for sample in samples if tier == 3 else [samples[choose(name, len(samples))]]:
        check(sample)


@pytest.mark.parametrize("name", [name for name, item in SUBJECTS.items() if item.info.error_inputs_func])
def test_error_inputs(name: str) -> None:
    subject = SUBJECTS[name]
    for item in subject.info.error_inputs("cpu"):
        sample = item.sample_input
        # A number has no such method.
        if not isinstance(subject.target, str) or isinstance(sample.input, torch.Tensor):
            check([Call.make(subject, (sample.input, *sample.args), sample.kwargs)])
