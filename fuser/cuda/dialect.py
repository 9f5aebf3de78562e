"""The loop around the element function in CUDA: each thread finds its vectors, reads, computes and writes them.

Three kernels share one body and differ in how a thread finds its place: *linear* (one index for all operands),
*strided* (each operand has an offset of its own), and *tiled* (strided, and some operands go through shared memory).
"""

from __future__ import annotations

from fuser.cuda.prelude import emit_prelude
from fuser.kernel_source import KERNEL_NAME, Dialect, Loop, Operand, RowLoop, indent
from fuser.list_text import emit_lists

__all__ = ["DIALECT"]

GEOMETRY = ("size", "count", "divide", "stride")


def emit_loop(loop: Loop) -> str:
    """Write the ``__global__`` function: each thread moves ``unroll`` vectors of each operand.

    Whole vectors and tails take the same way, so that an element's bits do not depend on its place::

        for (int u = 0; u < 1; ++u) {
          at[u] = fuser_find(a, u);
          in0[u] = fuser_load<4, 4>(a.in0 + at[u].first, at[u].left);
          in1[u] = fuser_load<4, 4>(a.in1 + at[u].first, at[u].left);
        }
        #pragma unroll
        for (int u = 0; u < 1; ++u) {
          if (at[u].left <= 0) break;
          float out0[4];
        #pragma unroll
          for (int k = 0; k < 4; ++k)
            fuser_element(fuser_to_compute(in0[u][k]), fuser_to_compute(in1[u][k]), a.number2, out0[k]);
          fuser_store<4, 4>(a.out0 + at[u].first, out0, at[u].left);
        }
    """
    tiled = [item for item in loop.inputs if item.access.is_transposed]
    find = _tiled_find(loop) if tiled else _linear_find(loop) if loop.is_linear else _strided_find(loop)
    body = indent([*_fill_tiles(loop, tiled), *_read(loop), *_share_tiles(loop, tiled), *_compute(loop)])
    lists, arguments = "", "fuser_args a"
    if loop.positions:
        lists, arguments = emit_lists(loop), "fuser_lists lists"
        body = indent(_turns(loop, body))
    return (
        f"\n{emit_place(loop)}\n{_join(find)}{lists}\n"
        f'extern "C" __global__ void __launch_bounds__({loop.tuning.block})\n'
        f"{KERNEL_NAME}(const __grid_constant__ {arguments}) {{\n{_join(body)}}}\n"
    )


def _turns(loop: Loop, body: list[str]) -> list[str]:
    # A block takes a chunk of one position, as many vectors at a time as its threads have in flight.
    unroll, step = loop.tuning.unroll, loop.chunk // loop.tuning.turns
    wide = [item for item in loop.operands if item.access.width > 1 and not item.is_counter]
    checks = [f"fuser_is_aligned<{item.access.width}>({item.address})" for item in wide]
    return [
        "const fuser_args a = fuser_find_part(lists, blockIdx.x);",
        # Some tensors lie at any address.
        f"const bool is_wide = {' && '.join(checks) or 'true'};",
        f"for (int turn = 0; turn < {loop.tuning.turns} && turn * {step} < a.numel; ++turn) {{",
        f"  const int first = turn * {unroll};",
        *body,
        "}",
    ]


def emit_place(loop: Loop) -> str:
    """Write the struct that says where one vector lies.

    ::

        typedef unsigned int fuser_index;

        // How many elements are left from here on, and where they are.
        struct fuser_place {
          int left;
          fuser_index first;
        };
    """
    names = ["first"] if loop.is_linear else [operand.name for operand in loop.operands]
    lines = [
        f"typedef {'uint64_t' if loop.wide_index else 'unsigned int'} fuser_index;",
        "",
        "// How many elements are left from here on, and where they are.",
        "struct fuser_place {",
        f"  {_signed(loop)} left;",
        *([f"  {_signed(loop)} left_rows;"] if loop.tuning.tile else []),
        f"  fuser_index {', '.join(names)};",
        *(["  // How far what repeats has come.", "  fuser_index phase;"] if loop.repeats else []),
        *(_LEVEL if loop.tuning.begins_level else []),
        "};",
    ]
    return _join(lines)


