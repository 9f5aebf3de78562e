"""What fuser says while it works, by Python's ``logging``: a logger ``fuser.NAME`` for each artifact.

A program sets levels and handlers as it does for its other loggers; everything is said at level DEBUG. ``FUSER_LOGS``
(``fuser.config.logs``) names artifacts that are written to stderr, whatever the program does with its loggers.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Collection
from typing import TextIO

__all__ = ["ARTIFACTS", "say", "show", "wants"]

ARTIFACTS = {
    "functor": "the text of each functor, when it is created",
    "group": "each fusion group, when it is registered",
    "node": "which nodes of an FX graph each group stands for",
    "spec": "what a kernel is specialised on: dtypes and layouts",
    "source": "the text of each kernel",
    "compile": "each kernel that is ready: for what, after how long",
    "order": "whether torch has the order of a reduction that a kernel keeps",
    "tuning": "what a search for the fastest tuning measured",
    "fallback": "each call that runs in eager torch, and why; such calls then take the long way",
    "launch": "each launch; calls then take the long way",
}
_LOGGERS = {name: logging.getLogger(f"fuser.{name}") for name in ARTIFACTS}


class _ToStderr(logging.StreamHandler[TextIO]):
    @property
    def stream(self) -> TextIO:
        # Whatever it is by now: notebooks and tests put others in its place, and close those that were there.
        return sys.stderr

    @stream.setter
    def stream(self, value: TextIO) -> None:
        pass

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - logging's name
        # It is about stderr, where nobody would read of it; a call is not to fail for that.
        pass


# No logger's: with a level for it, the program's handlers would write all of it a second time.
_handler = _ToStderr()
_handler.setFormatter(logging.Formatter("--- %(name)s\n%(message)s"))
_shown: set[str] = set()


def wants(name: str) -> bool:
    """Whether anybody listens to an artifact: ask before making a text that takes time."""
    return name in _shown or _LOGGERS[name].isEnabledFor(logging.DEBUG)


def say(name: str, text: str) -> None:
    """Tell an artifact's logger, and stderr if it is shown there."""
    logger = _LOGGERS[name]
    if name in _shown:
        _handler.handle(logging.makeLogRecord({"name": logger.name, "msg": text}))
    # As an argument: a text may have percent signs.
    logger.debug("%s", text)


def show(names: Collection[str]) -> None:
    """Write these artifacts to stderr, and no others."""
    # Not cleared: other threads say things meanwhile.
    _shown.intersection_update(names)
    _shown.update(names)
