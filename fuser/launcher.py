"""The fast path of a call: a call like an earlier one allocates, packs and launches, and looks at nothing else.

A *record* is what an earlier call left behind: how to recognise a call like it, what to allocate, and each launch with
its arguments, in which only addresses and numbers are missing. ``_launcher.c`` replays records; ``PythonLauncher`` does
so in Python, for machines that had no C compiler when fuser was installed, and leaves ``out=`` to the long way.

A call is like a recorded one when torch's own guard (``TensorGuards``, which torch.compile relies on) says so of the
tensors: same types, dispatch keys (so that functorch, autocast and tensors with lazy bits differ), dtypes, devices,
``requires_grad``, sizes and strides; and when the numbers have the same Python types, and no function or dispatch mode
is on. Alignment and the overlap of ``out=`` are compared here.
"""

from __future__ import annotations

import importlib
import operator
import re
import struct
from collections.abc import Callable, Mapping, Sequence
from functools import cache, lru_cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

import torch
from torch._C._dynamo import eval_frame, guards
from torch.autograd import forward_ad, profiler

from fuser import counters, log
from fuser.access import VECTOR_BYTES
from fuser.config import config
from fuser.cxx.functor import Functor
from fuser.geometry import Flat
from fuser.kernel_spec import MAX_ARGUMENT_BYTES
from fuser.plan import Plan, Step
from fuser.process import openmp_threads

__all__ = [
    "NUMBER_TYPES",
    "TENSOR_TYPES",
    "Launcher",
    "PythonLauncher",
    "Recorded",
    "Replayer",
    "allocations",
    "called_in_c",
    "guard",
    "make_check",
    "pack_step",
    "picker",
    "record_call",
    "record_through",
]

Scalars = Mapping[str, Any]

# The C launcher's bounds, MAX_ARGUMENT_BYTES and this; a call beyond them always goes the long way.
MAX_ITEMS = 96
# How many calls a PythonLauncher remembers.
PYTHON_RECORDS = 4

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
    )
except (ImportError, AttributeError, TypeError):
    # Not built, or for another version of this file, or a torch with another exchange API.
    _c = None
else:
    counters.add_source("launches", _c.launch_count)
    # A setting that changes makes every record stale.
    _c.set_generation(config.generation)
    config.listeners.append(_c.set_generation)


_ENDLESS = frozenset({"while", "do", "goto"})
_LOOP = re.compile(r"\bfor\b[^;]*;([^;]*);")
_BOUNDED = re.compile(r"\s*\w+\s*[<>!]=?\s*\d+\s*$")


