"""Errors, JSON lines and run folders."""
