import html.parser
import re

import pytest

from beatrice.benchmarks.results.names import encoder
from beatrice.benchmarks.results.report import (
    frontier_curve,
    headlines,
    missing,
    ranking_pictures,
    render_report,
    synergy_pictures,
)
from beatrice.benchmarks.results.tables import results_of
from beatrice.extract.records import IN_DOMAIN
from tests.benchmarks.results.sample import (
    MARKUP,
    PARTS,
    anatomy_rows,
    row,
    sample_report,
    sample_results,
    sample_rows,
    undefined,
)

SECTIONS = (
    "findings run detection reliability accuracy layers synergy selection exhaustive "
    "ablations anatomy controller answers cases checks notes"
).split()
EMPTY = dict(
    facts={},
    stage_seconds={},
    rows=[],
    accuracy=[],
    sweep={},
    selection={},
    reliability={},
    control={},
    cases=[],
    shown=[],
    ranking={},
    ablations={},
)


def whole_report():
    rows = [*sample_rows(), *anatomy_rows()]
    return sample_report(rows=rows, studies=PARTS["studies"])


@pytest.fixture(scope="module")
def page():
    return render_report(whole_report())


class Outline(html.parser.HTMLParser):
    """Collects tags and checks that each one that opens also closes."""

    VOID = {"meta", "br", "hr", "link", "img"}

    def __init__(self):
        super().__init__()
        self.open, self.tags = [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def outline(page):
    parser = Outline()
    parser.feed(page)
    parser.close()
    assert parser.open == []
    return parser.tags


def test_every_tag_that_opens_closes(page):
    assert len(outline(page)) > 500


def test_the_page_asks_for_nothing_from_outside(page):
    assert "http:" not in page and "https:" not in page and "@import" not in page
    for tag, attributes in outline(page):
        assert tag not in {"script", "link", "img", "iframe", "object"}
        assert "src" not in attributes
        assert attributes.get("href", "#").startswith("#")
    assert all(url.startswith("#") for url in re.findall(r"url\(([^)]*)", page))


def test_ids_are_unique_so_that_figures_can_share_the_page(page):
    ids = [a["id"] for _, a in outline(page) if "id" in a]
    # Matplotlib defines one marker several times inside a figure; the copies are equal.
    ours = [i for i in ids if not re.search(r"-m[0-9a-f]{10}$", i)]
    assert len(ours) == len(set(ours))


def test_the_same_run_gives_the_same_bytes_again(page):
    assert render_report(whole_report()) == page


def test_markup_in_questions_answers_and_facts_is_text(page):
    assert MARKUP not in page and "<script" not in page
    assert page.count("&lt;script&gt;alert(&#34;x&#34;)&lt;/script&gt;") >= 2
    assert "&lt;i&gt;Osk&lt;/i&gt;" in page


def test_every_section_is_there_and_filled(page):
    found = [a["id"] for tag, a in outline(page) if tag == "section"]
    assert found == SECTIONS
    assert 'class="empty"' not in page


def test_headline_numbers_come_from_the_rows(page):
    champion = next(
        r
        for r in sample_rows()
        if (r.detector, r.setting, r.split) == ("champion", "with_context", "test")
    )
    value = f"{champion.value:.3f}".removeprefix("0")
    assert f'<dd class="value">{value}</dd>' in page


def test_undefined_values_are_shown_with_their_reason(page):
    assert 'title="AUROC: one class only">n/a</span><sup>1</sup>' in page
    assert "<li>one class only</li>" in page
    assert "<li>3 examples left out: no label or no score</li>" in page


def test_headlines_say_what_is_gained_over_a_simple_rival():
    shown = headlines(sample_results(), PARTS["reliability"])
    details = {label: detail for label, _, detail in shown}
    assert "against answer perplexity" in details["AUROC closed-book, in-domain test"]
    pgir = details["Exact match, PGIR, mean of the sets"]
    assert "against always retrieve once" in pgir
    assert "2.40 generations per question" in pgir


def test_how_much_too_good_validation_looks_is_told_beside_the_selection(page):
    assert "too good validation looks" not in page
    measured = row(
        "champion",
        "with_context",
        (IN_DOMAIN, "test"),
        "auroc_gap",
        0.0217,
        experiment="optimism",
        ci_low=-0.05,
        ci_high=0.09,
    )
    told = render_report(sample_report(rows=[*sample_report().rows, measured]))
    assert "The set searched" in told and "-.050 to +.090" in told


def test_synergy_is_measured_on_all_sets_together_not_on_the_last_one():
    rows = [
        row(encoder(name), "closed_book", (dataset, "validation"), "auroc", value)
        for name, own in (("H", (0.85, 0.9, 0.7)), ("P", (0.65, 0.6, 0.8)))
        for dataset, value in zip((IN_DOMAIN, "hotpotqa", "musique"), own, strict=True)
    ]
    (picture,) = synergy_pictures(results_of(rows))
    assert re.findall(r">\.(\d{3})<", picture.svg) == ["850", "650"]


def test_an_undefined_encoder_is_named_below_its_figure():
    rows = [
        undefined(r, "no seed ran")
        if (r.subject, r.split) == (encoder("HP"), "validation")
        else r
        for r in sample_rows()
    ]
    for picture in synergy_pictures(results_of(rows)):
        assert "HP is undefined: no seed ran." in picture.caption


def test_tokens_carry_their_signals(page):
    assert re.search(
        r'class="token p\d" title="p 0\.\d{3}, surprisal \d\.\d\d nats, '
        r'entropy \d\.\d\d nats, margin 0\.\d\d"',
        page,
    )


def test_each_kind_of_answer_is_shown_and_a_missing_kind_is_said(page):
    section = page[page.index('<section id="answers">') :]
    section = section[: section.index("</section>")]
    assert section.count("<h3") == 8  # four kinds of two settings
    assert section.count("No answer of this set is wrong and missed.") == 2
    assert "gold: Karvia / Osk and 7 more" in section
    assert 'title="trusted from .710"' in section
    assert section.count("a very long answer " * 20) == 2  # whole


def test_tints_follow_the_probability():
    token = dict(text="x", span="answer", surprisal=1.0, entropy=1.0, margin=0.1)
    case = dict(dataset="d", question="q", golds=["g"], action="a", verdict="v")
    draft = dict(
        setting="closed_book", answer="x", p_correct=0.5, correct=True, passages=[]
    )
    draft["tokens"] = [token | {"p": p} for p in (0.0, 0.05, 0.3, 0.79, 1.0)]
    cases = [case | {"drafts": [draft]}]
    page = render_report(sample_report(**EMPTY | {"cases": cases}))
    strip = page[page.index('<span class="strip answer">') :]
    assert re.findall(r'class="token p(\d)"', strip) == ["0", "1", "2", "3", "4"]


def test_an_empty_run_still_makes_a_page_that_says_so():
    page = render_report(sample_report(**EMPTY))
    outline(page)
    assert page.count('class="empty"') == 28
    assert "Not in this run: BEATRICE" in page


def test_what_was_not_run_is_named():
    rows = [r for r in sample_rows() if r.detector not in ("perplexity", "no_rag")]
    lacking = missing(sample_report(), results_of(rows))
    assert lacking == ["Answer perplexity", "Never retrieve"]
    assert missing(sample_report(), sample_results()) == []


def test_the_frontier_is_a_mean_over_the_same_datasets_at_every_budget():
    curve, datasets = frontier_curve(PARTS["control"]["frontier"])
    assert [point["budget"] for point in curve] == [0, 1, 2, 3, 4]
    assert datasets == ["microworld", "pursuits", "places", "rephrased"]
    with pytest.raises(ValueError, match="budget 4 has 3 entries"):
        frontier_curve(PARTS["control"]["frontier"][:-1])


def test_the_caption_of_a_ranking_gives_rank_and_gap():
    closed, _ = ranking_pictures(PARTS["ranking"])
    assert "455 sets" in closed.caption and "number 7 " in closed.caption
    assert "0.0012 AUROC below the best, (HP) (PR) (HRA)" in closed.caption
