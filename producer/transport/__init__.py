"""How a block gets from the producer's region into a consumer's: one contract, shared with the shim."""
