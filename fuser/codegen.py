"""One kernel text from a group and an ArgSpec. Pure: sees no tensor, touches no device.

The text has four parts: the dialect's prelude, each functor's text in a namespace of its own, the *element function*
(one element of every output from one element of every input), and the dialect's loop around it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import torch

from fuser.access import DEFAULT_TUNING, SINGLE, Access, Tuning
from fuser.cxx.brief import shorten_exp
from fuser.cxx.division import guard_divisions
from fuser.cxx.functor import Functor
from fuser.cxx.quick import quicken_counts, quicken_divisions
from fuser.dtypes import DTypeInfo, dtype_info
from fuser.element import ElementWriter, number_expression, read_names
from fuser.function import Function
from fuser.graph import FusionGroup
from fuser.kernel_spec import ArgSpec, RowSpec, Typing, infer_typing
from fuser.plain_texts import count_names

if TYPE_CHECKING:
    from fuser.row_parts import RowPart, RowPass, Table

__all__ = ["KERNEL_NAME", "Dialect", "KernelSource", "Loop", "Operand", "RowLoop", "build_source", "indent"]

KERNEL_NAME = "fuser_kernel"
# What a functor says of warnings ends with it; each compiler knows one of the two.
_MESSAGES = "#pragma GCC diagnostic {0}\n#pragma nv_diagnostic {0}"


@dataclass(frozen=True, slots=True)
class Operand:
    """A tensor in memory, as the loop sees it; or a counter, whose element at an offset is the offset."""

    # Field of the argument struct that holds its address: in0, out0. Of a counter: index2.
    name: str
    # Variable of the element function's argument: v0 for inputs, v2 for counters, out0 for outputs.
    variable: str
    info: DTypeInfo
    # 0, 1 or 2 as in InputSpec.inner.
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
        return any(operand.is_table for operand in self.operands)

    @property
    def repeats(self) -> bool:
        """Whether some operand begins anew after every ``a.period`` elements."""
        return any(operand.inner == 3 for operand in self.operands)


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


def build_source(group: FusionGroup, args: ArgSpec, dialect: Dialect) -> KernelSource:
    """Write the kernel of a canonical group.

    After the prelude it begins with the functors::

        namespace fuser_f0 {
        #line 1 "functor0.axpy"
        template <typename T> T axpy(T x, T y, T alpha) { return alpha * x + y; }

    Raises:
        UnsupportedError: the dtypes have no kernel.
    """
    typing = infer_typing(group, args.inputs, args.default_dtype)
    functors = _prepare_functors(group, args, typing, dialect)
    numbers = tuple((index, item.number) for index, item in enumerate(args.inputs) if item and item.number)
    operands = _list_operands(group, args, typing)
    writer = ElementWriter(group, args, typing, functors, crosses_with_zero=dialect.crosses_with_zero)
    body: Loop | RowLoop
    if args.rows is None:
        body, parts = _build_loop(group, args, operands, writer, numbers, dialect)
        loop = dialect.emit_loop(body)
    else:
        body, parts = _build_rows(group, args, args.rows, operands, writer)
        loop = dialect.emit_rows(body)
    words = frozenset(read_names(group)).union(*(functor.words for functor in functors))
    prelude = dialect.emit_prelude(words, _features(typing, args) | _kinds(args, body))
    text = _TextWithLines()
    text.add(prelude)
    for index, functor in enumerate(functors):
        _add_functor(text, index, functor, prelude + dialect.own_macros)
    text.add(emit_arguments(body, numbers))
    text.add(parts)
    text.add(loop)
    return KernelSource(
        text=text.finish(),
        dialect=dialect.name,
        operands=tuple(operand for operand in operands if not operand.is_counter),
        numbers=numbers,
        geometry=body.geometry,
        vector=args.vector,
        tuning=args.tuning,
        rows=args.rows,
        accumulator_bytes=_accumulator_bytes(group, typing),
        held_bytes=sum(item.info.dtype.itemsize for item in body.held) if isinstance(body, RowLoop) else 0,
        functors=functors,
        has_zero=body.has_zero,
        numerics=args.numerics,
        positions=args.positions,
        chunk=body.chunk if isinstance(body, Loop) else 0,
    )


def _prepare_functors(group: FusionGroup, args: ArgSpec, typing: Typing, dialect: Dialect) -> tuple[Functor, ...]:
    # Each text once, as the dialect wants it.
    applied = [group.applications[index].function for index in group.live_applications()]
    functors = tuple(dict.fromkeys(functor for item in applied if not item.is_index for functor in item.functors))
    if dialect.divides_quickly and args.numerics == "strict" and args.rows is not None:
        functors = tuple(quicken_counts(functor, _counts_of(functor, applied)) for functor in functors)
    if dialect.traps_on_division:
        # None of torch's ops divides integers.
        own = {functor for item in group.applications if item.function.op is None for functor in item.function.functors}
        functors = tuple(guard_divisions(functor) if functor in own else functor for functor in functors)
    if dialect.has_brief_exp and args.numerics == "fast" and all(_is_narrow(typing, value) for value in group.outputs):
        functors = tuple(map(shorten_exp, functors))
    is_float = any(dtype_info(dtype).compute == "float" for dtype in typing.common)
    is_along = args.rows is None or not (args.rows.is_across or args.rows.scans)
    if dialect.divides_quickly and args.numerics == "strict" and is_along and is_float:
        once = _applied_once(group, args.rows)
        functors = tuple(item if item in once else quicken_divisions(item) for item in functors)
    return functors


def _counts_of(functor: Functor, applied: Sequence[Function]) -> frozenset[str]:
    # What a functor of combining calls numbers of elements, whatever is combined.
    maps = [
        item.functor
        for item in applied
        if item.reduction and not item.reduction.order and item.reduction.combine == functor
    ]
    names = [count_names(mapped, functor) for mapped in maps]
    return frozenset.intersection(*names) if names else frozenset()


def _applied_once(group: FusionGroup, rows: RowSpec | None) -> set[Functor]:
    # What divides once for each row, or reduces: that counts in ways of its own.
    offsets = group.value_offsets()
    return {
        functor
        for index, item in enumerate(group.applications)
        if rows is not None and (item.function.reduction or rows.is_row[offsets[index]])
        for functor in item.function.functors
    }


def _accumulator_bytes(group: FusionGroup, typing: Typing) -> int:
    # As a struct lays them out, in words: each as if it were the largest.
    found = [
        dtype.itemsize
        for item, common in zip(group.applications, typing.common, strict=True)
        if item.function.reduction
        for dtype in item.function.reduction.accumulators(dtype_info(common).compute_dtype)
    ]
    return max(4, *found) * len(found) if found else 0


def _is_narrow(typing: Typing, value: int) -> bool:
    return dtype_info(typing.values[value]).is_narrow


def _build_loop(
    group: FusionGroup,
    args: ArgSpec,
    operands: tuple[Operand, ...],
    writer: ElementWriter,
    numbers: Sequence[tuple[int, type]],
    dialect: Dialect,
) -> tuple[Loop, str]:
    # What a pointwise kernel walks over, and its element function.
    variables = [f"v{index}" for index in (*group.used_inputs(), *group.index_values())]
    loop = Loop(
        operands=operands,
        arguments=(*variables, *(operand.variable for operand in operands if operand.is_output)),
        numbers=(
            *((f"v{index}", number_expression(index, kind)) for index, kind in numbers),
            *((operand.variable, operand.address) for operand in operands if operand.is_table),
        ),
        rank=args.rank,
        vector=args.vector,
        wide_index=args.wide_index,
        tuning=args.tuning,
        positions=args.positions,
        exponent=next((f"v{index}" for index, _ in numbers if _is_exponent(group, index)), ""),
    )
    element = emit_element(writer)
    geometry = (
        ("offset",) * args.has_offsets
        + ("begin",) * any(operand.is_part for operand in operands)
        + ("period",) * loop.repeats
        + (() if loop.is_linear else dialect.geometry)
    )
    return replace(loop, geometry=geometry, has_zero=writer.has_zero, divides=writer.divides), element


def _is_exponent(group: FusionGroup, value: int) -> bool:
    # Whether an input is the exponent of powers and nothing else, in a group that compiles nine times in no time.
    readers = [item for item in group.applications if value in (*item.tensors, *item.scalars)]
    return 0 < len(readers) <= len(group.applications) <= 8 and all(
        "fuser_power" in item.function.functor.words and item.tensors[0] != value for item in readers
    )


def _build_rows(
    group: FusionGroup, args: ArgSpec, rows: RowSpec, operands: tuple[Operand, ...], writer: ElementWriter
) -> tuple[RowLoop, str]:
    # The same of a kernel with reductions: its parts.
    from fuser.row_parts import RowWriter  # noqa: PLC0415 - importing fuser need not load what few groups need

    parts = RowWriter(writer, rows)
    passes = parts.write()
    values = [group.outputs[item.index] if item.is_output else item.index for item in operands]
    return RowLoop(
        operands=operands,
        per_row=frozenset(item.variable for item, value in zip(operands, values, strict=True) if rows.is_row[value]),
        passes=passes,
        types=parts.types,
        kept_types=parts.kept_types,
        rank=args.rank,
        rows=rows,
        vector=args.vector,
        wide_index=args.wide_index,
        tuning=args.tuning,
        geometry=("size", "stride") if args.wide_index or args.device_type == "cpu" else ("size", "divide", "stride"),
        has_zero=writer.has_zero,
        tables=tuple(parts.tables.values()),
    ), "".join(parts.texts)


def emit_macro_ends(macros: tuple[str, ...], prelude: str) -> str:
    """Write what ends a functor's macros and brings back those before it (NVRTC has no ``pop_macro``).

    ::

        #undef LEVELS
        #undef INFINITY
        #define INFINITY __int_as_float(0x7f800000)
    """
    lines = []
    for macro in macros:
        before = re.findall(rf"^#define {macro}\b(?:.*\\\n)*.*", prelude, re.MULTILINE)
        lines += [f"#undef {macro}", *before]
    return "\n".join(lines)


def emit_arguments(loop: Loop | RowLoop, numbers: tuple[tuple[int, type], ...]) -> str:
    """Write the argument struct.

    ::

        struct fuser_args {
          int64_t numel;
          float* out0;
          const float* in0;
          const float* in1;
          double number2;
        };
    """
    lines = ["int64_t numel;", *(["int64_t zero;"] if loop.has_zero else [])]
    in_memory = [operand for operand in loop.operands if not operand.is_counter]
    lines += [f"{operand.pointer} {operand.name};" for operand in in_memory if operand.is_output]
    lines += ["unsigned int* workspace;"] * bool(loop.tuning.piece)
    lines += [f"{operand.pointer} {operand.name};" for operand in in_memory if not operand.is_output]
    for index, kind in numbers:
        lines.append(f"{_field_type(kind)} number{index}{'[2]' if kind is complex else ''};")
    for field in loop.geometry:
        if field == "offset":
            lines += [f"int64_t offset_{operand.name};" for operand in loop.operands]
        elif field == "stride":
            lines += [f"int64_t stride_{operand.name}[{loop.rank}];" for operand in loop.operands]
        elif field == "begin":
            lines.append("int64_t begin;")
        elif field == "period":
            lines += ["int64_t period;", "fuser_divider period_divider;"]
        elif field == "divide":
            lines += [f"fuser_divider divide[{loop.rank - 1}];"] * (loop.rank > 1)
        else:
            lines.append(f"int64_t {field}[{loop.rank}];")
    body = "\n".join(f"  {line}" for line in lines)
    return f"\nstruct fuser_args {{\n{body}\n}};\n"


def emit_element(writer: ElementWriter) -> str:
    """Write the element function: one statement per application, each rounded to its dtype (strict numerics).

    ::

        FUSER_INLINE void fuser_element(const float v0, const float v1, const double v2, float& out0) {
          // v3 = axpy(v0, v1, alpha=v2), float32
          const float v3 = fuser_isolate<2>(fuser_cast<float>(
            fuser_f0::axpy<float>(fuser_isolate<0>(v0), fuser_isolate<1>(v1), v2)));
          out0 = v3;
        }
    """
    body = "\n".join(f"  {line}" for line in writer.statements())
    parameters = ", ".join(writer.parameters())
    template = "template <typename D> " if writer.divides else ""
    return f"\n{template}FUSER_INLINE void fuser_element({parameters}) {{\n{body}\n}}\n"


def indent(lines: Iterable[str], depth: int = 1) -> list[str]:
    """Return lines with spaces before them; the preprocessor's stay where they are."""
    return [line if line.startswith("#") or not line else "  " * depth + line for line in lines]


def _field_type(kind: type) -> str:
    return "double" if kind in (float, complex) else "int64_t"


def _kinds(args: ArgSpec, body: Loop | RowLoop) -> frozenset[str]:
    # What a loop takes of the prelude.
    rows = args.rows
    asked = {
        "tiles": isinstance(body, Loop) and not body.is_linear,
        "lists": args.positions > 0,
        "abreast": args.tuning.leads or args.tuning.follows,
        "tables": args.tuning.looks,
        "cluster": args.tuning.cluster > 1,
        "rows": rows is not None,
        "orders": rows is not None and rows.order is not None,
        "scans": rows is not None and rows.scans,
        "powers": isinstance(body, RowLoop) and any(step.adds_powers for step in body.passes),
    }
    return frozenset(name for name, is_asked in asked.items() if is_asked)


def _features(typing: Typing, args: ArgSpec) -> frozenset[str]:
    dtypes = {*typing.values, *typing.common}
    found = {dtype_info(dtype).feature for dtype in dtypes}
    if torch.complex32 in dtypes:
        found.add("half")
    if args.counters:
        found.add("counter")
    if any(item and item.number is complex for item in args.inputs):
        found.add("complex")
    if args.device_type == "cpu" and dict(args.settings).get("cpu_math") == "precise":
        found.add("precise")
    return frozenset(feature for feature in found if feature)


def _list_operands(group: FusionGroup, args: ArgSpec, typing: Typing) -> tuple[Operand, ...]:
    operands = [
        Operand(f"out{slot}", f"out{slot}", dtype_info(typing.values[value]), inner, slot, is_output=True)
        for slot, (value, inner) in enumerate(zip(group.outputs, args.outputs, strict=True))
    ]
    for index in group.used_inputs():
        item = args.inputs[index]
        if item is not None and item.number is None and not item.is_counter:
            operands.append(Operand(f"in{index}", f"v{index}", dtype_info(item.dtype), item.inner, index, False))
    given = [index for index in group.used_inputs() if (item := args.inputs[index]) and item.is_counter]
    for value, inner in zip([*group.index_values(), *given], args.counters, strict=True):
        info = dtype_info(torch.int64)
        is_part = bool(args.positions and inner)
        operands.append(
            Operand(f"index{value}", f"v{value}", info, inner, value, False, is_counter=True, is_part=is_part)
        )
    tables = group.tables()
    operands = [
        replace(item, has_offset=args.has_offsets, is_table=item.index in tables and not item.is_output)
        for item in operands
    ]
    if args.accesses:
        pairs = zip(operands, args.accesses, strict=True)
        operands = [replace(operand, access=access) for operand, access in pairs]
    return tuple(operands)


class _TextWithLines:
    """Collects text and keeps #line true: generated parts count as the kernel's lines, functors as their own."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def add(self, text: str) -> None:
        if text:
            self.lines += text.rstrip("\n").split("\n")

    def add_from(self, label: str, text: str) -> None:
        self.lines.append(f'#line 1 "{label}"')
        self.add(text)
        # The directive itself is one line, the line after it is the one it numbers.
        self.lines.append(f'#line {len(self.lines) + 2} "{KERNEL_NAME}"')

    def finish(self) -> str:
        return "\n".join(self.lines) + "\n"


def _add_functor(text: _TextWithLines, index: int, functor: Functor, before: str) -> None:
    # In a namespace of its own; ``before``: a text with the macros that there are before it.
    text.add(f"\nnamespace fuser_f{index} {{")
    if functor.shadows:
        text.add(f"using ::{functor.entry};")
    sets_messages = any("diag" in word for word in functor.words)
    text.add(_MESSAGES.format("push") if sets_messages else "")
    text.add_from(functor_label(index, functor), functor.text)
    text.add(_MESSAGES.format("pop") if sets_messages else "")
    text.add("}")
    text.add(emit_macro_ends(functor.macros, before))
