"""Every option is used: no option stays that nobody is told of."""

import re
from pathlib import Path

from marlhf_lite.config.commands import COMMANDS, option_names

ROOT = Path(__file__).resolve().parents[2]
PLACES = ("marlhf_lite/config/presets/**/*.yaml", "marlhf_lab/studies/protocols/*.yaml")


def test_every_option_is_used_or_known():
    """By a preset, a protocol, a lesson, a guide or README."""
    files = [file for place in PLACES for file in ROOT.glob(place)]
    files += [
        ROOT / "README.md",
        *(ROOT / "docs").glob("*.md"),
        *(ROOT / "notebooks").rglob("*.ipynb"),
    ]
    used = set(re.findall(r"\w+", " ".join(file.read_text(encoding="utf-8") for file in files)))
    options = {name for command in COMMANDS.values() for name in option_names(command)}
    assert len(options) <= 125 and not options - used
