"""Reads tritonserver's log: which models load and when, which failed and why, and which lines a person should see."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

_LOADING = re.compile(r'"loading: ([^"]+):(\d+)"')
_LOADED = re.compile(r"""successfully loaded '([^']+)'""")
_FAILED = re.compile(r"""^E.*"failed to load '([^']+)' version (\d+): (.*)"$""")
_POLL_FAILED = re.compile(r"""^E.*"Poll failed for model directory '([^']+)': (.*)"$""")
_PHASE = re.compile(r"modelkiln model=(\S+) phase=(\S+) seconds=(\d+\.?\d*)")  # of backends/phases.py
_FRAME = re.compile(r"^\s+(/[^\n(]+\.py)\((\d+)\):", re.M)
_LEVEL = re.compile(r"^([IWEV])\d{4} ")
# What the server says on every machine without a GPU; none of it matters there.
_ABOUT_NO_GPU = (
    "pinned_memory_manager",
    "cuda_memory_manager",
    "CudaDriverHelper",
    "CUDA driver version is insufficient",
    "DCGM",
    "NVML",
)


@dataclass(frozen=True)
class LoadFailure:
    """Why a model did not load; `version` is empty where the server never came to a version."""

    model: str
    version: str
    reason: str


@dataclass
class ServerLog:
    """What has been read of a server's log so far.

    Attributes:
        loading_at_s, loaded_at_s: when a model's first load began and ended, in seconds after the server's start.
        phases: what its backend reported, seconds by name; of several instances the slowest.
    """

    loading_at_s: dict[str, float] = field(default_factory=dict)
    loaded_at_s: dict[str, float] = field(default_factory=dict)
    phases: dict[str, dict[str, float]] = field(default_factory=dict)
    _failures: dict[str, LoadFailure] = field(default_factory=dict)

    @property
    def loading(self) -> set[str]:
        return set(self.loading_at_s)

    @property
    def loaded(self) -> set[str]:
        return set(self.loaded_at_s)

    def load_s(self, model: str) -> float:
        """Returns how long the model's first load took, in seconds; 0 where it was not seen."""
        loaded, loading = self.loaded_at_s.get(model), self.loading_at_s.get(model)
        return 0.0 if loaded is None or loading is None else loaded - loading

    def read(self, line: str, at_s: float) -> None:
        """Takes in one line, and when it came: seconds after the server's start."""
        line = line.rstrip("\n")
        if match := _LOADING.search(line):
            self.loading_at_s.setdefault(match[1], at_s)
        elif match := _LOADED.search(line):
            self.loaded_at_s.setdefault(match[1], at_s)
        elif match := _PHASE.search(line):
            phases = self.phases.setdefault(match[1], {})
            phases[match[2]] = max(float(match[3]), phases.get(match[2], 0.0))
        elif match := _FAILED.match(line):
            self._failures.setdefault(match[1], LoadFailure(match[1], match[2], one_line(match[3])))
        elif match := _POLL_FAILED.match(line):
            self._failures.setdefault(match[1], LoadFailure(match[1], "", one_line(match[2])))

    @property
    def failures(self) -> list[LoadFailure]:
        """The failures; where models failed by themselves, those that only depend on them are left out."""
        own = [f for f in self._failures.values() if "depends on" not in f.reason]
        return own or list(self._failures.values())


def one_line(reason: str) -> str:
    """Turns the server's escaped, many-lined reason into one line with the place in the model's code."""
    text = reason.replace("\\n", "\n").replace('\\"', '"')
    first = text.strip().split("\n", 1)[0].removeprefix("Internal: ")
    frames = _FRAME.findall(text)
    return f"{first} (at {frames[0][0]}:{frames[0][1]})" if frames else first


def worth_showing(line: str) -> bool:
    """Whether a line is a warning, an error, or a model's own print."""
    if any(word in line for word in _ABOUT_NO_GPU) or _PHASE.search(line):
        return False
    level = _LEVEL.match(line)
    if level:
        return level[1] in "WE"
    # Tables that the server prints at the start, and the empty lines around them.
    return bool(line.strip()) and not line.startswith(("+--", "|"))
