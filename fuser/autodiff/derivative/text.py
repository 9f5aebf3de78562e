"""Expressions as the text of a functor."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from fuser.autodiff.derivative.expression import Builder, Expr, topological
from fuser.autodiff.derivative.helpers import LOWERINGS, helper_text
from fuser.autodiff.derivative.operations import Number
from fuser.eager.data import round_to
from fuser.errors import NotDifferentiableError

__all__ = ["Names", "emit_functor"]

_TYPES = {
    torch.bool: "bool",
    torch.int8: "int8_t",
    torch.int16: "int16_t",
    torch.int32: "int",
    torch.int64: "int64_t",
    torch.uint8: "uint8_t",
    torch.float32: "float",
    torch.float64: "double",
    torch.complex64: "std::complex<float>",
    torch.complex128: "std::complex<double>",
}
_UNSIGNED = {torch.int32: "uint32_t", torch.int64: "uint64_t"}
# How tightly C++ binds; a higher number binds tighter.
_PRIMARY, _UNARY, _PRODUCT, _SHIFT, _RELATION, _EQUALITY, _OR, _TERNARY = 20, 19, 11, 9, 8, 7, 2, 1
# Not && and ||: they are branches, and gcc vectorises no loop with many of them.
_LOGICAL = {"logical_and": ("&", 6), "logical_or": ("|", 4)}
_OPERATORS = {
    "mul": ("*", 11), "div": ("/", 11), "add": ("+", 10), "sub": ("-", 10), "lt": ("<", 8), "le": ("<=", 8),
    "gt": (">", 8), "ge": (">=", 8), "eq": ("==", 7), "ne": ("!=", 7), "bitwise_and": ("&", 6),
    "bitwise_xor": ("^", 5), "bitwise_or": ("|", 4), "bitwise_left_shift": ("<<", 9),
    "bitwise_right_shift": (">>", 9),
}  # fmt: skip
# C++ functions that are not called like the op.
_FUNCTIONS = {
    "round": "rint",
    "special_i0": "cyl_bessel_i0",
    "special_i1": "cyl_bessel_i1",
    "special_bessel_j0": "j0",
    "special_bessel_j1": "j1",
    "special_bessel_y0": "y0",
    "special_bessel_y1": "y1",
    "special_erfcx": "erfcx",
    "special_ndtr": "normcdf",
    "special_ndtri": "normcdfinv",
    "conj_physical": "std::conj",
    "angle": "std::arg",
    "real": "std::real",
    "imag": "std::imag",
    "polar": "std::polar",
}
_SAME_NAME = frozenset(
    "exp exp2 expm1 log log2 log10 log1p sqrt rsqrt sin cos tan asin acos atan sinh cosh tanh asinh acosh atanh erf "
    "erfc erfinv lgamma ceil floor trunc pow atan2 hypot copysign nextafter fmax fmin ldexp".split()
)
# Functions that C++ has for double under this name, and for float under one that ends in f.
_DOUBLE_ONLY = frozenset({"rhypot", "norm3d", "norm4d", "rnorm3d", "rnorm4d"})
_BIT_CASTS = {
    (torch.float32, torch.int32): "__float_as_int",
    (torch.int32, torch.float32): "__int_as_float",
    (torch.float64, torch.int64): "__double_as_longlong",
    (torch.int64, torch.float64): "__longlong_as_double",
}
# Longest expression that is written where it is used instead of getting a name.
_MAX_INLINE = 60


class Names:
    """Chooses names that no parameter has.

    Args:
        taken: names that are taken.
    """

    def __init__(self, taken: Sequence[str]) -> None:
        self._taken = {*taken}
        self._next = 0

    def choose(self, name: str) -> str:
        """Return ``name``, or with a number behind it when that is taken."""
        chosen, number = name, 0
        while chosen in self._taken:
            number += 1
            chosen = f"{name}{number}"
        self._taken.add(chosen)
        return chosen

    def variable(self) -> str:
        """Return the name of the next variable: v1, v2, ..."""
        while True:
            self._next += 1
            if f"v{self._next}" not in self._taken:
                return f"v{self._next}"

    def is_taken(self, name: str) -> bool:
        """Whether a parameter hides the function of that name."""
        return name in self._taken


def _cpp_type(dtype: torch.dtype, compute: torch.dtype, template: str) -> str:
    """Return the C++ name of a type; that of the compute dtype is the template parameter's."""
    return template if dtype is compute else _TYPES[dtype]


