"""One kernel text from a group and an ArgSpec. Pure: sees no tensor, touches no device.

The text has four parts: the dialect's prelude, each functor's text in a namespace of its own, the *element function*
(one element of every output from one element of every input), and the dialect's loop around it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from fuser.access import DEFAULT_TUNING, SINGLE, Access, Tuning
from fuser.cxx.division import guard_divisions
from fuser.cxx.functor import Functor, Role
from fuser.dtypes import DTypeInfo, cpp_scalar_type, dtype_info
from fuser.graph import Application, FusionGroup, Isolation, describe_application
from fuser.kernel_spec import ArgSpec, Typing, infer_typing

__all__ = ["KERNEL_NAME", "Dialect", "KernelSource", "Loop", "Operand", "build_source"]

KERNEL_NAME = "fuser_kernel"
# What a functor says of warnings ends with it; each compiler knows one of the two.
_MESSAGES = "#pragma GCC diagnostic {0}\n#pragma nv_diagnostic {0}"


@dataclass(frozen=True, slots=True)
class Operand:
    """A tensor in memory, as the loop sees it; or a counter, whose element at an offset is the offset."""

    # Field of the argument struct that holds its address: in0, out0. Of a counter: index2.
    name: str
    # Variable of the element function's argument: v0 for inputs, out0 for outputs, c2 for counters.
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

    @property
    def address(self) -> str:
        """The expression for its address."""
        return "fuser_counter{}" if self.is_counter else f"a.{self.name}"

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

    @cached_property
    def inputs(self) -> tuple[Operand, ...]:
        """The operands read."""
        return tuple(operand for operand in self.operands if not operand.is_output)

    @cached_property
    def outputs(self) -> tuple[Operand, ...]:
        """The operands written."""
        return tuple(operand for operand in self.operands if operand.is_output)

    def call_element(self, expressions: dict[str, str]) -> str:
        """Return the call of the element function with an expression per operand's variable."""
        known = {**dict(self.numbers), **expressions}
        arguments = ["a.zero"] if self.has_zero else []
        return f"fuser_element({', '.join([*arguments, *(known[variable] for variable in self.arguments)])});"

    @property
    def is_linear(self) -> bool:
        """Whether one index serves every operand: one dimension, each operand dense or one element for all."""
        return self.rank == 1 and all(operand.inner != 2 for operand in self.operands)


@dataclass(frozen=True, slots=True)
class Dialect:
    """How one device's C++ differs."""

    name: str
    # Prelude text from the words of the functors and the features of the storage types.
    emit_prelude: Callable[[frozenset[str], frozenset[str]], str]
    # The kernel function around fuser_element.
    emit_loop: Callable[[Loop], str]
    # Geometry fields of its kernels that are not linear.
    geometry: tuple[str, ...] = ("size", "stride")
    # #define lines of macros that the compiler has by itself and that functors may define or end.
    own_macros: str = ""
    # Whether the compiler contracts multiply-adds behind the back of fuser_isolate, so that values which cross from one
    # functor to the next are combined with a zero that it cannot see (fuser_cross).
    crosses_with_zero: bool = False
    # Whether an integer divided by zero ends the process.
    traps_on_division: bool = False


@dataclass(frozen=True, slots=True)
class KernelSource:
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
    rank: int
    # Geometry fields at the end of the struct; none for a linear kernel.
    geometry: tuple[str, ...]
    vector: int
    tuning: Tuning
    # Functor of each namespace fuser_f<i>, to map compiler messages back.
    functors: tuple[Functor, ...]
    # Whether the struct has the field ``zero``.
    has_zero: bool
    # Compiler settings that are no part of the text.
    numerics: str

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
    applied = [group.applications[index].function for index in group.live_applications()]
    functors = tuple(dict.fromkeys(function.functor for function in applied if not function.is_index))
    if dialect.traps_on_division:
        # None of torch's ops divides integers.
        own = {item.function.functor for item in group.applications if item.function.op is None}
        functors = tuple(guard_divisions(functor) if functor in own else functor for functor in functors)
    numbers = tuple((index, item.number) for index, item in enumerate(args.inputs) if item and item.number)
    operands = _list_operands(group, args, typing)
    variables = [f"v{index}" for index in group.used_inputs()]
    variables += [operand.variable for operand in operands if operand.is_counter]
    loop = Loop(
        operands=operands,
        arguments=(*variables, *(operand.variable for operand in operands if operand.is_output)),
        numbers=tuple((f"v{index}", number_expression(index, kind)) for index, kind in numbers),
        rank=args.rank,
        vector=args.vector,
        wide_index=args.wide_index,
        tuning=args.tuning,
    )
    if not loop.is_linear:
        loop = replace(loop, geometry=dialect.geometry)
    words = frozenset[str]().union(*(functor.words for functor in functors))
    text = _TextWithLines()
    features = _features(typing, args)
    prelude = dialect.emit_prelude(words, features if loop.is_linear else features | {"tiles"})
    text.add(prelude)
    for index, functor in enumerate(functors):
        text.add(f"\nnamespace fuser_f{index} {{")
        if functor.shadows:
            text.add(f"using ::{functor.entry};")
        sets_messages = any("diag" in word for word in functor.words)
        text.add(_MESSAGES.format("push") if sets_messages else "")
        text.add_from(functor_label(index, functor), functor.text)
        text.add(_MESSAGES.format("pop") if sets_messages else "")
        text.add("}")
        text.add(emit_macro_ends(functor.macros, prelude + dialect.own_macros))
    writer = ElementWriter(group, args, typing, functors, crosses_with_zero=dialect.crosses_with_zero)
    element = emit_element(writer)
    loop = replace(loop, has_zero=writer.has_zero)
    text.add(emit_arguments(loop, numbers))
    text.add(element)
    text.add(dialect.emit_loop(loop))
    return KernelSource(
        text=text.finish(),
        dialect=dialect.name,
        operands=tuple(operand for operand in operands if not operand.is_counter),
        numbers=numbers,
        rank=args.rank,
        geometry=loop.geometry,
        vector=args.vector,
        tuning=args.tuning,
        functors=functors,
        has_zero=loop.has_zero,
        numerics=args.numerics,
    )


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


