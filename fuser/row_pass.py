"""What the loops of a kernel with reductions call: functions of its text, pass by pass.

A kernel walks over the elements of each row in *passes*, one after another: a pass makes what its reductions combine,
and the outputs that need no reduction after it. Before each pass, and after the last, comes a *row part*: it finishes
the reductions of the pass before and computes what there is once per row. Plain values: ``fuser.row_parts`` makes them.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Accumulator", "RowPart", "RowPass", "Table"]


class Accumulator(NamedTuple):
    """One accumulator of a reduction."""

    # Its number in variables: m3_0 is what the map makes of an element, t3_0 what a row comes to.
    name: str
    # In C++.
    type: str
    # An expression.
    identity: str
    # Of a column: the output that its pieces are.
    output: str = ""
    # Whether it is how many elements there are: in torch's order, of what a thread has.
    is_count: bool = False


class RowPart(NamedTuple):
    """A function of the kernel text: ``void name(const fuser_args&, reads by value..., writes by reference...)``."""

    name: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]

    def call(self, expressions: dict[str, str]) -> str:
        """Return the call with an expression for each variable that is not called by its own name."""
        arguments = ["a", *(expressions.get(name, name) for name in (*self.reads, *self.writes))]
        return f"{self.name}({', '.join(arguments)});"


class Table(NamedTuple):
    """A function that a kernel looks up (fuser.lookups)."""

    # Computes what it is a function of, x4; and its result for that, l4.
    operand: RowPart
    compute: RowPart

    @property
    def result(self) -> str:
        """The variable that parts read."""
        return self.compute.writes[0]


class RowPass(NamedTuple):
    """One walk over the elements of a row, and what comes before it."""

    # Computes what there is once per row; None if that is nothing.
    row: RowPart | None
    # Computes an element; None where nothing is left to walk for. In torch's orders on CUDA it takes what a thread has
    # of the row, l3_0, and makes m3_0 of that and the element; elsewhere m3_0 is what the element makes.
    element: RowPart | None
    # The same in less time where it divides: by what the row has, through a fuser_divisor, d5; by a count, which it
    # takes as a fuser_quick_count; or in a functor (fuser.cxx.quick). Where that fails it clears is_exact. None where
    # there is nothing to gain.
    quick: RowPart | None
    # Combines two parts of a row, given as l3_0 and r3_0, to m3_0; None without reductions.
    combine: RowPart | None
    accumulators: tuple[Accumulator, ...]
    # Whether two parts come to the same bits whichever is first.
    commutes: bool = False
    # Whether any order serves: it is the same in all, or fast numerics promise none.
    is_free: bool = False
    # Whether it is the same in whatever pairs parts are combined that are neighbours, and its identity is one.
    is_associative: bool = False
    # Whether combining takes several decisions: a compiler vectorises one such call in a loop, not three.
    decides: bool = False
    # Computes the element of the row whose number a row's value says, ``which``: for reductions that take it alone.
    pick: RowPart | None = None
    picks: tuple[Accumulator, ...] = ()
    which: str = ""
    # The same of columns, to whose parts each element adds: accumulators, and what combines two parts.
    columns: tuple[Accumulator, ...] = ()
    merge: RowPart | None = None
    # The operand whose largest element, or largest magnitude, it finds, if it does nothing else.
    highest: str = ""
    is_of_sizes: bool = False
    # Whether it adds up the powers of what the others are less than that, too.
    adds_powers: bool = False
    # The output whose elements are the quotients of ``quick``, of parts of what they are divided by.
    shares: str = ""
    # The variable of what ``quick`` divides by what all of it adds up to, if it divides nothing else by what a row has.
    divided: str = ""
    # Whether ``quick`` is as exact as it has to be, and no element is computed again.
    is_rough: bool = False
    # The counts that ``quick`` takes as a fuser_quick_count, or as a fuser_rough_count.
    quick_counts: tuple[str, ...] = ()

    @property
    def parts(self) -> tuple[RowPart, ...]:
        """What reads values of the row."""
        return tuple(part for part in (self.row, self.element, self.pick) if part)
