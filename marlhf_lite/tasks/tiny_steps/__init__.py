"""The embedded reasoning task: arithmetic in several steps, written out, with an exact reward for the answer."""
