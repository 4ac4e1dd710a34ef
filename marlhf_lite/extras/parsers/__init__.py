"""Parsers that need an extra package: two for English, one for Python."""
