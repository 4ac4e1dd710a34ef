"""Base models, the four roles over one base, and log-probabilities."""
