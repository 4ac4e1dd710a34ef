"""Base models, the four roles over one base, log-probabilities and memory."""
