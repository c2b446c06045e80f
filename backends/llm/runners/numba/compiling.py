"""How functions become machine code, and what the processor can do."""

from __future__ import annotations

import atexit
import functools
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
from llvmlite import binding
from numba.core import config


def outer(function: Callable[..., Any]) -> Any:
    """Compiles a function that Python calls: without its lock, and without its check of each division for zero."""
    return _compiled(function)


def inner(function: Callable[..., Any]) -> Any:
    """Compiles a function that compiled code alone calls: a way in from Python would take longer to compile than it."""
    return _compiled(function, no_cpython_wrapper=True, no_cfunc_wrapper=True)


def _compiled(function: Callable[..., Any], **options: bool) -> Any:
    # numba reads where to keep machine code when it decorates; others in this process keep theirs elsewhere.
    theirs, config.CACHE_DIR = config.CACHE_DIR, _cache_folder()
    try:
        # A product and a sum may become one instruction, which rounds once.
        return numba.njit(nogil=True, cache=True, error_model="numpy", fastmath={"contract"}, **options)(function)
    finally:
        config.CACHE_DIR = theirs


@functools.cache
def _cache_folder() -> str:
    """Returns where machine code is kept: another place for other kernels, since numba looks at one file's date only.

    It is never inside a model repository: the server takes a new file there for a new version.
    """
    digest = hashlib.sha256(numba.__version__.encode())
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    own = os.environ.get("MODELKILN_CACHE_DIR") or f"{home}/modelkiln"
    folder = Path(own, f"kernels-{digest.hexdigest()[:16]}")
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if os.access(folder, os.W_OK | os.X_OK):
            return str(folder)
    except OSError:
        pass
    temporary = tempfile.mkdtemp(prefix="modelkiln-kernels-")
    atexit.register(shutil.rmtree, temporary, ignore_errors=True)
    return temporary


def compiles() -> bool:
    """Returns whether numba makes machine code at all; NUMBA_DISABLE_JIT says no."""
    return not config.DISABLE_JIT


def has_features(*names: str) -> bool:
    """Returns whether code may use all of these instructions, by LLVM's names."""
    if config.CPU_FEATURES is not None:  # NUMBA_CPU_FEATURES: the user's own choice
        given = config.CPU_FEATURES.split(",")
        return all(f"+{name}" in given for name in names)
    found = binding.get_host_cpu_features()
    return all(found.get(name, False) for name in names)
