import html.parser
import re
import shlex
from pathlib import Path

import pytest
from msgspec.structs import replace

from beatrice.benchmarks.results.page import (
    ReportData,
    accuracy_grid,
    frontier_curve,
    headline,
    missing,
    numbers,
    ranking_pictures,
    render_report,
    synergy_pictures,
    too_few_in_words,
)
from beatrice.benchmarks.results.report import next_steps, surest
from beatrice.benchmarks.results.tables import results_of
from beatrice.extract.records import IN_DOMAIN
from beatrice.extract.run.rows import encoder
from tests.benchmarks.results.sample import (
    MARKUP,
    PARTS,
    POOLED,
    anatomy_rows,
    row,
    sample_report,
    sample_results,
    sample_rows,
    undefined,
)

SECTIONS = "answers reliability detection figures findings".split()
FOLDS = "accuracy selection exhaustive ablations anatomy controller checks run".split()
NO_PARTS = dict.fromkeys("facts stage_seconds sweep selection reliability".split(), {})


def whole_report():
    rows = [*sample_rows(), *anatomy_rows()]
    return sample_report(rows=rows, studies=PARTS["studies"])


@pytest.fixture(scope="module")
def page():
    return render_report(whole_report())


@pytest.fixture(scope="module")
def svgs(page):
    drawings = re.findall(r"<svg.*?</svg>", page, re.DOTALL)
    assert len(drawings) == 35
    return drawings


class Outline(html.parser.HTMLParser):
    """Collects tags and checks that each one that opens also closes."""

    def __init__(self):
        super().__init__()
        self.open, self.tags = [], []

    def handle_starttag(self, tag, attrs):
        self.handle_startendtag(tag, attrs)
        if tag not in {"meta", "br", "hr", "link", "img"}:
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


@pytest.fixture(scope="module")
def tags(page):
    return outline(page)


def test_the_page_loads_nothing_from_outside(page, tags):
    assert "http:" not in page and "https:" not in page and "@import" not in page
    for tag, attributes in tags:
        assert tag not in {"link", "img", "iframe", "object"}
        assert "src" not in attributes
        assert attributes.get("href", "#").startswith("#")
    assert all(url.startswith("#") for url in re.findall(r"url\(([^)]*)", page))


def test_a_figure_refers_to_nothing_outside_itself(svgs):
    for svg in svgs:
        assert "<style" not in svg and "<metadata" not in svg
        ids = set(re.findall(r'\bid="([^"]*)"', svg))
        assert set(re.findall(r'(?:url\(|href=")#([^")]*)', svg)) <= ids


def test_every_colour_of_a_figure_is_a_variable_that_the_page_can_change(svgs):
    assert not re.search(r"(?<!, )#[0-9a-f]{6}\b", "".join(svgs))


def test_ids_are_unique_so_that_figures_can_share_the_page(tags):
    ids = [a["id"] for _, a in tags if "id" in a]
    # Matplotlib defines one marker several times inside a figure; the copies are equal.
    ours = [i for i in ids if not re.search(r"-m[0-9a-f]{10}$", i)]
    assert len(ours) == len(set(ours)) > 35


def test_the_same_run_gives_the_same_bytes_again(page):
    assert render_report(whole_report()) == page


def test_markup_in_questions_answers_and_facts_is_escaped(page):
    assert MARKUP not in page and page.count("<script") == 1  # its own
    assert page.count("&lt;script&gt;alert(&#34;x&#34;)&lt;/script&gt;") >= 2
    assert "&lt;i&gt;Osk&lt;/i&gt;" in page


def test_the_anatomy_is_on_the_page_and_its_cases_are_escaped(page):
    section = re.search(r'id="anatomy">.*?</section>', page, re.DOTALL).group()
    assert 'class="empty"' not in section and section.count("<svg") == 18
    assert "<script>" not in section and "&lt;script&gt;" in section
    assert "+.709†</span>" in section  # what the largest heads move more than others


def test_the_main_sections_are_open_and_the_others_are_folded(tags):
    assert [a["id"] for tag, a in tags if tag == "section" and "id" in a] == SECTIONS
    assert [a["id"] for tag, a in tags if a.get("class") == "fold"] == FOLDS
    links = [a["href"][1:] for tag, a in tags if tag == "a"]
    assert links == [*SECTIONS, *FOLDS]


