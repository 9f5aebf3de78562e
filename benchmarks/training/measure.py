"""One run: every contestant on every chain, checked first, then timed in turns."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

import fuser
from benchmarks import check, timing
from benchmarks.sweep import Record, Say, describe, hide_paths, wait_for
from benchmarks.training.chains import CHAINS, DTYPES, Data, Function, TrainingChain, make_data
from benchmarks.training.contestants import CONTESTANTS, HOST_CONTESTANTS
from benchmarks.training.sampling import PASSES, Pass, PassSampler, make_passes

HOST_ELEMENTS = 1024
# A product and its gradients are rounded once.
HOST_TOLERANCE_EPS = 1
# Larger copies are slower on some devices, and would flatter what is held against them.
MAX_COPY_BYTES = 2**29


@dataclass(frozen=True, slots=True)
class Settings:
    """What one run measures, and for how long."""

    device: torch.device
    chains: tuple[str, ...]
    dtypes: tuple[str, ...]
    elements: int
    contestants: tuple[str, ...]
    host_contestants: tuple[str, ...]
    # Turns everyone takes, and seconds of each turn: the turns spread a machine's slow moments over everybody.
    rounds: int = 3
    budget_s: float = 0.2
    host_rounds: int = 10
    host_budget_s: float = 0.05

    def shorten(self) -> Settings:
        """Return the same for a smoke test."""
        return replace(self, rounds=1, budget_s=0.01, host_rounds=1, host_budget_s=0.01)

    def to_json(self) -> Record:
        """Return what a reader of the results needs."""
        return {
            "chains": list(self.chains),
            "dtypes": list(self.dtypes),
            "elements": self.elements,
            "contestants": list(self.contestants),
            "host_contestants": list(self.host_contestants),
            "rounds": self.rounds,
            "budget_s": self.budget_s,
            "host_rounds": self.host_rounds,
            "host_budget_s": self.host_budget_s,
        }


class WrongError(Exception):
    """A result is too far from the reference, or not what was asked for; the message says by how much."""


@dataclass(slots=True)
class Timed:
    """One pass of one contestant: its record, and what was measured so far."""

    record: Record
    sampler: PassSampler | None = None
    samples_us: list[float] = field(default_factory=list)

    def median_us(self) -> float:
        """The middle sample, in microseconds."""
        return timing.Timing("", tuple(self.samples_us)).median_us

    def summarize(self) -> Record:
        """Return the timing without its samples, which are counted."""
        method = self.sampler.method if self.sampler else "wall"
        return {**timing.Timing(method, tuple(self.samples_us)).summarize(), "count": len(self.samples_us)}

    def leave(self, status: str, reason: str) -> None:
        """Take no further part, and say why."""
        self.record.update(status=status, reason=hide_paths(reason))
        self.sampler = None


def measure_throughput(settings: Settings, say: Say) -> Iterator[list[Record]]:
    """Time the work itself; yield the records of one chain and dtype after the other."""
    for chain_name in settings.chains:
        for dtype_name in settings.dtypes:
            say(f"{chain_name}, {dtype_name}, {settings.elements} elements")
            yield measure_point(settings, CHAINS[chain_name], dtype_name)


def measure_point(settings: Settings, chain: TrainingChain, dtype_name: str) -> list[Record]:
    """Return the records of one chain and dtype, pass by pass, the device's copy first in each."""
    dtype, device = DTYPES[dtype_name], settings.device
    data = make_data(chain.names, chain.wanted, settings.elements, dtype, device)
    common: Record = {"chain": chain.name, "dtype": dtype_name, "elements": settings.elements}
    moved = {name: count * data.grad.nbytes for name, count in chain.arrays_moved().items()}
    table = {
        name: {
            peer: Timed({**common, "pass": name, "bytes_moved": moved[name], "peer": peer})
            for peer in ("copy", *settings.contestants)
        }
        for name in PASSES
    }
    for name in PASSES:
        copy, copied = table[name]["copy"], min(moved[name], MAX_COPY_BYTES)
        copy.record["bytes_copied"] = copied
        copy.sampler = PassSampler(make_copy(copied, device), device)
    reference = compute_reference(chain.compute, data)
    for peer in settings.contestants:
        enter(peer, [table[name][peer] for name in PASSES], chain, data, reference)
    del reference
    take_turns(settings, table)
    return [record for name in PASSES for record in finish(table[name])]


def enter(
    peer: str, entries: list[Timed], chain: TrainingChain, data: Data, reference: tuple[Tensor, tuple[Tensor, ...]]
) -> None:
    """Build and check a contestant's call and choose how it is timed; whoever is wrong is recorded as that."""
    contestant = CONTESTANTS[peer]
    tolerance_eps = chain.tolerances_eps[data.grad.dtype]
    try:
        with contestant.scope():
            call = contestant.build(chain)
            errors, launches = check_call(call, data, reference)
            for entry, error_eps, count in zip(entries, errors, launches, strict=True):
                entry.record.update(error_eps=finite(error_eps), tolerance_eps=tolerance_eps)
                if contestant.is_fuser:
                    entry.record["launches"] = count
            require_right(errors, tolerance_eps, must_fuse=contestant.is_fuser)
            for entry, timed in zip(entries, make_passes(call, data).values(), strict=True):
                entry.sampler = PassSampler(timed, data.grad.device)
    except WrongError as reason:
        leave_all(entries, "wrong", str(reason))
    except Exception as error:  # Whatever a contestant raises is its own result, not the harness's.
        leave_all(entries, "failed", describe(error))


def leave_all(entries: Iterable[Timed], status: str, reason: str) -> None:
    """Take a contestant out of every pass."""
    for entry in entries:
        entry.leave(status, reason)


