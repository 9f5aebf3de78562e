"""Everybody who takes part, in the order of the reports. No peer's library is imported before it is asked for."""

from __future__ import annotations

from benchmarks.peers.array_peers import CupyElementwise, CupyFuse, Jax, Numba, Numexpr
from benchmarks.peers.base import Absent, Peer, Unsupported
from benchmarks.peers.fuser_peers import Fuser, FuserFast, FuserOut, FuserPrecise, FuserUnfused
from benchmarks.peers.torch_peers import Eager, Inductor, Jiterator, JiteratorMerged
from benchmarks.peers.triton_peer import Triton

__all__ = ["PEERS", "Absent", "Peer", "Unsupported"]

PEERS: dict[str, type[Peer]] = {
    peer.name: peer
    for peer in (
        Eager,
        FuserUnfused,
        Fuser,
        FuserOut,
        FuserFast,
        FuserPrecise,
        Jiterator,
        JiteratorMerged,
        Inductor,
        Triton,
        CupyElementwise,
        CupyFuse,
        Jax,
        Numexpr,
        Numba,
    )
}
