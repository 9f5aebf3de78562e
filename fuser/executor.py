"""Runs a registered group on tensors: check, find or make the plan, allocate, launch.

A call whose signature is known only allocates, packs and launches.
"""

from __future__ import annotations

import math
import struct
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from fuser import counters, log, planner
from fuser import torch_ops as ops
from fuser.compiler import backend_for, check_cuda_text, map_side_by_side, register, registered
from fuser.config import STALE, config
from fuser.dtypes import range_error
from fuser.errors import UnsupportedError
from fuser.expanded import describe_values
from fuser.fallback import Fallback
from fuser.in_parts import cut_around_obstacle, run_around, run_bound
from fuser.kept_plans import KeptPlan, keep_plan, restore_plan
from fuser.kernel_cache import Lru
from fuser.kernel_spec import KernelSpec, infer_layouts
from fuser.launcher import Launcher, Replayer, record_call, record_through
from fuser.outputs import check_out, finish_out
from fuser.plain_torch import unwatched
from fuser.plan import Plan, Step, number_of
from fuser.planner import make_plan
from fuser.process import ignoring
from fuser.resizing import find_resizer
from fuser.tensor_desc import (
    TensorDesc,
    default_dtype_of,
    describe,
    input_specs,
    name_input,
    names_of,
    read_number,
    value_layouts,
)
from fuser.tuning.search import make_tuned

if TYPE_CHECKING:
    from fuser.eager_program import EagerCall

__all__ = [
    "kept_plans",
    "plan_ahead",
    "restore_plans",
    "run_fallback",
    "run_planned",
    "set_can_fuse",
    "try_to_compile",
    "under_autocast",
]

_plans: dict[int, Lru[Plan]] = {}
# By key, what runs in place of a group inside torch.autocast.
_under_autocast_specs: dict[int, KernelSpec] = {}


def set_can_fuse(device_type: str, value: bool) -> bool:
    """Switch fusion on a type of device on or off; return the former value."""
    before = planner.set_can_fuse(device_type, value)
    config.touch()
    return before


def run_planned(
    spec: KernelSpec, inputs: list[Any], out: Sequence[torch.Tensor] | None
) -> tuple[list[torch.Tensor], Plan | None]:
    """Run a group on plain strided tensors that need no gradient.

    Returns:
        Its results, and the plan, if another call like this one can go by it without another look.
    """
    inputs = _read_scalars(spec, inputs)
    described = tuple(describe(item, reads_address=True) for item in inputs)
    described_out = tuple(describe(item, reads_address=True) for item in out or ())
    plan = _find_plan(spec, described, described_out, lambda make: make_tuned(make, lambda: _run_plain(spec, inputs)))
    if plan.fallback_reason:
        if plan.obstacle < 0:
            made = plan.eager.run(inputs) if plan.eager is not None and out is None else None
            if made is not None:
                counters.count_fallback(plan.fallback_reason)
                return made, plan
            results = run_fallback(spec, inputs, plan.fallback_reason, out, is_expected=plan.is_expected)
            return results, plan if plan.is_expected and out is None else None
        results = run_around(spec, plan.obstacle, inputs, _replay)
        return (results, plan) if out is None else (finish_out(out, results, names_of(spec.group), inputs), None)
    if out is not None:
        is_resized, is_direct = check_out(plan.outputs, out, inputs, names_of(spec.group))
        if not is_direct or not _writes_after_reading(plan, out, inputs):
            return finish_out(out, _run_plain(spec, inputs), names_of(spec.group)), None
        if is_resized:
            # Strides are other ones than those planned for.
            return _run_plain(spec, inputs, out), None
    written = plan.allocate(out)
    try:
        for step in plan.steps:
            _launch(step, inputs + written, written)
    except struct.error:
        wrong = _find_overflow(plan, inputs)
        if any(
            item.function.op is None and wrong in (*item.tensors, *item.scalars) for item in spec.group.applications
        ):
            raise range_error(name_input(spec.group, wrong), number_of(inputs[wrong])) from None
        # torch's ops take such an integer as one without a sign, or have an error of their own.
        return run_fallback(spec, inputs, "an integer does not fit in 64 bits", out), None
    if out is not None:
        # Autograd must see that what it may have saved was written to.
        torch.autograd.graph.increment_version(out)
    return written[: len(plan.outputs)], plan


