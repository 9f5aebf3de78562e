"""The loops of a kernel with reductions on the CPU.

Rows are taken in *tiles* of neighbouring rows; each pass goes over a tile batch by batch, along its rows or across
them. Threads take tiles, or, where those are few, batches.
"""

from __future__ import annotations

from fuser.cpu.row_batch import UNIT, RowBatch
from fuser.cpu.rows_across import AcrossBatch
from fuser.cpu.rows_along import AlongBatch
from fuser.cpu.rows_ordered import OrderedAcross, OrderedAlong
from fuser.cpu.rows_scanned import SIDE_BY_SIDE, ScannedBatch
from fuser.cpu.rows_serial import SerialBatch
from fuser.kernel_source import KERNEL_NAME, Operand, RowLoop, indent
from fuser.kernel_spec import CPU_LANES
from fuser.row_pass import RowPass

__all__ = ["emit_rows"]

# Elements of a tile along its rows, where rows are that short: of one pass over them, and of several, which find in the
# first cache what those before read and kept. Where memory is far, it has to be read and written in turn, a little at a
# time; of so many elements for each thread, which lie in the second cache, tiles are those of one pass.
TILE_ELEMENTS, KEPT_ELEMENTS, NEAR_ELEMENTS = 4096, 1024, 1 << 17
# Tiles for each thread, at least.
TILES = 4

_HEAD = """
#ifdef _OPENMP
extern "C" int omp_get_thread_num() noexcept;
extern "C" int omp_get_num_threads() noexcept;
#endif
extern "C" void* malloc(size_t) noexcept;
extern "C" void free(void*) noexcept;"""


def emit_rows(loop: RowLoop) -> str:
    """Write the entry and what it calls: tiles, and in each pass batches of a tile's rows."""
    kinds: tuple[type[RowBatch], type[RowBatch]] = (AlongBatch, AcrossBatch)
    if loop.rows.order is not None:
        kinds = (OrderedAlong, OrderedAcross) if loop.rows.order.is_cascade else (SerialBatch, SerialBatch)
    batch = kinds[loop.rows.is_across](loop)
    if loop.rows.scans:
        batch, loop = ScannedBatch(loop), ScannedBatch.as_one_pass(loop)
    writer = _RowLoopWriter(loop, batch)
    lines = [*writer.state(), *writer.base()]
    for level, step in enumerate(loop.passes):
        if step.element is not None:
            lines += batch.function(level, step, step.element)
    return "\n".join([_HEAD, *lines, *writer.tiles(), *writer.shared_batches(), *writer.entry(), ""])


