"""What needs a process of its own: a module of this package that prints its record as the last line."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

TIMEOUT_S = 400
ROOT = Path(__file__).resolve().parent.parent


def run_apart(module: str, options: Mapping[str, Any], environment: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Run ``python -m module --name value ...`` and return its record, or one that says why there is none."""
    arguments = [str(part) for item in options.items() for part in (f"--{item[0]}", item[1])]
    try:
        done = subprocess.run(
            [sys.executable, "-m", module, *arguments],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        return {"status": "failed", "reason": f"not done after {TIMEOUT_S} s"}
    if done.returncode != 0:
        return {"status": "failed", "reason": (done.stderr.strip().splitlines() or ["no message"])[-1]}
    record: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return record
