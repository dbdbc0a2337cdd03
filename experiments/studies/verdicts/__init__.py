"""The preflight against what happens."""
