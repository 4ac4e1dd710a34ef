"""Files that the project ships."""

from importlib.resources import files
from pathlib import Path


def shipped(name: str, folder: str = "data") -> Path:
    """Return the path of a shipped file or folder: in an installed package, or in data/ or figures/ of a checkout."""
    in_package = Path(str(files("marlhf_lite"))) / f"_{folder}" / name
    if in_package.exists():
        return in_package
    checkout = Path(__file__).parents[2]
    return checkout / folder / name
