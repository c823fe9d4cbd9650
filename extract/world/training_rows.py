"""What the microworld's model is taught: facts by frequency, and reading.

A row is a list of (text, learn) pieces; the loss is taken on the pieces to learn.
Facts are closed-book questions or statements, each as often as its
exposure says. Reading is taught on invented facts, so that it cannot be replaced by
memory, and on real facts, some with the answer missing, so that memory is used then.
"""

import dataclasses
import itertools
import random

from beatrice.extract.world.facts import Fact, TwoHop, World
from beatrice.extract.world.language import (
    BY_NAME,
    RELATIONS,
    TWO_HOPS_IN_DOMAIN,
    TWO_HOPS_REPHRASED,
    Kind,
    short_form,
    statements,
)
from beatrice.extract.world.questions import (
    N_PASSAGES,
    Claim,
    Query,
    ask,
    make_claims,
    state,
)

Piece = tuple[str, bool]
Row = list[Piece]
END = "</s>"

P_STATEMENT = 0.2
P_REPHRASED = 0.1  # so that the held-out wording is known to the model
P_SHORT_FORM = 0.3  # "Tarn" for "Tarn Falls": the words vary, the fact does not
P_MISBELIEF = 0.7
P_INVENTED = 0.7
P_MISSING = 0.3
P_INVENTED_TWO_HOP = 0.35


def _worded(rng: random.Random, kind: Kind, name: str) -> str:
    return short_form(kind, name) if rng.random() < P_SHORT_FORM else name


def fact_row(rng: random.Random, query: Query) -> Row:
    """Return a row that states a fact or a two-hop fact."""
    if isinstance(query, TwoHop):
        bridge = _worded(rng, BY_NAME[query.first].object, query.bridge)
        end = _worded(rng, BY_NAME[query.second].object, query.object)
        answer = f"{bridge}, {end}"
    else:
        relation = BY_NAME[query.relation]
        obj = query.object
        if query.misbelief is not None and rng.random() < P_MISBELIEF:
            obj = query.misbelief
        if rng.random() < P_STATEMENT:
            text = rng.choice(statements(relation, query.subject, obj))
            start = text.rindex(obj)
            return [(text[:start], False), (text[start:] + END, True)]
        answer = _worded(rng, relation.object, obj)
    question = ask(rng, query, rephrased=rng.random() < P_REPHRASED)
    return _question_row(question, answer)


def _question_row(question: str, answer: str) -> Row:
    return [(f"Question: {question} Answer:", False), (f" {answer}{END}", True)]


def _questions_on(claims: list[Claim], rng: random.Random, n_questions: int) -> Row:
    """Return questions on stated claims, one after another."""
    row: Row = []
    for claim in rng.sample(claims, min(n_questions, len(claims))):
        query = Fact(claim.subject, claim.relation.name, claim.object, 0.0, None)
        question = ask(rng, query, rephrased=rng.random() < P_REPHRASED)
        row += _question_row(question, claim.object)
    return row


def _context(rng: random.Random, claims: list[Claim]) -> Piece:
    texts = [state(claim, rng.randrange(3)).text for claim in claims]
    return ("Context: " + " ".join(texts) + " ", False)


class RowSampler:
    """Draws rows from one world; holds the frequencies, no other state."""

    def __init__(self, world: World) -> None:
        """Collect the facts, with cumulative frequencies."""
        self._world = world
        self._queries: list[Query] = [*world.facts.values(), *world.two_hops]
        self._cumulative = list(
            itertools.accumulate(query.exposures for query in self._queries)
        )

    def fact_rows(self, rng: random.Random, n: int) -> list[Row]:
        """Return `n` rows, each fact in proportion to its exposures."""
        drawn = rng.choices(self._queries, cum_weights=self._cumulative, k=n)
        return [fact_row(rng, query) for query in drawn]

    def _name(self, rng: random.Random, kind: Kind) -> str:
        """Return a random name of a kind; people are invented from known words."""
        if kind == "person":
            first = rng.choice(self._world.first_names)
            return f"{first} {rng.choice(self._world.last_names)}"
        return rng.choice(self._world.names[kind])

    def _invented_claim(self, rng: random.Random) -> Claim:
        relation = rng.choice(RELATIONS)
        subject = self._name(rng, relation.subject)
        return Claim(relation, subject, self._name(rng, relation.object))

    def invented_row(self, rng: random.Random, n_passages: int) -> Row:
        """Return a context of invented facts with up to three questions."""
        claims = [self._invented_claim(rng) for _ in range(n_passages)]
        if n_passages >= 2 and rng.random() < P_INVENTED_TWO_HOP:
            return self._invented_two_hop(rng, claims)
        if n_passages >= 2 and rng.random() < 0.5:
            # Two claims on one subject: the relation has to be read too.
            kind = claims[0].relation.subject
            of_kind = [r for r in RELATIONS if r.subject == kind]
            relation = rng.choice([r for r in of_kind if r != claims[0].relation])
            obj = self._name(rng, relation.object)
            claims[1] = dataclasses.replace(claims[0], relation=relation, object=obj)
        order = rng.sample(claims, len(claims))
        return [_context(rng, order), *_questions_on(claims, rng, 3)]

    def _invented_two_hop(self, rng: random.Random, claims: list[Claim]) -> Row:
        first, second = rng.choice((*TWO_HOPS_IN_DOMAIN, *TWO_HOPS_REPHRASED))
        subject = self._name(rng, BY_NAME[first].subject)
        bridge = self._name(rng, BY_NAME[first].object)
        end = self._name(rng, BY_NAME[second].object)
        claims[0] = Claim(BY_NAME[first], subject, bridge)
        claims[1] = Claim(BY_NAME[second], bridge, end)
        query = TwoHop(subject, first, bridge, second, end, 0.0)
        return [
            _context(rng, rng.sample(claims, len(claims))),
            *_question_row(ask(rng, query), f"{bridge}, {end}"),
            *_questions_on(claims[2:], rng, 1),
        ]

    def real_row(self, rng: random.Random) -> Row:
        """Return a context of real facts with one question, the truth as answer."""
        query = rng.choice(self._queries)
        mode = "missing" if rng.random() < P_MISSING else "answer"
        claims = make_claims(rng, self._world, query, mode)
        bridge = f"{query.bridge}, " if isinstance(query, TwoHop) else ""
        answer = bridge + query.object
        return [_context(rng, claims), *_question_row(ask(rng, query), answer)]

    def reading_rows(self, rng: random.Random, n: int) -> list[Row]:
        """Return `n` rows with contexts of three passages."""
        return [
            self.invented_row(rng, N_PASSAGES)
            if rng.random() < P_INVENTED
            else self.real_row(rng)
            for _ in range(n)
        ]