def emit_functor(
    entry: str,
    inputs: Sequence[Expr],
    outputs: Sequence[tuple[str, Expr]],
    compute: torch.dtype,
    template: str = "T",
) -> str:
    """Write a functor: one result is returned, several are written to ``T&`` parameters.

    For the gradient of ``x > 0 ? log(x) : x``::

        template <typename T> T f_backward(T grad_out, T x) {
          return x > T(0) ? grad_out / x : grad_out;
        }

    Args:
        entry: name of the function.
        inputs: the parameters, as inputs.
        outputs: name and value of each result.
        compute: dtype that the template parameter stands for.
        template: name of the template parameter.
    """
    values = _lower([value for _, value in outputs])
    names = Names([template, *(item.args[0] for item in inputs), *(name for name, _ in outputs)])
    writer = _TextWriter(compute, template, names)
    results, lines = writer.write(values)
    parameters = [f"{writer.type(item.dtype)} {item.args[0]}" for item in inputs]
    if len(outputs) == 1:
        result = writer.type(values[0].dtype)
        lines.append(f"return {results[0]};")
    else:
        result = "void"
        parameters += [f"{writer.type(v.dtype)}& {name}" for (name, _), v in zip(outputs, values, strict=True)]
        lines += [f"{name} = {text};" for (name, _), text in zip(outputs, results, strict=True)]
    body = "".join(f"  {line}\n" for line in lines)
    head = f"template <typename {template}> {result} {entry}({', '.join(parameters)})"
    return f"{writer.helpers()}{head} {{\n{body}}}\n"


def _lower(outputs: Sequence[Expr]) -> list[Expr]:
    # Operations that C++ has no name for, in terms of others.
    builder = Builder(drops_detach=True)
    made: dict[Expr, Expr] = {}
    for item in topological(outputs):
        if item.op in {"input", "constant"}:
            made[item] = builder.leaf(item)
            continue
        operands = [made[operand] for operand in item.operands]
        lowered = LOWERINGS[item.op](*operands) if item.op in LOWERINGS else None
        if lowered is None:
            static = item.args[: len(item.args) - len(operands)]
            lowered = builder.emit(item.op, *static, *operands, dtype=item.dtype, place=item.place)
        made[item] = lowered
    return [made[output] for output in outputs]


@dataclass(frozen=True, slots=True)
class _Text:
    text: str
    # How tightly its outermost operator binds.
    binds: int = _PRIMARY

    def within(self, binds: int) -> str:
        """The text as an operand of an operator: in parentheses if it binds less than ``binds``."""
        return self.text if self.binds >= binds else f"({self.text})"


