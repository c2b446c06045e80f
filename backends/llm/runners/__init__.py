"""Model runners: they hold the weights and the paged KV cache, and compute one step."""
