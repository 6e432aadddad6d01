"""Between GPUs: double buffers, LL exchange, copies, rate limits."""
