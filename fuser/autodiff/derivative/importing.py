"""Typed graphs (torch.fx, ATen overloads) as expressions."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from fuser.autodiff.derivative.expression import Builder, Expr
from fuser.eager.math.functions import NamedFunction

__all__ = ["import_graph"]

# Overloads that take a number where the vocabulary's takes a tensor.
_BINARY = frozenset(
    "add sub mul div fmod remainder pow atan2 hypot copysign nextafter fmax fmin maximum minimum ldexp bitwise_and "
    "bitwise_or bitwise_xor bitwise_left_shift bitwise_right_shift lt le gt ge eq ne logical_and logical_or "
    "logical_xor where complex polar".split()
)
_LOGICAL = frozenset({"logical_and", "logical_or", "logical_xor", "logical_not"})
# C++ functions that ATen has under another name.
_FUNCTIONS = {
    "cyl_bessel_i0": "special_i0",
    "cyl_bessel_i1": "special_i1",
    "j0": "special_bessel_j0",
    "j1": "special_bessel_j1",
    "y0": "special_bessel_y0",
    "y1": "special_bessel_y1",
    "erfcx": "special_erfcx",
    "normcdf": "special_ndtr",
    "normcdfinv": "special_ndtri",
    "fuser_frexp_mantissa": "frexp_mantissa",
    "fuser_frexp_exponent": "frexp_exponent",
    "ldexp": "ldexp",
    "scalbn": "ldexp",
    "scalbln": "ldexp",
}
_SAME = frozenset({"clone", "alias", "lift_fresh_copy"})


def import_graph(graph: fx.Graph, names: Sequence[str], builder: Builder) -> tuple[list[Expr], list[Expr]]:
    """Return the placeholders and the outputs of a typed graph as expressions.

    Args:
        graph: every node but the last has ``meta["dtype"]``; the last returns a tuple.
        names: what the placeholders are called as inputs; there may be more.
        builder: makes the expressions.
    """
    made: dict[fx.Node, Expr] = {}
    inputs: list[Expr] = []
    for node in graph.nodes:
        if node.op == "placeholder":
            made[node] = builder.input(names[len(inputs)], node.meta["dtype"])
            inputs.append(made[node])
        elif node.op == "call_function" and _name(node.target) != "frexp":
            made[node] = _import_node(node, made, builder)
        elif node.op == "output":
            return inputs, [made[output] for output in node.args[0]]
    raise AssertionError("a graph has an output")


def _import_node(node: fx.Node, made: dict[fx.Node, Expr], builder: Builder) -> Expr:
    name, dtype, place = _name(node.target), node.meta["dtype"], node.meta.get("place")
    args = [made.get(arg, arg) if isinstance(arg, fx.Node) else arg for arg in node.args]
    if name in _CONSTANTS:
        return builder.constant(_CONSTANTS[name](args), dtype)
    if name in _SAME:
        return args[0]  # type: ignore[return-value]
    if name == "getitem":
        source: Any = node.args[0]
        op = ("frexp_mantissa", "frexp_exponent")[args[1]]  # type: ignore[index]
        return builder.emit(op, made[source.args[0]], dtype=dtype, place=place)
    if name == "_to_copy":
        return _convert(args[0], dtype, builder, place)  # type: ignore[arg-type]
    if name == "view":
        return builder.emit("bit_cast", args[0], dtype=dtype, place=place)
    if name == "rsub":
        name, args = "sub", args[::-1]
    if name == "div" and node.kwargs.get("rounding_mode") is not None:
        name = "div_trunc" if node.kwargs["rounding_mode"] == "trunc" else "div_floor"
    if name in _LOGICAL:
        args = [arg.call("ne", 0) if isinstance(arg, Expr) and arg.dtype is not torch.bool else arg for arg in args]
    if name in {"add", "sub"} and node.kwargs.get("alpha", 1) != 1:
        args[1] = args[1] * node.kwargs["alpha"]  # type: ignore[operator]
    operands = args[1:] if name == "polygamma" else args
    typed = [arg for arg in (operands[1:] if name == "where" else operands) if isinstance(arg, Expr)]
    if name in _BINARY and not typed:
        operands = [_constant(arg, dtype, builder) for arg in operands]
        args = operands
    return builder.emit(name, *args, dtype=dtype, place=place)


def _convert(x: Expr, dtype: torch.dtype, builder: Builder, place: Any) -> Expr:
    if x.dtype.is_complex and not dtype.is_complex and dtype is not torch.bool:
        x = builder.emit("real", x, place=place)
    return builder.emit("convert", x, dtype=dtype, place=place)


def _constant(value: Any, dtype: torch.dtype, builder: Builder) -> Expr:
    return value if isinstance(value, Expr) else builder.constant(value, dtype)


def _name(target: Any) -> str:
    if target is operator.getitem:
        return "getitem"
    if isinstance(target, NamedFunction):
        return _FUNCTIONS.get(target.name, f"cpp.{target.name}")
    full = str(target.name()).removeprefix("aten::")
    return full.partition(".")[0]


_CONSTANTS: dict[str, Callable[[list[Any]], Any]] = {
    "scalar_tensor": lambda args: args[0],
    "full_like": lambda args: args[1],
    "full": lambda args: args[1],
    "zeros_like": lambda _: 0,
    "ones_like": lambda _: 1,
}
