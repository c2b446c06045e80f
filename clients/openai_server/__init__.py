"""The OpenAI API in front of a Triton server: HTTP and JSON in, gRPC out. It runs in a process of its own."""
