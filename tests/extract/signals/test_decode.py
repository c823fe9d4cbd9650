"""What is read while an answer is written is what is read of the same ids again."""

import dataclasses

import numpy as np
import pytest
import torch

from beatrice.benchmarks.bench.oracle import twin_of
from beatrice.benchmarks.bench.tiny_models import FAMILIES, tiny_model
from beatrice.extract.backbone.loading import Backbone
from beatrice.extract.generate.generator import GeneratorPrompt, SamplingConfig
from beatrice.extract.generate.local import TransformersGenerator, generate
from beatrice.extract.generate.prompts import Prompt
from beatrice.extract.generate.requests import GenerationConfig, Request
from beatrice.extract.signals.decode import (
    DecodeReading,
    check_decoding,
    generate_and_read,
    read_stepwise,
)
from beatrice.extract.signals.reader import SignalReader
from beatrice.extract.signals.sequence import sequence_of
from tests.extract.signals.families import representatives

WITHOUT = ("gptj", "mpt", "bloom", "llama4")  # these are read again
CONFIG = GenerationConfig(max_new_tokens=6)


class Numbers:
    """A tokenizer whose words are ids."""

    chat_template = None

    def decode(self, ids, **_):
        return " ".join(map(str, ids))


def backbone_of(family, dtype=torch.float32, stop=None):
    model = tiny_model(family).to(dtype)
    if stop is not None:
        model.generation_config.eos_token_id = stop
    return Backbone.from_model(model, Numbers())


def requests_of(n_shared=0, lengths=(9, 17, 12, 23, 14), context=(2, 6)):
    rng = np.random.default_rng(0)
    shared = rng.integers(3, 50, n_shared).tolist()
    start, stop = (n_shared + edge for edge in context)
    return [
        Request(
            example_id=str(i),
            setting="with_context",
            variant="original",
            prompt=Prompt(
                (*shared, *rng.integers(3, 50, n).tolist()), (start, stop), n_unknown=0
            ),
        )
        for i, n in enumerate(lengths)
    ]


def largest_difference(reader, requests, config=CONFIG, answer_span="emitting"):
    """Largest difference by family, and the answers."""
    answers, written = generate_and_read(
        reader, requests, config, answer_span=answer_span
    )
    again = reader.read([sequence_of(a, answer_span=answer_span) for a in answers])
    differences = dict.fromkeys(("hidden", "prob", "resid", "attn"), 0.0)
    for signals, expected in zip(written, again, strict=True):
        assert signals.first_token == expected.first_token
        for name in differences:
            value, wanted = getattr(signals, name), getattr(expected, name)
            assert value.shape == wanted.shape
            if value.size:
                difference = float(np.abs(value - wanted).max())
                differences[name] = max(differences[name], difference)
    return differences, answers


def stop_of(family, requests, place):
    """An id that an answer has at a place, so that it ends there."""
    reader = backbone_of(family, stop=60)
    answers = generate(reader, requests, CONFIG)
    return next(a.token_ids[place] for a in answers if len(a.token_ids) > place)


@pytest.mark.parametrize(
    "family", representatives([f for f in FAMILIES if f not in WITHOUT])
)
def test_reading_while_writing_is_reading_again(family):
    """Prompts of five lengths beyond the window, padded; answers leave at a stop."""
    requests = requests_of()
    stop = stop_of(family, requests, 2)
    reader = SignalReader(backbone_of(family, stop=stop))
    differences, answers = largest_difference(reader, requests)
    lengths = {len(answer.token_ids) for answer in answers}
    assert min(lengths) < CONFIG.max_new_tokens  # a row left early
    assert max(differences.values()) < 5e-4, differences
    assert answers == generate(reader.backbone, requests, CONFIG)
    assert check_decoding(reader) is None


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3_5"])
def test_an_answer_is_read_up_to_every_token_while_it_is_written(family):
    """A window that the answer leaves; states that no row can leave."""
    (request,) = requests_of(lengths=(7,))
    reader = SignalReader(backbone_of(family, stop=1))
    steps = read_stepwise(reader, request, SamplingConfig(max_new_tokens=6))
    prefixes = []
    while True:
        try:
            step = next(steps)
        except StopIteration as end:
            prefixes.append(end.value)
            break
        prefixes.append((step.answer, step.so_far()))
        np.testing.assert_allclose(step.prob, prefixes[-1][1].prob[-1])
    assert [len(answer.token_ids) for answer, _ in prefixes] == [1, 2, 3, 4, 5, 6, 6]
    (whole,), _ = generate_and_read(reader, [request], CONFIG)
    assert prefixes[-1][0] == whole
    for answer, signals in prefixes:
        sequence = sequence_of(answer)
        (again,) = reader.read([sequence])
        n_rows = int(sequence.spans[2, 1])  # the last token emitted nothing
        for name in ("hidden", "prob", "resid", "attn"):
            value, expected = getattr(signals, name), getattr(again, name)
            np.testing.assert_allclose(value[:n_rows], expected[:n_rows], atol=5e-4)


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2"])
def test_what_all_prompts_begin_with_is_run_once_and_belongs_to_no_span(family):
    requests = requests_of(n_shared=60)
    reader = SignalReader(backbone_of(family))
    differences, _ = largest_difference(reader, requests)
    assert max(differences.values()) < 5e-4, differences


