"""Asking torch what it does, whatever modes, transforms and graphs are being made around."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.utils._python_dispatch import _disable_current_modes

__all__ = ["plain_torch"]


@contextmanager
def plain_torch() -> Iterator[None]:
    """Let calls be plain ones, which compute numbers and have gradients."""
    with (
        _disable_current_modes(),
        temporarily_clear_interpreter_stack(),
        torch.inference_mode(False),
        torch.enable_grad(),
    ):
        yield
