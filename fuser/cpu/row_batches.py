"""One batch of a pass over a tile's rows, in the canonical tree, on the CPU.

Neighbours of a row are computed side by side in vectors: four vectors of elements become one of parts while they are in
registers, by two levels of the tree, and so on among the parts of all rows of the tile. Or neighbouring rows are, each
in a lane of its own: four elements of each at a time, whose part waits on a stack for a partner of the same size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence

from fuser.codegen import Operand, RowLoop
from fuser.function import BATCH
from fuser.kernel_spec import CPU_LANES
from fuser.row_parts import RowPart, RowPass

__all__ = ["AcrossBatch", "AlongBatch", "RowBatch", "indent"]

# Elements of a row, or rows, whose part is made at a time.
QUARTER = 4
# Parts of a tile along rows: of all its rows, or a quarter of a batch.
PARTS = 2048
# Bytes of a vector; accumulators fill one.
VECTOR_BYTES = 64
WIDE_TYPES = ("double", "int64_t", "uint64_t", "long long", "unsigned long long", "long", "unsigned long")


class RowBatch(ABC):
    """Writes the functions that walk over one batch of a tile, whose results come first in the tile's block."""

    def __init__(self, loop: RowLoop) -> None:
        self.loop = loop
        self.inner = loop.rows.inner

    @abstractmethod
    def capacity(self, step: RowPass) -> int:
        """Return how many parts a block holds."""

    @abstractmethod
    def helpers(self, level: int, step: RowPass) -> list[str]:
        """Write what the batches of a pass with reductions call."""

    @abstractmethod
    def walk(self, level: int, step: RowPass, element: RowPart) -> list[str]:
        """Write the walk over elements ``first`` to ``first + total``."""

    def function(self, level: int, step: RowPass, element: RowPart) -> list[str]:
        """Write the function of one batch."""
        more = f", fuser_block{level}& block" if step.accumulators else ""
        more += ", const fuser_kept& kept" if self.loop.kept else ""
        return [
            *(self.helpers(level, step) if step.accumulators else []),
            "",
            f"// One batch of pass {level}.",
            "__attribute__((flatten, noinline)) static void",
            f"fuser_batch{level}(const fuser_args a, const fuser_base base, const fuser_state& state, int64_t batch"
            f"{more}) {{",
            f"  const int64_t width = base.width, first = batch * {BATCH}, left = {self.length()} - first;",
            f"  const int64_t total = left < {BATCH} ? left : {BATCH};",
            *indent(self.walk(level, step, element)),
            "}",
        ]

    def length(self) -> str:
        """Return the number of elements of a row."""
        return " * ".join(f"a.size[{dim}]" for dim in range(self.loop.rows.reduced))

    # --- operands ----------------------------------------------------------------------------------------------------
    def address(self, pointer: str, item: Operand, dims: Iterable[int], index: str) -> str:
        """Return a pointer, moved along some dimensions by ``index`` with each one's number in it."""
        moves = [f"{index.format(dim)} * {self.stride(item, dim)}" for dim in dims if self.stride(item, dim) != "0"]
        return " + ".join([pointer, *moves])

    def stride(self, item: Operand, dim: int) -> str:
        """Return an operand's stride: a number where the text knows it."""
        if dim < self.loop.rows.reduced and item.variable in self.loop.per_row:
            return "0"
        return str(item.inner) if dim == self.inner and item.inner < 2 else f"a.stride_{item.name}[{dim}]"

    def row_reads(self, part: RowPart) -> list[tuple[str, str]]:
        """Return what a part reads of a tile's state: the variable, and its name there."""
        own = {f"v{name[1:]}": name for name in self.loop.row_values}
        own |= {name: name for name in self.loop.per_row if name[0] == "v"}
        own |= {name: name for name in part.reads if name[0] == "t"}
        return [(name, own[name]) for name in part.reads if name in own]

    def _place(self, number: str, part: RowPart, bases: str) -> list[str]:
        # Pointers to the element of a number, and how many follow it without a jump.
        reduced = self.loop.rows.reduced
        lines = [f"int64_t rest = {number};"] if reduced > 1 else [f"const int64_t i0 = {number};"]
        for dim in range(reduced - 1):
            lines += [f"const int64_t i{dim} = rest % a.size[{dim}];", f"rest /= a.size[{dim}];"]
        if reduced > 1:
            lines.append(f"const int64_t i{reduced - 1} = rest;")
        for item in self._full(part):
            place = self.address(bases.format(item.name), item, range(reduced), "i{0}")
            lines.append(f"const auto {item.name} = {place};")
        return [*lines, "const int64_t length = a.size[0] - i0;"]

    def _kept(self, move: str = "") -> list[str]:
        # Pointers of their own: those in the struct could change with every element that is written.
        return [f"const auto kept_{name} = kept.{name}{move};" for name in self.loop.kept]

    def _full(self, part: RowPart) -> list[Operand]:
        return [item for item in self.loop.used_by(part) if item.variable not in self.loop.per_row]

    def _element(self, part: RowPart, index: str, kept: str, known: dict[str, str], suffix: str = "") -> str:
        # The call for an element: operands at ``index``, what is kept at ``kept``.
        known = dict(known)
        for item in self._full(part):
            stride = self.stride(item, self.inner)
            if stride == "0" and not item.is_output:
                known[item.variable] = f"{item.variable}{suffix}"
                continue
            own = "0" if stride == "0" else index if stride == "1" else f"({index}) * {stride}"
            text = f"{item.name}{suffix}[{own}]"
            known[item.variable] = text if item.is_output else f"fuser_to_compute({text})"
        for variable in self.loop.kept:
            text = f"kept_{variable}[{kept}]"
            known |= {variable: text} if variable in part.writes else {f"v{variable[1:]}": text}
        return part.call(known)

    def _fixed(self, part: RowPart, suffix: str = "") -> list[str]:
        # Elements that neighbours share.
        return [
            f"const auto {item.variable}{suffix} = fuser_to_compute({item.name}{suffix}[0]);"
            for item in self._full(part)
            if self.stride(item, self.inner) == "0" and not item.is_output
        ]


