"""One kernel text from a group and an ArgSpec. Pure: sees no tensor, touches no device.

The text has four parts: the dialect's prelude, each functor's text in a namespace of its own, the *element function*
(one element of every output from one element of every input), and the dialect's loop around it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

import torch

from fuser.cxx.brief import shorten_exp
from fuser.cxx.division import guard_divisions
from fuser.cxx.functor import Functor
from fuser.cxx.quick import quicken_counts, quicken_divisions
from fuser.dtypes import dtype_info
from fuser.element import ElementWriter, number_expression, read_names
from fuser.function import Function
from fuser.graph import FusionGroup
from fuser.kernel_source import KERNEL_NAME, Dialect, KernelSource, Loop, Operand, RowLoop, functor_label
from fuser.kernel_spec import ArgSpec, RowSpec, Typing, infer_typing
from fuser.plain_texts import count_names

__all__ = ["build_source"]

# What a functor says of warnings ends with it; each compiler knows one of the two.
_MESSAGES = "#pragma GCC diagnostic {0}\n#pragma nv_diagnostic {0}"


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
    in_pieces = [operand.index for operand in operands if operand.piece]
    writer = ElementWriter(group, args, typing, functors, in_pieces, crosses_with_zero=dialect.crosses_with_zero)
    if args.rows is None:
        writer.given = dict(dialect.rounded_in_loops)
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


def _field_type(kind: type) -> str:
    return "double" if kind in (float, complex) else "int64_t"


def _kinds(args: ArgSpec, body: Loop | RowLoop) -> frozenset[str]:
    # What a loop takes of the prelude.
    rows = args.rows
    asked = {
        "tiles": isinstance(body, Loop) and not body.is_linear,
        "askew": isinstance(body, Loop) and any(map(body.is_askew, body.operands)),
        "level": args.tuning.begins_level,
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
    pieces, picks = _find_pieces(group, args, operands), _find_picks(group, operands)
    pieces |= picks
    return tuple(
        replace(item, piece=pieces.get(item.index, ()), is_part_of_whole=item.index in picks) if item.is_table else item
        for item in operands
    )


def _find_picks(group: FusionGroup, operands: Sequence[Operand]) -> dict[int, tuple[str, ...]]:
    # The parts of what is put together, and what says where they are.
    variables = {item.index: item.variable for item in operands if item.is_counter}
    readers = [group.applications[index] for index in group.live_applications()]
    return {
        item.tensors[0]: tuple(variables[value] for value in item.tensors[1:])
        for item in readers
        if item.function.op == "pick"
    }


def _find_pieces(group: FusionGroup, args: ArgSpec, operands: Sequence[Operand]) -> dict[int, tuple[str, ...]]:
    # Of the tables of which a thread's vector takes neighbours, all of one entry: what says where they are.
    if args.device_type != "cuda" or args.rows is not None or args.vector == 1 or args.positions:
        return {}
    known = {item.index: item for item in operands if not (item.is_output or item.access.is_transposed)}
    readers = [group.applications[index] for index in group.live_applications()]
    readers = [item for item in readers if item.function.is_read]
    found = {}
    for table, *values in (item.tensors for item in readers if item.function.op == "read"):
        is_lone = sum(table in item.tensors for item in readers) == 1
        if not is_lone or not all(value in known for value in values):
            continue
        first, *rest = (known[value] for value in values)
        if first.is_counter and first.inner == 1 and not any(item.inner for item in rest):
            found[table] = tuple(known[value].variable for value in values)
    return found


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
