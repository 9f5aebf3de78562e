"""``out=`` does what torch.add(..., out=) does: values, strides, warnings, and the type and wording of errors."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

import fuser
from fuser.errors import ArgumentError, DeviceError, FuserError, GradientError, ShapeError
from fuser.outputs import finish_traced_out

pytestmark = pytest.mark.cpu

Call = tuple[torch.Tensor, Any, torch.Tensor]
ADD = fuser.create_jit_fn("template <typename T> T add(T x, T y) { return x + y; }")


def ramp(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    size = 1
    for length in shape:
        size *= length
    return torch.arange(1, size + 1).to(dtype).reshape(shape)


def in_place(make: Callable[[], torch.Tensor], other: Any) -> Callable[[], Call]:
    def build() -> Call:
        x = make()
        return x, other, x

    return build


def windows(first: slice, second: slice, size: int = 12) -> Callable[[], Call]:
    def build() -> Call:
        base = ramp(size)
        return base[first], 1.0, base[second]

    return build


def transposed() -> Call:
    x = ramp(3, 3)
    return x, ramp(3, 3), x.t()


def second_operand() -> Call:
    y = ramp(2, 3)
    return ramp(3), y, y


CASES: dict[str, Callable[[], Call]] = {
    "same layout": lambda: (ramp(2, 3), ramp(2, 3), torch.empty(2, 3)),
    "another layout": lambda: (ramp(2, 3), ramp(2, 3), torch.empty(3, 2).t()),
    "a view with gaps": lambda: (ramp(2, 3), ramp(2, 3), torch.zeros(4, 6)[::2, ::2]),
    "channels_last": lambda: (ramp(2, 3, 4, 5), 1.0, torch.empty(2, 3, 4, 5).to(memory_format=torch.channels_last)),
    "inputs broadcast": lambda: (ramp(2, 1), ramp(3), torch.empty(2, 3)),
    "an input with gaps": windows(slice(0, 12, 2), slice(0, 6)),
    "an unsigned type": lambda: (ramp(3), 0.5, torch.zeros(3, dtype=torch.uint16)),
    "0-dim": lambda: (torch.tensor(1.0), 2.0, torch.tensor(0.0)),
    "no elements": lambda: (ramp(0, 3), 1.0, torch.empty(0, 3)),
    "an empty tensor grows": lambda: (ramp(2, 3), ramp(2, 3), torch.empty(0)),
    "an empty tensor takes the result's layout": lambda: (ramp(2, 3).t(), ramp(2, 3).t(), torch.empty(0)),
    "another shape": lambda: (ramp(2, 3), ramp(2, 3), torch.zeros(5)),
    "a larger shape": lambda: (ramp(3), ramp(3), torch.zeros(2, 3)),
    "a view is resized": lambda: (ramp(3), ramp(3), torch.zeros(10)[2:4]),
    "wider dtype": lambda: (ramp(3), ramp(3), torch.empty(3, dtype=torch.float64)),
    "narrower dtype": lambda: (ramp(3, dtype=torch.float64), ramp(3), torch.empty(3, dtype=torch.bfloat16)),
    "another shape and dtype": lambda: (ramp(3), ramp(3), torch.empty(2, dtype=torch.float64)),
    "integers to float": lambda: (ramp(3, dtype=torch.int32), 1, torch.empty(3)),
    "float to integer": lambda: (ramp(3), 1.0, torch.zeros(3, dtype=torch.int64)),
    "float to bool": lambda: (ramp(3), 1.0, torch.zeros(3, dtype=torch.bool)),
    "complex to float": lambda: (ramp(3, dtype=torch.complex64), 1.0, torch.zeros(3)),
    "int to int8 wraps": lambda: (ramp(3, dtype=torch.int64), 300, torch.zeros(3, dtype=torch.int8)),
    "in place": in_place(lambda: ramp(2, 3), 2.0),
    "in place, transposed": in_place(lambda: ramp(2, 3).t(), 2.0),
    "in place, a view with gaps": in_place(lambda: ramp(4, 6)[::2, ::3], 2.0),
    "in place, second operand": second_operand,
    "in place, the result is larger": in_place(lambda: ramp(3, 1), ramp(4)),
    "in place, the dtype is narrower": in_place(lambda: ramp(3, dtype=torch.float32), ramp(3, dtype=torch.float64)),
    "in place, the result is no integer": in_place(lambda: ramp(3, dtype=torch.int32), 0.5),
    "the same memory as a view": lambda: (lambda x: (x, 1.0, x.view(6).view(2, 3)))(ramp(2, 3)),
    "shifted by one": windows(slice(0, 6), slice(1, 7)),
    "shifted by minus one": windows(slice(1, 7), slice(0, 6)),
    "side by side": windows(slice(0, 6), slice(6, 12)),
    "interleaved": windows(slice(0, 12, 2), slice(1, 12, 2)),
    "transposed onto itself": transposed,
    "expanded": lambda: (ramp(2, 3), 1.0, torch.zeros(1, 3).expand(2, 3)),
    "expanded where it has one row": lambda: (ramp(1, 3), 1.0, torch.zeros(1, 3).expand(1, 3)),
    "requires grad": lambda: (ramp(3), 1.0, torch.zeros(3, requires_grad=True)),
    "on another device": lambda: (ramp(3), 1.0, torch.zeros(3, device="meta")),
}


def observe(function: Callable[..., Any], make: Callable[[], Call]) -> dict[str, Any]:
    """Call it and note all that can be seen from outside."""
    x, y, out = make()
    memory = out.untyped_storage() if out.device.type == "cpu" else None
    address = out.data_ptr() if memory is not None else 0
    seen: dict[str, Any] = {"error": "", "is_out": True}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            seen["is_out"] = function(x, y, out=out) is out
        except RuntimeError as error:
            seen["error"] = str(error).splitlines()[0]
    # torch gives one warning twice when it both resizes and casts.
    seen["warnings"] = {(item.category, str(item.message).split(" (Triggered")[0]) for item in caught}
    seen["shape"], seen["strides"], seen["dtype"] = tuple(out.shape), out.stride(), out.dtype
    seen["same memory"] = memory is None or out.data_ptr() == address or out.numel() == 0 or address == 0
    if memory is not None and not (seen["error"] and "refer to a single" in seen["error"]):
        seen["values"] = out.detach().tolist()
    return seen


# torch names these two calls in its own way.
OWN_WORDING = {
    "requires grad": "out= does not support automatic differentiation",
    "on another device": "out= is on meta, but an input is on cpu",
}


@pytest.mark.parametrize("name", CASES)
def test_equals_torch(name: str) -> None:
    wanted, got = observe(torch.add, CASES[name]), observe(ADD, CASES[name])
    if name in OWN_WORDING:
        assert wanted.pop("error")
        assert OWN_WORDING[name] in got.pop("error")
    assert got == wanted


def test_cases_reach_every_outcome() -> None:
    outcomes = [observe(torch.add, make) for make in CASES.values()]
    assert sum(bool(item["error"]) for item in outcomes) >= 8
    assert sum(bool(item["warnings"]) for item in outcomes) >= 3


def test_random_views_equal_torch() -> None:
    generator = torch.Generator().manual_seed(3)
    errors = 0
    for _ in range(300):
        start, step, size = (
            int(torch.randint(low, high, (), generator=generator)) for low, high in ((0, 6), (1, 3), (1, 5))
        )

        def build(start: int = start, step: int = step, size: int = size) -> Call:
            base = ramp(30)
            return base[4 : 4 + size], 1.0, base[start : start + size * step : step]

        wanted, got = observe(torch.add, build), observe(ADD, build)
        errors += bool(wanted["error"])
        if not wanted["error"] and wanted != got:
            # torch cannot tell whether views with gaps overlap, and reads what it has written; fuser does not.
            x, y, _ = build()
            assert got["values"] == (x + y).tolist()
            continue
        assert got == wanted
    assert 0 < errors < 300


SPLIT = "template <typename T> void split(T x, T& a, T& b) { a = x + 1; b = x * 2; }"


def test_several_outputs() -> None:
    split, x = fuser.create_multi_output_jit_fn(SPLIT, 2), ramp(4)
    a, b = torch.empty(4), torch.empty(4, dtype=torch.float64)
    results = split(x, out=(a, b))
    assert results[0] is a
    assert results[1] is b
    assert (a.tolist(), b.tolist()) == ([2, 3, 4, 5], [2, 4, 6, 8])
    # An input may be one of them.
    split(x, out=[a, x])
    assert (a.tolist(), x.tolist()) == ([2, 3, 4, 5], [2, 4, 6, 8])


@pytest.mark.parametrize(
    ("out", "kind", "message"),
    [
        (lambda: (torch.empty(4),), ArgumentError, "out= has 1 tensors for 2 outputs"),
        (lambda: torch.empty(4), ArgumentError, "out= has 1 tensors for 2 outputs"),
        (lambda: (torch.empty(4), torch.empty(4, dtype=torch.int32)), ShapeError, "can't be cast to the desired"),
        (lambda: (lambda base: (base[:4], base[2:6]))(torch.empty(8)), ShapeError, "refer to a single memory location"),
        (lambda: (torch.empty(4), torch.empty(4, device="meta")), DeviceError, "out= is on meta"),
        (lambda: (torch.empty(4), 3), ArgumentError, "out="),
    ],
)
def test_several_outputs_that_do_not_fit(out: Callable[[], Any], kind: type[FuserError], message: str) -> None:
    split, x = fuser.create_multi_output_jit_fn(SPLIT, 2), ramp(4)
    with pytest.raises(kind, match=message):
        split(x, out=out())
    assert x.tolist() == [1, 2, 3, 4]
    assert split(x)[0].tolist() == [2, 3, 4, 5]


def test_the_same_tensor_for_two_outputs_is_refused() -> None:
    split, a = fuser.create_multi_output_jit_fn(SPLIT, 2), torch.zeros(4)
    with pytest.raises(ShapeError, match="refer to a single memory location"):
        split(ramp(4), out=(a, a))


def test_memory_that_may_overlap_is_read_before_it_is_written() -> None:
    size = 20_000
    base = ramp(2 * size)
    ADD(base[1 : size + 1], 1.0, out=base[::2])
    assert torch.equal(base[::2], ramp(size) + 2)
    whole = torch.zeros(2 * size)
    out = whole[:size], whole[1::2]
    fuser.create_multi_output_jit_fn(SPLIT, 2)(ramp(size), out=out)
    assert torch.equal(out[1], ramp(size) * 2)


def test_out_that_requires_grad_is_fine_without_grad_mode() -> None:
    out = torch.zeros(3, requires_grad=True)
    with torch.no_grad():
        for _ in range(2):
            assert ADD(ramp(3), 1.0, out=out) is out
    assert out.tolist() == [2, 3, 4]


def test_out_beside_a_number_in_a_cpu_tensor() -> None:
    out = torch.empty(3, device="meta")
    assert ADD(torch.empty(3, device="meta"), torch.tensor(1.0), out=out) is out


def test_out_where_an_input_requires_grad() -> None:
    x, out = ramp(3).requires_grad_(), torch.zeros(3)
    for _ in range(2):
        with pytest.raises(GradientError, match="one of the inputs requires grad"):
            ADD(x, 1.0, out=out)
    assert out.tolist() == [0, 0, 0]


def test_out_under_a_dispatch_mode() -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    out = torch.zeros(3)
    with Mode():
        assert ADD(ramp(3), 1.0, out=out) is out
    assert out.tolist() == [2, 3, 4]


@pytest.mark.parametrize(("result", "out"), [(torch.complex64, torch.float32), (torch.int32, torch.bool)])
def test_out_of_another_kind_in_a_compiled_call(result: torch.dtype, out: torch.dtype) -> None:
    # Dynamo then makes the call without tracing it, which says what is wrong.
    with pytest.raises(ShapeError, match="in a compiled graph"):
        finish_traced_out(torch.zeros(3, dtype=out), [torch.ones(3, dtype=result)])


def test_a_tensor_of_inference_mode_is_refused_outside() -> None:
    x, fused = ramp(3), fuser.fuse(lambda x: ADD(x, 1.0))
    with torch.inference_mode():
        out = torch.empty(3)
    for call in (
        lambda **rest: torch.add(x, 1.0, **rest),
        lambda **rest: ADD(x, 1.0, **rest),
        lambda **rest: fused(x, **rest),
    ):
        # Also where a call like it was recorded.
        call(out=torch.empty(3))
        call(out=torch.empty(3))
        with pytest.raises(
            RuntimeError, match="Inplace update to inference tensor outside InferenceMode is not allowed"
        ):
            call(out=out)
        with torch.inference_mode():
            call(out=out)
        assert torch.equal(out, x + 1)
