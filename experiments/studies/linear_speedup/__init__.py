"""Error against n and T, and its slopes."""
