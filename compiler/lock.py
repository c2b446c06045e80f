"""`SPEC.lock`: what a version was built from and what came out, so that another machine builds exactly that, or says
why not.

    compile build spec.yaml --lock      writes it       compile build spec.yaml --locked      keeps to it
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compiler.errors import ModelkilnError, UsageError
from compiler.fingerprint import cpu_description
from compiler.precision.search import SearchResult, search_from_json
from compiler.precision.support import PRECISIONS
from compiler.recorded import REFERENCE_FILE
from compiler.targets.registry import TARGET_NAMES, target_named

SCHEMA = 1
MAX_BYTES = 16 << 20
_ABSENT = "nothing"


class LockDiffers(ModelkilnError):
    """A build would not be the one that was locked."""

    exit_code = 1
    kind = "locked"

    def __init__(self, path: Path, differences: list[str]) -> None:
        shown = "\n  ".join(differences)
        super().__init__(
            f"{path.name} does not allow this build:\n  {shown}",
            hint="install what it names (pip install -c constraints.txt ...), or write it anew: compile build --lock",
        )
        self.done = {"differences": differences}


@dataclass(frozen=True)
class Lock:
    """A lock file that was read.

    Attributes:
        document: as `document_from_manifest` makes it.
    """

    path: Path
    document: dict[str, Any]

    @property
    def choice(self) -> tuple[str, str] | None:
        """The target and the precision; None for what was not compiled."""
        chosen = self.document["choice"]
        return (str(chosen["target"]), str(chosen["precision"])) if chosen else None

    @property
    def search(self) -> SearchResult | None:
        """What the search for nodes to hold found; None where there was none, or it is not as it was written."""
        try:
            return search_from_json(self.document["search"])
        except (KeyError, TypeError):
            return None

    def require_inputs(self, made_from: Mapping[str, Any], code: Mapping[str, str], spec: Mapping[str, Any]) -> None:
        """Refuses to start where something that the build reads is not what was locked.

        Raises:
            LockDiffers: with each difference.
        """
        target = self.choice[0] if self.choice else None
        now = {"spec": spec, "made_from": _compared(made_from, target), "code": dict(code)}
        self._refuse(differences({key: self.document[key] for key in now}, now))

    def require_result(self, manifest: Mapping[str, Any]) -> None:
        """Refuses a version, before it is published, that is not byte for byte the one that was locked.

        Raises:
            LockDiffers: with each difference; the processors too, where only the files differ.
        """
        now = document_from_manifest(manifest)
        skipped = ("schema", "processor", "modelkiln", "search")
        found = differences(_without(self.document, skipped), _without(now, skipped))
        if found and self.document.get("processor") != now["processor"]:
            found += differences({"processor": self.document.get("processor")}, {"processor": now["processor"]})
        self._refuse(found)

    def allows(self, manifest: Mapping[str, Any]) -> bool:
        """Whether a version is the one that was locked."""
        try:
            self.require_result(manifest)
        except LockDiffers:
            return False
        return True

    def _refuse(self, found: list[str]) -> None:
        if found:
            raise LockDiffers(self.path, found)


def document_from_manifest(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what a lock holds of a version: inputs, choice, and the hashes of the files that are served.

    The recorded reference outputs are evidence, not what is served; another processor rounds them otherwise.
    """
    chosen = {key: manifest[key] for key in ("target", "precision")} if "precision" in manifest else None
    return {
        "schema": SCHEMA,
        "model": manifest["model"],
        "modelkiln": manifest["modelkiln"],
        "processor": cpu_description().rpartition(",")[0],
        "spec": manifest["spec"],
        "made_from": _compared(manifest["made_from"], manifest.get("target")),
        "code": manifest["code"],
        "choice": chosen,
        "search": next((r["search"] for r in manifest.get("passes", ()) if r["search"]), None),
        "held_in_fp32": sorted({name for report in manifest.get("passes", ()) for name in report["held"]}),
        "artifacts": {n: f["sha256"] for n, f in sorted(manifest["files"].items()) if n != REFERENCE_FILE},
    }


def differences(locked: Any, now: Any, at: str = "") -> list[str]:
    """Returns one line for each leaf that differs, by its path."""
    if isinstance(locked, Mapping) and isinstance(now, Mapping):
        lines = []
        for key in sorted({*locked, *now}):
            path = f"{at}.{key}" if at else str(key)
            lines += differences(locked.get(key, _ABSENT), now.get(key, _ABSENT), path)
        return lines
    return [] if locked == now else [f"{at}: {_short(locked)} in the lock, {_short(now)} here"]


def lock_path(spec: Path) -> Path:
    """Returns where a spec's lock is: beside it."""
    return spec.with_suffix(".lock")


def read_lock(spec: Path) -> Lock:
    """Reads the lock of a spec.

    Raises:
        UsageError: there is none, or it is damaged.
    """
    path = lock_path(spec)
    try:
        if path.stat().st_size > MAX_BYTES:
            raise UsageError(f"{path} has {path.stat().st_size} bytes; a lock has at most {MAX_BYTES}")
        document = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UsageError(f"{path} does not exist", hint=f"compile build {spec} --lock writes it") from None
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from error
    if not isinstance(document, dict) or document.get("schema") != SCHEMA:
        raise UsageError(f"{path} is not a lock of schema {SCHEMA}", hint=f"compile build {spec} --lock writes it anew")
    if wrong := _wrong_key(document):
        raise UsageError(f"{path} has no usable '{wrong}'", hint=f"compile build {spec} --lock writes it anew")
    return Lock(path, document)


def _wrong_key(document: Mapping[str, Any]) -> str:
    """Returns the first key that is not what `document_from_manifest` writes, or an empty string."""
    for key in ("spec", "made_from", "code", "artifacts"):
        if not isinstance(document.get(key), dict):
            return key
    if not isinstance(document["made_from"].get("packages"), dict):
        return "made_from.packages"
    choice = document.get("choice")
    if choice is None:
        return ""
    known = isinstance(choice, dict) and choice.get("target") in TARGET_NAMES and choice.get("precision") in PRECISIONS
    return "" if known else "choice"


def write_lock(spec: Path, manifest: Mapping[str, Any]) -> Path:
    """Writes the lock of a version beside its spec, in one step; the same version gives the same bytes."""
    path = lock_path(spec)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.write_text(json.dumps(document_from_manifest(manifest), indent=1, sort_keys=True) + "\n", encoding="utf-8")
    os.replace(beside, path)
    return path


def _compared(made_from: Mapping[str, Any], target: str | None) -> dict[str, Any]:
    """Leaves out what no longer decides anything: other targets' packages, and the processor that `auto` chose by.

    The spec is compared key by key instead.
    """
    mine = target_named(target).packages if target else ()
    others = {package for name in TARGET_NAMES for package in target_named(name).packages} - set(mine)
    packages = _without(made_from["packages"], tuple(others) if target else ())
    return {**_without(made_from, ("spec", "processor")), "packages": packages}


def _without(document: Mapping[str, Any], keys: tuple[str, ...]) -> dict[str, Any]:
    return {key: value for key, value in document.items() if key not in keys}


def _short(value: Any) -> str:
    text = str(value)
    return f"{text[:12]}..." if len(text) == 64 and " " not in text else text[:120]
