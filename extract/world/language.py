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


@dataclasses.dataclass(frozen=True)
class Relation:
    """One relation and its wordings."""

    group: Group  # the question set whose questions ask for it
    subject: Kind  # kind of the things that have it
    object: Kind  # kind of what they have
    # Two synonyms, used in "the NOUN of S is O"; the first names the relation.
    nouns: tuple[str, str]
    sentence: str  # the same fact in another word order
    question: str  # the question that matches `sentence`, without its question mark

    @property
    def name(self) -> str:
        """Return the relation's name."""
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


def invented_words(rng: random.Random, n: int, used: set[str]) -> list[str]:
    """Return `n` new capitalised syllable words and add them to `used`."""
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
    """Return the two wordings that occur in no training question of the detector."""
    return tuple(f"please name the {noun} of {subject}?" for noun in relation.nouns)


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
