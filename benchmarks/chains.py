"""What is measured: chains of elementwise operations, each written once for every peer.

A chain is written over ``Ops``. Ops on tensors run it, ops on JAX arrays trace it, and ops on texts print it as an
expression for the peers that take source code.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

ALPHA = 2.0

FUNCTORS = {
    "axpy": "template <typename T> T axpy(T x, T y, T alpha) { return alpha * x + y; }",
    "mul": "template <typename T> T mul(T x, T y) { return x * y; }",
    "add": "template <typename T> T add(T x, T y) { return x + y; }",
    "sigmoid": "template <typename T> T sigmoid(T x) { return T(1) / (T(1) + exp(-x)); }",
    "tanh": "template <typename T> T hyperbolic(T x) { return tanh(x); }",
}


@dataclass(frozen=True, slots=True)
class Ops:
    """The vocabulary of the chains, in the values of one peer: tensors, arrays, or texts."""

    # alpha * x + y with the constant ALPHA
    axpy: Callable[[Any, Any], Any]
    mul: Callable[[Any, Any], Any]
    add: Callable[[Any, Any], Any]
    sigmoid: Callable[[Any], Any]
    tanh: Callable[[Any], Any]


@dataclass(frozen=True, slots=True)
class Chain:
    """One chain: the computation, the shapes of its inputs, and how exact a result has to be."""

    name: str
    title: str
    dtype: torch.dtype
    # Input names, in order.
    names: tuple[str, ...]
    # Turns ops into a function of the inputs.
    compose: Callable[[Ops], Callable[..., Any]]
    # One letter per input; LAYOUTS says what they mean.
    layouts: str
    # Largest allowed |out - reference| / (1 + |reference|), in units of the dtype's eps.
    tolerance_eps: int

    @property
    def is_flat(self) -> bool:
        """Whether every input is contiguous and of one shape."""
        return set(self.layouts) == {"f"}

    @property
    def is_matrix(self) -> bool:
        """Whether every input is a matrix, a row or a column."""
        return set(self.layouts) <= set("mtesrc")


def compose_six(ops: Ops) -> Callable[..., Any]:
    """Six functors over three inputs, enough arithmetic to tell launches from bandwidth."""

    def chain(x: Any, y: Any, z: Any) -> Any:
        gate = ops.sigmoid(ops.axpy(x, y))
        return ops.add(ops.mul(ops.tanh(ops.mul(gate, z)), x), y)

    return chain


def compose_cheap(ops: Ops) -> Callable[..., Any]:
    """Three functors that a processor is done with before the memory is."""

    def chain(x: Any, y: Any, z: Any) -> Any:
        return ops.add(ops.mul(ops.axpy(x, y), z), x)

    return chain


def compose_add(ops: Ops) -> Callable[..., Any]:
    """One addition: what a call costs when there is nothing to fuse."""

    def chain(x: Any, y: Any) -> Any:
        return ops.add(x, y)

    return chain


def compose_sum(ops: Ops) -> Callable[..., Any]:
    """The sum of eight: many pointers, little else."""

    def chain(a: Any, b: Any, c: Any, d: Any, e: Any, f: Any, g: Any, h: Any) -> Any:
        return functools.reduce(ops.add, (a, b, c, d, e, f, g, h))

    return chain


def compose_affine(ops: Ops) -> Callable[..., Any]:
    """Scale and shift by broadcast vectors."""

    def chain(x: Any, weight: Any, bias: Any) -> Any:
        return ops.add(ops.mul(x, weight), bias)

    return chain


def compose_two(ops: Ops) -> Callable[..., Any]:
    """One product and one sum: what every dtype can do."""

    def chain(x: Any, y: Any) -> Any:
        return ops.add(ops.mul(x, y), x)

    return chain


_AFFINE = ("x", "weight", "bias")
_THREE = ("x", "y", "z")
_TWO = ("x", "y")
CHAINS: dict[str, Chain] = {
    chain.name: chain
    for chain in (
        Chain("six", "six functors, float32", torch.float32, _THREE, compose_six, "fff", 32),
        Chain("six_bf16", "six functors, bfloat16", torch.bfloat16, _THREE, compose_six, "fff", 8),
        Chain("six_f16", "six functors, float16", torch.float16, _THREE, compose_six, "fff", 8),
        Chain("two_i8", "x * y + x, int8", torch.int8, _TWO, compose_two, "ff", 0),
        Chain("two_f8", "x * y + x, float8_e4m3fn", torch.float8_e4m3fn, _TWO, compose_two, "ff", 2),
        Chain("two_f64", "x * y + x, float64", torch.float64, _TWO, compose_two, "ff", 8),
        Chain("two_c64", "x * y + x, complex64", torch.complex64, _TWO, compose_two, "ff", 8),
        Chain("cheap", "three cheap functors, float32", torch.float32, _THREE, compose_cheap, "fff", 16),
        Chain("add", "x + y, float32", torch.float32, _TWO, compose_add, "ff", 2),
        Chain("sum8", "sum of eight, float32", torch.float32, tuple("abcdefgh"), compose_sum, "ffffffff", 8),
        Chain("row", "x * row + row, float32", torch.float32, _AFFINE, compose_affine, "mrr", 8),
        Chain("col", "x * column + column, float32", torch.float32, _AFFINE, compose_affine, "mcc", 8),
        Chain("six_row", "six functors, rows, float32", torch.float32, _THREE, compose_six, "mrr", 32),
        Chain("six_col", "six functors, columns, float32", torch.float32, _THREE, compose_six, "mcc", 32),
        Chain("transpose", "x + y.t(), float32", torch.float32, _TWO, compose_add, "mt", 2),
        Chain("transpose_bf16", "x + y.t(), bfloat16", torch.bfloat16, _TWO, compose_add, "mt", 2),
        Chain("steps", "x[:, ::2] + y[:, ::2], float32", torch.float32, _TWO, compose_add, "ee", 2),
        Chain("shifted", "x[:, 1:] + y[:, 1:], float32", torch.float32, _TWO, compose_add, "ss", 2),
        Chain("shifted_mix", "x[:, 1:] + y, float32", torch.float32, _TWO, compose_add, "sm", 2),
        Chain("channels", "x + y in channels_last, float32", torch.float32, _TWO, compose_add, "nl", 2),
    )
}
# Small sizes say how long a kernel takes from its start to its end; only this chain is measured there.
SMALL_CHAIN = "add"
SMALL_SIZES = (2**10, 2**12, 2**14, 2**16, 2**18, 2**20)

TORCH_OPS = Ops(
    axpy=lambda x, y: torch.add(y, x, alpha=ALPHA),
    mul=torch.mul,
    add=torch.add,
    sigmoid=torch.sigmoid,
    tanh=torch.tanh,
)


def text_ops(sigmoid: str, tanh: str, alpha: str) -> Ops:
    """Return ops that print an expression; the templates say how sigmoid and tanh of ``{0}`` are spelled."""
    return Ops(
        axpy=lambda x, y: f"({alpha} * {x} + {y})",
        mul=lambda x, y: f"({x} * {y})",
        add=lambda x, y: f"({x} + {y})",
        sigmoid=sigmoid.format,
        tanh=tanh.format,
    )


# Valid in a functor with a template type T, for CUDA and C++.
CPP_OPS = text_ops("(T(1) / (T(1) + exp(-{0})))", "tanh({0})", f"T({ALPHA})")


def print_expression(chain: Chain, ops: Ops) -> str:
    """Return the chain as one expression over its input names."""
    return str(chain.compose(ops)(*chain.names))


def shape_of(layout: str, elements: int) -> tuple[int, ...]:
    """Return the shape of an input's storage for about ``elements`` results."""
    side = math.isqrt(elements)
    # Images of 32 x 32 pixels in 64 channels.
    images = max(1, elements // (64 * 32 * 32))
    return {
        "f": (elements,),
        "m": (side, side),
        "t": (side, side),
        "r": (1, side),
        "c": (side, 1),
        "e": (side, 2 * side),
        "s": (side, side + 1),
        "n": (images, 64, 32, 32),
        "l": (images, 64, 32, 32),
    }[layout]


# What a chain sees of the storage: flat, matrix, transposed matrix, row, column, every second column, all columns but
# the first (no row is aligned), images, and images in channels_last.
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    **dict.fromkeys("fmrcn", lambda x: x),
    "t": Tensor.t,
    "e": lambda x: x[:, ::2],
    "s": lambda x: x[:, 1:],
    "l": lambda x: x.contiguous(memory_format=torch.channels_last),
}


