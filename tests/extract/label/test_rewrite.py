import pytest

from beatrice.extract.generate.generator import THINKING
from beatrice.extract.label.labels import escape
from beatrice.extract.label.rewrite import (
    RewriteConfig,
    count_rewrites,
    find_additions,
    read_rewrite,
    rewrite_contexts,
    rewrite_prompt,
)
from beatrice.extract.records import Passage, with_rewrites
from tests.extract.generate.loopback import open_replies
from tests.extract.label.scripted import (
    INJECTIONS,
    ScriptedGenerator,
    fields_of,
    generated,
)
from tests.records import an_example

SOURCE = (
    "Marie Curie: Maria Salomea Sk\u0142odowska-Curie (7 November 1867 \u2013 4 July "
    "1934) was a Polish physicist. In 1903 she shared the Nobel Prize in Physics; the "
    "prize money of 70,000 francs was split in two. Her husband, Pierre Curie, taught "
    "at the University of Paris."
)


def example(text=SOURCE, name="q", **fields):
    title, _, body = text.partition(": ")
    usual = {
        "question": "Which prize did Marie Curie share in 1903?",
        "golds": ("Nobel Prize in Physics",),
        "passages": (Passage(title=title, text=body, is_supporting=True),),
    }
    return an_example(**{"id": name, "split": "train", **usual, **fields})


@pytest.mark.parametrize(
    "faithful",
    [
        "Marie Curie was a Polish physicist who shared the Nobel Prize in Physics.",
        "In 1903, Curie shared the Nobel Prize in Physics with Pierre Curie.",
        "Maria Sk\u0142odowska-Curie (born 7 November 1867) taught physics.",
        "Maria Sklodowska was born in 1867.",
        "The prize money of 70000 francs was split in 2.",
        "Pierre Curie's university was the University of Paris.",
        "According to the text, the POLISH physicist shared a Physics prize.",
        "She died on 4 July 1934. However, it was 07 November when she was born.",
        "- Her husband: Pierre Curie\n- Prize: the Nobel Prize",
        "two francs",
        "",
    ],
)
def test_what_is_in_the_source_is_not_flagged(faithful):
    assert find_additions(faithful, SOURCE) == ((), (), ())


@pytest.mark.parametrize(
    ("rewrite", "numbers", "entities"),
    [
        ("Curie shared it in 1904.", ("1904",), ()),
        ("The prize was 70,001 francs.", ("70,001",), ()),
        ("It was 7.5 francs.", ("7.5",), ()),
        ("Curie shared it with Henri Becquerel.", (), ("Henri Becquerel",)),
        ("Einstein knew her.", (), ("Einstein",)),
        ("She shared the Nobel Prize in Chemistry.", (), ("Chemistry",)),
        ("Pierre Salomea taught.", (), ("Pierre Salomea",)),
        ("Marie Paris was a physicist.", (), ("Marie Paris",)),
        ("In Warsaw, 3 of the Curies met.", ("3",), ("Warsaw", "Curies")),
        ("\u0160koda in 1895", ("1895",), ("\u0160koda",)),
    ],
)
def test_a_planted_number_or_name_is_flagged(rewrite, numbers, entities):
    result = find_additions(rewrite, SOURCE)
    assert (result.numbers, result.entities) == (numbers, entities)


def test_a_number_in_a_passage_may_be_written_in_either_notation():
    assert find_additions("5 sons, 1,200 men", "five sons and 1200 men") == ((), (), ())
    assert find_additions("three", "a 3") == ((), (), ())
    assert find_additions("6 sons", "five sons").numbers == ("6",)
    assert find_additions("seven sons", "five sons").numbers == ("seven",)
    # "one" is mostly a pronoun.
    assert find_additions("one of the sons", "the sons") == ((), (), ())


def test_names_from_the_question_are_listed_separately():
    text, question = "Lyon had 9 mayors, Metz 8.", "How many mayors had Lyon?"
    result = find_additions(text, "x", question)
    assert result.entities == ("Lyon", "Metz")
    assert result.from_question == ("Lyon",)


def test_a_prompt_holds_question_and_context_once_whatever_they_inject():
    for injection in INJECTIONS:
        text = f"A town.\n{injection}"
        prompt = rewrite_prompt(example(f"Town: {text}"))
        assert fields_of(prompt) == [
            ("question", "Which prize did Marie Curie share in 1903?"),
            ("context", escape(f"Town: {text}")),
        ]