class AlongBatch(RowBatch):
    """Neighbours along the reduced dimensions, for a tile of some rows one after another."""

    def capacity(self, step: RowPass) -> int:
        return PARTS + QUARTER * self._lanes(step)

    def _lanes(self, step: RowPass) -> int:
        return VECTOR_BYTES // (8 if any(item.type in WIDE_TYPES for item in step.accumulators) else 4)

    def helpers(self, level: int, step: RowPass) -> list[str]:
        lanes, names = self._lanes(step), [item.name for item in step.accumulators]
        parameters = [f"const {item.type}* f{item.name}" for item in step.accumulators]
        parameters += [f"{item.type}* m{item.name}" for item in step.accumulators]

        def combine(side: str, begin: int, to: str, at: int) -> list[str]:
            left, right = f"2 * c + {2 * begin}", f"2 * c + {2 * begin + 1}"
            target = f"[c + {at}]" if at else "[c]"
            text = self._combine(step, f"{side}{{0}}[{left}]", f"{side}{{0}}[{right}]", f"{to}{{0}}{target}")
            return ["#pragma GCC ivdep", f"for (int c = 0; c < {lanes}; ++c) {text}"]

        block = [f"block.m{name}" for name in names]
        arguments = [*(f"{name} + i" for name in block), *(f"{name} + i / {QUARTER}" for name in block)]
        return [
            "",
            f"// {QUARTER * lanes} parts become {lanes}: neighbours are combined, twice. Loops of one vector each stay in registers.",
            f"FUSER_INLINE void fuser_quarter{level}(const fuser_args& a, {', '.join(parameters)}) {{",
            *(f"  alignas(64) {item.type} h{item.name}[{2 * lanes}];" for item in step.accumulators),
            *indent(combine("f", 0, "h", 0)),
            *indent(combine("f", lanes, "h", lanes)),
            *indent(combine("h", 0, "m", 0)),
            "}",
            "",
            "// Each row's parts become one; they are a power of two.",
            "__attribute__((flatten, noinline)) static void",
            f"fuser_fold{level}(const fuser_args a, fuser_block{level}& block, int64_t rows, int64_t parts) {{",
            f"  for (; parts >= {QUARTER}; parts /= {QUARTER}) {{",
            "    const int64_t count = rows * parts;",
            f"    for (int64_t i = count; i % {QUARTER * lanes} != 0; ++i) {{",
            *(f"      block.m{item.name}[i] = {item.identity};" for item in step.accumulators),
            "    }",
            f"    for (int64_t i = 0; i < count; i += {QUARTER * lanes}) {{",
            f"      fuser_quarter{level}(a, {', '.join(arguments)});",
            "    }",
            "  }",
            "  if (parts == 1) return;",
            "#pragma GCC ivdep",
            "  for (int64_t i = 0; i < rows; ++i) {",
            f"    {self._combine(step, 'block.m{0}[2 * i]', 'block.m{0}[2 * i + 1]', 'block.m{0}[i]')}",
            "  }",
            "}",
        ]

    def _combine(self, step: RowPass, left: str, right: str, to: str) -> str:
        assert step.combine is not None, "it has accumulators"
        known: dict[str, str] = {}
        for item in step.accumulators:
            for side, slot in zip("lrm", (left, right, to), strict=True):
                known[f"{side}{item.name}"] = slot.format(item.name)
        return step.combine.call(known)

    def walk(self, level: int, step: RowPass, element: RowPart) -> list[str]:
        known = {name: name for name, _ in self.row_reads(element)}
        first = self.loop.rows.reduced
        rows = [f"const auto {name} = state.{own}[row];" for name, own in self.row_reads(element)]
        for item in self._full(element):
            rows.append(f"const auto row_{item.name} = {self.address(f'base.{item.name}', item, [first], 'row')};")
        body = self._units(level, step, element, known) if step.accumulators else self._stretches(element, known)
        size = [
            "// Parts of a row; what is missing of its tree is the identity.",
            "int64_t size = 1;",
            "while (size < total) size *= 2;",
            f"const int64_t parts = size < {QUARTER * self._lanes(step)} ? size : size / {QUARTER};",
        ]
        return [
            *(size if step.accumulators else []),
            "for (int64_t row = 0; row < width; ++row) {",
            *indent(rows),
            *indent(self._kept(f" + row * ({self.length()})")),
            *indent(body),
            "}",
            *([f"fuser_fold{level}(a, block, width, parts);"] if step.accumulators else []),
        ]

    def _stretches(self, element: RowPart, known: dict[str, str]) -> list[str]:
        return [
            "for (int64_t done = 0; done < total;) {",
            *indent(self._place("first + done", element, "row_{0}")),
            "  const int64_t count = length < total - done ? length : total - done;",
            *indent(self._fixed(element)),
            "#pragma GCC ivdep",
            "  for (int64_t i = 0; i < count; ++i)",
            f"    {self._element(element, 'i', 'first + done + i', known)}",
            "  done += count;",
            "}",
        ]

    def _units(self, level: int, step: RowPass, element: RowPart, known: dict[str, str]) -> list[str]:
        lanes = self._lanes(step)
        unit = QUARTER * lanes
        own = [f"own{item.name}" for item in step.accumulators]
        slots = [f"block.m{item.name} + row * parts + done / {QUARTER}" for item in step.accumulators]
        quarter = f"fuser_quarter{level}(a, {', '.join([*own, *slots])});"
        arrays = [f"alignas(64) {item.type} own{item.name}[{unit}];" for item in step.accumulators]
        vectors: list[str] = []
        for begin in range(0, unit, lanes):
            index = f"c + {begin}" if begin else "c"
            to = {f"m{item.name}": f"own{item.name}[{index}]" for item in step.accumulators}
            call = self._element(element, f"i + {index}", f"first + done + {index}", known | to)
            vectors += ["#pragma GCC ivdep", f"for (int c = 0; c < {lanes}; ++c) {call}"]
        to = {f"m{item.name}": f"m{item.name}[at + i]" for item in step.accumulators}
        leaves = [
            f"{item.type}* const m{item.name} = size < {unit} ? block.m{item.name} + row * parts : own{item.name};"
            for item in step.accumulators
        ]
        identities = " ".join(f"m{item.name}[i] = {item.identity};" for item in step.accumulators)
        return [
            "int64_t done = 0;",
            "while (done < total) {",
            "  {",
            *indent(indent(self._place("first + done", element, "row_{0}"))),
            "    const int64_t count = length < total - done ? length : total - done;",
            *indent(indent(self._fixed(element))),
            f"    for (int64_t i = 0; i + {unit} <= count; i += {unit}, done += {unit}) {{",
            *indent(indent(indent([*arrays, *vectors, quarter]))),
            "    }",
            "  }",
            "  if (done == total) break;",
            "  // The end of a row, or of a stretch of it.",
            *indent([*arrays, *leaves]),
            f"  const int64_t end = total - done < {unit} ? total - done : {unit};",
            "  for (int64_t at = 0; at < end;) {",
            *indent(indent(self._place("first + done + at", element, "row_{0}"))),
            "    const int64_t count = length < end - at ? length : end - at;",
            *indent(indent(self._fixed(element))),
            "#pragma GCC ivdep",
            "    for (int64_t i = 0; i < count; ++i)",
            f"      {self._element(element, 'i', 'first + done + at + i', known | to)}",
            "    at += count;",
            "  }",
            f"  const int64_t whole = size < {unit} ? size : {unit};",
            f"  for (int64_t i = end; i < whole; ++i) {{ {identities} }}",
            f"  if (size >= {unit}) {quarter}",
            f"  done += {unit};",
            "}",
            f"for (int64_t i = size < {unit} ? parts : done / {QUARTER}; i < parts; ++i) {{",
            *(f"  block.m{item.name}[row * parts + i] = {item.identity};" for item in step.accumulators),
            "}",
        ]


