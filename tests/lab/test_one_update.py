"""The page "One sentence, one update" in a real browser: each press, each slider, by keyboard, against the library."""

import re
import sys
from decimal import Decimal
from itertools import product
from pathlib import Path
from urllib.parse import unquote, urlparse

import pytest

from marlhf_lab.figures import notebook
from marlhf_lab.figures.one_update import STORY, one_update, page_data, true_advantages

sync_api = pytest.importorskip("playwright.sync_api", reason="the extra `dev` brings playwright")
ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "figures" / "interactive" / "one_update.html"
sys.path.insert(0, str(ROOT / "book"))
import course  # noqa: E402
import print_pdf  # noqa: E402

pytestmark = pytest.mark.skipif(
    print_pdf.find_browser() is None, reason="no Chromium browser on this machine"
)
PRESSES = (
    "Write",
    "Score",
    "Values",
    "δ",
    "Roll back with λ",
    "Cut",
    "Advantages to tokens",
    "Ratio and clip",
    "Step",
)
ROWS = {  # of each press: row of the page, row of the library
    "Write": {"p_old": "p"},
    "Score": {"r": "r"},
    "Values": {"V": "V"},
    "δ": {"delta": "delta"},
    "Roll back with λ": {"A": "A", "truth": "truth"},
    "Cut": {"cut": "cut"},
    "Advantages to tokens": {"macro_A": "macro_A"},
    "Ratio and clip": {"rho": "rho", "macro_rho": "macro_rho"},
    "Step": {"p": "p", "macro_p": "macro_p"},
}
ALL = STORY | {"steps": 2}  # where "Skip the questions" leads
SIGNED = {"r", "delta", "A", "truth", "macro_A", "δ", "Â"}
READ = """() => Object.fromEntries([...document.querySelectorAll('[id^=row-]:not([hidden])')].map((row) =>
  [row.id.slice(4), [...row.querySelectorAll('[data-value]')].map((cell) => ({
    name: cell.dataset.name ?? row.id.slice(4), value: Number(cell.dataset.value), text: cell.innerText.trim() }))]))"""


@pytest.fixture(scope="module")
def browser():
    with sync_api.sync_playwright() as playwright:
        started = playwright.chromium.launch(
            executable_path=print_pdf.find_browser(), args=["--no-sandbox"]
        )
        yield started
        started.close()


@pytest.fixture
def visit(browser):
    """A function that opens the page; it may load nothing else, and no error may come."""
    faults, contexts = [], []

    def visit(**look):
        context = browser.new_context(reduced_motion="reduce", **look)
        contexts.append(context)
        page = context.new_page()
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on(
            "request",
            lambda request: faults.append(request.url) if request.url != PAGE.as_uri() else None,
        )
        page.goto(PAGE.as_uri())
        return page

    yield visit
    assert not faults
    for context in contexts:
        context.close()


def three_decimals(x: float, name: str) -> str:
    """The text of a number: ties go to the even digit, 0 has no decimals, signs stand where they matter."""
    text = str(abs(round(Decimal(f"{x:.6f}"), 3)))
    sign = "−" if x < 0 else "+" if name in SIGNED else ""
    return sign + text if float(text) else "0"


def check_rows(page, settings: dict, presses=PRESSES) -> None:
    """Every row that the page shows has the library's numbers, as values and as text, and no other row is shown."""
    library = one_update(**settings) | {"truth": true_advantages()}
    words = [range(6)] if not settings["hole"] else [range(3), range(3, 6)]
    firsts = [library["macro_A"][t] for turn in words for t in turn[:: settings["n"]]]
    boxes = zip(*(library[f"macro_{name}"] for name in ("r", "V", "delta")), firsts, strict=True)
    library["cut"] = [number for box in boxes for number in box]
    shown = page.evaluate(READ)
    expected = {row: source for press in presses for row, source in ROWS[press].items()}
    assert shown.keys() == expected.keys()
    before = one_update(**settings | {"steps": 0})["p"]
    for row, source in expected.items():
        numbers = before if row == "p_old" else library[source]
        assert [cell["value"] for cell in shown[row]] == pytest.approx(numbers, abs=1e-6), (
            row,
            settings,
        )
        for cell in shown[row]:
            assert three_decimals(cell["value"], cell["name"]) in cell["text"].split(), (row, cell)
    asked = page.locator("[data-step]", has_text="Step again").inner_text().startswith("✓")
    for method in ("", "macro_"):
        stopped = ["stopped" in cell["text"] for cell in shown.get(f"{method}rho", ())]
        assert stopped == [
            asked and bool(x) for x in library[f"{method}stopped"][: len(stopped)]
        ], settings