def _run_plain(spec: KernelSpec, inputs: list[Any], out: Sequence[torch.Tensor] | None = None) -> list[torch.Tensor]:
    return run_planned(spec, inputs, out)[0]


def _writes_after_reading(plan: Plan, out: Sequence[torch.Tensor], inputs: Sequence[Any]) -> bool:
    # Whether no step, and no pass over a row, reads what was written before.
    given = [item for item in inputs if isinstance(item, torch.Tensor)]
    return not any(
        torch._C._overlaps(item, other) and not (may_be_input and _is_same_memory(item, other))
        for item, may_be_input in zip(out, plan.in_place, strict=True)
        for other in given
    )


def _is_same_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    return (one.data_ptr(), one.shape, one.stride()) == (other.data_ptr(), other.shape, other.stride())


def _find_plan(
    spec: KernelSpec,
    described: tuple[TensorDesc, ...],
    described_out: tuple[TensorDesc, ...],
    tune: Callable[[Callable[[], Plan]], Plan] = lambda make: make(),
) -> Plan:
    # Read before planning, this first: what another thread changes meanwhile, and back, makes the plan stale.
    changes = config.changes
    generation = config.generation
    signature = (described, described_out, generation, torch.get_default_dtype())
    plans = _plans.get(spec.key) or _plans.setdefault(spec.key, Lru())
    plan = plans.get(signature)
    if plan is None or plan.until < time.monotonic():
        # A mode would have frames in torch's answers that there is no such view, which would be taken for a signal
        # handler's.
        with unwatched():
            plan = tune(lambda: make_plan(spec, described, described_out))._replace(generation=generation)
        if plan.until and plan.fallback_reason and plan.obstacle < 0 and not plan.is_expected:
            plan = plan._replace(eager=_prepare_eager(spec, described, plan.device))
        if config.changes != changes:
            return plan._replace(generation=STALE)
        plans.put(signature, plan, config.max_plans)
    return plan


def _prepare_eager(spec: KernelSpec, described: Sequence[TensorDesc], device: torch.device) -> EagerCall | None:
    from fuser.eager_program import EagerCall  # noqa: PLC0415 - brings the translation, as in fallback

    specs = tuple(input_specs(described, device))
    with suppress(UnsupportedError):
        if default_dtype_of(spec.group, specs) is None:
            layouts = infer_layouts(spec.group, value_layouts(described))
            return EagerCall(spec.group, specs, [layouts[value] for value in spec.group.outputs], device)
    return None


def plan_ahead(spec: KernelSpec, described: Sequence[TensorDesc], described_out: Sequence[TensorDesc] = ()) -> None:
    """Plan a call that is to come, and compile what it will launch.

    Args:
        spec: a registered group's spec.
        described: one per input of the group.
        described_out: the ``out=`` tensors, if there are any.

    Raises:
        As ``run``, for what the call will raise.
    """
    plan = _find_plan(spec, tuple(described), tuple(described_out))
    if plan.obstacle >= 0:
        values = describe_values(spec.group, described)
        for part, read, *_ in cut_around_obstacle(spec, plan.obstacle):
            plan_ahead(part, [values[value] for value in read])


def kept_plans(specs: Iterable[KernelSpec]) -> list[KeptPlan]:
    """Return the plans of groups' calls, and of those that they are cut into, as later processes can have them."""
    kept = []
    # Many calls are cut into the same groups, and those again: each is looked at once.
    found = {spec.key: spec for spec in specs}
    waiting = list(found.values())
    while waiting:
        spec = waiting.pop()
        for (inputs, out, generation, default_dtype), plan in _plans.get(spec.key, Lru[Plan]()).items():
            if generation != config.generation or plan.until != math.inf:
                continue
            kept.append(KeptPlan(spec.text, inputs, out, default_dtype, keep_plan(plan)))
            parts = cut_around_obstacle(spec, plan.obstacle) if plan.obstacle >= 0 else ()
            new = {part.key: part for part, *_ in parts if part.key not in found}
            found |= new
            waiting += new.values()
    return kept


