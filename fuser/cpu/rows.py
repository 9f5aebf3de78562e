"""The loops of a kernel with reductions on the CPU.

Rows are taken in *tiles*: one row, whose neighbouring elements are computed side by side, or 64 neighbouring
rows, each in a lane of its own. Elements are combined a *chunk* at a time, which stays in the first cache; what the
chunks of a batch come to waits on a stack until it has a partner of the same size. Threads take tiles, or, where those
are few, batches.
"""

from __future__ import annotations

from fuser.codegen import KERNEL_NAME, Operand, RowLoop
from fuser.function import BATCH
from fuser.kernel_spec import CPU_LANES
from fuser.row_parts import RowPart, RowPass

__all__ = ["emit_rows"]

# Accumulators of a chunk, all lanes together.
CHUNK = 1024
MANY_ACCUMULATORS = 4

_HEAD = """
#ifdef _OPENMP
extern "C" int omp_get_thread_num() noexcept;
extern "C" int omp_get_num_threads() noexcept;
#endif
extern "C" void* malloc(size_t) noexcept;
extern "C" void free(void*) noexcept;"""


def emit_rows(loop: RowLoop) -> str:
    """Write the entry and what it calls: tiles, and in each pass batches of a tile's rows."""
    writer = _RowLoopWriter(loop)
    lines = [*writer.state(), *writer.base()]
    for level, step in enumerate(loop.passes):
        if step.element is not None:
            lines += writer.batch(level, step, step.element)
    return "\n".join([_HEAD, *lines, *writer.tiles(), *writer.shared_batches(), *writer.entry(), ""])