def emit_arguments(loop: Loop, numbers: tuple[tuple[int, type], ...]) -> str:
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
    lines += [f"{operand.pointer} {operand.name};" for operand in loop.operands if not operand.is_counter]
    for index, kind in numbers:
        lines.append(f"{_field_type(kind)} number{index}{'[2]' if kind is complex else ''};")
    for field in loop.geometry:
        if field == "stride":
            lines += [f"int64_t stride_{operand.name}[{loop.rank}];" for operand in loop.operands]
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
    return f"\nFUSER_INLINE void fuser_element({parameters}) {{\n{body}\n}}\n"


def number_expression(index: int, kind: type) -> str:
    """Return the expression that reads a by-value input from the argument struct ``a``."""
    field = f"a.number{index}"
    if kind is complex:
        return f"std::complex<double>({field}[0], {field}[1])"
    return f"({field} != 0)" if kind is bool else field


def _field_type(kind: type) -> str:
    return "double" if kind in (float, complex) else "int64_t"


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
        if item is not None and item.number is None:
            operands.append(Operand(f"in{index}", f"v{index}", dtype_info(item.dtype), item.inner, index, False))
    for value, inner in zip(group.index_values(), args.counters, strict=True):
        info = dtype_info(torch.int64)
        operands.append(Operand(f"index{value}", f"c{value}", info, inner, value, is_output=False, is_counter=True))
    if args.accesses:
        pairs = zip(operands, args.accesses, strict=True)
        operands = [replace(operand, access=access) for operand, access in pairs]
    return tuple(operands)


