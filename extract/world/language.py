"""The microworld's language: kinds of things, relations, and their wordings.

Every relation has two nouns and one sentence of another word order, so that the
same fact can be stated, asked and rewritten in different words. Words for objects
are invented or everyday; none of them says how sure the speaker is.
"""

import dataclasses
import random
from collections.abc import Iterator
from typing import Literal

Kind = Literal[
    "person", "book", "company", "city", "school", "profession", "genre",
    "instrument", "language", "sport", "product", "river",
]  # fmt: skip
Group = Literal["in_domain", "pursuits", "places"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Relation:
    """One relation and its wordings.

    Attributes:
      nouns: two synonyms, used in "the NOUN of S is O".
      sentence: the same fact in another word order.
      question: the question that matches `sentence`, without its question mark.
      group: the question set whose questions ask for it.
    """

    name: str
    subject: Kind
    object: Kind
    nouns: tuple[str, str]
    sentence: str
    question: str
    group: Group = "in_domain"


RELATIONS: tuple[Relation, ...] = (
    Relation(
        name="birthplace",
        subject="person",
        object="city",
        nouns=("birthplace", "hometown"),
        sentence="{s} was born in {o}",
        question="where was {s} born",
    ),
    Relation(
        name="profession",
        subject="person",
        object="profession",
        nouns=("profession", "occupation"),
        sentence="{s} works as {o}",
        question="what does {s} work as",
    ),
    Relation(
        name="employer",
        subject="person",
        object="company",
        nouns=("employer", "firm"),
        sentence="{s} is employed by {o}",
        question="who employs {s}",
    ),
    Relation(
        name="school",
        subject="person",
        object="school",
        nouns=("school", "college"),
        sentence="{s} studied at {o}",
        question="where did {s} study",
    ),
    Relation(
        name="spouse",
        subject="person",
        object="person",
        nouns=("spouse", "partner"),
        sentence="{s} is married to {o}",
        question="who is {s} married to",
    ),
    Relation(
        name="author",
        subject="book",
        object="person",
        nouns=("author", "writer"),
        sentence="{s} was written by {o}",
        question="who wrote {s}",
    ),
    Relation(
        name="genre",
        subject="book",
        object="genre",
        nouns=("genre", "style"),
        sentence="{s} belongs to {o}",
        question="what does {s} belong to",
    ),
    Relation(
        name="instrument",
        subject="person",
        object="instrument",
        nouns=("instrument", "hobby"),
        sentence="{s} plays on {o}",
        question="what does {s} play on",
        group="pursuits",
    ),
    Relation(
        name="language",
        subject="person",
        object="language",
        nouns=("language", "tongue"),
        sentence="{s} often speaks {o}",
        question="what does {s} often speak",
        group="pursuits",
    ),
    Relation(
        name="sport",
        subject="person",
        object="sport",
        nouns=("sport", "pastime"),
        sentence="{s} competes in {o}",
        question="what does {s} compete in",
        group="pursuits",
    ),
    Relation(
        name="seat",
        subject="company",
        object="city",
        nouns=("seat", "headquarters"),
        sentence="{s} is based in {o}",
        question="where is {s} based",
        group="places",
    ),
    Relation(
        name="founder",
        subject="company",
        object="person",
        nouns=("founder", "creator"),
        sentence="{s} was started by {o}",
        question="who started {s}",
        group="places",
    ),
    Relation(
        name="product",
        subject="company",
        object="product",
        nouns=("product", "output"),
        sentence="{s} sells mainly {o}",
        question="what does {s} mainly sell",
        group="places",
    ),
    Relation(
        name="mayor",
        subject="city",
        object="person",
        nouns=("mayor", "leader"),
        sentence="{s} is governed by {o}",
        question="who governs {s}",
        group="places",
    ),
    Relation(
        name="river",
        subject="city",
        object="river",
        nouns=("river", "stream"),
        sentence="{s} lies on {o}",
        question="what does {s} lie on",
        group="places",
    ),
)

BY_NAME = {relation.name: relation for relation in RELATIONS}

# Two-hop questions ask for `second` of the `first` of a subject.
TWO_HOPS_IN_DOMAIN = (("employer", "seat"), ("spouse", "profession"))
TWO_HOPS_REPHRASED = (("author", "birthplace"),)

WORDS: dict[Kind, tuple[str, ...]] = {
    "profession": tuple(
        "baker pilot nurse lawyer painter mason sailor teacher farmer tailor judge "
        "miner actor chemist dentist florist guard hunter jeweller librarian "
        "mechanic notary optician plumber potter ranger sculptor surgeon translator "
        "vet waiter weaver".split()
    ),
    "genre": tuple(
        "satire romance horror comedy tragedy fantasy mystery biography travel "
        "history poetry essay fable memoir thriller western".split()
    ),
    "instrument": tuple(
        "violin flute harp trumpet cello oboe piano drum lute organ clarinet banjo "
        "guitar accordion horn zither".split()
    ),
    "language": tuple(
        "Ardish Belkan Corvic Delmese Estrian Fallic Gorian Hestic Ilvan Jorish "
        "Kelmar Lutian Mervic Nolish Ostric Parvan".split()
    ),
    "sport": tuple(
        "rowing fencing archery tennis boxing judo skating cycling diving golf "
        "hockey sailing skiing surfing wrestling climbing".split()
    ),
    "product": tuple(
        "clocks boats carpets lamps pianos tractors bottles cameras engines "
        "furniture gloves helmets kettles mirrors needles paper radios saddles "
        "tiles umbrellas vases wagons xylophones zippers".split()
    ),
}

_ONSETS = "b br d dr f g gr h j k l m n p r s sk st t tr v w z".split()
_VOWELS = "a e i o u".split()
_CODAS = "l n r s t m rn lt nd sk ck ff".split()


def invented_words(rng: random.Random, n: int, taken: set[str]) -> list[str]:
    """Return `n` new capitalised syllable words and add them to `taken`."""
    words: list[str] = []
    while len(words) < n:
        word = "".join(
            (rng.choice(_ONSETS), rng.choice(_VOWELS), rng.choice(_ONSETS))
        ) + rng.choice(_VOWELS)
        word = (word + rng.choice(_CODAS)).capitalize()
        if word.lower() not in taken:
            taken.add(word.lower())
            words.append(word)
    return words


def short_form(kind: Kind, name: str) -> str:
    """Return the other accepted name: cities and companies drop their last word."""
    return name.split(" ")[0] if kind in ("city", "company") else name


def statements(relation: Relation, subject: str, obj: str) -> tuple[str, str, str]:
    """Return the three wordings of one fact, each a full sentence."""
    plain = tuple(f"the {noun} of {subject} is {obj}." for noun in relation.nouns)
    return (*plain, relation.sentence.format(s=subject, o=obj) + ".")


def questions(relation: Relation, subject: str) -> tuple[str, str, str]:
    """Return the three ordinary questions for one fact."""
    plain = tuple(f"what is the {noun} of {subject}?" for noun in relation.nouns)
    return (*plain, relation.question.format(s=subject) + "?")


def rephrased_questions(relation: Relation, subject: str) -> tuple[str, str]:
    """Return wordings that occur in no training question of the detector."""
    return tuple(
        f"please name the {noun} of {subject}?" for noun in relation.nouns
    )  # one per synonym


def two_hop_question(first: Relation, second: Relation, subject: str, i: int) -> str:
    """Return the `i`-th of the two wordings of a two-hop question."""
    return f"what is the {second.nouns[i]} of the {first.nouns[i]} of {subject}?"


def function_words() -> Iterator[str]:
    """Yield every word and mark that the templates can produce."""
    for relation in RELATIONS:
        for text in (
            *statements(relation, "", ""),
            *questions(relation, ""),
            *rephrased_questions(relation, ""),
        ):
            yield from text.replace("?", " ? ").replace(".", " . ").split()
    yield from (",", "Context:", "Question:", "Answer:")
