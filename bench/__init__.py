"""How fast and how large the service is, with vLLM's own encoder-only instance beside it."""
