"""What producer and consumer must agree on: block format, versions, reasons, generated messages."""
