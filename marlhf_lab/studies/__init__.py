"""Studies: protocols, runs, results and their tables."""
