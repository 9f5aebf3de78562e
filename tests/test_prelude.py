"""The preludes: every name compiles in both dialects, conversions are torch's, and no value depends on its position."""

import ctypes
import itertools
import json
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accuracy import distance
from tiers import SLOW
from torch._subclasses.fake_tensor import FakeTensorMode

import fuser
from fuser.cpu.prelude import emit_prelude as emit_cpu_prelude
from fuser.cpu.prelude import has_vector_form
from fuser.cuda import backend
from fuser.cuda.nvrtc import compile_text
from fuser.cuda.prelude import emit_prelude as emit_cuda_prelude
from fuser.debug import kernel_sources
from fuser.prelude import _e4m3fn_overflow, load_blocks

CXX = next((c for c in (os.environ.get("CXX"), "g++", "c++") if c and shutil.which(c)), None)
NATIVE = ("-march=native", "-mprefer-vector-width=512")
FLAGS = (
    *("-O2", "-std=c++17", "-fopenmp", "-fno-math-errno", "-fno-trapping-math"),
    *("-ffp-contract=off", "-shared", "-fPIC", "-Wall", "-Wno-unused", "-Werror"),
)
ALL_FEATURES = frozenset({"half", "bfloat16", "float8", "complex"})


def identifiers(text: str) -> frozenset[str]:
    """Return what codegen passes as `names`."""
    return frozenset(re.findall(r"[A-Za-z_]\w*", text))


