"""The loop around the element function in CUDA: one thread moves ``vector`` elements."""

from __future__ import annotations

from fuser.codegen import KERNEL_NAME, Dialect, Loop, Operand
from fuser.cuda.prelude import emit_prelude

__all__ = ["BLOCK_SIZE", "DIALECT"]

BLOCK_SIZE = 256


def emit_loop(loop: Loop) -> str:
    """Write the ``__global__`` function: vector accesses when linear, one element per thread when strided.

    ::

        const auto in1 = fuser_load<4>(a.in1 + first);
        fuser_vector<float, 4> out0;
        #pragma unroll
        for (int k = 0; k < 4; ++k)
          fuser_element(fuser_to_compute(in0.item[k]), fuser_to_compute(in1.item[k]), a.number2, out0.item[k]);
        fuser_store<4>(a.out0 + first, out0);
    """
    body = _linear_body(loop) if loop.is_linear else _strided_body(loop)
    lines = "\n".join(f"  {line}" for line in body)
    vector = _VECTOR if loop.is_linear and loop.vector > 1 else ""
    return (
        f'{vector}\nextern "C" __global__ void __launch_bounds__({BLOCK_SIZE})\n'
        f"{KERNEL_NAME}(const __grid_constant__ fuser_args a) {{\n{lines}\n}}\n"
    )


_VECTOR = """
// Elements that one thread reads or writes with one access.
template <typename S, int N> struct alignas(sizeof(S) * N) fuser_vector { S item[N]; };

template <int N, typename S> FUSER_INLINE fuser_vector<S, N> fuser_load(const S* from) {
  return *reinterpret_cast<const fuser_vector<S, N>*>(from);
}

template <int N, typename S> FUSER_INLINE void fuser_store(S* to, const fuser_vector<S, N>& from) {
  *reinterpret_cast<fuser_vector<S, N>*>(to) = from;
}
"""


def _linear_body(loop: Loop) -> list[str]:
    once = [operand for operand in loop.inputs if operand.inner == 0]
    moving = [operand for operand in loop.inputs if operand.inner == 1]
    fixed = {operand.variable: operand.name for operand in once}
    single = {operand.variable: f"fuser_to_compute(a.{operand.name}[i])" for operand in moving}
    single |= {operand.variable: f"a.{operand.name}[i]" for operand in loop.outputs}
    lines = [f"const auto {operand.name} = fuser_to_compute(a.{operand.name}[0]);" for operand in once]
    index = "int64_t" if loop.wide_index else "int"
    element = loop.call_element({**fixed, **single})
    if loop.vector == 1:
        return [
            f"const {index} i = ({index})blockIdx.x * {BLOCK_SIZE} + threadIdx.x;",
            "if (i >= a.numel) return;",
            *lines,
            element,
        ]
    count = loop.vector
    vectors = {operand.variable: f"fuser_to_compute({operand.name}.item[k])" for operand in moving}
    vectors |= {operand.variable: f"{operand.name}.item[k]" for operand in loop.outputs}
    return [
        f"const {index} first = (({index})blockIdx.x * {BLOCK_SIZE} + threadIdx.x) * {count};",
        *lines,
        f"if (first + {count} <= a.numel) {{",
        *(f"  const auto {operand.name} = fuser_load<{count}>(a.{operand.name} + first);" for operand in moving),
        *(f"  fuser_vector<{operand.info.storage}, {count}> {operand.name};" for operand in loop.outputs),
        "#pragma unroll",
        f"  for (int k = 0; k < {count}; ++k)",
        f"    {loop.call_element({**fixed, **vectors})}",
        *(f"  fuser_store<{count}>(a.{operand.name} + first, {operand.name});" for operand in loop.outputs),
        "} else {",
        f"  for ({index} i = first; i < a.numel; ++i)",
        f"    {element}",
        "}",
    ]


def _strided_body(loop: Loop) -> list[str]:
    index = "int64_t" if loop.wide_index else "unsigned int"
    lines = [
        f"{index} rest = ({index})blockIdx.x * {BLOCK_SIZE} + threadIdx.x;",
        "if (rest >= a.numel) return;",
        *(f"{index} at_{operand.name} = 0;" for operand in loop.operands),
    ]
    for dim in range(loop.rank):
        lines += _advance(loop.operands, dim, loop.rank, index)
    element = {operand.variable: f"fuser_to_compute(a.{operand.name}[at_{operand.name}])" for operand in loop.inputs}
    element |= {operand.variable: f"a.{operand.name}[at_{operand.name}]" for operand in loop.outputs}
    return [*lines, loop.call_element(element)]


def _advance(operands: tuple[Operand, ...], dim: int, rank: int, index: str) -> list[str]:
    # Take the coordinate of one dimension off ``rest`` and move every operand by it.
    moves = [f"  at_{item.name} += here * ({index})a.stride_{item.name}[{dim}];" for item in operands]
    if dim == rank - 1:
        return ["{", f"  const {index} here = rest;", *moves, "}"]
    size = f"({index})a.size[{dim}]"
    return [
        "{",
        f"  const {index} next = rest / {size};",
        f"  const {index} here = rest - next * {size};",
        "  rest = next;",
        *moves,
        "}",
    ]


DIALECT = Dialect("cuda", emit_prelude, emit_loop)
