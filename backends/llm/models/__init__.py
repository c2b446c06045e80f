"""The decoder: its configuration, and the one torch module that covers all supported architectures."""
