"""One rule for each algorithm: when it converges. Of an algorithm without one nothing is known."""
