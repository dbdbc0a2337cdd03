"""Figures 2 and 3 of the paper: finished runs against time on its networks."""
