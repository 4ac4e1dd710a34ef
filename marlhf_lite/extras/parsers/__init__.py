"""Parsers that need a package of their own: English (two) and Python."""
