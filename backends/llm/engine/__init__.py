"""The core: requests, blocks, the book-keeping of the KV cache, the scheduler. No torch; time is passed in."""
