"""The device side: the model's encoder, and what identifies it."""
