"""The embedded task `tiny-code`: short programs from specifications of one line."""
