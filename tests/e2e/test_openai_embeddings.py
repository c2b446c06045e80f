"""The official OpenAI client on the demo's ensemble, through the front end of `compile serve`."""

from __future__ import annotations

import numpy as np
from openai import OpenAI

from clients import GrpcClient
from tests.serving import Served

TEXTS = ["The cat sits outside.", "A man is playing guitar.", "Grüße aus Zürich", "x"] * 9  # more than one batch


def test_embeddings_are_those_of_the_ensemble(served: Served) -> None:
    with GrpcClient(served.grpc) as triton:
        expected = np.concatenate([triton.infer("text_embedding", {"text": [[t]]})["embedding"] for t in TEXTS[:4]])
    with OpenAI(base_url=served.openai, api_key="none", max_retries=0) as client:
        assert [model.id for model in client.models.list()] == ["text_embedding"]
        found = client.embeddings.create(model="text_embedding", input=TEXTS)  # asks for base64 by itself
        plain = client.embeddings.create(model="text_embedding", input=TEXTS[0], encoding_format="float")
    vectors = np.array([entry.embedding for entry in found.data], np.float32)
    assert vectors.shape == (36, 384) and [entry.index for entry in found.data] == list(range(36))
    assert np.allclose(vectors, np.tile(expected, (9, 1)), atol=1e-5)
    assert plain.usage.prompt_tokens == 7  # [CLS] the cat sits outside . [SEP]
    assert np.allclose(plain.data[0].embedding, expected[0], atol=1e-5)
