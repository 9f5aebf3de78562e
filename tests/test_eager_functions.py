"""Values and functions of the derived eager versions, against compiled CPU kernels and among each other."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from accuracy import distance
from test_prelude import MATH
from tiers import choose
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

import fuser
from fuser.eager.data import WHOLE_FUNCTIONS, NeedsValuesError, Value, as_node, constant, round_to, storage_dtype
from fuser.eager.math import functions
from fuser.eager.math.bits import BITS
from fuser.eager.math.complex import COMPLEX
from fuser.eager.math.functions import NamedFunction, call, call_with_results
from fuser.eager.math.real import BINARY, CLASSIFY, UNARY
from fuser.eager.math.special import SPECIAL
from fuser.eager.promotion import common_type, convert, promote_integer
from fuser.eager.values import binary, select, split_complex, unary
from fuser.prelude import load_blocks

aten = torch.ops.aten
INF, NAN = math.inf, math.nan
FLOATS = (torch.float32, torch.float64)
CPP = {
    torch.bool: "bool", torch.int8: "int8_t", torch.int16: "int16_t", torch.int32: "int", torch.int64: "int64_t",
    torch.uint8: "uint8_t", torch.uint16: "uint16_t", torch.uint32: "unsigned", torch.uint64: "uint64_t",
    torch.float32: "float", torch.float64: "double",
}  # fmt: skip
INTEGERS = tuple(CPP)[:9]
# The functions of functions.py whose parameters and results have letters.
LETTERS = {"i": torch.int32, "l": torch.int64, "u": torch.uint32, "U": torch.uint64, "f": torch.float32}
LETTERS |= {"d": torch.float64, "b": torch.bool}


# ---- samples and comparison ----


def special(dtype: torch.dtype) -> torch.Tensor:
    """Zeros, infinities, NaN, the ends of the range, and where functions change their formula."""
    info = torch.finfo(dtype)
    ends = [info.max, info.tiny, info.tiny / 8, info.tiny * info.eps, info.eps]
    ordinary = [0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 8.0, 27.0, 1e-4, 1e-20, 0.999999, 1.000001, 5.5, 26.5, 27.5]
    large = [
        88.0,
        89.0,
        103.5,
        170.0,
        171.5,
        172.5,
        200.5,
        709.5,
        710.2,
        746.0,
        1e5,
        2.0**31,
        2.0**52 + 0.5,
        2.0**63,
        1e30,
    ]
    sizes = torch.tensor([*ends, *ordinary, *large, INF, NAN], dtype=torch.float64)
    return torch.cat([sizes, -sizes]).to(dtype)


def sample(dtype: torch.dtype, seed: int = 1, count: int = 1000) -> torch.Tensor:
    """Special numbers, and random ones of three ranges and of every exponent."""
    generator = torch.Generator().manual_seed(seed)

    def uniform() -> torch.Tensor:
        return torch.rand(count, generator=generator, dtype=torch.float64) * 2 - 1

    exponents = 1020 if dtype is torch.float64 else 140
    wide = torch.exp2(uniform() * exponents) * uniform().sign()
    parts = [uniform(), uniform() * 30, uniform() * 300, wide]
    return torch.cat([special(dtype), *(part.to(dtype) for part in parts)])


def pairs(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Every special number with every one, and random pairs."""
    ends, a = special(dtype), sample(dtype, 2)
    b = sample(dtype, 3)[torch.randperm(len(a), generator=torch.Generator().manual_seed(4))]
    return torch.cat([ends.repeat_interleave(len(ends)), a]), torch.cat([ends.repeat(len(ends)), b])


def assert_same(
    name: str, arguments: list[torch.Tensor], got: torch.Tensor, wanted: torch.Tensor, limit: float
) -> None:
    """Assert the same NaN, infinities, zeros with their signs, and else at most `limit` ULP."""
    assert got.dtype is wanted.dtype
    far = distance(got, wanted) > limit
    far |= (got.isinf() != wanted.isinf()) | ((got == 0) & (wanted == 0) & (got.signbit() != wanted.signbit()))
    if name in WAVES:
        # Near a zero of the function, in units of its size thereabouts.
        size = torch.finfo(got.dtype).eps / (1 + arguments[-1].abs().double()).sqrt() * WAVES[name]
        far &= ~((got.double() - wanted.double()).abs() <= size)
    if name in EXCLUDED:
        far &= ~EXCLUDED[name](*arguments)
    places = far.nonzero().flatten()[:5].tolist()
    shown = [(*(a[i].item() for a in arguments), got[i].item(), wanted[i].item()) for i in places]
    assert not places, f"{name}, {got.dtype}: {int(far.sum())} differ: arguments, eager, compiled: {shown}"


# Largest distance in ULP where it is not DEFAULT: the compiled function's is in brackets.
DEFAULT = 4
LIMITS = {"cyl_bessel_i0": 24, "cyl_bessel_i1": 24, "erfcx": 20, "tgamma": 8}  # (18), (18), (16), (3)
LIMITS |= dict.fromkeys((*CLASSIFY, "ceil", "floor", "trunc", "rint", "nearbyint", "round", "fabs", "logb", "ilogb"), 0)
LIMITS |= dict.fromkeys(("copysign", "fdim", "fmax", "fmin", "fmod", "nextafter", "remainder", "max", "min", "abs"), 0)
WAVES = {"j0": 4, "j1": 4, "y0": 4, "y1": 4, "jn": 40, "yn": 40}
# Where the two differ, and it is known.
EXCLUDED: dict[str, Callable[..., torch.Tensor]] = {
    # The compiled ones lose numbers that have no double, and NaN comes of infinity less infinity.
    "sinpi": lambda x: x.abs() > torch.finfo(x.dtype).max / 2,
    "cospi": lambda x: x.abs() > torch.finfo(x.dtype).max / 2,
    "erfcx": lambda x: (x > -26.8) & (x < -26.6),
    "erfcinv": lambda x: x.abs() < 1e-320,
    "normcdfinv": lambda x: x.abs() < 1e-320,
    # The compiled one takes the square root, as gcc does where it knows the exponent.
    "pow": lambda x, y: (y == 0.5) & ((x == 0) | (x == -INF)),
    # torch's fmod has no steps beyond.
    "fmod": lambda x, y: (x.abs().log2() - y.abs().log2()) > 2000,
    "remainder": lambda x, y: (x.abs().log2() - y.abs().log2()) > 2000,
    # The product overflows before the sum; the smallest denormal loses the sign of its zero.
    "fma": lambda x, y, z: (x.abs().log2() + y.abs().log2() > 1023) | (z.abs() < 1e-44) & (z != 0),
    "rnorm4d": lambda *x: x[0].abs() < 1e-308,
}