def restore_plans(kept: Sequence[KeptPlan]) -> None:
    """Take the plans of an earlier process, which had the same settings; those that cannot be had are made again.

    Those whose kernels are not in the cache any more are made side by side; what goes wrong is left to their calls.
    """
    missing = [item for item in kept if not _restore(item)]
    for device_type in {described.device.type for item in missing for described in item.inputs if described.device}:
        with ignoring(Exception):
            backend_for(device_type).load_compiler()

    def plan(item: KeptPlan) -> None:
        with ignoring(Exception):
            plan_ahead(registered(item.text), item.inputs, item.out)

    map_side_by_side(plan, [item for item in missing if item.default_dtype == torch.get_default_dtype()])


def _restore(item: KeptPlan) -> bool:
    # Whether it is there now, or never will be: where fusion is off.
    with ignoring(Exception):
        plan, spec = restore_plan(item.payload)._replace(generation=config.generation), registered(item.text)
        if planner.can_fuse(plan.device.type):
            signature = (item.inputs, item.out, plan.generation, item.default_dtype)
            _plans.setdefault(spec.key, Lru()).put(signature, plan, config.max_plans)
        return True
    return False


def _read_scalars(spec: KernelSpec, inputs: list[Any]) -> list[Any]:
    # A group's inputs with a number in place of each tensor that a reduction takes as a scalar: graphs hold one for a
    # number that was not known when they were traced.
    if not spec.group.has_reduction or not any(item.is_scalar for item in spec.group.inputs):
        return inputs
    pairs = zip(spec.group.inputs, inputs, strict=True)
    return [read_number(item) if known.is_scalar and isinstance(item, torch.Tensor) else item for known, item in pairs]


_launchers: dict[int, Replayer] = {}


def _replay(spec: KernelSpec, inputs: list[Any]) -> Sequence[torch.Tensor]:
    return _replay_by(_launcher_of(spec), spec, inputs)


def _launcher_of(spec: KernelSpec) -> Replayer:
    return _launchers.get(spec.key) or _launchers.setdefault(spec.key, Replayer((), ()))


def _replay_by(launcher: Replayer, spec: KernelSpec, inputs: list[Any]) -> Sequence[torch.Tensor]:
    # As ``run_planned``, for one part of a call that comes again with the others.
    arguments = tuple(inputs)
    replayed = launcher.launch(arguments, None, None)
    if replayed is not None:
        return (replayed,) if isinstance(replayed, torch.Tensor) else replayed
    results, plan = run_planned(spec, inputs, None)
    if plan is not None:
        record_planned(launcher, spec, plan, arguments, arguments)
    return results


def record_planned(
    launcher: Launcher,
    spec: KernelSpec,
    plan: Plan,
    inputs: Sequence[Any],
    tensors: tuple[Any, ...],
    scalars: Mapping[str, Any] | None = None,
    out: Any = None,
) -> None:
    """Record a call that has just run by a plan: what it launches, that torch's kernel was kept, or where it is cut.

    Args:
        launcher: where to.
        spec: of the group.
        plan: as ``run_planned`` returned it.
        inputs: of the group.
        tensors: the call's arguments, as ``Launcher.launch`` takes them.
        scalars: likewise.
        out: likewise.
    """
    pairs = zip(spec.group.inputs, inputs, strict=True)
    if not plan.fallback_reason:
        recorded = record_call(launcher, plan, inputs, tensors, scalars, out)
        learns = getattr(launcher, "learns_sizes", True)
        if learns and recorded is not None and out is None and not recorded.flat:
            described = [describe(item, reads_address=True) for item in inputs]
            resizer = find_resizer(spec, described, plan)
            if resizer.learn(spec, described, recorded):
                launcher.add(tensors, scalars, out, recorded._replace(resize=resizer))
    # What is replayed is counted, and not said.
    elif not log.wants("fallback") and not any(
        known.is_scalar and isinstance(item, torch.Tensor) for known, item in pairs
    ):
        if plan.eager is not None:
            again = plan.eager.bind(plan.until, counters.tally_of(plan.fallback_reason))
        else:
            again = _bind_parts(spec, plan.obstacle) if plan.obstacle >= 0 else _bind_kept(spec)
        # No gradient is asked for here: where an input could have one, grad mode is off.
        mode = False if any(isinstance(item, torch.Tensor) and item.requires_grad for item in inputs) else None
        under = plan.generation
        record_through(launcher, again, inputs, tensors, scalars, grad_mode=mode, any_size=False, generation=under)


