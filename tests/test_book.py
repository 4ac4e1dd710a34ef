"""The site, the handout and the PDF files; the figures to play with compute what the library computes."""

import copy
import json
import math
import re
import subprocess
import sys
from html import unescape
from itertools import product
from pathlib import Path

import nbformat
import pytest
import torch

from marlhf_lab.credit.gradient_signal import token_advantages
from marlhf_lab.credit.signal_kept import break_even, signal_kept
from marlhf_lite.training.rollout import Rollout

ROOT = Path(__file__).resolve().parent.parent
BOOK, PLAY = ROOT / "book", ROOT / "figures" / "interactive"
sys.path.insert(0, str(BOOK))
import check_outputs  # noqa: E402
import handout  # noqa: E402
import print_pdf  # noqa: E402

needs_browser = pytest.mark.skipif(
    print_pdf.find_browser() is None, reason="no Chromium browser on this machine"
)
LESSON = "notebooks/04_values_and_advantages"
SOLUTION = "notebooks/solutions/04_values_and_advantages"


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """Front page, documents, one lesson, its solutions and the figures to play with."""
    for package in ("sphinx", "myst_nb", "furo"):
        pytest.importorskip(
            package, reason="the extra `book` is not installed: `make book` installs it"
        )
    target = tmp_path_factory.mktemp("site")
    pages = f"README.md,docs/*.md,{LESSON}.ipynb,{SOLUTION}.ipynb,figures/interactive/*.md"
    command = [
        sys.executable,
        "-m",
        "sphinx",
        "-q",
        "-c",
        str(BOOK),
        "-D",
        f"include_patterns={pages}",
    ]
    subprocess.run(
        [*command, "-d", str(target / "cache"), str(ROOT), str(target / "html")],
        check=True,
        timeout=300,
    )
    return target / "html"


@pytest.mark.long
def test_site_has_outputs_as_committed_every_kind_of_page_and_nothing_from_the_network(site):
    lesson = (site / f"{LESSON}.html").read_text(encoding="utf-8")
    assert (
        lesson.count('class="cell_output') > 10
        and "profile cpu" in lesson
        and 'class="math' in lesson
    )
    pictures = re.findall(r'<img alt="([^"]*)"', lesson)
    assert len(pictures) > 3 and not any("_images" in words for words in pictures), (
        "the caption of a picture is its alternative text"
    )
    assert any(words.startswith("Six tokens become two") for words in pictures)
    front = (site / "index.html").read_text(encoding="utf-8")
    for page in (LESSON, SOLUTION, "docs/results", "docs/guide", "figures/interactive/README"):
        assert f'href="{page}.html"' in front and (site / f"{page}.html").is_file()
    for page in ("signal_kept", "one_update"):
        assert (site / "figures" / "interactive" / f"{page}.html").is_file()
    played = (site / "figures" / "interactive" / "one_update.html").read_text(encoding="utf-8")
    links = played.split("<script")[0]
    assert 'href="../../notebooks/01b_ppo.html"' in links and 'ipynb"' not in links, (
        "lessons of the site"
    )
    assert 'src="figures/interactive/one_update.html"' in front, "the live page on the first screen"
    loading = r'<(?:script|img|iframe|link rel="(?:stylesheet|preload)")[^>]*(?:src|href)="((?:https?:)?//[^"]*)"'
    outside = {
        page.name: re.findall(loading, page.read_text(encoding="utf-8"))
        for page in site.rglob("*.html")
    }
    assert len(outside) > 8 and not any(outside.values())


@pytest.mark.long
@needs_browser
def test_formulas_of_the_site_are_drawn_without_the_network(site):
    page = site / f"{LESSON}.html"
    drawn = print_pdf.browse(print_pdf.find_browser(), page, "--dump-dom")
    asked = len(re.findall(r'class="math notranslate', page.read_text(encoding="utf-8")))
    assert drawn.count("<mjx-container") == asked > 20 and "data-mjx-error" not in drawn


