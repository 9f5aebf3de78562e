"""A batch along rows on the CPU: neighbours of a row side by side in vectors.

Four vectors of elements, a unit, become one of parts while they are in registers, by two levels of the tree; then the
parts of all rows of the tile do, which are powers of two beside each other. What is no whole unit goes through buffers.
Where any order serves, units are combined with each other first, which takes no vector apart: so many at a time that
sums are as exact as the tree's. Units of short rows are a vector of the narrowest type.
"""

from __future__ import annotations

from collections.abc import Sequence

from fuser.cpu.row_batch import QUARTER, UNIT, RowBatch
from fuser.kernel_source import Operand, RowLoop, indent
from fuser.row_pass import RowPart, RowPass

__all__ = ["AlongBatch"]

# Parts of a tile: of all its rows, or a quarter of a batch.
PARTS = 2048
# Units that are combined with each other where any order serves.
STACK = 16
# Bytes of a vector; accumulators fill one.
VECTOR_BYTES = 64
WIDE_TYPES = ("double", "int64_t", "uint64_t", "long long", "unsigned long long", "long", "unsigned long")


class AlongBatch(RowBatch):
    """Walks along the reduced dimensions, for a tile of some rows one after another."""

    def __init__(self, loop: RowLoop) -> None:
        super().__init__(loop)
        # Memory of its own would be one more thing that a long row takes of the first cache.
        results = self._results() if loop.rows.is_long else []
        for name in loop.kept:
            home = next((item for item in results if loop.types[name] == item.info.storage), None)
            if home is not None:
                self.homes[name] = home
                results.remove(home)

    def _results(self) -> list[Operand]:
        # What the last pass alone writes, of every element, densely along a row.
        *before, last = [step.element for step in self.loop.passes if step.element]
        found = [item for item in self.loop.full(last) if item.is_output and self.stride(item, 0) == "1"]
        written = {name for part in before for name in part.writes}
        return [item for item in found if self.loop.rows.reduced == 1 and item.variable not in written]

    def capacity(self, step: RowPass) -> int:
        """Return how many parts a block holds: those of a tile, and what is read beyond them."""
        return PARTS + QUARTER * self._lanes(step)

    def size(self, step: RowPass) -> int:
        """Return how many elements are computed together."""
        lanes = self._lanes(step)
        return max(lanes, self._narrowest(step)) if self._is_brief(step) else QUARTER * lanes

    def _narrowest(self, step: RowPass) -> int:
        # Elements of a vector of the narrowest type.
        items = self.loop.full(step.element) if step.element else []
        return VECTOR_BYTES // min((item.info.dtype.itemsize for item in items), default=VECTOR_BYTES)

    def _lanes(self, step: RowPass) -> int:
        return VECTOR_BYTES // (8 if any(item.type in WIDE_TYPES for item in step.accumulators) else 4)

    def helpers(self, level: int, step: RowPass) -> list[str]:
        """Write how parts are combined."""
        lanes, names = self._lanes(step), [item.name for item in step.accumulators]
        parameters = [f"const {item.type}* f{item.name}" for item in step.accumulators]
        parameters += [f"{item.type}* m{item.name}" for item in step.accumulators]

        def combine(side: str, begin: int, to: str, at: int) -> list[str]:
            left, right = f"2 * c + {2 * begin}", f"2 * c + {2 * begin + 1}"
            target = f"[c + {at}]" if at else "[c]"
            text = self.combine(step, f"{side}{{0}}[{left}]", f"{side}{{0}}[{right}]", f"{to}{{0}}{target}")
            return ["#pragma GCC ivdep", f"for (int c = 0; c < {lanes}; ++c) {text}"]

        block = [f"block.m{name}" for name in names]
        arguments = [*(f"{name} + i" for name in block), *(f"{name} + i / {QUARTER}" for name in block)]
        return [
            "",
            f"// {QUARTER * lanes} parts become {lanes}: neighbours are combined, twice.",
            "// Loops of one vector each stay in registers.",
            f"FUSER_INLINE void fuser_quarter{level}(const fuser_args& a, {', '.join(parameters)}) {{",
            *(f"  alignas(64) {item.type} h{item.name}[{2 * lanes}];" for item in step.accumulators),
            *indent(combine("f", 0, "h", 0)),
            *indent(combine("f", lanes, "h", lanes)),
            *indent(combine("h", 0, "m", 0)),
            "}",
            *self._join_function(level, step, parameters),
            "",
            "// Each row's parts become one; they are a power of two. What lies behind them is combined in vain.",
            "// Of one row alone, those behind the used ones are the identity, and what becomes of them is, too.",
            "__attribute__((flatten, noinline)) static void fuser_fold"
            f"{level}(const fuser_args a, fuser_block{level}& block, int64_t width, int64_t parts, int64_t used) {{",
            f"  for (; parts >= {QUARTER}; parts /= {QUARTER}) {{",
            "    const int64_t count = width == 1 ? used : width * parts;",
            f"    for (int64_t i = 0; i < count; i += {QUARTER * lanes}) {{",
            f"      fuser_quarter{level}(a, {', '.join(arguments)});",
            "    }",
            f"    used = (used + {QUARTER - 1}) / {QUARTER};",
            *indent(self._end_parts(step, f"parts / {QUARTER}"), 2),
            "  }",
            "  if (parts == 1) return;",
            "#pragma GCC ivdep",
            "  for (int64_t i = 0; i < width; ++i) {",
            f"    {self.combine(step, 'block.m{0}[2 * i]', 'block.m{0}[2 * i + 1]', 'block.m{0}[i]')}",
            "  }",
            "}",
        ]

    def _join_function(self, level: int, step: RowPass, parameters: Sequence[str]) -> list[str]:
        # Out of line: units are more.
        if not self._joins(step):
            return []
        given = [f"{side}{item.name}" for side in "fm" for item in step.accumulators]
        return [
            "",
            "// The same, of parts of units.",
            "__attribute__((flatten, noinline)) static void "
            f"fuser_join{level}(const fuser_args& a, {', '.join(parameters)}) {{",
            f"  fuser_quarter{level}(a, {', '.join(given)});",
            "}",
        ]

    def combine(self, step: RowPass, left: str, right: str, to: str) -> str:
        """Return the call that combines what there is in two places, for each accumulator."""
        assert step.combine is not None, "it has accumulators"
        known: dict[str, str] = {}
        for item in step.accumulators:
            for side, slot in zip("lrm", (left, right, to), strict=True):
                known[f"{side}{item.name}"] = slot.format(item.name)
        return step.combine.call(known)

    def walk(self, level: int, step: RowPass, element: RowPart) -> list[str]:
        """Write the walk over one row after another."""
        known = {name: name for name, _ in self.row_reads(element)}
        rows = [f"const auto {name} = state.{own}[row];" for name, own in self.row_reads(element)]
        rows += [f"const auto row_{item.name} = {self._row_of(item)};" for item in self.loop.full(element)]
        body = self.units(level, step, element, known) if step.accumulators else self._stretches(element, known)
        before = [*self.begin(step), *self._buffers(step, element)] if step.accumulators else []
        return [
            *before,
            "for (int64_t row = 0; row < width; ++row) {",
            *indent(rows),
            *indent(self.kept(f" + row * (({self.length()} + {UNIT - 1}) / {UNIT} * {UNIT})")),
            *(f"  const auto kept_{name} = {self._row_of(item)};" for name, item in self.homes.items()),
            *indent(body),
            "}",
            *(self.finish(level) if step.accumulators else []),
        ]

    def begin(self, step: RowPass) -> list[str]:
        """Write what comes before the rows of a tile."""
        unit, each = self.size(step), str(self._parts_of(step))
        if self._joins(step):
            each = f"(is_deep ? {QUARTER * QUARTER} : {QUARTER})"
        few = f"size < {unit * STACK} ? {self._lanes(step)}" if self._stacks(step) else f"size < {unit} ? size"
        return [
            "// Parts of a row; what is missing of its tree is the identity.",
            "int64_t size = 1;",
            "while (size < total) size *= 2;",
            *([f"const bool is_deep = size >= {QUARTER**3 * unit};"] if self._joins(step) else []),
            f"const int64_t parts = {few} : size / {each};",
            "int64_t used = parts;",
        ]

    def _stacks(self, step: RowPass) -> bool:
        # Decisions take longer than to take a vector apart.
        fits = self.loop.rows.is_long or self._narrowest(step) < QUARTER * self._lanes(step)
        return fits and step.is_free and step.commutes and not step.decides

    def _is_brief(self, step: RowPass) -> bool:
        # Whether rows have so few vectors that a unit of four would be too many.
        return self._stacks(step) and not self.loop.rows.is_long

    def _joins(self, step: RowPass) -> bool:
        # Whether parts of very long rows are joined as they come.
        return self.loop.rows.is_long and not self._stacks(step)

    def _parts_of(self, step: RowPass) -> int:
        # Elements of each part.
        return self.size(step) * (STACK if self._stacks(step) else 1) // self._lanes(step)

    def finish(self, level: int) -> list[str]:
        """Write what comes after them."""
        return [f"fuser_fold{level}(a, block, width, parts, used);"]

    def _end_parts(self, step: RowPass, parts: str) -> list[str]:
        # As far as they are read together with those that are used.
        own = " ".join(f"block.m{item.name}[i] = {item.identity};" for item in step.accumulators)
        end = f"i < {parts} && i % {QUARTER * self._lanes(step)} != 0"
        return [f"for (int64_t i = used; width == 1 && {end}; ++i) {{ {own} }}"]

    def _stretches(self, element: RowPart, known: dict[str, str]) -> list[str]:
        return [
            "for (int64_t done = 0; done < total;) {",
            *indent(self.place("first + done", self.loop.full(element), "row_{0}")),
            "  const int64_t count = length < total - done ? length : total - done;",
            *indent(self.fixed(element)),
            "#pragma GCC ivdep",
            "  for (int64_t i = 0; i < count; ++i)",
            f"    {self.call(element, 'i', 'first + done + i', known)}",
            "  done += count;",
            "}",
        ]

    def units(self, level: int, step: RowPass, element: RowPart, known: dict[str, str]) -> list[str]:
        """Write the walk over one row."""
        stacks = self._stacks(step)
        walk = self._stacked(level, step, element, known) if stacks else self._single(level, step, element, known)
        return [
            "int64_t done = 0;",
            *walk,
            *self._end_parts(step, "parts"),
            "for (int64_t i = used; width > 1 && i < parts; ++i) {",
            *(f"  block.m{item.name}[row * parts + i] = {item.identity};" for item in step.accumulators),
            "}",
        ]

    def _single(self, level: int, step: RowPass, element: RowPart, known: dict[str, str]) -> list[str]:
        # Each unit becomes parts.
        if self._joins(step):
            return self._joined(level, step, element, known)
        unit, quarter = self.size(step), self._quarter(level, step, "own", "done")
        last = self._last_unit(step, quarter)
        walk = self._units_until("total", step, element, known, [quarter], last)
        return [*walk, f"if (size >= {unit}) used = done / {QUARTER};"]

    def _last_unit(self, step: RowPass, quarter: str) -> list[str]:
        # The elements of a row, or of its last batch, that is less than a unit are parts.
        unit = self.size(step)
        few = " ".join(f"block.m{item.name}[row * parts + i] = own{item.name}[i];" for item in step.accumulators)
        return [
            f"if (size < {unit}) {{",
            f"  for (int i = 0; i < {unit}; ++i) {{ {few} }}",
            "} else {",
            f"  {quarter}",
            "}",
        ]

    def _joined(self, level: int, step: RowPass, element: RowPart, known: dict[str, str]) -> list[str]:
        # Four units' parts become a quarter of them at once, where there are many: at the end of a row they would wait
        # for each other, with nothing else left to do.
        unit, lanes, names = self.size(step), self._lanes(step), [item.name for item in step.accumulators]
        span = QUARTER * unit
        slots = [f"to{name} + (is_deep ? done % {span} : done) / {QUARTER}" for name in names]
        quarter = f"fuser_quarter{level}(a, {', '.join([*(f'own{name}' for name in names), *slots])});"
        slots = [f"block.m{name} + row * parts + done / {span} * {lanes}" for name in names]
        join = f"fuser_join{level}(a, {', '.join([*(f'few{name}' for name in names), *slots])});"
        nothing = " ".join(f"few{item.name}[i] = {item.identity};" for item in step.accumulators)
        after = f"if (is_deep && done % {span} == {span - unit}) {join}"
        return [
            *(f"alignas(64) {item.type} few{item.name}[{unit}];" for item in step.accumulators),
            *(f"const auto to{name} = is_deep ? few{name} : block.m{name} + row * parts;" for name in names),
            *self._units_until(
                "total", step, element, known, [quarter, after], [*self._last_unit(step, quarter), after]
            ),
            f"if (is_deep && done % {span} != 0) {{",
            f"  for (int64_t i = done % {span} / {QUARTER}; i < {unit}; ++i) {{ {nothing} }}",
            f"  {join}",
            "}",
            f"if (size >= {unit}) used = is_deep ? (done + {span - 1}) / {span} * {lanes} : done / {QUARTER};",
        ]

    def _stacked(self, level: int, step: RowPass, element: RowPart, known: dict[str, str]) -> list[str]:
        # A stack of units becomes parts.
        unit, lanes = self.size(step), self._lanes(step)
        span = unit * STACK
        identity = " ".join(f"all{item.name}[c] = {item.identity};" for item in step.accumulators)
        return [
            f"for (int64_t begin = 0; begin < total; begin += {span}) {{",
            f"  const int64_t until = total - begin < {span} ? total : begin + {span};",
            *(f"  alignas(64) {item.type} all{item.name}[{unit}];" for item in step.accumulators),
            f"  for (int c = 0; c < {unit}; ++c) {{ {identity} }}",
            *indent(self._units_until("until", step, element, known)),
            *indent(self._unstack(level, step)),
            "}",
            f"used = (total + {span - 1}) / {span} * {lanes};",
        ]

    def _unstack(self, level: int, step: RowPass) -> list[str]:
        # What becomes of a stack's unit.
        if not self._is_brief(step):
            return [self._quarter(level, step, "all", "begin")]
        unit, lanes = self.size(step), self._lanes(step)
        to = f"block.m{{0}}[row * parts + begin / {self._parts_of(step)} + c]"
        copy = " ".join(f"{to} = all{{0}}[c];".format(item.name) for item in step.accumulators)
        join = copy if unit == lanes else self.combine(step, "all{0}[c]", f"all{{0}}[c + {lanes}]", to)
        return ["#pragma GCC ivdep", f"for (int c = 0; c < {lanes}; ++c) {{ {join} }}"]

    def _units_until(
        self,
        until: str,
        step: RowPass,
        element: RowPart,
        known: dict[str, str],
        join: Sequence[str] = (),
        join_last: Sequence[str] = (),
    ) -> list[str]:
        # The walk over units up to an element. ``join``: what becomes of each; ``join_last``: of what is no whole one.
        unit = self.size(step)
        return [
            f"while (done < {until}) {{",
            "  {",
            *indent(self.place("first + done", self.loop.full(element), "row_{0}"), 2),
            f"    const int64_t count = length < {until} - done ? length : {until} - done;",
            *indent(self.fixed(element), 2),
            f"    for (int64_t i = 0; i + {unit} <= count; i += {unit}, done += {unit}) {{",
            *indent(indent([*self.unit(step, element, known, "i + "), *join]), 2),
            "    }",
            "  }",
            f"  if (done == {until}) break;",
            *indent(self.end(step, element, known)),
            *indent(join_last),
            f"  done += {unit};",
            "}",
        ]

    def _quarter(self, level: int, step: RowPass, name: str, at: str) -> str:
        # What makes parts of a unit that begins, or of units that begin, at an element.
        given = [f"{name}{item.name}" for item in step.accumulators]
        slots = [f"block.m{item.name} + row * parts + {at} / {self._parts_of(step)}" for item in step.accumulators]
        return f"fuser_quarter{level}(a, {', '.join([*given, *slots])});"

    def unit(
        self,
        step: RowPass,
        element: RowPart,
        known: dict[str, str],
        index: str,
        name: str = "{0}",
        *,
        is_end: bool = False,
    ) -> list[str]:
        """Write what makes of a unit's elements what is combined, in ``own...``, or combines it with a stack's."""
        # In loops of one vector of the narrowest type each: a compiler takes one size of vectors
        # for a loop, and what it stores in small ones is slow to load in larger ones.
        unit, stacks = self.size(step), self._stacks(step)
        count = min(max(self._lanes(step), self._narrowest(step)), unit)
        lines = [f"alignas(64) {item.type} own{item.name}[{unit}];" for item in step.accumulators if not stacks]
        made = " ".join(f"{item.type} e{item.name};" for item in step.accumulators)
        for begin in range(0, unit, count):
            slot = f"c + {begin}" if begin else "c"
            own = {item: f"own{item.name}[{slot}]" for item in step.accumulators}
            to = {f"m{item.name}": f"e{item.name}" if is_end or stacks else own[item] for item in step.accumulators}
            to |= {name: f"end_{name}[{slot}]" for name in self._brought_home(element) if is_end}
            call = self.call(element, f"{index}{slot}", f"first + done + {slot}", known | to, name, is_dense=is_end)
            loop = f"for (int c = 0; c < {count}; ++c)"
            if not (is_end or stacks):
                lines += ["#pragma GCC ivdep", f"{loop} {call}"]
                continue
            lasts = [f"e{item.name} = {slot} < end ? e{item.name} : {item.identity};" for item in own if is_end]
            joins = [f"{to} = e{item.name};" for item, to in own.items()]
            if stacks:
                joins = [self.combine(step, f"all{{0}}[{slot}]", "e{0}", f"all{{0}}[{slot}]")]
            each = ["#pragma GCC ivdep", f"{loop} {{ {' '.join([made, call, *lasts, *joins])} }}"]
            if not is_end:
                lines += each
                continue
            nothing = " ".join(f"{to} = {item.identity};" for item, to in own.items())
            otherwise = [] if stacks else ["} else {", f"  {loop} {{ {nothing} }}"]
            lines += [f"if (end > {begin}) {{", *indent(each), *otherwise, "}"]
        return lines

    def end(self, step: RowPass, element: RowPart, known: dict[str, str]) -> list[str]:
        """Write the end of a row: what is no whole unit."""
        # Elements that are no whole unit, with others in place of what is missing: what lies behind them in memory, or,
        # where there is nothing, the first of them, in a buffer. What is made of those is the identity.
        unit = self.size(step)
        items = self.loop.full(element)
        lines = [
            "// The end of a row, or of a stretch of it.",
            f"const int end = total - done < {unit} ? static_cast<int>(total - done) : {unit};",
            *self.place("first + done", items, "row_{0}"),
        ]
        for item in items:
            lines += (
                [f"const auto end_{item.name} = buffer_{item.name};"] if item.is_output else self._read_end(item, unit)
            )
        kept = self._brought_home(element)
        lines += [f"alignas(64) {self.loop.types[name]} end_{name}[{unit}];" for name in kept]
        lines += self.unit(step, element, known, "", "end_{0}", is_end=True)
        lines += [f"for (int i = 0; i < end; ++i) kept_{name}[first + done + i] = end_{name}[i];" for name in kept]
        for item in items:
            lines += self._copy_end(item, f"{self._place(item)} = end_{item.name}[at + i];") if item.is_output else []
        return lines

    def _brought_home(self, element: RowPart) -> list[str]:
        # What a pass keeps where a result will be: nothing may be written behind a row's end there.
        return [name for name in self.homes if name in element.writes]

    def _row_of(self, item: Operand) -> str:
        # Where a row of an operand begins.
        return self.address(f"base.{item.name}", item, [self.loop.rows.reduced], "row")

    def _read_end(self, item: Operand, unit: int) -> list[str]:
        name, is_one_stretch = item.name, self.loop.rows.reduced == 1
        if item.is_counter and item.inner == 1 and is_one_stretch:
            return [f"const auto end_{name} = {name};"]
        copy = [
            *self._copy_end(item, f"buffer_{name}[at + i] = {self._place(item)};"),
            f"for (int i = end; i < {unit}; ++i) buffer_{name}[i] = buffer_{name}[0];",
        ]
        if item.inner != 1 or item.is_counter:
            return [*copy, f"const auto end_{name} = buffer_{name};"]
        goes_on = [f"{name} + {unit - 1} <= last_{name}", *([] if is_one_stretch else ["length >= end"])]
        # All rows may have the same end.
        is_new = f" && (row == 0 || {self.stride(item, self.loop.rows.reduced)} != 0)" if is_one_stretch else ""
        return [
            f"const bool goes_on_{name} = {' && '.join(goes_on)};",
            f"if (!goes_on_{name}{is_new}) {{",
            *indent(copy),
            "}",
            f"const auto end_{name} = goes_on_{name} ? {name} : buffer_{name};",
        ]

    def _buffers(self, step: RowPass, element: RowPart) -> list[str]:
        # What the ends of rows need: room, and the last element in memory.
        unit, lines = self.size(step), []
        for item in self.loop.full(element):
            lines.append(f"alignas(64) {item.info.storage} buffer_{item.name}[{unit}];")
            if not item.is_output and not item.is_counter:
                ends = (f"(a.size[{dim}] - 1) * {self.stride(item, dim)}" for dim in range(self.loop.rank))
                lines.append(f"const auto last_{item.name} = {' + '.join([item.address, *ends])};")
        return lines

    def _copy_end(self, item: Operand, move: str) -> list[str]:
        return [
            "for (int64_t at = 0; at < end;) {",
            *indent(self.place("first + done + at", [item], "row_{0}")),
            "  const int64_t count = length < end - at ? length : end - at;",
            f"  for (int64_t i = 0; i < count; ++i) {move}",
            "  at += count;",
            "}",
        ]

    def _place(self, item: Operand) -> str:
        stride = self.stride(item, 0)
        return f"{item.name}[{'0' if stride == '0' else 'i' if stride == '1' else f'i * {stride}'}]"
