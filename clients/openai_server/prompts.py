"""From a request's messages or prompts to tokens. It may take long: it is run in a thread."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from backends.llm.errors import InvalidRequest
from clients.openai_server.errors import ApiError
from clients.openai_server.models import LanguageModel
from clients.openai_server.schemas import ChatRequest, CompletionRequest, Message
from clients.openai_server.tool_calls import HERMES_START

log = logging.getLogger("modelkiln.openai")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Prompt:
    """What the model is given.

    Attributes:
        text: for `echo`; empty where nobody needs it.
        is_hermes: the template told the model to write tool calls as Hermes models do.
    """

    token_ids: Sequence[int]
    text: str = ""
    is_hermes: bool = False


def chat_prompt(model: LanguageModel, request: ChatRequest) -> Prompt:
    """Renders the model's chat template, once; its text is taken as it is, so no second BOS comes before it.

    Raises:
        ApiError: the template fails on these messages, or the text cannot fit.
    """
    messages = [_message(index, message) for index, message in enumerate(request.messages)]
    tools = [] if request.tool_choice == "none" else [t.model_dump(exclude_none=True) for t in request.tools or ()]
    for message in messages:
        model.check_length(str(message.get("content", "")), "messages")
    settings = request.chat_template_kwargs or {}
    text = _checked(lambda: model.tokenizer.chat_text(messages, tools=tools, settings=settings))
    model.check_length(text, "messages")
    if tools and not all(tool["function"]["name"] in text for tool in tools):
        log.info("model %s: its chat template leaves out the tools", model.name)
    token_ids = _checked(lambda: model.tokenizer.encode(text, add_special_tokens=False))
    return Prompt(token_ids, is_hermes=bool(tools) and HERMES_START in text)


def completion_prompts(model: LanguageModel, request: CompletionRequest) -> list[Prompt]:
    """Returns the prompts of a request: texts get the model's special tokens, tokens are taken as they are.

    Raises:
        ApiError: a text cannot be made tokens of, or cannot fit.
    """
    given: Any = request.prompt
    if isinstance(given, str) or isinstance(given[0], int):
        given = [given]
    return [_completion_prompt(model, prompt, bool(request.echo)) for prompt in given]


def _completion_prompt(model: LanguageModel, prompt: str | list[int], echo: bool) -> Prompt:
    if isinstance(prompt, str):
        model.check_length(prompt, "prompt")
        return Prompt(_checked(lambda: model.tokenizer.encode(prompt)), prompt)
    return Prompt(prompt, model.tokenizer.decode(prompt) if echo else "")


def _message(index: int, message: Message) -> dict[str, Any]:
    """Returns a message as templates expect it: content is text, arguments of calls are objects."""
    found = message.model_dump(exclude_none=True)
    if message.role == "developer":
        found["role"] = "system"  # its older name, which templates know
    if isinstance(message.content, list):
        found["content"] = "\n".join(part.text for part in message.content)
    if message.content is None and not message.tool_calls:
        raise ApiError(400, f"messages.{index}.content is missing", param=f"messages.{index}.content")
    found.setdefault("content", "")  # beside calls: many templates put it together with other texts, or measure it
    for call in found.get("tool_calls", ()):
        call["function"]["arguments"] = _arguments(call["function"]["arguments"])
    return found


def _arguments(text: str) -> Any:
    try:
        found = json.loads(text or "{}")  # some clients write nothing for a function without parameters
    except (ValueError, RecursionError):
        return text
    return found if isinstance(found, dict) else text


def _checked(work: Callable[[], Result]) -> Result:
    try:
        return work()
    except InvalidRequest as error:
        raise ApiError(400, error.message, param=error.param) from None
