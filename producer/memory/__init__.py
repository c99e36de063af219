"""Shared host memory, and blocks in it: used by the producer's embedding pool and by the shim's landing region."""
