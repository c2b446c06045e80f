"""What can be seen of a server from outside: its metrics, its processes, its shared memory."""

from __future__ import annotations

import os
import re
import urllib.request
from pathlib import Path

from compiler.shared_memory import shared_memory_prefix
from tests.chaos.model import MODEL


def kv_blocks(metrics_url: str, state: str = "free") -> int:
    """Returns the model's blocks in that state."""
    with urllib.request.urlopen(metrics_url, timeout=10) as response:
        text = response.read().decode()
    for line in text.splitlines():
        if line.startswith("modelkiln:kv_blocks{") and f'state="{state}"' in line and f'"{MODEL}"' in line:
            return int(float(line.rpartition(" ")[2]))
    raise AssertionError(f"no modelkiln:kv_blocks of {MODEL}: {re.findall('modelkiln:kv.*', text)}")


def rss_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def triton_pid(serve_pid: int) -> int:
    """Returns the tritonserver that a `compile serve` runs now, 0 where it is starting another."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                name, _, rest = (entry / "stat").read_text().partition("(")[2].rpartition(")")
            except OSError:
                continue
            if name == "tritonserver" and int(rest.split()[1]) == serve_pid:
                return int(entry.name)
    return 0


def regions(serve_pid: int) -> set[str]:
    """Returns the names in /dev/shm that belong to a `compile serve`."""
    return {path.name for path in Path("/dev/shm").glob(shared_memory_prefix(serve_pid) + "*")}


def processes_with(variable: str) -> set[int]:
    """Returns the living processes whose environment holds `NAME=value`."""
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if variable.encode() in (entry / "environ").read_bytes().split(b"\0"):
                    found.add(int(entry.name))
            except OSError:
                continue
    return found
