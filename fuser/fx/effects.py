"""What a node of an FX graph does besides making a value: it writes, draws numbers, or sets how torch computes."""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import fx
from torch._ops import HigherOrderOperator

from fuser.fx.nodes import module_of
from fuser.jit_function import JitFunction
from fuser.ops import has_hooks

__all__ = ["calls_torch_alone", "is_barrier", "is_random", "sets_mode"]


def is_barrier(node: fx.Node) -> bool:
    """Whether a node writes to an argument, or may, or says how torch computes from there on: nothing crosses it."""
    return _writes(node) or sets_mode(node)


def sets_mode(node: fx.Node) -> bool:
    """Whether a node sets grad mode, autocast, a level of torch.func, a stream, a seed or the like.

    Such calls are given nothing of the graph's but what another one returned.
    """
    return _makes_no_tensor(node) and all(
        _makes_no_tensor(source) and not source.all_input_nodes for source in node.all_input_nodes
    )


def _makes_no_tensor(node: fx.Node) -> bool:
    # Whether a node calls a function or an operator of torch's that returns no tensor.
    if node.op != "call_function":
        return False
    overloads = _overloads(node.target)
    if overloads:
        return not any("Tensor" in str(item.type) for overload in overloads for item in overload._schema.returns)
    home, name = getattr(node.target, "__module__", None) or "", getattr(node.target, "__name__", "")
    return home.split(".")[0] == "torch" and not hasattr(torch._C._VariableFunctions, name)


def _overloads(target: Any) -> list[torch._ops.OpOverload]:
    # Of one of torch's operators; none for other functions.
    if isinstance(target, torch._ops.OpOverloadPacket):
        return [getattr(target, name) for name in target.overloads()]  # type: ignore[no-untyped-call]
    return [target] if isinstance(target, torch._ops.OpOverload) else []


def _writes(node: fx.Node) -> bool:
    if node.op == "call_method":
        return _writes_by_name(str(node.target))
    if any(map(_module_writes, _called_modules(node))):
        return True
    if node.op != "call_function":
        return False
    if isinstance(node.target, JitFunction):
        # Whatever its name is.
        return node.kwargs.get("out") is not None
    if isinstance(node.target, HigherOrderOperator):
        # Most write in the graphs that they call alone; but kernels and objects of others.
        return "mutation" in node.target._name or node.is_impure(impure_random=False)
    given = _named_arguments(node)
    if any(given.get(name) is not None for name in ("out", "max_norm")) or given.get("inplace"):
        return True
    if _last_name(node.target).endswith(("batch_norm", "instance_norm")):
        # Running statistics are written to, which no schema of the older operators says.
        return True
    overloads = _overloads(node.target)
    if overloads:
        return any(_takes_to_write(overload, node.kwargs) for overload in overloads)
    name, home = _name_and_home(node.target)
    if home == "_operator":
        # Among them and_, or_ and not_, which write to nothing.
        is_in_place = name.startswith("i") and any(hasattr(operator, name[1:] + end) for end in ("", "_"))
        return node.target is operator.setitem or is_in_place
    return _writes_by_name(name) or not _is_torchs(home)


def _name_and_home(target: Any) -> tuple[str, str]:
    # Of a function, what it is called and the module that it is of.
    while isinstance(target, functools.partial):
        target = target.func
    return getattr(target, "__name__", ""), getattr(target, "__module__", None) or ""


def calls_torch_alone(node: fx.Node) -> bool:
    """Whether a node calls torch's functions or functors, which do the same whenever they are called, and no modes."""
    if node.op == "call_method" or isinstance(node.target, JitFunction):
        return True
    is_function = node.op == "call_function" and not isinstance(node.target, HigherOrderOperator)
    is_torchs = bool(_overloads(node.target)) or _is_torchs(_name_and_home(node.target)[1])
    return is_function and is_torchs and not sets_mode(node)


