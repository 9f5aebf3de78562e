"""The ways a program can name an op: torch's functions and methods, Python's operators, ATen overloads, modules."""

from __future__ import annotations

import functools
import inspect
import operator
import types
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the name everybody uses

from fuser.function import Function
from fuser.ops.binding_arrangements import arrangement_functions
from fuser.ops.binding_losses import loss_functions, loss_methods
from fuser.ops.binding_pointwise import pointwise_functions, pointwise_methods
from fuser.ops.binding_reductions import reduction_functions, reduction_methods
from fuser.ops.binding_whole import whole_functions
from fuser.ops.calls import (
    ASKING,
    Binder,
    OpCall,
    device_type_of,
    find_numerics,
    is_number,
    question_of,
    tensor_first,
)
from fuser.ops.composites import keeps_bits
from fuser.ops.further import further_functions, further_methods
from fuser.ops.softmax import softmax_functions, softmax_methods
from fuser.ops.table import overloads as _overloads
from fuser.ops.views import bind_item, bind_reshape, bind_squeeze, bind_unsqueeze

__all__ = [
    "bind_function",
    "bind_method",
    "bind_module",
    "find_question",
    "find_settled",
    "has_global_hooks",
    "has_hooks",
    "is_known",
    "needs_known",
]

_ATEN = torch.ops.aten


