"""The loop around the element function on the CPU.

Operands that are dense share one index. Else the loop nest is walked in tiles: rows along the innermost dimension,
beside each other along a second one. Operands that are not dense along the rows go through buffers of one tile.
"""

from __future__ import annotations

from fuser.cpu.prelude import emit_prelude
from fuser.kernel_source import KERNEL_NAME, Dialect, Loop, Operand, RowLoop, indent
from fuser.list_text import emit_lists

__all__ = ["DIALECT"]

# Side of a square tile, the largest for whose operands the buffers stay in a core's second cache.
EDGES = (256, 128, 64, 32, 16)
BUFFER_BYTES = 131072
# Class of an innermost stride that is neither 0 nor 1, as in InputSpec.inner.
BUFFERED = 2
# One page of the widest operand or less.
BLOCK_BYTES = 4096

_HEAD = """
#ifdef _OPENMP
extern "C" int omp_get_thread_num() noexcept;
extern "C" int omp_get_num_threads() noexcept;
#endif"""

# Everything is inlined there, so that the loop vectorises. Arguments come by value: no store of the loop can change
# them, and what depends on numbers alone is computed before it.
_FUNCTION = "__attribute__((flatten, noinline)) static void"


def emit_loop(loop: Loop) -> str:
    """Write ``fuser_range``, which runs a part of the elements or tiles, and the entry that shares them out.

    ::

        for (int64_t i = block; i < stop; ++i)
          fuser_element(fuser_to_compute(in0[i]), fuser_to_compute(in1[i]), a.number2, out0[i]);
    """
    body = _linear_range(loop) if loop.is_linear else [*_rows(loop), *_tiled_range(loop)]
    entry = [emit_lists(loop), *_LIST_ENTRY] if loop.positions else _entry(loop)
    return "\n".join([_HEAD, *body, *entry, ""])


# Blocks of small tensors have little to do: each thread takes the next one that nobody has.
_LIST_ENTRY = [
    "static void fuser_take_blocks(const fuser_lists* lists, int64_t* next) {",
    "  int64_t block;",
    "  while ((block = __atomic_fetch_add(next, 1, __ATOMIC_RELAXED)) < lists->each.numel) {",
    "    const fuser_args a = fuser_find_part(*lists, static_cast<unsigned int>(block));",
    "    fuser_range(a, 0, a.numel);",
    "  }",
    "}",
    "",
    "// threads is 1 or torch's thread count.",
    f'extern "C" void {KERNEL_NAME}(const fuser_lists* lists, int threads) {{',
    "  int64_t next = 0;",
    "  if (threads == 1) return fuser_take_blocks(lists, &next);",
    "#ifdef _OPENMP",
    "#pragma omp parallel num_threads(threads)",
    "#endif",
    "  fuser_take_blocks(lists, &next);",
    "}",
]


def _linear_range(loop: Loop) -> list[str]:
    pointers = [f"  const auto {operand.name} = {operand.address};" for operand in loop.operands]
    return [
        "",
        "// Elements begin to end.",
        f"{_FUNCTION} fuser_range(const fuser_args a, int64_t begin, int64_t end) {{",
        *pointers,
        *indent(_row(loop, "begin", "end")),
        "}",
    ]


