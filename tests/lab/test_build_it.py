"""The assignment: the single file has all points, and fifteen wrong solutions lose those of what they get wrong."""

import re

import pytest

from marlhf_lab import build_it, homework

WHOLE = build_it.WHOLE.read_text(encoding="utf-8")
LATER = {"PPO", "MA-PPO", "several steps"}
MANY = {"MA-PPO", "several steps"}
WRONG = [  # what is written, what a student writes, the parts that must lose their points
    ("r = -BETA *", "r = BETA *", LATER),
    (
        "r.scatter_add_(1, mask.sum(1, keepdim=True) - 1, score[:, None])",
        "r[:, -1] += score",
        LATER,
    ),
    ("V = over_macro_actions(V_old) / size.clamp(min=1)", "V = over_macro_actions(V_old)", MANY),
    ("tau = macro_actions(mask, n)", "tau = macro_actions(mask, 1)", MANY),
    ("GAMMA * next_value - V[:, s]", "next_value - V[:, s]", {"gae"} | LATER),
    ("GAMMA * LAMBDA * advantage", "advantage", {"gae"} | LATER),
    ("return A, A + V", "return A, A", {"gae"} | LATER),
    ("torch.max(-A * ratio, -A * ratio.clamp", "torch.max(A * ratio, A * ratio.clamp", LATER),
    (
        "torch.max(-A * ratio, -A * ratio.clamp(1 - EPSILON, 1 + EPSILON))",
        "-A * ratio",
        {"several steps"},
    ),
    ("(policy_terms * mask).sum() / count", "(policy_terms * mask).mean()", LATER),
    ("- logp_old).exp()", "- logp_ref).exp()", LATER),
    (
        "0.5 * torch.max((V_new - Q) ** 2, (V_clipped - Q) ** 2)",
        "0.5 * (V_new - Q) ** 2",
        {"several steps"},
    ),
    ("for _ in range(EPOCHS):", "for _ in range(1):", {"several steps"}),
    ("// n).expand", "// (n + 1)).expand", {"macro_actions"} | LATER),
    ("step(optimizer, policy_loss + value_loss)", "step(optimizer, policy_loss)", LATER),
]


def points(path, capsys) -> dict[str, int]:
    """What the command prints, by part."""
    homework.main(path)
    return {
        line[:13].strip(): int(line[13:].split()[0])
        for line in capsys.readouterr().out.splitlines()
    }


@pytest.mark.parametrize("right, wrong, lost", [("", "", set()), *WRONG])
def test_the_right_solution_has_all_points_and_wrong_ones_lose_theirs(
    right, wrong, lost, tmp_path, capsys
):
    assert WHOLE.count(right) == 1 or not right
    path = tmp_path / "mine.py"
    path.write_text(WHOLE.replace(right, wrong) if right else WHOLE, encoding="utf-8")
    expected = {name: 0 if name in lost else worth for name, worth in build_it.POINTS.items()}
    assert points(path, capsys) == expected | {"sum": sum(expected.values())}


def test_the_start_is_the_single_file_without_three_functions_and_has_no_points(tmp_path, capsys):
    start = build_it.starter(WHOLE)
    assert start.count("NotImplementedError") == len(build_it.EMPTY) and "def log_probs" in start
    assert all(
        piece not in start
        for piece in ("GAMMA * next_value", "scatter_add", "// n", "policy_terms")
    )
    path = tmp_path / "mine.py"
    path.write_text(start, encoding="utf-8")
    assert points(path, capsys)["sum"] == 0


def test_the_page_names_all_parts_with_their_points():
    page = (
        (build_it.WHOLE.parents[1] / "docs" / "homework.md")
        .read_text(encoding="utf-8")
        .partition("## The assign")[2]
    )
    rows = re.findall(r"^\| (.*?) \| (\d+) \|", page, re.M)
    assert {name: int(points) for name, points in rows} == build_it.POINTS
    assert f"It has {sum(build_it.POINTS.values())} points" in page