_LEVEL = [
    "  // How many elements the row's vectors begin before it, and how many are missing at the start of this one.",
    "  int back, skip;",
]


# --- where a thread's vectors are -----------------------------------------------------------------------------------
def _linear_find(loop: Loop) -> list[str]:
    return [
        "FUSER_INLINE fuser_place fuser_find(const fuser_args& a, int u) {",
        f"  const fuser_index first = ({_step(loop)}) * {loop.vector};",
        f"  return {{static_cast<{_signed(loop)}>(a.numel - first), first}};",
        "}",
    ]


def _strided_find(loop: Loop) -> list[str]:
    # Vectors are counted through the whole space; each row begins a new one.
    last = loop.rank - 1
    here = f"static_cast<{_signed(loop)}>(a.size[0] - x)"
    level = []
    if loop.tuning.begins_level:
        (output,) = loop.outputs
        level = [
            f"  at.back = fuser_beyond_level<{loop.vector}>({output.address} + at.{output.name});",
            "  at.skip = x == 0 ? at.back : 0;",
        ]
        here += " + at.back"
    inside = f"rest < a.count[{last}] ? {here} : 0"
    return [
        "FUSER_INLINE fuser_place fuser_find(const fuser_args& a, int u) {",
        "  fuser_place at{};",
        f"  fuser_index rest = {_step(loop)};",
        *indent(_advance(loop, 0, "x", loop.vector)),
        *([f"  rest = rest * {loop.tuning.unroll} + u;"] if loop.tuning.is_stacked else []),
        *(line for dim in range(1, loop.rank) for line in indent(_advance(loop, dim, f"i{dim}"))),
        *level,
        f"  at.left = {inside if last else here};",
        "  return at;",
        "}",
    ]


def _tiled_find(loop: Loop) -> list[str]:
    # The block's corner first; each thread's vectors are counted from there.
    tile = loop.tuning.tile
    lines = [
        "// The corner of this block's tile.",
        "FUSER_INLINE fuser_place fuser_find_tile(const fuser_args& a) {",
        "  fuser_place at{};",
        "  fuser_index rest = blockIdx.x;",
        *indent(_advance(loop, 0, "x", tile)),
        *indent(_advance(loop, 1, "y", tile)),
        *(line for dim in range(2, loop.rank) for line in indent(_advance(loop, dim, f"i{dim}"))),
        f"  at.left = static_cast<{_signed(loop)}>(a.size[0] - x);",
        f"  at.left_rows = static_cast<{_signed(loop)}>(a.size[1] - y);",
        "  return at;",
        "}",
        "",
        "FUSER_INLINE fuser_place fuser_find(const fuser_args& a, const fuser_place& tile, int u) {",
        "  fuser_place at = tile;",
        f"  const int x = {_tile_x(loop)}, y = {_tile_y(loop)};",
        "  at.left = y < tile.left_rows ? tile.left - x : 0;",
    ]
    for item in loop.operands:
        if not item.access.is_transposed:
            moves = [_times("x", _stride(item, 0)), _times("y", _stride(item, 1))]
            lines += [f"  at.{item.name} += {' + '.join(move for move in moves if move)};"] * any(moves)
    return [*lines, "  return at;", "}"]


def _step(loop: Loop) -> str:
    # The number of the thread's u-th vector.
    unroll, block = loop.tuning.unroll, loop.tuning.block
    if loop.positions:
        # The chunk is the block's own.
        return f"static_cast<fuser_index>(u) * {block} + threadIdx.x"
    number = f"static_cast<fuser_index>({'gridDim.x - 1 - ' if loop.tuning.from_end else ''}blockIdx.x)"
    unroll = 1 if loop.tuning.is_stacked else unroll
    return f"{f'({number} * {unroll} + u)' if unroll > 1 else number} * {block} + threadIdx.x"


