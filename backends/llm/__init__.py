"""The LLM engine: continuous batching over a paged KV cache. It knows nothing of Triton."""

from backends.llm.engine.engine import LLMEngine
from backends.llm.sampling.params import SamplingParams

__all__ = ["LLMEngine", "SamplingParams"]
