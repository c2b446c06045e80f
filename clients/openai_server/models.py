"""The models that are served: what Triton has ready, with the tokenizers that the repository has for them."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import tokenizers

from backends.llm.engine.load import stored_settings
from backends.llm.tokenizers import Tokenizer, load_tokenizer
from clients.async_grpc import AsyncGrpcClient
from clients.errors import ClientError
from clients.openai_server.errors import ApiError, error_from_client, model_not_found, model_not_ready
from compiler.errors import ModelkilnError

Json = dict[str, Any]
log = logging.getLogger("modelkiln.openai")

_FRESH_S = 2.0  # how long the list of models is taken as it is


@dataclass(frozen=True)
class LanguageModel:
    """A model that answers prompts.

    Attributes:
        max_model_len: tokens of prompt and answer together, or None where the version does not say.
        has_prompt_logprobs: it has an output for them; what older versions of `compile llm` published has none.
        longest_token: bytes of the longest one, for a bound on how many tokens a text has at least.
    """

    name: str
    version: str
    created: int
    tokenizer: Tokenizer
    longest_token: int
    max_model_len: int | None
    has_prompt_logprobs: bool

    def check_length(self, text: str, param: str) -> None:
        """Refuses a text that cannot fit, before it costs seconds to be made tokens of."""
        at_least = len(text) // max(1, self.longest_token)
        if self.max_model_len is not None and at_least > self.max_model_len:
            raise ApiError(
                400,
                f"the prompt has {len(text)} characters, so {at_least} tokens or more; the model's context is "
                f"{self.max_model_len} tokens",
                param=param,
                code="context_length_exceeded",
            )


@dataclass(frozen=True)
class EmbeddingModel:
    """A model with one text input and one vector output.

    Attributes:
        max_batch_size: 0 where the model does not batch.
        extra_dims: dimensions of the input behind the batch, all 1.
        tokenizer: of the library `tokenizers`, where the repository has one for this model.
    """

    name: str
    version: str
    created: int
    input_name: str
    output_name: str
    max_batch_size: int
    extra_dims: tuple[int, ...]
    tokenizer: Any = None

    def count_tokens(self, texts: Sequence[str]) -> int:
        """Returns how many tokens texts have, with those that the model cuts off; 0 where that cannot be known."""
        if self.tokenizer is None:
            return 0
        return sum(len(encoding.ids) for encoding in self.tokenizer.encode_batch(list(texts)))


Model = LanguageModel | EmbeddingModel


class Models:
    """What is served now. The list follows Triton: it is asked again when the last answer is two seconds old."""

    def __init__(self, triton: AsyncGrpcClient, repository: Path) -> None:
        self._triton = triton
        self._repository = repository
        self._versions: Mapping[str, str] = {}
        self._models: dict[tuple[str, str], Model | None] = {}
        self._seen: set[str] = set()  # names that Triton has served, so they are no paths
        self._asked_at = float("-inf")
        self._refreshing: asyncio.Task[None] | None = None

    async def served(self) -> list[Model]:
        """Returns all models.

        Raises:
            ApiError: Triton does not answer.
        """
        await self._refresh()
        return [model for key in sorted(self._versions.items()) if (model := self._models.get(key))]

    async def language_model(self, name: str) -> LanguageModel:
        """Returns a model by its name.

        Raises:
            ApiError: there is none, or Triton does not answer.
        """
        return cast(LanguageModel, await self._find(name, LanguageModel, "prompts"))

    async def embedding_model(self, name: str) -> EmbeddingModel:
        """Returns a model by its name; raises as `language_model`."""
        return cast(EmbeddingModel, await self._find(name, EmbeddingModel, "texts to embed"))

    async def _find(self, name: str, kind: type[Model], takes: str) -> Model:
        found = self._known(name)
        if found is None:
            await self._refresh()
            found = self._known(name)
        elif time.monotonic() - self._asked_at > _FRESH_S:
            self._start_refresh()  # this request goes to the version that was known
        if isinstance(found, kind):
            return found
        if found is not None:
            raise ApiError(400, f"the model {name!r} takes no {takes}", param="model", code="model_not_supported")
        if name not in self._versions and name in self._seen and (self._repository / name).is_dir():
            raise model_not_ready(name)  # its process has died, say, and it is loaded again: clients try that once more
        raise model_not_found(name, [m.name for m in await self.served() if isinstance(m, kind)])

    def _known(self, name: str) -> Model | None:
        version = self._versions.get(name)
        return None if version is None else self._models.get((name, version))

    async def _refresh(self) -> None:
        if time.monotonic() - self._asked_at > _FRESH_S:
            # Others may wait for the same task: one that gives up must not take it away from them.
            await asyncio.shield(self._start_refresh())

    def _start_refresh(self) -> asyncio.Task[None]:
        if self._refreshing is None or self._refreshing.done():
            self._refreshing = asyncio.create_task(self._ask())
            self._refreshing.add_done_callback(lambda task: task.cancelled() or task.exception())
        return self._refreshing

    async def _ask(self) -> None:
        try:
            # Statistics are of all versions that are loaded; Triton's own list is closed where models are restarted.
            loaded = [(str(entry["name"]), str(entry["version"])) for entry in await self._triton.statistics("")]
            versions = dict(sorted(loaded, key=lambda key: (key[0], int(key[1]))))  # the newest of each
            for key in versions.items():
                if key not in self._models:
                    config = await self._triton.config(*key)
                    self._models[key] = await asyncio.to_thread(_found_model, self._repository, *key, config)
        except ClientError as error:
            raise error_from_client(error) from None
        self._models = {key: self._models[key] for key in versions.items()}
        self._versions = versions
        self._seen.update(versions)
        self._asked_at = time.monotonic()


def _found_model(repository: Path, name: str, version: str, config: Json) -> Model | None:
    """The same, but what is wrong with one model takes no other from its clients."""
    try:
        return _model_from_config(repository, name, version, config)
    except Exception:
        log.exception("model %s version %s is not served", name, version)
        return None


def _model_from_config(repository: Path, name: str, version: str, config: Json) -> Model | None:
    """Returns a model, or None for one that this API has no use for."""
    folder = repository / name / version
    created = int(folder.stat().st_mtime) if folder.is_dir() else 0
    inputs, outputs = config.get("input", []), config.get("output", [])
    names = {o["name"] for o in outputs}
    if "text_output" in names and "input_ids" in {i["name"] for i in inputs}:
        return _language_model(folder, name, version, created, "prompt_logprobs" in names)
    needed = [i for i in inputs if not i.get("optional")]
    if len(needed) != 1 or len(outputs) != 1 or outputs[0]["data_type"] != "TYPE_FP32":
        return None
    dims = [int(dim) for dim in needed[0]["dims"]]
    if needed[0]["data_type"] != "TYPE_STRING" or any(dim not in (1, -1) for dim in dims):
        return None
    max_batch_size = int(config.get("max_batch_size", 0))
    extra = (1,) * (len(dims) if max_batch_size else len(dims) - 1)
    tokenizer = _text_tokenizer(repository, name, version, config, needed[0]["name"])
    text_and_vector = needed[0]["name"], outputs[0]["name"]
    return EmbeddingModel(name, version, created, *text_and_vector, max_batch_size, extra, tokenizer)


def _text_tokenizer(repository: Path, name: str, version: str, config: Json, text_input: str) -> Any:
    """Returns the tokenizer of a model, or of the step of an ensemble that takes the text; None where there is none."""
    folder = repository / name / version
    for step in config.get("ensemble_scheduling", {}).get("step", []):
        if text_input in step.get("input_map", {}).values():
            versions = [f for f in (repository / step["model_name"]).glob("*") if f.name.isdigit()]
            folder = max(versions, key=lambda f: int(f.name), default=folder)
    file = folder / "tokenizer.json"
    if not file.is_file():
        return None
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises nothing more particular
        log.warning("%s cannot be read, so the tokens of %s are not counted: %s", file.name, name, error)
        return None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _language_model(
    folder: Path, name: str, version: str, created: int, has_prompt_logprobs: bool
) -> LanguageModel | None:
    try:
        stored = stored_settings(folder)
        tokenizer = load_tokenizer(folder / stored["model"] if "model" in stored else folder)
    except ModelkilnError as error:
        log.error("model %s version %s is not served: %s", name, version, error)
        return None
    longest = max((len(tokenizer.token_bytes(i)) for i in range(tokenizer.vocab_size)), default=1)
    return LanguageModel(name, version, created, tokenizer, longest, _max_model_len(folder), has_prompt_logprobs)


def _max_model_len(folder: Path) -> int | None:
    try:
        found = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))["llm"]["max_model_len"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return found if type(found) is int else None