def _advance(loop: Loop, dim: int, name: str, length: int = 1) -> list[str]:
    # Take the coordinate of one dimension off ``rest``, where it counts steps of ``length``, and move every operand.
    if dim == loop.rank - 1:
        lines = [f"const fuser_index {name} = {_times('rest', str(length))};"]
    else:
        quotient = f"rest / a.count[{dim}]" if loop.wide_index else f"fuser_divide(rest, a.divide[{dim}])"
        here = f"rest - next{dim} * static_cast<fuser_index>(a.count[{dim}])"
        lines = [
            f"const fuser_index next{dim} = {quotient};",
            f"const fuser_index {name} = {here if length == 1 else f'({here}) * {length}'};",
            f"rest = next{dim};",
        ]
    if dim == 0 and loop.repeats:
        begun = f"{name} / a.period" if loop.wide_index else f"fuser_divide({name}, a.period_divider)"
        lines.append(f"const fuser_index period = {begun};")
        lines.append(f"at.phase = {name} - period * static_cast<fuser_index>(a.period);")
    for item in loop.operands:
        move = "period" if dim == 0 and item.inner == 4 else _times(name, _stride(item, dim))
        lines += [f"at.{item.name} += {move};"] * bool(move)
    return lines


def _stride(item: Operand, dim: int) -> str:
    # Known where the layout class says so.
    if dim == 0 and item.inner != 2:
        # What repeats has its place from the phase, what lasts from the number of the period.
        return "1" if item.inner == 1 else "0"
    if dim == 1 and item.access.is_transposed:
        return "1"
    return f"static_cast<fuser_index>(a.stride_{item.name}[{dim}])"


def _times(what: str, factor: str) -> str:
    return "" if factor == "0" else what if factor == "1" else f"{what} * {factor}"


# --- reading, computing, writing ------------------------------------------------------------------------------------
def _read(loop: Loop) -> list[str]:
    # Every read is under way before the first one is waited for.
    find = f"fuser_find(a, {'tile, ' if loop.tuning.tile else 'first + ' if loop.positions else ''}u)"
    direct = [item for item in loop.inputs if not item.access.is_transposed]
    own = [item for item in direct if not item.access.is_shared]
    return [
        f"fuser_place at[{_unroll(loop)}];",
        *(
            f"{_kind(loop, item)}<{item.info.storage}, {_length(loop, item)}> {item.name}[{_copies(loop, item)}];"
            for item in direct
        ),
        *_each(loop, [f"at[u] = {find};", *(f"{item.name}[u] = {_load(loop, item)};" for item in own)]),
        *(f"{item.name}[0] = {_load(loop, item).replace('[u]', '[0]')};" for item in direct if item not in own),
        *_take_pieces(loop),
    ]


def _take_pieces(loop: Loop) -> list[str]:
    # Of tables, once it is known of which entries.
    if not loop.pieces:
        return []
    first = {item.variable: f"fuser_to_compute({_vector(item)}[0])" for item in loop.inputs}
    declared, taken = list[str](), list[str]()
    for item in loop.pieces:
        declared.append(f"fuser_vector<{item.info.storage}, {loop.vector}> {item.name}[{_unroll(loop)}];")
        taken.append(f"{item.name}[u] = {_take_piece(loop, item, [first[name] for name in item.piece])};")
    return [*declared, *_each(loop, taken)]


def _take_piece(loop: Loop, item: Operand, looked: list[str]) -> str:
    if not item.is_part_of_whole:
        return f"fuser_take_piece<{loop.vector}>({item.address}, {', '.join(looked)}, at[u].left)"
    place, *bounds = looked
    inside = [f"fuser_is_inside({number}, {count})" for number, count in zip(bounds[::2], bounds[1::2], strict=True)]
    return f"fuser_pick({item.address}, {place}, {' && '.join(['at[u].left > 0', *inside])})"


def _vector(item: Operand) -> str:
    return f"{item.name}[{'0' if item.access.is_shared else 'u'}]"


