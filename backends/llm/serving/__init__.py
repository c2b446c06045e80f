"""A language model behind tensors: requests out of them, responses into them, the engine in a thread of its own."""
