"""A deterministic world of facts: its language, its passages, and questions about it.

A small language model trained on it (`extract/world/model.py`) knows some facts and
not others, because it is exposed to them with Zipf-like frequencies. Every object
occurs about equally often; otherwise its frequency alone would betray a guess.
The same fact can be stated, asked and rewritten in different words, none of which says
how sure the speaker is.

The three passages of a context usually contain the answer, sometimes lack it, and
sometimes state another one. So the model's answers with context can be wrong for
reasons that the question's words do not show.
"""

import dataclasses
import math
import random
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Literal

from beatrice.extract.records import Example, Passage, Split

Kind = Literal[
    "person", "book", "company", "city", "school", "profession", "genre",
    "instrument", "language", "sport", "product", "river",
]  # fmt: skip
Group = Literal["in_domain", "pursuits", "places"]


@dataclasses.dataclass(frozen=True)
class Relation:
    """One relation and its wordings."""

    group: Group  # the question set that asks for it
    subject: Kind
    object: Kind
    # Two synonyms, used in "the NOUN of S is O"; the first names the relation.
    nouns: tuple[str, str]
    sentence: str  # the same fact in another word order
    question: str  # the question that matches `sentence`, without its question mark

    @property
    def name(self) -> str:
        """Return the relation's name, its first noun."""
        return self.nouns[0]


RELATIONS: tuple[Relation, ...] = (
    Relation("in_domain", "person", "city", ("birthplace", "hometown"),
             "{s} was born in {o}", "where was {s} born"),
    Relation("in_domain", "person", "profession", ("profession", "occupation"),
             "{s} works as {o}", "what does {s} work as"),
    Relation("in_domain", "person", "company", ("employer", "firm"),
             "{s} is employed by {o}", "who employs {s}"),
    Relation("in_domain", "person", "school", ("school", "college"),
             "{s} studied at {o}", "where did {s} study"),
    Relation("in_domain", "person", "person", ("spouse", "partner"),
             "{s} is married to {o}", "who is {s} married to"),
    Relation("in_domain", "book", "person", ("author", "writer"),
             "{s} was written by {o}", "who wrote {s}"),
    Relation("in_domain", "book", "genre", ("genre", "style"),
             "{s} belongs to {o}", "what does {s} belong to"),
    Relation("pursuits", "person", "instrument", ("instrument", "hobby"),
             "{s} plays on {o}", "what does {s} play on"),
    Relation("pursuits", "person", "language", ("language", "tongue"),
             "{s} often speaks {o}", "what does {s} often speak"),
    Relation("pursuits", "person", "sport", ("sport", "pastime"),
             "{s} competes in {o}", "what does {s} compete in"),
    Relation("places", "company", "city", ("seat", "headquarters"),
             "{s} is based in {o}", "where is {s} based"),
    Relation("places", "company", "person", ("founder", "creator"),
             "{s} was started by {o}", "who started {s}"),
    Relation("places", "company", "product", ("product", "output"),
             "{s} sells mainly {o}", "what does {s} mainly sell"),
    Relation("places", "city", "person", ("mayor", "leader"),
             "{s} is governed by {o}", "who governs {s}"),
    Relation("places", "city", "river", ("river", "stream"),
             "{s} lies on {o}", "what does {s} lie on"),
)  # fmt: skip

BY_NAME = {relation.name: relation for relation in RELATIONS}

# Two-hop questions ask for `second` of the `first` of a subject.
TWO_HOPS_IN_DOMAIN = (("employer", "seat"), ("spouse", "profession"))
TWO_HOPS_REPHRASED = (("author", "birthplace"),)

_EVERYDAY: dict[Kind, str] = {
    "profession": "baker pilot nurse lawyer painter mason sailor teacher farmer tailor "
    "judge miner actor chemist dentist florist guard hunter jeweller librarian "
    "mechanic notary optician plumber potter ranger sculptor surgeon translator vet "
    "waiter weaver",
    "genre": "satire romance horror comedy tragedy fantasy mystery biography travel "
    "history poetry essay fable memoir thriller western",
    "instrument": "violin flute harp trumpet cello oboe piano drum lute organ clarinet "
    "banjo guitar accordion horn zither",
    "language": "Ardish Belkan Corvic Delmese Estrian Fallic Gorian Hestic Ilvan "
    "Jorish Kelmar Lutian Mervic Nolish Ostric Parvan",
    "sport": "rowing fencing archery tennis boxing judo skating cycling diving golf "
    "hockey sailing skiing surfing wrestling climbing",
    "product": "clocks boats carpets lamps pianos tractors bottles cameras engines "
    "furniture gloves helmets kettles mirrors needles paper radios saddles tiles "
    "umbrellas vases wagons xylophones zippers",
}
WORDS: dict[Kind, tuple[str, ...]] = {
    kind: tuple(words.split()) for kind, words in _EVERYDAY.items()
}

