"""Writes the statements of one element: a call of its functor for each application, rounded as numerics ask for."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch

from fuser.cxx.functor import Functor, Role
from fuser.cxx.quick import QUICK
from fuser.dtypes import Rank, cpp_scalar_type, dtype_info, is_continuous
from fuser.function import Function, Isolation
from fuser.graph import FusionGroup
from fuser.kernel_spec import ArgSpec, Typing
from fuser.plain_texts import find_quotient, is_plainly, may_end_in_product

__all__ = ["ElementWriter", "number_expression", "output_type", "read_names"]


class ElementWriter:
    """Writes the statements of one element function; counts the barriers, so that each has its own number."""

    def __init__(
        self,
        group: FusionGroup,
        args: ArgSpec,
        typing: Typing,
        functors: tuple[Functor, ...],
        in_pieces: Collection[int] = (),
        *,
        crosses_with_zero: bool = False,
    ) -> None:
        self.group = group
        self.args = args
        self.typing = typing
        self.functors = functors
        # Whether statements divide as they are told, and the type of what says how.
        self.divides = any(QUICK in functor.words for functor in functors)
        self.how = "D"
        self.is_strict = args.numerics == "strict"
        self.crosses_with_zero = crosses_with_zero and self.is_strict
        # Whether some statement uses the zero; known when they are written.
        self.has_zero = False
        self.barriers = 0
        # Applications that divide by what their row has: which tensor, and what divides it.
        self.quotients: dict[int, tuple[int, str]] = {}
        # Of applications that are looked up: which operand is multiplied by what; -1: none, and that is rounded.
        self.looked: dict[int, tuple[int, str]] = {}
        # C++ type of each value inside the element function.
        self.types: dict[int, str] = {}
        # What outputs of some storage types are given in place of those.
        self.given: Mapping[str, str] = {}
        # The outputs that are written where they are computed.
        self.storing: Collection[int] = range(len(group.outputs))
        self.live = group.live_applications()
        # What gives an index its shape is not read for it.
        live = [group.applications[index] for index in self.live]
        self.read_later = {value for item in live if not item.function.is_index for value in item.tensors}
        self.offsets = group.value_offsets()
        self.products = self._find_products()
        self.bare_products = self._find_bare_products()

        for index in group.used_inputs():
            item = args.inputs[index]
            assert item is not None, "a used input is bound"
            self.types[index] = cpp_scalar_type(item.number) if item.number else dtype_info(item.dtype).compute
        self.types |= dict.fromkeys(group.index_values(), dtype_info(torch.int64).compute)
        for value in group.tables():
            storage = dtype_info(typing.values[value]).storage
            self.types[value] = f"fuser_taken<{storage}>" if value in in_pieces else f"{storage}*"

    def _find_products(self) -> set[int]:
        # What may be a product, and is read by something else than a product or a quotient: a sum, as far as one knows.
        added = {
            value
            for item in (self.group.applications[index] for index in self.live)
            if not _multiplies(item.function.functor)
            for value in item.tensors
        }
        products = set()
        for index in self.live:
            function = self.group.applications[index].function
            for slot, value in enumerate(self.values(index)):
                # Of a reduction another functor's.
                may_be = function.reduction is not None or "/" in function.functor.source
                if value in self.read_later & added and (may_be or may_end_in_product(function.functor, slot)):
                    products.add(value)
        return products

    def _find_bare_products(self) -> set[int]:
        # Those that nothing keeps apart where they are made, and no rounding to 16 bits: what derivatives make.
        return {
            value
            for index in self.live
            if self.group.applications[index].function.isolation is Isolation.NONE
            for value in self.products.intersection(self.values(index))
            if self._is_inexact(value) and not dtype_info(self.typing.values[value]).is_narrow
        }

    def _is_inexact(self, value: int) -> bool:
        return is_continuous(self.typing.values[value])

    def parameters(self) -> list[str]:
        """Return the element function's parameters: the inputs and indices, then the outputs."""
        texts = ["D& how"] * self.divides + ["const int64_t zero"] * self.has_zero
        given = (*self.group.used_inputs(), *self.group.index_values())
        texts += [f"const {self.types[value]} v{value}" for value in given]
        for slot, value in enumerate(self.group.outputs):
            storage = dtype_info(self.typing.values[value]).storage
            texts.append(f"{self.given.get(storage, storage)}& out{slot}")
        return texts

    def statements(self) -> list[str]:
        """Write all applications."""
        return [line for index in self.live for line in self.application(index)]

    def values(self, index: int) -> range:
        """Return the values that an application makes."""
        return range(self.offsets[index], self.offsets[index] + self.group.applications[index].function.num_outputs)

    def is_quick(self, index: int) -> bool:
        """Return whether an application's functor divides as it is told."""
        functor = self.group.applications[index].function.functor
        return functor in self.functors and QUICK in self.functors[self.functors.index(functor)].words

    def describe(self, index: int) -> str:
        """Return a comment: ``// v3 = axpy(v0, v1, alpha=v2), float32``."""
        values = self.values(index)
        dtypes = ", ".join(str(self.typing.values[value]).removeprefix("torch.") for value in values)
        names = ", ".join(f"v{value}" for value in values)
        return f"// {names} = {self.group.applications[index]}, {dtypes}"

    def application(self, index: int) -> list[str]:
        """Write the statements of one application."""
        application = self.group.applications[index]
        function, values = application.function, self.values(index)
        lines = [self.describe(index)]
        if function.is_index:
            # The loop gives it.
            return lines + [f"out{slot} = v{values[0]};" for slot in self.storing if self.group.outputs[slot] in values]
        if function.is_read:
            # What says where a part is, the loop has looked at.
            looked = application.tensors[:1] if function.op == "pick" else application.tensors
            given = ", ".join(f"v{value}" for value in looked)
            return lines + self.result(
                values[0], f"fuser_to_compute({_READERS[str(function.op)]}({given}))", is_apart=True
            )
        operands = self.operands(index)
        names = [f"r{value}" for value in values]
        others = [dtype_info(self.typing.values[value]).compute for value in values]
        call, results, declarations = self.call(index, function.functor, operands, names, others)
        if index in self.quotients:
            slot, divisor = self.quotients[index]
            call = f"{divisor}({operands[slot]}, is_exact)"
        elif index in self.looked:
            slot, entry = self.looked[index]
            call = entry if slot < 0 else f"{operands[slot]} * {entry}"
        lines += declarations
        if results:
            lines.append(f"{call};")
        for value, expression in zip(values, results or [call], strict=True):
            is_rounded = index in self.looked and self.looked[index][0] < 0
            lines += self.result(
                value, expression, is_apart=function.isolation is not Isolation.NONE, is_rounded=is_rounded
            )
        return lines

    def call(
        self,
        index: int,
        functor: Functor,
        operands: Sequence[str],
        names: Sequence[str],
        others: Sequence[str],
        compute: str = "",
    ) -> tuple[str, list[str], list[str]]:
        """Write a call of an application's functor.

        Args:
            index: the application.
            functor: one of its texts.
            operands: what its tensors are bound to.
            names: variables for its T& parameters.
            others: types of those that another template parameter than the first declares.
            compute: what the first template parameter is, if not the application's compute type.

        Returns:
            The call, the variables that its T& parameters are bound to, and their declarations.
        """
        application = self.group.applications[index]
        function = application.function
        info = dtype_info(self.typing.common[index])
        compute = compute or info.compute
        tensors = iter(operands)
        scalars = dict(zip((item.name for item in function.scalars), application.scalars, strict=True))
        arguments: list[str] = []
        results: list[str] = []
        declarations: list[str] = []
        bound = len(operands)
        for parameter in functor.parameters:
            if parameter.role is Role.OUTPUT:
                slot = len(results)
                kind = output_type(functor, parameter.type, compute, others[slot])
                declarations.append(f"{kind} {names[slot]}{{}};")
                results.append(names[slot])
                arguments.append(names[slot])
            elif parameter.role is Role.SCALAR:
                arguments.append(f"v{scalars[parameter.name]}")
            elif bound:
                bound -= 1
                arguments.append(next(tensors))
        # Some of torch's own ops round steps to their dtype.
        rounds = function.op is not None and len(functor.template_parameters) == 2 and self.is_strict
        types = f"{compute}, {info.storage}" if rounds else compute
        namespace = f"fuser_f{(number := self.functors.index(functor))}"
        if QUICK in self.functors[number].words:
            types, arguments = f"{self.how}, {types}", ["how", *arguments]
        return f"{namespace}::{functor.entry}<{types}>({', '.join(arguments)})", results, declarations

    def operands(self, index: int) -> list[str]:
        """Return what the functor's tensors are bound to."""
        application = self.group.applications[index]
        function = application.function
        info = dtype_info(self.typing.common[index])
        texts = []
        parameters = function.tensor_parameters(len(application.tensors))
        for slot, (value, parameter) in enumerate(zip(application.tensors, parameters, strict=True)):
            text = self._argument(value, info.compute if parameter.name not in function.unpromoted else None)
            is_rounded = function.is_comparison or (self.is_strict and not self._is_wide(function, slot, value))
            is_promoted = parameter.name not in function.unpromoted and self.typing.values[value] != info.dtype
            if is_rounded and is_promoted and info.is_narrow:
                # As torch, which converts operands to the common dtype: of integers, or of a wider tensor without
                # dimensions, bits are lost.
                text = f"fuser_round<{info.storage}>({text})"
            if function.isolation is Isolation.FULL:
                # Strict: each use of a value is its own barrier. Two functors that both compute a*b must not share the
                # product, or the compiler may contract it in one of them differently than when the functor runs alone.
                text = self.isolate(self.cross(text) if value in self.bare_products else text)
            texts.append(text)
        return texts

    def _is_wide(self, function: Function, slot: int, value: int) -> bool:
        given = self.args.inputs[value] if value < len(self.group.inputs) else None
        return function.takes_wide(
            slot,
            is_number=given is not None and given.number is not None,
            is_weak=self.typing.ranks[value] is not Rank.TENSOR,
            device_type=self.args.device_type,
        )

    def _argument(self, value: int, compute: str | None) -> str:
        text = f"v{value}"
        return text if compute in (None, self.types[value]) else f"fuser_cast<{compute}>({text})"

    def result(self, value: int, expression: str, *, is_apart: bool, is_rounded: bool = False) -> list[str]:
        """Write what gives a value its variable, and the outputs that it is; ``is_rounded``: to its dtype."""
        info, is_read_later = dtype_info(self.typing.values[value]), value in self.read_later
        isolate = self.isolate if is_apart else str
        self.types[value] = info.compute
        slots = [slot for slot in self.storing if self.group.outputs[slot] == value]
        converted = f"fuser_cast<{info.compute}>({expression})"
        given = self.given.get(info.storage, info.storage)
        if not self.is_strict or not info.is_narrow:
            crosses = value in self.products and is_apart and self._is_inexact(value)
            crossing = self.cross(converted) if crosses else converted
            lines = [f"const {info.compute} v{value} = {isolate(crossing)};"]
            stored = f"fuser_from_compute<{given}>(v{value})" if info.is_narrow else f"v{value}"
        elif not slots:
            rounded = isolate(converted if is_rounded else f"fuser_round<{info.storage}>({converted})")
            lines = [f"const {info.compute} v{value} = {rounded};"]
        else:
            lines = [f"const {given} s{value} = fuser_from_compute<{given}>({converted});"]
            if is_read_later:
                kept = isolate(f"fuser_keep({converted}, s{value})")
                lines = [f"{given} s{value};", f"const {info.compute} v{value} = {kept};"]
            return lines + [f"fuser_assign(out{slot}, s{value});" for slot in slots]
        return lines + [f"out{slot} = {stored};" for slot in slots]

    def cross(self, text: str) -> str:
        """Return the text of a floating-point value such that no product in it is contracted with what reads it."""
        if not self.crosses_with_zero:
            return text
        self.has_zero = True
        return f"fuser_cross({text}, zero)"

    def isolate(self, text: str) -> str:
        """Return the text behind a barrier of its own."""
        if not self.is_strict:
            return text
        self.barriers += 1
        return f"fuser_isolate<{self.barriers - 1}>({text})"


