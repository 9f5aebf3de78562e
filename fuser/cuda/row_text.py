"""What both kinds of row loops in CUDA write: the passes as the prelude's templates take them, and where rows begin."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import reduce

from fuser.kernel_source import Operand, RowLoop, indent
from fuser.row_pass import Accumulator, RowPart, RowPass

__all__ = ["RowText", "in_turns", "most_of"]

# Vectors that are read together where only a later pass needs them.
LATE_UNROLL = 2


class RowText:
    """Writes what both kinds of loops need."""

    def __init__(self, loop: RowLoop) -> None:
        self.loop = loop
        self.reduced = range(loop.rows.reduced)
        self.kept = range(loop.rows.reduced, loop.rank)
        self.signed = "int64_t" if loop.wide_index else "int"

    @property
    def length(self) -> str:
        """Elements of a row."""
        return self.product(self.reduced)

    def product(self, dims: Iterable[int]) -> str:
        """Elements along some dimensions."""
        return " * ".join(self.size(dim) for dim in dims) or "1"

    def size(self, dim: int) -> str:
        """Elements along a dimension."""
        return f"static_cast<fuser_index>(a.size[{dim}])"

    # --- passes ------------------------------------------------------------------------------------------------------
    def passes(self) -> list[str]:
        """Write what each pass combines.

        ::

            // What pass 0 combines.
            struct fuser_pass0 {
              struct part { float m2_0; };
              static constexpr bool commutes = true;
              static constexpr bool is_associative = false;
              const fuser_args& a;
              FUSER_INLINE part identity() const { return {fuser_cast<float>(0LL)}; }
              FUSER_INLINE part combine(const part& l, const part& r) const {
                part to;
                fuser_combine0(a, l.m2_0, r.m2_0, to.m2_0);
                return to;
              }
              static FUSER_INLINE part pick(bool is_first, const part& first, const part& second) {
                return {fuser_pick(is_first, first.m2_0, second.m2_0)};
              }
              static FUSER_INLINE part exchange(const part& own, int mask) {
                return {fuser_exchange(own.m2_0, mask)};
              }
            };
        """
        lines = [f"typedef {'uint64_t' if self.loop.wide_index else 'unsigned int'} fuser_index;"]
        for level, step in enumerate(self.loop.passes):
            if step.combine is not None:
                head = ["", f"// What pass {level} combines.", f"struct fuser_pass{level} {{"]
                lines += [
                    *head,
                    *_combining(
                        step.accumulators, step.combine, commutes=step.commutes, is_associative=step.is_associative
                    ),
                ]
            if step.merge is not None:
                head = ["", f"// What pass {level} adds to columns.", f"struct fuser_columns{level} {{"]
                lines += [*head, *_combining(step.columns, step.merge, commutes=True)]
        return lines

    # --- what is looked up -------------------------------------------------------------------------------------------
    def tables(self) -> list[str]:
        """Write what each function that is looked up takes, and its table."""
        lines = []
        for item in self.loop.tables:
            x, result = item.compute.reads[0], item.result
            lines += [
                "",
                f"struct fuser_table_{result} {{",
                "  const fuser_args& a;",
                "  static FUSER_INLINE float* entries() {",
                "    __shared__ float entries[2 * fuser_entries];",
                "    return entries;",
                "  }",
                f"  FUSER_INLINE float operator()(float {x}) const {{",
                f"    float {result};",
                f"    {item.compute.call({})}",
                f"    return {result};",
                "  }",
                "};",
            ]
        return lines

    def fill_tables(self) -> list[str]:
        """Write what a block begins with."""
        fill = [f"fuser_fill<{self.loop.tuning.block}>(fuser_table_{item.result}{{a}});" for item in self.loop.tables]
        return [*fill, "__syncthreads();"] if fill else []

    def look_up(self, part: RowPart, known: dict[str, str], vector: str = "V") -> list[str]:
        """Write what looks up the functions that a part reads, for a vector's elements.

        Args:
            part: what reads them.
            known: what stands for the operands, in terms of k; and afterwards for what they come to.
            vector: how many elements there are.
        """
        lines = []
        for item in self.loop.tables:
            result, x = item.result, item.compute.reads[0]
            if result in part.reads:
                own = item.operand.call(
                    {name: text for name, text in known.items() if name in item.operand.reads} | {x: f"{x}[k]"}
                )
                lines += [
                    f"float {x}[{vector}], {result}[{vector}];",
                    "#pragma unroll",
                    f"for (int k = 0; k < {vector}; ++k) {own}",
                    f"fuser_look_up(fuser_table_{result}{{a}}, {x}, {result});",
                ]
                known[result] = f"{result}[k]"
        return lines

    # --- places ------------------------------------------------------------------------------------------------------
    def find(self) -> list[str]:
        """Write the struct of where a row's operands begin, and the function that finds them by the row's number."""
        fields = [f"  {item.pointer} {item.name};" for item in self.loop.operands]
        return [
            "",
            "// Where a row's operands begin.",
            "struct fuser_row {",
            *fields,
            "};",
            "FUSER_INLINE fuser_row fuser_find(const fuser_args& a, fuser_index rest) {",
            *indent(self.split(self.kept)),
            f"  return {{{_join(self.address(item.address, item, self.kept) for item in self.loop.operands)}}};",
            "}",
        ]

    def place(self, number: str, first: str = "") -> list[str]:
        """Write the coordinates i0, i1, ... of an element of a row, by its number; ``first`` as in ``split``."""
        if len(self.reduced) > 1:
            return [f"fuser_index rest = {number};", *self.split(self.reduced, first)]
        return [f"const fuser_index i0 = {number};"]

    def split(self, dims: range, first: str = "") -> list[str]:
        """Write the coordinates i0, i1, ... of what the variable ``rest`` counts along some dimensions.

        Args:
            dims: the dimensions, innermost first.
            first: a number that differs from it along the innermost one only, and is the same for several.
        """
        lines = []
        for dim in dims[:-1]:
            size, number = self.size(dim), first if first and dim == dims[0] else "rest"
            by = f"{number} / {size}" if self.loop.wide_index else f"fuser_divide({number}, a.divide[{dim}])"
            lines += [
                f"const fuser_index q{dim} = {by}, i{dim} = rest - q{dim} * {size};",
                f"rest = q{dim};",
            ]
        return [*lines, f"const fuser_index i{dims[-1]} = rest;"]

    def address(self, pointer: str, item: Operand, dims: range) -> str:
        """Return a pointer moved to the coordinates along some dimensions."""
        moves = [(dim, self.stride(item, dim)) for dim in dims]
        terms = [f"i{dim}" if stride == "1" else f"i{dim} * {stride}" for dim, stride in moves if stride != "0"]
        return " + ".join([pointer, *terms])

    def stride(self, item: Operand, dim: int) -> str:
        """Return a stride: a number where the layout class says so."""
        if dim < self.loop.rows.reduced and item.variable in self.loop.per_row:
            return "0"
        if dim == self.loop.rows.inner and item.inner < 2:
            return str(item.inner)
        return f"static_cast<fuser_index>(a.stride_{item.name}[{dim}])"

    # --- what parts read ---------------------------------------------------------------------------------------------
    def row_inputs(self) -> list[Operand]:
        """Return the inputs that have one element per row and that some part reads."""
        read = {name for step in self.loop.passes for part in step.parts for name in part.reads}
        return [item for item in self.loop.operands if item.variable in self.loop.per_row & read]

    def row_values(self, part: RowPart, suffix: str = "") -> dict[str, str]:
        """Return what stands for the values of a row that a part reads, by variable.

        Args:
            part: what reads them.
            suffix: an index, where each thread has several rows.
        """
        known = {f"v{name[1:]}": f"{name}{suffix}" for name in self.loop.row_values}
        known |= {item.variable: f"{item.variable}{suffix}" for item in self.row_inputs()}
        for level in self.loop.combining:
            for item in self.loop.passes[level].accumulators:
                known[f"t{item.name}"] = f"total{level}{suffix}.m{item.name}"
        known |= {f"t{item.name}": f"m{item.name}" for step in self.loop.passes for item in step.picks}
        return {name: text for name, text in known.items() if name in part.reads}

    def row_outputs(self, step: RowPass) -> list[Operand]:
        """Return the outputs that the row part before a pass makes."""
        return [item for item in self.loop.used_by(step.row) if item.is_output] if step.row else []


def most_of(sizes: Iterable[str]) -> str:
    """Return the expression for the largest of some sizes."""
    return reduce(lambda most, size: f"fuser_most({most}, {size})", sizes)


def _combining(
    accumulators: Sequence[Accumulator], combine: RowPart, *, commutes: bool, is_associative: bool = False
) -> list[str]:
    # What the prelude's templates ask for.
    names = [f"m{item.name}" for item in accumulators]
    identity = _join(item.identity for item in accumulators)
    known = {f"{side}{name[1:]}": f"{side}.{name}" for side in "lr" for name in names}
    known |= {name: f"to.{name}" for name in names}
    return [
        f"  struct part {{ {' '.join(f'{item.type} m{item.name};' for item in accumulators)} }};",
        f"  static constexpr bool commutes = {str(commutes).lower()};",
        f"  static constexpr bool is_associative = {str(is_associative).lower()};",
        "  const fuser_args& a;",
        f"  FUSER_INLINE part identity() const {{ return {{{identity}}}; }}",
        "  FUSER_INLINE part combine(const part& l, const part& r) const {",
        "    part to;",
        f"    {combine.call(known)}",
        "    return to;",
        "  }",
        "  static FUSER_INLINE part pick(bool is_first, const part& first, const part& second) {",
        f"    return {{{_join(f'fuser_pick(is_first, first.{name}, second.{name})' for name in names)}}};",
        "  }",
        "  static FUSER_INLINE part exchange(const part& own, int mask) {",
        f"    return {{{_join(f'fuser_exchange(own.{name}, mask)' for name in names)}}};",
        "  }",
        *_alike(accumulators),
        "};",
    ]


def _alike(accumulators: Sequence[Accumulator]) -> list[str]:
    # Of parts of as many elements, none of them of nothing: what counts them is the same.
    counts = [item.name for item in accumulators if item.is_count]
    if not counts:
        return []
    own = [(item.name, f"own.m{item.name}") for item in accumulators]
    exchanged = _join(text if name in counts else f"fuser_exchange({text}, mask)" for name, text in own)
    return [
        f"  static FUSER_INLINE part exchange_alike(const part& own, int mask) {{ return {{{exchanged}}}; }}",
        "  static FUSER_INLINE void assume_alike(const part& l, const part& r) {",
        *(f"    __builtin_assume(l.m{name} + r.m{name} > 0);" for name in counts),
        "  }",
    ]


def in_turns(declare: list[str], load: list[str], compute: list[str]) -> list[str]:
    """Return a loop over a thread's vectors, u, that reads L of them before it computes these: it keeps no more."""
    turn = "for (int u = base; u < base + L && u < U; ++u) {"
    return [
        f"constexpr int L = U < {LATE_UNROLL} ? U : {LATE_UNROLL};",
        "#pragma unroll",
        "for (int base = 0; base < U; base += L) {",
        *indent([*declare, "#pragma unroll", turn]),
        *indent(load, 2),
        *indent(["}", "#pragma unroll", turn]),
        *indent(compute, 2),
        "  }",
        "}",
    ]


def _join(texts: Iterable[str]) -> str:
    return ", ".join(texts)