class ElementWriter:
    """Writes the statements of one element function; counts the barriers, so that each has its own number."""

    def __init__(
        self,
        group: FusionGroup,
        args: ArgSpec,
        typing: Typing,
        functors: tuple[Functor, ...],
        *,
        crosses_with_zero: bool = False,
    ) -> None:
        self.group = group
        self.args = args
        self.typing = typing
        self.functors = functors
        self.is_strict = args.numerics == "strict"
        self.crosses_with_zero = crosses_with_zero and self.is_strict
        # Whether some statement uses the zero; known when they are written.
        self.has_zero = False
        self.barriers = 0
        # C++ type of each value inside the element function.
        self.types: dict[int, str] = {}

        for index in group.used_inputs():
            item = args.inputs[index]
            assert item is not None, "a used input is bound"
            self.types[index] = cpp_scalar_type(item.number) if item.number else dtype_info(item.dtype).compute

    def parameters(self) -> list[str]:
        texts = ["const int64_t zero"] if self.has_zero else []
        texts += [f"const {self.types[index]} v{index}" for index in self.group.used_inputs()]
        texts += [f"const {dtype_info(torch.int64).compute} c{value}" for value in self.group.index_values()]
        for slot, value in enumerate(self.group.outputs):
            texts.append(f"{dtype_info(self.typing.values[value]).storage}& out{slot}")
        return texts

    def statements(self) -> list[str]:
        lines: list[str] = []
        live = [(index, self.group.applications[index]) for index in self.group.live_applications()]
        # What gives an index its shape is not read for it.
        read_later = {value for _, item in live if not item.function.is_index for value in item.tensors}
        offsets = self.group.value_offsets()
        for index, application in live:
            lines += self._application(index, application, offsets[index], read_later)
        return lines

    def _application(self, index: int, application: Application, offset: int, read_later: set[int]) -> list[str]:
        function = application.function
        values = range(offset, offset + function.num_outputs)
        dtypes = ", ".join(str(self.typing.values[value]).removeprefix("torch.") for value in values)
        names = ", ".join(f"v{value}" for value in values)
        lines = [f"// {names} = {describe_application(application)}, {dtypes}"]
        call, results, declarations = self._call(index, application, offset)
        lines += declarations
        if results:
            lines.append(f"{call};")
        for value, expression in zip(values, results or [call], strict=True):
            lines += self._result(
                value, expression, value in read_later, is_apart=function.isolation is not Isolation.NONE
            )
        return lines

    def _call(self, index: int, application: Application, offset: int) -> tuple[str, list[str], list[str]]:
        # The call, the variables its T& parameters are bound to, and their declarations.
        function, functor = application.function, application.function.functor
        if function.is_index:
            return f"c{offset}", [], []
        info = dtype_info(self.typing.common[index])
        compute = info.compute
        tensors = iter(application.tensors)
        scalars = iter(application.scalars)
        arguments: list[str] = []
        results: list[str] = []
        declarations: list[str] = []
        bound = len(application.tensors)
        for parameter in functor.parameters:
            if parameter.role is Role.OUTPUT:
                variable = f"r{offset + len(results)}"
                declarations.append(
                    f"{self._output_type(index, parameter.type, offset + len(results))} {variable}{{}};"
                )
                results.append(variable)
                arguments.append(variable)
            elif parameter.role is Role.SCALAR:
                arguments.append(f"v{next(scalars)}")
            elif bound:
                bound -= 1
                promoted = parameter.name not in function.unpromoted
                value = next(tensors)
                text = self._argument(value, compute if promoted else None)
                if function.is_comparison and self.typing.values[value] != info.dtype and info.is_narrow:
                    # As torch: what is compared has the common dtype.
                    text = f"fuser_round<{info.storage}>({text})"
                # Strict: each use of a value is its own barrier. Two functors that both compute a*b must not share the
                # product, or the compiler may contract it in one of them differently than when the functor runs alone.
                arguments.append(self._isolate(text) if function.isolation is Isolation.FULL else text)
        namespace = f"fuser_f{self.functors.index(functor)}"
        # Some of torch's own ops round steps to their dtype.
        rounds = function.op is not None and len(functor.template_parameters) == 2 and self.is_strict
        types = f"{compute}, {info.storage}" if rounds else compute
        return f"{namespace}::{functor.entry}<{types}>({', '.join(arguments)})", results, declarations

    def _argument(self, value: int, compute: str | None) -> str:
        text = f"v{value}"
        return text if compute in (None, self.types[value]) else f"fuser_cast<{compute}>({text})"

    def _output_type(self, index: int, declared: str, value: int) -> str:
        # A T& binds to the compute type; another template parameter is deduced, so the output's own type serves.
        names = self.group.applications[index].function.functor.template_parameters
        if declared in names[1:]:
            return dtype_info(self.typing.values[value]).compute
        compute = dtype_info(self.typing.common[index]).compute
        return "".join(compute if word == names[0] else word for word in _split_words(declared))

    def _result(self, value: int, expression: str, is_read_later: bool, *, is_apart: bool) -> list[str]:
        info = dtype_info(self.typing.values[value])
        isolate = self._isolate if is_apart else str
        self.types[value] = info.compute
        slots = [slot for slot, output in enumerate(self.group.outputs) if output == value]
        converted = f"fuser_cast<{info.compute}>({expression})"
        if not self.is_strict or not info.is_narrow:
            crossing = self._cross(converted, info) if is_read_later and is_apart else converted
            lines = [f"const {info.compute} v{value} = {isolate(crossing)};"]
            stored = f"fuser_from_compute<{info.storage}>(v{value})" if info.is_narrow else f"v{value}"
        elif not slots:
            rounded = isolate(f"fuser_round<{info.storage}>({converted})")
            lines = [f"const {info.compute} v{value} = {rounded};"]
        else:
            lines = [f"const {info.storage} s{value} = fuser_from_compute<{info.storage}>({converted});"]
            if is_read_later:
                kept = isolate(f"fuser_keep({converted}, s{value})")
                lines = [f"{info.storage} s{value};", f"const {info.compute} v{value} = {kept};"]
            return lines + [f"fuser_assign(out{slot}, s{value});" for slot in slots]
        return lines + [f"out{slot} = {stored};" for slot in slots]

    def _cross(self, text: str, info: DTypeInfo) -> str:
        if not self.crosses_with_zero or not (info.dtype.is_floating_point or info.dtype.is_complex):
            return text
        self.has_zero = True
        return f"fuser_cross({text}, zero)"

    def _isolate(self, text: str) -> str:
        if not self.is_strict:
            return text
        self.barriers += 1
        return f"fuser_isolate<{self.barriers - 1}>({text})"


def _split_words(text: str) -> list[str]:
    # "std::complex<T>" -> ["std", ":", ":", "complex", "<", "T", ">"]
    words: list[str] = []
    for char in text:
        if words and (char.isalnum() or char == "_") and (words[-1][-1].isalnum() or words[-1][-1] == "_"):
            words[-1] += char
        else:
            words.append(char)
    return words


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