def test_handout_has_lessons_with_answer_cells_but_no_outputs_and_no_solutions(tmp_path):
    handout.main(ROOT / "notebooks", tmp_path)
    lessons = sorted((ROOT / "notebooks").glob("*.ipynb"))
    assert [path.name for path in sorted(tmp_path.glob("notebooks/*"))] == [
        path.name for path in lessons
    ]
    for path in lessons:
        lesson, copy = (
            nbformat.read(file, 4) for file in (path, tmp_path / "notebooks" / path.name)
        )
        code = [cell for cell in copy.cells if cell.cell_type == "code"]
        assert not any(cell.outputs or cell.execution_count for cell in code)
        sources = [cell.source for cell in lesson.cells if cell.cell_type == "code"]
        assert [cell.source for cell in code if not cell.id.endswith("-answer")] == sources
        exercises = [
            i for i, c in enumerate(copy.cells) if re.match(r"\*\*\d+ · |\d+\. \*", c.source)
        ]
        assert exercises and all(copy.cells[place + 1].cell_type == "code" for place in exercises)
        assert "solutions/" not in nbformat.writes(copy)
        text = "\n".join(cell.source for cell in copy.cells if cell.cell_type == "markdown")
        for place in re.findall(r"\]\((\.\./[^)]*)\)", text):
            assert (tmp_path / "notebooks" / place).is_file(), f"{path.name}: {place}"


def test_handout_has_cheat_sheet_homework_and_one_update_and_no_solution_of_the_assignment(
    tmp_path,
):
    handout.main(ROOT / "notebooks", tmp_path)
    assert (tmp_path / "docs" / "cheat_sheet.html").is_file()
    homework = (tmp_path / "docs" / "homework.md").read_text(encoding="utf-8")
    links = [link[2] for link in handout.LINK.finditer(homework) if link[2]]
    assert "seeds (results)" in homework and all(
        (tmp_path / "docs" / link).is_file() for link in links
    )
    page = tmp_path / "figures" / "interactive" / "one_update.html"
    for place in re.findall(r'href="([^"#]+)"', page.read_text(encoding="utf-8")):
        assert (page.parent / place).is_file(), place
    assert "NotImplementedError" in (tmp_path / "examples" / "ma_ppo_single_file.py").read_text(
        encoding="utf-8"
    )


@pytest.mark.long
def test_slides_have_figures_notes_and_a_plan_and_nothing_from_the_network(tmp_path):
    pytest.importorskip(
        "sphinx_revealjs", reason="the extra `book` is not installed: `make slides` installs it"
    )
    command = [
        sys.executable,
        "-m",
        "sphinx",
        "-q",
        "-W",
        "-b",
        "revealjs",
        str(BOOK / "slides"),
        str(tmp_path),
    ]
    subprocess.run(command, check=True, timeout=300)
    plans = (ROOT / "docs" / "teaching.md").read_text(encoding="utf-8")
    for deck, plan in (("lecture", "## A lecture of two hours"), ("session_1", "**Session 1 by")):
        page = (tmp_path / f"{deck}.html").read_text(encoding="utf-8")
        needed = [
            place.partition("?")[0]
            for place in re.findall(r'<(?:img|script|link)[^>]*(?:src|href)="([^"]*)"', page)
        ]
        assert len(needed) > 6 and all((tmp_path / place).is_file() for place in needed)
        # Each time of the plan but a pause stands in the notes of its slide.
        notes = " ".join(re.findall(r'<aside class="notes">(.*?)</aside>', page, re.S))
        rows = re.findall(r"^\| (\d+–\d+) \|", plans.partition(plan)[2].partition("\n## ")[0], re.M)
        assert len(rows) > 6 and all(minutes in notes for minutes in rows)


def test_pdf_without_a_browser_says_what_to_do(tmp_path):
    command = [sys.executable, str(BOOK / "print_pdf.py"), str(tmp_path), str(tmp_path)]
    done = subprocess.run(
        command, env={"BROWSER": "no-such-browser"}, capture_output=True, text=True
    )
    assert done.returncode == 2 and "BROWSER" in done.stderr and done.stderr.count("\n") == 1


@needs_browser
def test_pdf_of_each_page(tmp_path):
    (tmp_path / "notebooks").mkdir()
    (tmp_path / "notebooks" / "00_x.html").write_text("<!doctype html><title>x</title><p>a lesson")
    print_pdf.main(tmp_path, tmp_path / "pdf")
    assert (tmp_path / "pdf" / "00_x.pdf").read_bytes().startswith(b"%PDF")


# -- figures to play with, in a browser --------------------------------------------------------------------------------