class Launcher(Protocol):
    """Replays calls of one callable. Threads may share it.

    In C an instance can be called, too: what is not like a recorded call goes to its method ``call_anew``, with the
    same arguments.
    """

    def __init__(self, names: tuple[str, ...], defaults: tuple[Any, ...], order: tuple[int, ...] | None = None) -> None:
        """Make the launcher of one callable.

        Args:
            names: the scalars that may follow the tensors by name.
            defaults: the value of each that the call leaves out; None for one that every call must give.
            order: the inputs as slots among the positional arguments, or -1 - k for the k-th default; None: all
                arguments in order, then the scalars.
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


class Recorded(NamedTuple):
    """What a launcher keeps of a call."""

    # Says whether tensors (inputs, then ``out``) are like the call's.
    check: Callable[..., bool]
    # The settings' generation under which the call was planned; in another one the record is stale.
    generation: int
    # Whether the record holds with grad mode on only (True), off only (False), or either way.
    grad_mode: bool | None = None
    # Function and arguments that make each output; empty with ``out``.
    allocations: tuple[tuple[Callable[..., torch.Tensor], tuple[Any, ...]], ...] = ()
    # How many of the allocated tensors are the call's value.
    result_count: int = 0
    # One tuple per launch, see ``pack_step``.
    packed: tuple[tuple[Any, ...], ...] = ()
    # The GPU that must be current, and whether the kernels are CUDA's.
    device_index: int = 0
    is_cuda: bool = False
    # The plan's steps, kept alive with the record.
    steps: tuple[Step, ...] = ()
    # In place of all that: what is called with the inputs; its result is the call's value.
    through: Callable[..., Any] | None = None
    # Values elsewhere that the call relies on: a dict or another object, a name, and what has to be found there.
    reads: tuple[tuple[Any, str, Any], ...] = ()
    # In C the record serves calls of other sizes, too: any if it calls ``through``, else those whose tensors with
    # dimensions have the same sizes, at least two elements, and the same strides, and lie densely. Empty for records
    # that hold for one size.
    flat: Flat | tuple[()] = ()
    # In C: gives, of other sizes and strides, ``allocations``, ``packed`` and ``steps`` of such a call, or None.
    resize: Callable[..., Any] | None = None


def record_call(
    launcher: Launcher, plan: Plan, inputs: Sequence[Any], tensors: tuple[Any, ...], scalars: Scalars | None, out: Any
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
    check = make_check(items)
    needs_grad = any(isinstance(item, torch.Tensor) and item.requires_grad for item in items)
    if check is None or (needs_grad and torch.is_grad_enabled()) or not plan.steps or plan.follows_default_dtype:
        return None
    if outs and plan.workspaces:
        # A record has either kind of memory.
        return None
    if any(type(inputs[index]) in TENSOR_TYPES for step in plan.steps for index in step.numbers):
        # A 0-dim CPU tensor among CUDA ones is read on the host.
        return None
    is_large = any(8 * len(step.packer.words) > MAX_ARGUMENT_BYTES for step in plan.steps)
    if len(items) + len(plan.outputs) + len(plan.temporaries) + len(plan.workspaces) > MAX_ITEMS or is_large:
        return None
    recorded = Recorded(
        check=check,
        generation=plan.generation,
        grad_mode=False if needs_grad else None,
        allocations=() if outs else allocations(plan),
        result_count=len(plan.outputs),
        packed=tuple(pack_step(step, len(inputs), step.packer.template) for step in plan.steps),
        device_index=plan.device.index or 0,
        is_cuda=plan.device.type == "cuda",
        steps=plan.steps,
        flat=plan.flat if plan.flat and not outs and _gives_its_layout(inputs, plan) else (),
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
    """
    check = make_check(inputs)
    if check is not None and len(inputs) <= MAX_ITEMS:
        flat = Flat() if any_size else ()
        recorded = Recorded(check, config.generation, grad_mode=grad_mode, through=through, flat=flat)
        launcher.add(tensors, scalars, None, recorded)


def make_check(items: Sequence[Any], *, compares_sizes: bool = False) -> Callable[..., bool] | None:
    """Return torch's guard for the tensors, each once; None if something is neither a plain tensor nor a number."""
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
    return check


def _gives_its_layout(inputs: Sequence[Any], plan: Plan) -> bool:
    # Whether the outputs lie as the first input that has dimensions.
    layout = next(
        ((item.shape, item.stride()) for item in inputs if isinstance(item, torch.Tensor) and item.dim()), None
    )
    return all((item.shape, item.strides) == layout for item in plan.outputs)


TENSOR_TYPES = (torch.Tensor, torch.nn.Parameter)
NUMBER_TYPES = (bool, int, float, complex)
# torch.compile's allocators: they take (shape, strides, dtype), use the current device and skip the dispatcher.
_ALLOCATE: dict[str, Any] = {kind: getattr(guards, f"_empty_strided_{kind}") for kind in ("cpu", "cuda")}


def allocations(plan: Plan) -> tuple[tuple[Callable[..., torch.Tensor], tuple[Any, ...]], ...]:
    """Return what makes each tensor of a call's, and its arguments: plain tuples, as torch takes no others."""
    allocate = _ALLOCATE[plan.device.type]
    zeros = _zeros(plan.device)
    return (
        *((allocate, tuple(item)) for item in (*plan.outputs, *plan.temporaries)),
        *((zeros, (size,)) for size in plan.workspaces),
    )


@cache
def _zeros(device: torch.device) -> Callable[..., torch.Tensor]:
    # One for all, so that what is recorded can be compared.
    return partial(torch.zeros, dtype=torch.uint8, device=device)


