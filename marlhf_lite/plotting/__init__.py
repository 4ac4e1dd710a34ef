"""Figures, and what notebooks show."""
