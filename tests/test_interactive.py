"""The figures to play with: as the script makes them, equal to the library in a real browser, usable by keyboard."""

import json
import math
import re
import runpy
import sys
from html import unescape
from itertools import product
from pathlib import Path

import pytest

from marlhf_lite.lab.credit.signal_kept import break_even, signal_kept

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "figures" / "interactive"
sys.path[:0] = [str(ROOT / "book")]
from print_pdf import browse, find_browser  # noqa: E402

PAGES = sorted(FOLDER.glob("*.html"))
needs_browser = pytest.mark.skipif(find_browser() is None, reason="no Chromium browser on this machine")


def run_in(page: Path, script: str, folder: Path):
    """What the JavaScript function body `script` returns in a browser that has loaded the page."""
    text = page.read_text(encoding="utf-8").replace("</html>", "")
    text += (
        f'<pre id="result"></pre><script>byId("result").textContent = JSON.stringify((() => {{{script}}})());</script>'
    )
    copy = folder / page.name
    copy.write_text(text, encoding="utf-8")
    shown = browse(find_browser(), copy, "--dump-dom")
    return json.loads(unescape(re.search(r'<pre id="result">(.*?)</pre>', shown, re.S)[1]))


SET = "const set = (id, v) => { byId(id).value = v; byId(id).dispatchEvent(new Event('input')); };"


def test_committed_pages_are_what_the_script_makes():
    made = runpy.run_path(str(FOLDER / "draw.py"))["pages"]()
    assert [path.name for path in PAGES] == sorted(made)
    assert not [p.name for p in PAGES if p.read_text(encoding="utf-8") != made[p.name]], (
        "run figures/interactive/draw.py"
    )


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_page_stands_alone_and_each_control_has_a_name(page):
    text = page.read_text(encoding="utf-8")
    assert not re.findall(r"https?://|\bsrc=|@import|<link", text)
    controls = re.findall(r"<(?:input|select)\b[^>]*>", text)
    labels = re.findall(r"<label>.*?</label>", text)
    assert controls and len(labels) == len(controls)
    assert "tabindex" not in text and "<html lang=" in text


@needs_browser
def test_javascript_keeps_what_the_library_keeps(tmp_path):
    cases = [
        (index, length, n, lam, seen)
        for length, n, lam, seen in product((1, 7, 60), (1, 2, 5, 50, math.inf), (0.0, 0.8, 0.95, 1.0), (0.0, 0.3, 1.0))
        for index in {0, length // 2, length - 1}
    ]
    arguments = json.dumps(cases)  # json writes Infinity, which JavaScript reads
    script = f"return {arguments}.map(([i, T, n, l, s]) => [signalKept(i, T, n, l, s), breakEven(i, T, n, l)])"
    found = run_in(FOLDER / "signal_kept.html", script, tmp_path)
    expected = [[signal_kept(*case), break_even(*case[:4])] for case in cases]
    assert found == [pytest.approx(pair, abs=1e-12) for pair in expected]


@needs_browser
@pytest.mark.parametrize(("n", "shown"), [(5, "5"), (51, "∞")])
def test_sliders_change_the_numbers_that_are_shown(n, shown, tmp_path):
    values = {"n": n, "lam": 0.9, "seen": 0.2, "length": 40, "token": 8}
    script = SET + "".join(f"set('{name}', {value});" for name, value in values.items())
    script += (
        "return [byId('readout').textContent, byId('n').getAttribute('aria-valuetext'), byId('MA').getAttribute('d')]"
    )
    text, spoken, path = run_in(FOLDER / "signal_kept.html", script, tmp_path)
    size = math.inf if n > 50 else n
    kept = [signal_kept(7, 40, k, lam, 0.2) for k, lam in ((1, 0.9), (size, 0.9), (1, 0.9 ** (1 / min(size, 40))))]
    assert [float(x) for x in re.findall(r"\d\.\d{3}", text)] == [pytest.approx(k, abs=6e-4) for k in kept]
    assert spoken == shown and path.count("H") == 40


@needs_browser
def test_each_rule_shows_the_macro_actions_of_its_setting(tmp_path):
    page = FOLDER / "macro_actions.html"
    data = json.loads(re.search(r'id="data">(.*?)</script>', page.read_text(encoding="utf-8"), re.S)[1])
    script = SET + "set('response', 1); set('n', 2); set('C', 10); set('seed', 4);"
    script += "const words = (dd) => [...dd.children].map((span) => span.textContent);"
    script += "return [...document.querySelectorAll('dd')].map((dd) => [dd.dataset.rule, words(dd)])"
    chosen = {"n": "3", "C": "12", "seed": "4", "": ""}  # the third n, the eleventh C, which begins at 2
    pieces = data["responses"][1]["pieces"]
    for rule, spans in run_in(page, script, tmp_path):
        lengths = iter(data["rules"][rule]["cuts"][1][chosen[data["rules"][rule]["parameter"]]])
        rest = iter(pieces)
        assert spans == ["".join(next(rest) for _ in range(length)) for length in lengths], rule
        assert next(rest, None) is None
