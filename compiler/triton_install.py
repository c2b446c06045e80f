"""Finds a real tritonserver and lays out what it needs to start: backends, stub, libraries. Starts nothing."""

from __future__ import annotations

import compileall
import importlib.metadata
import importlib.util
import os
import shutil
import sys
import sysconfig
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from compiler.errors import EnvironmentLacks

STUB_FILE = "triton_python_backend_stub"
# What our backends import from their own folder.
_SHARED_FILES = ("batching.py", "phases.py", "shared_locks.py")
# Where NVIDIA's container images have it.
CONTAINER_HOME = Path("/opt/tritonserver")
HOME_VARIABLE = "MODELKILN_TRITON_HOME"


@dataclass(frozen=True)
class TritonInstall:
    """A tritonserver on this machine.

    Attributes:
        home: the folder that holds `bin/tritonserver` and `backends`.
        stub: the Python stub for this interpreter, or None where there is none for its version.
        stub_versions: the Python versions for which there is a stub.
        libraries: folders for LD_LIBRARY_PATH.
        description: where it was found, for a person.
    """

    home: Path
    stub: Path | None
    stub_versions: tuple[str, ...]
    libraries: tuple[Path, ...]
    description: str

    @property
    def binary(self) -> Path:
        return self.home / "bin" / "tritonserver"

    @property
    def backends(self) -> Path:
        return self.home / "backends"


def python_version() -> str:
    return f"{sys.version_info.major}.{sys.version_info.minor}"


def find_triton() -> TritonInstall:
    """Finds a tritonserver: $MODELKILN_TRITON_HOME, then the nvidia-pytriton wheel, then the container's place.

    Raises:
        EnvironmentLacks: there is none.
    """
    chosen = os.environ.get(HOME_VARIABLE)
    if chosen:
        home = Path(chosen)
        if not (home / "bin" / "tritonserver").is_file():
            raise EnvironmentLacks(f"{HOME_VARIABLE} is {chosen}, which holds no bin/tritonserver")
        return _install(home, f"{HOME_VARIABLE}={chosen}")
    wheel = importlib.util.find_spec("pytriton")
    for root in wheel.submodule_search_locations or () if wheel else ():
        home = Path(root) / "tritonserver"
        if (home / "bin" / "tritonserver").is_file():
            version = importlib.metadata.version("nvidia-pytriton")
            return _install(home, f"nvidia-pytriton {version} wheel")
    if (CONTAINER_HOME / "bin" / "tritonserver").is_file():
        return _install(CONTAINER_HOME, str(CONTAINER_HOME))
    raise EnvironmentLacks(
        "no tritonserver was found on this machine",
        hint=f"pip install 'modelkiln[server]', or set {HOME_VARIABLE} to a Triton installation",
    )


def lay_out_backends(install: TritonInstall, folder: Path) -> None:
    """Fills a backend folder: the server's own, and ours where the server has none of that name.

    Raises:
        EnvironmentLacks: there is no Python stub for this interpreter.
    """
    # Hard links or copies, never symbolic links: the server refuses a library that resolves to another folder.
    for backend in sorted(p for p in install.backends.iterdir() if p.is_dir()):
        shutil.copytree(
            backend,
            folder / backend.name,
            copy_function=link_or_copy,
            ignore=shutil.ignore_patterns("__pycache__", STUB_FILE),
        )
    link_or_copy(str(require_stub(install)), str(folder / "python" / STUB_FILE))
    for own in own_backends():
        if not (folder / own.name).exists():
            (folder / own.name).mkdir()
            shutil.copyfile(own / "model.py", folder / own.name / "model.py")
            for shared in _SHARED_FILES:
                shutil.copyfile(own.parent / shared, folder / own.name / shared)


def compile_python_files(repository: Path) -> None:
    """Writes the byte code that a stub would write beside a Python model's files when it loads them for the first time.

    Triton takes the folder that appears there for a change of the model, and loads it again with the next ensemble that
    has it for a member (d10). What cannot be written or compiled is left to the stub.
    """
    for path in repository.glob("*/[0-9]*/*.py"):
        with suppress(OSError):
            compileall.compile_file(path, quiet=2)


def link_or_copy(source: str, target: str) -> str:
    """Hard-links a file, or copies it where the filesystem cannot; returns the target."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
    return target


def own_backends() -> list[Path]:
    """Returns the folders of our Python-based backends."""
    import backends

    return sorted(p.parent for p in Path(backends.__path__[0]).glob("*/model.py"))


def require_stub(install: TritonInstall) -> Path:
    if install.stub is None:
        raise EnvironmentLacks(
            f"tritonserver ({install.description}) has Python stubs for {', '.join(install.stub_versions) or 'none'}, "
            f"and this interpreter is Python {python_version()}: models in Python would hang while loading",
            hint="make the virtual environment with one of those Python versions",
        )
    return install.stub


def server_environment(install: TritonInstall) -> dict[str, str]:
    """Returns the variables for the server's process: the stub embeds this very interpreter."""
    environment = dict(os.environ)
    libraries = [*map(str, install.libraries), environment.get("LD_LIBRARY_PATH", "")]
    environment["LD_LIBRARY_PATH"] = ":".join(filter(None, libraries))
    environment["PATH"] = f"{Path(sys.prefix, 'bin')}:{environment.get('PATH', '')}"
    paths = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), environment.get("PYTHONPATH", "")]
    if environment.get("PYTHONPATH"):
        paths.insert(0, paths.pop())  # what the user put in front stays in front
    # The stub does not read .pth files, by which an editable install is found; behind all else, not to hide anything.
    paths.append(str(Path(__file__).parents[1]))
    environment["PYTHONPATH"] = ":".join(dict.fromkeys(filter(None, paths)))
    environment.pop("PYTHONHOME", None)
    # Spinning OpenMP threads make every other process on the machine slow.
    environment.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    return environment


def _install(home: Path, description: str) -> TritonInstall:
    stubs = home / "python_backend_stubs"
    found = {p.name: p / STUB_FILE for p in stubs.iterdir()} if stubs.is_dir() else {}
    own = home / "backends" / "python" / STUB_FILE
    if not found and own.is_file():
        # A container's single stub was built for the container's own Python.
        found = {_stub_python(own) or python_version(): own}
    libraries = [
        home.parent.parent / "nvidia_pytriton.libs",
        home / "lib",
        Path(sysconfig.get_config_var("LIBDIR") or "/usr/lib"),
    ]
    return TritonInstall(
        home=home,
        stub=found.get(python_version()),
        stub_versions=tuple(sorted(found, key=lambda v: tuple(map(int, v.split("."))))),
        libraries=tuple(p for p in libraries if p.is_dir()),
        description=description,
    )


def _stub_python(stub: Path) -> str | None:
    """Returns the Python version that a stub links to (libpython3.12.so -> 3.12), read from its strings."""
    data = stub.read_bytes()
    at = data.find(b"libpython3.")
    if at < 0:
        return None
    return data[at + len(b"libpython") : data.find(b".so", at)].decode("ascii", "replace")
