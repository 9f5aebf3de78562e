"""Typed graphs (torch.fx, ATen overloads), as translations have them, as expressions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from fuser.autodiff.derivative.expression import Builder, Expr
from fuser.eager.math.functions import NamedFunction

__all__ = ["import_graph"]

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
        elif node.op == "call_function":
            made[node] = _import_node(node, made, builder)
        else:
            return inputs, [made[output] for output in node.args[0]]
    raise AssertionError("a graph has an output")


def _import_node(node: fx.Node, made: dict[fx.Node, Expr], builder: Builder) -> Expr:
    name, dtype, place = _name(node.target), node.meta["dtype"], node.meta.get("place")
    args: list[Any] = [made[arg] if isinstance(arg, fx.Node) else arg for arg in node.args]
    if name in {"scalar_tensor", "full_like"}:
        return builder.constant(args[-1], dtype)
    if name == "_to_copy":
        name = "convert"
        if args[0].dtype.is_complex and not dtype.is_complex and dtype is not torch.bool:
            args = [builder.emit("real", args[0], place=place)]
    elif name == "view":
        name, args = "bit_cast", args[:1]
    elif name == "div" and "rounding_mode" in node.kwargs:
        assert node.kwargs["rounding_mode"] == "trunc", "C++ has no other"
        name = "div_trunc"
    return builder.emit(name, *args, dtype=dtype, place=place)


def _name(target: Any) -> str:
    if isinstance(target, NamedFunction):
        return _FUNCTIONS.get(target.name, f"cpp.{target.name}")
    return str(target.name()).removeprefix("aten::").partition(".")[0]
