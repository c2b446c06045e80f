"""The versioned model repository: publish in one step, read back, and know what was tampered with.

A publish is complete or absent. The new state of the model's whole folder is staged beside the
repository on the same filesystem, synced, and exchanged with the old one by a single system call, so
config.pbtxt and the version folder change together even where a server polls.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compiler.errors import EnvironmentLacks, RepositoryError, UsageError, did_you_mean, one_of
from compiler.files import file_sha256
from compiler.spec import MODEL_NAMES_ALLOWED, is_model_name
from compiler.triton_config import CONFIG_FILE, config_from_text
from compiler.triton_install import link_or_copy

MANIFEST_FILE = "manifest.json"
MANIFEST_SCHEMA = 1

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


@dataclass(frozen=True)
class Published:
    """A version that is in the repository."""

    model: str
    version: int
    folder: Path
    manifest: dict[str, Any]


def _any_manifest(manifest: dict[str, Any]) -> None:
    """Refuses nothing; a function with a name, since a repository is passed between processes."""


@dataclass(frozen=True)
class Repository:
    """A folder of models as Triton reads it.

    Attributes:
        accept: is shown the manifest of a version, its files' hashes included, just before it appears; what it raises
            leaves the repository as it was.
    """

    path: Path
    accept: Callable[[dict[str, Any]], None] = _any_manifest

    def models(self) -> list[str]:
        """Returns the names of the model folders; hidden folders are not models."""
        if not self.path.is_dir():
            return []
        return sorted(p.name for p in self.path.iterdir() if p.is_dir() and not p.name.startswith("."))

    def versions(self, model: str) -> list[int]:
        """Returns the version numbers, oldest first; Triton ignores folders that are not numbers."""
        folder = self.path / model
        if not folder.is_dir():
            return []
        return sorted(int(p.name) for p in folder.iterdir() if p.is_dir() and _is_version(p.name))

    def latest(self, model: str) -> Published | None:
        """Returns the newest version that carries a readable manifest, or None."""
        return next(self._published(model), None)

    def manifests(self, model: str) -> Iterator[dict[str, Any]]:
        """Yields the readable manifests of a model, the newest first."""
        return (published.manifest for published in self._published(model))

    def _published(self, model: str) -> Iterator[Published]:
        found = (self.read(model, version) for version in reversed(self.versions(model)))
        return (published for published in found if published)

    def read(self, model: str, version: int) -> Published | None:
        """Returns a version that carries a readable manifest, or None."""
        folder = self.path / model / str(version)
        try:
            manifest = json.loads((folder / MANIFEST_FILE).read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            return None
        if isinstance(manifest, dict) and manifest.get("schema") == MANIFEST_SCHEMA:
            return Published(model, version, folder, manifest)
        return None

    def find(self, reference: str) -> Published:
        """Returns the version that `MODEL` (the newest) or `MODEL:VERSION` names.

        Raises:
            UsageError: lists the models, or the versions, that there are.
        """
        model, _, version = reference.partition(":")
        if model not in self.models():
            known = self.models()
            raise UsageError(f"no model {model!r} in {self.path}{did_you_mean(model, known)}; it has: {one_of(known)}")
        if version:
            if version not in map(str, self.versions(model)):
                have = ", ".join(map(str, self.versions(model)))
                raise UsageError(f"{model} has no version {version!r}; it has: {have}")
            found = self.read(model, int(version))
        else:
            found = self.latest(model)
        if found is None:
            raise RepositoryError(f"{reference} was not made by `compile build`: it has no readable {MANIFEST_FILE}")
        return found

    def check_publishable(self, model: str) -> None:
        """Refuses a name that could leave the repository, and a model folder that `compile` did not make.

        The config.pbtxt of such a folder is somebody's work, and publishing would replace it.
        """
        require_model_name(model)
        folder = self.path / model
        if folder.exists() and self.latest(model) is None and any(folder.iterdir()):
            raise RepositoryError(
                f"{folder} exists and was not made by `compile build` (no version has a {MANIFEST_FILE})",
                hint="give the model another name in the spec, or move that folder away",
            )

    def damage(self, published: Published) -> list[str]:
        """Compares every file with its hash in the manifest; returns what is wrong, in words."""
        problems = []
        files = published.manifest.get("files")
        if not isinstance(files, dict):
            return [f"{MANIFEST_FILE} lists no files"]
        for name, expected in sorted(files.items()):
            path = published.folder / str(name)
            if not isinstance(expected, dict):
                problems.append(f"{MANIFEST_FILE} is not one that `compile build` wrote")
            elif path.resolve().parent != published.folder.resolve():
                problems.append(f"{name!r} in {MANIFEST_FILE} is not a file of the version folder")
            elif not path.is_file():
                problems.append(f"{name} is missing")
            elif path.stat().st_size != expected.get("bytes") or file_sha256(path) != expected.get("sha256"):
                problems.append(f"{name} is not the file that was published (sha256 differs)")
        config = self.path / published.model / CONFIG_FILE
        if not config.is_file():
            problems.append(f"{CONFIG_FILE} is missing")
        return problems

    def publish(self, model: str, config_text: str, files: Path, manifest: dict[str, Any]) -> Published:
        """Publishes a new version: the files of a folder, a manifest with their hashes, and config.pbtxt.

        The version number is one above the highest there is. Two publishers of one model take turns. A model that is
        pinned keeps its config.pbtxt, and with it what is served; that of the new version is in its manifest.
        """
        require_model_name(model)
        self.path.mkdir(parents=True, exist_ok=True)
        with self._staging() as staging:
            version = max(self.versions(model), default=0) + 1
            staged = staging / model
            if (self.path / model).is_dir():
                # Hard links: older versions cost nothing, and files are never written in place.
                shutil.copytree(self.path / model, staged, copy_function=link_or_copy, symlinks=True)
                (staged / CONFIG_FILE).unlink(missing_ok=True)
            else:
                staged.mkdir()
            folder = staged / str(version)
            folder.mkdir()
            for file in sorted(files.iterdir()):
                shutil.copyfile(file, folder / file.name)
            hashes = {p.name: {"bytes": p.stat().st_size, "sha256": file_sha256(p)} for p in sorted(folder.iterdir())}
            manifest = {
                "schema": MANIFEST_SCHEMA,
                "model": model,
                "version": version,
                **manifest,
                "config": config_text,
                "files": hashes,
            }
            (folder / MANIFEST_FILE).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
            if self.pinned(model):
                config_text = (self.path / model / CONFIG_FILE).read_text(encoding="utf-8")
            (staged / CONFIG_FILE).write_text(config_text, encoding="utf-8")
            self.accept(manifest)
            _sync_tree(staged)
            _swap(staged, self.path / model)
            _sync(self.path)
        return Published(model, version, self.path / model / str(version), manifest)

    def pinned(self, model: str) -> list[int]:
        """Returns the versions that a model's config.pbtxt names as the only ones to be served; none where it does not.

        See `compiler.pins`.
        """
        try:
            config = config_from_text((self.path / model / CONFIG_FILE).read_text(encoding="utf-8"), model)
        except (OSError, UnicodeDecodeError, RepositoryError):
            return []  # `compile check` is what complains of it
        return sorted(config.version_policy.specific.versions)

    def replace_config(self, model: str, config_text: str) -> None:
        """Puts another config.pbtxt in the place of a published model's, in one step."""
        require_model_name(model)
        with self._staging() as staging:
            staged = staging / CONFIG_FILE
            staged.write_text(config_text, encoding="utf-8")
            _sync(staged)
            os.replace(staged, self.path / model / CONFIG_FILE)
            _sync(self.path / model)

    @contextlib.contextmanager
    def _staging(self) -> Iterator[Path]:
        """Yields an empty folder on the repository's filesystem, out of Triton's sight, under a lock.

        Triton takes every folder in a repository for a model, hidden ones too, so the staging folder
        stands beside the repository. What a killed publish left there is removed by the next one.
        """
        path = self.path.resolve()
        beside = path.parent
        if beside.stat().st_dev != path.stat().st_dev or not os.access(beside, os.W_OK):
            raise EnvironmentLacks(
                f"{beside} is not writable or on another filesystem than {path.name}/: "
                "a version cannot be staged beside the repository and moved in one step",
                hint="use a repository in a folder of its own, such as /srv/triton/model_repository",
            )
        with (beside / f".{path.name}.lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            for left in beside.glob(f".{path.name}.staging-*"):
                shutil.rmtree(left, ignore_errors=True)
            staging = Path(tempfile.mkdtemp(prefix=f".{path.name}.staging-", dir=beside))
            try:
                yield staging
            finally:
                shutil.rmtree(staging, ignore_errors=True)


def require_model_name(name: str) -> None:
    """Raises UsageError for a name that is no plain folder's, or that Triton cannot load."""
    if not is_model_name(name):
        raise UsageError(f"the model's name is {name!r}; allowed: {MODEL_NAMES_ALLOWED}")


def _is_version(name: str) -> bool:
    return name.isascii() and name.isdigit() and not name.startswith("0")


def _swap(staged: Path, final: Path) -> None:
    """Puts `staged` in the place of `final` in one step; what was there is left in the place of `staged`."""
    if not final.exists():
        os.rename(staged, final)
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.renameat2(_AT_FDCWD, os.fsencode(staged), _AT_FDCWD, os.fsencode(final), _RENAME_EXCHANGE) == 0:
        return
    code = ctypes.get_errno()
    if code not in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
        raise OSError(code, os.strerror(code), str(final))
    _swap_without_exchange(staged, final)


def _swap_without_exchange(staged: Path, final: Path) -> None:
    """For filesystems that cannot exchange: adds the new version folder alone, if the config is unchanged."""
    if (staged / CONFIG_FILE).read_bytes() != (final / CONFIG_FILE).read_bytes():
        raise EnvironmentLacks(
            f"the filesystem of {final} cannot exchange two folders in one step, and config.pbtxt changes",
            hint=f"stop the server, remove {final}, and build again; or use ext4, xfs, btrfs or tmpfs",
        )
    for folder in staged.iterdir():
        if folder.is_dir() and not (final / folder.name).exists():
            os.rename(folder, final / folder.name)


def _sync_tree(root: Path) -> None:
    for folder, _, names in os.walk(root):
        for name in names:
            _sync(Path(folder, name))
        _sync(Path(folder))


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
