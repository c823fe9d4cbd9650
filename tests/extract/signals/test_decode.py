"""Signals read while an answer is written equal those of a second pass over its ids."""

import concurrent.futures
import contextlib
import dataclasses
import sys
import threading
import time
import warnings
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
import torch

from beatrice.benchmarks.bench.oracle import twin_of
from beatrice.benchmarks.bench.tiny_models import FAMILIES, make_batch, tiny_model
from beatrice.extract.backbone.layout import watch_layers
from beatrice.extract.backbone.loading import Backbone, load_backbone
from beatrice.extract.backbone.names import WEIGHTS
from beatrice.extract.generate.answers import prompts_of
from beatrice.extract.generate.generator import GeneratorPrompt, SamplingConfig
from beatrice.extract.generate.local import TransformersGenerator, generate
from beatrice.extract.generate.prompts import GenerationConfig, Prompt, Request
from beatrice.extract.signals.attention import CACHE
from beatrice.extract.signals.batch import ReadingBudget
from beatrice.extract.signals.decode import (
    DecodeReading,
    ReadingGenerator,
    check_decoding,
    generate_and_read,
    groups_in_memory,
    read_stepwise,
)
from beatrice.extract.signals.reader import SignalReader
from beatrice.extract.signals.sequence import sequence_of
from tests.extract.generate.loopback import Numbers
from tests.extract.label.scripted import generated
from tests.extract.signals.readers import FAMILIES as SIGNALS
from tests.extract.signals.readers import assert_same_signals, representatives
from tests.process import forked

WITHOUT = ("mpt", "bloom", "llama4")  # read in a second pass
CONFIG = GenerationConfig(max_new_tokens=6)
SAMPLING = SamplingConfig(max_new_tokens=6)


def backbone_of(family, dtype=torch.float32, stop=None):
    model = tiny_model(family).to(dtype)
    if stop is not None:
        model.generation_config.eos_token_id = stop
    return Backbone.from_model(model, Numbers())


def requests_of(n_shared=0, lengths=(9, 17, 12, 23, 14), context=(2, 6)):
    rng = np.random.default_rng(0)
    shared = rng.integers(3, 50, n_shared).tolist()
    start, stop = (n_shared + edge for edge in context)
    prompts = [(*shared, *rng.integers(3, 50, n).tolist()) for n in lengths]
    return [
        Request(str(i), "with_context", "original", Prompt(ids, (start, stop)))
        for i, ids in enumerate(prompts)
    ]


def answer_of(request, ids, stop):
    """Return the answer to a request that has these ids and ends in a stop token."""
    ends = {"token_ids": tuple(ids), "stop_id": stop}
    return request.answer(msgspec.structs.replace(generated(""), **ends))


def assert_read_alike(reader, requests, config=CONFIG, span="emitting", atol=5e-4):
    """Compare signals of answers with those of a second pass; return the answers."""
    answers, written = generate_and_read(reader, requests, config, answer_span=span)
    again = reader.read([sequence_of(a, answer_span=span) for a in answers])
    assert [x.first_token for x in written] == [x.first_token for x in again]
    assert_same_signals(written, again, atol)
    return answers


def read_again(reader, answers):
    return reader.read([sequence_of(answer) for answer in answers])


def assert_unchanged(reader, requests, expected, atol=5e-4):
    """Check answers and signals, of one pass or two, against those of earlier."""
    (answers, signals), counts = expected, []
    written = generate_and_read(
        reader, requests, CONFIG, progress=lambda *n: counts.append(n)
    )
    assert counts[-1] == (len(requests), len(requests))
    assert written[0] == answers == generate(reader.backbone, requests, CONFIG)
    rows = [*written[1], *read_again(reader, answers)]
    assert_same_signals(rows, signals * 2, atol)


def write(kind, reader, requests, n_new=CONFIG.max_new_tokens):
    """Return a `kind` of reading of what is written, and the answers."""
    prompts = [GeneratorPrompt(text="", ids=r.prompt.ids) for r in requests]
    watch = kind(reader, [r.prompt for r in requests], n_new)
    generator = TransformersGenerator(backbone=reader.backbone)
    replies = generator.write(prompts, SamplingConfig(max_new_tokens=n_new), watch)
    return watch, list(map(Request.answer, requests, replies))


