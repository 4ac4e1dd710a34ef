"""docs/results.md: its tables are made from the records, and every other interval is in the records.

`make tables` writes the marked tables anew. `make lint` runs these tests.
"""

import json
import re
from pathlib import Path

import yaml

from marlhf_lab.studies.claims import claims
from marlhf_lab.studies.other_sign import side_of_each_study, studies_with_the_other_sign
from marlhf_lab.studies.register import MEASURED, ROWS
from marlhf_lab.studies.result_tables import MARKED, TABLES, write_tables
from marlhf_lab.studies.results import stored_results
from marlhf_lab.studies.study import STUDIES

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
INTERVAL = re.compile(r"[+−-]?\d+(?:\.\d+)? \[[+−-]?\d[^\]]*\]")


def test_the_tables_are_those_of_the_records():
    """Where they differ: `make tables`. README has some of them, and they are alike."""
    names = [found[2] for found in MARKED.finditer(PAGE)]
    assert sorted(names) == sorted(yaml.safe_load(TABLES.read_text(encoding="utf-8")))
    assert PAGE.count("<!-- table:") == PAGE.count("<!-- end -->") == len(names)
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for text in (PAGE, readme):
        made, page = write_tables(text).splitlines(), text.splitlines()
        assert [pair for pair in zip(page, made, strict=True) if pair[0] != pair[1]] == []


def test_every_study_is_in_the_register():
    rows = yaml.safe_load(ROWS.read_text(encoding="utf-8"))
    protocols = {path.stem for path in STUDIES.glob("*.yaml")}
    assert protocols | set(MEASURED) == set(rows)
    assert all(f"[{study}](" in PAGE for study in rows)


def test_runs_are_counted_by_code():
    """A count outside the texts that code writes names its studies, and is the number of their stored runs."""
    for page in (PAGE, (ROOT / "README.md").read_text(encoding="utf-8")):
        prose = MARKED.sub("", page)
        for counted in re.finditer(r"\b(\d[\d,]*) (?:stored )?runs\b([^.;)]*)", prose):
            studies = re.findall(r"`(\w+)`", counted[2])
            runs = [run for study in studies for run in stored_results(study) if run["curve"]]
            assert int(counted[1].replace(",", "")) == len(runs), counted[0]


def test_a_claim_stands_beside_the_study_with_the_other_sign():
    """Wherever a page names a study in prose, its section names those that found the opposite."""
    opposed = {
        study: studies_with_the_other_sign(study)
        for sides in side_of_each_study().values()
        for study in sides
    }
    assert opposed["sentiment_settle"] == ["sentiment_near"]  # signs are read
    for page in (PAGE, (ROOT / "README.md").read_text(encoding="utf-8")):
        sections = re.split(r"^## ", page, flags=re.M)
        for section in sections:
            claims = [
                paragraph for paragraph in section.split("\n\n") if paragraph.startswith("**Claim")
            ]
            for claim in claims:
                for study in re.findall(r"`(\w+)`", claim):
                    others = opposed.get(study, [])
                    assert not others or any(f"`{name}`" in section for name in others), study


def test_an_empty_table_does_not_swallow_the_next_one():
    page = "<!-- table: a -->\n<!-- end -->\n\ntext\n\n<!-- table: b -->\n| x |\n<!-- end -->\n"
    assert [(found[2], found[3]) for found in MARKED.finditer(page)] == [("a", ""), ("b", "| x |")]


def plain(text: str) -> str:
    """The numbers as records write them: without plus signs, true minus signs and bold type."""
    return text.replace("−", "-").replace("+", "").replace("*", "").replace("-0.00 ", "0.00 ")


def intervals(record) -> list[str]:
    """Every mean with an interval in a summary, with one to three digits, and with the sign turned round."""
    if isinstance(record, list):
        return [text for item in record for text in intervals(item)]
    if not isinstance(record, dict):
        return []
    texts = [text for item in record.values() for text in intervals(item)]
    numbers = [record.get(name) for name in ("mean", "low", "high")]
    if None not in numbers:
        mean, low, high = numbers
        both = (numbers, (-mean, -high, -low))
        texts += [f"{m:z.{n}f} [{a:z.{n}f}, {b:z.{n}f}]" for n in (1, 2, 3) for m, a, b in both]
    return texts


def turned(text: str) -> str:
    """An interval of the opposite difference."""
    mean, low, high = re.findall(r"-?[\d.]+", text)
    mean, low, high = (x.removeprefix("-") if x[0] == "-" else f"-{x}" for x in (mean, low, high))
    return f"{mean} [{high}, {low}]"


def test_every_interval_of_the_text_is_in_the_records():
    results = ROOT / "data" / "results"
    known = [file.read_text(encoding="utf-8") for file in results.glob("*/table.md")]
    for file in [*results.glob("*/summary.json"), *results.glob("benchmark_*signal*.json")]:
        known += intervals(json.loads(file.read_text(encoding="utf-8")))
    known = plain("\n".join([*known, *claims().values()]))
    for page in (PAGE, (ROOT / "README.md").read_text(encoding="utf-8")):
        said = [" ".join(x.split()) for x in INTERVAL.findall(MARKED.sub("", page))]
        assert [x for x in said if plain(x) not in known and turned(plain(x)) not in known] == []
