"""torch's own reductions, a table as that of the pointwise ops.

In strict numerics those are fused that have the same bits in any order, and those whose order in torch's own kernels is
known: see fuser.orders.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from fuser.combining import Reduction
from fuser.cxx.functor import Functor, parse_functor
from fuser.function import Function, Promotion
from fuser.ops.table import ANY_REAL, FLOAT, dtype_kind
from fuser.orders import KEPT_ORDERS

__all__ = ["REDUCTIONS", "ReductionOp", "may_have_bits", "reduction_function"]

Dims = tuple[int, ...] | None


class ReductionOp(NamedTuple):
    """One row of the table."""

    name: str
    # The texts: what an element makes, how two parts are combined, and what the accumulator comes to.
    map: str
    combine: str
    identity: float | int | bool | tuple[float | int, ...]
    # The eager reference: called with the tensor, its dimensions (None: all), whether they are kept, and the scalars by
    # name.
    eager: Callable[..., Any]
    # Kinds of common dtype (see dtype_kind) that it serves, and those of which every order makes the same bits.
    kinds: frozenset[str] = ANY_REAL
    exact: frozenset[str] = frozenset({"bool", "int"})
    finish: str = ""
    # Whether ``finish`` takes the number of elements last.
    counts: bool = False
    promotion: Promotion = Promotion.DEFAULT
    # dtype of each result, None for the common one; empty: one result of the common dtype.
    out_dtypes: tuple[torch.dtype | None, ...] = ()
    scalars: tuple[str, ...] = ()
    # Whether the map takes the place of the element along the dimensions, last.
    has_index: bool = False
    # The order in which torch's CUDA kernels combine, where that changes bits; how they add one element, where they do
    # not combine it as they combine parts.
    order: str = ""
    accumulate: str = ""
    # The row that adds up as torch's CPU kernel does it, in double whatever the dtype.
    on_cpu: str = ""
    # Whether torch refuses to reduce nothing.
    needs_elements: bool = False
    # Whether it makes running totals.
    scans: bool = False
    # dtypes that torch treats in another way.
    others: frozenset[torch.dtype] = frozenset()

    @property
    def num_outputs(self) -> int:
        """How many results it has."""
        return max(len(self.out_dtypes), 1)

    @property
    def fields(self) -> tuple[str, ...]:
        """What torch calls its results, where there are several."""
        return _FIELDS.get(self.name, ())


# torch's functions of two results: in this order they come, with these names where it names them.
_FIELDS: dict[str, tuple[str, ...]] = {
    "max_dim": ("values", "indices"), "min_dim": ("values", "indices"), "aminmax": ("min", "max"),
}  # fmt: skip


REDUCTIONS: dict[str, ReductionOp] = {}


def define(name: str, combine: str, identity: Any, eager: Callable[..., Any], **rest: Any) -> None:
    """Add a row with one accumulator; ``combine`` is the body of ``T combine(T a, T b)``."""
    rest.setdefault("map", "T {name}_map(T x) {{ return x; }}")
    text = f"T {name}(T a, T b) {{ {combine} }}"
    REDUCTIONS[name] = ReductionOp(name, rest.pop("map").format(name=name), text, identity, eager, **rest)


@functools.cache
def reduction_function(name: str, dims: Dims = None, keepdim: bool = False) -> Function:
    """Return a row's function for some dimensions (None: all of them)."""
    op = REDUCTIONS[name]
    identity = op.identity if isinstance(op.identity, tuple) else (op.identity,)
    count = len(identity)
    finish = _parse(op.finish, op.num_outputs, op.scalars) if op.finish else None
    accumulate = _parse(op.accumulate, count) if op.accumulate else None
    combine = _parse(op.combine, count)
    reduction = Reduction(
        combine, identity, finish, dims, keepdim, op.counts, op.order, accumulate, scans=op.scans, is_torchs=True
    )
    functor = _parse(op.map, count)
    unpromoted = (functor.tensors[-1].name,) if op.has_index else ()
    return Function(functor, name, op.promotion, unpromoted, op.out_dtypes, reduction=reduction)


def may_have_bits(name: str, dtype: torch.dtype | None, device_type: str | None) -> bool:
    """Whether strict numerics may fuse one of torch's reductions: for some shapes at least it has torch's bits.

    Args:
        name: of the op.
        dtype: of what is reduced; None where it is not known.
        device_type: where; None where it is not known.
    """
    op = REDUCTIONS[name]
    if op.order in KEPT_ORDERS.get(device_type or "", ()):
        return dtype is None or dtype_kind(dtype) in op.exact or dtype.is_floating_point
    return op.exact == op.kinds if dtype is None else dtype_kind(dtype) in op.exact