class _TextWriter:
    def __init__(self, compute: torch.dtype, template: str, names: Names) -> None:
        self._compute = compute
        self._template = template
        self._names = names
        self._texts: dict[Expr, _Text] = {}
        self._helpers: dict[str, str] = {}

    def type(self, dtype: torch.dtype) -> str:
        return _cpp_type(dtype, self._compute, self._template)

    def helpers(self) -> str:
        return "".join(text + "\n" for text in self._helpers.values())

    def write(self, outputs: Sequence[Expr]) -> tuple[list[str], list[str]]:
        """Return the expression of each output, and the statements before them."""
        order = topological(outputs)
        uses = Counter(operand for item in order for operand in item.operands)
        uses.update(outputs)
        lines: list[str] = []
        for item in order:
            text = self._expression(item)
            is_short = len(text.text) <= _MAX_INLINE or item in outputs
            if item.op not in {"input", "constant"} and not (uses[item] == 1 and is_short) and not _is_sign(item):
                name = self._names.variable()
                lines.append(f"const {self.type(item.dtype)} {name} = {text.text};")
                text = _Text(name)
            self._texts[item] = text
        return [self._texts[output].text for output in outputs], lines

    def _expression(self, item: Expr) -> _Text:
        if item.op == "input":
            return _Text(item.args[0])
        if item.op == "constant":
            return self._constant(item.args[0], item.dtype)
        operands = [self._texts[operand] for operand in item.operands]
        if item.op in _UNSIGNED_OPERATIONS and item.dtype in _UNSIGNED:
            return self._wrapping(item, operands)
        if item.op in _WRITERS:
            return _WRITERS[item.op](self, item, operands)
        if item.op in _OPERATORS:
            return self._operator(*_OPERATORS[item.op], item, operands)
        if item.op in _SAME_NAME or item.op in _FUNCTIONS or item.op.startswith("cpp."):
            name = _FUNCTIONS.get(item.op, item.op.removeprefix("cpp."))
            is_float = name in _DOUBLE_ONLY and item.dtype is torch.float32
            return self.call(f"{name}f" if is_float else name, operands)
        raise NotDifferentiableError(f"its derivative needs {item.op}, which has no C++ function", item.place)

    def call(self, name: str, operands: Sequence[_Text]) -> _Text:
        name = f"std::{name}" if self._names.is_taken(name) else name
        return _Text(f"{name}({', '.join(operand.text for operand in operands)})")

    def helper(self, op: str, operands: Sequence[_Text], order: int = 0) -> _Text:
        """Call a function that the text brings along."""
        name = f"fuser_{op}_{order}" if order else f"fuser_{op}"
        while self._names.is_taken(name):
            name += "_"
        self._helpers[name] = helper_text(op, order).replace("$name", name)
        return _Text(f"{name}({', '.join(operand.text for operand in operands)})")

    def _operator(self, symbol: str, binds: int, item: Expr, operands: list[_Text]) -> _Text:
        left, right = operands
        if binds in {_EQUALITY, _RELATION}:
            # a < b == c is right, and hard to read.
            text = f"{left.within(_SHIFT)} {symbol} {right.within(_SHIFT)}"
            return _Text(text, binds)
        text = f"{left.within(binds)} {symbol} {right.within(binds + 1)}"
        if item.dtype in {torch.int8, torch.int16, torch.uint8}:
            # C++ computed it as int.
            return _Text(f"{self.type(item.dtype)}({text})")
        return _Text(text, binds)

    def _wrapping(self, item: Expr, operands: list[_Text]) -> _Text:
        # Signed integers that overflow wrap here, and anything may happen to them in C++.
        unsigned = _UNSIGNED[item.dtype]
        if item.op == "neg":
            return _Text(f"{self.type(item.dtype)}({unsigned}(0) - {unsigned}({operands[0].text}))")
        symbol, _ = _OPERATORS[item.op]
        texts = [f"{unsigned}({operand.text})" for operand in operands]
        return _Text(f"{self.type(item.dtype)}({texts[0]} {symbol} {texts[1]})")

    def _constant(self, value: Number, dtype: torch.dtype) -> _Text:
        if dtype is torch.bool:
            return _Text("true" if value else "false")
        kind = self.type(dtype)
        if dtype.is_complex:
            assert isinstance(value, complex)
            parts = [_float_literal(part, dtype.to_real()) for part in (value.real, value.imag)]
            is_real = repr(value.imag) == "0.0"
            return _Text(f"{kind}({parts[0]})" if is_real else f"{kind}({', '.join(parts)})")
        if dtype.is_floating_point:
            return _Text(f"{kind}({_float_literal(float(value.real), dtype)})")
        number = int(value.real)
        lowest = number == torch.iinfo(dtype).min
        text = f"({number + 1} - 1)" if lowest else str(number)
        if dtype is torch.int32:
            return _Text(text) if number >= 0 or lowest else _Text(text, _UNARY)
        return _Text(f"{kind}({text})")


def _float_literal(value: float, dtype: torch.dtype) -> str:
    if math.isnan(value):
        return "NAN"
    if math.isinf(value):
        return "INFINITY" if value > 0 else "-INFINITY"
    text = repr(value)
    if dtype is torch.float32:
        shorter = (f"{value:.{digits}g}" for digits in range(1, 10))
        text = next((x for x in shorter if round_to(float(x), dtype) == value), text)
    if "e" not in text and float(text).is_integer():
        return text.removesuffix(".0") if value or text[0] != "-" else "-0.0"
    return text


def _is_sign(item: Expr) -> bool:
    # -x costs nothing: no name for it.
    return item.op == "neg" and item.args[0].op == "input"


def _neg(writer: _TextWriter, item: Expr, operands: list[_Text]) -> _Text:
    (operand,) = operands
    if item.args[0].op in {"mul", "div"} and operand.binds == _PRODUCT and operand.text[0] not in "-(":
        # (-a) * b is -(a * b), and easier to read.
        return _Text(f"-{operand.text}", _PRODUCT)
    text = operand.within(_UNARY)
    return _Text(f"-({text})" if text[0] == "-" else f"-{text}", _UNARY)


