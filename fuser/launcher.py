"""The fast path of a call: a call like an earlier one allocates, packs and launches, and looks at nothing else.

A *record* is what an earlier call left behind: how to recognise a call like it, what to allocate, and each launch with
its arguments, in which only addresses and numbers are missing (``record.py``). ``_launcher.c`` replays records;
``PythonLauncher`` does so in Python, for machines that had no C compiler when fuser was installed, and leaves ``out=``
to the long way.

A call is like a recorded one when torch's own guard (``TensorGuards``, which torch.compile relies on) says so of the
tensors: same types, dispatch keys (so that functorch, autocast and tensors with lazy bits differ), dtypes, devices,
``requires_grad``, sizes and strides; and when the numbers have the same Python types, and no function or dispatch mode
is on. Alignment and the overlap of ``out=`` are compared here.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
from torch._C._dynamo import eval_frame, guards
from torch.autograd import forward_ad, profiler

from fuser import counters, log
from fuser.config import config
from fuser.geometry import Flat
from fuser.kernel_spec import MAX_ARGUMENT_BYTES
from fuser.plan import Plan
from fuser.process import openmp_threads
from fuser.python_launcher import PythonLauncher
from fuser.record import MISSING, NUMBER_TYPES, TENSOR_TYPES, Recorded, Scalars, allocations, pack_step

__all__ = ["Launcher", "Replayer", "called_in_c", "make_check", "record_call", "record_through", "untraced"]

# The C launcher's bounds, MAX_ARGUMENT_BYTES and this; a call beyond them always goes the long way.
MAX_ITEMS = 96

_c: Any
try:
    # By name: type checkers and import-linter know no compiled modules.
    _c = importlib.import_module("fuser._launcher")
    _c.set_torch(
        torch.Tensor.__dlpack_c_exchange_api__,
        torch.Tensor,
        torch.nn.Parameter,
        torch._C._len_torch_function_stack,
        torch._C._len_torch_dispatch_stack,
        torch.is_grad_enabled,
        openmp_threads,
        torch._C._increment_version,
        torch._C._profiler._RecordFunctionFast,
        vars(forward_ad),
        vars(profiler),
        MISSING,
    )
except (ImportError, AttributeError, TypeError):
    # Not built, or for another version of this file, or a torch with another exchange API.
    _c = None
else:
    counters.add_launches(_c.launch_count)
    # A setting that changes makes every record stale.
    _c.set_generation(config.generation)
    config.listeners.append(_c.set_generation)


class Launcher(Protocol):
    """Replays calls of one callable. Threads may share it.

    In C an instance can be called, too: what is not like a recorded call goes to its method ``call_anew``, with the
    same arguments.
    """

    def __init__(
        self,
        names: tuple[str, ...],
        defaults: tuple[Any, ...],
        order: tuple[int, ...] | None = None,
        fill: tuple[Any, ...] = (),
        constants: tuple[Any, ...] = (),
    ) -> None:
        """Make the launcher of one callable.

        Args:
            names: the scalars that may follow the tensors by name. With ``order``: all parameters, or none.
            defaults: the value of each that the call leaves out; None for one that every call must give.
            order: the inputs as slots among the arguments, or -1 - k for the k-th default; None: all arguments in
                order, then the scalars.
            fill: with ``order``, of each parameter the value of an argument that is left out, or ``MISSING``.
            constants: likewise the value that an argument has to have in calls that are replayed.
        """

    def launch(self, tensors: tuple[Any, ...], scalars: Scalars | None, out: Any) -> Any:
        """Replay a call that is like a recorded one.

        Args:
            tensors: the positional arguments.
            scalars: values by name; names left out have their default.
            out: None, a tensor, or a tuple of tensors.

        Returns:
            The call's value: ``out``, a tensor, or a tuple of tensors. None if no record fits: nothing was done.
        """

    def add(self, tensors: tuple[Any, ...], scalars: Scalars | None, out: Any, recorded: Recorded) -> bool:
        """Record a call, whose arguments are as in ``launch``; return whether it was recorded."""


def record_call(
    launcher: Launcher,
    plan: Plan,
    inputs: Sequence[Any],
    tensors: tuple[Any, ...],
    scalars: Scalars | None,
    out: Any,
) -> Recorded | None:
    """Record a call that has just run by a plan, if a launcher can replay it; return what was recorded.

    Args:
        launcher: where to.
        plan: what the call ran by, over ``inputs``.
        inputs: the call's inputs as the plan numbers them; those that a record can hold are tensors and numbers as
            the user gave them.
        tensors: the call's arguments, as ``Launcher.launch`` takes them.
        scalars: likewise.
        out: likewise.
    """
    if log.wants("launch"):
        # A replayed launch could not be dumped.
        return None
    outs = () if out is None else out if isinstance(out, tuple) else (out,)
    items = (*inputs, *outs)
    check = make_check(items, default_dtype=plan.default_dtype)
    needs_grad = any(isinstance(item, torch.Tensor) and item.requires_grad for item in items)
    if check is None or (needs_grad and torch.is_grad_enabled()) or not plan.steps:
        return None
    is_large = any(8 * len(step.packer.words) > MAX_ARGUMENT_BYTES for step in plan.steps)
    if len(items) + len(plan.outputs) + len(plan.temporaries) + len(plan.workspaces) > MAX_ITEMS or is_large:
        return None
    recorded = Recorded(
        check=check,
        generation=plan.generation,
        grad_mode=False if needs_grad else None,
        allocations=allocations(plan, has_out=bool(outs)),
        result_count=len(plan.outputs),
        packed=tuple(pack_step(step, len(inputs), step.packer.template) for step in plan.steps),
        device_index=plan.device.index or 0,
        is_cuda=plan.device.type == "cuda",
        steps=plan.steps,
        flat=plan.flat if plan.flat and _gives_its_layout(inputs, plan) else (),
        apart=sum(1 << slot for slot, may_be_input in enumerate(plan.in_place) if not may_be_input),
    )
    return recorded if launcher.add(tensors, scalars, out, recorded) else None


def record_through(
    launcher: Launcher,
    through: Callable[..., Any],
    inputs: Sequence[Any],
    tensors: tuple[Any, ...],
    scalars: Scalars | None,
    *,
    grad_mode: bool | None = True,
    any_size: bool = True,
    generation: int | None = None,
    default_dtype: torch.dtype | None = None,
) -> None:
    """Record that calls like this one are made by ``through(*inputs)``.

    Args:
        launcher: where to.
        through: returns the call's value.
        inputs: the call's inputs, in the order in which the launcher binds them.
        tensors: the call's arguments, as ``Launcher.launch`` takes them.
        scalars: likewise.
        grad_mode: whether while it is on only, or off only; None: either way.
        any_size: whether for inputs of other sizes, too.
        generation: of the settings under which it was found; None: of those that there are.
        default_dtype: torch's default dtype, where it counts.
    """
    check = make_check(inputs, default_dtype=default_dtype)
    if check is not None and len(inputs) <= MAX_ITEMS:
        flat = Flat() if any_size else ()
        found_under = config.generation if generation is None else generation
        recorded = Recorded(check, found_under, grad_mode=grad_mode, through=through, flat=flat)
        launcher.add(tensors, scalars, None, recorded)


def make_check(
    items: Sequence[Any], *, compares_sizes: bool = False, default_dtype: torch.dtype | None = None
) -> Callable[..., bool] | None:
    """Return torch's guard for the tensors, each once; None if something is neither a plain tensor nor a number.

    With a ``default_dtype`` it also asks whether that is torch's.
    """
    given = [item for item in items if type(item) in TENSOR_TYPES]
    if not given or sum(type(item) in NUMBER_TYPES for item in items) != len(items) - len(given):
        return None
    distinct = list({id(item): item for item in given}.values())
    # The C launcher compares sizes and strides itself, to find the record: None leaves a dimension out.
    compares_sizes = compares_sizes or _c is None
    sizes: list[Any] = [list(item.shape) if compares_sizes else [None] * item.dim() for item in distinct]
    strides: list[Any] = [list(item.stride()) if compares_sizes else [None] * item.dim() for item in distinct]
    check: Callable[..., bool] = guards.TensorGuards(
        *distinct, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides
    ).check
    if default_dtype is None:
        return check
    find = torch.get_default_dtype
    return lambda *tensors: find() is default_dtype and check(*tensors)


def _gives_its_layout(inputs: Sequence[Any], plan: Plan) -> bool:
    # Whether the outputs lie as the first input that has dimensions.
    layout = next(
        ((item.shape, item.stride()) for item in inputs if isinstance(item, torch.Tensor) and item.dim()), None
    )
    return all((item.shape, item.strides) == layout for item in plan.outputs)


# The class that callables derive from.
if TYPE_CHECKING:
    Replayer = PythonLauncher
else:
    Replayer = _c.Launcher if _c else PythonLauncher

C = TypeVar("C", bound=type)
F = TypeVar("F", bound=Callable[..., Any])


def called_in_c(callable_class: C) -> C:
    """Let the interpreter call a class's instances in C, where its base is the C launcher.

    Dynamo traces the ``__call__`` it finds in the class, and the interpreter calls the class's slot, which is made from
    it. Here the slot stays the one of the base, which goes to ``call_anew`` for what it does not know; ``__call__`` is
    what Dynamo sees, and does the same.

    Where a graph breaks at a call, the call is made as it stands, and Dynamo would trace each function in it.
    """
    _trace_nothing_below(callable_class.__dict__["call_anew"])
    if _c is not None:
        function = callable_class.__dict__["__call__"]
        del callable_class.__call__
        _c.show_call(callable_class, function)
    return callable_class


def untraced(function: F) -> F:
    """Let Dynamo call a function as it stands: as a backward pass, which compiled autograd would have it trace."""
    # What torch.compiler.disable sets; the decorator itself would import all of Dynamo.
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    _trace_nothing_below(function)
    return function


def _trace_nothing_below(function: Callable[..., Any]) -> None:
    skip = eval_frame._FrameAction.SKIP
    eval_frame.set_code_exec_strategy(function.__code__, eval_frame._FrameExecStrategy(skip, skip))
