"""One rule for each algorithm: when it converges. An algorithm without one is 'at risk'."""
