"""The table of Koloskova et al. (2020), cell by cell."""
