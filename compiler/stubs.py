"""The processes in which tritonserver runs models in Python: found in the process table, watched, ended."""

from __future__ import annotations

import contextlib
import os
import re
import signal
from dataclasses import dataclass
from pathlib import Path

from compiler.triton_install import STUB_FILE

_STATE, _SESSION, _STARTED = 0, 3, 19  # of /proc/PID/stat, counted behind the process's name
# What the server hands to a stub: itself, model.py, its region of /dev/shm, ..., the instance's name, a folder.
_MODEL_FILE, _REGION, _INSTANCE, _COUNT = 1, 2, 8, 9
# The instance is named after the model, the group's and its own number, and the GPU.
_INSTANCE_NAME = re.compile(r"(.+)_\d+_\d+(?:_gpu\d+)?")


@dataclass(frozen=True)
class Stub:
    """One process of one instance of a model.

    Attributes:
        started: when, in the kernel's ticks: a process id may be used again.
        model: empty where an instance group has a name of its own and no path tells the model.
        region: the name of its file in /dev/shm.
    """

    pid: int
    started: str
    model: str
    region: str

    @property
    def alive(self) -> bool:
        fields = _stat(self.pid)
        return fields is not None and fields[_STATE] != "Z" and fields[_STARTED] == self.started

    def end(self) -> None:
        """Ends the process, and removes what it shared."""
        if self.alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
        self.remove_region()

    def remove_region(self) -> None:
        """Removes the name of its shared memory; whoever still has it mapped keeps it."""
        with contextlib.suppress(FileNotFoundError):
            Path("/dev/shm", self.region).unlink()


def living_stubs(server_pid: int) -> frozenset[Stub]:
    """Returns the stubs of the server that leads session `server_pid`."""
    found = set()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        fields = _stat(int(entry.name))
        if fields is None or fields[_STATE] == "Z" or int(fields[_SESSION]) != server_pid:
            continue
        with contextlib.suppress(OSError):
            arguments = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
            if len(arguments) > _COUNT and Path(arguments[0]).name == STUB_FILE:
                found.add(Stub(int(entry.name), fields[_STARTED], _model(arguments), arguments[_REGION].strip("/")))
    return frozenset(found)


def _model(arguments: list[str]) -> str:
    """Returns the model of a stub: from the path of its own model.py, or the name of its instance."""
    path = Path(arguments[_MODEL_FILE])
    if path.parent.name.isdigit():  # repository/MODEL/VERSION/model.py; a backend's has no version
        return path.parent.parent.name
    match = _INSTANCE_NAME.fullmatch(arguments[_INSTANCE])
    return match[1] if match else ""


def _stat(pid: int) -> list[str] | None:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
