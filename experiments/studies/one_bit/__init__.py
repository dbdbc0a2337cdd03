"""DCD at one bit: what a random rotation before rounding changes."""
