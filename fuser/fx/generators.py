"""Random number generators: where they were before a call, and what the call drew, once more."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ["State", "drawing_again", "find_states", "gpu_generators"]

State = tuple[torch.Generator, torch.Tensor]


def gpu_generators() -> tuple[torch.Generator, ...]:
    """Return torch's own generators of all GPUs, if any is in use."""
    generators: Any = torch.cuda.default_generators if torch.cuda.is_initialized() else ()  # type: ignore[no-untyped-call]
    return tuple(generators)


def find_states(inputs: Iterable[Any]) -> list[State] | None:
    """Return where the generators are that a call with these tensors may draw from.

    None while a CUDA graph is recorded: in its replays they are elsewhere.
    """
    slots = {item.device.index for item in inputs if isinstance(item, torch.Tensor) and item.is_cuda}
    if slots and torch.cuda.is_current_stream_capturing():
        return None
    generators = [torch.default_generator, *(gpu_generators()[slot] for slot in slots)]
    return [(item, item.get_state()) for item in generators]


@contextmanager
def drawing_again(states: Sequence[State]) -> Iterator[None]:
    """Draw inside what was drawn from these states on; then go on from where the generators were."""
    before = [(generator, generator.get_state()) for generator, _ in states]
    try:
        for generator, state in states:
            generator.set_state(state)
        yield
    finally:
        for generator, state in before:
            generator.set_state(state)
