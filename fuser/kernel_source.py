"""What a dialect writes a kernel's loop from, and what becomes of it: a text, and how its arguments are packed.

Plain values: who makes them is ``fuser.codegen``, and the loops are those of ``fuser.cuda`` and ``fuser.cpu``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from fuser.access import DEFAULT_TUNING, SINGLE, Access, Tuning, is_askew
from fuser.cxx.functor import Functor
from fuser.dtypes import DTypeInfo
from fuser.kernel_spec import RowSpec
from fuser.row_pass import RowPart, RowPass, Table

__all__ = ["KERNEL_NAME", "Dialect", "KernelSource", "Loop", "Operand", "RowLoop", "functor_label", "indent"]

KERNEL_NAME = "fuser_kernel"


@dataclass(frozen=True, slots=True)
class Operand:
    """A tensor in memory, as the loop sees it; or a counter, whose element at an offset is the offset."""

    # Field of the argument struct that holds its address: in0, out0. Of a counter: index2.
    name: str
    # Variable of the element function's argument: v0 for inputs, v2 for counters, out0 for outputs.
    variable: str
    info: DTypeInfo
    # As in InputSpec.inner.
    inner: int
    # Number of the input or output; of the value that a counter is.
    index: int
    is_output: bool
    # How a CUDA kernel reads or writes it.
    access: Access = SINGLE
    is_counter: bool = False
    # Whether it begins elsewhere than at the address.
    has_offset: bool = False
    # Whether the element function takes its address, and reads where it computes.
    is_table: bool = False
    # Whether it counts on from where a block of a kernel over lists begins.
    is_part: bool = False
    # Of a table whose elements lie side by side for those of a thread's vector: the variables of where that begins, of
    # the entry, how far entries lie apart, how many there are, and what is added to negative ones. Of a part of what is
    # put together: of the place, and of each number and count that say whether it is there.
    piece: tuple[str, ...] = ()
    is_part_of_whole: bool = False

    @property
    def address(self) -> str:
        """The expression for where it begins."""
        counter = "fuser_counter{a.begin}" if self.is_part else "fuser_counter{}"
        begin = counter if self.is_counter else f"a.{self.name}"
        return f"({begin} + a.offset_{self.name})" if self.has_offset else begin

    @property
    def pointer(self) -> str:
        """The type of its address."""
        return "fuser_counter" if self.is_counter else f"{'' if self.is_output else 'const '}{self.info.storage}*"


@dataclass(frozen=True)
class Loop:
    """What a dialect needs to write the loop around the element function."""

    # Outputs first, then the inputs that are read through a pointer, then counters.
    operands: tuple[Operand, ...]
    # Parameters of the element function, in order: variables of the inputs, then the outputs.
    arguments: tuple[str, ...]
    # Variable and expression of each input passed by value.
    numbers: tuple[tuple[str, str], ...]
    rank: int
    vector: int
    wide_index: bool
    tuning: Tuning = DEFAULT_TUNING
    # Geometry fields of the argument struct, in order; what they hold is in fuser.geometry.
    geometry: tuple[str, ...] = ()
    # Whether the element function takes the zero first.
    has_zero: bool = False
    # As in ArgSpec.
    positions: int = 0
    # Whether the element function takes first how it is to divide: fuser_quickly, or fuser_plainly where that failed.
    divides: bool = False
    # The variable of a number that is nothing but an exponent: a loop may be written for those that have a formula.
    exponent: str = ""

    @property
    def chunk(self) -> int:
        """Elements that a block of a kernel over lists takes at most."""
        return self.vector * self.tuning.block * self.tuning.unroll * self.tuning.turns

    @cached_property
    def inputs(self) -> tuple[Operand, ...]:
        """The operands that the loop reads."""
        return tuple(operand for operand in self.operands if not (operand.is_output or operand.is_table))

    @cached_property
    def outputs(self) -> tuple[Operand, ...]:
        """The operands written."""
        return tuple(operand for operand in self.operands if operand.is_output)

    def call_element(self, expressions: dict[str, str]) -> str:
        """Return the call of the element function with an expression per operand's variable."""
        known = {**dict(self.numbers), **expressions}
        arguments = ["how"] * self.divides + ["a.zero"] * self.has_zero
        return f"fuser_element({', '.join([*arguments, *(known[variable] for variable in self.arguments)])});"

    @property
    def is_linear(self) -> bool:
        """Whether one index serves every operand: one dimension, each operand dense or one element for all."""
        return self.rank == 1 and all(operand.inner < 2 for operand in self.operands)

    @property
    def has_tables(self) -> bool:
        """Whether the element function reads where it computes."""
        return any(operand.is_table and not operand.piece for operand in self.operands)

    @cached_property
    def pieces(self) -> tuple[Operand, ...]:
        """The tables of which each vector is a piece."""
        return tuple(operand for operand in self.operands if operand.piece)

    def is_askew(self, item: Operand) -> bool:
        """Whether an input's vectors begin anywhere; lists ask at run time how their tensors lie."""
        if item.is_output or item.inner != 1 or item.access.is_transposed or item.is_counter or self.positions:
            return False
        return self.tuning.begins_level or is_askew(self.vector, item.access.width, item.info.dtype.itemsize)

    @property
    def repeats(self) -> bool:
        """Whether some operand begins anew after every ``a.period`` elements, or has the next element then."""
        return any(operand.inner > 2 for operand in self.operands)


