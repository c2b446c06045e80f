"""How many cores this process may use: what the scheduler allows it, and what its container is granted."""

from __future__ import annotations

import math
import os
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")


def available_cores(cgroup: Path = _CGROUP) -> int:
    """Returns the number of cores; a container's quota (docker run --cpus 2.5) counts, rounded up.

    More threads than granted cores would use up the quota in a burst and then be stopped together.
    """
    cores = len(os.sched_getaffinity(0))
    granted = _quota(cgroup)
    return cores if granted is None else max(1, min(cores, math.ceil(granted)))


def _quota(cgroup: Path) -> float | None:
    """Returns the cores that a control group is granted, of version 2 or 1 as it is mounted in a container."""
    try:
        quota, period = (cgroup / "cpu.max").read_text(encoding="ascii").split()
    except (OSError, ValueError):
        try:
            quota, period = ((cgroup / "cpu" / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        except OSError:
            return None
    try:
        return float(quota) / float(period) if float(quota) > 0 and float(period) > 0 else None
    except ValueError:  # "max"
        return None