def stop_of(family, requests, index):
    """Return an id that some answer has at this index, as a stop token."""
    reader = backbone_of(family, stop=60)
    answers = generate(reader, requests, CONFIG)
    return next(a.token_ids[index] for a in answers if len(a.token_ids) > index)


READ = representatives([family for family in FAMILIES if family not in WITHOUT])


class KernelAttends(DecodeReading):
    """Read as in half precision: the kernel attends, and logits are rounded.

    Then the attention of eight steps is read at once, and many tokens' probabilities.
    """

    _has_exact_logits = False

    def reduce(self, layer, call, value):
        return super().reduce(layer, call, None)


@pytest.mark.parametrize("kind", [DecodeReading, KernelAttends])
@pytest.mark.parametrize("family", READ)
def test_reading_while_writing_equals_a_second_pass(family, kind):
    """Padded prompts of five lengths beyond the window; answers leave at a stop."""
    requests, n_new = requests_of(), 11  # eight steps and a remainder
    stop = stop_of(family, requests, 2)
    few = ReadingBudget(n_tokens_per_chunk=7)  # of two steps, with rows that left
    reader = SignalReader(backbone_of(family, stop=stop), budget=few)
    watch, answers = write(kind, reader, requests, n_new)
    lengths = {len(answer.token_ids) for answer in answers}
    assert min(lengths) < n_new and max(lengths) > 1  # a row left early
    config = dataclasses.replace(CONFIG, max_new_tokens=n_new)
    assert answers == generate(reader.backbone, requests, config)
    assert_same_signals(watch.signals(answers), read_again(reader, answers), 5e-4)
    assert check_decoding(reader) is None


def test_of_a_prompt_only_the_question_is_weighed_and_not_a_long_context():
    """Its rows look back at no span, and would take the square of its length."""
    rows = []

    class Watching(DecodeReading):
        def reduce(self, layer, call, value):
            reduced = super().reduce(layer, call, value)
            rows.append(self.rows)
            return reduced

    requests = requests_of(lengths=(30, 28), context=(2, 26))
    write(Watching, SignalReader(backbone_of("llama")), requests)
    assert {stretch for stretch in rows if stretch[1] > 1} == {(26, 30)}


def test_requests_are_grouped_so_that_their_signals_fit_in_memory():
    def sizes(n_floats, lengths):
        reader = SimpleNamespace(shapes={"hidden": (2, n_floats), "prob": (5,)})
        groups = groups_in_memory(reader, requests_of(lengths=lengths), 4)
        return [[len(r.prompt.ids) + 4 for r in group] for group in groups]

    assert list(map(len, sizes(1, [9] * 600))) == [256, 256, 88]
    groups = sizes(1 << 20, [9, 700, 99, 99, 99, 9])  # 8 MiB each, of 4 GiB
    assert groups == [[13], [704], [103, 103, 103, 13]]
    assert sizes(1, []) == []


@pytest.mark.parametrize("family", ["llama", "lfm2"])
def test_no_step_is_run_that_generation_could_take_back(family):
    """On MPS, Transformers would run one more than it returns, and a watch see it."""
    backbone, caches = backbone_of(family), []
    hook = backbone.layout.decoder.register_forward_pre_hook(
        lambda module, args, kwargs: caches.append(kwargs[CACHE]), with_kwargs=True
    )
    with hook:
        generate(backbone, requests_of(), CONFIG)
    assert len(caches) >= CONFIG.max_new_tokens
    assert not any(x.is_croppable or x.is_compileable for x in caches)


def test_a_models_own_generation_config_changes_neither_answers_nor_signals():
    requests = requests_of(n_shared=20)
    backbone = backbone_of("llama", stop=stop_of("llama", requests, 2))
    expected = generate_and_read(SignalReader(backbone), requests, CONFIG)
    for name, value in {
        "do_sample": True,
        "use_cache": False,
        "min_new_tokens": 5,
        "no_repeat_ngram_size": 1,
        "encoder_repetition_penalty": 9.0,
        "num_return_sequences": 2,
        "guidance_scale": 2.0,
        "prompt_lookup_num_tokens": 2,
        "prefill_chunk_size": 4,
        "cache_implementation": "static",
        "stop_strings": ["1"],
        "suppress_tokens": [*range(8, 40)],
        "sequence_bias": [[[i], -99.0] for i in range(40)],
        "forced_eos_token_id": 7,
        "exponential_decay_length_penalty": (0, 9.0),
        "penalty_alpha": 0.6,
        "output_hidden_states": True,
        "max_length": 1,
    }.items():
        setattr(backbone.model.generation_config, name, value)
    assert_unchanged(SignalReader(backbone), requests, expected)


