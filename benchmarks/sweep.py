"""One run: every peer on every chain, checked first, then timed in turns."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks import check, timing
from benchmarks.chains import CHAINS, SMALL_CHAIN, Chain, count_bytes, make_inputs
from benchmarks.driver import NoFloorError, make_driver_loop
from benchmarks.peers import PEERS, Absent, Peer, Unsupported
from benchmarks.python_launcher import measure_python_launcher

HOST_ELEMENTS = 1024
HOST_CHAINS = ("add", "six", "sum8")
# Host times are held against one another: shorter turns, and more of them, than those of throughput.
HOST_TURNS = 8

Record = dict[str, Any]
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Settings:
    """What one run measures, and for how long."""

    device: torch.device
    chains: tuple[str, ...]
    sizes: tuple[int, ...]
    peers: tuple[str, ...]
    # More sizes for SMALL_CHAIN.
    small_sizes: tuple[int, ...] = ()
    # Turns each peer takes, and seconds of each turn: the turns spread a machine's slow moments over everybody.
    rounds: int = 3
    budget_s: float = 0.25
    # Whether to start a fresh process per peer to time its compiler.
    compile_times: bool = True

    def to_json(self) -> Record:
        """Return what a reader of the results needs."""
        return {
            "chains": list(self.chains),
            "sizes": list(self.sizes),
            "small_sizes": list(self.small_sizes),
            "peers": list(self.peers),
            "rounds": self.rounds,
            "budget_s": self.budget_s,
            "compile_times": self.compile_times,
        }


@dataclass(slots=True)
class Entrant:
    """One peer on one chain: its record as it grows, and its call once that is known to be right."""

    record: Record
    peer: Peer | None = None
    run: Callable[[], Any] | None = None
    sampler: timing.Sampler | None = None
    samples_us: list[float] = field(default_factory=list)

    def leave(self, status: str, reason: str) -> None:
        """Take no further part, and say why."""
        self.record.update(status=status, reason=hide_paths(reason))
        self.run = self.sampler = None


def load_peers(settings: Settings) -> tuple[dict[str, Peer], dict[str, str]]:
    """Return the peers that are present, and for each absent one the reason."""
    present: dict[str, Peer] = {}
    absent: dict[str, str] = {}
    for name in settings.peers:
        try:
            present[name] = PEERS[name](settings.device)
        except Absent as error:
            absent[name] = hide_paths(str(error))
        except Exception as error:  # A broken installation of one peer is not the end of the run.
            absent[name] = hide_paths(f"failed to load: {describe(error)}")
    return present, absent


def measure_throughput(settings: Settings, peers: dict[str, Peer], absent: dict[str, str], say: Say) -> list[Record]:
    """Time the work itself: every chain, size and peer."""
    records: list[Record] = []
    for chain_name in settings.chains:
        small = settings.small_sizes if chain_name == SMALL_CHAIN else ()
        for size in dict.fromkeys((*small, *settings.sizes)):
            say(f"{chain_name}, {size} elements")
            records += measure_point(settings, CHAINS[chain_name], size, peers, absent)
    return records


def measure_point(
    settings: Settings, chain: Chain, size: int, peers: dict[str, Peer], absent: dict[str, str]
) -> list[Record]:
    """Return the records of one chain at one size, the device's copy among them."""
    inputs = make_inputs(chain, size, settings.device)
    bytes_moved = count_bytes(inputs)
    shape = list(torch.broadcast_shapes(*(x.shape for x in inputs)))
    dtype = str(chain.dtype).removeprefix("torch.")
    common: Record = {"chain": chain.name, "dtype": dtype, "shape": shape, "bytes_moved": bytes_moved}
    entrants = enter(settings, chain, inputs, peers, absent, common)
    for entrant in running(entrants):
        start_sampler(entrant, settings.device)
    copy = timing.make_sampler(
        make_copy(bytes_moved, settings.device), wait_for(settings.device), settings.device, True, True
    )
    copy_us: list[float] = []
    for _ in range(settings.rounds):
        copy_us += copy.sample(settings.budget_s)
        for entrant in running(entrants):
            take_turn(entrant, settings.budget_s)
    copy_timing = timing.Timing(copy.method, tuple(copy_us))
    marks = {name: median_of(entrants, name) for name in ("eager", "inductor")}
    for entrant in running(entrants):
        assert entrant.sampler is not None
        result = timing.Timing(entrant.sampler.method, tuple(entrant.samples_us))
        entrant.record.update(
            status="ok",
            time_us=result.to_json(),
            gb_per_s=round(bytes_moved / result.median_us * 1e-3, 2),
            **{
                f"ratio_to_{name}": None if mark_us is None else round(mark_us / result.median_us, 3)
                for name, mark_us in marks.items()
            },
            ratio_to_copy=float(f"{copy_timing.median_us / result.median_us:.4g}"),
        )
    copy_record = {
        **common,
        "peer": "copy",
        "status": "ok",
        "time_us": copy_timing.to_json(),
        "gb_per_s": round(bytes_moved / copy_timing.median_us * 1e-3, 2),
    }
    return [copy_record, *(entrant.record for entrant in entrants)]


