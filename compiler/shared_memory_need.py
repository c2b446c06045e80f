"""How much of /dev/shm a repository's models take before the first request: Triton's Python stubs die without it."""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compiler.errors import ModelkilnError
from compiler.repository import Repository
from compiler.triton_config import CONFIG_FILE, config_from_text, served_versions

SHARED_MEMORY = Path("/dev/shm")
MORE_SHARED_MEMORY = "docker run --shm-size=1g ..., or mount -o remount,size=1g /dev/shm"
_BYTES_PER_INSTANCE = 1 << 20  # Triton's own default
_SIZE_FLAG = re.compile(r"--backend-config=python,shm-default-byte-size=(\d+)")


@dataclass(frozen=True)
class SharedMemoryNeed:
    """What the instances of all models take at load; requests and answers come on top of it."""

    instances: int
    bytes_each: int

    @property
    def total_bytes(self) -> int:
        return self.instances * self.bytes_each

    def beside(self, free: int) -> str:
        """Returns it in words, beside the bytes that are free."""
        needed = f"the repository's {self.instances} instances need {self.total_bytes >> 20} MiB and room for tensors"
        return f"{free >> 20} MiB free; {needed}"


def shared_memory_need(repository: Repository, server_flags: Sequence[str] = ()) -> SharedMemoryNeed:
    """Adds up all instances of all models.

    Args:
        server_flags: of tritonserver; one of them may set the size of an instance's region.
    """
    instances = 0
    for name in repository.models():
        try:
            config = config_from_text((repository.path / name / CONFIG_FILE).read_text(encoding="utf-8"), name)
        except (OSError, UnicodeDecodeError, ModelkilnError):
            continue  # `compile check` is what complains of it
        if config.platform != "ensemble":
            versions = len(served_versions(config, repository.versions(name))) or 1
            instances += versions * (sum(_count(group) for group in config.instance_group) or 1)
    sizes = [int(match[1]) for flag in server_flags if (match := _SIZE_FLAG.fullmatch(flag))]
    return SharedMemoryNeed(instances, sizes[-1] if sizes else _BYTES_PER_INSTANCE)


def shared_memory_warning(repository: Repository, server_flags: Sequence[str]) -> str:
    """Returns what is to be said before a server starts whose stubs would not find enough, or an empty string."""
    need = shared_memory_need(repository, server_flags)
    free = shutil.disk_usage(SHARED_MEMORY).free if SHARED_MEMORY.is_dir() else 0
    if free >= need.total_bytes:
        return ""
    return f"/dev/shm is too small: {need.beside(free)}; the models' processes will die: {MORE_SHARED_MEMORY}"


def _count(group: Any) -> int:
    """Returns the instances of a group: so many on each of its GPUs."""
    return int(max(group.count, 1) * max(len(group.gpus), 1))