def pack_step(step: Step, input_count: int, template: Any) -> tuple[Any, ...]:
    """Return a step for ``Launcher.add``; ``template`` is the one of its packer.

    Returns:
        The function's address; grid; block; bytes of shared memory; the arguments with addresses and numbers missing;
        the word where the addresses begin; the operands as slots among (inputs, out tensors or allocations); the
        inputs that are numbers; a letter for each number's type; whether to use torch's threads; whether its time does
        not depend on data; its name.
    """
    launch, packer = step.launch, step.packer
    pointers = (*(input_count + slot for slot in step.outputs), *step.inputs)
    return (
        step.kernel.address,
        launch.grid,
        launch.block,
        launch.shared_bytes,
        template,
        packer.first_word,
        pointers,
        step.numbers,
        packer.number_codes,
        launch.is_parallel,
        all(map(_is_steady, step.kernel.source.functors)),
        step.name,
    )


@lru_cache(maxsize=1024)
def _is_steady(functor: Functor) -> bool:
    """Whether a functor takes the same time whatever the data, as far as its text shows: no loop without a bound."""
    loops = _LOOP.findall(functor.source)
    return functor.words.isdisjoint(_ENDLESS) and all(_BOUNDED.match(loop) for loop in loops)


# Makes a call with inputs that are like the recorded ones, or returns None.
Replay = Callable[[tuple[Any, ...]], Any]


class _Record(NamedTuple):
    # How many positional arguments the call had, and the type of every input.
    argument_count: int
    types: tuple[type, ...]
    # To be called with other inputs of these types.
    replay: Replay


class PythonLauncher:
    """Implements Launcher for calls without ``out=`` on aligned tensors; remembers the last few."""

    def __init__(self, names: tuple[str, ...], defaults: tuple[Any, ...], order: tuple[int, ...] | None = None) -> None:
        self._names = dict.fromkeys(names).keys()
        self._defaults = defaults
        self._order = order
        self._records: tuple[_Record, ...] = ()

    def launch(self, tensors: tuple[Any, ...], scalars: Scalars | None, out: Any) -> Any:
        """See Launcher."""
        if out is not None or not self._records or (scalars and not scalars.keys() <= self._names):
            return None
        count = len(tensors)
        # With an order, all records have one number of arguments.
        if self._order is not None and self._records[0].argument_count != count:
            return None
        inputs = self._bind(tensors, scalars)
        types = tuple(map(type, inputs))
        for argument_count, recorded_types, replay in self._records:
            if argument_count == count and recorded_types == types:
                replayed = replay(inputs)
                if replayed is not None:
                    return replayed
        return None

    def add(self, tensors: tuple[Any, ...], scalars: Scalars | None, out: Any, recorded: Recorded) -> bool:
        """See Launcher."""
        inputs = self._bind(tensors, scalars)
        addresses = [item.data_ptr() for item in inputs if isinstance(item, torch.Tensor)]
        if (
            out is not None
            or recorded.resize
            or (recorded.is_cuda and any(address % VECTOR_BYTES for address in addresses))
        ):
            return False
        make = _make_replay if recorded.through is None else _make_replay_through
        record = _Record(len(tensors), tuple(map(type, inputs)), guard(recorded, inputs, make(recorded, inputs)))
        self._records = (record, *self._records[: PYTHON_RECORDS - 1])
        return True

    def _bind(self, tensors: tuple[Any, ...], scalars: Scalars | None) -> tuple[Any, ...]:
        if self._order is not None:
            return tuple(tensors[slot] if slot >= 0 else self._defaults[-1 - slot] for slot in self._order)
        if not scalars:
            return tensors + self._defaults
        return tensors + tuple(map(scalars.get, self._names, self._defaults))


