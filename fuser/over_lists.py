"""``fuser.foreach``: one functor over lists of tensors, as an optimizer has them, in a few launches.

A *position* of the lists is a call of its own: the tensors of each list with one index. Positions that one kernel can
compute, all operands dense in one order, share launches: their addresses and sizes are tables in the argument struct.
The kernel is that of an ordinary call but for how a block finds its tensors, so bits are those of ordinary calls, by
which all other positions are served.

What a call was like is recorded. The next one like it compares tensors (torch's own guard), reads addresses, packs them
if they are other ones, and launches.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from typing import Any, overload

import torch
from torch import fx

from fuser.dtypes import plain_number
from fuser.errors import ArgumentError, describe_type, shows_users_frames
from fuser.fx.trace import FusedFunction
from fuser.jit_function import JitFunction
from fuser.list_planner import launch_lists
from fuser.list_record import ListCall, ListTarget

__all__ = ["foreach"]


@overload
def foreach(
    fn: JitFunction[torch.Tensor] | FusedFunction[..., torch.Tensor],
    /,
    *tensor_lists: Any,
    out: Any = None,
    **scalars: Any,
) -> list[torch.Tensor]: ...
@overload
def foreach(
    fn: JitFunction[tuple[torch.Tensor, ...]], /, *tensor_lists: Any, out: Any = None, **scalars: Any
) -> tuple[list[torch.Tensor], ...]: ...
@overload
def foreach(
    fn: JitFunction | FusedFunction[..., Any], /, *tensor_lists: Any, out: Any = None, **scalars: Any
) -> Any: ...
@shows_users_frames
def foreach(fn: JitFunction | FusedFunction, /, *tensor_lists: Any, out: Any = None, **scalars: Any) -> Any:
    """Apply a functor to lists of tensors: ``[fn(*items) for items in zip(*tensor_lists)]`` in a few launches.

    Each position has the bits, shape, strides and dtype of that ordinary call; positions need not have one shape, dtype
    or device. Those whose tensors are dense in one order share launches, for each combination of dtypes: some 450
    positions of seven tensors each. All others, and whatever autograd records, are ordinary calls. Positions are
    computed in no order, unless one writes what another one reads or writes.

    Args:
        fn: a functor (``jit_fn``), or a fused function; one of several kernels is called for each position.
        *tensor_lists: for each tensor that it takes a list, all of one length; or a number or a 0-dim tensor for all.
        out: a list of tensors to write to, or for several outputs one list for each; may be lists of the inputs.
        **scalars: as in a call, for all positions.

    Returns:
        A list of tensors; for several outputs a tuple of lists. ``out`` itself where given.

    Raises:
        ArgumentError: no list, lists of different lengths, or what a call of the functor does not take.
        ShapeError, DeviceError, GradientError, CompileError: as the ordinary call of a position; others may be done.
    """
    if not isinstance(fn, JitFunction | FusedFunction):
        raise ArgumentError(f"foreach takes a functor or a fused function, got {describe_type(fn)}")
    if isinstance(fn, JitFunction):
        scalars = {name: plain_number(value) for name, value in scalars.items()}
        held = tuple(name for name, value in scalars.items() if isinstance(value, torch.Tensor))
        if held:
            fn.bind_scalars({**scalars, **dict.fromkeys(held, 0)})
            tensor_lists = tuple(fn.merge_arguments(held, tensor_lists, scalars))
            fn, scalars = fn.with_tensors(held), {name: value for name, value in scalars.items() if name not in held}
    call = _read_call(fn, tensor_lists, out, scalars)
    results = None
    if call.count and not torch.compiler.is_compiling():
        target = _find_target(call, 0)
        results = None if target is None else launch_lists(call, target, lambda position: _find_target(call, position))
    return call.run_plainly(range(call.count)) if results is None else results


def _read_call(
    fn: JitFunction | FusedFunction, arguments: tuple[Any, ...], out: Any, scalars: dict[str, Any]
) -> ListCall:
    is_list = tuple([isinstance(item, list | tuple) for item in arguments])
    for item, own in zip(arguments, is_list, strict=True):
        if not own and isinstance(item, Iterable) and not isinstance(item, fx.Proxy | torch.Tensor):
            # Such as module.parameters(), or a ParameterList.
            makes_one = isinstance(item, Iterator | torch.nn.Module)
            hint = "; list(...) makes one of it" if makes_one else ""
            raise ArgumentError(f"foreach takes lists of tensors, got {describe_type(item)}{hint}")
    lengths = {len(item) for item, own in zip(arguments, is_list, strict=True) if own}
    if len(lengths) != 1:
        what = f"lists of one length, got {sorted(lengths)}" if lengths else "at least one list of tensors"
        raise ArgumentError(f"foreach takes {what}")
    count = lengths.pop()
    for item, own in zip(arguments, is_list, strict=True):
        if not own and isinstance(item, torch.Tensor) and item.dim():
            raise ArgumentError(f"foreach takes lists, and 0-dim tensors for all; got a tensor of {list(item.shape)}")
    if isinstance(fn, JitFunction):
        fn.check_count(len(arguments))
        arguments = tuple([item if own else plain_number(item) for item, own in zip(arguments, is_list, strict=True)])
    output_count = fn.function.num_outputs if isinstance(fn, JitFunction) else 0
    if out is None:
        return ListCall(fn, arguments, is_list, count, scalars, (), None, output_count)
    is_nested = isinstance(out, list | tuple) and bool(out) and all(isinstance(item, list | tuple) for item in out)
    outs = tuple(out) if is_nested else (out,)
    if not all(isinstance(item, list | tuple) and len(item) == count for item in outs):
        what = " and ".join(
            f"a list of {len(item)}" if isinstance(item, list | tuple) else describe_type(item) for item in outs
        )
        raise ArgumentError(f"foreach takes as out= a list of {count} tensors for each output, got {what}")
    if any(tensor is None for item in outs for tensor in item):
        # To an ordinary call it would mean that there is no ``out=``.
        raise ArgumentError("out= takes tensors, got None")
    if output_count and len(outs) != output_count:
        raise ArgumentError(f"out= has {len(outs)} lists for {output_count} outputs")
    return ListCall(fn, arguments, is_list, count, scalars, outs, out, output_count)


def _find_target(call: ListCall, position: int) -> ListTarget | None:
    # None where it is no single group.
    items = call.at(position)
    assert isinstance(call.fn, JitFunction | FusedFunction), "foreach checked"
    if isinstance(call.fn, JitFunction):
        spec = call.fn.spec(len(items))
        numbers = tuple([plain_number(item) for item in call.fn.bind_scalars(call.scalars).values()])
        return ListTarget(spec, spec, tuple(range(len(items) + len(numbers))), (), numbers, is_fixed=True)
    found = call.fn.find_whole(items, call.scalars)
    if found is None:
        return None
    entry, leaves = found
    whole, facts = entry.whole, entry.traced.facts
    if whole is None or len(leaves) < len(items) or not all(map(operator.is_, leaves, items)):
        return None
    is_steady = facts is None or facts.is_of_tensors
    return ListTarget(entry, whole.spec, whole.order, whole.constants, leaves[len(items) :], is_steady=is_steady)