def bind_function(target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> OpCall | None:
    """Return the table's call for ``target(*args, **kwargs)``, or None when the table has none.

    ``target`` is a torch function, a Python operator or an ATen overload; arguments are Python numbers or opaque
    stand-ins for tensors (FX nodes).
    """
    return _bind(_find_binder(target), args, _torchs_names(target, kwargs))


def bind_method(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> OpCall | None:
    """Return the table's call for ``args[0].name(*args[1:], **kwargs)``, or None when the table has none."""
    return _bind(_find_binder(name), args, _torchs_names(getattr(torch.Tensor, name, None), kwargs))


def bind_module(module: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> OpCall | None:
    """Return the table's call for ``module(*args, **kwargs)``, or None when the table has none, or hooks are there."""
    found = _MODULES.get(type(module))
    if found is None or getattr(module, "inplace", False) or has_hooks(module):
        return None
    function, names = found
    return bind_function(function, args, {**kwargs, **{name: getattr(module, name) for name in names}})


# What a module calls, and the attributes it passes on by name.
_MODULES: dict[type, tuple[Any, tuple[str, ...]]] = {
    torch.nn.ReLU: (F.relu, ()),
    torch.nn.SiLU: (F.silu, ()),
    torch.nn.GELU: (F.gelu, ("approximate",)),
    torch.nn.Sigmoid: (torch.sigmoid, ()),
    torch.nn.Tanh: (torch.tanh, ()),
    torch.nn.LeakyReLU: (F.leaky_relu, ("negative_slope",)),
    torch.nn.ELU: (F.elu, ("alpha",)),
    torch.nn.SELU: (F.selu, ()),
    torch.nn.CELU: (F.celu, ("alpha",)),
    torch.nn.Softplus: (F.softplus, ("beta", "threshold")),
    torch.nn.Mish: (F.mish, ()),
    torch.nn.Hardtanh: (F.hardtanh, ("min_val", "max_val")),
    torch.nn.ReLU6: (F.relu6, ()),
    torch.nn.Hardsigmoid: (F.hardsigmoid, ()),
    torch.nn.Hardswish: (F.hardswish, ()),
    torch.nn.Softmax: (F.softmax, ("dim",)),
    torch.nn.LogSoftmax: (F.log_softmax, ("dim",)),
    torch.nn.Softmin: (F.softmin, ("dim",)),
    torch.nn.Softsign: (F.softsign, ()),
    torch.nn.Tanhshrink: (F.tanhshrink, ()),
    torch.nn.Hardshrink: (F.hardshrink, ("lambd",)),
    torch.nn.Softshrink: (F.softshrink, ("lambd",)),
    torch.nn.Threshold: (F.threshold, ("threshold", "value")),
    torch.nn.MSELoss: (F.mse_loss, ("reduction",)),
    torch.nn.L1Loss: (F.l1_loss, ("reduction",)),
    torch.nn.SmoothL1Loss: (F.smooth_l1_loss, ("reduction", "beta")),
    torch.nn.HuberLoss: (F.huber_loss, ("reduction", "delta")),
}


def has_hooks(module: torch.nn.Module) -> bool:
    """Whether a call of the module runs more than its class's ``forward``, or another one of its own."""
    own = module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks
    return any(own) or "forward" in vars(module) or has_global_hooks()


def has_global_hooks() -> bool:
    """Whether a call of any module does, by ``torch.nn.modules.module.register_module_forward_hook`` and its like."""
    return bool(torch.nn.modules.module._has_any_global_hook())  # type: ignore[no-untyped-call]


def _bind(binder: Binder | None, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> OpCall | None:
    if binder is None:
        return None
    try:
        bound = _signature(binder).bind(*args, **kwargs)
    except TypeError:  # an argument this table does not know (out=, dtype=, ...)
        return None
    call = binder(*bound.args, **bound.kwargs)
    if call is not None and find_numerics() == "strict" and not _keeps_bits(call, device_type_of(call)):
        return None
    return call if call is not None and all(_is_operand(value) for value in call.tensors) else None


def _keeps_bits(call: OpCall, device_type: str) -> bool:
    parts = (item for item in call.tensors if isinstance(item, OpCall))
    return keeps_bits(call.function, device_type) and all(_keeps_bits(item, device_type) for item in parts)


# Parameters of ops that are no numbers a kernel could be given: they decide which kernel it is.
_SETTLED = frozenset("dim keepdim normalized_shape num_groups ord p correction unbiased training".split())


def _torchs_names(target: Any, kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
    # Functions of torch's that are not Python's take numpy's names, too; ``out=None`` says nothing.
    if not kwargs or not isinstance(
        target, types.BuiltinFunctionType | types.MethodDescriptorType | types.FunctionType
    ):
        return kwargs
    aliases = {} if isinstance(target, types.FunctionType) else {"axis": "dim", "keepdims": "keepdim"}
    return {aliases.get(name, name): item for name, item in kwargs.items() if name != "out" or item is not None}


def _find_binder(target: Any) -> Binder | None:
    # Of a function, or of a method by its name.
    if isinstance(target, str):
        return _methods().get(target)
    if isinstance(target, torch._ops.OpOverloadPacket):
        # Those of its overloads that the table has are one op.
        overloads = (getattr(target, name) for name in target.overloads())  # type: ignore[no-untyped-call]
        return next((found for item in overloads if (found := _functions().get(item))), None)
    try:
        return _functions().get(target)
    except TypeError:  # unhashable
        return None


def is_known(target: Any) -> bool:
    """Whether the table has an op by this function, or name of a method, for some arguments."""
    return _find_binder(target) is not None


def needs_known(target: Any) -> bool:
    """Whether which op a call of a function is depends on its tensors' dtypes, dimensions and devices."""
    return _find_binder(target) in ASKING


def find_settled(target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
    """Return the arguments that decide which op of the table a call is: dimensions, say; none for other functions.

    Args:
        target: a function, or the name of a method.
        args: by position, the method's tensor first.
        kwargs: by name.
    """
    binder = _find_binder(target)
    names = _SETTLED & {*_signature(binder).parameters} if binder else ()
    bound = _bind_names(target, args, kwargs) if names else {}
    return [bound[name] for name in names if name in bound]


def find_question(target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return what the table asks of numbers to tell which op a call is, and the arguments it asks about; else nothing.

    Args:
        target: a function, or the name of a method.
        args: by position, the method's tensor first.
        kwargs: by name.
    """
    binder = _find_binder(target)
    asked = question_of(binder) if binder else None
    if asked is None:
        return ()
    question, names = asked
    given, parameters = _bind_names(target, args, kwargs), _signature(binder).parameters
    return question, *(given.get(name, parameters[name].default) for name in names)


def _bind_names(target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
    # The arguments of a call by the names of its binder's parameters; none of a call that it does not take.
    kwargs = _torchs_names(getattr(torch.Tensor, target, None) if isinstance(target, str) else target, kwargs)
    try:
        return _signature(_find_binder(target)).bind_partial(*args, **kwargs).arguments
    except TypeError:
        return {}


# Of the table's binders, which live as long as the process.
_signature = functools.cache(inspect.signature)


def _is_operand(value: Any) -> bool:
    return value is not None and not isinstance(value, str | list | tuple | dict | torch.dtype)


@functools.cache
def _methods() -> dict[str, Binder]:
    views = {name: _bind_view(bind) for name, bind in _VIEWS.items()}
    return {
        **pointwise_methods(),
        **further_methods(),
        **reduction_methods(),
        **softmax_methods(),
        **loss_methods(),
        **views,
    }


@functools.cache
def _functions() -> dict[Any, Binder]:
    # Built on first use: looking the ATen overloads up takes longer than importing the rest of fuser.
    arranged = arrangement_functions()
    return {
        **arranged,
        **further_functions(),
        **whole_functions(),
        **loss_functions(),
        **softmax_functions(),
        **reduction_functions(),
        **{
            getattr(torch, name): bind if name == "pow" else tensor_first(bind)
            for name, bind in _methods().items()
            # torch.float and its like are dtypes.
            if callable(getattr(torch, name, None)) and name != "where"
        },
        **pointwise_functions(),
        _ATEN.unsqueeze.default: _bind_view(bind_unsqueeze),
        **dict.fromkeys(_overloads("squeeze.dim", "squeeze.dims"), _bind_view(bind_squeeze)),
        **dict.fromkeys(
            _overloads("view", "reshape", "_unsafe_view"),
            _either(_bind_view(bind_reshape), arranged[_ATEN.view.default]),
        ),
        operator.getitem: _bind_view(bind_item),
    }  # fmt: skip


_VIEWS: dict[str, Callable[..., Any]] = {
    "unsqueeze": bind_unsqueeze, "squeeze": bind_squeeze, "view": bind_reshape, "reshape": bind_reshape,
}  # fmt: skip


def _bind_view(bind: Callable[..., Function | tuple[Function, ...] | None]) -> Binder:
    @functools.wraps(bind)
    def bind_call(input: Any, *args: Any, **kwargs: Any) -> OpCall | None:  # noqa: A002
        found = None if is_number(input) else bind(input, *args, **kwargs)
        call = input
        for function in found if isinstance(found, tuple) else (found,):
            call = None if function is None else OpCall(function, (call,))
        return None if call is input else call

    return bind_call


def _either(first: Binder, second: Binder) -> Binder:
    @functools.wraps(first)
    def bind(*args: Any, **kwargs: Any) -> OpCall | None:
        return first(*args, **kwargs) or second(*args, **kwargs)

    return bind
