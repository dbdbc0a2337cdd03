"""Seconds and bytes per step on real links of chosen bandwidth and latency."""