def _compute(loop: Loop) -> list[str]:
    # Of tiles, and of vectors that begin before their row, the last ones may be empty.
    lines = [f"if (at[u].left <= 0) {'continue' if loop.tuning.tile or loop.tuning.begins_level else 'break'};"]
    element = {}
    for item in loop.inputs:
        if item.access.is_transposed:
            row = f"read_row<{loop.vector}>({_tile_x(loop)}, {_tile_y(loop)}, at[u].left)"
            lines.append(f"const auto {item.name} = tile_{item.name}.{row};")
        vector = item.name if item.access.is_transposed else _vector(item)
        vector = f"straight_{item.name}" if loop.is_askew(item) else vector
        element[item.variable] = f"fuser_to_compute({vector}[{'k' if item.inner else '0'}])"
    for item in loop.pieces:
        element[item.variable] = f"fuser_taken<{item.info.storage}>{{{item.name}[u][k]}}"
    for item in loop.outputs:
        lines.append(f"{item.info.storage} {item.name}[{loop.vector}];")
        element[item.variable] = f"{item.name}[k]"
    each = [
        *(
            f"const auto straight_{item.name} = {_vector(item)}.straight();"
            for item in loop.inputs
            if loop.is_askew(item)
        ),
        "#pragma unroll",
        f"for (int k = 0; k < {loop.vector}; ++k)",
        # A table has nothing where no element is.
        f"  {'if (k < at[u].left) ' if loop.has_tables else ''}{loop.call_element(element)}",
    ]
    if loop.divides:
        # What is computed again is read again: a thread that had kept it would leave room for fewer others.
        own = [item for item in loop.inputs if not (item.access.is_transposed or item.access.is_shared)]
        read = ['asm volatile("" ::: "memory");', *(f"{item.name}[u] = {_load(loop, item)};" for item in own)]
        again = ["if (!how.is_exact) {", *indent([*read, "fuser_plainly how;", *each]), "}"]
        each = ["fuser_quickly how;", *each, *again]
    return _each(loop, [*lines, *each, *(_store(loop, item) for item in loop.outputs)])


def _load(loop: Loop, item: Operand) -> str:
    if item.inner == 2:
        stride = _stride(item, 0)
        return f"fuser_gather<{loop.vector}>({_address(loop, item)}, {stride}, at[u].left)"
    if item.inner == 3:
        return f"fuser_repeat<{loop.vector}>({_address(loop, item)}, at[u].phase, a.period, at[u].left)"
    if item.inner == 4:
        return f"fuser_last<{loop.vector}>({_address(loop, item)}, at[u].phase, a.period, at[u].left)"
    if loop.is_askew(item):
        skip = ", at[u].skip" if loop.tuning.begins_level else ""
        return f"fuser_load_askew<{loop.vector}>({_address(loop, item)}, at[u].left{skip})"
    width, left = 1 if item.is_counter and item.has_offset else item.access.width, _left(loop, item)
    return f"fuser_load<{_length(loop, item)}, {width}>({_address(loop, item)}, {left})"


def _store(loop: Loop, item: Operand) -> str:
    if item.inner == 2:
        stride = _stride(item, 0)
        return f"fuser_scatter<{loop.vector}>({_address(loop, item)}, {stride}, {item.name}, at[u].left);"
    if loop.tuning.begins_level:
        return f"fuser_store_level<{loop.vector}>({_address(loop, item)}, {item.name}, at[u].left, at[u].skip);"
    width, left = item.access.width, _left(loop, item)
    return f"fuser_store<{loop.vector}, {width}>({_address(loop, item)}, {item.name}, {left});"


def _kind(loop: Loop, item: Operand) -> str:
    return "fuser_askew" if loop.is_askew(item) else "fuser_vector"


def _left(loop: Loop, item: Operand) -> str:
    # Where addresses come from lists, each block looks whether they allow wide accesses.
    is_asked = loop.positions and item.access.width > 1 and not item.is_counter
    return "at[u].left, is_wide" if is_asked else "at[u].left"


def _address(loop: Loop, item: Operand) -> str:
    if not loop.is_linear:
        back = " - at[u].back" if loop.tuning.begins_level and item.inner == 1 else ""
        return f"{item.address} + at[u].{item.name}{back}"
    return f"{item.address} + at[u].first" if item.inner else item.address


def _copies(loop: Loop, item: Operand) -> int:
    # Vectors that a thread reads of an input.
    return 1 if item.access.is_shared else _unroll(loop)


