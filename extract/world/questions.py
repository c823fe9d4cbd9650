"""Questions over the microworld, each with a context of three passages.

The context is controlled, as in the paper's main tables: it usually holds the
answer, sometimes lacks it, and sometimes states another one, so that the model's
answer with context is wrong for reasons that the question's words do not show.
"""

import dataclasses
import random
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Literal

from beatrice.extract.records import Example, Passage, Split
from beatrice.extract.world.facts import (
    BY_NAME,
    RELATIONS,
    TWO_HOPS_IN_DOMAIN,
    TWO_HOPS_REPHRASED,
    Fact,
    Relation,
    TwoHop,
    World,
    questions,
    rephrased_questions,
    short_form,
    statements,
    stream,
    two_hop_question,
)

ContextMode = Literal["answer", "missing", "conflict"]
N_PASSAGES = 3
OOD_DATASETS = ("pursuits", "places", "rephrased")


@dataclasses.dataclass(frozen=True, kw_only=True)
class QuestionConfig:
    """How many questions are asked and how their contexts are made."""

    n_train: int = 3000
    n_evaluation: int = 600  # validation and test each
    n_ood: int = 400  # each of the three held-out sets
    p_two_hop: float = 0.25
    p_missing: float = 0.14
    p_conflict: float = 0.08
    ood_missing: tuple[float, float, float] = (0.10, 0.30, 0.18)


@dataclasses.dataclass(frozen=True)
class Claim:
    """One sentence to be stated: possibly untrue."""

    relation: Relation
    subject: str
    object: str
    is_supporting: bool = False


Query = Fact | TwoHop


def accepted_answers(query: Query) -> tuple[str, ...]:
    """Return every accepted wording of the true answer.

    A two-hop answer may name the bridge first ("bridge, answer"), as the model
    was taught to; the bridge must then be right too.
    """
    if isinstance(query, Fact):
        kind = BY_NAME[query.relation].object
        return tuple(dict.fromkeys((query.object, short_form(kind, query.object))))
    last = BY_NAME[query.second].object
    ends = dict.fromkeys((query.object, short_form(last, query.object)))
    middle = BY_NAME[query.first].object
    starts = dict.fromkeys((query.bridge, short_form(middle, query.bridge)))
    return (*ends, *(f"{start}, {end}" for start in starts for end in ends))


def gold_claims(query: Query) -> list[Claim]:
    """Return the true statements that answer the query."""
    if isinstance(query, Fact):
        return [Claim(BY_NAME[query.relation], query.subject, query.object, True)]
    return [
        Claim(BY_NAME[query.first], query.subject, query.bridge, True),
        Claim(BY_NAME[query.second], query.bridge, query.object, True),
    ]


def _distractor(rng: random.Random, world: World, query: Query) -> Claim:
    """Return a true statement on the same subject, or of the same relation."""
    relation = query.relation if isinstance(query, Fact) else query.first
    kind = BY_NAME[relation].subject
    if rng.random() < 0.5:
        others = [r for r in RELATIONS if r.subject == kind and r.name != relation]
        fact = world.facts[query.subject, rng.choice(others).name]
    else:
        subject = rng.choice([s for s in world.names[kind] if s != query.subject])
        fact = world.facts[subject, relation]
    return Claim(BY_NAME[fact.relation], fact.subject, fact.object)


def make_claims(
    rng: random.Random, world: World, query: Query, mode: ContextMode
) -> list[Claim]:
    """Return the three claims of a context, shuffled.

    Of the gold claims `answer` keeps all, `missing` drops one, and `conflict` changes
    the object of the last. Distractors come from the world.
    """
    claims = gold_claims(query)
    if mode == "missing":
        claims.pop(rng.randrange(len(claims)))
    elif mode == "conflict":
        last = claims.pop()
        objects = world.names[last.relation.object]
        wrong = rng.choice([o for o in objects if o not in (last.object, last.subject)])
        claims.append(Claim(last.relation, last.subject, wrong))
    while len(claims) < N_PASSAGES:
        extra = _distractor(rng, world, query)
        stated = [(c.relation, c.subject) for c in (*claims, *gold_claims(query))]
        if (extra.relation, extra.subject) not in stated:
            claims.append(extra)
    rng.shuffle(claims)
    return claims


def state(claim: Claim, wording: int) -> Passage:
    """Return the claim as a passage in one of its three wordings."""
    texts = statements(claim.relation, claim.subject, claim.object)
    return Passage(
        title=claim.subject, text=texts[wording], is_supporting=claim.is_supporting
    )


def word_question(rng: random.Random, query: Query, rephrased: bool = False) -> str:
    """Return the query in one of its wordings."""
    if isinstance(query, TwoHop):
        first, second = BY_NAME[query.first], BY_NAME[query.second]
        return two_hop_question(first, second, query.subject, rng.randrange(2))
    wordings = rephrased_questions if rephrased else questions
    return rng.choice(wordings(BY_NAME[query.relation], query.subject))


def facts_of(query: Query) -> tuple[tuple[str, str], ...]:
    """Return the facts that a query asks for, as (subject, relation)."""
    if isinstance(query, Fact):
        return ((query.subject, query.relation),)
    return ((query.subject, query.first), (query.bridge, query.second))


def split_of_subjects(world: World) -> dict[str, Split]:
    """Return the split of every person and book: two thirds train, a sixth each."""
    splits: dict[str, Split] = {}
    for kind in ("person", "book"):
        subjects = list(world.names[kind])
        stream(world.config, f"splits/{kind}").shuffle(subjects)
        sixth = len(subjects) // 6
        splits |= dict.fromkeys(subjects[:sixth], "validation")
        splits |= dict.fromkeys(subjects[sixth : 2 * sixth], "test")
        splits |= dict.fromkeys(subjects[2 * sixth :], "train")
    return splits