def _row(loop: Loop, begin: str, end: str) -> list[str]:
    # One stretch of elements. Operands that have one element for all of it read it once.
    expressions = {}
    lines = []
    for operand in loop.inputs:
        if operand.inner == 0:
            lines.append(f"const auto {operand.variable} = fuser_to_compute({operand.name}[0]);")
            expressions[operand.variable] = operand.variable
        elif _is_half(operand):
            expressions[operand.variable] = f"wide_{operand.name}[i - block]"
        else:
            expressions[operand.variable] = f"fuser_to_compute({operand.name}[i])"
    for operand in loop.outputs:
        own = f"wide_{operand.name}[i - block]" if _is_half(operand) else f"{operand.name}[i]"
        expressions[operand.variable] = own
    moving = [operand for operand in loop.operands if operand.inner != 0 and not operand.is_counter]
    # Halves go through buffers: of the instructions that widen and round them gcc 12 makes no use in a loop.
    halves = [operand for operand in moving if _is_half(operand)]
    buffers = [
        f"  alignas(64) {'fuser_wide_half' if operand.is_output else 'float'} wide_{operand.name}[{{}}];"
        for operand in halves
    ]
    block = BLOCK_BYTES // max(operand.info.dtype.itemsize for operand in moving)
    block = min(block, BLOCK_BYTES // 4) if halves else block
    if loop.exponent:
        expressions[loop.exponent] = "exponent"
    rows = [
        f"for (int64_t block = {begin}; block < {end}; block += {block}) {{",
        f"  const int64_t stop = block + {block} < {end} ? block + {block} : {end};",
        # Processors foresee what comes next in a page, but not the next page.
        *(f"  __builtin_prefetch({operand.name} + stop{', 1' * operand.is_output});" for operand in moving),
        *(buffer.format(block) for buffer in buffers),
        *(
            _convert("load_halves", f"wide_{item.name}", f"{item.name} + block")
            for item in halves
            if not item.is_output
        ),
        # Exact aliasing (in-place) is no dependence between iterations; other overlaps never reach a kernel.
        "#pragma GCC ivdep",
        "  for (int64_t i = block; i < stop; ++i)",
        f"    {loop.call_element(expressions)}",
        *(_convert("store_halves", f"{item.name} + block", f"wide_{item.name}") for item in halves if item.is_output),
        "}",
    ]
    if loop.exponent:
        # One loop for each exponent with a formula, and one for the others.
        number = dict(loop.numbers)[loop.exponent]
        head = f"fuser_by_exponent({number}, [&](const auto exponent) __attribute__((always_inline)) {{"
        rows = [head, *indent(rows), "});"]
    return [*lines, *rows]


def _is_half(operand: Operand) -> bool:
    return operand.info.storage == "fuser_half"


def _convert(how: str, to: str, source: str) -> str:
    return f"  fuser_{how}({to}, {source}, stop - block);"


def _rows(loop: Loop) -> list[str]:
    # The rows of one tile; from one to the next the pointers jump.
    pointers = [f"{_pointer(operand)} {operand.name}" for operand in loop.operands]
    jumps = [f"{operand.name} += jump[{number}];" for number, operand in enumerate(loop.operands)]
    return [
        "",
        "// One tile.",
        f"{_FUNCTION} fuser_rows(const fuser_args a, int64_t row, int64_t rows, const int64_t* jump,",
        f"    {', '.join(pointers)}) {{",
        "  for (int64_t j = 0; j < rows; ++j) {",
        *indent(_row(loop, "0", "row"), 2),
        *(f"    {line}" for line in jumps),
        "  }",
        "}",
    ]


def _tiled_range(loop: Loop) -> list[str]:
    buffered = [operand for operand in loop.operands if operand.inner == BUFFERED]
    size = edge(loop) ** 2
    buffers = [
        f"  alignas(64) unsigned char buffer_{operand.name}[{size} * sizeof({operand.info.storage})];"
        for operand in buffered
    ]
    pointers, jumps, after = [], [], []
    for operand in loop.operands:
        name, stride = operand.name, f"a.stride_{operand.name}"
        own = f"{operand.address} + tile.offset({stride})"
        shape = f"row, rows, {stride}[0], tile.jump({stride})"
        jumps.append("row" if operand.inner == BUFFERED else f"tile.jump({stride})")
        if operand.inner != BUFFERED:
            pointers.append(f"    const auto {name} = {own};")
        elif operand.is_output:
            pointers.append(f"    const auto {name} = fuser_place(buffer_{name}, {own}, {shape});")
            after.append(f"    fuser_scatter({own}, {name}, {shape});")
        else:
            pointers.append(f"    const auto {name} = fuser_gather(buffer_{name}, {own}, {shape});")
    # Where all operands are dense, or are made so, a tile is one row.
    rows = "row * rows, 1" if len(buffered) == len(loop.operands) else "row, rows"
    return [
        "",
        "// Tiles begin to end.",
        f"__attribute__((noinline)) static void fuser_range(const fuser_args& a, fuser_tiles<{loop.rank}> tile,",
        "    int64_t begin, int64_t end) {",
        *buffers,
        "  for (tile.seek(begin); begin < end; ++begin, tile.next()) {",
        "    const int64_t row = tile.width(), rows = tile.height();",
        *pointers,
        f"    const int64_t jump[] = {{{', '.join(jumps)}}};",
        f"    fuser_rows(a, {rows}, jump, {', '.join(operand.name for operand in loop.operands)});",
        *after,
        "  }",
        "}",
    ]


def _entry(loop: Loop) -> list[str]:
    # Threads take whole cache lines, or whole tiles.
    buffered = [operand for operand in loop.operands if operand.inner == BUFFERED and not operand.is_counter]
    names = [f"a.stride_{operand.name}" for operand in buffered]
    tiles = [
        f"const int64_t* const buffered[] = {{{', '.join(names) or 'nullptr'}}};",
        f"const fuser_tiles<{loop.rank}> tile(a.size, buffered, {len(names)}, {edge(loop)}, threads);",
        "const int64_t total = tile.total();",
    ]
    arguments, total = ("a", "a.numel") if loop.is_linear else ("a, tile", "total")
    share = f"({total} + parts - 1) / parts"
    if loop.is_linear:
        share = f"({share} + 63) / 64 * 64"
    hints = [
        f"fuser_prefer_huge_pages(a.{operand.name}, a.numel * sizeof(*a.{operand.name}));" for operand in loop.outputs
    ]
    return [
        "",
        "// threads is 1 or torch's thread count.",
        f'extern "C" void {KERNEL_NAME}(const fuser_args* args, int threads) {{',
        "  const fuser_args& a = *args;",
        *(f"  {line}" for line in hints),
        *([] if loop.is_linear else indent(tiles)),
        "  // Even a region of one thread costs as much as a small kernel.",
        f"  if (threads == 1) return fuser_range({arguments}, 0, {total});",
        "#ifdef _OPENMP",
        "#pragma omp parallel num_threads(threads)",
        "  {",
        "    const int64_t parts = omp_get_num_threads();",
        f"    const int64_t share = {share};",
        "    const int64_t begin = share * omp_get_thread_num();",
        f"    const int64_t end = begin + share < {total} ? begin + share : {total};",
        f"    if (begin < end) fuser_range({arguments}, begin, end);",
        "  }",
        "#else",
        f"  fuser_range({arguments}, 0, {total});",
        "#endif",
        "}",
    ]


def edge(loop: Loop) -> int:
    """Return the side of a square tile, in elements: less where many operands have buffers."""
    element_bytes = sum(operand.info.dtype.itemsize for operand in loop.operands if operand.inner == BUFFERED)
    return next((side for side in EDGES if side * side * element_bytes <= BUFFER_BYTES), EDGES[-1])


def _pointer(operand: Operand) -> str:
    # Also a counter's numbers are in its buffer, if it has one.
    return f"const {operand.info.storage}*" if operand.is_counter and operand.inner == BUFFERED else operand.pointer


def _emit_rows(loop: RowLoop) -> str:
    # Imported then, for some milliseconds: most kernels have no reductions.
    from fuser.cpu.rows import emit_rows  # noqa: PLC0415

    return emit_rows(loop)


DIALECT = Dialect(
    "cpu",
    emit_prelude,
    emit_loop,
    _emit_rows,
    traps_on_division=True,
    rounded_in_loops=(("fuser_half", "fuser_wide_half"),),
)
