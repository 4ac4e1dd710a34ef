"""The list of faults in tests/mutants stays true to the code; `python tests/mutants/run.py` tries them."""

import re
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]
MUTANTS = yaml.safe_load((ROOT / "tests" / "mutants" / "mutants.yaml").read_text(encoding="utf-8"))


def test_every_old_text_stands_once_and_every_test_exists():
    assert len(MUTANTS) >= 30 and len({mutant["about"] for mutant in MUTANTS}) == len(MUTANTS)
    for mutant in MUTANTS:
        text = (ROOT / mutant["file"]).read_text(encoding="utf-8")
        assert text.count(mutant["old"]) == 1 and mutant["new"] not in ("", mutant["old"]), mutant[
            "about"
        ]
        for test in mutant["tests"].split():
            file, _, name = test.partition("::")
            there = (ROOT / file).read_text(encoding="utf-8")
            assert not name or re.search(rf"^def {name}\(", there, re.M), (mutant["about"], test)
