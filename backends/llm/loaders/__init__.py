"""Model files: GGUF and Hugging Face folders, read as untrusted data."""
