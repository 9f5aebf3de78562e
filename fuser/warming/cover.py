"""From calls of groups with symbolic sizes to kernels: which sizes share kernels, and one of each compiled.

What decides a kernel's text runs once on the sizes of a call, and once on symbols (``fuser.sizes``), which note what
is asked of them: wherever the answers are the same, so is the kernel.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import reduce
from typing import Any, NamedTuple, TypeAlias

import torch

from fuser import counters
from fuser.errors import CompileError, FuserError, UnsupportedError
from fuser.kernel_spec import ArgSpec, KernelSpec
from fuser.plain_torch import unwatched
from fuser.planner import ask_lengths, find_texts, make_plan
from fuser.process import core_count, map_in_threads
from fuser.progress import Progress
from fuser.report import MISTAKES
from fuser.sizes import Tape
from fuser.tensor_desc import TensorDesc

__all__ = [
    "MAX_SIZE",
    "Bounds",
    "Call",
    "LayoutClass",
    "SizedCall",
    "UnknownNumberError",
    "compile_all",
    "evaluate",
    "find_classes",
    "leave_out",
    "number_of",
    "take_first",
    "with_sizes",
]

MAX_ELEMENTS = 1 << 60
# Of a dimension without bounds.
MAX_SIZE = 1 << 40

# Of each symbol (of sympy's), the sizes that it may have.
Bounds = Mapping[Any, tuple[int, int]]
# A group, its inputs, and what is written to, if that is given.
Call: TypeAlias = tuple[KernelSpec, tuple[TensorDesc, ...], tuple[TensorDesc, ...]]


class UnknownNumberError(Exception):
    """What comes next in a call that is followed depends on a number that only elements tell."""


class SizedCall(NamedTuple):
    """A call of a group; sizes and strides may be ``torch.SymInt``."""

    spec: KernelSpec
    inputs: tuple[TensorDesc, ...]
    bounds: Bounds
    # Which application has no kernel, in the call that was followed; None: all have one.
    obstacle: int | None = None
    # What it writes to, if that was given.
    out: tuple[TensorDesc, ...] = ()

    def symbols(self) -> list[Any]:
        """Return what its sizes are made of."""
        items: Iterator[Any] = (item for desc in (*self.inputs, *self.out) for item in (*desc.shape, *desc.strides))
        found = {symbol for item in items if isinstance(item, torch.SymInt) for symbol in item.node.expr.free_symbols}
        return sorted(found, key=str)


def with_sizes(desc: TensorDesc, sizes: Mapping[Any, Any] | None = None) -> TensorDesc:
    """Return a description with these sizes for symbols; None: those of the call that is being followed.

    Raises:
        UnknownNumberError: one of them depends on elements.
    """

    def find(item: Any) -> Any:
        if not isinstance(item, torch.SymInt):
            return item
        return number_of(item) if sizes is None else evaluate(item.node.expr, sizes)

    return desc._replace(shape=tuple(map(find, desc.shape)), strides=tuple(map(find, desc.strides)))


def number_of(item: torch.SymInt | torch.SymFloat) -> Any:
    """Return what a symbol is in the call that is being followed.

    Raises:
        UnknownNumberError: that depends on elements.
    """
    if item.node.hint is None:
        raise UnknownNumberError
    return item.node.pytype(item.node.hint)


class LayoutClass(NamedTuple):
    """One call of a layout class."""

    inputs: tuple[TensorDesc, ...]
    # By symbol.
    sizes: dict[Any, int]
    # What is compiled for it.
    texts: Sequence[tuple[KernelSpec, ArgSpec]]
    # As of a SizedCall.
    obstacle: int | None = None
    out: tuple[TensorDesc, ...] = ()


@unwatched()
def find_classes(call: SizedCall) -> list[LayoutClass]:
    """Return one call of each layout class within the bounds of a call's symbols."""
    symbols, chosen = call.symbols(), list[dict[Any, int]]()
    from fuser.warming.dims import draw_points  # noqa: PLC0415 - route.py needs this file, and no sizes

    left = draw_points([call.bounds[symbol] for symbol in symbols])
    for desc in (*call.inputs, *call.out):
        # Of what nothing bounds: no memory holds more, and numbers of elements have 64 bits.
        counts = _count_elements(desc, dict(zip(symbols, left.double().unbind(1), strict=True)))
        left = left[(counts < MAX_ELEMENTS).expand(len(left))]
    while len(left):
        chosen.append(take_first(left, symbols))
        left = leave_out(left, chosen[-1], lambda given: _ask_all(call, given))
    # Kernels may have to be compiled and compared with torch's first.
    found = map_in_threads(lambda sizes: _find_class(call, sizes), chosen, core_count())
    return [item for item in found if item is not None]