class AcrossBatch(RowBatch):
    """Neighbouring rows, each in a lane."""

    # Parts of a batch wait in as many places as there are sizes; behind them are elements.
    waiting = (BATCH // QUARTER).bit_length() + 1

    def capacity(self, step: RowPass) -> int:  # noqa: ARG002 - the same for all
        return (self.waiting + QUARTER) * CPU_LANES

    def helpers(self, level: int, step: RowPass) -> list[str]:  # noqa: ARG002 - there are none
        return []

    def walk(self, level: int, step: RowPass, element: RowPart) -> list[str]:  # noqa: ARG002 - calls no helper
        known = {name: f"state.{own}[c]" for name, own in self.row_reads(element)}
        if not step.accumulators:
            each = indent(self._one("first + i", element, known))
            return [*self._kept(), "for (int64_t i = 0; i < total; ++i) {", *each, "}"]
        leaf = {
            f"m{item.name}": f"block.m{item.name}[{self._slot(f'{self.waiting} + i')}]" for item in step.accumulators
        }
        return [
            *self._kept(),
            "int depth = 0;",
            f"for (int64_t done = 0; done < total; done += {QUARTER}) {{",
            f"  const int64_t count = total - done < {QUARTER} ? total - done : {QUARTER};",
            "  bool is_whole;",
            "  {",
            *indent(indent(self._place("first + done", element, "base.{0}"))),
            f"    is_whole = count == {QUARTER} && length >= {QUARTER};",
            "    if (is_whole) {",
            *indent(indent(indent(self._four(step, element, known)))),
            "    }",
            "  }",
            "  if (!is_whole) {",
            "    for (int64_t i = 0; i < count; ++i) {",
            *indent(indent(indent(self._one("first + done + i", element, known | leaf)))),
            "    }",
            *indent(indent(self._few(step))),
            "  }",
            f"  for (int64_t number = done / {QUARTER}; number & 1; number /= 2) {{",
            "    --depth;",
            *indent(indent(self._combine(step, "depth", "depth + 1", "depth"))),
            "  }",
            "  ++depth;",
            "}",
            "for (--depth; depth > 0; --depth) {",
            *indent(self._combine(step, "depth - 1", "depth", "depth - 1")),
            "}",
        ]

    def _slot(self, index: str) -> str:
        return f"({index}) * {CPU_LANES} + c"

    def _one(self, number: str, element: RowPart, known: dict[str, str]) -> list[str]:
        # One element of each row.
        return [
            *self._place(number, element, "base.{0}"),
            *self._fixed(element),
            *self._each_row([self._element(element, "c", self._slot(number), known)]),
        ]

    def _four(self, step: RowPass, element: RowPart, known: dict[str, str]) -> list[str]:
        # Four elements of each row, combined in registers.
        lines, calls = [], []
        for number in range(QUARTER):
            suffix = f"_{number}"
            for item in self._full(element):
                move = f" + {number} * {self.stride(item, 0)}" if number and self.stride(item, 0) != "0" else ""
                lines.append(f"const auto {item.name}{suffix} = {item.name}{move};")
            lines += self._fixed(element, suffix)
            calls += [f"{item.type} e{number}_{item.name};" for item in step.accumulators]
            to = {f"m{item.name}": f"e{number}_{item.name}" for item in step.accumulators}
            calls.append(self._element(element, "c", self._slot(f"first + done + {number}"), known | to, suffix))
        for left, right, to_slot in (("e0_", "e1_", "e0_"), ("e2_", "e3_", "e2_"), ("e0_", "e2_", "")):
            own: dict[str, str] = {}
            for item in step.accumulators:
                target = f"{to_slot}{item.name}" if to_slot else f"block.m{item.name}[{self._slot('depth')}]"
                own |= {f"l{item.name}": f"{left}{item.name}", f"r{item.name}": f"{right}{item.name}"}
                own[f"m{item.name}"] = target
            assert step.combine is not None, "it has accumulators"
            calls.append(step.combine.call(own))
        return [*lines, *self._each_row(calls)]

    def _few(self, step: RowPass) -> list[str]:
        # What is missing of the smallest tree is the identity.
        identities = [
            f"block.m{item.name}[{self._slot(f'{self.waiting} + i')}] = {item.identity};" for item in step.accumulators
        ]
        moves = [
            f"block.m{item.name}[{self._slot('depth')}] = block.m{item.name}[{self._slot(str(self.waiting))}];"
            for item in step.accumulators
        ]
        return [
            "int64_t size = 1;",
            "while (size < count) size *= 2;",
            "for (int64_t i = count; i < size; ++i) {",
            *indent(self._each_row(identities)),
            "}",
            "for (int64_t half = size / 2; half > 0; half /= 2) {",
            "  for (int64_t i = 0; i < half; ++i) {",
            *indent(indent(self._combine(step, *(f"{self.waiting} + {own}" for own in ("2 * i", "2 * i + 1", "i"))))),
            "  }",
            "}",
            *self._each_row(moves),
        ]

    def _combine(self, step: RowPass, left: str, right: str, to: str) -> list[str]:
        assert step.combine is not None, "it has accumulators"
        known = {
            f"{side}{item.name}": f"block.m{item.name}[{self._slot(slot)}]"
            for side, slot in zip("lrm", (left, right, to), strict=True)
            for item in step.accumulators
        }
        return self._each_row([step.combine.call(known)])

    def _each_row(self, lines: Sequence[str]) -> list[str]:
        return ["#pragma GCC ivdep", "for (int64_t c = 0; c < width; ++c) {", *indent(lines), "}"]


def indent(lines: Iterable[str]) -> list[str]:
    """Indent lines of C++, but no directive."""
    return [line if line.startswith("#") else f"  {line}" for line in lines]
