"""Protects the bits of derivatives: every rewrite of an expression gives what it replaces, on every kind of value.

The table of rewrites is walked: each operation in it is applied to every operand that a rule could look for (inputs,
constants, the results of every operation of the table), and what the builder makes is compared bit for bit with what
torch computes step by step. A rule that no such operand reaches fails the last test.
"""

from __future__ import annotations

import inspect
import itertools
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import CodeType, FrameType
from typing import Any

import pytest
import torch
from derivative_tools import evaluate

from fuser.autodiff.derivative.expression import REWRITES, Builder, Expr
from fuser.autodiff.derivative.operations import apply, result_dtype

F32, F64, I32, I64, BOOL = torch.float32, torch.float64, torch.int32, torch.int64, torch.bool
DTYPES = (F32, F64, torch.complex64, torch.complex128, I32, I64, BOOL)
# What a conversion may come from, on its way to another type.
CONVERTED = (*DTYPES, torch.int8, torch.int16, torch.uint8)
LOGICAL = {"logical_and", "logical_or", "logical_xor", "logical_not"}
BITWISE = {"bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_not"}
UNARY = {"neg", "bitwise_not", "logical_not", "convert", "detach", "conj_physical", "real", "imag"}
# The sign and payload of a NaN that these make are left open by IEEE 754 and differ between machines.
_FREE_NAN = {"add", "sub", "mul", "div"}


@dataclass(frozen=True, eq=False)
class Operand:
    """An expression as the builder made it, and what it was asked for."""

    expr: Expr
    op: str
    operands: tuple[Operand, ...]
    dtype: torch.dtype
    # Of an input its name, of a constant the number.
    name: str = ""
    # Of an input and of a constant.
    value: torch.Tensor | None = None

    @cached_property
    def wanted(self) -> torch.Tensor:
        """What torch makes of it, step by step."""
        if self.value is not None:
            return self.value
        return apply(self.op, (), [item.wanted for item in self.operands], self.dtype)

    @cached_property
    def has_exact_nan(self) -> bool:
        """Whether the bits of its NaNs mean something: not those of a number in a text, which has no sign."""
        if self.op == "constant":
            return not self.wanted.isnan().item()
        return self.op not in _FREE_NAN and all(item.has_exact_nan for item in self.operands)

    @property
    def is_rewritten(self) -> bool:
        """Whether the builder made something else."""
        return (self.expr.op, self.expr.args) != (self.op, tuple(item.expr for item in self.operands))

    def __str__(self) -> str:
        if self.name:
            return self.name
        return f"{self.op}({', '.join(map(str, self.operands))}): {str(self.dtype).removeprefix('torch.')}"


def special(dtype: torch.dtype) -> torch.Tensor:
    """Return zeros, infinities, NaNs, denormals, the ends of the range, and ordinary values."""
    if dtype is BOOL:
        return torch.tensor([False, True])
    if dtype.is_complex:
        parts = torch.tensor([0.0, -0.0, -1.5, math.inf, math.nan], dtype=dtype.to_real())
        return torch.complex(*torch.meshgrid(parts, parts, indexing="ij")).flatten()
    if dtype.is_floating_point:
        info = torch.finfo(dtype)
        least = info.smallest_normal * info.eps
        found = [0.0, 1.0, 1.5, 3.0, 0.1, least, info.smallest_normal, info.max, math.inf, math.nan]
        return torch.tensor([sign * value for value in found for sign in (1, -1)], dtype=dtype)
    info = torch.iinfo(dtype)
    ordinary = {0, 1, 2, 7, -1, -2} if info.min else {0, 1, 2, 7}
    return torch.tensor(sorted({info.min, info.min + 1, info.max - 1, info.max} | ordinary), dtype=dtype)


def constants(dtype: torch.dtype) -> list[Any]:
    """Return the numbers that a rule may look for, and some it must not take for them."""
    if dtype is BOOL:
        return [False, True]
    if dtype.is_complex:
        return [0j, complex(-0.0, 0.0), 1 + 0j, -1 + 0j, 2j]
    if dtype.is_floating_point:
        return [0.0, -0.0, 1.0, -1.0, 3.0, math.inf, math.nan, torch.finfo(dtype).smallest_normal / 2]
    return [0, 1, -1, 3, torch.iinfo(dtype).min, torch.iinfo(dtype).max]