@needs_browser
def test_the_cheat_sheet_prints_on_one_page_with_true_numbers(tmp_path):
    page, file = ROOT / "docs" / "cheat_sheet.html", tmp_path / "sheet.pdf"
    print_pdf.browse(
        print_pdf.find_browser(), page, "--no-pdf-header-footer", f"--print-to-pdf={file}"
    )
    assert re.findall(rb"/Count (\d+)", file.read_bytes()) == [b"1"]
    cells = re.findall(r'<td class="n">([\d.]+)</td>', page.read_text(encoding="utf-8"))
    methods = (1, 0.95), (5, 0.95), (1, 0.95**0.2)  # n and λ of each row
    kept = [
        signal_kept(200 - k, 201, n, lam, seen=0) for n, lam in methods for k in (10, 50, 100, 200)
    ]
    assert [float(cell) for cell in cells] == pytest.approx(kept, abs=6e-4)


SET = "const set = (id, v) => { byId(id).value = v; byId(id).dispatchEvent(new Event('input')); };"


def run_in(name: str, script: str, folder: Path):
    """What the JavaScript function body `script` returns in a browser that has loaded the page."""
    text = (PLAY / name).read_text(encoding="utf-8").replace("</html>", '<pre id="result"></pre>')
    text += f'<script>byId("result").textContent = JSON.stringify((() => {{{script}}})());</script>'
    copy = folder / name
    copy.write_text(text, encoding="utf-8")
    shown = print_pdf.browse(print_pdf.find_browser(), copy, "--dump-dom")
    return json.loads(unescape(re.search(r'<pre id="result">(.*?)</pre>', shown, re.S)[1]))


@needs_browser
def test_javascript_keeps_what_the_library_keeps(tmp_path):
    cases = [
        (index, length, n, lam, seen)
        for length, n, lam, seen in product(
            (1, 7, 60), (1, 2, 5, 50, math.inf), (0.0, 0.8, 0.95, 1.0), (0.0, 0.3, 1.0)
        )
        for index in {0, length // 2, length - 1}
    ]
    arguments = json.dumps(cases)  # json writes Infinity, which JavaScript reads
    script = f"return {arguments}.map(([i, T, n, l, s]) => [signalKept(i, T, n, l, s), breakEven(i, T, n, l)])"
    found = run_in("signal_kept.html", script, tmp_path)
    expected = [[signal_kept(*case), break_even(*case[:4])] for case in cases]
    assert found == [pytest.approx(pair, abs=1e-12) for pair in expected]


@needs_browser
def test_javascript_pools_as_the_library_does(tmp_path):
    """One token whose credit comes 60 tokens after its action, a critic that answers it, three baselines."""
    cases = [
        (place, n, *reaction, lam)
        for n, place in ((1, 0), (5, 0), (5, 3), (5, 4), (7, 2), (20, 11))
        for reaction in ((0.0, 0.0, 0.0), (1.0, 0.2, 0.2), (3.0, -0.5, 1.0))
        for lam in (0.8, 0.95, 1.0)
    ]
    found = run_in(
        "pooling.html", f"return {json.dumps(cases)}.map((one) => held(...one))", tmp_path
    )
    for (place, n, now, later, fade, lam), shares in zip(cases, found, strict=True):
        values = torch.zeros(1, n + 60)
        values[0, place + 1 :] = later + (now - later) * (1 - fade) ** torch.arange(n + 59 - place)
        mask, one = torch.ones(values.shape, dtype=torch.bool), torch.ones(1)
        rollout = Rollout([""], [""], mask.long(), mask.long(), mask, one.bool(), scores=one)
        expected = {"LONG": (1, lam ** (1 / n)), "START": (n, lam, "start"), "POOLED": (n, lam)}
        for name, how in expected.items():
            share = token_advantages(rollout, values, *how)[0, place].item()
            assert shares[name] == pytest.approx(share, abs=1e-4), (name, place, n, now, lam)


@needs_browser
def test_each_rule_shows_the_macro_actions_of_its_setting(tmp_path):
    page = (PLAY / "macro_actions.html").read_text(encoding="utf-8")
    data = json.loads(re.search(r'id="data">(.*?)</script>', page, re.S)[1])
    script = SET + "set('response', 1); set('n', 2); set('C', 10); set('seed', 4);"
    script += "const words = (dd) => [...dd.children].map((span) => span.textContent);"
    script += (
        "return [...document.querySelectorAll('dd')].map((dd) => [dd.dataset.rule, words(dd)])"
    )
    # the third n, the eleventh C, which begins at 2
    chosen = {"n": "3", "C": "12", "seed": "4", "": ""}
    for rule, spans in run_in("macro_actions.html", script, tmp_path):
        cuts = data["rules"][rule]["cuts"][1][chosen[data["rules"][rule]["parameter"]]]
        pieces = iter(data["responses"][1]["pieces"])
        assert spans == ["".join(next(pieces) for _ in range(length)) for length in cuts], rule
        assert next(pieces, None) is None


@pytest.fixture(scope="module")
def lesson():
    """A notebook of prose and two code cells, executed: one prints, one draws."""
    prints = (
        "print('loss 0.5000 after 12 updates, score −1.25')\nprint('marlhf_lite 0.1.0 · torch 2.9')"
    )
    draws = "from matplotlib import pyplot as plt\nplt.figure(figsize=(2, 1)); plt.plot([1, 2]); plt.show()"
    cells = [
        nbformat.v4.new_code_cell(prints, id="says"),
        nbformat.v4.new_code_cell(draws, id="draws"),
    ]
    prose = nbformat.v4.new_markdown_cell("At last the loss is 0.5000.", id="prose")
    return check_outputs.executed(nbformat.v4.new_notebook(cells=[prose, *cells]))


@pytest.mark.long
def test_a_check_of_outputs_leaves_the_notebook_and_its_exit_code_says_whether_something_left(
    lesson, tmp_path, capsys
):
    path, moved = tmp_path / "lesson.ipynb", copy.deepcopy(lesson)
    moved.cells[1].outputs[0].text = moved.cells[1].outputs[0].text.replace("0.5000", "0.6000")
    fails = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("1 / 0")])
    named = (
        (lesson, 0, "as committed"),
        (moved, 1, "says: number: 0.6000 → 0.5000"),
        (fails, 1, "ZeroDivisionError"),
    )
    for notebook, code, said in named:
        nbformat.write(notebook, path)
        before = path.read_bytes()
        assert check_outputs.main([str(path)]) == code and said in capsys.readouterr().out
        assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]


