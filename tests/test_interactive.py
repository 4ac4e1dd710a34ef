"""The figures to play with compute what the library computes, in a real browser."""

import json
import math
import re
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

pytestmark = pytest.mark.skipif(find_browser() is None, reason="no Chromium browser on this machine")
SET = "const set = (id, v) => { byId(id).value = v; byId(id).dispatchEvent(new Event('input')); };"


def run_in(name: str, script: str, folder: Path):
    """What the JavaScript function body `script` returns in a browser that has loaded the page."""
    text = (FOLDER / name).read_text(encoding="utf-8").replace("</html>", '<pre id="result"></pre>')
    text += f'<script>byId("result").textContent = JSON.stringify((() => {{{script}}})());</script>'
    copy = folder / name
    copy.write_text(text, encoding="utf-8")
    shown = browse(find_browser(), copy, "--dump-dom")
    return json.loads(unescape(re.search(r'<pre id="result">(.*?)</pre>', shown, re.S)[1]))


def test_javascript_keeps_what_the_library_keeps(tmp_path):
    cases = [
        (index, length, n, lam, seen)
        for length, n, lam, seen in product((1, 7, 60), (1, 2, 5, 50, math.inf), (0.0, 0.8, 0.95, 1.0), (0.0, 0.3, 1.0))
        for index in {0, length // 2, length - 1}
    ]
    arguments = json.dumps(cases)  # json writes Infinity, which JavaScript reads
    script = f"return {arguments}.map(([i, T, n, l, s]) => [signalKept(i, T, n, l, s), breakEven(i, T, n, l)])"
    found = run_in("signal_kept.html", script, tmp_path)
    expected = [[signal_kept(*case), break_even(*case[:4])] for case in cases]
    assert found == [pytest.approx(pair, abs=1e-12) for pair in expected]


def test_sliders_change_the_numbers_that_are_shown(tmp_path):
    values = "set('n', 51); set('lam', 0.9); set('seen', 0.2); set('length', 40); set('token', 8);"  # behind 50 is ∞
    script = SET + values + "return [byId('readout').textContent, byId('n').getAttribute('aria-valuetext')]"
    text, spoken = run_in("signal_kept.html", script, tmp_path)
    kept = [signal_kept(7, 40, n, lam, 0.2) for n, lam in ((1, 0.9), (math.inf, 0.9), (1, 0.9 ** (1 / 40)))]
    assert [float(x) for x in re.findall(r"\d\.\d{3}", text)] == pytest.approx(kept, abs=6e-4)
    assert spoken == "∞"


def test_each_rule_shows_the_macro_actions_of_its_setting(tmp_path):
    page = (FOLDER / "macro_actions.html").read_text(encoding="utf-8")
    data = json.loads(re.search(r'id="data">(.*?)</script>', page, re.S)[1])
    script = SET + "set('response', 1); set('n', 2); set('C', 10); set('seed', 4);"
    script += "const words = (dd) => [...dd.children].map((span) => span.textContent);"
    script += "return [...document.querySelectorAll('dd')].map((dd) => [dd.dataset.rule, words(dd)])"
    chosen = {"n": "3", "C": "12", "seed": "4", "": ""}  # the third n, the eleventh C, which begins at 2
    for rule, spans in run_in("macro_actions.html", script, tmp_path):
        cuts = data["rules"][rule]["cuts"][1][chosen[data["rules"][rule]["parameter"]]]
        pieces = iter(data["responses"][1]["pieces"])
        assert spans == ["".join(next(pieces) for _ in range(length)) for length in cuts], rule
        assert next(pieces, None) is None