@pytest.mark.parametrize("answer_span", ["emitting", "literal"])
@pytest.mark.parametrize("hidden_spans", ["all", "answer"])
@pytest.mark.parametrize("n_new", [1, 6])
def test_spans_and_lengths_of_answers_are_those_of_reading_again(
    answer_span, hidden_spans, n_new
):
    requests = requests_of(context=(3, 3))  # closed-book: an empty context
    stop = stop_of("llama", requests, 0)  # an answer without a token
    reader = SignalReader(backbone_of("llama", stop=stop), hidden_spans=hidden_spans)
    config = dataclasses.replace(CONFIG, max_new_tokens=n_new)
    differences, answers = largest_difference(reader, requests, config, answer_span)
    assert {0, n_new} <= {len(answer.token_ids) for answer in answers}
    assert max(differences.values()) < 5e-4, differences


def test_an_answer_whose_stop_string_is_several_tokens_is_read_again():
    requests = requests_of()
    reader = SignalReader(backbone_of("llama", stop=60))
    ids = generate(reader.backbone, requests, CONFIG)[0].token_ids
    config = dataclasses.replace(CONFIG, stop=(f"{ids[2]} {ids[3]}",))
    differences, answers = largest_difference(reader, requests, config)
    assert answers[0].token_ids == ids[:2] and answers[0].stop_id == ids[2]
    assert max(differences.values()) < 5e-4, differences


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_in_bfloat16_the_difference_is_the_rounding_of_the_model(family):
    requests = requests_of()
    reader = SignalReader(backbone_of(family, torch.bfloat16))
    differences, _ = largest_difference(reader, requests)
    assert 0 < max(differences.values()) < 0.3, differences
    assert check_decoding(reader) is None


@pytest.mark.parametrize("family", WITHOUT)
def test_what_cannot_be_read_while_writing_is_named(family):
    reason = check_decoding(SignalReader(backbone_of(family)))
    assert reason and "in memory" in reason


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_a_cache_that_does_not_grow_is_never_read(family):
    """A static cache has columns that were not run, and rolls in a window's layer."""
    backbone = backbone_of(family)
    backbone.model.generation_config.cache_implementation = "static"
    assert "a growing cache" in check_decoding(SignalReader(backbone))


def test_a_layer_that_chooses_keys_of_its_cache_is_read_again():
    model = twin_of("deepseek_v32")
    model.generation_config.eos_token_id = 60
    reader = SignalReader(Backbone.from_model(model, Numbers()))
    assert "of which it chooses some" in check_decoding(reader)


class LateTargets(DecodeReading):
    """Reads every token with the one before it as its next."""

    def on_choice(self, ids, is_done):
        super().on_choice(ids.roll(1, dims=1), is_done)


class NeverDone(DecodeReading):
    """Reads on in rows whose answers have ended."""

    def on_choice(self, ids, is_done):
        super().on_choice(ids, torch.zeros_like(is_done))


class FromTheFirstColumn(DecodeReading):
    """Takes a cached beginning for columns that were never there."""

    def watching(self, rows, n_cached):
        return super().watching(rows, n_cached - 1 if n_cached else 0)


@pytest.mark.parametrize(
    ("reading", "is_right"),
    [
        (DecodeReading, True),
        (LateTargets, False),
        (NeverDone, False),
        (FromTheFirstColumn, False),
    ],
)
def test_what_is_read_one_step_beside_is_noticed(reading, is_right):
    requests = requests_of(n_shared=60)
    stop = stop_of("llama", requests, 2)
    reader = SignalReader(backbone_of("llama", stop=stop))
    watch = reading(
        reader,
        [r.prompt for r in requests],
        CONFIG.max_new_tokens,
    )
    prompts = [GeneratorPrompt(text="", ids=r.prompt.ids) for r in requests]
    sampling = SamplingConfig(max_new_tokens=CONFIG.max_new_tokens)
    try:
        replies = TransformersGenerator(backbone=reader.backbone).write(
            prompts, sampling, watch
        )
        answers = [r.answer(x) for r, x in zip(requests, replies, strict=True)]
        signals = watch.signals(answers)
        again = reader.read([sequence_of(answer) for answer in answers])
        is_equal = all(
            read is not None
            and np.allclose(read.prob, expected.prob, atol=1e-4)
            and np.allclose(read.attn, expected.attn, atol=1e-4)
            for read, expected in zip(signals, again, strict=True)
        )
    except ValueError:
        is_equal = False
    assert is_equal == is_right
