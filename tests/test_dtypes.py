"""Promotion is torch's, for every pair of dtypes in every rank; and each dtype computes in its compute type."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from fuser.dtypes import DTYPES, Rank, cpp_scalar_type, dtype_info, number_dtype, promote, to_floating
from fuser.errors import UnsupportedError

NUMBERS: dict[type, Any] = {bool: True, int: 1, float: 1.0, complex: 1j}


def samples(rank: Rank) -> Iterator[tuple[Any, torch.dtype]]:
    """Give what torch is asked about, and the dtype that fuser takes it for."""
    if rank is Rank.NUMBER:
        for kind, number in NUMBERS.items():
            yield number, number_dtype(kind, torch.get_default_dtype())
    else:
        for dtype in DTYPES:
            yield torch.empty((2,) if rank is Rank.TENSOR else (), dtype=dtype), dtype


def torch_says(left: Any, right: Any) -> torch.dtype | None:
    try:
        return torch.result_type(left, right)
    except RuntimeError:
        return None


def fuser_says(*operands: tuple[torch.dtype, Rank]) -> torch.dtype | None:
    try:
        return promote(operands)
    except UnsupportedError:
        return None


@pytest.fixture(params=[torch.float32, torch.float64, torch.bfloat16], ids=str)
def default_dtype(request: pytest.FixtureRequest) -> Iterator[torch.dtype]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(request.param)
    yield request.param
    torch.set_default_dtype(before)


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize(("left", "right"), list(itertools.product(Rank, Rank)), ids=lambda rank: rank.name)
def test_promotion_equals_result_type(left: Rank, right: Rank, default_dtype: torch.dtype) -> None:
    wrong, refused, asked = [], 0, 0
    for (a, a_dtype), (b, b_dtype) in itertools.product(samples(left), samples(right)):
        wanted, got = torch_says(a, b), fuser_says((a_dtype, left), (b_dtype, right))
        asked += 1
        refused += wanted is None
        if wanted != got:
            wrong.append(f"{a_dtype} {b_dtype}: torch {wanted}, fuser {got}")
    assert not wrong, wrong[:10]
    assert asked == (4 if left is Rank.NUMBER else len(DTYPES)) * (4 if right is Rank.NUMBER else len(DTYPES))
    # Torch refuses mixtures of float8 and of the wide unsigned integers: the comparison has seen both outcomes.
    if left == right == Rank.TENSOR:
        assert 0 < refused < asked


def test_promotion_does_not_depend_on_order() -> None:
    operands = [(dtype, rank) for dtype in (torch.int8, torch.int64, torch.float16, torch.float64) for rank in Rank]
    for three in itertools.combinations(operands, 3):
        assert len({promote(order) for order in itertools.permutations(three)}) == 1


@pytest.mark.parametrize(
    ("tensors", "wanted"),
    [
        # Measured: as torch.cuda.jiterator does it.
        ([(torch.int32, Rank.TENSOR), (torch.float16, Rank.TENSOR)], torch.float16),
        ([(torch.float16, Rank.TENSOR), (torch.bfloat16, Rank.TENSOR)], torch.float32),
        ([(torch.uint8, Rank.TENSOR), (torch.int8, Rank.TENSOR)], torch.int16),
        ([(torch.float32, Rank.TENSOR), (torch.float64, Rank.ZERO_DIM)], torch.float32),
        ([(torch.complex32, Rank.TENSOR)], torch.complex32),
        # Three ranks: the number lifts the 0-dim tensor, both lift the tensor's category.
        ([(torch.int8, Rank.TENSOR), (torch.int64, Rank.ZERO_DIM), (torch.float32, Rank.NUMBER)], torch.float32),
        ([(torch.int8, Rank.TENSOR), (torch.float16, Rank.ZERO_DIM), (torch.float32, Rank.NUMBER)], torch.float16),
        ([(torch.bool, Rank.TENSOR), (torch.uint8, Rank.ZERO_DIM), (torch.int64, Rank.NUMBER)], torch.uint8),
    ],
)
def test_promotion_of_known_cases(tensors: list[tuple[torch.dtype, Rank]], wanted: torch.dtype) -> None:
    assert promote(tensors) is wanted


def test_every_torch_dtype_is_known_or_refused() -> None:
    every = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    for dtype in every - set(DTYPES):
        # Quantized, sub-byte and bits types hold no number that C++ could compute with; with bcomplex32 torch computes
        # nothing either.
        assert re.fullmatch(r"torch\.(q.*|bits.*|u?int[1-7]|.*_x2|bcomplex32)", str(dtype))
        with pytest.raises(UnsupportedError, match="has no C\\+\\+ counterpart"):
            dtype_info(dtype)
    assert len(DTYPES) == 21


COMPUTE = {
    torch.float16: torch.float32, torch.bfloat16: torch.float32, torch.complex32: torch.complex64,
    torch.float8_e4m3fn: torch.float32, torch.float8_e5m2: torch.float32, torch.float8_e4m3fnuz: torch.float32,
    torch.float8_e5m2fnuz: torch.float32, torch.float8_e8m0fnu: torch.float32,
}  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_compute_types(dtype: torch.dtype) -> None:
    info = dtype_info(dtype)
    assert info.compute_dtype is COMPUTE.get(dtype, dtype)
    assert info.is_narrow == (dtype in COMPUTE)
    assert info.compute == DTYPES[info.compute_dtype].storage
    assert to_floating(dtype, torch.bfloat16) is (
        dtype if dtype.is_floating_point or dtype.is_complex else torch.bfloat16
    )


def test_numbers() -> None:
    assert [cpp_scalar_type(kind) for kind in NUMBERS] == ["bool", "int64_t", "double", "std::complex<double>"]
    assert [number_dtype(kind, torch.float64) for kind in NUMBERS] == [
        torch.bool, torch.int64, torch.float64, torch.complex128,
    ]  # fmt: skip


@pytest.mark.parametrize(("dtype", "wide"), [(torch.float16, torch.float32), (torch.float64, torch.float64)])
def test_autocast_widens_the_ops_that_torch_widens(dtype: torch.dtype, wide: torch.dtype) -> None:
    from fuser.graph import FusionGroup, GroupBuilder
    from fuser.kernel_spec import InputSpec, infer_typing
    from fuser.ops import OPS, WIDE_UNDER_AUTOCAST

    own_names = {"pow": "pow.Tensor_Tensor", "pow_number": "pow.Tensor_Scalar", "to": "_to_copy"}
    # What torch calls after it has cast the operands of its prelu.
    own_names["prelu"] = "_prelu_kernel"
    for name in OPS:
        packet, _, overload = own_names.get(name, name).partition(".")
        found = getattr(torch.ops.aten, packet, None)
        if found is not None and not name.endswith("_backward"):
            known = found.overloads()
            overload = overload or next(item for item in ("Tensor", "self", "default") if item in known)
            qualified = f"aten::{packet}" if overload == "default" else f"aten::{packet}.{overload}"
            has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key(qualified, "AutocastCUDA")
            # Three have one that takes the widest dtype of the tensors, as promotion does; the last one's refuses.
            expected = WIDE_UNDER_AUTOCAST | {"addcdiv", "addcmul", "atan2", "binary_cross_entropy"}
            assert has_kernel == (name in expected), name

    builder = GroupBuilder()
    (power,) = builder.apply(OPS["exp"].function, [builder.add_input("x")])
    (total,) = builder.apply(OPS["mul"].function, [power, power])
    group = builder.build([total]).widen(WIDE_UNDER_AUTOCAST)
    typing = infer_typing(group, [InputSpec(dtype, Rank.TENSOR)], torch.float32)
    assert typing.values[1:] == (wide, wide)
    assert FusionGroup.from_json(group.to_json()) == group
    assert infer_typing(group, [InputSpec(torch.int32, Rank.TENSOR)], torch.float64).values[1] is torch.float64