def test_equal_numbers_are_near_with_any_tolerance():
    assert all(
        check_outputs.near(number, number, tolerance)
        for number in ("0", "0.00")
        for tolerance in (0, math.inf)
    )


@pytest.mark.long
@pytest.mark.parametrize(
    "tag, old, new, lines",
    [
        ("", "0.5000", "0.5101", []),
        ("", "0.5000", "0.5104", ["says: number: 0.5000 → 0.5104 (also in prose)"]),
        ("tolerance:0.1", "0.5000", "0.5500", []),
        ("tolerance:0.01", "0.5000", "0.5100", ["says: number: 0.5000 → 0.5100 (also in prose)"]),
        ("tolerance:inf", "0.5000 after", "9.5000 after", []),
        ("", "12 updates", "14 updates", ["says: number: 12 → 14"]),
        ("", "−1.25", "1.25", ["says: number: −1.25 → 1.25"]),
        ("", "0.5000 after", "nan after", ["says: words: 'loss # after"]),
        ("tolerance:inf", "updates", "steps", ["says: words: "]),
        ("tolerance:skip", "updates", "steps", []),
        ("", "lite 0.1.0", "lite 0.2.0", []),  # the line of versions
    ],
)
def test_what_is_near_and_what_has_left(lesson, tag, old, new, lines):
    other, stored = copy.deepcopy(lesson), copy.deepcopy(lesson)
    stored.cells[1].metadata["tags"] = [tag]
    other.cells[1].outputs[0].text = other.cells[1].outputs[0].text.replace(old, new)
    found = check_outputs.compare(stored, other)
    assert len(found) == len(lines) and all(
        line.startswith(start) for line, start in zip(found, lines, strict=True)
    )


@pytest.mark.long
def test_outputs_that_are_new_missing_or_of_another_size_are_named(lesson):
    less, larger = copy.deepcopy(lesson), copy.deepcopy(lesson)
    less.cells[1].outputs = []
    (line,) = check_outputs.compare(lesson, less)
    assert line == "says: output: stream → nothing"
    (line,) = check_outputs.compare(less, lesson)
    assert line == "says: output: nothing → stream"
    larger.cells[2].source = larger.cells[2].source.replace("(2, 1)", "(2, 2)")
    (line,) = check_outputs.compare(lesson, check_outputs.executed(larger))
    assert line.startswith("draws: figure: ") and line.endswith("pixels")
