"""The LLM engine against its peers: the same model, the same prompts, in turn in one run."""
