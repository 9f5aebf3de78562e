"""``std::numeric_limits`` and the constants of C++'s headers: the same on both devices and in eager torch."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator

import pytest
import torch

import fuser
from fuser.eager.limits import find_constant
from fuser.errors import CompileError
from fuser.prelude import load_blocks

FLOATS = {
    "M_E": math.e, "M_PI": math.pi, "M_PI_2": math.pi / 2, "M_PI_4": math.pi / 4, "M_1_PI": 1 / math.pi,
    "M_2_PI": 2 / math.pi, "M_2_SQRTPI": 2 / math.sqrt(math.pi), "M_SQRT2": math.sqrt(2), "M_SQRT1_2": math.sqrt(0.5),
    "M_LN2": math.log(2), "M_LN10": math.log(10), "M_LOG2E": float.fromhex("0x1.71547652b82fep+0"),
    "M_LOG10E": math.log10(math.e), "DBL_MAX": sys.float_info.max, "DBL_MIN": sys.float_info.min,
    "DBL_EPSILON": sys.float_info.epsilon, "FLT_MAX": torch.finfo(torch.float32).max,
    "FLT_MIN": torch.finfo(torch.float32).tiny, "FLT_EPSILON": torch.finfo(torch.float32).eps,
}  # fmt: skip
INTEGERS = {
    **{f"{name}_MAX": 2**bits - 1 for name, bits in (("INT", 31), ("LLONG", 63), ("UINT", 32), ("ULLONG", 64))},
    **{f"INT{bits}_MAX": 2 ** (bits - 1) - 1 for bits in (8, 16, 32, 64)},
    **{f"UINT{bits}_MAX": 2**bits - 1 for bits in (8, 16, 32, 64)},
    **{f"INT{bits}_MIN": -(2 ** (bits - 1)) for bits in (8, 16, 32, 64)},
    "INT_MIN": -(2**31), "LLONG_MIN": -(2**63),
}  # fmt: skip
FUNCTIONS = ("max", "min", "lowest", "epsilon", "denorm_min", "infinity", "quiet_NaN")
FACTS = ("digits", "digits10", "max_digits10", "radix", "min_exponent", "max_exponent", "is_signed", "is_integer")


def constants_of(table: dict[str, float]) -> fuser.JitFunction:
    outputs = ", ".join(f"T& out{place}" for place in range(len(table)))
    body = " ".join(f"out{place} = T({name});" for place, name in enumerate(table))
    return fuser.jit_fn(f"template <typename T> void named(T x, {outputs}) {{ {body} }}", num_outputs=len(table))


LIMITS = fuser.jit_fn(
    "template <typename T> void limits(T x, "
    + ", ".join(f"T& {name}_of" for name in (*FUNCTIONS, *FACTS))
    + ") {\n  constexpr T never = std::numeric_limits<const T>::infinity();\n"
    + "".join(f"  {name}_of = std::numeric_limits<T>::{name}();\n" for name in FUNCTIONS)
    + "".join(f"  {name}_of = T(std::numeric_limits<T>::{name});\n" for name in FACTS)
    + "  if (x == never && !std::numeric_limits<T>::is_integer) max_of = x;\n}",
    num_outputs=len(FUNCTIONS) + len(FACTS),
)
DTYPES = (torch.float32, torch.float64, torch.bool, torch.int8, torch.int32, torch.int64, torch.uint8, torch.uint64)


def limits_by_torch(dtype: torch.dtype) -> list[float]:
    if dtype.is_floating_point:
        info = torch.finfo(dtype)
        facts = {torch.float32: (24, 6, 9, 2, -125, 128), torch.float64: (53, 15, 17, 2, -1021, 1024)}[dtype]
        tiny = math.ldexp(info.tiny, 1 - facts[0])
        return [info.max, info.tiny, info.min, info.eps, tiny, math.inf, math.nan, *facts, 1, 0]
    low, high = (0, 1) if dtype is torch.bool else (torch.iinfo(dtype).min, torch.iinfo(dtype).max)
    digits = high.bit_length()
    return [high, low, low, 0, 0, 0, 0, digits, len(str(high)) - 1, 0, 2, 0, 0, low < 0, 1]


@pytest.fixture(params=[pytest.param("kernel", marks=pytest.mark.cpu), "eager"])
def way(request: pytest.FixtureRequest) -> Iterator[str]:
    before = fuser.override_can_fuse_on_cpu(request.param == "kernel")
    fuser.reset_stats()
    yield request.param
    fuser.override_can_fuse_on_cpu(before)
    assert bool(fuser.stats()["fallbacks"]) == (request.param == "eager")


def assert_values(got: tuple[torch.Tensor, ...], wanted: list[float]) -> None:
    for one, number in zip(got, wanted, strict=True):
        expected = torch.tensor([number if one.dtype is not torch.bool else bool(number)], dtype=one.dtype)
        made = one.cpu()
        assert torch.equal(made, expected) or bool(made.isnan() & expected.isnan())


@pytest.mark.filterwarnings("ignore::fuser.errors.FallbackWarning")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_limits_are_torchs(dtype: torch.dtype, way: str) -> None:
    assert_values(LIMITS(torch.ones(1).to(dtype)), limits_by_torch(dtype))


@pytest.mark.filterwarnings("ignore::fuser.errors.FallbackWarning")
def test_constants_have_the_values_of_the_headers(way: str) -> None:
    assert_values(constants_of(FLOATS)(torch.ones(1, dtype=torch.float64)), list(FLOATS.values()))
    signed = {name: value for name, value in INTEGERS.items() if not name.startswith("U")}
    unsigned = {name: value for name, value in INTEGERS.items() if name.startswith("U")}
    assert_values(constants_of(signed)(torch.ones(1, dtype=torch.int64)), list(signed.values()))
    assert_values(constants_of(unsigned)(torch.ones(1, dtype=torch.uint64)), list(unsigned.values()))


def test_every_constant_of_the_prelude_is_here_and_known_to_eager_torch() -> None:
    names = {name for block in load_blocks("limits.h") for name in block.names} - {"numeric_limits"}
    assert names == {*FLOATS, *INTEGERS}
    assert {name for name in names if find_constant(name) is None} == set()


@pytest.mark.nvrtc
@pytest.mark.parametrize("dtype", [torch.float32, torch.int8], ids=str)
def test_limits_compile_for_cuda(dtype: torch.dtype) -> None:
    LIMITS.check(device="cuda", dtype=dtype)


@pytest.mark.nvrtc
def test_constants_compile_for_cuda() -> None:
    constants_of(FLOATS).check(device="cuda", dtype=torch.float64)
    constants_of(INTEGERS).check(device="cuda", dtype=torch.int64)


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_limits_on_cuda(dtype: torch.dtype) -> None:
    fuser.reset_stats()
    assert_values(LIMITS(torch.ones(1, device="cuda").to(dtype)), limits_by_torch(dtype))
    if dtype is torch.float64:
        assert_values(constants_of(FLOATS)(torch.ones(1, dtype=dtype, device="cuda")), list(FLOATS.values()))
    assert not fuser.stats()["fallbacks"]


@pytest.mark.filterwarnings("ignore::fuser.errors.FallbackWarning")
@pytest.mark.parametrize(
    ("code", "wanted"),
    [
        ("#define M_PI 3\ntemplate <typename T> T f(T x) { return x + M_PI; }", 4),
        ("#ifndef M_PI\n#define M_PI 3\n#endif\ntemplate <typename T> T f(T x) { return x + M_PI; }", 4),
        ("constexpr float M_PI = 3;\ntemplate <typename T> T f(T x) { return x + M_PI; }", 4),
        ("template <typename T> T f(T M_PI) { return M_PI + 1; }", 2),
        ("template <typename T> T f(T x) { const T FLT_MAX = 5; return x + FLT_MAX; }", 6),
        (
            "template <typename T> struct numeric_limits { static T max() { return T(2); } };\n"
            "template <typename T> T f(T x) { return x + numeric_limits<T>::max(); }",
            3,
        ),
        ("using namespace std;\ntemplate <typename T> T f(T x) { return x + numeric_limits<int8_t>::max(); }", 128),
    ],
)
def test_a_functors_own_names_come_first(code: str, wanted: float, way: str) -> None:
    assert fuser.jit_fn(code)(torch.ones(1)).tolist() == [wanted]


@pytest.mark.cpu
def test_limits_have_no_derivative_and_leave_others_theirs() -> None:
    code = """template <typename T> T f(T x) {
      return x > std::numeric_limits<T>::epsilon() ? T(M_PI) * x * x : T(FLT_MIN);
    }"""
    x = torch.tensor([-1.0, 0.0, 2.0], requires_grad=True)
    fuser.jit_fn(code)(x).sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, torch.tensor([0.0, 0.0, 4 * math.pi]))


@pytest.mark.cpu
def test_a_complex_number_has_no_limits() -> None:
    largest = fuser.jit_fn("template <typename T> T f(T x) { return x + std::numeric_limits<T>::max(); }")
    with pytest.raises(CompileError, match="'max' is not a member of 'std::numeric_limits<std::complex<float> >'"):
        largest(torch.ones(1, dtype=torch.complex64))
