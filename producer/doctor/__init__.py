"""`ec-producer doctor`: looks at a machine before `serve` does, and says what is wrong and what to do about it."""