class _RowLoopWriter:
    def __init__(self, loop: RowLoop) -> None:
        self.loop = loop
        self.lanes = CPU_LANES if loop.rows.is_across else 1
        widest = max(len(step.accumulators) for step in loop.passes)
        self.chunk = (CHUNK if widest <= MANY_ACCUMULATORS else CHUNK // 4) // self.lanes
        # Chunks of a batch wait for partners in as many places as there are sizes.
        self.waiting = (BATCH // self.chunk).bit_length()
        self.inner = loop.rows.inner
        self.kept = range(loop.rows.reduced, loop.rank)

    # --- what a tile has ---------------------------------------------------------------------------------------------
    def state(self) -> list[str]:
        """Write the struct of what there is once per row, and for each pass that of its accumulators."""
        names = [item.variable for item in self.loop.operands if item.variable in self.loop.per_row]
        names = [name for name in names if name in self.loop.types and name[0] == "v"]
        names += self.loop.row_values
        totals = [f"t{item.name}" for step in self.loop.passes for item in step.accumulators]
        fields = [f"  {self.loop.types[name]} {name}[{self.lanes}];" for name in (*names, *totals)]
        lines = ["", "// What there is once per row of a tile.", "struct fuser_state {", *fields, "};"]
        if self.loop.kept:
            pointers = [f"  {self.loop.types[name]}* {name};" for name in self.loop.kept]
            lines += ["// What is kept of each element of a tile.", "struct fuser_kept {", *pointers, "};"]
        for level, step in enumerate(self.loop.passes):
            if step.accumulators:
                size = f"{self.chunk + self.waiting} * {self.lanes}"
                lines += [
                    f"// A chunk of pass {level}, and behind it what waits for a partner.",
                    f"struct fuser_block{level} {{",
                    *(f"  alignas(64) {item.type} m{item.name}[{size}];" for item in step.accumulators),
                    "};",
                ]
        return lines

    def base(self) -> list[str]:
        """Write the struct of where a tile's operands begin, and how many rows the tile has."""
        loop, first = self.loop, self.kept[0]
        fields = [f"  {item.pointer} {item.name};" for item in loop.operands]
        lines = [
            "",
            "// Where a tile's operands begin, and how many rows it has.",
            "struct fuser_base {",
            *fields,
            "  int64_t width;",
            "};",
            "static fuser_base fuser_find(const fuser_args& a, int64_t tile) {",
            f"  const int64_t count = (a.size[{first}] + {self.lanes - 1}) / {self.lanes};",
            f"  const int64_t i{first} = tile % count * {self.lanes};",
            "  int64_t rest = tile / count;",
        ]
        for dim in self.kept[1:]:
            lines += [f"  const int64_t i{dim} = rest % a.size[{dim}];", f"  rest /= a.size[{dim}];"]
        places = [self._address(item.address, item, self.kept, "i{0}") for item in loop.operands]
        left = f"a.size[{first}] - i{first}"
        width = f"{left} < {self.lanes} ? {left} : {self.lanes}"
        return [*lines, f"  return {{{', '.join([*places, width])}}};", "}"]

    def _address(self, pointer: str, item: Operand, dims: range, index: str) -> str:
        moves = [f"{index.format(dim)} * {self._stride(item, dim)}" for dim in dims if self._stride(item, dim) != "0"]
        return " + ".join([pointer, *moves])

    def _stride(self, item: Operand, dim: int) -> str:
        if dim < self.loop.rows.reduced and item.variable in self.loop.per_row:
            return "0"
        return str(item.inner) if dim == self.inner and item.inner < 2 else f"a.stride_{item.name}[{dim}]"

    # --- a batch of elements -----------------------------------------------------------------------------------------
    def batch(self, level: int, step: RowPass, element: RowPart) -> list[str]:
        """Write the function that walks over one batch of a tile's rows, and leaves its total first in the block."""
        walk = self._across(element) if self.loop.rows.is_across else self._along(element)
        more = f", fuser_block{level}& block" if step.accumulators else ""
        more += ", const fuser_kept& kept" if self.loop.kept else ""
        length = self._length()
        body = [
            f"const int64_t first = batch * {BATCH}, left = {length} - first;",
            f"const int64_t total = left < {BATCH} ? left : {BATCH};",
            *(["int depth = 0;"] if step.accumulators else []),
            f"for (int64_t done = 0; done < total; done += {self.chunk}) {{",
            f"  const int64_t count = total - done < {self.chunk} ? total - done : {self.chunk};",
            *_indent(walk),
            *(_indent(self._combine_chunk(step)) if step.accumulators else []),
            "}",
            *(self._finish_batch(step) if step.accumulators else []),
        ]
        return [
            "",
            f"// One batch of pass {level}.",
            "__attribute__((flatten, noinline)) static void",
            f"fuser_batch{level}(const fuser_args a, const fuser_base base, const fuser_state& state, int64_t batch"
            f"{more}) {{",
            f"  const int64_t width = {'base.width' if self.loop.rows.is_across else '1'};",
            *_indent(body),
            "}",
        ]

    def _along(self, element: RowPart) -> list[str]:
        # Neighbours along the reduced dimensions: one stretch after another along the innermost one.
        reads = [f"const auto {name} = state.{own}[0];" for name, own in self._row_reads(element)]
        expressions = {name: name for name, _ in self._row_reads(element)}
        return [
            *reads,
            "for (int64_t at = 0; at < count;) {",
            *_indent(self._place("first + done + at", element)),
            "  const int64_t rest0 = a.size[0] - i0, length = rest0 < count - at ? rest0 : count - at;",
            *_indent(self._each("i", "length", "at + i", "first + done + at + i", element, expressions)),
            "  at += length;",
            "}",
        ]

    def _across(self, element: RowPart) -> list[str]:
        # Neighbouring rows: one element of each after another.
        expressions = {name: f"state.{own}[c]" for name, own in self._row_reads(element)}
        return [
            "for (int64_t i = 0; i < count; ++i) {",
            *_indent(self._place("first + done + i", element)),
            *_indent(
                self._each(
                    *("c", "width", f"i * {self.lanes} + c", f"(first + done + i) * {self.lanes} + c"),
                    element,
                    expressions,
                )
            ),
            "}",
        ]

    def _row_reads(self, element: RowPart) -> list[tuple[str, str]]:
        # What a part reads of a tile's state: the variable, and its name there.
        own = {f"v{name[1:]}": name for name in self.loop.row_values}
        own |= {name: name for name in self.loop.per_row if name[0] == "v"}
        own |= {name: name for name in element.reads if name[0] == "t"}
        return [(name, own[name]) for name in element.reads if name in own]

    def _place(self, number: str, part: RowPart) -> list[str]:
        # Pointers to the element of a number.
        lines = [f"int64_t rest = {number};"] if self.loop.rows.reduced > 1 else [f"const int64_t i0 = {number};"]
        for dim in range(self.loop.rows.reduced - 1):
            lines += [f"const int64_t i{dim} = rest % a.size[{dim}];", f"rest /= a.size[{dim}];"]
        if self.loop.rows.reduced > 1:
            lines.append(f"const int64_t i{self.loop.rows.reduced - 1} = rest;")
        for item in self._full(part):
            place = self._address(f"base.{item.name}", item, range(self.loop.rows.reduced), "i{0}")
            lines.append(f"const auto {item.name} = {place};")
        return lines

    def _each(
        self, name: str, end: str, slot: str, kept_slot: str, part: RowPart, expressions: dict[str, str]
    ) -> list[str]:
        # The loop over neighbours.
        known, lines = dict(expressions), []
        for item in self._full(part):
            text = self._element(item, name)
            if item.is_output:
                known[item.variable] = text
            elif item.inner == 0:
                lines.append(f"const auto {item.variable} = fuser_to_compute({text});")
            else:
                known[item.variable] = f"fuser_to_compute({text})"
        known |= {variable: f"block.{variable}[{slot}]" for variable in part.writes if variable[0] == "m"}
        for variable in self.loop.kept:
            text = f"kept.{variable}[{kept_slot}]"
            known |= {variable: text} if variable in part.writes else {f"v{variable[1:]}": text}
        return [
            *lines,
            "#pragma GCC ivdep",
            f"for (int64_t {name} = 0; {name} < {end}; ++{name})",
            f"  {part.call(known)}",
        ]

    def _full(self, part: RowPart) -> list[Operand]:
        return [item for item in self.loop.used_by(part) if item.variable not in self.loop.per_row]

    def _element(self, item: Operand, index: str) -> str:
        stride = self._stride(item, self.inner)
        return f"{item.name}[{'0' if stride == '0' else index if stride == '1' else f'{index} * {stride}'}]"

    # --- combining ---------------------------------------------------------------------------------------------------
    def _combine_chunk(self, step: RowPass) -> list[str]:
        names = [item.name for item in step.accumulators]
        lanes = f" * {self.lanes}" if self.lanes > 1 else ""
        pair = self._fold(step, "2 * i", "2 * i + 1", "i")
        return [
            "// A balanced tree; what is missing of it is the identity.",
            "int64_t size = 1;",
            "while (size < count) size *= 2;",
            f"for (int64_t i = count{lanes}; i < size{lanes}; ++i) {{",
            *(f"  block.m{item.name}[i] = {item.identity};" for item in step.accumulators),
            "}",
            "for (int64_t half = size / 2; half > 0; half /= 2) {",
            *(["#pragma GCC ivdep"] if self.lanes == 1 else []),
            "  for (int64_t i = 0; i < half; ++i)",
            *_indent(_indent(pair)),
            "}",
            f"for (int64_t number = done / {self.chunk}; number & 1; number /= 2) {{",
            "  --depth;",
            *_indent(self._fold(step, f"({self.chunk} + depth)", "0", "0")),
            "}",
            *self._move(names, f"({self.chunk} + depth)", "0"),
            "++depth;",
        ]

    def _finish_batch(self, step: RowPass) -> list[str]:
        names = [item.name for item in step.accumulators]
        return [
            "--depth;",
            *self._move(names, "0", f"({self.chunk} + depth)"),
            "while (depth > 0) {",
            "  --depth;",
            *_indent(self._fold(step, f"({self.chunk} + depth)", "0", "0")),
            "}",
        ]

    def _fold(self, step: RowPass, left: str, right: str, to: str) -> list[str]:
        assert step.combine is not None, "it has accumulators"
        slots = {"l": left, "r": right, "m": to}
        known = {
            f"{side}{item.name}": f"block.m{item.name}[{self._slot(slot)}]"
            for side, slot in slots.items()
            for item in step.accumulators
        }
        return self._each_lane([step.combine.call(known)])

    def _move(self, names: list[str], to: str, source: str) -> list[str]:
        return self._each_lane(
            [f"block.m{name}[{self._slot(to)}] = block.m{name}[{self._slot(source)}];" for name in names]
        )

    def _slot(self, index: str) -> str:
        return f"{index}" if self.lanes == 1 else f"({index}) * {self.lanes} + c"

    def _each_lane(self, lines: list[str]) -> list[str]:
        if self.lanes == 1:
            return ["{", *_indent(lines), "}"]
        return ["#pragma GCC ivdep", "for (int64_t c = 0; c < width; ++c) {", *_indent(lines), "}"]

    # --- tiles -------------------------------------------------------------------------------------------------------
    def tiles(self) -> list[str]:
        """Write the function that runs some tiles, all passes of each."""
        lines = [
            "",
            "// Tiles begin to end.",
            "static void fuser_range(const fuser_args& a, int64_t begin, int64_t end) {",
            "  fuser_state state = {};",
            *(
                f"  fuser_block{level} block{level};"
                for level, step in enumerate(self.loop.passes)
                if step.accumulators
            ),
            f"  const int64_t batches = ({self._length()} + {BATCH - 1}) / {BATCH};",
            *_indent(self._allocate_kept()),
            "  for (; begin < end; ++begin) {",
            "    const fuser_base base = fuser_find(a, begin);",
            *_indent(_indent(self._load_rows())),
        ]
        for level, step in enumerate(self.loop.passes):
            body = self._row_part(step)
            if step.element is not None:
                block = f", block{level}" if step.accumulators else ""
                block += ", kept" if self.loop.kept else ""
                body += [
                    *self._begin_totals(step),
                    "for (int64_t batch = 0; batch < batches; ++batch) {",
                    f"  fuser_batch{level}(a, base, state, batch{block});",
                    *_indent(self._add_total(step, f"block{level}", "0")),
                    "}",
                ]
            lines += _indent(_indent(body))
        return [*lines, "  }", *_indent(self._free_kept()), "}"]

    def _allocate_kept(self) -> list[str]:
        # At most a megabyte each: without that much memory the process is at its end.
        fields = []
        for name in self.loop.kept:
            kind = self.loop.types[name]
            fields.append(f"static_cast<{kind}*>(malloc(sizeof({kind}) * {self._length()} * {self.lanes} + 1))")
        checks = [f"if (!kept.{name}) __builtin_trap();" for name in self.loop.kept]
        return [f"const fuser_kept kept = {{{', '.join(fields)}}};", *checks] if fields else []

    def _free_kept(self) -> list[str]:
        return [f"free(kept.{name});" for name in self.loop.kept]

    def _load_rows(self) -> list[str]:
        own = [item for item in self.loop.operands if item.variable in self.loop.per_row and not item.is_output]
        own = [item for item in own if item.variable in self.loop.types]
        loads = [f"state.{item.variable}[c] = fuser_to_compute({self._row_element(item)});" for item in own]
        return [f"for (int64_t c = 0; c < base.width; ++c) {{ {' '.join(loads)} }}"] if loads else []

    def _row_element(self, item: Operand) -> str:
        stride = self._stride(item, self.kept[0])
        return f"base.{item.name}[{'0' if stride == '0' else 'c' if stride == '1' else f'c * {stride}'}]"

    def _row_part(self, step: RowPass) -> list[str]:
        if step.row is None:
            return []
        known = {name: f"state.{own}[c]" for name, own in self._row_reads(step.row)}
        known |= {name: f"state.{name}[c]" for name in step.row.writes if name[0] == "w"}
        known |= {item.variable: self._row_element(item) for item in self.loop.used_by(step.row) if item.is_output}
        return ["#pragma GCC ivdep", f"for (int64_t c = 0; c < base.width; ++c) {step.row.call(known)}"]

    def _begin_totals(self, step: RowPass) -> list[str]:
        sets = " ".join(f"state.t{item.name}[c] = {item.identity};" for item in step.accumulators)
        return [f"for (int64_t c = 0; c < base.width; ++c) {{ {sets} }}"] if sets else []

    def _add_total(self, step: RowPass, block: str, first: str) -> list[str]:
        if step.combine is None:
            return []
        known: dict[str, str] = {}
        for item in step.accumulators:
            known |= {f"{side}{item.name}": f"state.t{item.name}[c]" for side in "lm"}
            known[f"r{item.name}"] = f"{block}.m{item.name}[{first} + c]"
        return [f"for (int64_t c = 0; c < base.width; ++c) {step.combine.call(known)}"]

    # --- threads -----------------------------------------------------------------------------------------------------
    def shared_batches(self) -> list[str]:
        """Write the function that runs all tiles, one after another, the threads sharing each pass's batches."""
        lines = ["", "#ifdef _OPENMP"]
        for level, step in enumerate(self.loop.passes):
            if step.accumulators:
                fields = " ".join(f"{item.type} m{item.name}[{self.lanes}];" for item in step.accumulators)
                lines.append(f"struct fuser_total{level} {{ {fields} }};")
        lines += [
            "static bool fuser_share(const fuser_args& a, int64_t tiles, int64_t batches, int threads) {",
            "  fuser_state state = {};",
        ]
        totals = [level for level, step in enumerate(self.loop.passes) if step.accumulators]
        for level in totals:
            lines += [
                f"  const auto total{level} = static_cast<fuser_total{level}*>("
                f"malloc(sizeof(fuser_total{level}) * batches));",
            ]
        missing = " || ".join(f"!total{level}" for level in totals)
        frees = " ".join(f"free(total{level});" for level in totals)
        lines += [
            f"  if ({missing}) {{ {frees} return false; }}",
            *_indent(self._allocate_kept()),
            "  for (int64_t tile = 0; tile < tiles; ++tile) {",
            "    const fuser_base base = fuser_find(a, tile);",
            *_indent(_indent(self._load_rows())),
        ]
        for level, step in enumerate(self.loop.passes):
            body = self._row_part(step)
            if step.element is not None:
                block = f", block{level}" if step.accumulators else ""
                block += ", kept" if self.loop.kept else ""
                keep = " ".join(
                    f"total{level}[batch].m{item.name}[c] = block{level}.m{item.name}[c];" for item in step.accumulators
                )
                body += [
                    *self._begin_totals(step),
                    "#pragma omp parallel num_threads(threads)",
                    "{",
                    *([f"  fuser_block{level} block{level};"] if step.accumulators else []),
                    "  const int64_t share = (batches + omp_get_num_threads() - 1) / omp_get_num_threads();",
                    "  const int64_t begin = share * omp_get_thread_num();",
                    "  const int64_t end = begin + share < batches ? begin + share : batches;",
                    "  for (int64_t batch = begin; batch < end; ++batch) {",
                    f"    fuser_batch{level}(a, base, state, batch{block});",
                    *([f"    for (int64_t c = 0; c < base.width; ++c) {{ {keep} }}"] if keep else []),
                    "  }",
                    "}",
                ]
                if step.accumulators:
                    body += [
                        "for (int64_t batch = 0; batch < batches; ++batch) {",
                        *_indent(self._add_total(step, f"total{level}[batch]", "0")),
                        "}",
                    ]
            lines += _indent(_indent(body))
        return [*lines, "  }", *_indent(self._free_kept()), f"  {frees}", "  return true;", "}", "#endif"]

    def entry(self) -> list[str]:
        """Write the entry."""
        first = self.kept[0]
        outer = [f"a.size[{dim}]" for dim in self.kept[1:]]
        tiles = " * ".join([f"((a.size[{first}] + {self.lanes - 1}) / {self.lanes})", *outer])
        return [
            "",
            "// threads is 1 or torch's thread count.",
            f'extern "C" void {KERNEL_NAME}(const fuser_args* args, int threads) {{',
            "  const fuser_args& a = *args;",
            f"  const int64_t tiles = {tiles};",
            "  if (threads == 1) return fuser_range(a, 0, tiles);",
            "#ifdef _OPENMP",
            f"  const int64_t batches = ({self._length()} + {BATCH - 1}) / {BATCH};",
            "  if (tiles < 2 * threads && batches > 1 && fuser_share(a, tiles, batches, threads)) return;",
            "#pragma omp parallel num_threads(threads)",
            "  {",
            "    const int64_t share = (tiles + omp_get_num_threads() - 1) / omp_get_num_threads();",
            "    const int64_t begin = share * omp_get_thread_num();",
            "    fuser_range(a, begin, begin + share < tiles ? begin + share : tiles);",
            "  }",
            "#else",
            "  fuser_range(a, 0, tiles);",
            "#endif",
            "}",
        ]

    def _length(self) -> str:
        return " * ".join(f"a.size[{dim}]" for dim in range(self.loop.rows.reduced))


def _indent(lines: list[str]) -> list[str]:
    return [line if line.startswith("#") else f"  {line}" for line in lines]
