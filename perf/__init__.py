"""Load generation and latency reports for models on a Triton server."""
