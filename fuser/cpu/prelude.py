"""The CPU dialect's prelude: the CUDA names in C++ for g++ and clang++, on libm and, where there is one, libmvec."""

import ctypes
import re
from dataclasses import replace
from functools import cache

from fuser.prelude import Block, emit_selected, load_blocks

__all__ = ["emit_prelude", "has_vector_form"]

_FILES = ("cpu.h", "core.h", "cpu_math.h", "storage.h", "complex.h")
_VECTOR_CALL = re.compile(r"FUSER_MVEC_(?:APART_|POW_)?([12])\((\w+)\)")


@cache
def emit_prelude(names: frozenset[str], features: frozenset[str]) -> str:
    """Return the C++ text to put before the functors.

    Args:
        names: every identifier of the functor texts; only what they mention is declared.
        features: which storage types are used, out of "half", "bfloat16", "float8" and "complex".

    Sample, for `names` with "exp": `FUSER_MVEC_1(exp)` after that macro's definition, and `using ::exp;` in
    `namespace std`.
    """
    return emit_selected([_on_this_machine(b) for file in _FILES for b in load_blocks(file)], names, features)


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
    except OSError:
        return None


def _on_this_machine(block: Block) -> Block:
    match = _VECTOR_CALL.fullmatch(block.text)
    if match is None or has_vector_form(match[2], int(match[1])):
        return block
    text = f"FUSER_LIBM_{match[1]}({match[2]})"
    return replace(block, text=text, mentions=frozenset({f"FUSER_LIBM_{match[1]}", match[2]}))
