import collections
import dataclasses
import random
import statistics

import pytest

from beatrice.extract.world.facts import (
    OOD_DATASETS,
    RELATIONS,
    QuestionConfig,
    WorldConfig,
    accepted_answers,
    draw_queries,
    facts_of,
    make_examples,
    make_world,
)
from beatrice.extract.world.model import (
    RowSampler,
    WorldModelConfig,
    make_tokenizer,
    train,
)
from tests.extract.small_run import embedded_world

SMALL = WorldConfig(n_people=240, n_books=120, n_strangers=60, n_last_names=200)
QUESTIONS = QuestionConfig(n_train=300, n_evaluation=90, n_ood=60)


@pytest.fixture(scope="module")
def world():
    return make_world(SMALL)


@pytest.fixture(scope="module")
def examples(world):
    return make_examples(world, QUESTIONS)


def test_a_world_and_its_questions_depend_on_their_configuration(world, examples):
    again = make_world(SMALL)
    assert again == world
    assert make_examples(again, QUESTIONS) == examples
    other = make_world(dataclasses.replace(SMALL, seed=1))
    assert other.names["person"] != world.names["person"]


def test_every_set_has_the_size_that_was_asked_for(examples):
    sizes = collections.Counter((e.dataset, e.split) for e in examples)
    assert sizes["microworld", "train"] == 300
    assert sizes["microworld", "validation"] == sizes["microworld", "test"] == 90
    assert [sizes[name, "ood"] for name in OOD_DATASETS] == [60] * 3
    assert len({e.id for e in examples}) == len(examples)


def test_a_world_too_small_for_the_questions_is_refused(world):
    with pytest.raises(ValueError, match="ask for fewer questions"):
        make_examples(world, QuestionConfig(n_train=100_000))


def test_more_people_than_full_names_are_refused():
    with pytest.raises(ValueError, match="300 people .* raise n_last_names"):
        make_world(dataclasses.replace(SMALL, n_first_names=2, n_last_names=149))
    make_world(dataclasses.replace(SMALL, n_first_names=2, n_last_names=150))


def test_no_two_in_domain_splits_ask_about_the_same_name():
    """Names are subjects and bridges in questions and golds of the embedded world."""
    whole = embedded_world()
    known = {n for kind in ("person", "book", "company") for n in whole.names[kind]}
    words = {word for name in known for word in name.split()}
    owner = {}
    for example in make_examples(whole, QuestionConfig()):
        if example.dataset != "microworld":
            continue
        question = example.question.replace("?", "").split()
        subject = " ".join(word for word in question if word in words or word == "The")
        bridges = {gold.partition(", ")[0] for gold in example.golds if ", " in gold}
        assert subject in known and len(bridges & known) == example.meta["n_hops"] - 1
        for name in {subject, *bridges} & known:
            assert owner.setdefault(name, example.split) == example.split


def test_no_set_asks_for_a_fact_that_training_or_validation_asks_for(world):
    by_set = {
        (dataset, split): {fact for query in queries for fact in facts_of(query)}
        for dataset, split, _, queries in draw_queries(world, QUESTIONS)
    }
    for learned in ("train", "validation"):
        for set_and_split, facts in by_set.items():
            if set_and_split != ("microworld", learned):
                assert not facts & by_set["microworld", learned]


def test_no_question_text_occurs_in_two_splits(examples):
    owner = {}
    for example in examples:
        assert owner.setdefault(example.question, example.split) == example.split


def test_no_training_question_has_a_held_out_wording_or_relation(examples):
    nouns = {n for r in RELATIONS if r.group == "pursuits" for n in r.nouns}
    trained = " ".join(e.question for e in examples if e.split == "train").split()
    assert not {*nouns, "please"} & set(trained)


def test_an_answer_is_stated_in_its_context_exactly_when_the_mode_says_so(examples):
    kinds = set()
    for example in examples:
        mode, n_hops = example.meta["context"], example.meta["n_hops"]
        supporting = [p.text for p in example.passages if p.is_supporting]
        assert len(supporting) == n_hops - (mode != "answer")
        if n_hops == 1 or mode != "missing":  # of two facts, either may be missing
            is_stated = any(example.golds[0] in text for text in supporting)
            assert is_stated == (mode == "answer")
        kinds.add((mode, n_hops))
    assert len(kinds) == 3 * 2


def test_a_rewritten_context_has_other_texts_under_the_same_titles_and_marks(examples):
    assert {e.dataset for e in examples if not e.rewritten} == {*OOD_DATASETS}
    for example in (e for e in examples if e.dataset == "microworld"):
        for first, other in zip(example.passages, example.rewritten, strict=True):
            assert first.text != other.text
            assert first.title == other.title
            assert first.is_supporting == other.is_supporting


def test_objects_are_stated_about_equally_often(world):
    n_exposures = collections.Counter()
    for fact in world.facts.values():
        if fact.relation.name == "profession":
            n_exposures[fact.object] += fact.exposures
    assert max(n_exposures.values()) < 3 * min(n_exposures.values())


def test_held_out_sets_differ_in_how_often_their_facts_were_stated(world):
    exposures = collections.defaultdict(list)
    for fact in world.facts.values():
        exposures[fact.relation.group].append(fact.exposures)
    median = {group: statistics.median(numbers) for group, numbers in exposures.items()}
    assert median["places"] < median["in_domain"] < median["pursuits"]


def test_a_two_hop_answer_may_name_its_bridge_but_only_the_right_one(world):
    hop = world.two_hops[0]
    golds = accepted_answers(hop)
    bridge, end = (step.object for step in hop.steps)
    assert end in golds
    assert f"{bridge}, {end}" in golds
    bridges = (other.first.object for other in world.two_hops)
    other = next(name for name in bridges if name != bridge)
    assert f"{other}, {end}" not in golds


def test_the_tokenizer_knows_every_word_of_questions_passages_and_rows(world, examples):
    tokenizer, sampler, rng = make_tokenizer(world), RowSampler(world), random.Random(0)
    rows = [*sampler.fact_rows(rng, 300), *sampler.reading_rows(rng, 100)]
    texts = ["".join(text for text, _ in row) for row in rows]
    texts += [e.question for e in examples]
    texts += [p.text for p in world.passages]
    texts += [gold for e in examples for gold in e.golds]
    ids = tokenizer([t.replace("</s>", " ") for t in texts])["input_ids"]
    assert not any(tokenizer.unk_token_id in row for row in ids)


TINY = WorldModelConfig(
    n_layers=2, n_steps=4, n_reading_steps=2, n_fact_rows=4, n_reading_rows=2
)


def test_equal_recipes_train_equal_bytes_and_another_seed_others(threads_as_before):
    def trained(config):
        model, _ = train(embedded_world(), config, lambda *_: None)
        return {name: x.numpy().tobytes() for name, x in model.state_dict().items()}

    weights = trained(TINY)
    assert trained(TINY) == weights
    assert trained(dataclasses.replace(TINY, seed=1)) != weights
