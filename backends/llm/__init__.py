"""The LLM engine: continuous batching over a paged KV cache. It knows nothing of Triton."""