def test_a_model_in_training_mode_is_read_without_dropout():
    requests, model = requests_of(n_shared=60), tiny_model("llama")
    for module in model.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.5
    backbone = Backbone.from_model(model, Numbers())
    expected = generate_and_read(SignalReader(backbone), requests, CONFIG)
    model.train()
    model.lm_head.eval()
    assert_unchanged(SignalReader(backbone), requests, expected)
    assert model.training and model.model.training and not model.lm_head.training


def test_a_check_of_some_attention_layers_does_not_count_for_all(tmp_path, monkeypatch):
    monkeypatch.setenv("BEATRICE_REMEMBERED", str(tmp_path))
    backbone = load_backbone(WEIGHTS)
    for n_checks, attention in enumerate(("full", "all"), start=1):
        chosen = dataclasses.replace(backbone, attention=attention)
        assert check_decoding(SignalReader(chosen, (3,))) is None
        assert len([*tmp_path.rglob("decoding*")]) == n_checks


def test_autocast_changes_neither_answers_nor_signals():
    requests, backbone = requests_of(n_shared=20), backbone_of("llama")
    expected = generate_and_read(SignalReader(backbone), requests, CONFIG)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_unchanged(SignalReader(backbone), requests, expected)
        assert torch.is_autocast_enabled("cpu")


def test_a_default_device_is_harmless_and_a_default_dtype_refused(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("BEATRICE_REMEMBERED", str(tmp_path))  # forget earlier checks
    requests, backbone = requests_of(n_shared=20), backbone_of("llama")
    reader = SignalReader(backbone)
    answers, _ = expected = generate_and_read(reader, requests, CONFIG)
    other = backbone_of("llama", torch.bfloat16)
    torch.set_default_device("meta")
    try:
        assert check_decoding(SignalReader(other)) is None
        assert_unchanged(reader, requests, expected)
        *_, last = read_stepwise(reader, requests[0], SAMPLING)
        assert last.ids == answers[0].token_ids
        torch.set_default_dtype(torch.bfloat16)
        for work in (
            lambda: read_again(reader, answers),
            lambda: generate_and_read(reader, requests, CONFIG),
        ):
            with pytest.raises(ValueError, match="default dtype is bfloat16, .* call"):
                work()
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)


def test_threads_that_share_a_model_write_and_read_the_same_as_one_thread():
    requests, backbone = requests_of(), backbone_of("llama")
    expected = generate_and_read(SignalReader(backbone), requests, CONFIG)

    def write_and_read(_):
        reader = SignalReader(backbone)
        assert_unchanged(reader, requests, expected)
        *_, last = read_stepwise(reader, requests[0], SAMPLING)
        return last.so_far(None)[0].token_ids

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        texts = {*pool.map(write_and_read, range(8))}
    assert texts == {expected[0][0].token_ids}


def test_hooks_that_interrupts_have_left_on_a_model_change_no_signal():
    requests, backbone = requests_of(), backbone_of("llama")
    expected = generate_and_read(SignalReader(backbone), requests, CONFIG)

    def interrupt(frame, event, arg):  # between a hook and the note to remove it
        nonlocal n_left
        n_left -= frame.f_code.co_name == "_push_cm_exit"
        if n_left == 0:
            raise KeyboardInterrupt

    before = sys.gettrace()
    for n_left in range(1, 7):  # noqa: B007 (`interrupt` reads it)
        sys.settrace(interrupt)
        with contextlib.suppress(KeyboardInterrupt), watch_layers(backbone.layout, id):
            pass
        sys.settrace(before)
    assert any(module._forward_hooks for module in backbone.model.modules())
    assert_unchanged(SignalReader(backbone), requests, expected)


