"""Text to tokens and back, and chat templates; from a GGUF or from a Hugging Face folder."""