def test_every_table_has_a_name_and_heads(tags):
    for position, (tag, attributes) in enumerate(tags):
        if tag == "table" and attributes.get("class") != "facts":
            before, after = tags[position - 1][1], tags[position + 1][0]
            assert before["role"] == "group" and before["aria-label"]
            assert after == "thead"


def test_headline_numbers_come_from_the_rows(page):
    champion = next(
        r
        for r in sample_rows()
        if (r.detector, r.setting, r.split) == ("champion", "with_context", "test")
    )
    value = f"{champion.value:.3f}".removeprefix("0")
    assert f'<dd class="value">{value}</dd>' in page
    assert f"{100 * champion.value:.0f} of 100 pairs with passages" in page


def test_undefined_values_are_shown_with_their_reason(page):
    assert '<span class="none">n/a</span><sup>1</sup>' in page
    assert "<li>one class only</li>" in page
    assert "<li>3 examples left out: no label or no score</li>" in page
    gone = undefined(row("champion", "closed_book", POOLED, "auroc", 0.5, n_failed=2))
    bare = ReportData(rows=[gone], accuracy=[], control=None, **NO_PARTS)
    assert "n/a</span><sup>1</sup><sup>,2</sup>" in render_report(bare)


def test_headlines_say_what_is_gained_over_a_simple_rival():
    shown = numbers(sample_results(), PARTS["reliability"])
    details = {label: detail for label, _, detail in shown}
    assert "against answer perplexity" in details["AUROC from memory"]
    pgir = details["Exact match, PGIR, mean of the sets"]
    assert "against always retrieve once" in pgir
    assert "2.40 generations per question" in pgir


def test_the_headline_says_how_perplexity_compares_and_what_is_trusted():
    first, second = headline(sample_results(), PARTS["shown"])
    assert re.fullmatch(
        r"A right answer scores above a wrong one in \d+ of 100 pairs from memory and "
        r"in \d+ of 100 pairs with passages; by the model's own perplexity in "
        r"\d+ \(worse\) and in \d+ \(no clear difference\)\.",
        first,
    )
    n = "beatrice trusts 33 % of 3 answers from memory, of which 100 % are right"
    assert second.startswith(n)
    bare = [replace(shown, is_certified=False) for shown in PARTS["shown"]]
    _, second = headline(sample_results(), bare)
    none = "beatrice trusts none of 3 answers from memory (no P is certified for "
    assert second.startswith(none)
    at = {"experiment": "decision", "kind": "trust"}
    lower = [
        row("champion", "closed_book", POOLED, metric, value, wanted=wanted, **at)
        for wanted, metric, value in (
            (0.7, "coverage", 0.5),
            (0.7, "precision", 0.75),
            (0.8, "coverage", 0.187),
            (0.8, "precision", 0.946),
            (0.9, "coverage", 0.0),
        )
    ]
    at |= {"wanted": 0.9}
    never = undefined(row("champion", "closed_book", POOLED, "precision", 0.5, **at))
    _, second = headline(results_of([*sample_rows(), *lower, never]), bare)
    assert "from memory (at 80 % it trusts 19 %, of which 95 % are right; all" in second
    bolder = [replace(shown, wanted=0.7) for shown in PARTS["shown"]]
    _, second = headline(sample_results(), bolder)
    assert second.startswith("At a requested precision of 70 %, beatrice trusts ")


def test_the_headline_says_how_many_answers_are_distrusted_and_how_rightly():
    def decisions(setting, **values):
        about = dict(experiment="decision", kind="distrust", wanted=0.9)
        at = "champion", setting, POOLED
        return [row(*at, *item, **about) for item in values.items()]

    decided = decisions("closed_book", coverage=0.418, precision=0.924)
    coverage, precision = decisions("with_context", coverage=0.0, precision=0.5)
    never = [coverage, undefined(precision)]
    assert headline(results_of([*decided, *never]), []) == [
        "At a requested precision of 90 %, it distrusts 42 % of the answers from "
        "memory, of which 92 % are wrong."
    ]
    assert headline(results_of(never), []) == []


def test_only_the_strongest_rival_is_said_to_be_chosen_on_the_same_questions(page):
    chosen = "The strongest rival is chosen on the same questions"
    before, after = page.split(chosen)  # once on the page
    assert "Against the strongest rival of each column" in before
    assert "Against hidden states only" in after