@pytest.mark.parametrize("family", ["llama", "falcon", "mpt"])
def test_a_pass_of_another_thread_is_told_to_take_the_lock_and_changes_no_signal(
    family,
):
    """It runs between two layers of a reading, as the user's own thread may."""
    (request,) = requests_of(lengths=(9,))
    reader = SignalReader(backbone := backbone_of(family))
    sequences = [
        sequence_of(answer) for answer in generate(backbone, [request], CONFIG)
    ]
    expected, ids = reader.read(sequences), torch.tensor([request.prompt.ids])
    errors = []

    def run_in_another_thread(*_):
        handle.remove()
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            errors.append(pool.submit(backbone.model, ids).exception())

    last = backbone.layout.layers[-1].module
    handle = last.register_forward_pre_hook(run_in_another_thread)
    assert_same_signals(reader.read(sequences), expected, 0)
    assert "language_model.lock" in str(errors[0])


def test_all_wrappers_of_a_model_take_turns():
    model = tiny_model("llama")
    one, other = (Backbone.from_model(model) for _ in range(2))
    assert one.splitter.lock is other.splitter.lock
    assert one.splitter.lock is not backbone_of("llama").splitter.lock


@pytest.mark.usefixtures("threads_as_before")
def test_a_fork_whose_warnings_are_errors_does_not_keep_the_models_lock():
    reader = SignalReader(backbone_of("llama"))
    lock = reader.backbone.splitter.lock
    torch.set_num_threads(2)

    def child():
        with warnings.catch_warnings(action="error"):
            with pytest.raises(UserWarning, match="was forked"):
                reader.read(make_batch())
        with concurrent.futures.ThreadPoolExecutor() as pool:
            pool.submit(lock.__enter__).result(20)

    assert forked(child) == 0


@pytest.mark.usefixtures("threads_as_before")
def test_a_model_loaded_after_a_fork_uses_no_thread_of_the_parents_models():
    SignalReader(backbone_of("llama")).read(make_batch())
    torch.set_num_threads(2)

    def child():
        with pytest.warns(UserWarning, match="was forked"):
            SignalReader(backbone_of("llama")).read(make_batch())
        assert torch.get_num_threads() == 1

    assert forked(child) == 0


@pytest.mark.usefixtures("threads_as_before")
def test_a_process_forked_while_the_model_worked_gives_the_same_answers():
    """At any point of a pass; its leftover hooks would read a row more in the child."""
    requests, backbone = requests_of(), backbone_of("llama")
    reader, large = SignalReader(backbone), torch.ones(2**20)
    answers, _ = generate_and_read(reader, requests, CONFIG)
    torch.set_num_threads(2)
    large.sin()  # starts Torch's threads in this process
    leave = threading.Event()

    def work():
        while not leave.is_set():
            generate_and_read(reader, requests, CONFIG)

    def child():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert generate_and_read(reader, requests, CONFIG)[0] == answers
        large.sin()
        assert sum("was forked" in str(w.message) for w in caught) == 1

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        working = pool.submit(work)
        codes = []
        for _ in range(8):
            time.sleep(0.01)
            codes.append(forked(child))
        leave.set()
        working.result()
    assert codes == [0] * 8


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3_5"])
def test_each_prefix_of_a_streamed_answer_is_read_as_an_answer_that_ends_there(family):
    """Also with a window shorter than the answer, and with recurrent states."""
    (request,) = requests_of(lengths=(7,))
    reader = SignalReader(backbone_of(family, stop=1))
    steps = read_stepwise(reader, request, SamplingConfig(max_new_tokens=6))
    prefixes, step = [], next(steps)
    while True:
        before = step
        try:
            step = next(steps)
        except StopIteration as end:
            written = end.value
            break
        prefixes.append(before.so_far(5))
        np.testing.assert_allclose(before.prob, prefixes[-1][1].prob[-2])
    assert [len(answer.token_ids) for answer, _ in prefixes] == [1, 2, 3, 4, 5]
    (whole,), _ = generate_and_read(reader, [request], CONFIG)
    assert written[0] == whole
    for answer, signals in [*prefixes, written]:
        sequence = sequence_of(answer)
        (again,) = reader.read([sequence])
        n_rows = int(sequence.spans[2, 1])  # a cut answer's last row emits nothing
        for name in SIGNALS:
            value, expected = getattr(signals, name), getattr(again, name)
            assert len(value) == n_rows
            np.testing.assert_allclose(value, expected[:n_rows], atol=5e-4)