def _count_elements(desc: TensorDesc, sizes: Mapping[Any, torch.Tensor]) -> torch.Tensor:
    # As far as its sizes are symbols, or numbers.
    shape: tuple[Any, ...] = desc.shape
    counts = (sizes.get(item.node.expr, 1) if isinstance(item, torch.SymInt) else item for item in shape)
    return torch.as_tensor(reduce(operator.mul, counts, 1))


def _find_class(call: SizedCall, sizes: dict[Any, int]) -> LayoutClass | None:
    inputs, out = (tuple(with_sizes(item, sizes) for item in items) for items in (call.inputs, call.out))
    try:
        return LayoutClass(inputs, sizes, find_texts(call.spec, inputs, out), out=out)
    except UnsupportedError as error:
        return LayoutClass(inputs, sizes, (), error.application, out)
    except CompileError:
        return LayoutClass(inputs, sizes, (), -1, out)
    except FuserError:
        # Sizes that do not fit together: no call has them.
        return None


def _ask_all(call: SizedCall, sizes: Mapping[Any, Any]) -> None:
    # An error comes for the same reason wherever answers are the same.
    with suppress(FuserError):
        # Whatever is in a key is asked for.
        inputs, out = ([with_sizes(item, sizes) for item in items] for items in (call.inputs, call.out))
        hash(tuple(find_texts(call.spec, inputs, out, trusts_orders=True)))
        # And whatever verdicts are kept by, but of what nothing bounds: that has very many.
        bounded = {name: size if call.bounds[name][1] < MAX_SIZE else size.value for name, size in sizes.items()}
        ask_lengths(call.spec, [with_sizes(item, bounded) for item in call.inputs])


@unwatched()
def take_first(points: torch.Tensor, names: Iterable[Any]) -> dict[Any, int]:
    """Return the first of many points (a row of sizes for each), by names."""
    return dict(zip(names, points[0].tolist(), strict=True))


@unwatched()
def leave_out(points: torch.Tensor, sizes: Mapping[Any, int], ask: Callable[[Mapping[Any, Any]], None]) -> torch.Tensor:
    """Return those of many points (a row of sizes for each) that ``ask`` can tell from ``sizes``."""
    tape = Tape(list(sizes.values()))
    try:
        ask(dict(zip(sizes, tape.sizes, strict=True)))
        return points[~tape.find_alike(points)]
    except (RuntimeError, *MISTAKES):  # What cannot be done with symbols is done for each size.
        return points[(points != torch.tensor(list(sizes.values()))).any(1)]


def compile_all(calls: Sequence[Call]) -> None:
    """Compile what calls need, as many at a time as there are cores.

    Raises:
        CompileError, FallbackError: as those calls would.
    """
    if not calls:
        return
    with Progress("warm-up", len(calls)) as bar:

        def prepare(call: Call) -> None:
            plan = make_plan(*call)
            if plan.fallback_reason and not plan.is_expected and plan.obstacle < 0:
                counters.count_fallback(plan.fallback_reason)
            bar.advance(", ".join(dict.fromkeys(call[0].group.names())))

        map_in_threads(prepare, calls, core_count())


def evaluate(expression: Any, sizes: Mapping[Any, Any]) -> Any:
    """Return what an expression or a condition of sympy's comes to: an integer, a symbol, or a bool."""
    if expression.is_Integer:
        return int(expression)
    if expression in sizes:
        return sizes[expression]
    function = _FUNCTIONS.get(type(expression).__name__)
    if function is None:
        # For these sizes alone.
        known = {symbol: int(sizes[symbol]) for symbol in expression.free_symbols}
        found = expression.subs(known)
        return bool(found) if found.is_Boolean else int(found)
    return function(*(evaluate(item, sizes) for item in expression.args))


def _power(base: Any, exponent: int) -> Any:
    return reduce(operator.mul, [base] * exponent, 1) if exponent >= 0 else base**exponent


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "Add": lambda *items: sum(items),
    "Mul": lambda *items: reduce(operator.mul, items),
    "Pow": _power, "PowByNatural": _power,
    "FloorDiv": operator.floordiv, "CleanDiv": operator.floordiv, "Mod": operator.mod, "PythonMod": operator.mod,
    "Max": lambda *items: max(items), "Min": lambda *items: min(items),
    "Equality": operator.eq, "Unequality": operator.ne,
    "StrictLessThan": operator.lt, "LessThan": operator.le,
    "StrictGreaterThan": operator.gt, "GreaterThan": operator.ge,
    "And": lambda *items: all(items), "Or": lambda *items: any(items), "Not": operator.not_,
}  # fmt: skip