def compile_cpp(
    body: str, folder: Path, features: frozenset[str] = frozenset(), *extra: str
) -> tuple[ctypes.CDLL, str]:
    """Compile the prelude for `body` and `body`; return the library and what the compiler said."""
    assert CXX is not None
    source = folder / "kernel.cpp"
    prelude = emit_cpu_prelude(identifiers(body), features)
    source.write_text(f'{prelude}\n#line 1 "body"\n{body}')
    library = folder / "kernel.so"
    command = [CXX, *FLAGS, *(extra or NATIVE), str(source), "-o", str(library), "-lmvec", "-lm"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return ctypes.CDLL(str(library)), done.stderr


def compile_cuda(body: str, features: frozenset[str] = frozenset(), arch: str = "sm_90") -> None:
    """Compile the prelude for `body` and `body` to a cubin; raise with NVRTC's log."""
    source = emit_cuda_prelude(identifiers(body), features) + body
    # Less optimised, as in cubins.py.
    options = (f"-arch={arch}", "--std=c++17", "--device-as-default-execution-space", "--Ofast-compile=mid")
    compile_text(source, options)


# ---- names ----

UNARY = (
    "acos acosh asin asinh atan atanh cbrt ceil cos cosh cospi cyl_bessel_i0 cyl_bessel_i1 erf erfc erfcinv erfcx "
    "erfinv exp exp10 exp2 expm1 fabs floor j0 j1 lgamma log log10 log1p log2 logb nearbyint normcdf normcdfinv rcbrt "
    "rint round rsqrt sin sinh sinpi sqrt tan tanh tgamma trunc y0 y1"
).split()
BINARY = "atan2 copysign fdim fmax fmin fmod hypot nextafter pow remainder".split()
TO_INTEGER = {"ilogb": "int", "lrint": "long", "lround": "long", "llrint": "long long", "llround": "long long"}
CLASSIFY = "isfinite isinf isnan signbit".split()


def is_type(expression: str, wanted: str) -> str:
    """Return statements that check the expression's type and evaluate it."""
    same = f"std::is_same_v<decltype({expression}), {wanted}>"
    return f"static_assert({same}, {json.dumps(expression)}); sink += (double)({expression});"


def math_statements() -> dict[str, str]:
    """Statements for every math name: it can be called, globally and in std::, and gives the promised type."""
    checks: dict[str, str] = {}

    for n in UNARY:
        calls = {f"{n}(f)": "float", f"{n}f(f)": "float", f"std::{n}f(f)": "float", f"{n}(d)": "double"}
        calls |= {f"std::{n}(f)": "float", f"{n}(i)": "double", f"std::{n}(l)": "double", f"{n}(u8)": "double"}
        checks[n] = " ".join(itertools.starmap(is_type, calls.items()))
    for n in BINARY:
        calls = {f"{n}(f, f)": "float", f"{n}f(f, f)": "float", f"std::{n}f(f, f)": "float", f"{n}(d, d)": "double"}
        calls |= {f"std::{n}(f, f)": "float", f"{n}(f, d)": "double", f"{n}(d, f)": "double", f"{n}(i, i)": "double"}
        calls |= {f"{n}(f, i)": "float", f"{n}(f, l)": "float", f"{n}(d, i)": "double", f"{n}(i, f)": "float"}
        calls |= {f"{n}(f, s16)": "float", f"std::{n}(d, l)": "double"}
        checks[n] = " ".join(itertools.starmap(is_type, calls.items()))
    for n, result in TO_INTEGER.items():
        calls = dict.fromkeys((f"{n}(f)", f"{n}f(f)", f"{n}(d)", f"std::{n}(f)", f"std::{n}f(f)", f"{n}(i)"), result)
        checks[n] = " ".join(itertools.starmap(is_type, calls.items()))
    for n in CLASSIFY:
        checks[n] = f"sink += {n}(f) + {n}(d) + {n}(i) + std::{n}(f) + std::{n}(l);"
    for n in ("max", "min"):
        calls = {"f, f": "float", "d, d": "double", "f, d": "double", "i, i": "int", "f, i": "float", "f, 0": "float"}
        calls |= {"i, u": "unsigned", "l, l": "long long", "i, l": "long long", "u8, u8": "int", "d, i": "double"}
        checks[n] = " ".join(is_type(f"{n}({a})", t) + is_type(f"::{n}({a})", t) for a, t in calls.items())
        checks[n] += is_type(f"std::{n}(f, f)", "float") + is_type(f"std::{n}(u8, u8)", "uint8_t")
    calls = {"abs(f)": "float", "abs(d)": "double", "abs(i)": "int", "abs(l)": "long long", "abs(u)": "unsigned"}
    calls |= {"abs(u8)": "int", "std::abs(f)": "float", "abs(s16)": "int", "std::abs(ul)": "unsigned long long"}
    checks["abs"] = " ".join(itertools.starmap(is_type, calls.items()))
    calls = {"fma(f, f, f)": "float", "fmaf(f, f, f)": "float", "std::fma(d, d, d)": "double", "fma(f, f, d)": "double"}
    calls |= {"fma(i, i, i)": "double", "fma(f, i, i)": "float"}
    checks["fma"] = " ".join(itertools.starmap(is_type, calls.items()))
    for n in ("norm3d", "rnorm3d"):
        checks[n] = (
            is_type(f"{n}(f, f, f)", "double") + is_type(f"{n}(d, d, i)", "double") + is_type(f"{n}f(f, f, f)", "float")
        )
    checks["rhypot"] = (
        is_type("rhypot(f, f)", "double") + is_type("rhypot(d, i)", "double") + is_type("rhypotf(f, f)", "float")
    )
    for n in ("norm4d", "rnorm4d"):
        checks[n] = is_type(f"{n}(d, d, d, d)", "double") + is_type(f"{n}f(f, f, f, f)", "float")
    for n in ("jn", "yn"):
        checks[n] = is_type(f"{n}(i, f)", "float") + is_type(f"{n}(i, d)", "double") + is_type(f"{n}f(i, f)", "float")
    for n in ("ldexp", "scalbn", "scalbln"):
        checks[n] = (
            is_type(f"{n}(f, i)", "float") + is_type(f"std::{n}(d, i)", "double") + is_type(f"{n}f(f, i)", "float")
        )
    checks["frexp"] = (
        is_type("frexp(f, &i)", "float") + is_type("std::frexp(d, &i)", "double") + is_type("frexpf(f, &i)", "float")
    )
    checks["modf"] = (
        is_type("modf(f, &f)", "float") + is_type("std::modf(d, &d)", "double") + is_type("modff(f, &f)", "float")
    )
    checks["remquo"] = (
        is_type("remquo(f, f, &i)", "float") + is_type("remquo(d, d, &i)", "double") + "sink += remquof(f, f, &i);"
    )
    checks["nan"] = is_type('nan("")', "double") + is_type('nanf("")', "float")
    checks["sincos"] = "sincos(f, &f, &f); sincosf(f, &f, &f); sincos(d, &d, &d); std::sincos(f, &f, &f);"
    checks["sincospi"] = "sincospi(f, &f, &f); sincospif(f, &f, &f); sincospi(d, &d, &d);"
    checks["clamp"] = is_type("std::clamp(f, f, f)", "float")
    for n in ("__expf", "__exp10f", "__logf", "__log2f", "__log10f", "__sinf", "__cosf", "__tanf", "__saturatef"):
        checks[n] = is_type(f"{n}(f)", "float")
    for n in ("__powf", "__fdividef", "fdividef", "__fadd_rn", "__fsub_rn", "__fmul_rn", "__fdiv_rn"):
        checks[n] = is_type(f"{n}(f, f)", "float")
    for n in ("__frcp_rn", "__fsqrt_rn", "__frsqrt_rn"):
        checks[n] = is_type(f"{n}(f)", "float")
    checks["__fmaf_rn"] = is_type("__fmaf_rn(f, f, f)", "float")
    for n in ("__dadd_rn", "__dsub_rn", "__dmul_rn", "__ddiv_rn"):
        checks[n] = is_type(f"{n}(d, d)", "double")
    for n in ("__drcp_rn", "__dsqrt_rn"):
        checks[n] = is_type(f"{n}(d)", "double")
    checks["__fma_rn"] = is_type("__fma_rn(d, d, d)", "double")
    checks["__sincosf"] = "__sincosf(f, &f, &f);"
    casts = {"__float_as_int(f)": "int", "__int_as_float(i)": "float", "__float_as_uint(f)": "unsigned"}
    casts |= {
        "__uint_as_float(u)": "float",
        "__double_as_longlong(d)": "long long",
        "__longlong_as_double(l)": "double",
    }
    casts |= {"__double2hiint(d)": "int", "__double2loint(d)": "int", "__hiloint2double(i, i)": "double"}
    types = {"int": "int", "uint": "unsigned", "ll": "long long", "ull": "unsigned long long"}
    casts |= {
        f"__{source}2{short}_{mode}({source[0]})": kind
        for source in ("float", "double")
        for short, kind in types.items()
        for mode in ("rn", "rz", "rd", "ru")
    }
    given = {"int": "i", "uint": "u", "ll": "l", "ull": "ul", "double": "d"}
    casts |= {
        f"__{short}2{target}_rn({name})": target
        for short, name in given.items()
        for target in ("float", "double")
        if short != target
    }
    casts |= dict.fromkeys(("__mul24(i, i)", "__hadd(i, i)", "__rhadd(i, i)"), "int")
    joined = [f"__funnelshift_{way}(u, u, u)" for way in ("l", "lc", "r", "rc")]
    unsigned = ("__umul24(u, u)", "__byte_perm(u, u, u)", "__sad(i, i, u)", "__usad(u, u, u)", "__uhadd(u, u)")
    casts |= dict.fromkeys([*joined, *unsigned, "__urhadd(u, u)"], "unsigned")
    casts |= {"__popc(u)": "int", "__popcll(ul)": "int", "__clz(i)": "int", "__clzll(l)": "int", "__ffs(i)": "int"}
    casts |= {
        "__ffsll(l)": "int",
        "__brev(u)": "unsigned",
        "__brevll(ul)": "unsigned long long",
        "__umulhi(u, u)": "unsigned",
    }
    casts |= {"__mulhi(i, i)": "int", "__umul64hi(ul, ul)": "unsigned long long", "__mul64hi(l, l)": "long long"}
    casts |= {"labs(li)": "long", "llabs(l)": "long long"}
    checks |= {call.partition("(")[0]: is_type(call, result) for call, result in casts.items()}
    checks["printf"] = 'printf("%d", i);'
    checks["assert"] = "assert(i == i);"
    checks["memcpy"] = "memcpy(&i, &f, sizeof(i)); std::memcpy(&u, &f, 4);"
    checks["memset"] = "memset(&i, 0, sizeof(i)); std::memset(&u, 0, 4);"
    for kind in ("char", "short", "int", "long", "longlong"):
        for name in (kind, f"u{kind}"):
            checks[f"{name}1"] = f"{{ {name}4 four = make_{name}4(1, 2, 3, 4); sink += four.w + make_{name}1(i).x; }}"
    for name in ("float", "double"):
        checks[f"{name}1"] = f"{{ {name}3 three{{1, 2, 3}}; sink += three.z + make_{name}2(f, f).y; }}"
    checks["NULL"] = "{ const float* nothing = NULL; sink += nothing == NULL; }"
    return checks


MATH = math_statements()
COMPLEX_UNARY = "exp log log2 log10 sqrt sin cos tan asin acos atan sinh cosh tanh asinh acosh atanh".split()
CORE = """
static_assert(sizeof(int8_t) == 1 && sizeof(int16_t) == 2 && sizeof(int32_t) == 4 && sizeof(int64_t) == 8, "");
static_assert(sizeof(uint8_t) == 1 && sizeof(uint16_t) == 2 && sizeof(uint32_t) == 4 && sizeof(uint64_t) == 8, "");
static_assert(std::is_integral<bool>::value && !std::is_integral<float>::value, "");
static_assert(std::is_floating_point<const double>::value && !std::is_floating_point<int>::value, "");
static_assert(std::is_arithmetic<char>::value && !std::is_arithmetic<int*>::value && std::is_same<int, int>::value, "");
static_assert(std::is_same_v<std::enable_if_t<true, int>, std::enable_if<true, int>::type>, "");
static_assert(std::is_same_v<std::remove_cv<const volatile int>::type, std::conditional<false, float, int>::type>, "");
sink += INFINITY + POS_INFINITY + NEG_INFINITY + NAN + (double)(std::size_t)i;
static_assert(std::is_same_v<decltype(INFINITY), float> && std::is_same_v<decltype(NEG_INFINITY), float>, "");
static_assert(std::is_same_v<decltype(NAN), float> && std::is_same_v<decltype(POS_INFINITY), float>, "");
sink += fuser_cast<int>(f) + fuser_cast<bool>(d) + fuser_cast<float>(l);
sink += fuser_isolate<3>(f) + fuser_isolate<4>(d) + fuser_isolate<5>(i);
sink += fuser_to_compute(f) + fuser_from_compute<uint8_t>(f);
"""
STORAGE = {
    "half": ("fuser_half", 2),
    "bfloat16": ("fuser_bfloat16", 2),
    "float8_e4m3fn": ("fuser_float8_e4m3fn", 1),
    "float8_e5m2": ("fuser_float8_e5m2", 1),
    "float8_e4m3fnuz": ("fuser_float8_e4m3fnuz", 1),
    "float8_e5m2fnuz": ("fuser_float8_e5m2fnuz", 1),
    "float8_e8m0fnu": ("fuser_float8_e8m0fnu", 1),
}


def complex_statements() -> str:
    """Statements that use every complex name with both precisions."""
    lines = ['static_assert(sizeof(c) == 8 && alignof(decltype(c)) == 8 && alignof(decltype(z)) == 16, "");']
    lines += [f"c += {n}(c); c += std::{n}(c); z += std::{n}(z);" for n in COMPLEX_UNARY]
    lines += [f"{is_type(f'std::{n}(c)', 'float')} sink += {n}(z);" for n in ("abs", "arg", "norm", "real", "imag")]
    lines.append(
        "c = std::conj(c) + std::proj(c) + std::polar(f, f) + std::pow(c, c) + pow(c, f) + std::pow(f, c) + pow(c, 2);"
    )
    lines.append(
        "c = 2 * c - c * 2.0 + c / f - f / c + (1 + c) + -c + (c == f) + (f != c); "
        "c *= f; c -= c; c /= c; c = f; z = c;"
    )
    lines.append(
        "c = fuser_cast<std::complex<float>>(z) + fuser_cast<std::complex<float>>(i); sink += fuser_cast<bool>(c);"
    )
    lines.append(
        "c = fuser_isolate<1>(c); sink += fuser_cast<int>(z); "
        "sink += std::real(f) + std::imag(f) + std::norm(f) + std::arg(f);"
    )
    lines.append(
        "c = fuser_to_compute(fuser_from_compute<fuser_complex_half>(c)); "
        'static_assert(sizeof(fuser_complex_half) == 4, "");',
    )
    return "\n".join(lines)


def storage_statements() -> str:
    """Statements that convert to and from every storage type."""
    return "\n".join(
        f'static_assert(sizeof({s}) == {size} && __is_trivially_copyable({s}), "");'
        f"sink += fuser_to_compute(fuser_from_compute<{s}>(f)) + fuser_to_compute(fuser_from_compute<{s}>(d));"
        for s, size in STORAGE.values()
    )


def functor_of(statements: str) -> str:
    """Wrap statements into a function of a functor's namespace that an entry point calls."""
    return f"""
namespace fuser_f0 {{
__constant__ const float table[] = {{1.0f, 2.0f}};
template <typename T> __device__ __forceinline__ T inlined(const T* __restrict__ p) {{ return *p * (T)table[1]; }}
template <typename T> __host__ __device__ __noinline__ T apart(T x) {{ return inlined(&x); }}
template <typename T> T f(T f) {{
  double d = f, sink = 0; int i = (int)f; long long l = i; unsigned u = i; unsigned long long ul = u; long li = i;
  f += apart(f);
  uint8_t u8 = (uint8_t)i; int16_t s16 = (int16_t)i;
  (void)d; (void)l; (void)u; (void)ul; (void)u8; (void)s16; (void)li;
{statements}
  return (T)sink;
}}
}}
"""


CUDA_ENTRY = 'extern "C" __global__ void k(float* p) { *p = fuser_f0::f(*p); }\n'
CPU_ENTRY = 'extern "C" void k(float* p) { *p = fuser_f0::f(*p); }\n'
WITH_COMPLEX = "std::complex<float> c(f, f); std::complex<double> z(f, f);\n"
EVERYTHING = functor_of(
    WITH_COMPLEX
    + CORE
    + storage_statements()
    + "\n".join(MATH.values())
    + complex_statements()
    + "sink += std::abs(c + (std::complex<float>)z);"
)


def test_table_covers_every_name() -> None:
    blocks = [b for file in ("cpu_mvec.h", "cpu_math.h", "cuda_math.h", "core.h", "cpu.h") for b in load_blocks(file)]
    offered = {b.names[0] for b in blocks if b.names and not b.names[0].startswith(("fuser_", "FUSER_"))}
    # __tanhf: NVRTC 13 and later only.
    assert offered - set(MATH) <= {"fma", "modf", "fdividef", "labs", "__tanhf"}
    assert set(MATH) - {n for b in blocks for n in b.names} <= {n for n in MATH if n.startswith("__")}


@pytest.mark.cpu
def test_all_names_compile_together_on_cpu(tmp_path: Path) -> None:
    compile_cpp(EVERYTHING + CPU_ENTRY, tmp_path, ALL_FEATURES)


@pytest.mark.nvrtc
@pytest.mark.parametrize("arch", ["sm_90", *(pytest.param(name, marks=SLOW) for name in ("sm_80", "sm_100", "sm_120"))])
def test_all_names_compile_together_on_cuda(arch: str) -> None:
    compile_cuda(EVERYTHING + CUDA_ENTRY, ALL_FEATURES, arch)


def cuda_source(text: str) -> Any:
    (source,) = kernel_sources(fuser.create_jit_fn(text, handle=0).spec(1), [torch.ones(3), 0], "cuda")
    return source


@pytest.mark.nvrtc
def test_textures_are_declared_for_texts_that_read_them() -> None:
    read = "tex1Dfetch<float>(static_cast<cudaTextureObject_t>(handle), 0)"
    source = cuda_source(f"template <typename T> T looked_up(T x, int64_t handle) {{ return x + {read}; }}")
    assert backend._omissions(source) == ()
    backend.compile_cubin(source, "sm_90")


@pytest.mark.nvrtc
@pytest.mark.parametrize(
    "name", ["CUDA_R_32F", "CUuuid", "MAJOR_VERSION", "PATCH_LEVEL", "cudaError_t", "libraryPropertyType"]
)
def test_the_runtimes_types_are_declared_for_texts_that_name_them(name: str) -> None:
    source = cuda_source(f"template <typename T> T of_runtime(T x, int64_t handle) {{ return x + sizeof({name}); }}")
    backend.compile_cubin(source, "sm_90")


@pytest.mark.nvrtc
def test_machine_code_does_not_depend_on_what_nvrtc_leaves_out() -> None:
    source = cuda_source("template <typename T> T plain(T x, int64_t handle) { return tanh(x) / (x + handle); }")
    whole, _ = compile_text(source.text, backend._options("sm_90", "strict"))
    assert backend._omissions(source) == ("--minimal",)
    assert backend.compile_cubin(source, "sm_90") == whole


@pytest.mark.nvrtc
def test_old_versions_of_nvrtc_leave_nothing_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "nvrtc_version", lambda: (12, 3))
    assert backend._omissions(cuda_source("template <typename T> T plain(T x, int64_t handle) { return x; }")) == ()


