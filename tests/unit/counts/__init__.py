"""What a step and an item cost, in counts that need no clock: operators, copies, allocations, calls of functions.

`ceilings.toml` says how much each may be. `cases.py` measures, `table.py` compares.
"""
