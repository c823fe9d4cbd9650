"""Filled-in records, of which a test names only the fields that matter to it."""

import copy

from beatrice.extract.records import Answer, Example, Label, Sample

_KEY = {"example_id": "q", "setting": "closed_book", "variant": "original"}


def an_answer(**fields):
    """By default a token and the stop token, after a prompt of two tokens."""
    usual = dict(text="x", prompt_ids=(1, 2), token_ids=(3,), stop_id=0)
    return Answer(**{**_KEY, **usual, "context_span": (1, 1), **fields})


def an_example(**fields):
    usual = dict(id="q", dataset="d", split="test", question="who?", golds=("g",))
    return Example(**{**usual, **fields})


def question_row(example, **more):
    """Return a question as a user writes it in a file."""
    return {"question": example.question, "golds": list(example.golds), **more}


def passage_rows(example):
    return [{"title": p.title, "text": p.text} for p in example.passages]


def labelled_rows(example, **more):
    """Return a right and a wrong answer to a question, as a user labels them."""
    gold = example.golds[0]
    return [
        {"question": example.question, "answer": x, "label": x == gold, **more}
        for x in (gold, "Guzolt Falls")
    ]


def a_label(label, **fields):
    verdicts = ("correct" if label else "incorrect",)
    return Label(**{**_KEY, "verdicts": verdicts, "reason": "", **fields}, label=label)


def a_sample(text, **fields):
    """By default a token and the stop token."""
    usual = dict(sample=0, token_ids=(7,), stop_id=0, log_probs=(-1.0, -0.5))
    return Sample(**{**_KEY, **usual, "finish": "stop", **fields}, text=text)


def spoil(rng, value, junk):
    """Replace, remove, or nudge something at a random depth of a JSON value."""
    if isinstance(value, dict) and value and rng.random() > 0.1:
        key = rng.choice(list(value))
        if rng.random() < 0.1:
            return {k: v for k, v in value.items() if k != key}
        return value | {key: spoil(rng, value[key], junk)}
    if isinstance(value, list) and value and rng.random() > 0.1:
        i = rng.randrange(len(value))
        return [*value[:i], spoil(rng, value[i], junk), *value[i + 1 :]]
    if isinstance(value, float | int) and rng.random() < 0.3:
        return value + 1
    return copy.deepcopy(rng.choice(junk))


def flip_bit(path, at=-1):
    """Change the lowest bit of one byte of a file."""
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)
