"""The loop around the element function in CUDA: one thread moves ``vector`` elements."""

from __future__ import annotations

from fuser.codegen import KERNEL_NAME, Dialect, Loop
from fuser.cuda.prelude import emit_prelude

__all__ = ["BLOCK_SIZE", "DIALECT"]

BLOCK_SIZE = 256


def emit_loop(loop: Loop) -> str:
    """Write the ``__global__`` function: one thread moves ``vector`` elements of each operand.

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
    vector = _VECTOR if loop.vector > 1 else ""
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
    # One index for all operands; the last thread takes what does not fill a vector.
    index = "int64_t" if loop.wide_index else "int"
    at = {operand.name: "first" if operand.inner else "0" for operand in loop.operands}
    if loop.vector == 1:
        return [
            f"const {index} first = ({index})blockIdx.x * {BLOCK_SIZE} + threadIdx.x;",
            "if (first >= a.numel) return;",
            *_single(loop, at),
        ]
    tail = {operand.name: "i" if operand.inner else "0" for operand in loop.operands}
    return [
        f"const {index} first = (({index})blockIdx.x * {BLOCK_SIZE} + threadIdx.x) * {loop.vector};",
        f"if (first + {loop.vector} <= a.numel) {{",
        *(line if line.startswith("#") else f"  {line}" for line in _vector(loop, at)),
        "} else {",
        f"  for ({index} i = first; i < a.numel; ++i)",
        *(f"    {line}" for line in _single(loop, tail)),
        "}",
    ]


def _strided_body(loop: Loop) -> list[str]:
    # Each operand has its own offset. A row is a whole number of vectors, so none needs a tail.
    index = "int64_t" if loop.wide_index else "unsigned int"
    lines = [
        f"{index} rest = ({index})blockIdx.x * {BLOCK_SIZE} + threadIdx.x;",
        f"if (rest >= a.numel{f' / {loop.vector}' if loop.vector > 1 else ''}) return;",
        *(f"{index} at_{operand.name} = 0;" for operand in loop.operands),
    ]
    for dim in range(loop.rank):
        lines += _advance(loop, dim, index)
    at = {operand.name: f"at_{operand.name}" for operand in loop.operands}
    return [*lines, *(_single(loop, at) if loop.vector == 1 else _vector(loop, at))]


def _single(loop: Loop, at: dict[str, str]) -> list[str]:
    # One element, each operand at its index.
    element = {item.variable: f"fuser_to_compute(a.{item.name}[{at[item.name]}])" for item in loop.inputs}
    element |= {item.variable: f"a.{item.name}[{at[item.name]}]" for item in loop.outputs}
    return [loop.call_element(element)]


def _vector(loop: Loop, at: dict[str, str]) -> list[str]:
    # As many elements as one access moves; an operand whose innermost stride is 0 is read once for all of them.
    count = loop.vector
    lines = []
    element = {}
    for item in loop.inputs:
        place = f"a.{item.name} + {at[item.name]}"
        if item.inner:
            lines.append(f"const auto {item.name} = fuser_load<{count}>({place});")
            element[item.variable] = f"fuser_to_compute({item.name}.item[k])"
        else:
            lines.append(f"const auto {item.name} = fuser_to_compute(*({place}));")
            element[item.variable] = item.name
    for item in loop.outputs:
        lines.append(f"fuser_vector<{item.info.storage}, {count}> {item.name};")
        element[item.variable] = f"{item.name}.item[k]"
    return [
        *lines,
        "#pragma unroll",
        f"for (int k = 0; k < {count}; ++k)",
        f"  {loop.call_element(element)}",
        *(f"fuser_store<{count}>(a.{item.name} + {at[item.name]}, {item.name});" for item in loop.outputs),
    ]


def _advance(loop: Loop, dim: int, index: str) -> list[str]:
    # Take the coordinate of one dimension off ``rest`` and move every operand by it. Along the innermost dimension
    # the coordinate counts vectors, and strides 0 and 1 are known.
    per_step = loop.vector if dim == 0 else 1
    moves = []
    for item in loop.operands:
        stride = f"({index})a.stride_{item.name}[{dim}]"
        if dim == 0 and item.inner < 2:
            stride = str(item.inner * per_step)
        if stride != "0":
            moves.append(f"  at_{item.name} += here * {stride};")
    if dim == loop.rank - 1:
        return ["{", f"  const {index} here = rest;", *moves, "}"]
    size = f"({index})a.size[{dim}]" if per_step == 1 else f"(({index})a.size[{dim}] / {per_step})"
    return [
        "{",
        f"  const {index} next = rest / {size};",
        f"  const {index} here = rest - next * {size};",
        "  rest = next;",
        *moves,
        "}",
    ]


DIALECT = Dialect("cuda", emit_prelude, emit_loop, crosses_with_zero=True)