@pytest.mark.cpu
def test_each_name_brings_what_it_needs_on_cpu(tmp_path: Path) -> None:
    """One file per name, all in one compiler call; checked without generating code."""
    assert CXX is not None
    for name, statements in MATH.items():
        body = functor_of(statements) + CPU_ENTRY
        (tmp_path / f"{name}.cpp").write_text(emit_cpu_prelude(identifiers(body), frozenset()) + body)
    for name in [*COMPLEX_UNARY, "abs", "arg", "proj", "polar", "pow"]:
        call = "std::pow(c, c)" if name == "pow" else "std::polar(f)" if name == "polar" else f"std::{name}(c)"
        body = functor_of(f"std::complex<float> c(f, f); c += {call};") + CPU_ENTRY
        (tmp_path / f"complex_{name}.cpp").write_text(emit_cpu_prelude(identifiers(body), frozenset()) + body)
    files = sorted(str(path) for path in tmp_path.iterdir())
    command = [CXX, *FLAGS, *NATIVE, "-fsyntax-only", *files]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("features", [frozenset({f}) for f in sorted(ALL_FEATURES)] + [frozenset()], ids=str)
@pytest.mark.parametrize(
    "device", [pytest.param("cpu", marks=pytest.mark.cpu), pytest.param("cuda", marks=pytest.mark.nvrtc)]
)
def test_each_feature_brings_what_it_needs(device: str, tmp_path: Path, features: frozenset[str]) -> None:
    used = [s for n, (s, _) in STORAGE.items() if n.partition("_")[0] in features]
    lines = [f"sink += fuser_to_compute(fuser_from_compute<{s}>(f));" for s in used]
    lines += ["sink += fuser_cast<std::complex<float>>(f).real();"] if "complex" in features else []
    body = functor_of("\n".join(lines))
    if device == "cpu":
        compile_cpp(body + CPU_ENTRY, tmp_path, features)
    else:
        compile_cuda(body + CUDA_ENTRY, features)