def test_each_press_asks_then_shows_its_row_with_the_numbers_of_the_library(visit):
    page = visit()
    check_rows(page, STORY, ())
    for place, press in enumerate(PRESSES):
        assert page.locator("[aria-current=step]").inner_text() == f"{place + 1} {press}"
        check_rows(page, STORY, PRESSES[:place])
        page.locator("[data-guess]").last.click()
        assert page.evaluate("document.activeElement.id") == "verdict"
        check_rows(page, STORY | {"steps": int(press == "Step")}, PRESSES[: place + 1])
        for attempt in page.locator("[data-try]").all():
            attempt.click()
            assert page.locator("#note").inner_text()
            check_rows(page, page.evaluate("state"), PRESSES[: place + 1])
        page.locator("[data-next]").click()
    page.locator("[data-guess='1']").click()
    check_rows(page, STORY | {"steps": 2})
    for steps in range(3, 9):
        page.locator("[data-more='1']").click()
        check_rows(page, STORY | {"steps": steps})
    page.locator("[data-more='0']").click()
    check_rows(page, STORY | {"steps": 1})
    for setting in page.locator("[data-setting]").all():
        setting.click()
        assert page.locator(".note:visible").count() == 1, "the note of another setting has gone"
        check_rows(page, page.evaluate("state"))
    page.locator("#again").click()
    check_rows(page, STORY, ())


@pytest.mark.parametrize(
    "scale", [{"lam": 0.01}, {"sees": 0.05}, {"n": 1}], ids=lambda scale: next(iter(scale))
)
def test_each_slider_moves_by_the_arrow_keys_and_every_row_follows(visit, scale):
    page, (name, step) = visit(), next(iter(scale.items()))
    page.locator("#all").click()
    slider = page.locator(f"#{name}")
    slider.press("Home")
    value = low = {"lam": 0.0, "sees": 0.0, "n": 1}[name]
    top = {"lam": 1.0, "sees": 1.0, "n": 6}[name]
    while True:
        assert float(slider.get_attribute("aria-valuetext")) == value
        if name != "lam" or round(100 * value) % 5 == 0:
            settings = ALL | {name: value}
            check_rows(page, settings)
            shares = page.locator("[data-share]").evaluate_all(
                "all => all.map((share) => Number(share.dataset.value))"
            )
            assert shares == pytest.approx(one_update(**settings)["share"], abs=1e-6)
        if value >= top:
            break
        slider.press("ArrowRight")
        value = round(value + step, 2)
    assert value == top > low
    page.wait_for_function("document.getElementById('said').textContent.includes('advantage')")


def test_the_price_of_kl_and_many_settings_at_once(visit):
    page = visit()
    page.locator("#all").click()
    page.locator("#beta").check()
    check_rows(page, ALL | {"beta": 0.05})
    grid = product(
        (1, 2, 4, 6), (0.0, 0.5, 0.95, 1.0), (0.0, 0.35, 1.0), (0.0, 0.05), (0, 3, 8), (0, 2)
    )
    cases = [dict(zip(STORY, case, strict=True)) for case in grid]
    for case, found in zip(
        cases, page.evaluate("(cases) => cases.map(compute)", cases), strict=True
    ):
        for name, numbers in one_update(**case).items():
            assert found[name] == pytest.approx(numbers, abs=1e-6), (name, case)


@pytest.mark.parametrize("width", [375, 1280])
def test_what_a_friend_says_is_a_hole_in_every_row(visit, width):
    """Between the words of both turns, without a number; no macro action reaches over it."""
    page = visit(viewport={"width": width, "height": 800})
    page.locator("#all").click()
    assert page.locator(".hole:visible").count() == 0
    page.locator("#hole").check()
    for n in range(1, 7):
        page.evaluate("(n) => { state = { ...state, n }; draw(); }", n)
        check_rows(page, ALL | {"n": n, "hole": 2})
        for place, row in enumerate(page.locator("#rows .row:visible").all()):
            hole = row.locator(".hole").bounding_box()
            cells = [cell.bounding_box() for cell in row.locator(".cell").all()]
            assert hole["width"] > 20 and abs(hole["y"] - cells[0]["y"]) < 8
            for cell in cells:  # all in one line, none over the hole
                left, right = cell["x"] + cell["width"], cell["x"]
                assert left <= hole["x"] + 1 or right >= hole["x"] + hole["width"] - 1
                assert abs(cell["y"] - cells[0]["y"]) < 8
            assert ("nobody's action" if place else "a friend") in row.locator(
                ".hole"
            ).inner_text() or width < 640
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    page.locator("#hole").uncheck()
    check_rows(page, ALL | {"n": 6})


def test_the_page_is_small_and_says_that_browser_and_library_agree(visit):
    assert PAGE.stat().st_size <= 400_000
    assert "agree to six decimals" in visit().locator("#checked").inner_text()
    assert page_data()["checks"][0]["settings"] == STORY


def test_without_javascript_nothing_is_empty_and_the_lessons_are_named(visit):
    page, with_numbers = visit(java_script_enabled=False), visit()
    lead = page.locator(".lead").inner_text()
    assert (
        "gives it 0.6 % of the credit" in lead
        and lead == with_numbers.locator(".lead").inner_text()
    )
    assert page.locator("figure:visible, #card:visible, button:visible").count() == 0
    assert page.locator("noscript a").count() == 2


