"""Coverage-guided fuzzing of what reads bytes that others sent.

`targets/` has a module for each reader: `target(data)` raises only on a finding, `seeds()` are small valid inputs,
`mutate` knows the input's structure. `corpus/` keeps, by target, inputs that reach different code, and one for each
finding of the past. `python -m tests.fuzz` runs a target, `engine` is the process in which libFuzzer drives it.
"""
