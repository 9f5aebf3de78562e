"""Which tuning each CUDA kernel runs with: the default, or the winner of a search, kept in memory and on disk.

A tuning changes how fast a kernel is and never what it returns, so that threads need not agree on one.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from fuser import disk_cache
from fuser._version import __version__
from fuser.access import Tuning
from fuser.disk_cache import CacheKey
from fuser.kernel_spec import ArgSpec, KernelSpec
from fuser.process import Lock

__all__ = ["Candidate", "candidates", "is_known", "keep", "latest", "record", "tuned", "use"]

BLOCKS = (128, 256, 512)
UNROLLS = (1, 2, 4)
TILES = (32, 64)

_LATEST = CacheKey.build(("latest tuning",), ())
_lock = Lock()
# What searches found, what the disk holds (None: nothing), and what a search tries just now.
_known: dict[Candidate, Tuning | None] = {}
_tried: dict[Candidate, Tuning] = {}
_records: list[list[Candidate]] = []


class Candidate(NamedTuple):
    """A kernel that can be tuned: one layout class of one group on one kind of GPU."""

    # Functors, for people.
    names: str
    key: int
    # With the default tuning.
    args: ArgSpec
    # The GPU's name.
    device: str

    @property
    def cache_key(self) -> CacheKey:
        """Under which the winner is kept on disk."""
        return CacheKey.build(("tuning", __version__, str(self.key), str(self.args), self.device), ())


def tuned(spec: KernelSpec, args: ArgSpec, device: str) -> ArgSpec:
    """Return the ArgSpec that a kernel is made from: with the tuning that is tried or known, if there is one."""
    names = ", ".join(dict.fromkeys(item.function.name for item in spec.group.applications))
    candidate = Candidate(names, spec.key, args, device)
    with _lock():
        for record in _records:
            record.append(candidate)
        tuning = _tried.get(candidate)
        is_known = tuning is not None or candidate in _known
    if not is_known:
        found = _read(candidate)
        with _lock():
            _known.setdefault(candidate, found)
    return args._replace(tuning=tuning or _known.get(candidate) or args.tuning)


def is_known(candidate: Candidate) -> bool:
    """Whether a search has found a winner for this kernel, now or in an earlier process."""
    return _known.get(candidate) is not None


def keep(candidate: Candidate, tuning: Tuning) -> None:
    """Use this tuning from now on, also in later processes."""
    with _lock():
        _known[candidate] = tuning
    disk_cache.write(candidate.cache_key, json.dumps(tuning._asdict()).encode())
    disk_cache.write(_LATEST, os.urandom(8))


def latest() -> str:
    """Return what is another text after each search: what was planned before may have other tunings."""
    return (disk_cache.read(_LATEST) or b"").hex()


@contextmanager
def use(candidate: Candidate, tuning: Tuning) -> Iterator[None]:
    """Try a tuning: plans made inside run the kernel with it."""
    with _lock():
        _tried[candidate] = tuning
    try:
        yield
    finally:
        with _lock():
            _tried.pop(candidate, None)


@contextmanager
def record() -> Iterator[list[Candidate]]:
    """Collect the kernels that are planned inside, of any thread."""
    seen: list[Candidate] = []
    with _lock():
        _records.append(seen)
    try:
        yield seen
    finally:
        with _lock():
            _records[:] = [other for other in _records if other is not seen]


def candidates(args: ArgSpec) -> tuple[Tuning, ...]:
    """Return the tunings to try for a kernel, its default first."""
    found = [args.tuning]
    if args.rows is not None:
        # The other numbers follow from the length of the rows. What blocks have of a row or of columns is a block's, as
        # are the threads that torch's order gives columns.
        is_free = not (args.tuning.piece or args.tuning.is_held or args.rows.pieces or args.tuning.cluster > 1)
        is_free = is_free and not (args.rows.order and args.rows.is_across)
        most = args.tuning.block if args.rows.is_across else BLOCKS[-1]
        blocks = [block for block in BLOCKS if is_free and block <= most and block % args.tuning.team == 0]
        found += [args.tuning._replace(block=block) for block in blocks]
    elif args.tuning.tile:
        widest = max([args.vector, *(access.width for access in args.accesses if access.is_transposed)])
        sides = [side for side in TILES if side <= args.tuning.tile]
        tiled = [Tuning(block=block, tile=side) for side in sides for block in BLOCKS]
        found += [tuning for tuning in tiled if tuning.share >= widest]
    else:
        # What repeats is read once for all vectors of a thread where a block takes whole periods, of which the text has
        # no number: those of the default one are whole in multiples of it.
        is_free = args.tuning.is_stacked or not any(access.is_shared for access in args.accesses)
        found += [
            args.tuning._replace(block=block, unroll=unroll)
            for block in BLOCKS
            for unroll in UNROLLS
            if is_free or unroll == 1 or block % args.tuning.block == 0
        ]
    return tuple(dict.fromkeys(found))


def _read(candidate: Candidate) -> Tuning | None:
    payload = disk_cache.read(candidate.cache_key)
    if payload is None:
        return None
    try:
        found = Tuning(**json.loads(payload))
    except (ValueError, TypeError):
        return None
    # What another state of this code kept must not make a kernel that does not compile.
    return found if found in candidates(candidate.args) else None
