"""What runs inside an LLM-only vLLM: an ASGI middleware, an EC connector, and a client of the producer."""