def test_answers_in_a_batch_can_be_read_as_if_their_last_token_ended_them():
    """An answer that has already ended is read as it is."""
    requests = requests_of()
    stop = stop_of("llama", requests, 2)
    reader = SignalReader(backbone_of("llama", stop=stop))
    read = []

    class Prefixes(DecodeReading):
        def on_choice(self, ids, is_done):
            super().on_choice(ids, is_done)
            new = [ids[:, self._width :].tolist()[i] for i in range(len(ids))]
            self.texts |= dict(zip(self.run_rows, new, strict=True))
            answers = []
            for row, request in enumerate(requests):
                text = self.texts[row]
                n = text.index(stop) if stop in text[:-1] else len(text) - 1
                answers.append(answer_of(request, text[:n], stop))
            read.append((answers, self.ended(answers)))

        texts = {}

    write(Prefixes, reader, requests)
    assert len({len(a.token_ids) for answers, _ in read for a in answers}) > 3
    for answers, signals in read:
        again = read_again(reader, answers)
        for answer, value, expected in zip(answers, signals, again, strict=True):
            if len(answer.token_ids) == CONFIG.max_new_tokens:
                assert value is None
            else:
                assert_same_signals(value, expected, 5e-4)


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2"])
def test_a_shared_beginning_outside_all_spans_changes_no_signals(family):
    assert_read_alike(SignalReader(backbone_of(family)), requests_of(n_shared=60))


@pytest.mark.parametrize("answer_span", ["emitting", "literal"])
@pytest.mark.parametrize("hidden_spans", ["all", "answer"])
@pytest.mark.parametrize("n_new", [1, 6, 20])  # 20: more than there is room for
def test_signals_equal_a_second_pass_for_all_spans_and_lengths_of_answers(
    answer_span, hidden_spans, n_new
):
    requests = requests_of(context=(3, 3))  # closed-book: an empty context
    stop = stop_of("llama", requests, 0)  # gives an answer without tokens
    reader = SignalReader(backbone_of("llama", stop=stop), hidden_spans=hidden_spans)
    config = dataclasses.replace(CONFIG, max_new_tokens=n_new)
    answers = assert_read_alike(reader, requests, config, answer_span)
    assert {0, n_new} <= {len(answer.token_ids) for answer in answers}


def test_an_answer_cut_at_a_stop_string_of_several_tokens_is_read_alike():
    requests = requests_of()
    reader = SignalReader(backbone_of("llama", stop=60))
    ids = generate(reader.backbone, requests, CONFIG)[0].token_ids
    config = dataclasses.replace(CONFIG, stop=(f"{ids[2]} {ids[3]}",))
    answers = assert_read_alike(reader, requests, config)
    assert answers[0].token_ids == ids[:2] and answers[0].stop_id == ids[2]


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        ("llama", torch.bfloat16),
        ("gemma2", torch.bfloat16),
        ("gemma2", torch.float16),  # whose masks must stay finite in padding
    ],
)
def test_in_half_precision_the_passes_differ_only_within_rounding(family, dtype):
    requests = requests_of()
    reader = SignalReader(backbone_of(family, dtype))
    assert_read_alike(reader, requests, atol=0.3)
    with pytest.raises(AssertionError):  # control: there is a difference
        assert_read_alike(reader, requests, atol=0)
    assert check_decoding(reader) is None


def widen_logits(module, inputs, output):
    """Return float32 logits, like some models and those that accelerate has trained."""
    output["logits"] = output.logits.float()


def test_logits_that_a_forward_pass_widens_are_not_taken_for_exact_ones():
    plain, widening = backbone_of("llama", torch.bfloat16), tiny_model("llama")
    widening.to(torch.bfloat16).register_forward_hook(widen_logits)
    backbones = plain, Backbone.from_model(widening, Numbers())
    (answers, written), (same_answers, others) = (
        generate_and_read(SignalReader(backbone), requests_of(), CONFIG)
        for backbone in backbones
    )
    assert same_answers == answers
    assert all(map(np.array_equal, (r.prob for r in written), (r.prob for r in others)))


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_in_bfloat16_an_answer_is_the_same_whether_it_is_read_or_not(family):
    """With prompts that share part of their spans, and rows that leave early."""
    requests = requests_of(n_shared=70, context=(-10, -6))
    backbone = backbone_of(family, torch.bfloat16)
    reader = SignalReader(backbone)
    prompts = prompts_of(requests)
    assert {prompt.n_common for prompt in prompts} == {60}
    sampling = SamplingConfig(max_new_tokens=CONFIG.max_new_tokens)
    plain = TransformersGenerator(backbone=backbone)
    reading = ReadingGenerator(
        backbone=backbone,
        reader=reader,
        requests={request.prompt.ids: request for request in requests},
        on_batch=lambda answers, signals: None,
    )
    written = dict(plain.stream(prompts, sampling))
    assert dict(reading.stream(prompts, sampling)) == written  # log-probabilities too
    # A past bug: a longer shared beginning changes the rounding of the same prompts.
    other = [dataclasses.replace(prompt, n_common=None) for prompt in prompts]
    assert dict(plain.stream(other, sampling)) != written


