"""Load generation and latency reports for language models: what `perf-report llm` does."""
