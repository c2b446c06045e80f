"""What stages made, kept between builds: entries by key, written whole or not at all, proved by hash when read.

    <folder>/v1/<kind>/<key>-<variant>/   entry.json and the stage's files
    <folder>/v1/tmp/                      what is being written or removed

An entry is trusted no more than its hashes: one that does not fit them is removed and made again. Files are
not synced: what a power cut leaves half-written is damage like any other.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compiler.errors import UsageError
from compiler.files import file_sha256
from compiler.fingerprint import sha256_json
from compiler.units import bytes_from_text, shown_bytes

SCHEMA = 1
ENTRY_FILE = "entry.json"
DEFAULT_MAX_BYTES = 10 << 30
_STALE_AFTER_S = 24 * 3600  # what a killed build left half-written

Note = Callable[[str], None]


@dataclass(frozen=True)
class Entry:
    """One result.

    Attributes:
        kind: which stage made it.
        model: whose it is, for a person.
        facts: what the stage says of it, plain data.
        num_bytes: of all its files.
        used_at: when it was last written or read, in seconds since the epoch.
    """

    kind: str
    model: str
    folder: Path
    facts: dict[str, Any]
    files: dict[str, dict[str, Any]]
    num_bytes: int
    used_at: float

    def to_json(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "model": self.model,
            "path": str(self.folder),
            "bytes": self.num_bytes,
            "used_at": round(self.used_at),
        }


@dataclass(frozen=True)
class Cache:
    """A folder of results, pruned to `max_bytes` by what was used longest ago."""

    path: Path
    max_bytes: int = DEFAULT_MAX_BYTES

    @property
    def _root(self) -> Path:
        return self.path / f"v{SCHEMA}"

    def find(self, kind: str, key: str, fits: Callable[[dict[str, Any]], bool], note: Note) -> Entry | None:
        """Returns an intact entry for the key whose facts fit, the newest first, or None.

        Args:
            kind: the stage.
            key: the hash of what the stage depends on.
            fits: judges an entry by its facts: what it depends on besides the key.
            note: is told of damage.
        """
        try:
            folders = sorted(self._root.glob(f"{kind}/{key}-*"), key=_used_at, reverse=True)
        except OSError:
            return None
        for folder in folders:
            try:
                entry = _read(folder, kind)
                if not fits(entry.facts):
                    continue
                _prove(entry)
            except FileNotFoundError:
                continue  # another build pruned it
            except (OSError, ValueError) as error:
                note(f"note: a damaged cache entry was ignored and is made again: {error}")
                self._remove(folder)
                continue
            with contextlib.suppress(OSError):  # a read-only cache serves too
                os.utime(folder / ENTRY_FILE)
            return entry
        return None

    def store(self, kind: str, key: str, variant: str, model: str, files: Path, facts: dict[str, Any]) -> str:
        """Keeps copies of a folder's files; returns why that could not be done, or an empty string.

        Two builds may store the same entry at once: one is kept, and both are right.
        """
        size = sum(p.stat().st_size for p in files.iterdir())
        if size > self.max_bytes:
            return f"{shown_bytes(size)} are more than the cache may hold ({shown_bytes(self.max_bytes)})"
        final = self._root / kind / f"{key}-{variant[:16]}"
        try:
            self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
            final.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            staging = self._staging()
            try:
                hashes = {}
                for file in sorted(files.iterdir()):
                    shutil.copyfile(file, staging / file.name)
                    hashes[file.name] = {"bytes": file.stat().st_size, "sha256": file_sha256(file)}
                content = {"kind": kind, "model": model, "facts": facts, "files": hashes}
                document = {"sha256": sha256_json(content), **content}
                (staging / ENTRY_FILE).write_text(json.dumps(document), encoding="utf-8")
                with contextlib.suppress(OSError):  # it is there already
                    os.rename(staging, final)
            finally:
                shutil.rmtree(staging, ignore_errors=True)
            self._prune(keep=final)
        except OSError as error:
            return f"{error.strerror}: {error.filename}"
        return ""

    def entries(self) -> list[Entry]:
        """Returns all readable entries, the last used first; their files are not hashed."""
        found = []
        for folder in self._folders():
            with contextlib.suppress(OSError, ValueError):
                found.append(_read(folder, folder.parent.name))
        return sorted(found, key=lambda e: e.used_at, reverse=True)

    def clear(self) -> tuple[int, int]:
        """Removes every entry and what killed builds left; returns the number of entries and of bytes.

        Raises:
            OSError: an entry cannot be removed.
        """
        folders = self._folders()
        size = sum(map(_num_bytes, folders))
        for folder in folders:
            shutil.rmtree(folder)
        shutil.rmtree(self._root / "tmp", ignore_errors=True)
        return len(folders), size

    def _folders(self) -> list[Path]:
        return [p for p in self._root.glob("*/*-*") if p.parent.name != "tmp" and p.is_dir()]

    def _staging(self) -> Path:
        parent = self._root / "tmp"
        parent.mkdir(exist_ok=True, mode=0o700)
        return Path(tempfile.mkdtemp(dir=parent))

    def _remove(self, folder: Path) -> None:
        """Takes an entry away in one step, so that no reader sees half of it."""
        with contextlib.suppress(OSError):
            grave = self._staging()
            os.rename(folder, grave / folder.name)
            shutil.rmtree(grave, ignore_errors=True)

    def _prune(self, keep: Path) -> None:
        folders = sorted(self._folders(), key=_used_at)
        sizes = {folder: _num_bytes(folder) for folder in folders}
        total = sum(sizes.values())
        for folder in folders:
            if total <= self.max_bytes:
                break
            if folder != keep:
                self._remove(folder)
                total -= sizes[folder]
        for left in (self._root / "tmp").iterdir():
            with contextlib.suppress(OSError):
                if time.time() - left.stat().st_mtime > _STALE_AFTER_S:
                    shutil.rmtree(left, ignore_errors=True)


def cache_from_environment() -> Cache:
    """Returns the cache in MODELKILN_CACHE_DIR, else in the user's cache home, of at most MODELKILN_CACHE_SIZE.

    Raises:
        UsageError: the size is not of the form 10GiB.
    """
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    path = os.environ.get("MODELKILN_CACHE_DIR") or f"{home}/modelkiln"
    text = os.environ.get("MODELKILN_CACHE_SIZE")
    size = bytes_from_text(text) if text else DEFAULT_MAX_BYTES
    if size is None:
        raise UsageError(f"MODELKILN_CACHE_SIZE is {text!r}; allowed: a size with its unit, such as 512MiB or 10GiB")
    return Cache(Path(path).expanduser(), size)


def _read(folder: Path, kind: str) -> Entry:
    """Raises ValueError where the entry's own description is damaged."""
    document = json.loads((folder / ENTRY_FILE).read_text(encoding="utf-8"))
    if not isinstance(document, dict):
        raise ValueError(f"{folder / ENTRY_FILE} is not a mapping")
    expected = document.pop("sha256", None)
    if sha256_json(document) != expected or document["kind"] != kind:
        raise ValueError(f"{folder / ENTRY_FILE} is not what was written (sha256 differs)")
    files = document["files"]
    size = sum(int(f["bytes"]) for f in files.values())
    return Entry(kind, document["model"], folder, document["facts"], files, size, _used_at(folder))


def _prove(entry: Entry) -> None:
    for name, expected in entry.files.items():
        path = entry.folder / Path(name).name
        if not path.is_file():
            raise ValueError(f"{path} is missing")
        if path.stat().st_size != expected["bytes"] or file_sha256(path) != expected["sha256"]:
            raise ValueError(f"{path} is not what was written (sha256 differs)")


def _used_at(folder: Path) -> float:
    try:
        return (folder / ENTRY_FILE).stat().st_mtime
    except OSError:
        return 0.0


def _num_bytes(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):
            total += path.stat().st_size
    return total