@pytest.mark.parametrize("family", WITHOUT)
def test_a_model_that_cannot_be_read_while_writing_has_a_reason(family):
    reason = check_decoding(SignalReader(backbone_of(family)))
    assert reason and "in memory" in reason


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_a_cache_that_does_not_grow_is_refused(family):
    """A static cache has columns that were not run, and rolls if there is a window."""
    reader, (request,) = SignalReader(backbone_of(family)), requests_of(lengths=(9,))
    reading = DecodeReading(reader, [request.prompt], n_new=2)
    options = {"max_new_tokens": 2, "cache_implementation": "static"}
    with reading.watching([0], 0), pytest.raises(ValueError, match="a growing cache"):
        reader.backbone.model.generate(torch.tensor([request.prompt.ids]), **options)


def test_a_layer_that_selects_keys_of_its_cache_is_not_read_while_writing():
    model = twin_of("deepseek_v32")
    model.generation_config.eos_token_id = 60
    reader = SignalReader(Backbone.from_model(model, Numbers()))
    assert "selects some of the keys in a cache" in check_decoding(reader)


class LateTargets(DecodeReading):
    """Read every token with the wrong next token."""

    def on_choice(self, ids, is_done):
        super().on_choice(ids.roll(1, dims=1), is_done)


class NeverDone(DecodeReading):
    """Go on reading rows whose answers have ended."""

    def on_choice(self, ids, is_done):
        super().on_choice(ids, torch.zeros_like(is_done))


class FromTheFirstColumn(DecodeReading):
    """Count one token too few in a cached beginning."""

    def watching(self, rows, n_cached):
        return super().watching(rows, n_cached - 1 if n_cached else 0)


@pytest.mark.parametrize(
    ("reading", "noticed"),
    [
        (LateTargets, pytest.raises(AssertionError, match="\nprob\n")),
        (NeverDone, pytest.raises(AttributeError, match="'NoneType'.* 'hidden'")),
        (FromTheFirstColumn, pytest.raises(ValueError, match="a growing cache")),
        (DecodeReading, contextlib.nullcontext()),
    ],
)
def test_planted_off_by_one_errors_in_reading_are_noticed(reading, noticed):
    requests = requests_of(n_shared=60)
    reader = SignalReader(backbone_of("llama", stop=stop_of("llama", requests, 2)))
    with noticed:
        watch, answers = write(reading, reader, requests)
        assert_same_signals(watch.signals(answers), read_again(reader, answers), 5e-4)


@pytest.mark.parametrize("family", ["gemma3", "gemma4", "qwen3_5"])
def test_attention_limited_to_layers_without_a_window_is_that_part_of_all(family):
    requests, every = requests_of(), backbone_of(family)
    full = dataclasses.replace(every, attention="full")
    kinds = every.model.config.layer_types
    assert [kinds[i] for i in full.attention_layers] == (
        ["full_attention"] * kinds.count("full_attention")
    )
    places = [every.attention_layers.index(i) for i in full.attention_layers]
    readers = SignalReader(every), SignalReader(full)
    assert readers[0].fingerprint != readers[1].fingerprint
    assert readers[1].shapes["attn"][2] == len(places)
    for read in (
        lambda reader: generate_and_read(reader, requests, CONFIG)[1],
        lambda reader: reader.read(make_batch()),
    ):
        whole, part = map(read, readers)
        cut = [dataclasses.replace(x, attn=x.attn[..., places, :]) for x in whole]
        assert_same_signals(part, cut, 1e-4)  # the kernel attends to the rows of `part`


def test_all_layers_of_a_model_with_one_kind_of_attention_are_read():
    for family in ("llama", "mistral_window"):
        backbone = backbone_of(family)
        full = dataclasses.replace(backbone, attention="full")
        assert full.attention_layers == tuple(range(backbone.n_layers))
