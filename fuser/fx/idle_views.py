"""Views of views that show what the first of them looked at, as the transpose of a transpose: dropped.

AOTAutograd writes each step of a derivative by itself: a linear layer is turned six times, where two are needed. Each
is a call that keeps the host from the next launch.
"""

from __future__ import annotations

import torch
from torch import fx

from fuser.fx.nodes import is_static

__all__ = ["drop_idle_views"]

_ATEN = torch.ops.aten
_VIEWS = frozenset({
    _ATEN.t.default, _ATEN.transpose.int, _ATEN.permute.default, _ATEN.view.default, _ATEN._unsafe_view.default,
    _ATEN.expand.default, _ATEN.unsqueeze.default, _ATEN.squeeze.dim, _ATEN.squeeze.dims, _ATEN.select.int,
    _ATEN.slice.Tensor,
})  # fmt: skip


def drop_idle_views(graph: fx.Graph) -> None:
    """Let all read a tensor itself that is read through views which show it as it is.

    What a graph returns stays another tensor than its arguments and than what else it returns.
    """
    views = [node for node in graph.nodes if node.target in _VIEWS]
    for node in views:
        source = _find_same(node)
        is_returned = any(user.op == "output" for user in node.users)
        if source is None or (is_returned and _is_seen(source)):
            continue
        node.replace_all_uses_with(source)
    for node in reversed(views):
        if not node.users:
            graph.erase_node(node)


def _find_same(node: fx.Node) -> fx.Node | None:
    # What it is a view of, and lies as it does.
    wanted, source = node.meta.get("val"), node
    while source.target in _VIEWS:
        source = source.all_input_nodes[0]
        if _lies_like(source.meta.get("val"), wanted):
            return source
    return None


def _lies_like(value: object, view: object) -> bool:
    # Within what it looks at, a view of the same sizes and strides can only begin where that does.
    if not (is_static(value) and is_static(view)):
        return False
    return value.shape == view.shape and value.stride() == view.stride()


def _is_seen(source: fx.Node) -> bool:
    # Whether others have a tensor already, or what it is a view of.
    return source.op == "placeholder" or source.target in _VIEWS or any(user.op == "output" for user in source.users)
