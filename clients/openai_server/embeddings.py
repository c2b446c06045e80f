"""Embeddings, by any model with one text input and one vector output."""

from __future__ import annotations

import asyncio
import base64
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from tritonclient.grpc import service_pb2

from clients.openai_server.errors import ApiError
from clients.openai_server.models import EmbeddingModel
from clients.openai_server.schemas import EmbeddingRequest
from clients.openai_server.triton import Triton

_BATCHES_AT_ONCE = 8
Vectors = npt.NDArray[np.float32]  # [num_texts, dimensions]


async def embed(triton: Triton, model: EmbeddingModel, texts: Sequence[str], timeout_s: float) -> Vectors:
    """Returns a vector for each text, in batches of what the model takes.

    Raises:
        ApiError: Triton refused or failed.
    """
    size = max(1, model.max_batch_size)
    batches = [texts[start : start + size] for start in range(0, len(texts), size)]
    turns = asyncio.Semaphore(_BATCHES_AT_ONCE)

    async def one(batch: Sequence[str]) -> Vectors:
        async with turns:
            response = await triton.infer(_request(model, batch), timeout_s)
        # A vector of any shape is one row; several vectors of a text are not what this API gives.
        return np.frombuffer(response.raw_output_contents[0], np.float32).reshape(len(batch), -1)

    tasks = [asyncio.ensure_future(one(batch)) for batch in batches]
    try:
        return np.concatenate(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()


def embedding_response(request: EmbeddingRequest, model: EmbeddingModel, vectors: Vectors) -> dict[str, Any]:
    """Returns the body of the answer. Tokens are counted inside the model, which does not tell: their number is 0.

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
        "usage": {"prompt_tokens": 0, "total_tokens": 0},
    }


def _request(model: EmbeddingModel, texts: Sequence[str]) -> Any:
    encoded = [text.encode() for text in texts]
    request = service_pb2.ModelInferRequest(model_name=model.name, model_version=model.version)
    request.inputs.add(name=model.input_name, datatype="BYTES", shape=[len(texts), *model.extra_dims])
    request.raw_input_contents.append(b"".join(struct.pack("<I", len(data)) + data for data in encoded))
    request.outputs.add(name=model.output_name)
    return request
