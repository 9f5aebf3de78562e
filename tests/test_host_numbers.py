"""Tensors without dimensions that lie on the host, beside tensors on a GPU: ATen's kernels take some as numbers."""

from __future__ import annotations

import pytest
import torch
from functors import draw, same_bits, special_tensor

import fuser
from fuser.compiler import register
from fuser.expanded import Expanded, expand_call
from fuser.graph import FusionGroup
from fuser.kernel_spec import KernelSpec, infer_layouts
from fuser.ops import OPS
from fuser.tensor_desc import describe, value_layouts

GPU = torch.device("cuda", 0)
# Powers of these have formulas, or are near one that has; the rest no narrow dtype holds.
VALUES = (2.0, -1.0, 0.5, 3.001, 0.1, 1 / 3, -7.3, 1e-3)


def operand_count(name: str) -> int:
    """How many tensors an op takes, 0 for one that is no pointwise op of torch's."""
    function = OPS[name].function
    is_other = function.reduces or function.is_view or function.arranges or function.is_index or function.is_read
    # The second operand of these is an index, or a number in any case.
    is_other |= name in ("tril", "triu") or name.endswith("_number")
    return 0 if is_other else len(function.functor.tensors)


def group_of(name: str, operands: int) -> FusionGroup:
    """The op as a group."""
    builder = fuser.GroupBuilder()
    function = OPS[name].function
    tensors = [builder.add_input(f"x{slot}") for slot in range(operands)]
    scalars = [builder.add_input(item.name, is_scalar=True) for item in function.scalars]
    return builder.build(builder.apply(function, tensors, scalars))


def planned(spec: KernelSpec, *tensors: torch.Tensor) -> Expanded:
    """The group of an op as a call on a GPU has it; what lies there is given on meta."""
    descs = [describe(item, GPU) for item in tensors]
    return expand_call(spec, descs, GPU, infer_layouts(spec.group, value_layouts(descs)))


def becomes(name: str, *tensors: torch.Tensor) -> tuple[str | None, bool]:
    """What an op of two tensors is then: its name, and whether the second one has a say in the dtype."""
    (item,) = planned(register(group_of(name, 2)), *tensors).group.applications
    return item.function.op, not item.function.unpromoted


def test_divisors_and_exponents_count_as_numbers() -> None:
    x, ints = torch.empty(3, 4, device="meta"), torch.empty(3, dtype=torch.int32, device="meta")
    single = torch.tensor(0.1)
    assert becomes("div", x, single) == ("div_number", False)
    assert becomes("div", x.bfloat16(), single.double()) == ("div_number", False)
    assert becomes("pow", x, single)[0] == "pow_number"
    # Here the divisor decides the dtype.
    assert becomes("div", ints, single.double()) == ("div_number", True)
    assert becomes("div", x[0, 0], single.double()) == ("div_number", True)


def test_what_stays_as_it_is() -> None:
    x, on_gpu = torch.empty(3, 4, device="meta"), torch.empty((), device="meta")
    assert becomes("mul", x, torch.tensor(0.1))[0] == "mul"
    spec = register(group_of("div", 2))
    assert planned(spec, x, on_gpu).spec is spec


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int32], ids=str)
@pytest.mark.parametrize("name", [name for name in OPS if operand_count(name) > 1])
def test_bits_are_torchs(name: str, dtype: torch.dtype) -> None:
    """Wherever torch takes a tensor of the host, each value of it, of each dtype."""
    op, count = OPS[name], operand_count(name)
    group = group_of(name, count)
    x = draw((2048,), dtype, (0.1, 5.0)).cuda()
    x = torch.cat([x, special_tensor(dtype).cuda()])
    scalars, differing = {item.name: 0.3 for item in op.function.scalars}, []
    for slot in range(count):
        for value in VALUES:
            for number in (torch.tensor(value), torch.tensor(value, dtype=torch.float64), torch.tensor(int(value))):
                given = [number if place == slot else x for place in range(count)]
                try:
                    wanted = op.eager(*given, **scalars)
                except (RuntimeError, NotImplementedError):
                    # Torch has no kernel for it.
                    continue
                (got,) = fuser.run_fusion(fuser.register_fusion(group), [*given, *scalars.values()])
                if not same_bits(got, wanted):
                    differing.append((slot, value, number.dtype))
    assert not differing
