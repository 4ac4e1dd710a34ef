"""The paper's claims beside the stored results: verdicts, counterparts, and links into elective 15."""

import json
import re
from pathlib import Path

import pytest

from marlhf_lab.studies import paper
from marlhf_lab.studies.results import stored_results, study_table

LESSON = Path(__file__).resolve().parents[2] / "notebooks" / "15_report.ipynb"


@pytest.mark.parametrize(
    ("low", "high", "sign", "size", "words"),
    [
        (0.1, 0.5, 1, None, "agrees"),
        (0.1, 0.5, -1, None, "contradicts"),
        (-0.5, -0.1, -1, None, "agrees"),
        (-0.2, 0.3, 1, 0.2, "no difference seen"),
        (-0.2, 0.3, 1, 0.4, "no difference seen; the claimed size is excluded"),
        (-0.2, 0.3, -1, -0.4, "no difference seen; the claimed size is excluded"),
    ],
)
def test_a_verdict_is_what_the_interval_says(low, high, sign, size, words):
    assert paper.verdict({"mean": 0.0, "low": low, "high": high}, sign, size) == words
    assert paper.verdict(None, sign, size) == "not measured"


def test_a_ratio_is_compared_with_1():
    found = {"mean": 1.2, "low": 1.001, "high": 1.4}
    assert (paper.verdict(found, beside=1), paper.verdict(found, -1, beside=1)) == (
        "agrees",
        "contradicts",
    )
    assert paper.say(found, ".2f", 1) == "1.200 [1.001, 1.400]"


def test_a_lesson_has_minus_signs_and_no_hyphens_before_numbers():
    text = "-1.2 [-2, 3], n=inf, 2026-11-22, level-5; [A](#A-·-Speed)"
    assert paper.typeset(text) == "−1.2 [−2, 3], n=∞, 2026-11-22, level-5; [A](#A-·-Speed)"
    rows = [{"x": {"mean": -1.0, "low": -2.0, "high": -0.5}}, {"x": None}]
    assert paper.table(rows, {"x": "x"}) == "| x |\n| --- |\n| −1.00 [−2.00, −0.50] |\n| - |"


def test_a_counterpart_is_a_difference_of_the_study_s_table():
    row = next(row for row in study_table(stored_results("main")) if row["method"] == "DPO")
    found = row["rm_score_difference"]
    assert paper.compare("main", "DPO", "PPO") == pytest.approx(
        {key: found[key] for key in ("mean", "low", "high", "level")}
    )
    text, words = paper.evidence("main: DPO < PPO")
    assert f"{found['mean']:+.2f} [".replace("-", "−") in text and words == "agrees"
    assert paper.evidence("main: DPO > PPO")[1] == "contradicts"
    assert paper.evidence("-") == ("-", "not measured")
    assert paper.compare("main", "PPO", "no such method") is None


def test_each_claim_leads_to_a_section_of_the_lesson():
    cells = json.loads(LESSON.read_text(encoding="utf-8"))["cells"]
    text = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    headings = {
        heading.replace(" ", "-") for heading in re.findall(r"^### ([A-Z] · .*)$", text, re.M)
    }
    rows = [row for group in paper._texts()["claims"] for row in paper.overview(group)]
    assert len(rows) > 40 and {re.search(r"\(#(.*)\)$", row["in"])[1] for row in rows} <= headings


def test_a_claim_that_other_judges_made_gets_no_verdict():
    found = paper.evidence("not comparable: wins gold")
    assert found == (paper.evidence("wins gold")[0], "not comparable") and "[" in found[0]
    verdicts = {row["claim"]: row["verdict"] for row in paper.overview("MA-PPO against PPO")}
    assert (
        verdicts["74 % wins by people"]
        == verdicts["the RM and other judges agree"]
        == "not comparable"
    )
    assert verdicts["a model as judge and people agree"] == "agrees (other answers)"


def test_the_table_of_studies_counts_runs():
    line = next(
        line
        for line in paper.studies_table().splitlines()
        if line.startswith("| `steps_confirm` |")
    )
    assert re.split(r" *\| *", line)[3:6] == ["40", "4", "10"]
