"""The `compile` pipeline: a PyTorch model in, a proved and versioned Triton model out."""

__version__ = "0.1.0"
