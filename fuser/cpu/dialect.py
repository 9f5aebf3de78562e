"""The loop around the element function on the CPU: rows of the innermost dimension, ranges of elements per thread."""

from __future__ import annotations

from fuser.codegen import KERNEL_NAME, Dialect, Loop, Operand
from fuser.cpu.prelude import emit_prelude

__all__ = ["DIALECT"]

_ENTRY = f"""
// Each thread takes one range of elements, whole cache lines apart; threads is 1 or torch's thread count.
extern "C" void {KERNEL_NAME}(const fuser_args* args, int threads) {{
  const fuser_args& a = *args;
  // Even a region of one thread costs as much as a small kernel.
  if (threads == 1) return fuser_range(a, 0, a.numel);
#ifdef _OPENMP
#pragma omp parallel num_threads(threads)
  {{
    const int64_t share = ((a.numel + threads - 1) / threads + 63) / 64 * 64;
    const int64_t begin = share * omp_get_thread_num();
    const int64_t end = begin + share < a.numel ? begin + share : a.numel;
    if (begin < end) fuser_range(a, begin, end);
  }}
#else
  fuser_range(a, 0, a.numel);
#endif
}}
"""

_HEAD = """
#ifdef _OPENMP
extern "C" int omp_get_thread_num() noexcept;
#endif

// Elements begin to end of the flattened loop nest. Everything is inlined here, so that the loop vectorises.
__attribute__((flatten, noinline)) static void fuser_range(const fuser_args& a, int64_t begin, int64_t end) {
"""


def emit_loop(loop: Loop) -> str:
    """Write ``fuser_range`` and the entry that shares the elements out among threads.

    ::

        for (int64_t i = begin; i < end; ++i)
          fuser_element(fuser_to_compute(in0[i]), fuser_to_compute(in1[i]), a.number2, out0[i]);
    """
    body = _linear_body(loop) if loop.is_linear else _strided_body(loop)
    lines = "\n".join(line if line.startswith("#") else f"  {line}" for line in body)
    return f"{_HEAD}{lines}\n}}\n{_ENTRY}"


def _row(loop: Loop, begin: str, end: str) -> list[str]:
    # One stretch along the innermost dimension; pointers point at its first element.
    expressions = {}
    lines = []
    for operand in loop.inputs:
        if operand.inner == 0:
            lines.append(f"const auto {operand.variable} = fuser_to_compute({operand.name}[0]);")
            expressions[operand.variable] = operand.variable
        else:
            expressions[operand.variable] = f"fuser_to_compute({_element(operand)})"
    expressions |= {operand.variable: _element(operand) for operand in loop.outputs}
    return [
        *lines,
        # Exact aliasing (in-place) is no dependence between iterations; other overlaps never reach a kernel.
        "#pragma GCC ivdep",
        f"for (int64_t i = {begin}; i < {end}; ++i)",
        f"  {loop.call_element(expressions)}",
    ]


def _element(operand: Operand) -> str:
    index = {0: "0", 1: "i"}.get(operand.inner, f"i * a.stride_{operand.name}[0]")
    return f"{operand.name}[{index}]"


def _linear_body(loop: Loop) -> list[str]:
    pointers = [f"const auto {operand.name} = a.{operand.name};" for operand in loop.operands]
    return [*pointers, *_row(loop, "begin", "end")]


def _strided_body(loop: Loop) -> list[str]:
    rank = loop.rank
    pointers = []
    for operand in loop.operands:
        offset = " + ".join(f"at[{dim}] * a.stride_{operand.name}[{dim}]" for dim in range(rank))
        pointers.append(f"  const auto {operand.name} = a.{operand.name} + ({offset});")
    return [
        f"int64_t at[{rank}];",
        "int64_t rest = begin;",
        f"for (int dim = 0; dim < {rank}; ++dim) {{",
        "  at[dim] = rest % a.size[dim];",
        "  rest /= a.size[dim];",
        "}",
        "while (begin < end) {",
        "  const int64_t left = a.size[0] - at[0];",
        "  const int64_t count = left < end - begin ? left : end - begin;",
        *pointers,
        *(line if line.startswith("#") else f"  {line}" for line in _row(loop, "0", "count")),
        "  begin += count;",
        "  at[0] = 0;",
        f"  for (int dim = 1; dim < {rank} && ++at[dim] == a.size[dim]; ++dim) at[dim] = 0;",
        "}",
    ]


DIALECT = Dialect("cpu", emit_prelude, emit_loop)
