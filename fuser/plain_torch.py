"""Asking torch what it does, whatever modes, transforms and graphs are being made around."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.utils._python_dispatch import _disable_current_modes

__all__ = ["plain_torch", "unwatched"]


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


@contextmanager
def unwatched() -> Iterator[None]:
    """Let what is asked while a call is planned be answered by torch itself, of tensors that are no part of the call.

    Modes around (fake tensors', a default device's, AOTAutograd's while it traces) would make others of them, or refuse
    them, and have errors of their own where torch says that there is no such view.
    """
    # Disabling modes of dispatch imports modules, which the interpreter's end does not allow: only where there is one.
    dispatch_modes = _disable_current_modes() if torch._C._len_torch_dispatch_stack() else nullcontext()
    with dispatch_modes, torch._C._DisablePythonDispatcher(), torch._C.DisableTorchFunction():
        yield