def _abs(writer: _TextWriter, item: Expr, operands: list[_Text]) -> _Text:
    x = item.args[0].dtype
    return writer.call("std::abs" if x.is_complex else "fabs" if x.is_floating_point else "abs", operands)


def _not(writer: _TextWriter, item: Expr, operands: list[_Text]) -> _Text:
    (inner,) = item.args
    if inner.op in {"eq", "ne"} and operands[0].binds == _EQUALITY:
        symbol, other = (" == ", " != ") if inner.op == "eq" else (" != ", " == ")
        return _Text(operands[0].text.replace(symbol, other), _EQUALITY)
    return _Text(f"!{operands[0].within(_UNARY)}", _UNARY)


def _logical(writer: _TextWriter, item: Expr, operands: list[_Text]) -> _Text:
    symbol, binds = _LOGICAL[item.op]
    texts = [
        text.text if operand.op == item.op and text.binds == binds else text.within(_UNARY)
        for operand, text in zip(item.args, operands, strict=True)
    ]
    return _Text(f" {symbol} ".join(texts), binds)


def _invert(writer: _TextWriter, item: Expr, operands: list[_Text]) -> _Text:
    return _Text(f"~{operands[0].within(_UNARY)}", _UNARY)


def _xor(writer: _TextWriter, item: Expr, operands: list[_Text]) -> _Text:
    return _Text(f"{operands[0].within(_SHIFT)} != {operands[1].within(_SHIFT)}", _EQUALITY)


def _where(writer: _TextWriter, item: Expr, operands: list[_Text]) -> _Text:
    mask, a, b = operands
    return _Text(f"{mask.within(_OR)} ? {a.within(_OR)} : {b.text}", _TERNARY)


def _convert(writer: _TextWriter, item: Expr, operands: list[_Text]) -> _Text:
    if item.args[0].dtype.is_complex and not item.dtype.is_complex:
        # As a kernel stores a complex number in a real tensor.
        operands = [writer.call("std::real", operands)]
    return _Text(f"{writer.type(item.dtype)}({operands[0].text})")


def _bit_cast(writer: _TextWriter, item: Expr, operands: list[_Text]) -> _Text:
    name = _BIT_CASTS.get((item.args[0].dtype, item.dtype))
    if name is None:
        raise NotDifferentiableError("its derivative needs a bit cast that has no C++ function", item.place)
    return writer.call(name, operands)


def _divide_integers(writer: _TextWriter, item: Expr, operands: list[_Text]) -> _Text:
    if item.dtype.is_floating_point:
        return writer.call("trunc", [writer._operator("/", 11, item, operands)])
    return writer._operator("/", 11, item, operands)


def _fmod(writer: _TextWriter, item: Expr, operands: list[_Text]) -> _Text:
    if item.dtype.is_floating_point:
        return writer.call("fmod", operands)
    return writer._operator("%", 11, item, operands)


def _signbit(writer: _TextWriter, item: Expr, operands: list[_Text]) -> _Text:
    return _Text(f"{writer.call('signbit', operands).text} != 0", _EQUALITY)


def _complex(writer: _TextWriter, item: Expr, operands: list[_Text]) -> _Text:
    return _Text(f"{writer.type(item.dtype)}({operands[0].text}, {operands[1].text})")


def _helper(writer: _TextWriter, item: Expr, operands: list[_Text]) -> _Text:
    return writer.helper(item.op, operands, item.args[0] if item.op == "polygamma" else 0)


_UNSIGNED_OPERATIONS = frozenset({"add", "sub", "mul", "neg", "bitwise_left_shift"})
_WRITERS: dict[str, Callable[[_TextWriter, Expr, list[_Text]], _Text]] = {
    "neg": _neg,
    "abs": _abs,
    "logical_not": _not,
    "logical_and": _logical,
    "logical_or": _logical,
    "bitwise_not": _invert,
    "logical_xor": _xor,
    "where": _where,
    "convert": _convert,
    "bit_cast": _bit_cast,
    "div_trunc": _divide_integers,
    "fmod": _fmod,
    "signbit": _signbit,
    "complex": _complex,
    "digamma": _helper,
    "polygamma": _helper,
    "frexp_mantissa": _helper,
    "frexp_exponent": _helper,
}