def enter(
    settings: Settings,
    chain: Chain,
    inputs: tuple[Tensor, ...],
    peers: dict[str, Peer],
    absent: dict[str, str],
    common: Record,
) -> list[Entrant]:
    """Build and check every peer's call; whoever cannot run, or is wrong, is recorded as that."""
    reference = check.compute_reference(chain, inputs)
    entrants = []
    for name in settings.peers:
        entrant = Entrant({**common, "peer": name, "tolerance_eps": chain.tolerance_eps})
        entrants.append(entrant)
        if name in absent:
            entrant.leave("absent", absent[name])
            continue
        entrant.peer = peers[name]
        build_and_check(entrant, peers[name], chain, inputs, reference)
    return entrants


def build_and_check(entrant: Entrant, peer: Peer, chain: Chain, inputs: tuple[Tensor, ...], reference: Tensor) -> None:
    """Give the entrant its call, if the call returns what it should."""
    try:
        with peer.scope():
            run = peer.build(chain, inputs)
            peer.wait(run())
            check.poison_memory(reference, chain.dtype)
            result = run()
            peer.wait(result)
            error_eps = check.measure_error_eps(peer.to_tensor(result), reference, chain.dtype)
    except Unsupported as reason:
        entrant.leave("unsupported", str(reason))
        return
    except Exception as error:  # Whatever a peer raises is its own result, not the harness's.
        entrant.leave("failed", describe(error))
        return
    entrant.record["error_eps"] = round(error_eps, 3) if error_eps < float("inf") else None
    if error_eps <= chain.tolerance_eps:
        entrant.run = run
    else:
        entrant.leave("wrong", f"{error_eps:.3g} eps from float64, {chain.tolerance_eps} allowed")


def start_sampler(entrant: Entrant, device: torch.device) -> None:
    """Choose how the entrant is timed."""
    peer, run = entrant.peer, entrant.run
    assert peer is not None
    assert run is not None
    try:
        with peer.scope():
            entrant.sampler = timing.make_sampler(run, peer.wait, device, peer.on_torch_stream, peer.capturable)
    except Exception as error:
        entrant.leave("failed", describe(error))


def take_turn(entrant: Entrant, budget_s: float) -> None:
    """Add samples to the entrant's."""
    peer, sampler = entrant.peer, entrant.sampler
    assert peer is not None
    assert sampler is not None
    with peer.scope():
        entrant.samples_us += sampler.sample(budget_s)


def running(entrants: Iterable[Entrant]) -> Iterator[Entrant]:
    """Yield the entrants that still take part."""
    return (entrant for entrant in entrants if entrant.run is not None)


def median_us(entrant: Entrant) -> float:
    """Return the median of the samples so far, in microseconds."""
    return timing.Timing("", tuple(entrant.samples_us)).median_us


