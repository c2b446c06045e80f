"""The repository linter: what Triton would refuse, hang on, or quietly do wrong, found before it starts."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from compiler.engine_host import EngineHost, engine_problems
from compiler.errors import RepositoryError
from compiler.llm.check import llm_problems
from compiler.llm.config import BACKEND
from compiler.repository import Repository
from compiler.spec import is_model_name
from compiler.targets.tensorrt_profiles import batch_problems
from compiler.triton_config import CONFIG_FILE, config_from_text, served_versions

# The file without which a version cannot load; without model.py the server hangs for ever.
_MODEL_FILES = {
    "python": "model.py",
    "onnxruntime": "model.onnx",
    "openvino": "model.xml",
    "tensorrt": "model.plan",
    "tensorrt_rtx": "model.plan",
}
_ENGINE_BACKENDS = ("tensorrt", "tensorrt_rtx")


@dataclass(frozen=True)
class Finding:
    """Something wrong in a repository.

    Attributes:
        level: `error` where the server would fail or hang, `warning` where it would surprise.
    """

    level: str
    model: str
    message: str

    def __str__(self) -> str:
        return f"{self.model}: {self.message}"

    def to_json(self) -> dict[str, str]:
        return asdict(self)


def check_repository(repository: Repository, *, host: EngineHost) -> list[Finding]:
    """Checks every model of a repository; reads configs, names, files and hashes, starts nothing.

    Args:
        repository: what is to be served.
        host: the machine that is to serve it.
    """
    names = repository.models()
    findings: list[Finding] = []
    configs: dict[str, Any] = {}
    for name in names:
        messages, config = _check_model(repository, name, host)
        findings += [Finding("error", name, m) for m in messages]
        if config is not None:
            configs[name] = config
    for name, config in configs.items():
        findings += [Finding("error", name, m) for m in _check_ensemble(config, configs, names)]
        findings += [Finding("warning", name, m) for m in _check_warm_up(config)]
    return findings


def _check_model(repository: Repository, name: str, host: EngineHost) -> tuple[list[str], Any]:
    folder = repository.path / name
    if not is_model_name(name):
        return [f"the folder's name is not one that Triton can load: {name!r} (letters, digits, _ . - only)"], None
    path = folder / CONFIG_FILE
    if not path.is_file():
        return [f"{CONFIG_FILE} is missing"], None
    try:
        config = config_from_text(path.read_text(encoding="utf-8"), f"{name}/{CONFIG_FILE}")
    except (RepositoryError, UnicodeDecodeError) as error:
        return [f"not a valid config: {error}"], None
    messages = []
    if config.name and config.name != name:
        messages.append(f'{CONFIG_FILE} says name: "{config.name}"; it must be "{name}", the folder\'s name, or absent')
    messages += _check_versions(repository, name, folder, config)
    above = [s for s in config.dynamic_batching.preferred_batch_size if s > config.max_batch_size]
    if above:
        messages.append(f"preferred_batch_size {above[0]} is above max_batch_size {config.max_batch_size}")
    if config.backend in _ENGINE_BACKENDS:
        messages += _check_engine(repository, name, config, host)
    elif not host.gpus and any(group.kind == group.KIND_GPU for group in config.instance_group):
        messages.append("instance_group asks for KIND_GPU, and this machine has no GPU: the server would stop")
    if config.backend == BACKEND:
        served = [v for v in served_versions(config, repository.versions(name)) if (folder / str(v)).is_dir()]
        messages += llm_problems(config, folder / str(served[-1]) if served else None)
    listed = sorted({number for group in config.instance_group for number in group.gpus})
    if absent := [number for number in listed if number >= len(host.gpus)]:
        messages.append(
            f"instance_group lists the GPUs {listed}, and this machine has {len(host.gpus)}: there is no GPU "
            f"{absent[0]}; without `gpus` every GPU there is gets its instances"
        )
    return messages, config


def _check_versions(repository: Repository, name: str, folder: Path, config: Any) -> list[str]:
    versions = repository.versions(name)
    if not versions:
        return ["there is no version folder (1, 2, ...): the server would refuse the model"]
    file = config.default_model_filename or _MODEL_FILES.get(config.backend, "")
    messages = []
    for version in served_versions(config, versions):
        if version not in versions:
            have = ", ".join(map(str, versions))
            messages.append(f"version_policy asks for version {version}, which is not there; there are: {have}")
        elif file and not (folder / str(version) / file).is_file():
            messages.append(f"version {version} has no {file}")
        if published := repository.read(name, version):
            messages += [f"version {version}: {problem}" for problem in repository.damage(published)]
    return messages


def _check_engine(repository: Repository, name: str, config: Any, host: EngineHost) -> list[str]:
    """An engine fits one kind of GPU, one version of its library and the batches of its profile."""
    latest = repository.latest(name)
    facts = latest.manifest.get("artifact") if latest is not None else None
    known = facts if isinstance(facts, dict) else {"library": config.backend.replace("_", "-")}
    messages = engine_problems(known, host) if facts or not host.gpus else []
    profile = known.get("profile")
    return messages + (batch_problems(profile, config.max_batch_size) if isinstance(profile, dict) else [])


def _check_warm_up(config: Any) -> list[str]:
    """A runtime that prepares itself for each shape is only warm for those that the warm-up had."""
    sizes = sorted({warm_up.batch_size for warm_up in config.model_warmup})
    if not sizes or sizes[-1] >= config.max_batch_size:
        return []
    return [
        f"model_warmup runs batches of {', '.join(map(str, sizes))}, and max_batch_size is {config.max_batch_size}: "
        "the first larger batch will be slow; add an entry for each size that matters"
    ]


def _check_ensemble(config: Any, configs: dict[str, Any], names: list[str]) -> list[str]:
    messages = []
    for step in config.ensemble_scheduling.step:
        member = configs.get(step.model_name)
        if step.model_name not in names:
            messages.append(f"step '{step.model_name}' is not in the repository")
        elif member is not None and config.max_batch_size > member.max_batch_size:
            messages.append(
                f"max_batch_size {config.max_batch_size} is above that of its step "
                f"'{step.model_name}', {member.max_batch_size}"
            )
    return messages
