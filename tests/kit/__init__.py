"""What the tests and the demo share: checkpoints, photographs, processes, chat requests, references.

Nothing here is part of the product; the product never imports it.
"""