def read_names(group: FusionGroup) -> list[str]:
    """Return the names of the prelude's functions that read what stays in memory for a group."""
    found = (_READERS.get(str(item.function.op), "") for item in group.applications)
    return [name.partition("<")[0] for name in found if name]


_READERS = {
    "read": "fuser_take",
    "pick": "fuser_picked",
    "add_each": "fuser_add_up<fuser_add_each>",
    "add_once": "fuser_add_up<fuser_add_once>",
    "add_lanes": "fuser_add_up<fuser_add_lanes>",
}


def _multiplies(functor: Functor) -> bool:
    is_product = len(functor.tensors) == 2 and is_plainly(functor, "{0} * {1}")
    return is_product or find_quotient(functor) is not None


def output_type(functor: Functor, declared: str, compute: str, other: str) -> str:
    """Return the C++ type of a parameter that is declared in terms of template parameters.

    A ``T&`` binds to the compute type; another template parameter is deduced, so ``other`` serves.
    """
    names = functor.template_parameters
    if declared in names[1:]:
        return other
    return "".join(compute if word == names[0] else word for word in _split_words(declared))


def _split_words(text: str) -> list[str]:
    # "std::complex<T>" -> ["std", ":", ":", "complex", "<", "T", ">"]
    words: list[str] = []
    for char in text:
        if words and (char.isalnum() or char == "_") and (words[-1][-1].isalnum() or words[-1][-1] == "_"):
            words[-1] += char
        else:
            words.append(char)
    return words


def number_expression(index: int, kind: type) -> str:
    """Return the expression that reads a by-value input from the argument struct ``a``."""
    field = f"a.number{index}"
    if kind is complex:
        return f"std::complex<double>({field}[0], {field}[1])"
    return f"({field} != 0)" if kind is bool else field
