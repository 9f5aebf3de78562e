"""Whether a functor makes a real number of an integer that was made of a real one, which g++ takes for trunc.

Of -0.3, and of -0, ``float(int(x))`` is 0, and an integer's zero has no sign; with -fno-trapping-math g++ 12 makes
``trunc(x)`` of it all the same, which is -0. With -ftrapping-math it does not, but then it vectorises neither branches
with arithmetic in them nor ``floor``: only kernels that need it have that flag.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import fx

from fuser.cxx.builtin_types import dtype_named
from fuser.cxx.functor import Functor, Role
from fuser.dtypes import is_continuous
from fuser.errors import UntranslatableError

__all__ = ["cuts_off_fractions"]

# Without one of these words there is no such integer, or none but the functor's T, of which no result shows the sign.
_INTEGERS = re.compile(
    r"u?int\d*(?:_t)?|short|long|char|unsigned|signed|size_t|ptrdiff_t|auto|enum|__(?:float|double)2\w*"
)
_COMPUTED_IN = {"float": torch.float32, "double": torch.float64}
_aten = torch.ops.aten
# What passes an integer on; where bits choose between two of them, g++ sees the choice.
_PASSES = frozenset(
    {
        _aten._to_copy.default,
        _aten.where.self,
        _aten.bitwise_and.Tensor,
        _aten.bitwise_or.Tensor,
        _aten.bitwise_xor.Tensor,
    }
)


def cuts_off_fractions(functors: Sequence[Functor], text: str) -> bool:
    """Whether one of the functors of a kernel's text may; of a text that fuser does not follow the answer is yes."""
    for index, functor in enumerate(functors):
        if any(map(_INTEGERS.fullmatch, functor.words)):
            kinds = set(re.findall(rf"\bfuser_f{index}::{functor.entry}<(?:std::complex<)?(float|double)\b", text))
            if any(_cuts_off(functor, _COMPUTED_IN[kind]) for kind in sorted(kinds)):
                return True
    return False


@lru_cache(maxsize=1024)
def _cuts_off(functor: Functor, compute: torch.dtype) -> bool:
    # The translation is a third of fuser, and most texts hold no integers.
    from fuser.eager.translation import translate  # noqa: PLC0415

    types = [compute if item.role is Role.TENSOR else _number_for(item.type) for item in functor.inputs]
    try:
        module = translate(functor, compute, tuple(types)).graph_module
    except UntranslatableError:
        return True
    if module is None:
        return True
    to_real = [node for node in module.graph.nodes if node.target is _aten._to_copy.default and _is_real(node)]
    return any(_comes_from_real(node.args[0]) for node in to_real if not _is_real(node.args[0]))


def _number_for(name: str) -> torch.dtype:
    # What a scalar of a declared type is given.
    found = dtype_named(name, "", torch.float64) or torch.float64
    return found if found is torch.bool else torch.float64 if found.is_floating_point else torch.int64


def _is_real(node: fx.Node) -> bool:
    return is_continuous(node.meta["dtype"])


def _comes_from_real(node: object) -> bool:
    # Whether an integer is, or may be, a real number without its fraction.
    if not isinstance(node, fx.Node) or node.target not in _PASSES:
        return False
    values = node.args[1:] if node.target is _aten.where.self else node.args
    return any(isinstance(item, fx.Node) and (_is_real(item) or _comes_from_real(item)) for item in values)