def _takes_to_write(overload: torch._ops.OpOverload, named: Mapping[str, Any]) -> bool:
    # Whether one of the overloads that a call may mean writes to what it is given: to ``out=`` only where that is.
    written = (item for item in overload._schema.arguments if item.alias_info is not None and item.alias_info.is_write)
    return any(not item.kwarg_only or item.name in named for item in written)


def _called_modules(node: fx.Node) -> Iterator[Any]:
    # Modules that a node calls, and those in them; graphs are such, too, and operators may be given some.
    called = [node] if node.op == "call_module" else []
    if isinstance(node.target, HigherOrderOperator):
        called = [source for source in node.all_input_nodes if source.op == "get_attr"]
    for item in called:
        module = module_of(item)
        yield from () if module is None else module.modules()


def _module_writes(module: Any) -> bool:
    if isinstance(module, fx.GraphModule) and any(map(is_barrier, module.graph.nodes)):
        return True
    is_norm = isinstance(module, torch.nn.modules.batchnorm._NormBase) and module.training
    # Embeddings shorten the rows of their weight.
    writes = is_norm or getattr(module, "inplace", False) or getattr(module, "max_norm", None) is not None
    return bool(writes) or has_hooks(module) or not _is_torchs(type(module).__module__)


def _writes_by_name(name: str) -> bool:
    # Of a method: ``add_``, ``__iadd__``.
    in_place_operator = name.startswith("__i") and hasattr(torch.Tensor, f"__{name[3:]}") and name != "__invert__"
    return (name.endswith("_") and not name.endswith("__")) or in_place_operator or name in {"__setitem__", "backward"}


def _named_arguments(node: fx.Node) -> Mapping[str, Any]:
    # Those given by position too, where the function says what they are called.
    try:
        signature = _find_signature(node.target)
        by_position = signature.bind_partial(*node.args).arguments if signature else {}
    except TypeError:  # unhashable, or another call than it takes
        return node.kwargs
    return {**by_position, **node.kwargs}


@functools.lru_cache(maxsize=1024)
def _find_signature(target: Any) -> inspect.Signature | None:
    try:
        return inspect.signature(target)
    except (TypeError, ValueError):
        return None


def is_random(node: fx.Node) -> bool:
    """Whether a node may draw random numbers: such nodes keep their order."""
    if any(map(_module_draws, _called_modules(node))):
        return True
    overloads = _overloads(node.target)
    if overloads:
        return any(map(_is_seeded, overloads))
    if node.op not in {"call_function", "call_method"} or isinstance(node.target, JitFunction):
        return False
    return _draws_by_name(_last_name(node.target))


def _is_seeded(overload: torch._ops.OpOverload) -> bool:
    return torch.Tag.nondeterministic_seeded in overload.tags


@functools.lru_cache(maxsize=1024)
def _draws_by_name(name: str) -> bool:
    # Of a function or a method: ATen has most of them under the same name.
    operator_of_name = getattr(torch.ops.aten, name, None)
    return any(word in name for word in _RANDOM) or any(map(_is_seeded, _overloads(operator_of_name)))


def _module_draws(module: Any) -> bool:
    if isinstance(module, fx.GraphModule) and any(map(is_random, module.graph.nodes)):
        return True
    return hasattr(module, "dropout") or any(word in type(module).__name__ for word in _RANDOM_MODULES)


# Parts of the names of torch's functions and modules that draw.
_RANDOM = ("rand", "drop", "bernoulli", "normal", "multinomial", "poisson", "binomial", "rrelu", "gumbel", "attention",
           "lowrank", "lobpcg")  # fmt: skip
_RANDOM_MODULES = ("Drop", "RReLU", "Attention", "FractionalMaxPool")


def _last_name(target: Any) -> str:
    if isinstance(target, torch._ops.OpOverload):
        return str(target._schema.name)
    return target if isinstance(target, str) else str(getattr(target, "__name__", ""))


def _is_torchs(module_name: str) -> bool:
    # Python's own functions that graphs call write to nothing, and functors and what is made of them have no state.
    return module_name.split(".")[0] in {"", "torch", "builtins", "_operator", "math", "fuser"}
