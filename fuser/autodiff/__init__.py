"""Which derivative a call needs, and the groups that compute it.

Here is what calls enter by: the handler of a route, and what torch dispatches operators to. A graph that was saved with
operators has them in a process that has only imported fuser; the room itself is loaded by the first call of one.
"""

from __future__ import annotations

from functools import cache
from types import ModuleType
from typing import Any

import torch

from fuser.errors import GradientError
from fuser.late import loading
from fuser.library import LIBRARY
from fuser.route import HANDLERS, GroupCall, Route

__all__: list[str] = []

LIBRARY.define(  # type: ignore[no-untyped-call]
    "pull_back(str group, str kinds, Tensor[] tensors, SymInt[] ints, float[] floats, "
    "int[] slots, Tensor[] gradients, int[] wanted) -> Tensor[]",
    tags=(torch.Tag.pt2_compliant_tag,),
)


@cache
def _loaded() -> tuple[ModuleType, ModuleType]:
    with loading():
        from fuser.autodiff import autograd, pull_back  # noqa: PLC0415 - most calls need no derivative

    return autograd, pull_back


def _differentiate(made: GroupCall) -> Any:
    return _loaded()[0].differentiate(made)


def _differentiate_operator(*arguments: Any) -> Any:
    return _loaded()[0].differentiate_operator(*arguments)


def _transform_operator(*arguments: Any) -> Any:
    return _loaded()[0].transform_operator(*arguments)


def _pull_back(*arguments: Any) -> Any:
    return _loaded()[1].pull_back_operator(*arguments)


def _pull_back_fake(*arguments: Any) -> Any:
    return _loaded()[1].fake_pull_back(*arguments)


def _refuse_second_derivative(ctx: Any, *grads: Any) -> None:  # noqa: ARG001
    raise GradientError("in a traced graph, a functor whose course depends on data has one derivative only")


HANDLERS[Route.AUTOGRAD] = _differentiate
LIBRARY.impl("run", _differentiate_operator, "Autograd")  # type: ignore[no-untyped-call]
LIBRARY.impl("run", _transform_operator, "FuncTorchDynamicLayerFrontMode")  # type: ignore[no-untyped-call]
for _key in ("CPU", "CUDA"):
    LIBRARY.impl("pull_back", _pull_back, _key)  # type: ignore[no-untyped-call]
# As in library.py.
torch.library.register_fake("fuser::pull_back", _pull_back_fake, lib=LIBRARY, _stacklevel=0)
torch.library.register_autograd("fuser::pull_back", _refuse_second_derivative, lib=LIBRARY)
