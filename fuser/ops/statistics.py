"""torch's reductions with several accumulators, or with a map of their own: places, moments, norms."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from fuser.ops.reductions import REDUCTIONS, Dims, ReductionOp
from fuser.ops.table import ANY_REAL, FLOAT, REAL

__all__: list[str] = []


def _place(function: Callable[..., Any]) -> Callable[..., Any]:
    def run(x: torch.Tensor, dims: Dims, keepdim: bool) -> Any:
        return function(x, None if dims is None else dims[0], keepdim)

    return run


def _norm(of: float) -> Callable[..., Any]:
    def run(x: torch.Tensor, dims: Dims, keepdim: bool) -> Any:
        return torch.linalg.vector_norm(x, of, dims, keepdim)

    return run


def _moment(function: Callable[..., Any]) -> Callable[..., Any]:
    def run(x: torch.Tensor, dims: Dims, keepdim: bool, correction: float) -> Any:
        return function(x, dims, correction=correction, keepdim=keepdim)

    return run


def _into_float(op: ReductionOp) -> Callable[..., Any]:
    def run(x: torch.Tensor, dims: Dims, keepdim: bool, **scalars: Any) -> Any:
        made = torch.empty(0, dtype=torch.float32, device=x.device)
        if op.order == "norm":
            return torch.linalg.vector_norm(x, float(op.name.partition("_")[2]), dims, keepdim, dtype=torch.float32)
        function = torch.var if op.name == "var" else torch.std
        return function(x, dims, keepdim=keepdim, out=made, **scalars)

    return run


# Of equal elements the first one counts, of several NaN too, in whatever order parts come: beside a sum in torch's
# order that is no row's. An element's place is before that of none, -1.
for _name, _sign, _end in (("argmax", ">", float("-inf")), ("argmin", "<", float("inf"))):
    REDUCTIONS[_name] = ReductionOp(
        _name,
        f"void {_name}_map(T x, int64_t i, T& v, int64_t& at) {{ v = x; at = i; }}",
        f"""void {_name}(T va, int64_t ia, T vb, int64_t ib, T& v, int64_t& at) {{
          const bool is_more = (vb {_sign} va) | ((vb != vb) & (va == va));
          const bool is_same = (vb == va) | ((vb != vb) & (va != va));
          const bool is_later = is_more | (is_same & (uint64_t(ib) < uint64_t(ia)));
          v = is_later ? vb : va;
          at = is_later ? ib : ia;
        }}""",
        (_end, -1),
        _place(getattr(torch, _name)),
        kinds=REAL,
        exact=REAL,
        finish=f"int64_t {_name}_place(T v, int64_t at) {{ return at; }}",
        out_dtypes=(torch.int64,),
        has_index=True,
        needs_elements=True,
    )
    REDUCTIONS[f"{_name[3:]}_dim"] = REDUCTIONS[_name]._replace(
        name=f"{_name[3:]}_dim",
        eager=_place(getattr(torch, _name[3:])),
        kinds=ANY_REAL,
        exact=ANY_REAL,
        finish="",
        out_dtypes=(None, torch.int64),
    )
REDUCTIONS["aminmax"] = ReductionOp(
    "aminmax",
    "void aminmax_map(T x, T& low, T& high) { low = x; high = x; }",
    """void aminmax(T a, T b, T c, T d, T& low, T& high) {
      low = a != a || a < c ? a : c;
      high = b != b || b > d ? b : d;
    }""",
    (math.inf, -math.inf),
    lambda x, dims, keepdim: torch.aminmax(x, dim=None if dims is None else dims[0], keepdim=keepdim),
    exact=ANY_REAL,
    out_dtypes=(None, None),
    needs_elements=True,
)


def _moments(name: str, value: str, a: str = "T") -> tuple[ReductionOp, ReductionOp]:
    # Alone and with the mean, as ATen's SharedReduceOps.h has them, with accumulators of a type.
    degrees = f"const {a} degrees = n > {a}(correction) ? n - {a}(correction) : {a}(0);"
    # What an element is from itself: nothing, or NaN where it is infinite, as ATen has it of its first one.
    alone = ReductionOp(
        name,
        f"void var_map(T x, {a}& m, {a}& s, {a}& n) {{ m = x; s = x - x; n = {a}(1); }}",
        f"""void var_combine({a} ma, {a} sa, {a} na, {a} mb, {a} sb, {a} nb, {a}& m, {a}& s, {a}& n) {{
      const {a} delta = mb - ma;
      n = na + nb;
      const {a} share = nb / n;
      m = na == {a}(0) ? mb : nb == {a}(0) ? ma : ma + delta * share;
      s = na == {a}(0) ? sb : nb == {a}(0) ? sa : sa + sb + delta * delta * na * share;
    }}""",
        (0, 0, 0),
        _moment(getattr(torch, name)),
        kinds=FLOAT,
        exact=frozenset(),
        finish=f"T {name}_of({a} m, {a} s, {a} n, double correction) {{ {degrees} return {value}; }}",
        scalars=("correction",),
        order="welford",
        accumulate=f"""void var_add({a} mean, {a} squares, {a} count, T x, {a}& m, {a}& s, {a}& n) {{
      n = count + {a}(1);
      const {a} delta = x - mean;
      m = mean + delta / n;
      s = squares + delta * (x - m);
    }}""",
    )
    return alone, alone._replace(
        name=f"{name}_mean",
        eager=_moment(getattr(torch, f"{name}_mean")),
        finish=f"void {name}_of({a} m, {a} s, {a} n, double correction, T& spread, T& mean) "
        f"{{ {degrees} spread = {value}; mean = n > {a}(0) ? m : {a}(NAN); }}",
        out_dtypes=(None, None),
    )


_SPREADS = (("var", "s / degrees"), ("std", "sqrt(s / degrees)"))
for _name, _value in _SPREADS:
    for _op in _moments(_name, _value):
        REDUCTIONS[_op.name] = _op._replace(on_cpu=f"{_op.name}_in_double")

_MAGNITUDE = "T norm_map(T x) { return x < T(0) ? -x : x == T(0) ? T(0) : x; }"
for _of, _text in (
    (0, "T norm_map(T x) { return x == T(0) ? T(0) : T(1); }"),
    (1, _MAGNITUDE),
    (2, "T norm_map(T x) { return x * x; }"),
):
    REDUCTIONS[f"norm_{_of}"] = ReductionOp(
        f"norm_{_of}",
        _text,
        "T norm(T a, T b) { return a + b; }",
        0,
        _norm(_of),
        kinds=FLOAT,
        exact=frozenset(),
        finish="T norm_root(T total) { return sqrt(total); }" if _of == 2 else "",
        order="norm",
        accumulate="T norm_add(T total, T x) { return total + x * x; }" if _of == 2 else "",
    )
for _end, _sign, _least in ((math.inf, ">", 0.0), (-math.inf, "<", math.inf)):
    REDUCTIONS[f"norm_{_end}"] = ReductionOp(
        f"norm_{_end}",
        _MAGNITUDE,
        f"T norm(T a, T b) {{ return a != a || a {_sign} b ? a : b; }}",
        _least,
        _norm(_end),
        kinds=FLOAT,
        exact=FLOAT,
        needs_elements=True,
    )
# With results of float32 of half and bfloat16, as torch's kernels have them with such an ``out=``: these show in which
# order it is added up. Moments without their mean.
for _op in [*REDUCTIONS.values()]:
    if _op.order in {"norm", "welford"} and _op.num_outputs == 1:
        _name = f"{_op.name}_wide"
        REDUCTIONS[_name] = _op._replace(name=_name, eager=_into_float(_op), out_dtypes=(torch.float32,))
for _name, _value in _SPREADS:
    for _op in _moments(_name, _value, "double"):
        REDUCTIONS[f"{_op.name}_in_double"] = _op._replace(name=f"{_op.name}_in_double")
