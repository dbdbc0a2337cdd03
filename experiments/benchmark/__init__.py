"""How fast it is, in ratios."""
