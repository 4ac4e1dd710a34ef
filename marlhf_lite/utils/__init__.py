"""Errors, JSON lines, run folders and what else every part of the library uses."""
