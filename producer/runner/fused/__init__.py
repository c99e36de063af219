"""The encoder's own mathematics in fewer and better fitting kernels, for `--fidelity fast`."""
