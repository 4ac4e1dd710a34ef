"""The laboratory: what this project's lessons and studies need, and nobody who trains."""