def make_inputs(chain: Chain, elements: int, device: torch.device, seed: int = 0) -> tuple[Tensor, ...]:
    """Return random inputs for about ``elements`` results (a square for chains of matrices).

    The values are normal, within -4..4 and never nearer to zero than 1/64 (integers: never 0): zeros would flatter a
    device's clocks and hide a wrong index.
    """
    generator = torch.Generator(device).manual_seed(seed)
    return tuple(
        LAYOUTS[layout](random_values(shape_of(layout, elements), chain.dtype, device, generator))
        for layout in chain.layouts
    )


def random_values(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, generator: torch.Generator
) -> Tensor:
    """Return random values as ``make_inputs`` describes them."""
    values = torch.randn(shape, device=device, generator=generator).clamp_(-4, 4)
    least = 1 / 64 if dtype.is_floating_point or dtype.is_complex else 1
    values = torch.where(values.abs() < least, torch.copysign(torch.full_like(values, least), values), values)
    return values.to(dtype)


def count_bytes(inputs: tuple[Tensor, ...]) -> int:
    """Return the bytes that must move: every input read once, the result written once."""
    outputs = math.prod(torch.broadcast_shapes(*(x.shape for x in inputs)))
    return sum(x.numel() * x.element_size() for x in inputs) + outputs * inputs[0].element_size()