def _parse(text: str, num_outputs: int = 1, scalars: tuple[str, ...] = ()) -> Functor:
    return parse_functor(f"template <typename T> {text}", scalars, num_outputs)


def _of_dims(function: Callable[..., Any]) -> Callable[..., Any]:
    # torch's functions of one or several dimensions.
    def run(x: torch.Tensor, dims: Dims, keepdim: bool) -> Any:
        return function(x, dim=tuple(range(x.dim())) if dims is None else dims, keepdim=keepdim)

    return run


def _of_dims_or_all(function: Callable[..., Any]) -> Callable[..., Any]:
    # Those for which no dimensions are all: what they say of nothing depends on whether a dimension is named.
    return lambda x, dims, keepdim: function(x, dim=dims or (), keepdim=keepdim)


def _one_by_one(function: Callable[..., Any]) -> Callable[..., Any]:
    # torch's functions of one dimension.
    def run(x: torch.Tensor, dims: Dims, keepdim: bool) -> Any:
        if dims is None and not keepdim:
            return function(x)
        for dim in sorted((d % max(x.dim(), 1) for d in (range(x.dim()) if dims is None else dims)), reverse=True):
            x = function(x, dim=dim, keepdim=keepdim)
        return x

    return run


def _whole(function: Callable[..., Any]) -> Callable[..., Any]:
    def run(x: torch.Tensor, dims: Dims, keepdim: bool) -> Any:  # noqa: ARG001
        return function(x)

    return run


_EVERY = ANY_REAL | {"complex"}
define("sum", "return a + b;", 0, _of_dims(torch.sum), kinds=_EVERY, promotion=Promotion.INT_TO_LONG, order="sum")
define(
    "nansum",
    "return a + b;",
    0,
    _of_dims(torch.nansum),
    map="T {name}_map(T x) {{ return x != x ? T(0) : x; }}",
    promotion=Promotion.INT_TO_LONG,
    order="sum",
)
define(
    "cumsum",
    "return a + b;",
    0,
    lambda x, dims, keepdim: torch.cumsum(x, dims[0]),  # noqa: ARG005 - called as the others
    kinds=_EVERY,
    promotion=Promotion.INT_TO_LONG,
    order="scan",
    scans=True,
)
define("prod", "return a * b;", 1, _one_by_one(torch.prod), kinds=_EVERY, promotion=Promotion.INT_TO_LONG)
define(
    "mean",
    "return a + b;",
    0,
    _of_dims(torch.mean),
    kinds=FLOAT,
    exact=frozenset(),
    order="sum",
    # ATen's GPU kernels multiply by a factor, which is rounded.
    finish="""T mean_finish(T total, int64_t count, int64_t rows) {
      return rows ? total * (T(rows) / T(rows * count)) : total / T(count);
    }""",
    counts=True,
)
# Of half and bfloat16, with results of float32: ``dtype=torch.float32``.
for _name in ("sum", "mean"):
    REDUCTIONS[f"{_name}_wide"] = REDUCTIONS[_name]._replace(
        name=f"{_name}_wide",
        eager=_of_dims(functools.partial(getattr(torch, _name), dtype=torch.float32)),
        kinds=FLOAT,
        out_dtypes=(torch.float32,),
    )
# A NaN on either side is what they come to.
for _name, _sign, _end in (("amax", ">", float("-inf")), ("amin", "<", float("inf"))):
    define(
        _name,
        f"return a != a || a {_sign} b ? a : b;",
        _end,
        _of_dims_or_all(getattr(torch, _name)),
        exact=ANY_REAL,
        needs_elements=True,
    )
    # Of a whole tensor: torch.max(x).
    _of_all = REDUCTIONS[_name]._replace(name=_name[1:], eager=_whole(getattr(torch, _name[1:])))
    REDUCTIONS[_of_all.name] = _of_all
for _name, _sign, _none in (("any", "||", False), ("all", "&&", True)):
    define(
        _name,
        f"return T(a {_sign} b);",
        _none,
        _of_dims(getattr(torch, _name)),
        map="bool {name}_map(T x) {{ return x != T(0); }}",
        exact=ANY_REAL,
        out_dtypes=(torch.bool,),
        others=frozenset({torch.uint8}),
    )
REDUCTIONS["count_nonzero"] = ReductionOp(
    "count_nonzero",
    "int64_t count_map(T x) { return x != T(0); }",
    "int64_t count_nonzero(int64_t a, int64_t b) { return a + b; }",
    0,
    lambda x, dims, keepdim: torch.sum(x != 0, dim=tuple(range(x.dim())) if dims is None else dims, keepdim=keepdim),
    exact=ANY_REAL,
    out_dtypes=(torch.int64,),
)
