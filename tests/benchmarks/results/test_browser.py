"""The pages in a real browser: how long they are, what folds, sorts and overflows.

Needs Chromium and `pip install playwright axe-playwright-python`.
"""

import shutil
from pathlib import Path

import pytest

from beatrice.benchmarks.results.page import render_report
from beatrice.pgir.score_files import page as score_page
from tests.benchmarks.results.test_report import whole_report

playwright = pytest.importorskip("playwright.sync_api")
axe = pytest.importorskip("axe_playwright_python")
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium"),
]
WIDE, PHONE = (1440, 900), (390, 844)


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as driver:
        chromium = driver.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox"]
        )
        yield chromium
        chromium.close()


def opened(browser, path, size=WIDE, scheme="light"):
    """Open a page, which may load nothing but its own file."""
    width, height = size
    page = browser.new_context(
        offline=True,
        color_scheme=scheme,
        viewport={"width": width, "height": height},
    ).new_page()
    urls = []
    page.on("request", lambda request: urls.append(request.url))
    page.goto(path.as_uri())
    assert urls == [path.as_uri()]
    return page


def serious(page):
    """Return the serious faults that axe-core finds with all folds open."""
    page.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
    (script,) = Path(axe.__file__).parent.rglob("axe.min.js")
    page.add_script_tag(path=str(script))
    violations = page.evaluate("axe.run()")["violations"]
    return [
        (x["id"], x["nodes"][0]["html"][:200])
        for x in violations
        if x["impact"] in ("serious", "critical")
    ]


def overflows(page):
    return page.evaluate("document.documentElement.scrollWidth > innerWidth")


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(render_report(whole_report()), encoding="utf-8")
    return path


def test_a_folded_section_is_printed_whole(browser, report):
    page = opened(browser, report, (703, 900))  # A4 between margins of 12 mm
    (words, *_) = page.locator("details.fold > p").all()
    assert not words.is_visible()
    page.emulate_media(media="print")
    assert words.is_visible()
    page.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
    # Only the columns of three made-up settings of retrieval do not fit.
    assert page.evaluate(
        "[...document.querySelectorAll('.scroll')].filter(x => x.scrollWidth > "
        "x.clientWidth + 1).map(x => x.getAttribute('aria-label'))"
    ) == ["Controllers"]


@pytest.mark.parametrize(("size", "most"), [(WIDE, 8), (PHONE, 12)])
def test_the_report_opens_short_and_nothing_overflows(browser, report, size, most):
    assert report.stat().st_size < 1_000_000
    page = opened(browser, report, size)
    height = page.evaluate("document.documentElement.scrollHeight")
    assert height / size[1] <= most
    assert not overflows(page)
    page.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
    assert page.evaluate("document.documentElement.scrollHeight") > 2 * height
    assert not overflows(page)
    values = "[...document.querySelectorAll('.facts td')].map(x => x.clientWidth)"
    assert min(page.evaluate(values)) > 150


@pytest.mark.parametrize("size", [WIDE, PHONE])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_serious_in_the_report(browser, report, size, scheme):
    assert serious(opened(browser, report, size, scheme)) == []


def test_a_heading_sorts_the_answers_up_and_down(browser, report):
    page = opened(browser, report)
    rows = "[...document.querySelector('.sortable').tBodies[0].rows]"
    of_p = f"{rows}.map(r => +r.cells[1].dataset.v)"
    before = page.evaluate(of_p)
    assert before != sorted(before)
    button = page.locator(".sortable th button", has_text="P(correct)").first
    for up in (True, False):
        button.click()
        assert page.evaluate(of_p) == sorted(before, reverse=not up)
        head = page.locator("th[aria-sort]")
        assert head.get_attribute("aria-sort") == ("ascending" if up else "descending")


def test_a_link_opens_the_fold_that_it_leads_to(browser, report):
    page = opened(browser, report)
    is_open = "document.getElementById('ablations').open"
    assert not page.evaluate(is_open)
    page.click("a[href='#ablations']")
    page.wait_for_function(is_open)  # the event comes a moment after the click


def test_a_wide_table_shows_a_hint_and_keeps_its_first_column_in_view(browser, report):
    page = opened(browser, report)
    boxes = "[...document.querySelectorAll('section > .scroll, section > .figures *')]"
    page.evaluate("scrollTo(0, 0)")
    assert page.evaluate(f"{boxes}.filter(x => x.tabIndex === 0).length") == 0
    page = opened(browser, report, PHONE)
    assert page.evaluate(f"{boxes}.filter(x => x.tabIndex === 0).length") > 0
    box = page.locator("#detection .scroll").first
    assert page.locator("#detection .hint").first.is_visible()
    name = box.locator("tbody th").first
    left = name.bounding_box()["x"]
    box.evaluate("x => x.scrollLeft = 300")
    assert name.bounding_box()["x"] == left


@pytest.mark.parametrize("size", [WIDE, PHONE])
@pytest.mark.parametrize("which", ["report", "scores"])
def test_no_letter_of_a_figure_is_smaller_than_about_twelve_pixels(
    browser, report, scores, size, which
):
    page = opened(browser, {"report": report, "scores": scores}[which], size)
    page.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
    sizes = page.evaluate(
        "[...document.querySelectorAll('svg text')].map(t => [t.textContent, "
        "parseFloat(getComputedStyle(t).fontSize) * "
        "Math.hypot(t.getScreenCTM().a, t.getScreenCTM().b)])"  # of turned text too
    )
    smallest = min((x for x in sizes if x[1]), key=lambda pair: abs(pair[1]))
    assert abs(smallest[1]) > 11.4, smallest


@pytest.fixture(scope="module")
def scores(tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "scores.html"
    kinds = ("trust", "distrust", "unknown")
    results = [
        {
            "line": i,
            "p_correct": None if i == 5 else (i * 7 % 10) / 10,
            "decision": kinds[i % 3],
            "tokens": [" Par", "is"],
            "log_probs": [-3.5, -0.2],
            "warnings": ["unusual input"],
        }
        for i in range(1, 10)
    ]
    shown = [(f"question {r['line']}", ["a passage"], r) for r in results]
    path.write_text(score_page("Scores", "9 rows", shown), encoding="utf-8")
    return path


def test_scored_answers_are_filtered_sorted_and_found(browser, scores):
    page = opened(browser, scores)
    lines = "[...document.querySelectorAll('article')].filter(r => !r.hidden)"
    lines += ".map(r => +r.dataset.line)"
    assert page.evaluate(lines) == list(range(1, 10))
    page.select_option("select", "up")
    by_p = sorted(
        (line for line in range(1, 10) if line != 5), key=lambda i: i * 7 % 10
    )
    assert page.evaluate(lines) == [*by_p, 5]  # the answer without P comes last
    page.uncheck("input[value=trust]")
    assert page.evaluate(lines) == [i for i in (*by_p, 5) if i % 3]
    page.fill("input[type=search]", "question 4")
    assert page.evaluate(lines) == [4]
    assert page.text_content("output") == "1 of 9 shown"


@pytest.mark.parametrize(("size", "position"), [(WIDE, "sticky"), (PHONE, "static")])
def test_filters_stay_in_view_only_where_they_leave_room(
    browser, scores, size, position
):
    page = opened(browser, scores, size)
    assert page.evaluate("getComputedStyle(document.forms[0]).position") == position


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_serious_in_scored_answers(browser, scores, scheme):
    page = opened(browser, scores, PHONE, scheme)
    assert serious(page) == [] and not overflows(page)
