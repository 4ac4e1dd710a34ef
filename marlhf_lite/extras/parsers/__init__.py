"""Parsers that need an extra package: for English and for Python."""