_ONSETS = "b br d dr f g gr h j k l m n p r s sk st t tr v w z".split()
_VOWELS = "a e i o u".split()
_CODAS = "l n r s t m rn lt nd sk ck ff".split()


def invented_words(rng: random.Random, n: int, used: set[str]) -> list[str]:
    """Return `n` new capitalised words of random syllables and add them to `used`."""
    words: list[str] = []
    while len(words) < n:
        syllables = (_ONSETS, _VOWELS, _ONSETS, _VOWELS, _CODAS)
        word = "".join(rng.choice(sounds) for sounds in syllables).capitalize()
        if word.lower() not in used:
            used.add(word.lower())
            words.append(word)
    return words


def short_form(kind: Kind, name: str) -> str:
    """Return the other accepted name: cities and companies drop their last word."""
    return name.split(" ")[0] if kind in ("city", "company") else name


def statements(relation: Relation, subject: str, obj: str) -> tuple[str, ...]:
    """Return the three wordings of one fact, each a full sentence."""
    plain = tuple(f"the {noun} of {subject} is {obj}." for noun in relation.nouns)
    return (*plain, relation.sentence.format(s=subject, o=obj) + ".")


def questions(relation: Relation, subject: str) -> tuple[str, ...]:
    """Return the three ordinary questions for one fact."""
    plain = tuple(f"what is the {noun} of {subject}?" for noun in relation.nouns)
    return (*plain, relation.question.format(s=subject) + "?")


def rephrased_questions(relation: Relation, subject: str) -> tuple[str, ...]:
    """Return the two wordings that no training question of the detector has."""
    return tuple(f"please name the {noun} of {subject}?" for noun in relation.nouns)


def function_words() -> Iterator[str]:
    """Yield every word and mark that the templates can produce."""
    for relation in RELATIONS:
        wordings = (*questions(relation, ""), *rephrased_questions(relation, ""))
        for text in (*statements(relation, "", ""), *wordings):
            yield from text.replace("?", " ? ").replace(".", " . ").split()
    yield from (",", "Context:", "Question:", "Answer:")


@dataclasses.dataclass(frozen=True, kw_only=True)
class WorldConfig:
    """Sizes and frequencies of the world; the shipped model knows the defaults."""

    seed: int = 0
    n_people: int = 1200
    n_books: int = 420
    n_companies: int = 240
    n_cities: int = 240
    n_schools: int = 60
    n_rivers: int = 60
    n_strangers: int = 1200  # people who only occur in passages
    n_first_names: int = 60
    n_last_names: int = 1000
    median_exposures: float = 3.2  # exposures of the median in-domain fact
    max_exposures: float = 60.0
    zipf_exponent: float = 0.9
    fact_noise: float = 1.4
    pursuits_factor: float = 5.0  # more exposures than in-domain facts
    places_factor: float = 0.2  # fewer exposures
    p_misbelief: float = 0.05  # facts mostly stated wrongly in training
    p_no_passage: float = 0.05
    p_wrong_passage: float = 0.05
    p_rumour: float = 0.08  # facts with an additional, wrong passage


@dataclasses.dataclass(frozen=True)
class Claim:
    """One statement, possibly untrue."""

    relation: Relation
    subject: str
    object: str
    is_supporting: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fact(Claim):
    """One fact, its exposures in training, and an object often stated instead."""

    exposures: float = 0.0
    misbelief: str | None = None

    @property
    def steps(self) -> tuple[Claim, ...]:
        """Return the facts needed to answer it."""
        return (self,)


@dataclasses.dataclass(frozen=True)
class TwoHop:
    """A fact about a fact: the object of `first` is the subject of `second`."""

    first: Claim
    second: Claim
    exposures: float

    @property
    def steps(self) -> tuple[Claim, ...]:
        """Return the facts needed to answer it."""
        return (self.first, self.second)


Query = Fact | TwoHop


@dataclasses.dataclass(frozen=True, kw_only=True)
class World:
    """Everything that is the case, in a fixed order."""

    config: WorldConfig
    # Known entities and words of each kind, without people who only occur in passages.
    names: dict[Kind, tuple[str, ...]]
    first_names: tuple[str, ...]
    last_names: tuple[str, ...]
    facts: dict[tuple[str, str], Fact]  # by (subject, relation)
    two_hops: tuple[TwoHop, ...]
    passages: tuple[Passage, ...]


