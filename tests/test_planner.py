"""Plans for tensors that no machine here has: more than 2^31 elements, GPUs, a capture under way."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from functors import functor

import fuser
from fuser import planner
from fuser.arg_spec import MAX_NARROW_OFFSET
from fuser.codegen import build_source
from fuser.cuda.dialect import DIALECT
from fuser.kernel_spec import ArgSpec
from fuser.tensor_desc import describe

CUDA = torch.device("cuda", 0)
LIMIT = MAX_NARROW_OFFSET


def virtual(*shape: int, strides: tuple[int, ...] | None = None, dtype: torch.dtype = torch.int8) -> torch.Tensor:
    """Return a tensor without memory."""
    if strides is None:
        return torch.empty(shape, dtype=dtype, device="meta")
    return torch.empty_strided(shape, strides, dtype=dtype, device="meta")


def plan(*inputs: Any) -> ArgSpec:
    """Return what axpy's kernel for a GPU depends on."""
    ((_, args),) = planner.plan_texts(functor("axpy").spec(2), [*inputs, 2.0], CUDA)
    return args


HUGE = 2**31
WIDTHS: dict[str, tuple[list[torch.Tensor], bool]] = {
    "small": ([virtual(1000), virtual(1000)], False),
    "the last narrow one": ([virtual(LIMIT), virtual(LIMIT)], False),
    "the first wide one": ([virtual(LIMIT + 1), virtual(LIMIT + 1)], True),
    "2^31": ([virtual(HUGE), virtual(HUGE)], True),
    "2^31 in three dimensions": ([virtual(2**11, 2**10, 2**10)] * 2, True),
    "2^31 bytes of wider elements": ([virtual(2**29, dtype=torch.float64)] * 2, False),
    "only the result is huge": ([virtual(2**16, 1), virtual(2**15)], True),
    "expanded": ([virtual(HUGE, strides=(0,)), virtual(1)], True),
    "few elements far apart": ([virtual(3, strides=(2**30,)), virtual(3)], True),
    "few elements nearly as far apart": ([virtual(3, strides=(2**29,)), virtual(3)], False),
    "far apart in the second operand": ([virtual(3, 5), virtual(3, 5, strides=(2**31, 1))], True),
    "a stride that is never walked": ([virtual(1, 5, strides=(2**40, 1)), virtual(1, 5)], False),
    "transposed": ([virtual(2**16, 2**15).t(), virtual(2**15, 2**16)], True),
}


@pytest.mark.parametrize("name", WIDTHS)
def test_width_of_indices(name: str) -> None:
    inputs, is_wide = WIDTHS[name]
    args = plan(*inputs)
    assert args.wide_index == is_wide
    # The text follows.
    group = functor("axpy").spec(2).group
    assert (
        build_source(group, args, DIALECT).text == build_source(group, args._replace(wide_index=True), DIALECT).text
    ) == is_wide


def test_sizes_are_no_part_of_what_a_kernel_depends_on() -> None:
    assert plan(virtual(1000), virtual(1000)) == plan(virtual(5008), virtual(5008))
    assert plan(virtual(HUGE), virtual(HUGE)) == plan(virtual(2 * HUGE), virtual(2 * HUGE))


@pytest.mark.parametrize("length", [LIMIT, LIMIT + 1, HUGE + 5])
def test_struct_of_a_huge_call(length: int) -> None:
    # Counts and strides are 64 bits wide whatever the index is.
    from fuser.fused_kernel import ArgumentPacker
    from fuser.layout import IterationSpace

    spec = functor("axpy").spec(2)
    args = plan(virtual(length), virtual(length))
    source = build_source(spec.group, args, DIALECT)
    packer = ArgumentPacker(source, IterationSpace((length,), ((1,),) * 3))
    packed = packer.pack([0] * 3, [2.0])
    assert int.from_bytes(packed[:8], "little") == length


def test_nothing_is_compiled_or_loaded_inside_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    from fuser.cuda.backend import CudaBackend
    from fuser.errors import CaptureError

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    spec = functor("axpy").spec(2)
    source = build_source(spec.group, plan(virtual(8), virtual(8)), DIALECT)
    before = fuser.stats()["compiles"]
    with pytest.raises(
        CaptureError, match=r"the kernel of axpy is needed .* inside a CUDA graph capture: .* warmup\(\)"
    ):
        CudaBackend().compile(source, "sm_90")
    assert fuser.stats()["compiles"] == before


@pytest.mark.cpu
def test_nothing_is_launched_for_no_elements() -> None:
    spec = functor("axpy").spec(2)
    inputs = [describe(item) for item in (torch.empty(0, 3), torch.empty(3), 1.0)]
    plan = planner.make_plan(spec, inputs)
    assert plan.steps == ()
    assert [item[0] for item in plan.outputs] == [(0, 3)]