def test_worse_calibration_is_reported_unless_chance_explains_it():
    errors = {"ece_raw": 0.02, "ece_calibrated": 0.04}
    raw = replace(PARTS["reliability"]["closed_book"], **errors)
    for chance, is_reported in ((0.03, True), (0.05, False), (None, False)):
        curves = replace(raw, ece_by_chance=chance)
        (_, _, detail), *_ = numbers(results_of([]), {"closed_book": curves})
        assert ("worse than the .020 before" in detail) == is_reported
        assert (f"; up to .0{100 * (chance or 0):.0f}0 is chance" in detail) == bool(
            chance
        )


def test_too_few_answers_are_reported_at_the_top_and_above_the_answers():
    about = dict(dataset="d", split="train", variant="original", n=400)
    counts = [
        about | dict(setting=setting, n_correct=n)
        for setting, n in (("closed_book", 200), ("with_context", 40))
    ]
    assert too_few_in_words(counts[:1]) == ""
    words = too_few_in_words(counts)
    assert words.startswith("With context: 40 correct and 360 incorrect training")
    assert "Closed-book" not in words
    page = render_report(sample_report(accuracy=counts))
    assert page.count(words) == 2  # at the top and above the answers
    assert "This run cannot tell" not in page


def test_how_much_too_good_validation_looks_is_shown_with_the_selection(page):
    assert "too good validation looks" not in page
    fields = dict(experiment="optimism", ci_low=-0.05, ci_high=0.09)
    gap = row("champion", "with_context", POOLED, "auroc_gap", 0.0217, **fields)
    measured_page = render_report(sample_report(rows=[*sample_rows(), gap]))
    assert "The search&#39;s set" in measured_page and "-.050 to +.090" in measured_page


def test_synergy_is_measured_on_all_sets_together_not_on_the_last_one():
    aurocs = {IN_DOMAIN: (0.85, 0.65), "hotpotqa": (0.9, 0.6), "musique": (0.7, 0.8)}
    rows = [
        row(encoder(name), "closed_book", (dataset, "validation"), "auroc", value)
        for dataset, values in aurocs.items()
        for name, value in zip("HP", values, strict=True)
    ]
    (picture,) = synergy_pictures(results_of(rows))
    assert re.findall(r">\s*\.(\d{3})<", picture.svg) == ["850", "650"]


def test_a_caption_says_how_wide_intervals_are_and_which_encoder_is_undefined():
    gone = (encoder("HP"), "validation")
    rows = [
        undefined(r, "no seed ran") if (r.subject, r.split) == gone else r
        for r in sample_rows()
    ]
    captions = [x.caption for x in synergy_pictures(results_of(rows))]
    about = "The 95 % interval of one bar is about ±.030. HP is undefined: no seed ran."
    assert [about in x for x in captions] == [True, True]


def test_tokens_show_their_signals_as_titles(page):
    assert re.search(
        r'class="p\d" title="p 0\.\d{3}, surprisal \d\.\d\d nats, '
        r'entropy \d\.\d\d nats, margin 0\.\d\d"',
        page,
    )


def test_some_answers_are_shown_at_once_and_the_others_folded():
    sets = [
        replace(shown, kinds=[replace(k, answers=3 * k.answers) for k in shown.kinds])
        for shown in PARTS["shown"]
    ]
    page = render_report(sample_report(shown=sets))
    section = page[page.index('<section id="answers">') :]
    section = section[: section.index("</section>")]
    first, rest = section.split("<details><summary>Show")
    n_shown, n_folded = (x.count('<tr><th scope="row">') for x in (first, rest))
    assert (n_shown, n_folded) == (12, 6)  # two of each of three kinds and settings
    for words in ("right<small>trusted", "right<small>not trusted", "wrong<small>caug"):
        assert first.count(words) == 4
    assert "Karvia / Osk</bdi> and 7 more" in section
    assert "trusted from P = .710" in section


def test_the_surest_answer_is_the_first_that_is_right_and_trusted():
    shown = PARTS["shown"][0]
    trusted, *others = shown.kinds
    assert (shown.setting, trusted.name) == ("closed_book", "right and trusted")
    assert surest([shown]) is trusted.answers[0]
    assert surest([replace(shown, kinds=others)]) is None


def test_the_next_steps_can_be_pasted_into_a_shell():
    shown = PARTS["shown"]
    tables, *score = next_steps(Path("my runs/demo"), shown)
    assert shlex.split(tables)[2:5] == ["beatrice", "report", "my runs/demo"]
    answer = shown[0].kinds[0].answers[0]
    words = shlex.split("\n".join(score).replace("\\\n", " "))
    assert words[1:4] == ["beatrice", "score", "my runs/demo"]
    options = ["--question", answer.question, "--answer", answer.draft.answer]
    assert words[4:] == options