class _RowLoopWriter:
    def __init__(self, loop: RowLoop, batch: RowBatch) -> None:
        self.loop = loop
        self.batch = batch
        self.first = loop.rows.reduced

    # --- what a tile has ---------------------------------------------------------------------------------------------
    def state(self) -> list[str]:
        """Write the struct of what there is once per row, and for each pass that of its accumulators."""
        names = [item.variable for item in self.loop.operands if item.variable in self.loop.per_row]
        names = [name for name in names if name in self.loop.types and name[0] == "v"]
        names += self.loop.row_values
        totals = [f"t{item.name}" for step in self.loop.passes for item in step.accumulators]
        fields = [f"  {self.loop.types[name]} {name}[{self.batch.lanes}];" for name in (*names, *totals)]
        lines = ["", "// What there is once per row of a tile.", "struct fuser_state {", *fields, "};"]
        if self.batch.apart:
            pointers = [f"  {self.loop.types[name]}* {name};" for name in self.batch.apart]
            lines += ["// What is kept of each element of a tile.", "struct fuser_kept {", *pointers, "};"]
        for level, step in enumerate(self.loop.passes):
            if step.accumulators:
                size = self.batch.capacity(step)
                lines += [
                    f"// What elements of pass {level} come to.",
                    f"struct fuser_block{level} {{",
                    *(f"  alignas(64) {item.type} m{item.name}[{size}];" for item in step.accumulators),
                    f"  fuser_block{level}() {{",
                    *(f"    for (auto& part : m{item.name}) part = {item.identity};" for item in step.accumulators),
                    "  }",
                    "};",
                ]
        return lines

    def base(self) -> list[str]:
        """Write the struct of where a tile's operands begin, and how many rows it has."""
        loop, first = self.loop, self.first
        outer = range(first + 1, loop.rank)
        lines = [
            "",
            "// Where a tile's operands begin, and how many rows it has of those that a tile takes.",
            "struct fuser_base {",
            *(f"  {item.pointer} {item.name};" for item in loop.operands),
            "  int64_t width;",
            "};",
            "static fuser_base fuser_find(const fuser_args& a, int64_t tile, int64_t rows) {",
            f"  const int64_t count = (a.size[{first}] + rows - 1) / rows;",
            f"  const int64_t i{first} = tile % count * rows;",
            "  int64_t rest = tile / count;",
        ]
        for dim in outer:
            lines += [f"  const int64_t i{dim} = rest % a.size[{dim}];", f"  rest /= a.size[{dim}];"]
        dims = range(first, loop.rank)
        places = [self.batch.address(item.address, item, dims, "i{0}") for item in loop.operands]
        left = f"a.size[{first}] - i{first}"
        return [*lines, f"  return {{{', '.join([*places, f'{left} < rows ? {left} : rows'])}}};", "}"]

    # --- tiles -------------------------------------------------------------------------------------------------------
    def tiles(self) -> list[str]:
        """Write the function that runs some tiles, all passes of each."""
        blocks = [f"  fuser_block{level} block{level};" for level in self.loop.combining]
        return [
            "",
            "// Tiles begin to end.",
            "static void fuser_range(const fuser_args& a, int64_t rows, int64_t begin, int64_t end) {",
            f"  const int64_t batches = {self.batch.count()};",
            *blocks,
            *indent(self._each_tile("begin", "end", is_shared=False)),
            "}",
        ]

    def shared_batches(self) -> list[str]:
        """Write the function that runs all tiles, one after another, the threads sharing each pass's batches."""
        levels = self.loop.combining
        if not levels:
            return []
        lines = ["", "#ifdef _OPENMP"]
        for level in levels:
            steps = self.loop.passes[level].accumulators
            fields = " ".join(f"{item.type} m{item.name}[{self.batch.lanes}];" for item in steps)
            lines.append(f"struct fuser_total{level} {{ {fields} }};")
        lines.append(
            "static bool fuser_share(const fuser_args& a, int64_t rows, int64_t tiles, int64_t batches, int threads) {"
        )
        for level in levels:
            size = f"sizeof(fuser_total{level}) * batches"
            lines.append(f"  const auto total{level} = static_cast<fuser_total{level}*>(malloc({size}));")
        missing = " || ".join(f"!total{level}" for level in levels)
        frees = " ".join(f"free(total{level});" for level in levels)
        return [
            *lines,
            f"  if ({missing}) {{ {frees} return false; }}",
            *indent(self._each_tile("0", "tiles", is_shared=True)),
            f"  {frees}",
            "  return true;",
            "}",
            "#endif",
        ]

    def _each_tile(self, begin: str, end: str, *, is_shared: bool) -> list[str]:
        # The walk over tiles, and in each over the passes.
        body = ["const fuser_base base = fuser_find(a, tile, rows);", *self._load_rows()]
        for level, step in enumerate(self.loop.passes):
            body += self._row_part(step)
            if step.element is not None:
                body += self._begin_totals(step)
                body += self._batches_of_threads(level, step) if is_shared else self._batches(level, step)
        return [
            "fuser_state state = {};",
            *self._allocate_kept(),
            f"for (int64_t tile = {begin}; tile < {end}; ++tile) {{",
            *indent(body),
            "}",
            *(f"free(kept.{name});" for name in self.batch.apart),
        ]

    def _batches(self, level: int, step: RowPass) -> list[str]:
        return [
            "for (int64_t batch = 0; batch < batches; ++batch) {",
            f"  {self._call_batch(level, step)}",
            *indent(self._add_total(step, f"block{level}")),
            "}",
        ]

    def _batches_of_threads(self, level: int, step: RowPass) -> list[str]:
        keep = " ".join(
            f"total{level}[batch].m{item.name}[c] = block{level}.m{item.name}[c];" for item in step.accumulators
        )
        lines = [
            "#pragma omp parallel num_threads(threads)",
            "{",
            *([f"  fuser_block{level} block{level};"] if keep else []),
            "  const int64_t share = (batches + omp_get_num_threads() - 1) / omp_get_num_threads();",
            "  const int64_t begin = share * omp_get_thread_num();",
            "  const int64_t end = begin + share < batches ? begin + share : batches;",
            "  for (int64_t batch = begin; batch < end; ++batch) {",
            f"    {self._call_batch(level, step)}",
            *([f"    for (int64_t c = 0; c < base.width; ++c) {{ {keep} }}"] if keep else []),
            "  }",
            "}",
        ]
        if not keep:
            return lines
        total = indent(self._add_total(step, f"total{level}[batch]"))
        return [*lines, "for (int64_t batch = 0; batch < batches; ++batch) {", *total, "}"]

    def _call_batch(self, level: int, step: RowPass) -> str:
        more = [*([f"block{level}"] if step.accumulators else []), *(["kept"] if self.batch.apart else [])]
        return f"fuser_batch{level}({', '.join(['a', 'base', 'state', 'batch', *more])});"

    def _allocate_kept(self) -> list[str]:
        # At most a megabyte each: without that much memory the process is at its end.
        fields = []
        for name in self.batch.apart:
            kind = self.loop.types[name]
            size = f"({self.batch.length()} + {UNIT}) * rows"
            fields.append(f"static_cast<{kind}*>(malloc(sizeof({kind}) * {size}))")
        checks = [f"if (!kept.{name}) __builtin_trap();" for name in self.batch.apart]
        return [f"const fuser_kept kept = {{{', '.join(fields)}}};", *checks] if fields else []

    # --- rows --------------------------------------------------------------------------------------------------------
    def _load_rows(self) -> list[str]:
        own = [item for item in self.loop.operands if item.variable in self.loop.per_row and not item.is_output]
        own = [item for item in own if item.variable in self.loop.types]
        loads = [f"state.{item.variable}[c] = fuser_to_compute({self._row_element(item)});" for item in own]
        return [f"for (int64_t c = 0; c < base.width; ++c) {{ {' '.join(loads)} }}"] if loads else []

    def _row_element(self, item: Operand) -> str:
        stride = self.batch.stride(item, self.first)
        return f"base.{item.name}[{'0' if stride == '0' else 'c' if stride == '1' else f'c * {stride}'}]"

    def _row_part(self, step: RowPass) -> list[str]:
        if step.row is None:
            return []
        known = {name: f"state.{own}[c]" for name, own in self.batch.row_reads(step.row)}
        known |= {name: f"state.{name}[c]" for name in step.row.writes if name[0] == "w"}
        known |= {item.variable: self._row_element(item) for item in self.loop.used_by(step.row) if item.is_output}
        return ["#pragma GCC ivdep", f"for (int64_t c = 0; c < base.width; ++c) {step.row.call(known)}"]

    def _begin_totals(self, step: RowPass) -> list[str]:
        sets = " ".join(f"state.t{item.name}[c] = {item.identity};" for item in step.accumulators)
        return [f"for (int64_t c = 0; c < base.width; ++c) {{ {sets} }}"] if sets else []

    def _add_total(self, step: RowPass, source: str) -> list[str]:
        if step.combine is None:
            return []
        known: dict[str, str] = {}
        for item in step.accumulators:
            known |= {f"{side}{item.name}": f"state.t{item.name}[c]" for side in "lm"}
            known[f"r{item.name}"] = f"{source}.m{item.name}[c]"
        return ["#pragma GCC ivdep", f"for (int64_t c = 0; c < base.width; ++c) {step.combine.call(known)}"]

    def entry(self) -> list[str]:
        """Write the entry."""
        first = self.first
        outer = [f"a.size[{dim}]" for dim in range(first + 1, self.loop.rank)]
        tiles = " * ".join([f"((a.size[{first}] + rows - 1) / rows)", *outer])
        share = "  if (tiles < 2 * threads && batches > 1 && fuser_share(a, rows, tiles, batches, threads)) return;"
        return [
            "",
            "// threads is 1 or torch's thread count.",
            f'extern "C" void {KERNEL_NAME}(const fuser_args* args, int threads) {{',
            "  const fuser_args& a = *args;",
            *(
                f"  fuser_prefer_huge_pages(a.{item.name}, a.numel * sizeof(*a.{item.name}));"
                for item in self.loop.operands
                if item.is_output and item.variable not in self.loop.per_row
            ),
            *indent(self._choose_rows()),
            f"  const int64_t tiles = {tiles};",
            "  if (threads == 1) return fuser_range(a, rows, 0, tiles);",
            "#ifdef _OPENMP",
            *([f"  const int64_t batches = {self.batch.count()};", share] if self.loop.combining else []),
            "#pragma omp parallel num_threads(threads)",
            "  {",
            "    const int64_t share = (tiles + omp_get_num_threads() - 1) / omp_get_num_threads();",
            "    const int64_t begin = share * omp_get_thread_num();",
            "    fuser_range(a, rows, begin, begin + share < tiles ? begin + share : tiles);",
            "  }",
            "#else",
            "  fuser_range(a, rows, 0, tiles);",
            "#endif",
            "}",
        ]

    def _choose_rows(self) -> list[str]:
        # Rows of a tile; few enough for all threads to have some.
        length, count = self.batch.length(), f"a.size[{self.first}]"
        if self.loop.rows.is_across or self.loop.rows.scans:
            least = CPU_LANES if self.loop.rows.is_across else SIDE_BY_SIDE
            return [
                f"int64_t rows = {self.batch.lanes};",
                f"while (rows > {least} && {count} < 2 * threads * rows) rows /= 2;",
            ]
        visits = sum(step.element is not None for step in self.loop.passes)
        near = f"(a.numel <= {NEAR_ELEMENTS} * threads ? {TILE_ELEMENTS} : {KEPT_ELEMENTS})"
        most = TILE_ELEMENTS if visits == 1 else near
        return [
            f"int64_t rows = {self.batch.lanes};",
            f"while (rows > 1 && rows * {length} > {most}) rows /= 2;",
            f"while (rows > 1 && {count} < {TILES} * threads * rows) rows /= 2;",
        ]
