"""The CPU dialect's prelude: the CUDA names in C++ for g++ and clang++, on libm and, where there is one, libmvec."""

import ctypes
import re
from dataclasses import replace
from functools import cache

from fuser.prelude import PreludeBlock, emit_selected, load_blocks
from fuser.process import is_of_signal_handler

__all__ = ["emit_prelude", "has_vector_form"]

_FILES = (
    "cpu.h", "core.h", "limits.h", "cpu_mvec.h", "cpu_precise.h", "cpu_math.h", "storage.h", "complex.h", "cpu_loop.h",
)  # fmt: skip
_VECTOR_CALL = re.compile(r"FUSER_MVEC_(?:APART_|ERF_|EXP_|POW_)?([12])\((\w+)\)")
_LIBM_CALL = re.compile(r"FUSER_LIBM_([12])\((\w+)\)")
# Functions whose double version in libm is more than one unit in the last place off (measured, glibc 2.36).
_COARSE_IN_LIBM = frozenset(
    "acosh asinh atanh cbrt cosh erf erfc exp10 j0 j1 lgamma log10 sinh tanh tgamma y0 y1".split()
)
_EXACT_IN_LIBM = frozenset({"fmod", "logb", "nextafter", "remainder"})


@cache
def emit_prelude(names: frozenset[str], features: frozenset[str]) -> str:
    """Return the C++ text to put before the functors.

    Args:
        names: every identifier of the functor texts; only what they mention is declared.
        features: which storage types are used, out of "half", "bfloat16", "float8" and "complex"; "precise" for math
            functions that are right to one unit in the last place; "tiles" for loops that are not linear.

    Sample, for `names` with "exp": `FUSER_MVEC_EXP_1(exp)` after that macro's definition, and `using ::exp;` in
    `namespace std`.
    """
    return emit_selected(_load_all(is_precise="precise" in features), names, features)


@cache
def _load_all(*, is_precise: bool) -> tuple[PreludeBlock, ...]:
    choose = _precise if is_precise else _on_this_machine
    return tuple(choose(block) for file in _FILES for block in load_blocks(file))


@cache
def has_vector_form(name: str, arguments: int = 1) -> bool:
    """Whether this machine's libmvec has the function, for float and double (`name` is the double's: "exp").

    Asked for SSE: the C library brings all widths of a function at once. False where there is no libmvec.
    """
    library = _libmvec()
    return library is not None and all(
        hasattr(library, f"_ZGVbN{lanes}{'v' * arguments}_{name}{suffix}") for lanes, suffix in ((4, "f"), (2, ""))
    )


@cache
def _libmvec() -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL("libmvec.so.1")
    except OSError as error:
        if is_of_signal_handler(error):
            raise
        return None


def _on_this_machine(block: PreludeBlock) -> PreludeBlock:
    match = _VECTOR_CALL.fullmatch(block.text)
    if match is None or has_vector_form(match[2], int(match[1])):
        return block
    return _of_macros(block, match[2], [f"FUSER_LIBM_{match[1]}"])


def _precise(block: PreludeBlock) -> PreludeBlock:
    match = _VECTOR_CALL.fullmatch(block.text) or _LIBM_CALL.fullmatch(block.text)
    if match is None or match[2] in _EXACT_IN_LIBM:
        return block
    arguments, name = match.groups()
    scalar = "LONG" if name in _COARSE_IN_LIBM else "LIBM"
    vector = "MVEC" if has_vector_form(name, int(arguments)) else "SAME"
    return _of_macros(block, name, [f"FUSER_PRECISE_{kind}{arguments}" for kind in (f"{scalar}_", f"{vector}_", "")])


def _of_macros(block: PreludeBlock, name: str, macros: list[str]) -> PreludeBlock:
    text = "\n".join(f"{macro}({name})" for macro in macros)
    return replace(block, text=text)
