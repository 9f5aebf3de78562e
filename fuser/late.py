"""What is done when somebody else's module is imported: fuser itself imports none that takes long."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

__all__ = ["when_imported"]

_waiting: dict[str, Callable[[], None]] = {}


def when_imported(name: str, then: Callable[[], None]) -> None:
    """Call ``then`` once a module has been imported: now, if it is there already.

    Args:
        name: full name of a module in a file.
        then: may import it; what it raises leaves the import.
    """
    if name in sys.modules:
        then()
        return
    if not _waiting:
        sys.meta_path.insert(0, _Finder)
    _waiting[name] = then


class _Finder:
    # Finds the modules that are waited for where Python does, with something to do after they have run.
    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        then = _waiting.get(name)
        found = PathFinder.find_spec(name, path, target) if then is not None else None
        if then is None or found is None or found.loader is None:
            return None
        execute = found.loader.exec_module

        def execute_and_more(module: ModuleType) -> None:
            execute(module)
            if _waiting.pop(name, None):
                then()

        found.loader.exec_module = execute_and_more  # type: ignore[method-assign]
        return found