def guard(recorded: Recorded, inputs: tuple[Any, ...], replay: Replay) -> Replay:
    """Return ``replay`` for inputs that are like the recorded ones; for others it returns None.

    The caller compares the types of numbers, and grad mode.
    """
    # What a replay looks up is bound here: an attribute costs as much as an addition.
    check, generation, settings, reads = recorded.check, recorded.generation, config, recorded.reads
    function_modes, dispatch_modes = torch._C._len_torch_function_stack, torch._C._len_torch_dispatch_stack
    first: dict[int, int] = {}
    for slot, item in enumerate(inputs):
        if isinstance(item, torch.Tensor):
            first.setdefault(id(item), slot)
    # Each tensor once, and the slots where one comes again.
    distinct = tuple(first.values())
    twins = [(slot, first[id(item)]) for slot, item in enumerate(inputs) if first.get(id(item), slot) != slot]
    pick = picker(distinct)
    again, before = picker([slot for slot, _ in twins]), picker([slot for _, slot in twins])
    is_plain = len(distinct) == len(inputs)

    def guarded(inputs: tuple[Any, ...]) -> Any:
        for held, name, value in reads:
            if (held.get(name) if type(held) is dict else getattr(held, name, None)) is not value:
                return None
        if not is_plain and not all(map(operator.is_, again(inputs), before(inputs))):
            return None
        if not check(*(inputs if is_plain else pick(inputs))):
            return None
        if generation != settings.generation or function_modes() or dispatch_modes() or forward_ad._current_level >= 0:
            return None
        return replay(inputs)

    return guarded


def picker(slots: Sequence[int]) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """Return a function that picks these items of a sequence."""
    if len(slots) > 1:
        return operator.itemgetter(*slots)
    return lambda items: [items[slot] for slot in slots]


def _make_replay_through(recorded: Recorded, inputs: tuple[Any, ...]) -> Replay:  # noqa: ARG001 - as below
    through, is_grad_enabled, mode = recorded.through, torch.is_grad_enabled, recorded.grad_mode
    assert through is not None, "the caller checked"
    return lambda inputs: through(*inputs) if mode is None or is_grad_enabled() is mode else None


def _make_replay(recorded: Recorded, inputs: tuple[Any, ...]) -> Replay:
    slots = tuple(slot for slot, item in enumerate(inputs) if isinstance(item, torch.Tensor))
    allocations, is_cuda, device_index = recorded.allocations, recorded.is_cuda, recorded.device_index
    needs_no_grad, is_grad_enabled = recorded.grad_mode is False, torch.is_grad_enabled
    current_device = torch._C._cuda_getDevice if is_cuda else None
    count = None if recorded.result_count == 1 else recorded.result_count
    # Addresses come in this order: what is allocated, then the inputs.
    order = {slot: len(allocations) + index for index, slot in enumerate(slots)}
    order |= {len(inputs) + index: index for index in range(len(allocations))}
    launches = [
        (
            step.packer.pack,
            step.start,
            picker([order[slot] for slot in (*(len(inputs) + slot for slot in step.outputs), *step.inputs)]),
            picker(step.numbers),
        )
        for step in recorded.steps
    ]

    def replay(inputs: tuple[Any, ...]) -> Any:
        if needs_no_grad and is_grad_enabled():
            return None
        read = [inputs[slot].data_ptr() for slot in slots]
        if current_device is not None:
            if current_device() != device_index:
                return None
            # Records are of aligned tensors; what is not takes another kernel.
            for address in read:
                if address % VECTOR_BYTES:
                    return None
        made = [allocate(*arguments) for allocate, arguments in allocations]
        addresses = [tensor.data_ptr() for tensor in made] + read
        for pack, run, pick_addresses, pick_numbers in launches:
            try:
                packed = pack(pick_addresses(addresses), pick_numbers(inputs))
            except struct.error:
                return None
            run(packed)
        return made[0] if count is None else tuple(made[:count])

    return replay


# The class that callables derive from.
if TYPE_CHECKING:
    Replayer = PythonLauncher
else:
    Replayer = _c.Launcher if _c else PythonLauncher

C = TypeVar("C", bound=type)


def called_in_c(callable_class: C) -> C:
    """Let the interpreter call a class's instances in C, where its base is the C launcher.

    Dynamo traces the ``__call__`` it finds in the class, and the interpreter calls the class's slot, which is made from
    it. Here the slot stays the one of the base, which goes to ``call_anew`` for what it does not know; ``__call__`` is
    what Dynamo sees, and does the same.

    Where a graph breaks at a call, the call is made as it stands, and Dynamo would trace each function in it.
    """
    skip = eval_frame._FrameAction.SKIP
    strategy = eval_frame._FrameExecStrategy(skip, skip)
    eval_frame.set_code_exec_strategy(callable_class.__dict__["call_anew"].__code__, strategy)
    if _c is not None:
        function = callable_class.__dict__["__call__"]
        del callable_class.__call__
        _c.show_call(callable_class, function)
    return callable_class