def median_of(entrants: Iterable[Entrant], name: str) -> float | None:
    """Return the median of one peer, in microseconds; None if it does not take part."""
    return next((median_us(entrant) for entrant in running(entrants) if entrant.record["peer"] == name), None)


def make_copy(bytes_moved: int, device: torch.device) -> Callable[[], Any]:
    """Return a device copy that reads and writes ``bytes_moved`` bytes in all, into memory that is already there."""
    source = torch.rand(max(1, bytes_moved // 8), device=device)
    return partial(torch.empty_like(source).copy_, source)


def wait_for(device: torch.device) -> timing.Wait:
    """Return a function that blocks until the device is done."""

    def wait(_result: Any) -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    return wait


def measure_host(settings: Settings, peers: dict[str, Peer], absent: dict[str, str], say: Say) -> list[Record]:
    """Time how long one small call keeps Python busy; the first record is one eager ``torch.add``."""
    records: list[Record] = []
    for chain_name in HOST_CHAINS:
        say(f"{chain_name}, host time of one call")
        chain = CHAINS[chain_name]
        inputs = make_inputs(chain, HOST_ELEMENTS, settings.device)
        common: Record = {"chain": chain_name, "elements": HOST_ELEMENTS}
        entrants = enter(settings, chain, inputs, peers, absent, common)
        add = partial(torch.add, inputs[0], inputs[1])
        wait = wait_for(settings.device)
        add_us: list[float] = []
        floor_us: list[float] = []
        floor = find_floor(settings.device)
        turns, budget_s = settings.rounds * HOST_TURNS, settings.budget_s / HOST_TURNS
        for _ in range(turns):
            add_us += timing.sample_host_us(add, wait, settings.device, budget_s)
            if floor is not None:
                floor_us += timing.collect(partial(floor, timing.HOST_CALLS_PER_SAMPLE), budget_s)
            for entrant in running(entrants):
                assert entrant.peer is not None
                assert entrant.run is not None
                with entrant.peer.scope():
                    entrant.samples_us += timing.sample_host_us(
                        entrant.run, entrant.peer.wait, settings.device, budget_s
                    )
        add_timing = timing.Timing("wall", tuple(add_us))
        records.append({**common, "peer": "eager_add", "status": "ok", "time_us": add_timing.to_json()})
        if floor_us:
            driver = timing.Timing("wall", tuple(floor_us))
            ratio = round(driver.median_us / add_timing.median_us, 3)
            floor_record: Record = {**common, "peer": "driver_launch", "status": "ok", "time_us": driver.to_json()}
            records.append({**floor_record, "ratio_to_eager_add": ratio})
        for entrant in running(entrants):
            result = timing.Timing("wall", tuple(entrant.samples_us))
            ratio = round(result.median_us / add_timing.median_us, 3)
            entrant.record.update(status="ok", time_us=result.to_json(), ratio_to_eager_add=ratio)
        records += [entrant.record for entrant in entrants]
        if "fuser" in settings.peers:
            alone = measure_python_launcher(chain_name, HOST_ELEMENTS, settings.device, turns, budget_s)
            records.append({**common, "peer": "fuser_python", **alone})
    return records


def find_floor(device: torch.device) -> Callable[[int], float] | None:
    """Return what times the driver's launch alone, where that can be done."""
    if device.type != "cuda":
        return None
    try:
        return make_driver_loop(device)
    except NoFloorError:
        return None


def describe(error: Exception) -> str:
    """Return the exception's class and the first line of its message, not too long."""
    first_line = next(iter(str(error).splitlines()), "")
    return f"{type(error).__name__}: {first_line}"[:300]


def hide_paths(text: str) -> str:
    """Cut absolute paths down to their last part: a result must not tell how a machine is laid out."""
    return re.sub(r"(?<![\w.])/(?:[^\s/'\":]+/)+", "", text)


def expand_names(wanted: Sequence[str] | None, known: Iterable[str]) -> tuple[str, ...]:
    """Return the wanted names, or all known ones where nothing is said."""
    return tuple(wanted) if wanted else tuple(known)