def value(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> Value:
    """Return a value, of the tensor's own type unless it is one that is stored in another."""
    return Value(dtype or tensor.dtype, tensor)


def compiled(results: dict[str, str], *tensors: torch.Tensor, before: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Yield name and result of compiled C++ expressions of x, y, z (the tensors) and of what `before` declares."""
    names = "xyz"[: len(tensors)]
    items = list(results.items())
    for at in range(0, len(items), 15):
        part = items[at : at + 15]
        parameters = ", ".join([*(f"T {n}" for n in names), *(f"T& out{i}" for i in range(len(part)))])
        stores = "\n".join(f"  out{i} = (T)({expression});" for i, (_, expression) in enumerate(part))
        text = f"template <typename T> void kernel({parameters}) {{\n{before}\n{stores}\n}}"
        found = fuser.jit_fn(text, num_outputs=len(part))(*tensors)
        yield from zip((name for name, _ in part), found if len(part) > 1 else [found], strict=True)


# ---- functions of real numbers ----

ONE = [*UNARY, *SPECIAL, *CLASSIFY, "j0", "j1", "y0", "y1", "ilogb", "abs"]
TWO = [*BINARY, "max", "min", "std::max", "std::min"]


@pytest.mark.cpu
@pytest.mark.parametrize("dtype", FLOATS)
def test_functions_of_one_number_equal_compiled_ones(dtype: torch.dtype) -> None:
    x = sample(dtype)
    for name, wanted in compiled({name: f"{name}(x)" for name in ONE}, x):
        assert_same(name, [x], convert(call(name, [value(x)]), dtype).data, wanted, LIMITS.get(name, DEFAULT))


@pytest.mark.cpu
@pytest.mark.parametrize("dtype", FLOATS)
def test_functions_of_two_numbers_equal_compiled_ones(dtype: torch.dtype) -> None:
    x, y = pairs(dtype)
    for name, wanted in compiled({name: f"{name}(x, y)" for name in TWO}, x, y):
        got = convert(call(name, [value(x), value(y)]), dtype).data
        assert_same(name, [x, y], got, wanted, LIMITS.get(name, 0 if "m" in name[-3:-1] else DEFAULT))


@pytest.mark.cpu
@pytest.mark.parametrize("dtype", FLOATS)
def test_functions_of_several_numbers_equal_compiled_ones(dtype: torch.dtype) -> None:
    x, y = pairs(dtype)
    z = x.roll(17)
    # Sums that cancel.
    p, q = torch.rand(2, 1000, dtype=torch.float64, generator=torch.Generator().manual_seed(5)).to(dtype)
    x, y, z = torch.cat([x, p]), torch.cat([y, q]), torch.cat([z, -(p * q)])
    arguments = {"fma": "xyz", "norm3d": "xyz", "norm4d": "xyzx", "rhypot": "xy", "rnorm3d": "xyz", "rnorm4d": "xyzy"}
    arguments["std::clamp"] = "xyz"
    given = dict(zip("xyz", (x, y, z), strict=True))
    for name, wanted in compiled({name: f"{name}({', '.join(a)})" for name, a in arguments.items()}, x, y, z):
        got = convert(call(name, [value(given[a]) for a in arguments[name]]), dtype).data
        assert_same(name, [x, y, z], got, wanted, 0 if name in {"fma", "std::clamp"} else DEFAULT)


@pytest.mark.cpu
@pytest.mark.parametrize("dtype", FLOATS)
def test_results_through_pointers_equal_compiled_ones(dtype: torch.dtype) -> None:
    x, y = pairs(dtype)
    before = """
      T mantissa, whole, fraction, sine, cosine, sinepi, cosinepi, rest; int exponent, quotient;
      mantissa = frexp(x, &exponent); fraction = modf(x, &whole); rest = remquo(x, y, &quotient);
      sincos(x, &sine, &cosine); sincospi(x, &sinepi, &cosinepi);"""
    wanted = dict(
        compiled(
            {
                name: name
                for name in "mantissa exponent fraction whole rest quotient sine cosine sinepi cosinepi".split()
            },
            x,
            y,
            before=before,
        )
    )
    got = [*call_with_results("frexp", [value(x)]), *call_with_results("modf", [value(x)])]
    got += call_with_results("remquo", [value(x), value(y)])
    got += [*call_with_results("sincos", [value(x)]), *call_with_results("sincospi", [value(x)])]
    quotient_known = wanted["rest"].isfinite()
    for (name, w), g in zip(wanted.items(), got, strict=True):
        arguments = [x, y] if name in {"rest", "quotient"} else [x]
        known = {"rest": "remainder", "quotient": "remainder", "sinepi": "sinpi", "cosinepi": "cospi"}.get(name, name)
        keep = quotient_known if name == "quotient" else torch.ones_like(quotient_known)
        limit = DEFAULT if "sine" in name else 0
        assert_same(known, [a[keep] for a in arguments], convert(g, dtype).data[keep], w[keep], limit)


@pytest.mark.cpu
@pytest.mark.parametrize("dtype", FLOATS)
def test_scaling_by_powers_of_two_rounds_once(dtype: torch.dtype) -> None:
    exponents = [0, 1, -3, 60, -60, 127, 128, -126, -149, -150, 300, -300, 1000, -1000, 1023, 1024, -1022, -1074, -1075]
    exponents += [-1023, -1025, 2046, 2098, -2098, -3000, 2**31 - 128, -(2**31)]
    x = sample(dtype, count=300)
    e = torch.tensor(exponents, dtype=torch.int32).repeat(len(x) // 5)[: 4 * len(x)]
    x = x.repeat(4)[: len(e)]
    expressions = {name: f"{name}(x, (int)y)" for name in ("ldexp", "scalbn", "scalbln")}
    # An exponent that is known.
    expressions |= {str(n): f"ldexp(x, {n})" for n in (-1050, 0, 1030)}
    for name, wanted in compiled(expressions, x, e.to(dtype)):
        exponent = constant(int(name), torch.int32) if name not in functions._FUNCTIONS else value(e)
        got = call(name if name in functions._FUNCTIONS else "ldexp", [value(x), exponent])
        assert_same(name, [x, e], got.data, wanted, 0)


@pytest.mark.cpu
def test_bessel_functions_of_any_order() -> None:
    x = torch.cat([special(torch.float64), torch.linspace(-90, 90, 700, dtype=torch.float64)])
    orders = (0, 2, -3, 10)
    names = [(name, n) for name in ("jn", "yn") for n in orders]
    wanted = dict(compiled({f"{name}{n}": f"{name}({n}, x)" for name, n in names}, x))
    for name, n in names:
        got = call(name, [constant(n, torch.int32), value(x)]).data
        w = wanted[f"{name}{n}"]
        # Far beyond the order, and close to zero.
        keep = (x.abs() < 1e9) & (w.abs() < 1e290) | (x == 0)
        scale = (w.abs().clamp(min=1) * 1e-13)[keep]
        assert bool(((got - w).abs()[keep] <= scale).logical_or(got[keep] == w[keep]).logical_or(w[keep].isnan()).all())
        assert torch.equal(got.isnan()[keep], w.isnan()[keep]), (name, n)
        assert_same(name, [x], torch.where(w.abs() < 10, got, w), w, 300)
    # As many orders as lanes, and float.
    several = torch.tensor(orders).repeat(100)
    some = x[-len(several) :]
    got = call("jn", [value(several), value(some)]).data
    for n in orders:
        lanes = several == n
        assert torch.equal(got[lanes], call("jn", [constant(n, torch.int32), value(some[lanes])]).data)
    single = call("ynf", [constant(2, torch.int32), value(x)])
    assert single.dtype is torch.float32


FAST = {"f": "__expf __exp10f __logf __log2f __log10f __sinf __cosf __tanf __tanhf __saturatef __frcp_rn __fsqrt_rn "
        "__frsqrt_rn", "ff": "__powf __fdividef fdividef __fadd_rn __fsub_rn __fmul_rn __fdiv_rn", "fff": "__fmaf_rn",
        "d": "__drcp_rn __dsqrt_rn", "dd": "__dadd_rn __dsub_rn __dmul_rn __ddiv_rn", "ddd": "__fma_rn"}  # fmt: skip


@pytest.mark.cpu
def test_fast_and_rounding_forms() -> None:
    for dtype, letter in ((torch.float32, "f"), (torch.float64, "d")):
        x, y = pairs(dtype)
        z = y.roll(3)
        names = {name: kinds for kinds, words in FAST.items() if letter in kinds for name in words.split()}
        expressions = {name: f"{name}({', '.join('xyz'[: len(kinds)])})" for name, kinds in names.items()}
        for name, wanted in compiled(expressions, x, y, z):
            arguments = [x, y, z][: len(names[name])]
            got = call(name, [value(a) for a in arguments])
            known = {"__powf": "pow", "__fmaf_rn": "fma", "__fma_rn": "fma"}.get(name, name)
            # torch's square roots are one unit off now and then.
            limit = 1 if "sqrt" in name else 0 if "_rn" in name else DEFAULT
            assert_same(known, arguments, got.data, wanted, limit)


# ---- integers and bits ----


def integers(seed: int) -> torch.Tensor:
    """The ends of every integer type, and random numbers of all sizes."""
    ends = [0, 1, 2, 3, 7, 100, *(end for bits in (7, 8, 15, 16, 31, 32, 63) for end in (2**bits - 1, 2**bits - 2))]
    ends += [2**bits for bits in (7, 8, 15, 16, 31, 32, 62)]
    # As uint64, a little more than half way between two doubles, and two floats.
    ends += [2**63 - 2**10 - 1, 2**63 - 2**39 - 1]
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randint(0, 63, (400,), generator=generator)
    signed = torch.randint(-(2**63), 2**63 - 1, (400,), generator=generator) >> sizes
    return torch.cat([torch.tensor(ends), -torch.tensor(ends), torch.tensor([-(2**63)]), signed])


def integer_pairs() -> tuple[torch.Tensor, torch.Tensor]:
    """Every pair of the ends, and random pairs."""
    a, b = integers(1), integers(2)
    ends = a[:-400]
    return torch.cat([ends.repeat_interleave(len(ends)), a]), torch.cat([ends.repeat(len(ends)), b])


OPERATORS = "+ - * / % << >> & | ^ < <= > >= == != && ||".split()


def defined_pairs(op: str, left: torch.dtype, right: torch.dtype) -> tuple[list[int], list[int]]:
    """Return numbers of two types for which the machine has a result."""
    ends = []
    for dtype in (left, right):
        info = torch.iinfo(dtype) if dtype is not torch.bool else None
        numbers = [0, 1] if info is None else [0, 1, 2, 7, 100, info.max, info.max - 1, info.max // 2 + 1, info.min]
        ends.append([*numbers, -1, -2, -7, info.min + 1] if info is not None and dtype.is_signed else numbers)
    bits = 8 * promote_integer(left).itemsize
    found = [(x, y) for x, y in itertools.product(*ends) if op not in ("<<", ">>") or 0 <= y < bits]
    return [x for x, _ in found], [y for _, y in found]


def test_operators_on_integers_of_all_types(tier: int) -> None:
    """On tensors, on constants and on one of each, for all pairs of types; against Python's integers."""
    # A fifth of them meets every pair of types, and every operator with every type.
    for left, right, op in [*itertools.product(INTEGERS, INTEGERS, OPERATORS)][:: 1 if tier == 3 else 5]:
        x, y = defined_pairs(op, left, right)
        result = binary(op, Value(left, stored(x, left)), Value(right, stored(y, right)))
        assert result.data.dtype is storage_dtype(result.dtype)
        got = [round_to(number, result.dtype) for number in result.data.tolist()]
        assert got == [binary(op, constant(p, left), constant(q, right)).data for p, q in zip(x, y, strict=True)]
        halves = (
            (binary(op, Value(left, stored(x, left)), constant(y[-1], right)), [q == y[-1] for q in y]),
            (binary(op, constant(x[-1], left), Value(right, stored(y, right))), [p == x[-1] for p in x]),
        )
        for half, chosen in halves:
            found = [half.data] * len(x) if half.is_constant else [round_to(n, half.dtype) for n in half.data.tolist()]
            differ = [f != g for f, g, known in zip(found, got, chosen, strict=True) if known]
            assert not any(differ), (op, left, right)
        common = common_type(left, right)
        p, q = ([int(round_to(n, common)) for n in numbers] for numbers in (x, y))
        if op in "+-*&|^<=>=!=":
            wanted = [round_to(eval(f"a {op} b"), result.dtype) for a, b in zip(p, q, strict=True)]
            assert got == wanted, (op, left, right)


@pytest.mark.cpu
def test_operators_on_integers_equal_compiled_ones(tier: int) -> None:
    """An operator of each kind on many pairs of types, folded into one number for each left type."""
    x, y = integer_pairs()
    # No division by zero or by -1, which machines trap on, in whatever type, and no shift beyond the type.
    divisor = y
    for bits in (8, 16, 32, 64):
        wrapped = divisor if bits == 64 else divisor % 2**bits
        divisor = torch.where((wrapped == 2**bits - 1) | (wrapped == -1) | (divisor % 256 == 0), 3, divisor)
    for place, op in enumerate(("+", "*", "/", "%", "<<", ">>", "<", "==")):
        rights = (torch.int8, torch.int32, torch.uint32, torch.uint64)
        rights = rights if tier == 3 else rights[place // 2 % 2 :: 2]
        second = y & 31 if op in ("<<", ">>") else divisor if op in "/%" else y
        expressions = {}
        for left in INTEGERS:
            steps = "".join(f"h = h * 31 + (int64_t)(({CPP[left]})x {op} ({CPP[right]})y); " for right in rights)
            expressions[CPP[left]] = f"([&] {{ int64_t h = 0; {steps} return h; }}())"
        wanted = dict(compiled(expressions, x, second))
        for left in INTEGERS:
            h = torch.zeros_like(x)
            for right in rights:
                result = binary(op, convert(value(x), left), convert(value(second), right))
                h = h * 31 + convert(result, torch.int64).data
            assert torch.equal(h, wanted[CPP[left]]), (op, left)


def test_operators_never_trap() -> None:
    """Division by zero, of the smallest integer by -1, shifts by any count; on tensors, constants and nodes."""
    for dtype, op in itertools.product((torch.int32, torch.int64, torch.uint32, torch.uint64), ("/", "%", "<<", ">>")):
        info = torch.iinfo(dtype)
        numbers = (info.min, info.max, 5)
        others = (0, 1, 40, 70, *((-1, -70) if dtype.is_signed else (info.max,)))
        x, y = zip(*itertools.product(numbers, others), strict=True)
        a, b = stored(list(x), dtype), stored(list(y), dtype)
        got = [round_to(number, dtype) for number in binary(op, Value(dtype, a), Value(dtype, b)).data.tolist()]
        known = [binary(op, constant(p, dtype), constant(q, dtype)).data for p, q in zip(x, y, strict=True)]
        assert got == known
        for number in others:
            half = binary(op, Value(dtype, a), constant(number, dtype))
            wanted = [g for g, q in zip(got, y, strict=True) if q == number]
            found = [round_to(n, dtype) for n, q in zip(half.data.tolist(), y, strict=True) if q == number]
            assert found == wanted, (dtype, op, number)


def stored(numbers: list[int], dtype: torch.dtype) -> torch.Tensor:
    """Return integers as values of the type are stored."""
    return torch.tensor([round_to(n, storage_dtype(dtype)) for n in numbers], dtype=storage_dtype(dtype))


def test_operators_on_other_types() -> None:
    x = torch.tensor([1.5, -0.0, NAN, INF])
    assert binary("+", value(x), constant(1, torch.int64)).dtype is torch.float32
    assert binary("*", value(x), constant(0.1, torch.float64)).data.tolist()[:1] == [1.5 * 0.1]
    assert unary("-", value(x)).data.signbit().tolist() == [True, False, x[2].signbit().logical_not().item(), True]
    assert unary("!", value(x)).data.tolist() == [False, True, False, False]
    assert unary("-", constant(1, torch.uint32)).data == 2**32 - 1
    assert unary("~", value(torch.tensor([True, False]))).data.tolist() == [-2, -1]
    for op, a in (("%", torch.float32), ("&", torch.float64), ("<<", torch.float32), ("<", torch.complex64)):
        with pytest.raises(TypeError, match=re.escape(f"no operator {op} for")):
            binary(op, constant(1, a), constant(1, torch.int32))
    with pytest.raises(TypeError, match="no operator ~ for float32"):
        unary("~", value(x))
    # float32 constants round; integers as far away as 2^53 + 1 once only.
    assert binary("/", constant(1, torch.float32), constant(3, torch.float32)).data == torch.tensor(1 / 3).item()
    assert convert(constant(2**60 + 2**36 + 1, torch.int64), torch.float32).data == float(2**60 + 2**37)
    assert binary("/", constant(1.0, torch.float64), constant(-0.0, torch.float64)).data == -INF
    mask = torch.tensor([True, False])
    assert select(mask, constant(2**64 - 1, torch.uint64), constant(1, torch.uint64)).data.tolist() == [-1, 1]
    assert select(mask, constant(True, torch.bool), constant(False, torch.bool)).data is mask


@pytest.mark.cpu
def test_conversions_between_all_types(tier: int) -> None:
    x = integers(1)
    floats = {torch.float32: "__float_as_int", torch.float64: "__double_as_longlong"}
    expressions: dict[str, str] = {}
    for source, target in itertools.product(INTEGERS, CPP):
        result = f"({CPP[target]})({CPP[source]})x"
        expressions[f"{source} {target}"] = f"{floats[target]}({result})" if target in floats else result
    # Floats inside the integer's range, with fractions.
    for source, target in itertools.product(floats, INTEGERS[1:]):
        number = f"((({CPP[source]})({CPP[target]})x) / 4)"
        expressions[f"{source} {target} / 4"] = f"({CPP[target]}){number}"
    for key, wanted in compiled(expressions, x):
        source, target = (getattr(torch, name.removeprefix("torch.")) for name in key.split()[:2])
        if key.endswith("/ 4"):
            number = binary("/", convert(convert(value(x), target), source), constant(4, source))
            got = convert(number, target)
        else:
            got = convert(convert(value(x), source), target)
        bits = call(floats[target], [got]) if target in floats else got
        assert torch.equal(convert(bits, torch.int64).data, wanted), key
        for index in range(0, len(x), 7 if tier == 3 else 29):
            start = constant(x[index].item(), torch.int64)
            if key.endswith("/ 4"):
                number = binary("/", convert(convert(start, target), source), constant(4, source))
            else:
                number = convert(start, source)
            number = convert(number, target)
            folded = call(floats[target], [number]) if target in floats else number
            assert round_to(folded.data, torch.int64) == wanted[index].item(), (key, x[index])


@pytest.mark.cpu
def test_floats_out_of_range_become_the_smallest_integer() -> None:
    x = sample(torch.float64)
    bits = x.view(torch.int64)
    before = "double v = __longlong_as_double(x);"
    for name, wanted in compiled({"int": "(int)v", "int64_t": "(int64_t)v"}, bits, before=before):
        dtype = torch.int32 if name == "int" else torch.int64
        assert torch.equal(convert(value(x), dtype).data.to(torch.int64), wanted)
        assert [convert(constant(n, torch.float64), dtype).data for n in x[:60].tolist()] == wanted[:60].tolist()


@pytest.mark.cpu
def test_integer_functions_equal_compiled_ones() -> None:
    x, y = integer_pairs()
    takes = {name: parameters for name, (parameters, _, _) in BITS.items() if set(parameters) <= set("iuUl")}
    takes = {name: kinds for name, kinds in takes.items() if "2float" not in name and "2double" not in name}
    takes |= {"labs": "l", "llabs": "l"}
    gives = {"f": "__float_as_int({})", "d": "__double_as_longlong({})"}
    expressions = {}
    for name, kinds in takes.items():
        arguments = ", ".join(f"({CPP[LETTERS[k]]}){a}" for k, a in zip(kinds, "xyx", strict=False))
        result = BITS[name][1] if name in BITS else "l"
        expressions[name] = gives.get(result, "{}").format(f"{name}({arguments})")
    expressions |= {f"abs {t}": f"abs(({t})x)" for t in ("int", "int64_t", "uint64_t", "int16_t")}
    expressions |= {f"{n} {t}": f"{n}(({t})x, ({t})y)" for n in ("max", "min") for t in ("int", "uint64_t", "unsigned")}
    expressions["int2float"] = "__float_as_int(__int2float_rn((int)x))"
    types = {cpp: dtype for dtype, cpp in CPP.items()}
    for name, wanted in compiled(expressions, x, y):
        if " " in name:
            base, _, cpp = name.partition(" ")
            found = call(base, [convert(value(a), types[cpp]) for a in ((x,) if base == "abs" else (x, y))])
        elif name == "int2float":
            found = call("__int2float_rn", [value(x)])
        else:
            found = call(name, [value(x), value(y), value(x)][: len(takes[name])])
        if found.dtype in FLOATS:
            found = call("__float_as_int" if found.dtype is torch.float32 else "__double_as_longlong", [found])
        nan = found.dtype is torch.int64 and name == "__longlong_as_double"
        same = convert(found, torch.int64).data == wanted
        assert bool((same | nan & value_is_nan(wanted)).all()), name


def value_is_nan(bits: torch.Tensor) -> torch.Tensor:
    """Whether int64 bits are a double's NaN: machines may make it quiet on the way."""
    return bits.view(torch.float64).isnan()


@pytest.mark.cpu
def test_float_bits_and_saturating_conversions() -> None:
    x = sample(torch.float32)
    bits = x.view(torch.int32).to(torch.int64)
    names = ["__float_as_int", "__float_as_uint", *(f"__float2int_{mode}" for mode in ("rn", "rz", "rd", "ru"))]
    names += ["lrint", "lround", "llrint", "llround", "ilogb"]
    before = "float f = __int_as_float((int)x); double d = __longlong_as_double(y);"
    y = sample(torch.float64)
    expressions = {name: f"{name}(f)" for name in names}
    expressions |= {name: f"{name}(d)" for name in ("__double_as_longlong", "__double2hiint", "__double2loint")}
    for name, wanted in compiled(expressions, bits, y.view(torch.int64)[: len(bits)], before=before):
        source = value(y[: len(x)]) if "double" in name else value(x)
        got = convert(call(name, [source]), torch.int64).data
        # A signalling NaN may come out quiet.
        assert torch.equal(got[~source.data.isnan()], wanted[~source.data.isnan()]), name
    for name, want in {
        "__float2uint_rn": [0, 3, 2**32 - 1, 0, 0], "__double2ll_ru": [-2, 3, 2**63 - 1, -(2**63), -(2**63)],
        "__double2ull_rz": [0, 2, 2**64 - 1, 0, 2**63], "__float2int_rd": [-3, 2, 2**31 - 1, -(2**31), 0],
    }.items():  # fmt: skip
        got = [call(name, [constant(n, torch.float64)]).data for n in (-2.5, 2.75, 1e30, -INF, NAN)]
        assert got == want, name


@pytest.mark.cpu
@pytest.mark.filterwarnings("ignore::fuser.errors.FallbackWarning")
def test_conversions_as_kernels_have_them() -> None:
    numbers = torch.cat([sample(torch.float32).double(), torch.tensor([2.0**63, -(2.0**63), 2.0**64, 2.0**32 - 0.5])])
    names = [
        f"__{source}2{target}_{mode}"
        for source in ("float", "double")
        for target in ("int", "uint", "ll", "ull")
        for mode in ("rn", "rz", "rd", "ru")
    ]
    for name in names:
        functor = fuser.create_jit_fn(f"template <typename T> long long f(T x) {{ return (long long){name}(x); }}")
        kernels = functor(numbers)
        before = fuser.override_can_fuse_on_cpu(False)
        try:
            assert torch.equal(kernels, functor(numbers)), name
        finally:
            fuser.override_can_fuse_on_cpu(before)


# ---- complex numbers ----


def complex_sample(dtype: torch.dtype) -> torch.Tensor:
    """Every pair of special parts, and random numbers of several sizes."""
    ends = [0.0, 1.0, 2.0, INF, NAN, 1e-3]
    ends += [1e200, 1e-200, 1e-310] if dtype is torch.complex128 else [1e30, 1e-30]
    parts = [sign * end for end in ends for sign in (1, -1)]
    grid = torch.tensor([complex(a, b) for a in parts for b in parts], dtype=dtype)
    generator = torch.Generator().manual_seed(1)
    shape = (200, 2)
    random = [torch.randn(shape, generator=generator, dtype=torch.float64) * size for size in (1, 1e-3, 6)]
    return torch.cat([grid, *(torch.view_as_complex(part).to(dtype) for part in random)])


def assert_same_complex(name: str, got: torch.Tensor, wanted: torch.Tensor, limit: float, *zs: torch.Tensor) -> None:
    """Assert equal kinds of both parts, and values close in units of the absolute value."""
    g, w = torch.view_as_real(got), torch.view_as_real(wanted)
    unit = torch.finfo(g.dtype).eps * w.abs().amax(-1, keepdim=True).clamp(min=torch.finfo(g.dtype).tiny)
    same = (g == w) & (g.signbit() == w.signbit()) | (g.isnan() & w.isnan())
    close = same | ((g - w).abs() <= limit * unit) & ~((g == 0) & (w == 0)) & w.isfinite()
    places = (~close).any(-1).nonzero().flatten()[:4].tolist()
    shown = [(*(z[i].item() for z in zs), got[i].item(), wanted[i].item()) for i in places]
    assert not places, f"{name}, {got.dtype}: arguments, eager, compiled: {shown}"


@pytest.mark.cpu
@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_complex_functions_equal_compiled_ones(dtype: torch.dtype) -> None:
    z = complex_sample(dtype)
    real = z.real.dtype
    w = z.roll(5).roll(300)
    # Those that only turn or scale another's result are compared once.
    left_out = {"complex", "polar", "pow"}
    left_out |= set("acosh asinh atan cos log10 log2 sin tan".split()) if dtype is torch.complex64 else set()
    one = [name for name in COMPLEX if name not in left_out]
    expressions = {name: f"std::{name}(x)" for name in one}
    expressions |= {"polar": "std::polar(x.real(), x.imag())", "complex": "T(x.real(), x.imag())"}
    expressions |= {f"x {op} y": f"x {op} y" for op in "+-*/"}
    expressions |= {f"x {op} r": f"x {op} y.real()" for op in "+-*/"}
    expressions |= {f"r {op} x": f"y.real() {op} x" for op in "+-*/"}
    expressions |= {"x == y": "x == y", "x != r": "x != y.real()", "r == x": "x.real() == x"}
    expressions |= {"x + 1": "x + 1", "2 * x": "2 * x", "real 1": "std::real(1)", "bool": "(T)(x != T(0))"}
    v = {"x": value(z), "y": value(w), "r": split_complex(value(w))[0]}
    for name, wanted in compiled(expressions, z, w):
        parts = split_complex(v["x"])
        if name in COMPLEX:
            got = call(name, list(parts) if name in {"polar", "complex"} else [v["x"]])
        elif name in {"x + 1", "2 * x"}:
            ints = {"1": constant(1, torch.int32), "2": constant(2, torch.int64)}
            left, op, right = name.split()
            got = binary(op, (v | ints)[left], (v | ints)[right])
            assert got.dtype is dtype
        elif name == "real 1":
            got = call("real", [constant(1, torch.int32)])
            assert got.dtype is torch.float64
        elif name == "bool":
            got = convert(v["x"], torch.bool)
        elif name == "r == x":
            got = binary("==", parts[0], v["x"])
        else:
            left, op, right = name.split()
            got = binary(op, v[left], v[right])
        if not got.dtype.is_complex:
            assert got.dtype in (real, torch.bool, torch.float64)
        data = convert(got, dtype).data
        data = data if isinstance(data, torch.Tensor) else torch.full_like(z, data)
        if name == "exp":
            # C99 leaves the signs open.
            data = torch.where((z.real == -INF) & (data == 0), wanted, data)
        assert_same_complex(name, data, wanted, 8, z, w)


@pytest.mark.cpu
def test_complex_powers() -> None:
    z = torch.randn(300, dtype=torch.complex128, generator=torch.Generator().manual_seed(3))
    z[:6] = torch.tensor([0, 0, 1, -1, 1j, 2])
    w = z.roll(3)
    expressions = {"zw": "std::pow(x, y)", "zr": "std::pow(x, y.real())", "rz": "pow(x.real(), y)", "z2": "pow(x, 2)"}
    r, s = split_complex(value(z))[0], split_complex(value(w))[0]
    given = {
        "zw": (value(z), value(w)),
        "zr": (value(z), s),
        "rz": (r, value(w)),
        "z2": (value(z), constant(2, torch.int32)),
    }
    for name, wanted in compiled(expressions, z, w):
        assert_same_complex(name, call("pow", given[name]).data, wanted, 60, z, w)


# ---- the table of names ----


VECTORS = {f"{sign}{kind}" for kind in ("char", "short", "int", "long", "longlong") for sign in ("", "u")}
VECTORS |= {"float", "double"}


def test_every_name_of_the_prelude_is_known() -> None:
    files = ("cpu_mvec.h", "cpu_math.h", "cuda_math.h", "core.h", "cpu.h", "complex.h")
    names = {name for file in files for block in load_blocks(file) for name in block.names}
    offered = {name for name in names if not name.startswith(("fuser_", "FUSER_"))} | set(COMPLEX) - {"complex"}
    # Statements, what deals with memory, and a name of std:: that is asked for with its namespace.
    beside_numbers = {"assert", "printf", "memcpy", "memset", "NULL"}
    beside_numbers |= {name for name in offered if name[-1] in "1234" and name.removeprefix("make_")[:-1] in VECTORS}
    assert {name for name in offered if not functions.is_known(name)} == {*beside_numbers, "clamp"}
    with pytest.raises(KeyError):
        call("no_such_function", [])
    with pytest.raises(TypeError, match="atan2 takes 2 arguments, got 1"):
        call("atan2", [constant(1.0, torch.float64)])


CHECK = re.compile(r"decltype\((?:::)?((?:std::)?\w+)\(([^()&\"]*)\)\), ([\w ]+?)>")
TYPES = {
    "f": torch.float32,
    "d": torch.float64,
    "i": torch.int32,
    "l": torch.int64,
    "u": torch.uint32,
    "0": torch.int32,
}
TYPES |= {"ul": torch.uint64, "li": torch.int64, "u8": torch.uint8, "s16": torch.int16}
CPP_TYPES = {"float": torch.float32, "double": torch.float64, "int": torch.int32, "long": torch.int64}
CPP_TYPES |= {
    "long long": torch.int64,
    "unsigned": torch.uint32,
    "unsigned long long": torch.uint64,
    "uint8_t": torch.uint8,
}


def test_results_have_the_types_of_the_prelude() -> None:
    """Every type that test_prelude.py asks of the compiled overloads."""
    checked = set()
    for statements in MATH.values():
        for name, given, wanted in CHECK.findall(statements):
            arguments = [constant(1, TYPES[item]) for item in given.split(", ") if item]
            base = name if name in {"std::max", "std::min", "std::clamp"} else name.removeprefix("std::")
            assert call_with_results(base, arguments)[0].dtype is CPP_TYPES[wanted], (name, given)
            checked.add(base)
    assert len(checked) > 200
    x = constant(1.5, torch.float32)
    assert [v.dtype for v in call_with_results("frexp", [x])] == [torch.float32, torch.int32]
    assert [v.dtype for v in call_with_results("sincosf", [constant(1.5, torch.float64)])] == [torch.float32] * 2
    assert call("nan", []).dtype is torch.float64
    assert call("nanf", []).dtype is torch.float32
    assert math.isnan(call("nan", []).data)
    assert call("norm3d", [x, x, x]).dtype is torch.float64


# ---- constants, tensors and nodes ----

REALS = (0.0, -0.0, 0.3, -1.7, 2.5, 4.0, INF, NAN)
WHOLE = (0, 1, -3, 12, 2**31 - 1)


def arguments_of(name: str, step: int = 1) -> Iterator[list[Value]]:
    """Yield constants that a function takes: one of ``step``, of two names hardly ever the same."""
    if name in functions._FUNCTIONS:
        for at, kinds in itertools.product(range(choose(name, step), len(REALS), step), ("fd",)):
            given = []
            for place, letter in enumerate(functions._FUNCTIONS[name].parameters):
                if letter in "iluU":
                    order = (
                        min(WHOLE[(at + place) % 5], 12)
                        if name in {"jn", "yn", "jnf", "ynf"}
                        else WHOLE[(at + place) % 5]
                    )
                    given.append(constant(order, LETTERS[letter]))
                else:
                    dtype = LETTERS.get(letter, LETTERS[kinds[at % 2]])
                    given.append(constant(REALS[(at + 3 * place) % 8], dtype))
            yield given
    if name in COMPLEX and name != "complex":
        for number, other in ((1.5 - 0.5j, 0.3 + 2j), (-0.2 + 3j, 1 + 0j)):
            z, w = constant(number, torch.complex128), constant(other, torch.complex64)
            yield (
                [z, convert(w, z.dtype)]
                if name == "pow"
                else [constant(2.5, torch.float64)]
                if name == "polar"
                else [z]
            )


def as_tensor(item: Value) -> Value:
    """Return a constant as a tensor without dimensions."""
    return Value(item.dtype, torch.scalar_tensor(item.stored, dtype=storage_dtype(item.dtype)))


def bits(item: Any) -> Any:
    """Return what two equal results share: NaN equals NaN, zeros have signs."""
    return (
        torch.view_as_real(item).view(torch.int64).nan_to_num().tolist() if item.dtype.is_complex else repr(item.item())
    )


@pytest.mark.parametrize("whole", [False, True], ids=["formulas", "whole functions"])
def test_constants_tensors_and_nodes_agree(whole: bool, tier: int) -> None:
    """Bit for bit, for every function; as graphs that are to be differentiated too, but for rounding."""
    graph = fx.Graph()
    outputs: list[fx.Node] = []
    wanted: list[tuple[str, list[Value], Value]] = []
    tensors: list[torch.Tensor] = []
    token = WHOLE_FUNCTIONS.set(whole)
    try:
        for name in [*functions._FUNCTIONS, *COMPLEX]:
            for given in arguments_of(name, 1 if tier == 3 else 3):
                nodes = []
                for item in given:
                    if not nodes or name not in {"jn", "yn", "jnf", "ynf"}:
                        node = graph.placeholder(f"input{len(tensors)}")
                        node.meta["dtype"] = storage_dtype(item.dtype)
                        tensors.append(as_tensor(item).data)
                        nodes.append(Value(item.dtype, node))
                    else:
                        nodes.append(item)
                if name in {"jn", "yn", "jnf", "ynf"}:
                    # The order is known; the argument is data.
                    tensors[-1] = as_tensor(given[1]).data
                    node.meta["dtype"] = given[1].dtype
                    nodes = [given[0], Value(given[1].dtype, node)]
                built = call_with_results(name, nodes)
                outputs += [as_node(graph, item) for item in built]
                expected = call_with_results(name, given)
                assert [v.dtype for v in built] == [v.dtype for v in expected]
                wanted += [(name, given, item) for item in expected]
                if not whole:
                    direct = call_with_results(
                        name,
                        [given[0], *map(as_tensor, given[1:])] if name in {"jn", "yn"} else list(map(as_tensor, given)),
                    )
                    for found, item in zip(direct, expected, strict=True):
                        assert found.is_constant or found.data.dtype is storage_dtype(found.dtype)
                        assert repr(
                            round_to(
                                as_tensor(found).data.item() if found.is_constant else found.data.item(), found.dtype
                            )
                        ) == repr(item.data), (name, [g.data for g in given])
    finally:
        WHOLE_FUNCTIONS.reset(token)
    graph.output(tuple(outputs))
    graph.lint()
    found = fx.GraphModule(torch.nn.Module(), graph)(*tensors)
    for (name, given, item), tensor in zip(wanted, found, strict=True):
        assert tensor.dtype is storage_dtype(item.dtype), name
        got = round_to(tensor.item(), item.dtype)
        same = repr(got) == repr(item.data)
        if whole and isinstance(got, complex):
            same = cmath_close(got, item.data)
        elif whole and isinstance(got, float):
            same = same or math.isclose(got, item.data, rel_tol=1e-5)
        assert same, (name, [v.data for v in given], got, item.data)
    targets = {type(node.target) for node in graph.nodes if node.op == "call_function"}
    assert (NamedFunction in targets) is whole
    assert all("dtype" in node.meta for node in graph.nodes if node.op == "call_function")


def cmath_close(a: complex, b: complex) -> bool:
    """Whether two complex numbers are equal but for rounding."""
    return abs(a - b) <= 1e-5 * max(1.0, abs(b))


def test_functions_stay_whole_where_graphs_are_to_be_differentiated() -> None:
    graph = fx.Graph()
    node = graph.placeholder("x")
    node.meta["dtype"] = torch.float64
    token = WHOLE_FUNCTIONS.set(True)
    x = Value(torch.float64, node)
    whole = {name for name, function in functions._FUNCTIONS.items() if function.whole == name}
    for name in (*whole, "sincospi"):
        call_with_results(name, [x] * len(functions._FUNCTIONS[name].parameters))
    for name in ("lgammaf", "erfinvf", "cosh", "sqrt", "copysign"):
        call_with_results(name, [x] * len(functions._FUNCTIONS[name].parameters))
    WHOLE_FUNCTIONS.reset(token)
    calls = [node for node in graph.nodes if node.op == "call_function" and node.target is not aten._to_copy.default]
    named = [node.target.name for node in calls if isinstance(node.target, NamedFunction)]
    assert sorted(named) == sorted([*whole, "sinpi", "cospi"])
    others = [node.target for node in calls if not isinstance(node.target, NamedFunction)]
    names = ("lgamma", "erfinv", "cosh", "sqrt")
    assert others == [*(getattr(aten, name).default for name in names), aten.copysign.Tensor]
    rounded = next(node for node in calls if node.target == NamedFunction("rhypot", (torch.float64,) * 2))
    assert rounded.meta["dtype"] is torch.float64
    # What has no name there takes bits of constants of differentiation only.
    call_with_results("frexp", [x])
    taken = [node.args[0].target for node in graph.nodes if node.target is aten.view.dtype]
    assert aten.detach.default in taken
    assert set(taken) <= {aten.detach.default, aten.bitwise_left_shift.Tensor}


def test_nodes_carry_the_place_and_orders_must_be_known() -> None:
    from fuser.eager.data import PLACE

    graph = fx.Graph()
    node = graph.placeholder("x")
    node.meta["dtype"] = torch.float64
    token = PLACE.set((3, 14))
    made = call("sinpi", [Value(torch.float64, node)])
    PLACE.reset(token)
    later = call("exp", [made])
    assert made.data.meta["place"] == (3, 14)
    assert "place" not in later.data.meta
    with pytest.raises(NeedsValuesError):
        call("jn", [convert(made, torch.int32), made])


def test_constants_are_folded_under_fake_tensors() -> None:
    with FakeTensorMode():
        assert call("cbrt", [constant(27.0, torch.float64)]).data == 3.0
        assert binary("/", constant(1.0, torch.float32), constant(0.0, torch.float32)).data == INF


def test_shapes_broadcast_beside_numbers_without_dimensions() -> None:
    row, alpha = torch.rand(3, dtype=torch.float64), torch.tensor(0.5, dtype=torch.float64)
    for name in ("pow", "fma", "hypot", "fmod", "remainder"):
        given = [value(row[:, None]), value(row), value(alpha)][: len(functions._FUNCTIONS[name].parameters)]
        assert call(name, given).data.shape == (3, 3)
    assert call("cbrt", [value(row.expand(2, 3).t())]).data.shape == (3, 2)


@pytest.mark.parametrize("device", ["meta", pytest.param("cuda", marks=pytest.mark.cuda)])
@pytest.mark.parametrize("name", [*functions._FUNCTIONS, *COMPLEX])
def test_numbers_stand_beside_tensors_of_any_device(name: str, device: str) -> None:
    """Each argument in turn a tensor there, the others constants or CPU tensors without dimensions."""
    has_order = name in {"jn", "yn", "jnf", "ynf"}
    # Recurrences are some five hundred launches each.
    count = 1 if device == "meta" else 2 if has_order else 8
    for given in itertools.islice(arguments_of(name), count):
        for place, as_number in itertools.product(range(has_order, len(given)), (as_tensor, lambda item: item)):
            arguments = [as_number(item) for item in given]
            if has_order:
                arguments[0] = given[0]
            tensor = as_tensor(given[place]).data.to(device).expand(3)
            arguments[place] = Value(given[place].dtype, tensor)
            for found, wanted in zip(call_with_results(name, arguments), call_with_results(name, given), strict=True):
                assert found.dtype is wanted.dtype
                if found.is_constant:
                    # The number alone decides.
                    assert name in {"std::clamp", "remainder", "remainderf", "remquo", "remquof"}
                    continue
                assert found.data.device.type == device
                assert found.data.shape == (3,)
                # Of what is not finite, C++ has no integer.
                is_defined = wanted.dtype.is_floating_point or all(
                    math.isfinite(item.data.real) for item in given if not isinstance(item.data, bool)
                )
                if device == "cuda" and is_defined:
                    tolerance = 1e-5 if wanted.dtype in (torch.float32, torch.complex64) else 1e-13
                    close = torch.isclose(
                        found.data.cpu(), as_tensor(wanted).data, rtol=tolerance, atol=1e-30, equal_nan=True
                    )
                    assert bool(close.all()), (name, [v.data for v in given], found.data, wanted.data)


# ---- derivatives ----

SMOOTH = {
    "cbrt": (-3.0, 2.5), "rcbrt": (0.5, 4.0), "exp10": (-2.0, 2.0), "sinpi": (-2.3, 2.2), "cospi": (-2.0, 2.0),
    "tgamma": (-2.7, 5.2), "lgamma": (0.5, 9.0), "erfcx": (-2.0, 4.0), "erfcinv": (0.1, 1.9), "normcdf": (-4.0, 4.0),
    "normcdfinv": (0.1, 0.9), "erfinv": (-0.8, 0.8), "cyl_bessel_i0": (-3.0, 3.0), "cyl_bessel_i1": (-3.0, 3.0),
    "sinh": (-2.0, 2.0), "cosh": (-2.0, 2.0), "logb": (0.6, 1.9), "round": (0.6, 1.4), "hypot": (0.5, 2.0),
    "fmod": (1.0, 1.4), "remainder": (2.1, 2.3), "fdim": (0.3, 1.0), "pow": (0.5, 1.5), "fma": (0.5, 2.0),
    "norm3d": (0.5, 2.0), "rhypot": (0.5, 2.0), "fmax": (0.5, 2.0), "copysign": (0.5, 2.0),
}  # fmt: skip
COMPLEX_SMOOTH = [name for name in COMPLEX if name not in {"complex", "polar", "proj"}]


def test_formulas_are_differentiable() -> None:
    """Gradcheck and gradgradcheck, at 0 too where it is inside the range."""
    for name, (low, high) in SMOOTH.items():
        count = len(functions._FUNCTIONS[name].parameters)
        points = [torch.linspace(low, high, 7, dtype=torch.float64) + 0.01 * place for place in range(count)]
        if count == 1 and low < 0.0 < high and name not in {"cbrt", "tgamma"}:
            points[0][3] = 0.0
        inputs = [
            (point if place == 0 else point.flip(0) * 0.5 if name != "pow" else point).requires_grad_()
            for place, point in enumerate(points)
        ]

        def compute(*tensors: torch.Tensor, name: str = name) -> torch.Tensor:
            result: torch.Tensor = call(name, [value(tensor) for tensor in tensors]).data
            return result

        assert torch.autograd.gradcheck(compute, inputs), name
        assert torch.autograd.gradgradcheck(compute, inputs), name
    x = torch.linspace(0.6, 3.1, 5, dtype=torch.float64).requires_grad_()
    for name in ("frexp", "modf", "sincospi"):
        assert torch.autograd.gradcheck(lambda t, name=name: call_with_results(name, [value(t)])[0].data, [x])
    assert torch.autograd.gradcheck(lambda t: call("ldexp", [value(t), constant(-3, torch.int32)]).data, [x])
    z = torch.tensor([0.3 + 0.4j, -0.6 + 0.2j, 0.5 - 0.7j], dtype=torch.complex128).requires_grad_()
    for name in COMPLEX_SMOOTH:
        second = [value(z.detach() * 2)] if name == "pow" else []
        assert torch.autograd.gradcheck(lambda t, n=name, s=second: call(n, [value(t), *s]).data, [z]), name


def test_gradients_on_ordinary_numbers_are_numbers() -> None:
    """No NaN from the formulas that a lane does not take, on the special numbers where the derivative is finite."""
    x = torch.tensor(
        [0.0, 0.25, -0.5, 1.0, -1.5, 3.0, 30.0, -40.0, 650.0, 710.3, 1e5, -1e-9, 1e-300], dtype=torch.float64
    )
    names = "sinpi cospi sinh cosh erfcx normcdf cyl_bessel_i0 cyl_bessel_i1 logb round exp10 fabs rint"
    for name in names.split():
        point = x[call(name, [value(x)]).data.isfinite()].requires_grad_()
        (gradient,) = torch.autograd.grad(call(name, [value(point)]).data.sum(), point)
        assert bool(gradient.isfinite().all()), (name, gradient)
    tiny = torch.tensor([1e-100, 170.0, -3.5], dtype=torch.float64).requires_grad_()
    (gradient,) = torch.autograd.grad(call("tgamma", [value(tiny)]).data.sum(), tiny)
    assert bool(gradient.isfinite().all())
    y = torch.tensor([1e-300, 0.2, 0.5, 0.7, 1.0, 1.5, 1.9], dtype=torch.float64).requires_grad_()
    (gradient,) = torch.autograd.grad(call("erfcinv", [value(y)]).data.sum(), y)
    assert bool(gradient.isfinite().all())


def test_functions_of_other_names_are_in_the_tests() -> None:
    """Every function that is not compared above is one of these."""
    compared = {*ONE, *TWO, *BITS, *(name for words in FAST.values() for name in words.split()), *COMPLEX}
    compared |= set("fma norm3d norm4d rhypot rnorm3d rnorm4d std::clamp ldexp scalbn scalbln jn yn frexp modf".split())
    compared |= set("remquo sincos sincospi lrint lround llrint llround labs llabs nan abs".split())
    compared |= {f"{name}f" for name in compared}
    own = {"fuser_digamma", "fuser_frexp_mantissa", "fuser_frexp_exponent"}
    assert set(functions._FUNCTIONS) - compared == {"__sincosf", *own, *(f"{name}f" for name in own)}
    eight = constant(8.0, torch.float64)
    parts = [call(f"fuser_frexp_{part}", [eight]).data for part in ("mantissa", "exponent")]
    assert parts == [value.data for value in call_with_results("frexp", [eight])]
    sine, cosine = call_with_results("__sincosf", [constant(0.5, torch.float64)])
    assert (sine.data, cosine.data) == (torch.tensor(0.5).sin().item(), torch.tensor(0.5).cos().item())
    assert call("fuser_digamma", [constant(1.0, torch.float64)]).data == pytest.approx(-0.5772156649015329, rel=1e-15)


def test_promotion() -> None:
    assert common_type(torch.int8, torch.uint8) is torch.int32
    assert common_type(torch.uint32, torch.int32) is torch.uint32
    assert common_type(torch.uint32, torch.int64) is torch.int64
    assert common_type(torch.int64, torch.uint64) is torch.uint64
    assert common_type(torch.uint64, torch.float32) is torch.float32
    assert common_type(torch.complex64, torch.float64) is torch.complex64
    assert common_type(torch.complex64, torch.complex128) is torch.complex128
    assert [promote_integer(t) for t in (torch.bool, torch.uint16, torch.uint32)] == [
        torch.int32,
        torch.int32,
        torch.uint32,
    ]