@dataclass(frozen=True)
class RowLoop:
    """What a dialect needs to write the loops of a kernel with reductions."""

    # Outputs first, then the inputs that are read through a pointer.
    operands: tuple[Operand, ...]
    # Variables of the operands that have one element per row.
    per_row: frozenset[str]
    passes: tuple[RowPass, ...]
    # C++ type of each variable that parts read or write.
    types: dict[str, str]
    # The smallest one that holds what is kept, by variable.
    kept_types: dict[str, str]
    rank: int
    rows: RowSpec
    vector: int
    wide_index: bool
    tuning: Tuning
    geometry: tuple[str, ...]
    has_zero: bool
    # Functions that it looks up.
    tables: tuple[Table, ...] = ()

    def used_by(self, part: RowPart) -> tuple[Operand, ...]:
        """Return the operands that a part reads or writes."""
        names = {*part.reads, *part.writes}
        return tuple(operand for operand in self.operands if operand.variable in names)

    def full(self, part: RowPart) -> list[Operand]:
        """Return the operands of a part that have an element for each of a row."""
        return [item for item in self.used_by(part) if item.variable not in self.per_row]

    @property
    def combining(self) -> list[int]:
        """The passes that have accumulators."""
        return [level for level, step in enumerate(self.passes) if step.accumulators]

    @property
    def row_values(self) -> tuple[str, ...]:
        """The variables that row parts make for others: w<value>, which others read as v<value>."""
        parts = [item.row for item in self.passes if item.row]
        return tuple(name for part in parts for name in part.writes if name.startswith("w"))

    @property
    def held(self) -> tuple[Operand, ...]:
        """The inputs that stay in shared memory: more than one pass reads their elements."""
        if not self.tuning.is_held:
            return ()
        parts = [item.element for item in self.passes if item.element]
        return tuple(
            item
            for item in self.operands
            if not (item.is_output or item.is_counter or item.variable in self.per_row or item.inner == 0)
            and sum(item.variable in part.reads for part in parts) > 1
        )

    @property
    def kept(self) -> tuple[str, ...]:
        """The variables of elements that a pass keeps for later ones: k<value>, which those read as v<value>."""
        parts = [item.element for item in self.passes if item.element]
        return tuple(name for part in parts for name in part.writes if name.startswith("k"))


class Dialect(NamedTuple):
    """How one device's C++ differs."""

    name: str
    # Prelude text from the words of the functors and the features of the storage types.
    emit_prelude: Callable[[frozenset[str], frozenset[str]], str]
    # The kernel function around fuser_element.
    emit_loop: Callable[[Loop], str]
    # The same around the parts of a kernel with reductions.
    emit_rows: Callable[[RowLoop], str]
    # Geometry fields of its kernels that are not linear.
    geometry: tuple[str, ...] = ("size", "stride")
    # #define lines of macros that the compiler has by itself and that functors may define or end.
    own_macros: str = ""
    # Whether the compiler contracts multiply-adds behind the back of fuser_isolate, so that values which cross from one
    # functor to the next are combined with a zero that it cannot see (fuser_cross).
    crosses_with_zero: bool = False
    # Whether its prelude has an exponential whose last bits are wrong.
    has_brief_exp: bool = False
    # Whether an integer divided by zero ends the process.
    traps_on_division: bool = False
    # Whether a division asks for each pair of operands whether they are ordinary numbers.
    divides_quickly: bool = False
    # Storage types that loops without reductions make of what the element function gives, and what it gives.
    rounded_in_loops: tuple[tuple[str, str], ...] = ()


class KernelSource(NamedTuple):
    """A finished kernel text, and how its arguments are packed.

    The argument struct has 8-byte fields only: the element count, the operands' addresses, the numbers
    (complex: two fields), and for a kernel that is not linear its geometry: sizes and strides, innermost first.
    """

    text: str
    dialect: str
    # Operands that the struct has an address of, in its order.
    operands: tuple[Operand, ...]
    # Inputs passed by value, with their Python types.
    numbers: tuple[tuple[int, type], ...]
    # Geometry fields at the end of the struct; none for a linear kernel.
    geometry: tuple[str, ...]
    vector: int
    tuning: Tuning
    # Of a kernel with reductions, and bytes of all their accumulators at most.
    rows: RowSpec | None
    accumulator_bytes: int
    # Bytes of each element of a row that stay in shared memory.
    held_bytes: int
    # Functor of each namespace fuser_f<i>, to map compiler messages back.
    functors: tuple[Functor, ...]
    # Whether the struct has the field ``zero``.
    has_zero: bool
    # Compiler settings that are no part of the text.
    numerics: str
    # As in ArgSpec; and how many elements of a position a block takes at most.
    positions: int = 0
    chunk: int = 0

    @property
    def has_workspace(self) -> bool:
        """Whether the struct has the address of memory of the kernel's own, between those written and those read."""
        return bool(self.tuning.piece)

    @property
    def functor_labels(self) -> dict[str, Functor]:
        """File names that #line gives to the functors' lines."""
        return {functor_label(index, functor): functor for index, functor in enumerate(self.functors)}


def functor_label(index: int, functor: Functor) -> str:
    """Return the file name compilers show for a functor's lines."""
    return f"functor{index}.{functor.entry}"


def indent(lines: Iterable[str], depth: int = 1) -> list[str]:
    """Return lines with spaces before them; the preprocessor's stay where they are."""
    return [line if line.startswith("#") or not line else "  " * depth + line for line in lines]
