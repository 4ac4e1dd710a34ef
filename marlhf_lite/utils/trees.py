"""`nltk`, imported so that it needs no home folder.

Its import looks for a folder for downloads, and ends with an error for a user without a name and without a home, as
containers often have. Nothing is downloaded here, so any folder will do.
"""

import os
import tempfile

if os.path.expanduser("~") == "~":
    os.environ.setdefault("NLTK_DATA", tempfile.gettempdir())

import nltk

__all__ = ["nltk"]
