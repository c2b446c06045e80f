"""`compile llm`: a decoder-only model checked, proved and published for the `llm` backend."""