class Expressions:
    """Makes operands of one builder: inputs x and y of one type, a mask m, and one input for each other type.

    They hold every combination of x, y and m; the other types' values go along with y.
    """

    def __init__(self, dtype: torch.dtype, others: Sequence[torch.dtype], *, drops_detach: bool = False) -> None:
        self.builder = Builder(drops_detach=drops_detach)
        size = max(len(special(kind)) for kind in (dtype, *others))
        of_x, of_y, of_m = torch.meshgrid(
            torch.arange(len(special(dtype))), torch.arange(size), torch.arange(2), indexing="ij"
        )
        kinds = {"x": (dtype, of_x), "y": (dtype, of_y), "m": (BOOL, of_m)}
        kinds |= {str(kind).removeprefix("torch."): (kind, of_y) for kind in others if kind is not dtype}
        self.values: dict[str, torch.Tensor] = {}
        for name, (kind, place) in kinds.items():
            values = special(kind)
            self.values[name] = values[place.flatten() % len(values)]
        self.inputs = {
            name: Operand(self.builder.input(name, kind), "input", (), kind, name, self.values[name])
            for name, (kind, _) in kinds.items()
        }

    def constant(self, value: Any, dtype: torch.dtype) -> Operand:
        """Return a number."""
        expr = self.builder.constant(value, dtype)
        return Operand(expr, "constant", (), dtype, repr(value), torch.scalar_tensor(value, dtype=dtype))

    def apply(self, op: str, *operands: Operand, dtype: torch.dtype | None = None) -> Operand:
        """Return an operation as the builder makes it."""
        made = dtype or result_dtype(op, [item.dtype for item in operands])
        return Operand(self.builder.emit(op, *(item.expr for item in operands), dtype=dtype), op, operands, made)


def takes(op: str, dtype: torch.dtype) -> bool:
    """Whether an operation has operands of a type."""
    if op in BITWISE:
        return not (dtype.is_floating_point or dtype.is_complex)
    if op in LOGICAL | {"convert", "where", "detach", "eq", "ne"}:
        return True
    if op in {"conj_physical", "real", "imag"}:
        return dtype.is_complex
    if op == "div":
        return dtype.is_floating_point or dtype.is_complex
    return dtype is not BOOL


def operands_of(made: Expressions, dtype: torch.dtype) -> list[Operand]:
    """Return every operand of a type, one operation deep."""
    leaves = [made.inputs["x"], made.inputs["y"]]
    x, y = leaves
    numbers = [made.constant(value, dtype) for value in constants(dtype)]
    found = [*leaves, *numbers]
    for op in REWRITES:
        if op == "where":
            found += [made.apply(op, mask, a, b) for mask in masks_of(made) for a, b in ((x, y), (y, x))]
        elif op == "convert":
            others = [item for item in made.inputs.values() if item.dtype is not dtype]
            found += [made.apply(op, item, dtype=dtype) for item in others if is_defined(item, dtype)]
        elif takes(op, dtype) and result_dtype(op, [dtype, dtype]) is dtype:
            found += [made.apply(op, *pair) for pair in itertools.product(leaves, repeat=1 if op in UNARY else 2)]
            if op in {"bitwise_and", "bitwise_or"}:
                # A truth value as C++ has it.
                found.append(made.apply(op, *(made.apply("convert", item, dtype=dtype) for item in bools_of(made)[:2])))
            if op in {"mul", "div"}:
                found += [made.apply(op, *pair) for pair in ((x, numbers[3]), (numbers[3], x))]
    if dtype.is_complex:
        part, zero = made.inputs[str(dtype.to_real())[6:]], made.constant(-0.0, dtype.to_real())
        found += [made.apply("complex", part, zero), made.apply("complex", zero, part)]
    return found


def bools_of(made: Expressions) -> list[Operand]:
    """Return the inputs that are bools."""
    return [item for item in made.inputs.values() if item.dtype is BOOL]


def masks_of(made: Expressions) -> list[Operand]:
    """Return bools."""
    mask = made.inputs["m"]
    return [mask, made.apply("logical_not", mask)]


def is_defined(item: Operand, dtype: torch.dtype) -> bool:
    """Whether C++ defines the conversion of every value of an operand to a type."""
    if item.dtype.is_complex and not dtype.is_complex:
        return False
    is_integer = not (dtype.is_floating_point or dtype.is_complex or dtype is BOOL)
    return not (is_integer and item.dtype.is_floating_point)


