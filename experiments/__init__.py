"""Programs on absl flags: `python -m experiments.NAME --help`."""
