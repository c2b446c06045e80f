"""What clients send: the requests of the OpenAI API, with the fields that vLLM's server adds to them.

Lists are read up to their first fault (`fail_fast`) and have an end: a million faults of one body would take seconds in
which nothing else runs.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

INT32 = 2**31 - 1
INT64 = 2**63 - 1
MAX_MESSAGES = 16_384  # and parts of one
MAX_BIASES = 10_000

Text = Annotated[str, Field(min_length=1, max_length=256)]
TokenId = Annotated[int, Field(ge=0, le=INT32)]
Tokens = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]
Penalty = Annotated[float, Field(ge=-2, le=2)]


def _few(biases: Any) -> Any:
    """`max_length` of an object counts what is valid, after all of it was read."""
    if isinstance(biases, dict) and len(biases) > MAX_BIASES:
        raise ValueError(f"{len(biases)} tokens have a bias; allowed: {MAX_BIASES}")
    return biases


# A JSON object has no other keys than texts.
LogitBias = Annotated[
    dict[Annotated[str, Field(pattern=r"^[0-9]{1,10}$")], Annotated[float, Field(ge=-100, le=100)]],
    BeforeValidator(_few, json_schema_input_type=dict[str, float]),
    Field(json_schema_extra={"maxProperties": MAX_BIASES}),
]


class Request(BaseModel):
    """Types are taken as they are: "5" is no number. What is not known is left out."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False, frozen=True)


class StreamOptions(Request):
    include_usage: bool | None = Field(None, description="A last chunk tells the tokens that were used.")


class Sampling(Request):
    """What chat and completions share. Fields after `user` are vLLM's additions."""

    model: str = Field(max_length=256, description="An id from /v1/models.")
    n: int | None = Field(1, ge=1, le=128, description="Answers for each prompt.")
    temperature: float | None = Field(1.0, ge=0, le=2, description="0 is greedy.")
    top_p: float | None = Field(1.0, gt=0, le=1)
    presence_penalty: Penalty | None = 0.0
    frequency_penalty: Penalty | None = 0.0
    seed: int | None = Field(None, ge=-INT64 - 1, le=INT64)
    stop: Text | Annotated[list[Text], Field(max_length=16, fail_fast=True)] | None = Field(
        None, description="They end the answer."
    )
    logit_bias: LogitBias | None = Field(None, description="Added to the logits, by token id.")
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    user: str | None = Field(None, max_length=256, description="Who is served, for the scheduling policy 'fair'.")
    top_k: int | None = Field(None, ge=-1, le=INT32)
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, ge=0.01, le=100)
    min_tokens: int | None = Field(None, ge=0, le=INT32)
    stop_token_ids: Annotated[list[TokenId], Field(max_length=128, fail_fast=True)] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    structured_outputs: dict[str, Any] | None = Field(
        None, description='One of {"json": schema}, {"regex": ...}, {"choice": [...]}, {"grammar": ...}.'
    )
    priority: int | None = Field(None, ge=-INT32, le=INT32, description="Smaller goes first.")
    cache_salt: str | None = Field(None, max_length=256, description="Only requests with the same share a cache.")
    deadline_ms: float | None = Field(None, gt=0, le=1e9, description="Until the whole answer is there.")


class TextPart(Request):
    type: Literal["text"]
    text: str


class FunctionCall(Request):
    name: str = Field(max_length=256)
    arguments: str


class ToolCall(Request):
    id: str = Field(max_length=256)
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(Request):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[TextPart], Field(max_length=MAX_MESSAGES, fail_fast=True)] | None = Field(
        None, description="Text; pictures and sound are not taken."
    )
    name: str | None = Field(None, max_length=256)
    tool_calls: Annotated[list[ToolCall], Field(max_length=1024, fail_fast=True)] | None = None
    tool_call_id: str | None = Field(None, max_length=256)


class Function(Request):
    name: str = Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")
    description: str | None = None
    parameters: dict[str, Any] | None = Field(None, description="A JSON schema.")
    strict: bool | None = None


class Tool(Request):
    type: Literal["function"]
    function: Function


class NamedFunction(Request):
    name: str = Field(max_length=256)


class NamedTool(Request):
    type: Literal["function"]
    function: NamedFunction


class JsonSchema(Request):
    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False, frozen=True, protected_namespaces=())

    name: str = Field(max_length=256)
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class TextFormat(Request):
    type: Literal["text"]


class JsonObjectFormat(Request):
    type: Literal["json_object"]


class JsonSchemaFormat(Request):
    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat = Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")]


class ChatRequest(Sampling):
    """POST /v1/chat/completions"""

    messages: list[Message] = Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)
    max_completion_tokens: int | None = Field(None, ge=1, le=INT32, description="Goes before max_tokens.")
    max_tokens: int | None = Field(None, ge=1, le=INT32, description="By default as many as the context has room for.")
    logprobs: bool | None = False
    top_logprobs: int | None = Field(None, ge=0, le=20, description="Needs logprobs.")
    response_format: ResponseFormat | None = None
    tools: Annotated[list[Tool], Field(max_length=128, fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    chat_template_kwargs: dict[str, Any] | None = Field(
        None, description='As vLLM has it: what the template may ask for, such as {"enable_thinking": false}.'
    )
    parallel_tool_calls: bool | None = Field(True, description="False: one call at most.")


class CompletionRequest(Sampling):
    """POST /v1/completions"""

    prompt: (
        str
        | Annotated[list[str], Field(min_length=1, max_length=2048, fail_fast=True)]
        | Tokens
        | Annotated[list[Tokens], Field(min_length=1, max_length=2048, fail_fast=True)]
    ) = Field(description="A text, tokens, or a list of either.")
    max_tokens: int | None = Field(16, ge=0, le=INT32, description="0 needs echo: the prompt alone.")
    logprobs: int | None = Field(None, ge=0, le=20)
    echo: bool | None = Field(False, description="The answer begins with the prompt.")
    suffix: str | None = Field(None, max_length=0, description="Not supported.")


class EmbeddingRequest(Request):
    """POST /v1/embeddings"""

    model: str = Field(max_length=256, description="An id from /v1/models.")
    input: str | Annotated[list[str], Field(min_length=1, max_length=2048, fail_fast=True)] = Field(
        description="A text, or a list."
    )
    encoding_format: Literal["float", "base64"] | None = "float"
    dimensions: int | None = Field(None, ge=1, le=INT32, description="The model's own number; others are refused.")
    user: str | None = Field(None, max_length=256)