def lessons_of(page) -> list[str]:
    """Where the links of the page lead once all is shown, that of a setting's note included."""
    page.locator("#all").click()
    page.locator("[data-setting='3']").click()
    links = page.locator("a:visible")
    assert set(
        links.evaluate_all(
            "all => all.map((a) => a.target || document.querySelector('base').target)"
        )
    ) == {"_blank"}
    return links.evaluate_all("all => all.map((a) => a.href)")


def test_every_lesson_that_the_page_names_is_a_link_that_leads_there(visit):
    page = visit()
    found = lessons_of(page)
    # the first is a button's
    _, *named = re.findall(r"[Ll]esson (\d)|elective (\d\d)", page.locator("#end").inner_text())
    lessons = {str(lesson.place): lesson.file for lesson in course.LESSONS}
    electives = {elective.number: elective.file for elective in course.ELECTIVES}
    files = [lessons.get(lesson) or electives[elective] for lesson, elective in named]
    assert [Path(unquote(link)).stem for link in found] == files and len(named) == 8
    assert all(Path(unquote(urlparse(link).path)).is_file() for link in found)


@pytest.mark.parametrize(
    "home",
    ["lab/tree/notebooks/08_ma_ppo.ipynb", "book/notebooks/08_ma_ppo.html", "colab/frame.html"],
)
def test_in_the_output_of_a_lesson_links_lead_to_the_lessons_beside_it(browser, home):
    page, address = browser.new_page(), f"http://localhost/{home}"
    page.route(
        "**",
        lambda route: route.fulfill(
            body=notebook.page("one_update", height=800), content_type="text/html"
        ),
    )
    page.goto(address)
    found = lessons_of(page.frame_locator("iframe.play"))
    names = [
        path.stem
        for n in ("01b", "01", "01b", "02", "03", "08", "17", "13")
        for path in ROOT.glob(f"notebooks/{n}_*")
        if path.stem != "13_credit_diagnostics"
    ]
    beside = [str(Path(home).with_stem(name)) for name in names]
    assert found == (
        [f"http://localhost/{place}" for place in beside] if "08" in home else [""] * 8
    )
    page.close()


def test_a_notebook_s_output_unpacks_the_page(browser):
    page = browser.new_page()
    page.set_content(notebook.page("one_update", height=800))
    frame = page.frame_locator("iframe.play")
    frame.locator("[data-guess='0']").click()
    assert "Write" in frame.locator("#title").inner_text()
    page.close()


def test_from_start_to_end_by_keyboard_alone(visit):
    page = visit()

    def press_button(name):
        for _ in range(40):
            page.keyboard.press("Tab")
            if page.evaluate(
                "[document.activeElement.tagName, document.activeElement.innerText]"
            ) == ["BUTTON", name]:
                return page.keyboard.press("Enter")
        raise AssertionError(f"Tab does not reach {name}")

    for place, press in enumerate(PRESSES):
        press_button(page.locator("[data-guess='0']").inner_text())
        page.wait_for_function("document.getElementById('said').textContent.length > 20")
        assert page.locator("#path button").nth(place).inner_text() == f"✓ {press}"
        press_button(page.locator("[data-next]").inner_text())


CONTRAST = """() => {
  const numbers = (colour) => colour.match(/[\\d.]+/g).map(Number);
  const linear = (x) => (x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4);
  const light = ([r, g, b]) => 0.2126 * linear(r / 255) + 0.7152 * linear(g / 255) + 0.0722 * linear(b / 255);
  const behind = (node) => {
    const colour = numbers(getComputedStyle(node).backgroundColor);
    return colour.length === 4 && colour[3] === 0 ? behind(node.parentElement) : colour;
  };
  const written = (node) => [...node.childNodes].some((child) => child.nodeType === 3 && child.data.trim());
  return [...document.querySelectorAll("main *")].filter((node) => node.offsetParent && written(node)).map((node) => {
    const [a, b] = [numbers(getComputedStyle(node).color), behind(node)].map(light);
    return [(Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05), node.innerText];
  });
}"""


@pytest.mark.parametrize("colours", ["light", "dark"])
@pytest.mark.parametrize("width", [375, 1280])
def test_a_phone_shows_all_and_every_text_can_be_read(visit, colours, width):
    page = visit(color_scheme=colours, viewport={"width": width, "height": 800})
    while True:
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        cut = page.locator(".cell").evaluate_all(
            "all => all.filter((x) => x.scrollWidth > x.clientWidth + 1).length"
        )
        assert not cut, "numbers that are wider than their cells"
        contrasts = page.evaluate(CONTRAST)
        assert len(contrasts) > 20 and not [row for row in contrasts if row[0] < 4.5]
        if page.locator("[data-guess]").count():
            page.locator("[data-guess='0']").click()
        elif page.locator("[data-next]").count():
            page.locator("[data-next]").click()
        else:
            break
    assert page.locator("#end").is_visible()