def applications(op: str, dtype: torch.dtype) -> Iterator[tuple[Expressions, list[Operand]]]:
    """Yield an operation of the table on every combination of operands of a type, with what made them."""
    if not takes(op, dtype):
        return
    others = list(CONVERTED) if op == "convert" else [I32, BOOL]
    others += [dtype.to_real()] if dtype.is_complex else []
    for drops_detach in (False, True) if op == "detach" else (False,):
        made = Expressions(dtype, others, drops_detach=drops_detach)
        found = operands_of(made, dtype)
        if op == "where":
            triples = [*itertools.product(masks_of(made), found, found)]
            masks = [made.constant(True, BOOL), made.constant(False, BOOL), made.apply("logical_not", found[0])]
            triples += itertools.product(masks, found[:3], found[:3])
            yield made, [made.apply(op, *items) for items in triples]
        elif op == "convert":
            pairs = itertools.product(found, CONVERTED)
            yield made, [made.apply(op, item, dtype=to) for item, to in pairs if is_defined(item, to)]
        else:
            yield made, [made.apply(op, *items) for items in itertools.product(found, repeat=1 if op in UNARY else 2)]


def bits(item: torch.Tensor) -> torch.Tensor:
    """Return the bits of numbers as integers."""
    if item.is_complex():
        return bits(torch.view_as_real(item.resolve_conj().resolve_neg()).contiguous())
    return item.view({4: I32, 8: I64}[item.element_size()]) if item.is_floating_point() else item


def differs(got: torch.Tensor, wanted: torch.Tensor, *, has_exact_nan: bool) -> torch.Tensor:
    """Return where the bits differ; NaNs are alike where their bits mean nothing."""
    found = bits(got) != bits(wanted)
    if has_exact_nan or not (got.is_floating_point() or got.is_complex()):
        return found
    parts = (torch.view_as_real(item) if item.is_complex() else item for item in (got, wanted))
    return found & ~torch.stack([part.isnan() for part in parts]).all(0)


def check(made: Expressions, operands: Sequence[Operand]) -> None:
    """Compare what the builder made with what torch computes, wherever it is not what was asked for."""
    operands = [item for item in operands if item.is_rewritten]
    size = next(iter(made.values.values())).shape
    for operand, got in zip(operands, evaluate([item.expr for item in operands], made.values), strict=True):
        is_typed = got.dtype is operand.wanted.dtype
        assert is_typed, f"{operand} became {operand.expr}: {got.dtype}"
        got, wanted = got.expand(size), operand.wanted.expand(size)
        wrong = differs(got, wanted, has_exact_nan=operand.has_exact_nan)
        if wrong.dim() > 1:
            wrong = wrong.any(-1)
        if wrong.any():
            place = int(wrong.nonzero()[0])
            inputs = {name: value[place].item() for name, value in made.values.items() if name in str(operand)}
            message = f"{operand} became {operand.expr}: {got[place]} for {wanted[place]} at {inputs}"
            raise AssertionError(message)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("op", REWRITES)
def test_rewrites_keep_every_bit(op: str, dtype: torch.dtype) -> None:
    for made, operands in applications(op, dtype):
        check(made, operands)


def codes_of(op: str) -> set[CodeType]:
    """Return the code of an operation's rule, and of what it calls in its module."""
    names = vars(inspect.getmodule(Builder))
    found: set[CodeType] = set()
    waiting = [REWRITES[op].__code__]
    while waiting:
        code = waiting.pop()
        if code not in found:
            found.add(code)
            called = (names.get(name) for name in code.co_names)
            waiting += [item.__code__ for item in called if inspect.isfunction(item)]
    return found


def lines_of(code: CodeType) -> set[int]:
    """Return the lines of a function's body."""
    return {line for *_, line in code.co_lines() if line is not None and line > code.co_firstlineno}


@pytest.mark.parametrize("op", REWRITES)
def test_operands_reach_every_line_of_a_rule(op: str) -> None:
    wanted = codes_of(op)
    missing = {line for code in wanted for line in lines_of(code)}

    def trace(frame: FrameType, event: str, _: Any) -> Callable[..., Any] | None:
        if frame.f_code not in wanted:
            return None
        missing.discard(frame.f_lineno)
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        for dtype in (F32, I32, BOOL, torch.complex64):
            if missing:
                list(applications(op, dtype))
    finally:
        sys.settrace(before)
    source = inspect.getsource(inspect.getmodule(Builder)).split("\n")
    assert not missing, [source[line - 1].strip() for line in sorted(missing)]
