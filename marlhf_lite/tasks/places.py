"""Find local files by a name or a pattern, without a library that takes long to import."""

import glob
import os


def matching_files(pattern: str) -> list[str]:
    """Return the files that a name or a pattern such as `data/part-*.jsonl` names, in alphabetical order.

    Brackets, stars and question marks in the name of a file or folder that exists are part of that name, because
    people have folders such as `data [1]`.
    """
    place = os.path.expanduser(pattern)
    if os.path.exists(place):
        return [place]
    folder = _existing_folder_above(place)
    rest = place[len(folder) :]
    return sorted(glob.glob(glob.escape(folder) + rest, recursive=True))


def files_below(folder: str) -> list[str]:
    """Return all files in a folder and its subfolders, by their names relative to it; hidden ones are left out."""
    found = []
    for place, folders, names in os.walk(folder):
        # `os.walk` goes into the folders that are left in this list, in its order
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            if not name.startswith("."):
                found.append(os.path.relpath(os.path.join(place, name), folder))
    return found


def _existing_folder_above(place: str) -> str:
    """Return the longest beginning of a path that is a folder; empty if there is none."""
    folder = place
    while folder and not os.path.isdir(folder):
        above = os.path.dirname(folder)
        if above == folder:
            return ""
        folder = above
    return folder
