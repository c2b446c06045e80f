"""Embeddings, by any model with one text input and one vector output."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from clients.async_grpc import AsyncGrpcClient
from clients.errors import ClientError
from clients.openai_server.errors import ApiError, error_from_client
from clients.openai_server.models import EmbeddingModel
from clients.openai_server.schemas import EmbeddingRequest
from clients.openai_server.work import all_or_none

_BATCHES_AT_ONCE = 8
Vectors = npt.NDArray[np.float32]  # [num_texts, dimensions]


async def embed(triton: AsyncGrpcClient, model: EmbeddingModel, texts: Sequence[str], timeout_s: float) -> Vectors:
    """Returns a vector for each text, in batches of what the model takes.

    Raises:
        ApiError: Triton refused or failed.
    """
    size = max(1, model.max_batch_size)
    batches = [texts[start : start + size] for start in range(0, len(texts), size)]
    turns = asyncio.Semaphore(_BATCHES_AT_ONCE)

    async def one(batch: Sequence[str]) -> Vectors:
        column = np.empty((len(batch), *model.extra_dims), dtype=np.object_)
        column.reshape(-1)[:] = [text.encode() for text in batch]
        async with turns:
            try:
                found = await triton.infer(
                    model.name,
                    {model.input_name: column},
                    version=model.version,
                    outputs=[model.output_name],
                    timeout_s=timeout_s,
                )
            except ClientError as error:
                raise error_from_client(error) from None
        return found[model.output_name].reshape(len(batch), -1)

    return np.concatenate(await all_or_none([one(batch) for batch in batches]))


def embedding_response(
    request: EmbeddingRequest, model: EmbeddingModel, vectors: Vectors, num_tokens: int
) -> dict[str, Any]:
    """Returns the body of the answer.

    Raises:
        ApiError: other dimensions are asked for than the model has, or a vector is not finite.
    """
    dimensions = vectors.shape[1]
    if request.dimensions not in (None, dimensions):
        raise ApiError(
            400, f"dimensions is {request.dimensions}; allowed for this model: {dimensions}", param="dimensions"
        )
    if not np.isfinite(vectors).all():
        raise ApiError(500, "the model gave a vector that is not finite", type="server_error", code="internal")
    if request.encoding_format == "base64":
        data: list[Any] = [base64.b64encode(row.astype("<f4").tobytes()).decode() for row in vectors]
    else:
        data = vectors.tolist()
    return {
        "object": "list",
        "data": [{"object": "embedding", "index": i, "embedding": one} for i, one in enumerate(data)],
        "model": model.name,
        "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
    }
