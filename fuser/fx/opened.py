"""torch's losses that are Python functions of a few calls: traced through, as a user's function is."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import torch.nn.functional as F  # noqa: N812 - the name everybody uses

__all__ = ["OPENED", "opened"]

# They look at dimensions and arguments, at no sizes: which call of torch's each is holds for other sizes, too.
OPENED: frozenset[Any] = frozenset((
    F.kl_div, F.poisson_nll_loss, F.hinge_embedding_loss, F.soft_margin_loss, F.margin_ranking_loss,
    F.multilabel_soft_margin_loss, F.cosine_embedding_loss, F.triplet_margin_loss,
))  # fmt: skip


@functools.cache
def opened(function: types.FunctionType) -> Callable[..., Any]:
    """Return a function of ``OPENED`` that takes symbols for tensors: else it hands itself over to their class."""
    asks = {name: lambda *_: False for name in vars(F) if name.startswith("has_torch_function")}
    made = types.FunctionType(
        function.__code__, vars(F) | asks, function.__name__, function.__defaults__, function.__closure__
    )
    made.__kwdefaults__ = function.__kwdefaults__
    return made