def _bind_kept(spec: KernelSpec) -> Callable[..., Any]:
    # What makes calls that are known to be torch's, as strict numerics ask.
    run = Fallback(spec.group).bind("")

    def again(*inputs: Any) -> Any:
        results = run(inputs)
        counters.count_kept()
        return results[0] if len(results) == 1 else tuple(results)

    return again


def _bind_parts(spec: KernelSpec, obstacle: int) -> Callable[..., Any]:
    # What makes calls that are known to be cut around one application.
    parts = [
        (partial(_replay_by, _launcher_of(part), part), read, made, ended)
        for part, read, made, ended in cut_around_obstacle(spec, obstacle)
    ]

    def again(*inputs: Any) -> Any:
        results = run_bound(spec, parts, inputs)
        return results[0] if len(results) == 1 else tuple(results)

    return again


def try_to_compile(spec: KernelSpec, inputs: Sequence[Any], device: torch.device) -> None:
    """Compile what a call would need, without launching; for CUDA also where there is no device.

    Args:
        spec: a registered group's spec.
        inputs: meta tensors and Python numbers.
        device: where meta tensors will live.

    Raises:
        As ``run``; UnsupportedError for a group that would not be fused.
    """
    if device.type == "cuda" and torch.cuda.device_count() == 0:
        for part, args in planner.plan_texts(spec, inputs, device):
            check_cuda_text(part, args)
        return
    if device == torch.device("cuda"):
        device = torch.device("cuda", torch.cuda.current_device())
    make_plan(spec, [describe(item, device) for item in inputs], allow_fallback=False)


def under_autocast(spec: KernelSpec, inputs: Sequence[Any]) -> KernelSpec:
    """Return what runs in place of a group inside torch.autocast: ops that it runs in float32 compute in it."""
    # Users' functors are no ops that autocast knows.
    if not any(isinstance(item, torch.Tensor) and item.is_cuda for item in inputs):
        return spec
    if spec.key not in _under_autocast_specs:
        has_op = not ops.WIDE_UNDER_AUTOCAST.isdisjoint(item.function.op for item in spec.group.applications)
        _under_autocast_specs[spec.key] = register(spec.group.widen(ops.WIDE_UNDER_AUTOCAST)) if has_op else spec
    return _under_autocast_specs[spec.key]


def _launch(step: Step, inputs: list[Any], outputs: list[torch.Tensor]) -> None:
    arguments = step.pack(inputs, outputs)
    if log.wants("launch"):
        names = ", ".join(functor.entry for functor in step.kernel.source.functors)
        log.say("launch", f"{names}: {step.launch}, {len(step.inputs)} inputs, {len(step.outputs)} outputs")
    step.start(arguments)


def _find_overflow(plan: Plan, inputs: Sequence[Any]) -> int:
    # Which input of a call no launch can pass on.
    numbers = ((index, number_of(inputs[index])) for step in plan.steps for index in step.numbers)
    return next(index for index, item in numbers if isinstance(item, int) and not -(2**63) <= item < 2**63)


def run_fallback(
    spec: KernelSpec,
    inputs: list[Any],
    reason: str,
    out: Sequence[torch.Tensor] | None = None,
    *,
    is_expected: bool = False,
) -> list[torch.Tensor]:
    """Run a group in eager torch, and count the reason, unless torch's kernel is what strict numerics ask for."""
    results = Fallback(spec.group).run(inputs, reason)
    if is_expected:
        counters.count_kept()
    else:
        counters.count_fallback(reason)
    return results if out is None else finish_out(out, results, names_of(spec.group))
