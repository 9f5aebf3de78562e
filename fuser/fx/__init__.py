"""torch.fx: which nodes fuse (partition), how fusion nodes take their place (passes), torch.compile (backend)."""

from fuser.fx.fusion_node import FusionModule
from fuser.fx.passes import FusionPass, fuse_graph

__all__ = ["FusionModule", "FusionPass", "fuse_graph"]


def __dir__() -> list[str]:
    return __all__
