"""Records that are filled in, of which a test says only what it is about."""

from beatrice.extract.records import Answer, Example, Label, Sample

_KEY = {"example_id": "q", "setting": "closed_book", "variant": "original"}


def an_answer(**fields):
    """One token behind a prompt of two, and the stop token."""
    usual = dict(text="x", prompt_ids=(1, 2), token_ids=(3,), stop_id=0)
    return Answer(**{**_KEY, **usual, "context_span": (1, 1), **fields})


def an_example(**fields):
    usual = dict(id="q", dataset="d", split="test", question="who?", golds=("g",))
    return Example(**{**usual, **fields})


def a_label(label, **fields):
    verdicts = ("correct" if label else "incorrect",)
    return Label(**{**_KEY, "verdicts": verdicts, "reason": "", **fields}, label=label)


def a_sample(text, **fields):
    """By default a token and the stop token."""
    usual = dict(sample=0, token_ids=(7,), stop_id=0, log_probs=(-1.0, -0.5))
    return Sample(**{**_KEY, **usual, "finish": "stop", **fields}, text=text)
