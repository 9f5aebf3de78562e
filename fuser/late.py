"""What is imported later than fuser: modules that most programs do not need, and what waits for somebody else's.

Note [Loading later]
Modules of fuser's that a call may be the first to need are imported inside ``with loading()``. A thread that imports
holds locks of Python's, which a process forked meanwhile would wait for: so forks wait for it. As a module's lock is
taken before that of its package, threads that import parts of a package in different orders can wait for each other:
so public names that come later are imported as one (``fuser._later``), the package first.
``loading()`` is never entered while a module of fuser's is imported: there names come from where they are made.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

from fuser.process import Lock, await_before_fork

__all__ = ["loading", "when_imported"]

# Held while modules are imported that come later.
loading = Lock()
await_before_fork(loading)

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
