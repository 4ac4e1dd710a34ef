"""How to read the tables of studies: the texts below them."""

from importlib.resources import files

import yaml

LEGENDS: dict[str, str] = yaml.safe_load(
    (files(__package__) / "legends.yaml").read_text(encoding="utf-8")
)