def compute_reference(function: Function, data: Data) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return the exact result and gradients: eager torch in float64."""
    inputs = tuple(value.detach().double().requires_grad_(value.requires_grad) for value in data.inputs)
    out = function(*inputs)
    gradients = torch.autograd.grad(out, [value for value in inputs if value.requires_grad], data.grad.double())
    return out.detach(), gradients


def check_call(
    call: Function, data: Data, reference: tuple[Tensor, tuple[Tensor, ...]]
) -> tuple[tuple[float, float, float], tuple[int, int, int]]:
    """Run both passes and compare them with the reference.

    Returns:
        The errors of the forward pass, of the backward pass and the larger one, in eps of the dtype; and how many
        kernels fuser launched in each.
    """
    exact, exact_gradients = reference
    dtype = data.grad.dtype
    # Once for the compilers, and once where what nobody writes is NaN.
    torch.autograd.grad(call(*data.inputs), data.wanted, data.grad)
    fuser.reset_stats()
    check.poison_memory(exact, dtype)
    out = call(*data.inputs)
    forward_launches = fuser.stats()["launches"]
    check.poison_memory(exact, dtype)
    gradients = torch.autograd.grad(out, data.wanted, data.grad)
    launches = fuser.stats()["launches"]
    forward = check.measure_error_eps(out.detach(), exact, dtype)
    backward = max(
        check.measure_error_eps(gradient, wanted, dtype)
        for gradient, wanted in zip(gradients, exact_gradients, strict=True)
    )
    return (forward, backward, max(forward, backward)), (forward_launches, launches - forward_launches, launches)


def require_right(errors: tuple[float, ...], tolerance_eps: int, *, must_fuse: bool) -> None:
    """Raise WrongError if ``check_call`` found results too far off, or fuser ran them in eager torch."""
    if max(errors) > tolerance_eps:
        raise WrongError(f"{max(errors):.3g} eps from float64, {tolerance_eps} allowed")
    if must_fuse and fuser.stats()["fallbacks"]:
        raise WrongError(f"not fused: {', '.join(fuser.stats()['fallbacks'])}")


def take_turns(settings: Settings, table: dict[str, dict[str, Timed]]) -> None:
    """Sample everybody in every round."""
    for _ in range(settings.rounds):
        for peer in ("copy", *settings.contestants):
            scope = CONTESTANTS[peer].scope() if peer in CONTESTANTS else torch.enable_grad()
            with scope:
                for name in PASSES:
                    entry = table[name][peer]
                    if entry.sampler is not None:
                        entry.samples_us += entry.sampler.sample(settings.budget_s)


def finish(entries: dict[str, Timed]) -> list[Record]:
    """Fill in the records of one pass."""
    speeds = {}
    for peer, entry in entries.items():
        if entry.sampler is not None:
            count = entry.record.get("bytes_copied", entry.record["bytes_moved"])
            speeds[peer] = count / entry.median_us() * 1e-3
    for peer, speed in speeds.items():
        record = entries[peer].record
        record.update(status="ok", time_us=entries[peer].summarize(), gb_per_s=round(speed, 2))
        for mark in ("eager", "inductor", "copy") if peer != "copy" else ():
            record[f"ratio_to_{mark}"] = float(f"{speed / speeds[mark]:.4g}") if mark in speeds else None
    return [entry.record for entry in entries.values()]


def make_copy(bytes_moved: int, device: torch.device) -> Pass:
    """Return a device copy that reads and writes ``bytes_moved`` bytes in all, into memory that is already there."""
    source = torch.rand(max(1, bytes_moved // 8), device=device)
    copy = partial(torch.empty_like(source).copy_, source)
    return Pass(lambda: None, lambda _: copy())


def measure_host(settings: Settings, say: Say) -> list[Record]:
    """Time how long the passes of one small product keep Python busy: the forward pass alone, then both."""
    data = make_data(("x", "y"), ("x", "y"), HOST_ELEMENTS, torch.float32, settings.device)
    reference = compute_reference(torch.mul, data)
    table = {
        name: {
            peer: Timed({"elements": HOST_ELEMENTS, "pass": name, "peer": peer}) for peer in settings.host_contestants
        }
        for name in ("forward", "both")
    }
    runs: dict[str, dict[str, Pass]] = {}
    for peer in settings.host_contestants:
        say(f"{peer}, host time")
        entries = [entries_of[peer] for entries_of in table.values()]
        try:
            call = HOST_CONTESTANTS[peer].build()
            errors, _ = check_call(call, data, reference)
            require_right(errors, HOST_TOLERANCE_EPS, must_fuse=HOST_CONTESTANTS[peer].is_fuser)
            runs[peer] = make_passes(call, data)
        except WrongError as reason:
            leave_all(entries, "wrong", str(reason))
        except Exception as error:
            leave_all(entries, "failed", describe(error))
    wait = wait_for(settings.device)
    for _ in range(settings.host_rounds):
        for name, entries_of in table.items():
            for peer, passes in runs.items():
                run = partial(passes[name].run, None)
                entries_of[peer].samples_us += timing.sample_host_us(run, wait, settings.device, settings.host_budget_s)
    return [record for entries_of in table.values() for record in finish_host(entries_of)]


def finish_host(entries: dict[str, Timed]) -> list[Record]:
    """Fill in the records of one pass; the mark is eager's ``torch.mul``."""
    mark = entries.get("eager_mul")
    for entry in entries.values():
        if entry.samples_us:
            ratio = round(entry.median_us() / mark.median_us(), 3) if mark and mark.samples_us else None
            entry.record.update(status="ok", time_us=entry.summarize(), ratio_to_eager_mul=ratio)
    return [entry.record for entry in entries.values()]


def finite(value: float) -> float | None:
    """Return a number that JSON can hold."""
    return round(value, 3) if value < float("inf") else None