def stream(config: WorldConfig, purpose: str) -> random.Random:
    """Return the random stream for one purpose, so that purposes do not interact."""
    return random.Random(f"microworld/{config.seed}/{purpose}")


def _other(rng: random.Random, names: Sequence[str], *but: str) -> str:
    """Draw any of the names except `but`."""
    return rng.choice([name for name in names if name not in but])


def _people(
    rng: random.Random, first: list[str], last: list[str], n: int
) -> tuple[str, ...]:
    """Return `n` full names; most last names belong to one person only."""
    if n > len(first) * len(last):
        raise ValueError(
            f"{n} people need as many full names, {len(first)} first and {len(last)} "
            "last names make fewer; raise n_last_names"
        )
    names: dict[str, None] = {}
    unique = iter(rng.sample(last, len(last)))
    while len(names) < n:
        family = next(unique, None) or rng.choice(last)
        names[f"{rng.choice(first)} {family}"] = None
    order = list(names)
    rng.shuffle(order)
    return tuple(order)


def _books(rng: random.Random, n: int, used: set[str]) -> tuple[str, ...]:
    adjectives = invented_words(rng, max(8, n // 10), used)
    nouns = invented_words(rng, max(8, n // 5), used)
    titles = [f"The {adjective} {noun}" for adjective in adjectives for noun in nouns]
    return tuple(rng.sample(titles, n))


def _assign_objects(
    rng: random.Random, subjects: dict[str, float], objects: tuple[str, ...]
) -> dict[str, str]:
    """Draw an object for every subject; exposures per object are about equal."""
    load = {obj: 0.0 for obj in rng.sample(objects, len(objects))}
    objects_of = {}
    for subject in sorted(subjects, key=lambda s: (-subjects[s], s)):
        lightest = sorted(load, key=load.__getitem__)[: max(2, len(load) // 8)]
        objects_of[subject] = _other(rng, lightest, subject)
        load[objects_of[subject]] += subjects[subject]
    return objects_of


def _exposures(
    config: WorldConfig, relation: Relation, subjects: tuple[str, ...]
) -> dict[str, float]:
    """Return exposures per subject: Zipf by the subject's rank times fact noise."""
    ranks = list(subjects)
    stream(config, f"rank/{relation.subject}").shuffle(ranks)
    rng = stream(config, f"exposures/{relation.name}")
    middle = math.log(len(ranks) / 2)
    factors = {"pursuits": config.pursuits_factor, "places": config.places_factor}
    scale = config.median_exposures * factors.get(relation.group, 1.0)
    exposures = {}
    for rank, subject in enumerate(ranks, start=1):
        zipf = config.zipf_exponent * (middle - math.log(rank))
        times = scale * math.exp(zipf + config.fact_noise * rng.gauss(0, 1))
        exposures[subject] = min(config.max_exposures, times)
    return exposures


def _facts(
    config: WorldConfig, names: dict[Kind, tuple[str, ...]]
) -> dict[tuple[str, str], Fact]:
    facts = {}
    for relation in RELATIONS:
        rng = stream(config, f"objects/{relation.name}")
        objects = names[relation.object]
        if relation.object == "person" and relation.name != "spouse":
            objects = tuple(rng.sample(objects, min(160, len(objects))))
        exposures = _exposures(config, relation, names[relation.subject])
        for subject, obj in _assign_objects(rng, exposures, objects).items():
            wrong = _other(rng, objects, obj, subject)
            misbelief = wrong if rng.random() < config.p_misbelief else None
            times = exposures[subject]
            fact = Fact(relation, subject, obj, exposures=times, misbelief=misbelief)
            facts[subject, relation.name] = fact
    return facts


def _two_hops(
    config: WorldConfig,
    names: dict[Kind, tuple[str, ...]],
    facts: dict[tuple[str, str], Fact],
) -> tuple[TwoHop, ...]:
    two_hops = []
    for first, second in (*TWO_HOPS_IN_DOMAIN, *TWO_HOPS_REPHRASED):
        rng = stream(config, f"two_hops/{first}/{second}")
        for subject in names[BY_NAME[first].subject]:
            step = facts[subject, first]
            # Close to the first fact's frequency, so that a two-hop wording does not
            # by itself tell that the answer is unknown.
            times = step.exposures * math.exp(0.7 * rng.gauss(0, 1))
            times = min(config.max_exposures, times)
            two_hops.append(TwoHop(step, facts[step.object, second], times))
    return tuple(two_hops)


def _stated(rng: random.Random, relation: Relation, subject: str, obj: str) -> Passage:
    return Passage(title=subject, text=rng.choice(statements(relation, subject, obj)))


def _passages(
    config: WorldConfig,
    names: dict[Kind, tuple[str, ...]],
    facts: dict[tuple[str, str], Fact],
    strangers: tuple[str, ...],
) -> tuple[Passage, ...]:
    """Return the corpus: one passage per fact, with gaps, errors and rumours."""
    rng, corpus = stream(config, "passages"), []
    for fact in facts.values():
        relation, objects = fact.relation, names[fact.relation.object]
        draws = [rng.random() for _ in range(3)]
        if draws[0] >= config.p_no_passage:
            wrong = draws[1] < config.p_wrong_passage
            stated = _other(rng, objects, fact.object) if wrong else fact.object
            corpus.append(_stated(rng, relation, fact.subject, stated))
        if draws[2] < config.p_rumour:
            stated = _other(rng, objects, fact.object)
            corpus.append(_stated(rng, relation, fact.subject, stated))
    personal = [r for r in RELATIONS if r.subject == "person"]
    for stranger in strangers:
        for relation in rng.sample(personal, 4):
            obj = rng.choice(names[relation.object])
            corpus.append(_stated(rng, relation, stranger, obj))
    rng.shuffle(corpus)
    return tuple(corpus)


def make_world(config: WorldConfig) -> World:
    """Make the world of a configuration, always the same one."""
    rng = stream(config, "names")
    used = {word.lower() for words in WORDS.values() for word in words}
    first = invented_words(rng, config.n_first_names, used)
    last = invented_words(rng, config.n_last_names, used)
    everyone = _people(rng, first, last, config.n_people + config.n_strangers)
    cities = invented_words(rng, config.n_cities, used)
    companies = invented_words(rng, config.n_companies, used)
    schools = invented_words(rng, config.n_schools, used)
    rivers = invented_words(rng, config.n_rivers, used)
    names: dict[Kind, tuple[str, ...]] = {
        **WORDS,
        "person": everyone[: config.n_people],
        "book": _books(rng, config.n_books, used),
        "city": tuple(f"{word} Falls" for word in cities),
        "company": tuple(f"{word} Works" for word in companies),
        "school": tuple(f"{word} Academy" for word in schools),
        "river": tuple(f"{word} River" for word in rivers),
    }
    facts = _facts(config, names)
    return World(
        config=config,
        names=names,
        first_names=tuple(first),
        last_names=tuple(last),
        facts=facts,
        two_hops=_two_hops(config, names, facts),
        passages=_passages(config, names, facts, everyone[config.n_people :]),
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


def accepted_answers(query: Query) -> tuple[str, ...]:
    """Return every accepted wording of the true answer.

    A two-hop answer may name the bridge first ("bridge, answer"), as the model was
    taught to; the bridge must then be right, too.
    """
    *bridges, ends = [
        dict.fromkeys((step.object, short_form(step.relation.object, step.object)))
        for step in query.steps
    ]
    longer = (f"{x}, {end}" for bridge in bridges for x in bridge for end in ends)
    return (*ends, *longer)


def _distractor(rng: random.Random, world: World, query: Query) -> Claim:
    """Return a true claim about the same subject, or with the same relation."""
    step = query.steps[0]
    relation, kind = step.relation, step.relation.subject
    if rng.random() < 0.5:
        others = [r for r in RELATIONS if r.subject == kind and r != relation]
        return world.facts[step.subject, rng.choice(others).name]
    subject = _other(rng, world.names[kind], step.subject)
    return world.facts[subject, relation.name]


def make_claims(
    rng: random.Random, world: World, query: Query, mode: ContextMode
) -> list[Claim]:
    """Return the three claims of a context, shuffled.

    The mode `answer` keeps all gold claims, `missing` drops one, and `conflict` changes
    the object of the last. Distractors are true facts of the world.
    """
    gold = [Claim(x.relation, x.subject, x.object, True) for x in query.steps]
    claims = list(gold)
    if mode == "missing":
        claims.pop(rng.randrange(len(claims)))
    elif mode == "conflict":
        last = claims.pop()
        objects = world.names[last.relation.object]
        wrong = _other(rng, objects, last.object, last.subject)
        claims.append(Claim(last.relation, last.subject, wrong))
    while len(claims) < N_PASSAGES:
        extra = _distractor(rng, world, query)
        stated = [(c.relation, c.subject) for c in (*claims, *gold)]
        if (extra.relation, extra.subject) not in stated:
            claims.append(extra)
    rng.shuffle(claims)
    return claims


def claim_as_passage(claim: Claim, wording: int) -> Passage:
    """Return the claim as a passage in one of its three wordings."""
    text = statements(claim.relation, claim.subject, claim.object)[wording]
    return Passage(title=claim.subject, text=text, is_supporting=claim.is_supporting)


def word_question(
    rng: random.Random, query: Claim | TwoHop, rephrased: bool = False
) -> str:
    """Return the query in one of its wordings."""
    if isinstance(query, TwoHop):
        first, second = query.first.relation, query.second.relation
        i = rng.randrange(2)
        nouns = f"the {second.nouns[i]} of the {first.nouns[i]}"
        return f"what is {nouns} of {query.first.subject}?"
    wordings = rephrased_questions if rephrased else questions
    return rng.choice(wordings(query.relation, query.subject))


def facts_of(query: Query) -> tuple[tuple[str, str], ...]:
    """Return the facts that a query asks for, as (subject, relation)."""
    return tuple((step.subject, step.relation.name) for step in query.steps)


def split_of_subjects(world: World) -> dict[str, Split]:
    """Return the split of every person and book: two thirds train, a sixth each."""
    splits: dict[str, Split] = {}
    for kind in ("person", "book"):
        subjects = list(world.names[kind])
        stream(world.config, f"splits/{kind}").shuffle(subjects)
        sixth = len(subjects) // 6
        splits |= dict.fromkeys(subjects, "train")
        splits |= dict.fromkeys(subjects[:sixth], "validation")
        splits |= dict.fromkeys(subjects[sixth : 2 * sixth], "test")
    return splits


def _pool(
    world: World, dataset: str, split: Split, may_ask: Callable[[Query], bool]
) -> tuple[list[Fact], list[TwoHop]]:
    """Return the one-hop and the two-hop queries from which a set may be drawn."""
    group = dataset if dataset in ("pursuits", "places") else "in_domain"
    hops = {"microworld": TWO_HOPS_IN_DOMAIN, "rephrased": TWO_HOPS_REPHRASED}
    splits = split_of_subjects(world)
    wanted = {"microworld": split, "rephrased": "test"}.get(dataset)
    one_hop = [
        fact
        for fact in world.facts.values()
        if fact.relation.group == group
        and wanted in (None, splits.get(fact.subject))
        and may_ask(fact)
    ]
    two_hop = [
        hop
        for hop in world.two_hops
        if tuple(x.relation.name for x in hop.steps) in hops.get(dataset, ())
        and (dataset == "rephrased" or splits[hop.first.subject] == split)
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
    """Return the distinct queries of one set, with its share of two-hop ones."""
    n = {"train": config.n_train, "ood": config.n_ood}.get(split, config.n_evaluation)
    n_two_hop = min(round(n * config.p_two_hop), len(two_hop))
    if n - n_two_hop > len(one_hop):
        raise ValueError(
            f"the world has only {len(one_hop)} facts for {n - n_two_hop} one-hop "
            "questions; ask for fewer questions or make a larger world"
        )
    queries = [*rng.sample(one_hop, n - n_two_hop), *rng.sample(two_hop, n_two_hop)]
    rng.shuffle(queries)
    return queries


def draw_queries(
    world: World, config: QuestionConfig
) -> Iterator[tuple[str, Split, random.Random, list[Query]]]:
    """Yield dataset, split, random stream and queries of every set.

    In-domain splits share no name that is asked about, neither as a subject nor as the
    bridge of a two-hop question: test is drawn first, then validation, then training,
    each from what is left. Held-out sets ask for no fact of a training or validation
    question, but may ask for facts of the test set.
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
    """Yield the questions of one set as examples."""
    in_domain, p_missing = dataset == "microworld", config.p_missing
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
            passages=tuple(map(claim_as_passage, claims, wordings)),
            rewritten=tuple(map(claim_as_passage, claims, others)) if in_domain else (),
            meta={
                "n_hops": len(query.steps),
                "exposures": round(query.exposures, 3),
                "context": mode,
            },
        )


def make_examples(world: World, config: QuestionConfig) -> list[Example]:
    """Return the questions of train, validation, test and the three held-out sets.

    `pursuits` asks for other relations of people, `places` about other kinds of
    subjects, and `rephrased` for in-domain relations of test subjects, in wordings and
    with a two-hop relation that no training question has.
    """
    test, validation, train, *held_out = draw_queries(world, config)
    return [
        example
        for drawn in (train, validation, test, *held_out)
        for example in _examples(world, config, *drawn)
    ]