@pytest.mark.parametrize("emit", [emit_cpu_prelude, emit_cuda_prelude])
def test_text_is_deterministic_and_short(emit: Callable[[frozenset[str], frozenset[str]], str]) -> None:
    nothing = emit(frozenset(), frozenset())
    assert emit(frozenset(), frozenset()) is nothing
    assert "exp" not in identifiers(nothing)
    assert "fuser_half" not in nothing
    assert "struct alignas(2 * sizeof(T)) complex" not in nothing
    assert "#include" not in nothing
    assert "struct alignas(2 * sizeof(T)) complex" in emit(frozenset({"complex"}), frozenset())
    assert "using ::expf;" in emit(frozenset({"expf"}), frozenset())
    assert "using ::sin;" not in emit(frozenset({"expf"}), frozenset())


def test_float8_text_is_the_same_under_fake_tensors() -> None:
    def emit() -> str:
        _e4m3fn_overflow.cache_clear()
        return emit_cpu_prelude.__wrapped__(frozenset(), frozenset({"float8"}))

    with FakeTensorMode():
        fake = emit()
    assert fake == emit()
    assert re.search(r"^#define FUSER_E4M3FN_OVERFLOW 0x7[ef]u$", fake, re.MULTILINE)


# ---- calling compiled C++ ----


def pointer(tensor: torch.Tensor) -> ctypes.c_void_p:
    """Return the address of a contiguous tensor's data."""
    assert tensor.is_contiguous()
    return ctypes.c_void_p(tensor.data_ptr())


def loop(name: str, inputs: list[str], output: str, expression: str) -> str:
    """A vectorisable loop `name(a, b, ..., out, n)` that stores `expression` of a[i], b[i], ..."""
    letters = "abc"[: len(inputs)]
    parameters = "".join(f"const {t}* __restrict__ {c}, " for t, c in zip(inputs, letters, strict=True))
    return f"""
extern "C" void {name}({parameters}{output}* __restrict__ out, long n) {{
#pragma omp simd
  for (long i = 0; i < n; ++i) out[i] = {expression.replace("@a", "a[i]").replace("@b", "b[i]")};
}}
"""


def run(function: Any, inputs: list[torch.Tensor], output: torch.dtype) -> torch.Tensor:
    """Call such a loop on whole tensors."""
    inputs = [x.contiguous() for x in inputs]
    out = torch.empty(inputs[0].shape, dtype=output)
    function(*map(pointer, inputs), pointer(out), ctypes.c_long(out.numel()))
    return out


# ---- storage ----


def float_sample() -> torch.Tensor:
    """Floats with every exponent and sign, all upper mantissa bits, and ties and near-ties below them."""
    high = torch.arange(0, 1 << 16, dtype=torch.int64) << 16
    low = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF, 0x1000, 0x0FFF, 0x1001, 0x3000, 0x2FFF])
    bits = (high[:, None] + low[None, :]).flatten()
    return bits.to(torch.uint32).view(torch.float32)


