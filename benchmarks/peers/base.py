"""What a peer is."""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import Any, ClassVar

import torch
from torch import Tensor

from benchmarks.chains import Chain


class Absent(Exception):  # noqa: N818 - a state, not an error
    """The peer cannot run here at all; the message says why."""


class Unsupported(Exception):  # noqa: N818 - a state, not an error
    """The peer cannot run this chain; the message says why."""


class Peer(ABC):
    """One way to run a chain. Made for one device; a new object shares nothing with earlier ones."""

    name: ClassVar[str]
    label: ClassVar[str]
    # The devices the peer can run on.
    devices: ClassVar[tuple[str, ...]] = ("cpu", "cuda")
    # Whether the work goes to torch's current stream, where events can time it.
    on_torch_stream: ClassVar[bool] = True
    # Whether calls can be captured in a CUDA graph.
    capturable: ClassVar[bool] = True

    def __init__(self, device: torch.device) -> None:
        """Import the peer's library.

        Raises:
            Absent: the library is not installed or does not serve this device.
        """
        if device.type not in self.devices:
            raise Absent(f"does not run on {device.type}")
        self.device = device
        self.load()

    def load(self) -> None:  # noqa: B027 - optional
        """Import what ``build`` needs; raises Absent."""

    @abstractmethod
    def build(self, chain: Chain, inputs: tuple[Tensor, ...]) -> Callable[[], Any]:
        """Return a call that runs the chain on the inputs and returns a new result.

        Compilation may happen here or in the first call.

        Raises:
            Unsupported: the peer has no way to run this chain.
        """

    def to_tensor(self, result: Any) -> Tensor:
        """Return a result of the built call as a tensor on the peer's device."""
        tensor: Tensor = result
        return tensor

    def wait(self, result: Any) -> None:  # noqa: ARG002 - JAX waits for it
        """Block until a result of the built call is ready."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def scope(self) -> AbstractContextManager[Any]:
        """Return the context that building and calling happen in."""
        return nullcontext()


def import_library(name: str) -> ModuleType:
    """Import a peer's library.

    Raises:
        Absent: it is not installed, or does not load.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise Absent(f"{name} cannot be imported: {error}") from error