def _length(loop: Loop, item: Operand) -> int:
    # What has stride 0 is read once for the whole vector.
    return loop.vector if item.inner else 1


# --- tiles ----------------------------------------------------------------------------------------------------------
def _fill_tiles(loop: Loop, tiled: list[Operand]) -> list[str]:
    # Each thread reads along the dimension where the operand is dense.
    if not tiled:
        return []
    lines = [f"__shared__ fuser_tile<{item.info.storage}, {loop.tuning.tile}> tile_{item.name};" for item in tiled]
    lines.append("const fuser_place tile = fuser_find_tile(a);")
    for item in tiled:
        width, passes, x, y = _column(loop, item)
        address = f"{item.address} + tile.{item.name} + x * {_stride(item, 0)} + y"
        lines += [
            f"fuser_vector<{item.info.storage}, {width}> column_{item.name}[{passes}];",
            "#pragma unroll",
            f"for (int u = 0; u < {passes}; ++u) {{",
            f"  const int x = {x}, y = {y};",
            "  const auto left = x < tile.left ? tile.left_rows - y : 0;",
            f"  column_{item.name}[u] = fuser_load<{width}, {width}>({address}, left);",
            "}",
        ]
    return lines


def _share_tiles(loop: Loop, tiled: list[Operand]) -> list[str]:
    if not tiled:
        return []
    lines = []
    for item in tiled:
        _, passes, x, y = _column(loop, item)
        lines += [
            "#pragma unroll",
            f"for (int u = 0; u < {passes}; ++u) tile_{item.name}.write_column({x}, {y}, column_{item.name}[u]);",
        ]
    return [*lines, "__syncthreads();"]


def _column(loop: Loop, item: Operand) -> tuple[int, int, str, str]:
    # Elements per access, accesses per thread, and the place of the u-th in the tile.
    tile, block, width = loop.tuning.tile, loop.tuning.block, item.access.width
    per_column = tile // width
    x = f"(threadIdx.x / {per_column} + u * {block // per_column})"
    return width, tile * tile // (width * block), x, f"threadIdx.x % {per_column} * {width}"


def _tile_x(loop: Loop) -> str:
    return f"threadIdx.x % {loop.tuning.tile // loop.vector} * {loop.vector}"


def _tile_y(loop: Loop) -> str:
    per_row = loop.tuning.tile // loop.vector
    return f"threadIdx.x / {per_row} + u * {loop.tuning.block // per_row}"


# --- text -----------------------------------------------------------------------------------------------------------
def _each(loop: Loop, lines: list[str]) -> list[str]:
    return ["#pragma unroll", f"for (int u = 0; u < {_unroll(loop)}; ++u) {{", *indent(lines), "}"]


def _unroll(loop: Loop) -> int:
    # A tile is shared out among the block's threads.
    tuning = loop.tuning
    return tuning.tile * tuning.tile // (loop.vector * tuning.block) if tuning.tile else tuning.unroll


def _signed(loop: Loop) -> str:
    return "int64_t" if loop.wide_index else "int"


def _join(lines: list[str]) -> str:
    return "".join(f"{line}\n" for line in lines)


def _emit_rows(loop: RowLoop) -> str:
    # Imported then, for some milliseconds: most kernels have no reductions.
    from fuser.cuda.rows import emit_rows  # noqa: PLC0415

    return emit_rows(loop)


# As NVRTC defines them.
_OWN_MACROS = "\n".join(
    [
        *(
            f"#define __{name}__ __attribute__(({name}))"
            for name in "device host global constant shared managed".split()
        ),
        "#define __noinline__ __attribute__((noinline))",
        "#define __forceinline__ __inline__ __attribute__((always_inline))",
        "#define __launch_bounds__(...) __attribute__((launch_bounds(__VA_ARGS__)))",
        "#define __align__(n) __attribute__((aligned(n)))",
    ]
)
DIALECT = Dialect(
    "cuda", emit_prelude, emit_loop, _emit_rows, GEOMETRY, _OWN_MACROS, crosses_with_zero=True, has_brief_exp=True,
    divides_quickly=True,
)  # fmt: skip
