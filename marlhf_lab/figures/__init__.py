"""Figures and set-up of the lessons."""