def _pool(
    world: World, dataset: str, split: Split, may_ask: Callable[[Query], bool]
) -> tuple[list[Fact], list[TwoHop]]:
    """Return the one-hop and the two-hop queries that a set may be drawn from."""
    group = dataset if dataset in ("pursuits", "places") else "in_domain"
    hops = {"microworld": TWO_HOPS_IN_DOMAIN, "rephrased": TWO_HOPS_REPHRASED}
    splits = split_of_subjects(world)
    wanted = {"microworld": split, "rephrased": "test"}.get(dataset)
    one_hop = [
        fact
        for fact in world.facts.values()
        if BY_NAME[fact.relation].group == group
        and wanted in (None, splits.get(fact.subject))
        and may_ask(fact)
    ]
    two_hop = [
        hop
        for hop in world.two_hops
        if (hop.first, hop.second) in hops.get(dataset, ())
        and (dataset == "rephrased" or splits[hop.subject] == split)
        and may_ask(hop)
    ]
    return one_hop, two_hop


def _queries(
    rng: random.Random,
    config: QuestionConfig,
    split: Split,
    one_hop: Sequence[Query],
    two_hop: Sequence[Query],
) -> list[Query]:
    """Return the queries of one set: distinct, two-hop ones in the wanted share."""
    n = {"train": config.n_train, "ood": config.n_ood}.get(split, config.n_evaluation)
    n_two_hop = min(round(n * config.p_two_hop), len(two_hop))
    if n - n_two_hop > len(one_hop):
        raise ValueError(
            f"the world has {len(one_hop)} facts for a set of {n - n_two_hop} one-hop "
            "questions; ask for fewer questions or make a larger world"
        )
    queries = [*rng.sample(one_hop, n - n_two_hop), *rng.sample(two_hop, n_two_hop)]
    rng.shuffle(queries)
    return queries


def draw_queries(
    world: World, config: QuestionConfig
) -> Iterator[tuple[str, Split, random.Random, list[Query]]]:
    """Yield dataset, split, random stream and queries of every set.

    In-domain splits share no name that is asked about, be it the subject or the bridge
    of a two-hop question: test is drawn first, then validation, then training, each
    from what the others leave. Held-out sets ask for no fact that a training or
    validation question asks for; they may for one of the test set.
    """
    order: tuple[Split, ...] = ("test", "validation", "train")
    splits = split_of_subjects(world)
    used_names: set[str] = set()  # subjects and bridges of the sets drawn so far
    learned: set[tuple[str, str]] = set()  # facts of training and validation

    def leaves(split: Split, query: Query) -> bool:
        names = {name for name, _ in facts_of(query)}
        left = order[order.index(split) :]
        return not names & used_names and all(
            splits.get(name, split) in left for name in names
        )

    for split in order:
        rng = stream(world.config, f"questions/microworld/{split}")
        pools = _pool(world, "microworld", split, partial(leaves, split))
        queries = _queries(rng, config, split, *pools)
        facts = {fact for query in queries for fact in facts_of(query)}
        used_names |= {name for name, _ in facts}
        learned |= facts if split != "test" else set()
        yield "microworld", split, rng, queries
    for dataset in OOD_DATASETS:
        rng = stream(world.config, f"questions/{dataset}")
        pools = _pool(world, dataset, "ood", lambda q: learned.isdisjoint(facts_of(q)))
        yield dataset, "ood", rng, _queries(rng, config, "ood", *pools)


def _examples(
    world: World,
    config: QuestionConfig,
    dataset: str,
    split: Split,
    rng: random.Random,
    queries: list[Query],
) -> Iterator[Example]:
    """Yield the questions of one set; those held out are of the split `ood`."""
    in_domain = dataset == "microworld"
    p_missing = config.p_missing
    if not in_domain:
        p_missing = config.ood_missing[OOD_DATASETS.index(dataset)]
    for number, query in enumerate(queries):
        draw = rng.random()
        mode: ContextMode = "answer"
        if draw < p_missing:
            mode = "missing"
        elif draw < p_missing + config.p_conflict:
            mode = "conflict"
        claims = make_claims(rng, world, query, mode)
        wordings = [rng.randrange(3) for _ in claims]
        others = [(w + rng.randrange(1, 3)) % 3 for w in wordings]
        yield Example(
            id=f"{dataset}-{split}-{number:05d}",
            dataset=dataset,
            split=split,
            question=word_question(rng, query, rephrased=dataset == "rephrased"),
            golds=accepted_answers(query),
            passages=tuple(map(state, claims, wordings)),
            rewritten=tuple(map(state, claims, others)) if in_domain else (),
            meta={
                "n_hops": 1 if isinstance(query, Fact) else 2,
                "exposures": round(query.exposures, 3),
                "context": mode,
            },
        )


def make_examples(world: World, config: QuestionConfig) -> list[Example]:
    """Return the questions of all splits: train, validation, test, three held out.

    `pursuits` asks for other relations of people, `places` for other kinds of
    subjects, and `rephrased` for in-domain relations of test subjects in wordings
    that no training question has, with a two-hop relation that none asks for.
    """
    test, validation, train, *held_out = draw_queries(world, config)
    return [
        example
        for drawn in (train, validation, test, *held_out)
        for example in _examples(world, config, *drawn)
    ]
