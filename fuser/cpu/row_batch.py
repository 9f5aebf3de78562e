"""One batch of a pass over a tile's rows on the CPU: what both ways to walk over it have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable

from fuser.combining import BATCH
from fuser.kernel_source import Operand, RowLoop, indent
from fuser.kernel_spec import CPU_LANES
from fuser.row_pass import RowPart, RowPass

__all__ = ["QUARTER", "UNIT", "RowBatch"]

# Elements of a row, or rows of parts, that two levels of the tree make one.
QUARTER = 4
# Elements that are kept of a row are a multiple.
UNIT = 64


class RowBatch(ABC):
    """Writes the functions that walk over one batch of a tile, whose results come first in the tile's block."""

    # Elements of a batch.
    elements = BATCH

    def __init__(self, loop: RowLoop) -> None:
        self.loop = loop
        # Rows of a tile, at most.
        self.lanes = CPU_LANES
        self.inner = loop.rows.inner
        # Of what is kept of the elements, what waits where a result of theirs will be written.
        self.homes: dict[str, Operand] = {}

    @property
    def apart(self) -> list[str]:
        """What is kept in memory of its own."""
        return [name for name in self.loop.kept if name not in self.homes]

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
        more += ", const fuser_kept& kept" if self.apart else ""
        return [
            *(self.helpers(level, step) if step.accumulators else []),
            "",
            f"// One batch of pass {level}.",
            "__attribute__((flatten, noinline)) static void",
            f"fuser_batch{level}(const fuser_args a, const fuser_base base, const fuser_state& state, int64_t batch"
            f"{more}) {{",
            f"  const int64_t width = base.width, first = batch * {self.elements}, left = {self.length()} - first;",
            f"  const int64_t total = left < {self.elements} ? left : {self.elements};",
            *indent(self.walk(level, step, element)),
            "}",
        ]

    def length(self) -> str:
        """Return the number of elements of a row."""
        return " * ".join(f"a.size[{dim}]" for dim in range(self.loop.rows.reduced))

    def count(self) -> str:
        """Return the number of batches."""
        return f"({self.length()} + {self.elements - 1}) / {self.elements}"

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

    def place(self, number: str, items: Iterable[Operand], bases: str) -> list[str]:
        """Write operands' pointers to the element of a number, and how many elements follow without a jump."""
        reduced = self.loop.rows.reduced
        lines = [f"int64_t rest = {number};"] if reduced > 1 else [f"const int64_t i0 = {number};"]
        for dim in range(reduced - 1):
            lines += [f"const int64_t i{dim} = rest % a.size[{dim}];", f"rest /= a.size[{dim}];"]
        if reduced > 1:
            lines.append(f"const int64_t i{reduced - 1} = rest;")
        for item in items:
            place = self.address(bases.format(item.name), item, range(reduced), "i{0}")
            lines.append(f"const auto {item.name} = {place};")
        return [*lines, "const int64_t length = a.size[0] - i0;"]

    def kept(self, move: str = "") -> list[str]:
        """Write pointers to what is kept."""
        # Pointers of their own: those in the struct could change with every element that is written.
        return [f"const auto kept_{name} = kept.{name}{move};" for name in self.apart]

    def call(
        self, part: RowPart, index: str, kept: str, known: dict[str, str], name: str = "{0}", *, is_dense: bool = False
    ) -> str:
        """Return the call for an element.

        Args:
            part: the function.
            index: of the element, from the operands' pointers.
            kept: the same from where what is kept begins.
            known: expressions of variables.
            name: of an operand, around its own.
            is_dense: whether operands lie densely, whatever their strides: they are buffers.
        """
        known = dict(known)
        for item in self.loop.full(part):
            own, stride = name.format(item.name), "1" if is_dense else self.stride(item, self.inner)
            if stride == "0" and not item.is_output:
                known.setdefault(item.variable, name.format(item.variable))
                continue
            place = "0" if stride == "0" else index if stride == "1" else f"({index}) * {stride}"
            text = f"{own}[{place}]"
            known.setdefault(item.variable, text if item.is_output else f"fuser_to_compute({text})")
        for variable in self.loop.kept:
            text = f"kept_{variable}[{kept}]"
            known.setdefault(variable if variable in part.writes else f"v{variable[1:]}", text)
        return part.call(known)

    def fixed(self, part: RowPart, name: str = "{0}") -> list[str]:
        """Write what neighbours share."""
        return [
            f"const auto {name.format(item.variable)} = fuser_to_compute({name.format(item.name)}[0]);"
            for item in self.loop.full(part)
            if self.stride(item, self.inner) == "0" and not item.is_output
        ]
