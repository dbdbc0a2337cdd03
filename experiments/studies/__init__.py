"""What was found out: a folder each, with its program, page and results."""
