"""A parser that needs an extra package: for Python."""