def assert_same(actual: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    """Same bits, or NaN both."""
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[actual.element_size()]
    same = actual.view(integer) == expected.view(integer)
    both = actual.double().isnan() & expected.double().isnan()
    wrong = (~(same | both)).nonzero()
    assert len(wrong) == 0, (
        f"{what}: {len(wrong)} differ, first at {wrong[0]}: {actual[tuple(wrong[0])]} != {expected[tuple(wrong[0])]}"
    )


@pytest.mark.cpu
@pytest.mark.parametrize("flags", [NATIVE, ("-march=x86-64",)], ids=["native", "integer code"])
def test_small_floats_convert_as_in_torch(tmp_path: Path, flags: tuple[str, ...]) -> None:
    if flags != NATIVE and platform.machine() != "x86_64":
        pytest.skip("-march=x86-64 on another architecture")
    body = "".join(
        loop(f"encode_{n}", ["float"], s, f"fuser_from_compute<{s}>(@a)")
        + loop(f"decode_{n}", [s], "float", "fuser_to_compute(@a)")
        for n, (s, _) in STORAGE.items()
    )
    library, _ = compile_cpp(body, tmp_path, ALL_FEATURES, *flags)
    sample = float_sample()
    for n, (_, size) in STORAGE.items():
        dtype = getattr(torch, n)
        codes = torch.arange(1 << (8 * size)).to(torch.uint8 if size == 1 else torch.uint16).view(dtype)
        assert_same(run(getattr(library, f"decode_{n}"), [codes], torch.float32), codes.float(), f"{n} to float")
        assert_same(run(getattr(library, f"encode_{n}"), [sample], dtype), sample.to(dtype), f"float to {n}")


@pytest.mark.cpu
def test_half_and_bfloat16_conversions_vectorise(tmp_path: Path) -> None:
    body = "".join(
        loop(f"k_{s}", [s], s, f"fuser_from_compute<{s}>(fuser_to_compute(@a) + 1.0f)")
        for s in ("fuser_half", "fuser_bfloat16")
    )
    _, said = compile_cpp(body, tmp_path, ALL_FEATURES, *NATIVE, "-fopt-info-vec-optimized")
    lines = {int(m[1]) for m in re.finditer(r"^body:(\d+):\d+: optimized: loop vectorized", said, re.MULTILINE)}
    assert len(lines) == 2, said


@pytest.mark.cpu
def test_casts(tmp_path: Path) -> None:
    """Floating point to integer is torch's conversion inside the range, and does not depend on the position outside."""
    types = {
        "int8_t": torch.int8,
        "uint8_t": torch.uint8,
        "int16_t": torch.int16,
        "int32_t": torch.int32,
        "bool": torch.bool,
    }
    types |= {"uint16_t": torch.uint16, "uint32_t": torch.uint32, "int64_t": torch.int64, "uint64_t": torch.uint64}
    body = "".join(loop(f"to_{t}", ["float"], t, f"fuser_cast<{t}>(@a)") for t in types)
    library, _ = compile_cpp(body, tmp_path)
    wild = torch.tensor(
        [0.5, -0.5, 1.0, 3e9, -3e9, 1e19, 1.5e19, -1e19, 300.0, -1.0, 1e38, float("inf"), float("nan"), -7.9]
    )
    for t, dtype in types.items():
        call = getattr(library, f"to_{t}")
        if dtype is torch.bool:
            inside = torch.tensor([0.0, -0.0, 0.5, -2.0, float("nan")])
            assert run(call, [inside], dtype).tolist() == [False, False, True, True, True]
        else:
            inside = torch.linspace(float(torch.iinfo(dtype).min), float(torch.iinfo(dtype).max) * 0.99, 101)
            assert run(call, [inside], dtype).tolist() == [int(x) for x in inside.tolist()]
        whole = run(call, [wild.repeat(5)], dtype)
        alone = torch.cat([run(call, [wild[i : i + 1]], dtype) for i in range(len(wild))])
        assert whole.tolist() == alone.repeat(5).tolist()
    negative = torch.tensor([-1.0, -200.0])
    assert run(library.to_uint8_t, [negative], torch.uint8).tolist() == negative.to(torch.uint8).tolist() == [255, 56]


# ---- determinism and accuracy of the math functions on CPU ----

X86 = {
    "native": NATIVE,
    "avx2": ("-mavx2", "-mfma", "-mf16c"),
    "avx": ("-mavx",),
    "sse2": ("-march=x86-64",),
}
# Kernels are compiled for the machine they run on.
ISAS = ["native", *(pytest.param(name, marks=SLOW) for name in X86 if name != "native")]
# config.cpu_math, and the features it turns on.
MATH_KINDS: dict[str, frozenset[str]] = {"fast": frozenset(), "precise": frozenset({"precise"})}
CALLS = (
    {n: f"{n}(@a)" for n in UNARY}
    | {n: f"{n}(@a, @b)" for n in BINARY}
    | {n: f"(T){n}(@a)" for n in (*TO_INTEGER, *CLASSIFY)}
    | {
        "fma": "fma(@a, @b, @a)",
        "max": "max(@a, @b)",
        "min": "min(@a, @b)",
        "ldexp": "ldexp(@a, (int)fmin(fmax(@b, -50), 50))",
    }
    # Constants in a short loop, which the compiler may unroll and fold.
    | {
        f"{n}_of_constants": f"({{ T s = @a; for (int k = 1; k < 5; ++k) s = s * (T)0.5 + {n}(k * (T)0.1875); s; }})"
        for n in ("acos", "tan", "erf", "log", "exp")
    }
    | {"norm3d": "norm3d(@a, @b, @a)", "chain": "tanh(1 / (1 + exp(-@a))) * log1p(fabs(@b))"}
)


def can_run(flags: tuple[str, ...]) -> bool:
    """Whether this machine runs code compiled with these flags."""
    if flags == NATIVE:
        return True
    if platform.machine() != "x86_64":
        return False
    have = set(re.findall(r"\w+", Path("/proc/cpuinfo").read_text(encoding="utf-8")))
    return all(flag.removeprefix("-m") in have for flag in flags if not flag.startswith("-march"))


def odd_loop(name: str, real: str, expression: str) -> str:
    """The same loop with a data-dependent one inside, which nothing vectorises."""
    return f"""
extern "C" void {name}(const {real}* __restrict__ a, const {real}* __restrict__ b, {real}* __restrict__ out, long n) {{
  for (long i = 0; i < n; ++i) {{
    {real} result = {expression.replace("@a", "a[i]").replace("@b", "b[i]")};
    unsigned steps = i + 1;
    while (steps > 1) steps = steps % 2 ? 3 * steps + 1 : steps / 2;
    out[i] = steps == 1 ? result : 0;
  }}
}}
"""


def arguments(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """67 pairs of numbers: special ones, huge, tiny, and ordinary."""
    info = torch.finfo(dtype)
    special = [0.0, -0.0, 1.0, -1.0, 0.5, 2.0, -3.0, float("inf"), float("-inf"), float("nan"), info.max, info.tiny]
    special += [info.tiny / 8, -info.tiny / 8, 88.0, -104.0, 710.0, -746.0, 1e5, -2e6, 0.999999, 1.000001, 1e-4, -1e-20]
    a = torch.cat(
        [torch.tensor(special, dtype=torch.float64), torch.linspace(-4.3, 6.1, 67 - len(special), dtype=torch.float64)]
    )
    generator = torch.Generator().manual_seed(7)
    b = torch.randn(67, dtype=torch.float64, generator=generator) * 3
    b[::9] = torch.tensor([0.0, float("nan"), float("inf"), 1.0, 2.0, -1.0, 0.5, -0.0], dtype=torch.float64)
    return a.to(dtype), b.to(dtype)


@pytest.mark.cpu
@pytest.mark.parametrize("math", ["fast", pytest.param("precise", marks=SLOW)])
@pytest.mark.parametrize("isa", ISAS)
def test_a_value_does_not_depend_on_its_position(tmp_path: Path, isa: str, math: str) -> None:
    """At every position of loops of many lengths, vectorised or not: the same bits."""
    if not can_run(X86[isa]):
        pytest.skip(f"this CPU does not run code for {isa}")
    bodies = ["#define T float\n"]
    for suffix, real in (("_f", "float"), ("_d", "double")):
        bodies.append(f"#undef T\n#define T {real}\n")
        for n, call in CALLS.items():
            bodies += [loop(f"vector_{n}{suffix}", [real, real], real, call), odd_loop(f"odd_{n}{suffix}", real, call)]
    library, said = compile_cpp("".join(bodies), tmp_path, MATH_KINDS[math], *X86[isa], "-fopt-info-vec-optimized")
    if platform.machine() == "x86_64" and CXX is not None and "clang" not in CXX:
        assert said.count("loop vectorized") >= 2 * 60, "hardly anything was vectorised: the test compares nothing"
    for dtype, suffix in ((torch.float32, "_f"), (torch.float64, "_d")):
        a, b = arguments(dtype)
        for n in CALLS:
            vector, odd = getattr(library, f"vector_{n}{suffix}"), getattr(library, f"odd_{n}{suffix}")
            alone = torch.cat([run(vector, [a[i : i + 1], b[i : i + 1]], dtype) for i in range(67)])
            assert_same(run(odd, [a, b], dtype), alone, f"{n}{suffix}, not vectorised")
            # Around the widths of vectors, whole ones and what is left.
            for length in (*range(1, 20), *range(31, 36), *range(63, 68)):
                turned = [x.roll(length)[:length] for x in (a, b)]
                assert_same(run(vector, turned, dtype), alone.roll(length)[:length], f"{n}{suffix}, length {length}")


@pytest.mark.cpu
@pytest.mark.parametrize("math", ["precise", pytest.param("fast", marks=SLOW)])
@pytest.mark.parametrize("isa", ISAS)
def test_a_constant_argument_changes_no_bit(tmp_path: Path, isa: str, math: str) -> None:
    """The compiler simplifies calls whose arguments it knows, as in an unrolled loop: to what the call gives.

    With fast math, which is up to 4 ULP off, some of these become what is exact.
    """
    if not can_run(X86[isa]):
        pytest.skip(f"this CPU does not run code for {isa}")
    numbers = [0.0, -0.0, 1.0, -1.0, 2.0, 3.0, 4.0, 0.5, 0.25, -2.0, -3.0, 8.0, 10.0, 27.0, 64.0, 100.0, 125.0, 1000.0]
    pairs = [(3.0, 4.0), (5.0, 12.0), (2.0, 10.0), (1.5, 3.0), (4.0, 0.5), (10.0, 5.0), (2.0, -3.0), (0.0, 3.0)]
    # gcc has replacements for these, whatever the first argument; for one only in vectorised loops.
    second = {f"pow_{i}": ("pow", x) for i, x in enumerate((0.0, 1.0, 2.0, -1.0, -2.0, 0.5, -0.5, 3.0, 1.5, 0.25))}
    second |= {"hypot_0": ("hypot", 0.0), "atan2_0": ("atan2", 0.0)}
    calls = {n: f"{n}(@a, @b)" if n in BINARY else f"{n}(@a)" for n in (*UNARY, *BINARY)}
    for real, dtype in (("float", torch.float32), ("double", torch.float64)):
        folder = tmp_path / real
        folder.mkdir()
        parts = [f"#define T {real}\n"]
        arguments = {n: torch.tensor(pairs if n in BINARY else [(x,) for x in numbers], dtype=dtype) for n in calls}
        for n, call in calls.items():
            parts.append(loop(f"computed_{n}", [real] * arguments[n].shape[1], real, call))
            known = [", ".join(f"(T){x!r}" for x in values) for values in arguments[n].tolist()]
            stores = " ".join(f"out[{i}] = {n}({values});" for i, values in enumerate(known))
            parts.append(f'extern "C" void folded_{n}(T* out) {{ {stores} }}\n')
        parts += [loop(key, [real], real, f"{n}(@a, (T){x!r})") for key, (n, x) in second.items()]
        library, _ = compile_cpp("".join(parts), folder, MATH_KINDS[math], *X86[isa])
        for n in calls:
            folded = torch.empty(len(arguments[n]), dtype=dtype)
            getattr(library, f"folded_{n}")(pointer(folded))
            computed = run(getattr(library, f"computed_{n}"), list(arguments[n].unbind(1)), dtype)
            if math == "fast":
                assert int(distance(folded, computed).max()) <= 4, f"{n} in {real} of {arguments[n].tolist()}"
            else:
                assert_same(folded, computed, f"{n} in {real} of {arguments[n].tolist()}")
        first = torch.rand(37, dtype=dtype, generator=torch.Generator().manual_seed(1)) * 9
        for key, (n, x) in second.items():
            computed = run(getattr(library, f"computed_{n}"), [first, torch.full_like(first, x)], dtype)
            assert_same(run(getattr(library, key), [first], dtype), computed, f"{n} in {real} with {x}")


# Domain of a random sample, and torch's function in float64.
REFERENCES: dict[str, tuple[float, float, Callable[..., torch.Tensor]]] = {
    "acos": (-1, 1, torch.acos),
    "acosh": (1, 50, torch.acosh),
    "asin": (-1, 1, torch.asin),
    "asinh": (-50, 50, torch.asinh),
    "atan": (-50, 50, torch.atan),
    "atanh": (-1, 1, torch.atanh),
    "cbrt": (0, 1e6, lambda x: x.pow(1 / 3)),
    "ceil": (-9, 9, torch.ceil),
    "cos": (-100, 100, torch.cos),
    "cosh": (-80, 80, torch.cosh),
    "cospi": (-0.45, 0.45, lambda x: torch.cos(torch.pi * x)),
    "cyl_bessel_i0": (-80, 80, torch.special.i0),
    "cyl_bessel_i1": (-80, 80, torch.special.i1),
    "erf": (-4, 4, torch.erf),
    "erfc": (-4, 9, torch.erfc),
    "erfcinv": (1e-4, 0.9, lambda y: -torch.special.ndtri(y / 2) / 2**0.5),
    "erfcx": (-5, 100, torch.special.erfcx),
    "erfinv": (-0.99, 0.99, torch.erfinv),
    "exp": (-87, 88, torch.exp),
    "exp10": (-37, 38, lambda x: 10.0**x),
    "exp2": (-126, 127, torch.exp2),
    "expm1": (-20, 80, torch.expm1),
    "floor": (-9, 9, torch.floor),
    "j0": (0, 2, torch.special.bessel_j0),
    "j1": (0, 3, torch.special.bessel_j1),
    "lgamma": (3, 50, torch.lgamma),
    "log": (0, 1e6, torch.log),
    "log10": (0, 1e6, torch.log10),
    "log1p": (-1, 1e3, torch.log1p),
    "log2": (0, 1e6, torch.log2),
    "normcdf": (-12, 5, lambda x: torch.erfc(-x / 2**0.5) / 2),
    "normcdfinv": (1e-4, 0.45, torch.special.ndtri),
    "rint": (-9, 9, torch.round),
    "rsqrt": (0, 1e6, torch.rsqrt),
    "sin": (-100, 100, torch.sin),
    "sinh": (-80, 80, torch.sinh),
    "sinpi": (-0.55, 0.55, lambda x: torch.sin(torch.pi * x)),
    "sqrt": (0, 1e6, torch.sqrt),
    "tan": (-100, 100, torch.tan),
    "tanh": (-8, 8, torch.tanh),
    "tgamma": (1, 20, lambda x: torch.lgamma(x).exp()),
    "trunc": (-9, 9, torch.trunc),
    "y0": (1, 2.5, torch.special.bessel_y0),
    "y1": (0.1, 1.9, torch.special.bessel_y1),
    "atan2": (-50, 50, torch.atan2),
    "hypot": (-50, 50, torch.hypot),
    "pow": (0, 20, torch.pow),
    "fmod": (-50, 50, torch.fmod),
}


def ulps(actual: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """Distance of float32 values from float64 ones, in units of the last place of the exact ones."""
    unit = torch.exp2(torch.floor(torch.log2(exact.abs())).clamp(min=-126) - 23)
    return ((actual.double() - exact).abs() / unit).nan_to_num(nan=0.0)


@pytest.mark.cpu
def test_float_functions_are_within_four_ulp(tmp_path: Path) -> None:
    body = "".join(loop(f"k_{n}", ["float", "float"], "float", CALLS[n]) for n in REFERENCES)
    library, _ = compile_cpp(body, tmp_path)
    generator = torch.Generator().manual_seed(3)
    measured = {}
    for n, (low, high, reference) in REFERENCES.items():
        a, b = (torch.rand(100_001, generator=generator) * (high - low) + low for _ in range(2))
        a[:200] = a[:200] * 1e-3 if low <= 0 < high else a[:200]
        exact = reference(a.double(), b.double()) if n in BINARY else reference(a.double())
        inside = exact.abs() < torch.finfo(torch.float32).max
        measured[n] = float(ulps(run(getattr(library, f"k_{n}"), [a, b], torch.float32), exact)[inside].max())
    # glibc's own; those of libmvec have no exception.
    limits = {"j1": 8.0, "tgamma": 6.0, "y1": 10.0}
    assert {n: u for n, u in measured.items() if u > limits.get(n, 4.0)} == {}


@pytest.mark.cpu
def test_double_functions_agree_with_torch(tmp_path: Path) -> None:
    """To 1e-13 relative, which catches a wrong coefficient; torch's own values are no better in places."""
    body = "".join(loop(f"k_{n}", ["double", "double"], "double", CALLS[n]) for n in REFERENCES)
    library, _ = compile_cpp(body, tmp_path)
    generator = torch.Generator().manual_seed(4)
    measured = {}
    for n, (low, high, reference) in REFERENCES.items():
        a, b = (torch.rand(10_001, generator=generator, dtype=torch.float64) * (high - low) + low for _ in range(2))
        exact = reference(a, b) if n in BINARY else reference(a)
        got = run(getattr(library, f"k_{n}"), [a, b], torch.float64)
        assert bool(exact.isfinite().all())
        measured[n] = float(((got - exact).abs() / exact.abs().clamp(min=1e-290)).nan_to_num(nan=1.0).max())
    # torch's Bessel functions are the less exact ones.
    limits = dict.fromkeys(("j0", "j1", "y0", "y1"), 1e-10)
    assert {n: r for n, r in measured.items() if r > limits.get(n, 1e-13)} == {}


INF, NAN = float("inf"), float("nan")
SPECIAL = {
    "exp(@a)": {INF: INF, -INF: 0.0, -0.0: 1.0, 89.0: INF},
    "log(@a)": {0.0: -INF, -1.0: NAN, INF: INF},
    "tanh(@a)": {INF: 1.0, -INF: -1.0, -0.0: -0.0},
    "pow(@a, 2)": {-3.0: 9.0, INF: INF, -0.0: 0.0},
    "pow(@a, 3.0)": {-2.0: -8.0, -0.0: -0.0},
    "fmax(@a, 1.0)": {NAN: 1.0, -INF: 1.0, 3.0: 3.0},
    "fmin(1, @a)": {NAN: 1.0, -INF: -INF},
    "max(@a, 1)": {NAN: 1.0, 3.0: 3.0},
    "min(1.0f, @a)": {NAN: 1.0, -2.0: -2.0},
    "std::max(@a, 1.0f)": {NAN: NAN, 3.0: 3.0},
    "std::clamp(@a, -1.0f, 1.0f)": {3.0: 1.0, -INF: -1.0, 0.5: 0.5, NAN: NAN},
    "round(@a)": {0.5: 1.0, -0.5: -1.0, 0.49999997: 0.0, 2.5: 3.0, 8388609.0: 8388609.0},
    "rint(@a)": {0.5: 0.0, 1.5: 2.0, -0.5: -0.0},
    "nearbyint(@a)": {2.5: 2.0},
    "fdim(@a, 1)": {3.0: 2.0, -3.0: 0.0, NAN: NAN},
    "copysign(1.0f, @a)": {-0.0: -1.0, 3.0: 1.0},
    "abs(@a)": {-0.0: 0.0, -2.5: 2.5},
    "signbit(@a)": {-0.0: 1.0, 3.0: 0.0, -INF: 1.0},
    "isnan(@a) + 2 * isinf(@a) + 4 * isfinite(@a)": {NAN: 1.0, INF: 2.0, -INF: 2.0, 1.0: 4.0},
    "sinpi(@a)": {1.0: 0.0, 0.5: 1.0, 1.5: -1.0, 1e9: 0.0, 3e38: 0.0, INF: NAN, -2.25: -(0.5**0.5)},
    "cospi(@a)": {1.0: -1.0, 0.5: 0.0, 2.0: 1.0, -3e38: 1.0, -INF: NAN, 0.75: -(0.5**0.5)},
    "erfinv(@a)": {1.0: INF, -1.0: -INF, 0.0: 0.0, 2.0: NAN},
    "erfcinv(@a)": {0.0: INF, 2.0: -INF, 1.0: 0.0, -1.0: NAN},
    "normcdfinv(@a)": {0.0: -INF, 1.0: INF, 0.5: 0.0},
    "normcdf(@a)": {-INF: 0.0, INF: 1.0, 0.0: 0.5, NAN: NAN},
    "erfcx(@a)": {-INF: INF, INF: 0.0, 0.0: 1.0, NAN: NAN},
    "erfcx((double)@a)": {-26.62: INF, -26.65: INF, -26.69: INF, -26.71: INF, NAN: NAN},
    "cyl_bessel_i0(@a)": {0.0: 1.0, INF: INF, -INF: INF, NAN: NAN},
    "cyl_bessel_i1(@a)": {0.0: 0.0, -INF: -INF, NAN: NAN},
    "rsqrt(@a)": {4.0: 0.5, 0.0: INF},
    "rcbrt(@a)": {8.0: 0.5},
    "rhypot(@a, 4)": {3.0: 0.2},
    "norm3d(@a, 3.0f, 6.0f)": {2.0: 7.0},
    "__saturatef(@a)": {NAN: 0.0, 2.0: 1.0, -1.0: 0.0, 0.25: 0.25},
    "lrint(@a) + llround(@a)": {2.5: 5.0},
    "ilogb(@a)": {8.0: 3.0, 0.3: -2.0},
    "ldexp(@a, 3)": {1.5: 12.0},
    "__float2int_rn(@a)": {2.5: 2.0, NAN: 0.0, 3e9: 2147483648.0, -3e9: -2147483648.0, -INF: -2147483648.0},
    "__float2uint_rz(@a)": {2.5: 2.0, NAN: 0.0, 5e9: 4294967296.0, -3.0: 0.0},
    "__byte_perm((unsigned)@a, 0x01020304u, 0x5430u)": {171.0: float(0x030400AB)},
    "__funnelshift_l((unsigned)@a, 0x80000001u, 33)": {5.0: 2.0},
    "__clz((int)@a) + 100 * __ffs((int)@a) + 10000 * __popc((unsigned)@a)": {0.0: 32.0, 12.0: 28.0 + 300 + 20000},
    "__brev((unsigned)@a) / 65536.0": {1.0: 32768.0, 3.0: 49152.0},
    "__umulhi((unsigned)@a, 0x80000000u)": {5.0: 2.0},
    "__mulhi((int)@a, 0x40000000)": {-4.0: -1.0, 9.0: 2.0},
    "__int_as_float(__float_as_int(@a) ^ 0x80000000)": {1.5: -1.5},
    "__longlong_as_double(__double_as_longlong(@a) + (1LL << 52))": {1.5: 3.0},
    "({ float w, r = modf(@a, &w); 100 * w + r; })": {-2.5: -200.5, 3.0: 300.0},
    "({ int e; float m = frexp(@a, &e); e * 10 + m; })": {6.0: 30.75},
    "({ float s, c; sincosf(@a, &s, &c); s + 2 * c; })": {0.0: 2.0},
}


@pytest.mark.cpu
def test_special_values(tmp_path: Path) -> None:
    body = "".join(loop(f"k_{i}", ["float"], "float", call) for i, call in enumerate(SPECIAL))
    library, _ = compile_cpp(body, tmp_path)
    for i, (call, table) in enumerate(SPECIAL.items()):
        # Sixteen copies fill a vector; the last is the scalar tail.
        for argument, wanted in table.items():
            got = run(getattr(library, f"k_{i}"), [torch.full((17,), argument)], torch.float32)
            expected = torch.full((17,), wanted)
            same_sign = wanted != 0 or torch.equal(got.signbit(), expected.signbit())
            assert same_sign, (call, argument, got)
            assert torch.allclose(got, expected, rtol=3e-7, atol=0, equal_nan=True), (call, argument, got)


# Domains in which libm's functions for long double have a result in double.
PRECISE = {
    "acos": (-1, 1), "acosh": (1, 50), "asin": (-1, 1), "asinh": (-50, 50), "atan": (-50, 50), "atanh": (-1, 1),
    "cbrt": (-1e6, 1e6), "cos": (-100, 100), "cosh": (-80, 80), "erf": (-4, 4), "erfc": (-4, 9), "exp": (-87, 88),
    "exp10": (-37, 38), "exp2": (-126, 127), "expm1": (-20, 80), "lgamma": (3, 50), "log": (0, 1e6), "log10": (0, 1e6),
    "log1p": (-1, 1e3), "log2": (0, 1e6), "sin": (-100, 100), "sinh": (-80, 80), "tan": (-100, 100), "tanh": (-8, 8),
    "tgamma": (1, 20), "atan2": (-50, 50), "hypot": (-50, 50), "pow": (0.1, 20),
}  # fmt: skip


@pytest.mark.cpu
@pytest.mark.parametrize(("real", "dtype", "digits"), [("float", torch.float32, 24), ("double", torch.float64, 53)])
def test_precise_functions_are_within_one_ulp(tmp_path: Path, real: str, dtype: torch.dtype, digits: int) -> None:
    """Measured in units of the last place against libm's long double; float's are the nearest but for rare ties."""
    if ctypes.sizeof(ctypes.c_longdouble) <= 8:
        pytest.skip("long double is double here")
    parts = ['extern "C" long double ldexpl(long double, int); extern "C" int ilogbl(long double);\n']
    for n in PRECISE:
        types, places = ("long double, long double", "@a, @b") if n in BINARY else ("long double", "@a")
        parts.append(f'namespace exact {{ extern "C" long double {n}l({types}); }}\n')
        parts.append(f"""
static double distance_{n}({real} a, {real} b) {{
  const long double got = {CALLS[n].replace("@", "")}, wanted = exact::{n}l({places.replace("@", "")});
  return (double)((got - wanted) / ldexpl(1, ilogbl(wanted) - {digits - 1}));
}}
""")
        parts.append(loop(f"k_{n}", [real, real], "double", f"distance_{n}(@a, @b)"))
    library, _ = compile_cpp("".join(parts), tmp_path, MATH_KINDS["precise"])
    generator = torch.Generator().manual_seed(5)
    measured = {}
    for n, (low, high) in PRECISE.items():
        a, b = (torch.rand(50_001, generator=generator, dtype=dtype) * (high - low) + low for _ in range(2))
        a[:20_000] = a[:20_000] * 1e-2 if low <= 0 < high else a[:20_000]
        distances = run(getattr(library, f"k_{n}"), [a, b], torch.float64)
        measured[n] = float(distances.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0).abs().max())
    limit = 0.5001 if dtype is torch.float32 else 1.0
    assert {n: u for n, u in measured.items() if u > limit} == {}


@pytest.mark.cpu
def test_libmvec_is_used_where_it_exists(tmp_path: Path) -> None:
    assert CXX is not None
    if not has_vector_form("exp") or "clang" in CXX:
        pytest.skip("no libmvec, or a compiler that does not use it")
    calls = ["tanh(1 / (1 + exp(-@a)))", "exp(@a) + fmod(@a, 2.0f)", "round(@a) + sin(@a) * cos(@a)"]
    calls.append("@a > 0.04f ? pow((@a + 0.055f) / 1.055f, 2.4f) : @a / 12.92f")
    body = "".join(loop(f"k_{i}", ["float"], "float", call) for i, call in enumerate(calls))
    # In branches gcc vectorises builtins only, which the precise functions are not.
    for features, wanted in ((MATH_KINDS["fast"], len(calls)), (MATH_KINDS["precise"], len(calls) - 1)):
        _, said = compile_cpp(body, tmp_path, features, *NATIVE, "-fopt-info-vec-optimized")
        lines = set(re.findall(r"^body:(\d+):\d+: optimized: loop vectorized", said, re.MULTILINE))
        assert len(lines) == wanted, said


def test_libm_replaces_what_libmvec_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with glibc before 2.35: tanh becomes libm's."""
    from fuser.cpu import prelude

    monkeypatch.setattr(
        prelude, "has_vector_form", lambda name, arguments=1: name in {"exp", "log", "sin", "cos", "pow"}
    )
    monkeypatch.setattr(prelude, "_load_all", prelude._load_all.__wrapped__)
    text = prelude.emit_prelude.__wrapped__(frozenset({"exp", "tanh", "atan2"}), frozenset())
    lines = text.splitlines()
    assert {"FUSER_LIBM_1(tanh)", "FUSER_LIBM_2(atan2)"} <= set(lines)
    assert "FUSER_MVEC_EXP_1(exp)" in lines
    assert "FUSER_MVEC_1(tanh)" not in lines
    text = prelude.emit_prelude.__wrapped__(frozenset({"exp", "tanh", "atan2"}), frozenset({"precise"}))
    lines = text.splitlines()
    assert {"FUSER_PRECISE_MVEC_1(exp)", "FUSER_PRECISE_SAME_1(tanh)", "FUSER_PRECISE_SAME_2(atan2)"} <= set(lines)


# ---- complex ----


def complex_sample() -> torch.Tensor:
    """Ordinary, large, small and near-singular complex numbers."""
    generator = torch.Generator().manual_seed(5)
    parts = [torch.randn(2000, 2, dtype=torch.float64, generator=generator) * scale for scale in (1.0, 1e-3, 6.0, 1e-9)]
    unit = torch.polar(
        torch.ones(500, dtype=torch.float64), torch.rand(500, dtype=torch.float64, generator=generator) * 6.28
    )
    parts.append(torch.view_as_real(unit))
    parts.append(
        torch.tensor([[x, y] for x in (0.0, 1.0, -1.0, 0.5, 3.0, -2.0) for y in (0.25, -0.0, 0.0, -3.0, 1e-5)]).double()
    )
    return torch.view_as_complex(torch.cat(parts).contiguous())


@pytest.mark.cpu
def test_complex_functions_are_close_to_complex128(tmp_path: Path) -> None:
    """complex64 within 8 units of the last place of |result| of torch's complex128 result; complex128 to 1e-13."""
    names = [*COMPLEX_UNARY, "conj", "proj"]
    types = {"c": "std::complex<float>", "z": "std::complex<double>"}
    body = "".join(loop(f"{n}_{k}", [t], t, f"std::{n}(@a)") for n in names for k, t in types.items())
    body += "".join(
        loop(f"{op}_{k}", [t, t], t, e) for op, e in (("mul", "@a * @b"), ("div", "@a / @b")) for k, t in types.items()
    )
    body += "".join(
        loop(f"abs_{k}", [t], r, "std::abs(@a)") for (k, t), r in zip(types.items(), ("float", "double"), strict=True)
    )
    library, _ = compile_cpp(body, tmp_path, frozenset({"complex"}))
    sample = complex_sample().to(torch.complex64)
    wide = sample.to(torch.complex128)
    reference: dict[str, Callable[..., torch.Tensor]] = {n: getattr(torch, n) for n in COMPLEX_UNARY}
    reference |= {"conj": torch.conj_physical, "proj": lambda z: z}
    far = {}
    for n in names:
        exact = reference[n](wide)
        ok = exact.abs().isfinite()
        for k, x, eps, limit in (("c", sample, 2**-23, 8.0), ("z", wide, 2**-52, 450.0)):
            got = run(getattr(library, f"{n}_{k}"), [x], x.dtype).to(torch.complex128)
            distance = float(((got - exact).abs() / (exact.abs() * eps).clamp(min=1e-300))[ok].max())
            if not distance <= limit:
                far[f"{n}_{k}"] = distance
    assert far == {}
    a, b = sample, sample.roll(17) + 1
    for op, f in (("mul", torch.mul), ("div", torch.div)):
        exact = f(a.to(torch.complex128), b.to(torch.complex128))
        got = run(getattr(library, f"{op}_c"), [a, b], torch.complex64).to(torch.complex128)
        ok = exact.abs().isfinite() & (exact.abs() > 0)
        assert float(((got - exact).abs() / exact.abs())[ok].max()) < 4 * 2**-23
    assert float(ulps(run(library.abs_c, [sample], torch.float32), wide.abs()).max()) < 4


@pytest.mark.cpu
def test_complex_special_values(tmp_path: Path) -> None:
    """Infinities, zeros and branch cuts, against Python's cmath (C99 Annex G)."""
    import cmath

    names = "exp log sqrt sin cos tan asin acos atan sinh cosh tanh asinh acosh atanh".split()
    body = "".join(loop(f"{n}_z", ["std::complex<double>"] * 1, "std::complex<double>", f"std::{n}(@a)") for n in names)
    library, _ = compile_cpp(body, tmp_path, frozenset({"complex"}))
    points = [
        complex(x, y)
        for x in (0.0, -0.0, 2.0, -2.0, INF, -INF, 1e200, -1e-200)
        for y in (0.0, -0.0, 1.0, -1e200, INF, -INF)
    ]
    wrong = []
    for n in names:
        x = torch.tensor(points, dtype=torch.complex128)
        got = run(getattr(library, f"{n}_z"), [x], torch.complex128).tolist()
        for point, value in zip(points, got, strict=True):
            try:
                exact = getattr(cmath, n)(point)
            except (ValueError, OverflowError):
                continue
            close = all(
                a == b or abs(a - b) <= 1e-13 * max(abs(b), 1e-300) or (a != a and b != b)
                for a, b in ((value.real, exact.real), (value.imag, exact.imag))
            )
            if not close:
                wrong.append((n, point, value, exact))
    assert wrong == []