@pytest.mark.parametrize(
    "reply",
    [
        "Normalized Context: Curie won.",
        "normalised context:  Curie won.\n",
        "**Normalized Context:** Curie won.",
        "Sure!\n\nNormalized Context: Curie won.",
        "Curie won.",
    ],
)
def test_the_cue_and_the_text_before_it_are_removed(reply):
    assert read_rewrite(example(), generated(reply)).text == "Curie won."


@pytest.mark.parametrize(("begin", "end"), THINKING)
@pytest.mark.parametrize("thought", ["Who? Ada.", "It asks: 'Normalized Context: x'."])
def test_no_thinking_becomes_a_context(begin, end, thought):
    for reply in ("Normalized Context: Curie won.", "Curie won."):
        for opening in (begin, ""):  # in the prompt if the template writes it
            text = f"{opening}{thought}\n{end}\n\n{reply}"
            assert read_rewrite(example(), generated(text)).text == "Curie won."
        endless = read_rewrite(example(), generated(f"{begin}{thought} {reply}"))
        assert endless.text is None and "thinking" in endless.reason


def test_a_cut_or_empty_rewrite_is_dropped_with_the_reason():
    cut = read_rewrite(example(), generated("Curie", finish="length"))
    assert cut.text is None and "cut" in cut.reason
    assert "empty" in read_rewrite(example(), generated("Normalized Context: ")).reason


def rewritten(tmp_path, rule, examples, kind=ScriptedGenerator, **config):
    """Rewrite examples by a rule; return the rewrites and the prompts."""
    replies, generator = open_replies(tmp_path / "rewrite.jsonl"), kind(rule)
    result = rewrite_contexts(examples, generator, replies, RewriteConfig(**config))
    return result, generator.prompts


def test_only_in_domain_contexts_without_a_rewrite_are_rewritten(tmp_path):
    other = (Passage(title="t", text="x"),)
    changes = ({}, {"split": "ood"}, {"passages": ()}, {"rewritten": other})
    examples = [example(name=str(i), **x) for i, x in enumerate(changes)]
    result, prompts = rewritten(tmp_path, lambda prompt: "Curie won.", examples)
    assert [r.example_id for r in result] == ["0"] and len(prompts) == 1


def test_flags_are_counted_and_rewrites_of_changed_contexts_are_refused(tmp_path):
    replies = iter(["Curie won.", "Curie won in 2000.", "Einstein won.", ""])
    examples = [example(name=str(i), question=f"q{i}?") for i in range(4)]
    result, _ = rewritten(tmp_path, lambda prompt: next(replies), examples)
    failed = {"n": 4, "n_failed": 1, "n_overlong": 0}
    added = {"n_with_added_number": 1, "n_with_added_entity": 1}
    flagged = {"n_flagged": 2, "n_flagged_from_question_only": 0}
    assert count_rewrites(result) == failed | added | flagged
    joined = with_rewrites(examples, {r.example_id: r for r in result})
    assert [len(e.rewritten) for e in joined] == [1, 1, 1, 0]
    assert joined[1].rewritten[0].text == "Curie won in 2000."
    assert joined[1].rewritten[0].is_supporting
    assert joined[1].passages == examples[1].passages
    changed = example(name="1", passages=(Passage(title="", text="y"),))
    with pytest.raises(ValueError, match="rewrite` again"):
        with_rewrites([changed], {"1": result[1]})


def test_a_context_beyond_the_window_is_skipped_and_counted_only_on_request(tmp_path):
    class Small(ScriptedGenerator):
        max_length = 300

        def count_tokens(self, prompt):
            return len(prompt.text.split())

    long = example("T: " + "word " * 300, name="long")
    examples = [example(name="a", question="a?"), long, example(name="b")]

    def rewrites(name, **config):
        given = (tmp_path / name, lambda prompt: "Curie won.", examples, Small)
        return rewritten(*given, max_new_tokens=50, **config)

    result, prompts = rewrites("skip", skip_overlong=True)
    assert [r.example_id for r in result] == ["a", "long", "b"]
    assert [r.text for r in result] == ["Curie won.", None, "Curie won."]
    counts = count_rewrites(result)
    assert (counts["n_overlong"], counts["n_failed"], len(prompts)) == (1, 1, 2)
    _, prompts = rewrites("all")
    assert len(prompts) == 3  # a real backend would refuse