CASE = PARTS["control"].cases[0]
TOKEN = CASE.drafts[0].tokens[-1]


def page_of_case(draft, **changes):
    """Return a page with a single draft; it and its case have these changes."""
    case = replace(CASE, drafts=[replace(CASE.drafts[0], **draft)], **changes)
    control = replace(PARTS["control"], cases=[case])
    return render_report(sample_report(control=control, shown=[]))


def test_tints_follow_the_probability():
    tokens = [replace(TOKEN, p=p) for p in (0.0, 0.05, 0.3, 0.79, 1.0)]
    page = page_of_case({"tokens": tokens})
    strip = page[page.index('<span class="tokens"') :]
    assert re.findall(r'class="p(\d)"', strip) == ["0", "1", "2", "3", "4"]


@pytest.mark.parametrize("has_tokens", [True, False])
def test_every_text_of_an_answer_has_its_scripts_direction(has_tokens):
    text = "תשובה"
    tokens = [replace(TOKEN, text=text)] if has_tokens else []
    draft = {"answer": text, "tokens": tokens, "passages": [text]}
    page = page_of_case(draft, question=text, golds=[text])
    directed = rf'(?:<bdi>|dir="auto">)(?:<span [^>]*>)?{text}<'
    assert len(re.findall(directed, page)) == page.count(text) == 4


@pytest.mark.parametrize("answer", ["", "\n"])
def test_a_blank_answer_is_marked_as_no_answer(answer):
    blank = replace(TOKEN, text="\n")
    tokens = [replace(blank, span="question"), *len(answer) * [blank]]
    page = page_of_case({"answer": answer, "tokens": tokens})
    assert page.count("(no answer)") == 1


def test_an_empty_run_has_a_page_without_empty_sections():
    page = render_report(ReportData(rows=[], accuracy=[], control=None, **NO_PARTS))
    tags = outline(page)
    assert [a["id"] for tag, a in tags if a.get("class") == "fold"] == ["run"]
    assert sum(tag == "section" for tag, _ in tags) == 1
    assert "Not in this run: BEATRICE" in page


def test_what_was_not_run_is_named():
    rows = [r for r in sample_rows() if r.detector not in ("perplexity", "no_rag")]
    lacking = missing(sample_report(), results_of(rows))
    assert lacking == ["Answer perplexity", "Never retrieve"]
    assert missing(sample_report(), sample_results()) == []
    rows = [r for r in sample_rows() if r.detector != "without_closed_book"]
    selection = {"closed_book": PARTS["selection"]["closed_book"]}
    assert missing(sample_report(selection=selection), results_of(rows)) == []
    assert missing(sample_report(), results_of(rows))


def test_the_frontier_is_a_mean_over_the_same_datasets_at_every_budget():
    curve, datasets = frontier_curve(PARTS["control"].frontier)
    assert [point["budget"] for point in curve] == [0, 1, 2, 3, 4]
    assert datasets == ["microworld", "pursuits", "places", "rephrased"]
    with pytest.raises(ValueError, match="budget 4 has 3 entries"):
        frontier_curve(PARTS["control"].frontier[:-1])


def test_accuracy_of_several_in_domain_sets_is_also_shown_together():
    names = ("dataset", "split", "setting", "variant", "n", "n_correct")
    counts = [
        ("a", "test", "closed_book", "original", 10, 3),
        ("b", "test", "closed_book", "original", 30, 2),
        ("a", "train", "closed_book", "original", 5, 1),
        ("b", "test", "with_context", "original", 20, 9),  # the only set with passages
        ("c", "ood", "closed_book", "original", 7, 7),
        ("d", "ood", "closed_book", "original", 7, 6),
    ]
    lines = accuracy_grid([dict(zip(names, x, strict=True)) for x in counts])["lines"]
    assert [line[:2] for line in lines[5:]] == [(IN_DOMAIN, "test")]
    assert lines[5][2] == [{"n": 40, "n_correct": 5}, None]


def test_the_caption_of_a_ranking_gives_rank_and_gap():
    closed, _ = ranking_pictures(PARTS["ranking"])
    assert "455 sets" in closed.caption and "number 7 " in closed.caption
    assert "0.0012 AUROC below the best, (HP) (PR) (HRA)" in closed.caption
