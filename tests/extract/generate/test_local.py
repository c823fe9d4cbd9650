"""Texts generated locally: choosing tokens, and what a batch computes once."""

import dataclasses

import msgspec
import numpy as np
import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers
from transformers import (
    PreTrainedTokenizerFast,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from beatrice.benchmarks.bench.tiny_models import N_TEXT_IDS, tiny_model
from beatrice.extract.backbone.loading import Backbone, load_backbone
from beatrice.extract.backbone.names import WEIGHTS
from beatrice.extract.generate import local
from beatrice.extract.generate.answers import DrawConfig, draw_answers
from beatrice.extract.generate.generator import (
    GeneratorPrompt,
    SamplingConfig,
    cut_at_stop,
    reply_key,
    tokenizer_identity,
)
from beatrice.extract.generate.local import (
    TokenChooser,
    TransformersGenerator,
    stop_ids,
)
from beatrice.extract.generate.prompts import usual_stop_id
from beatrice.extract.generate.templates import PromptConfig
from tests.extract.generate.loopback import (
    GREEDY,
    Numbers,
    open_replies,
    prompts_of,
    shapes_run,
    texts,
)
from tests.extract.label.scripted import generated


def test_log_probs_are_those_of_a_plain_forward_pass(local, requests):
    prompts = prompts_of(requests, 6)
    for prompt, text in zip(prompts, texts(local, prompts), strict=True):
        written = [*text.token_ids, text.stop_id]
        ids = torch.tensor([[*prompt.ids, *written]])
        with torch.inference_mode():
            logits = local.backbone.model(ids).logits[0].log_softmax(-1)
        start = len(prompt.ids) - 1
        expected = [logits[start + i, token].item() for i, token in enumerate(written)]
        # Padding and the cache change the order of float32 sums.
        assert text.log_probs == pytest.approx(expected, abs=2e-4)


def test_everything_that_changes_a_text_changes_its_key():
    identity = {"backend": "b", "revision": "r", "dtype": "float32"}
    prompt, config = GeneratorPrompt(text="p"), SamplingConfig(temperature=1.0)
    prompts = [{"text": "q"}, {"ids": (1,)}, {"is_chat": True}, {"sample": 1}]
    configs = [{"max_new_tokens": 3}, {"temperature": 0.5}, {"top_p": 0.5}]
    configs += [{"top_k": 5}, {"seed": 1}, {"stop": ("x",)}]
    others = [(identity | {name: "x"}, prompt, config) for name in identity]
    others += [(identity, dataclasses.replace(prompt, **x), config) for x in prompts]
    others += [(identity, prompt, dataclasses.replace(config, **x)) for x in configs]
    keys = [reply_key(*parts) for parts in [(identity, prompt, config), *others]]
    assert len(set(keys)) == len(keys)
    # A greedy text depends on neither seed, sample nor top-p; stop strings are in the
    # keys of the texts that have some.
    greedy, other = SamplingConfig(seed=1, top_p=0.5), SamplingConfig(seed=2)
    again = GeneratorPrompt(text="p", sample=4)
    assert reply_key({}, prompt, greedy) == reply_key({}, again, other)
    assert "stop" not in greedy.as_key() | config.as_key()


def test_a_text_also_ends_at_the_token_that_ends_a_turn_in_the_template(bytewise):
    """As in a fine-tuned model with the generation config of its base."""
    bytewise.add_tokens([AddedToken("<|im_end|>", special=True)])
    bytewise.chat_template = None
    backbone = Backbone.from_model(tiny_model("llama"), bytewise)
    ends = stop_ids(backbone)
    bytewise.chat_template = (
        "{% for m in messages %}{{ m['content'] }}<|im_end|>\n{% endfor %}"
    )
    end = bytewise.convert_tokens_to_ids("<|im_end|>")
    assert stop_ids(backbone) == (*ends, end)
    assert usual_stop_id(bytewise, PromptConfig(chat=True), stop_ids(backbone)) == end
    backbone.model.generation_config.eos_token_id = [end, *ends]
    assert stop_ids(backbone) == (end, *ends)


def test_a_backends_identity_names_model_tokenizer_template_and_dtype(local):
    identity = local.identity
    assert len(identity["revision"]) == len(identity["tokenizer"]) == 64
    assert identity["dtype"] == "float32"
    assert identity["chat_template"] is None
    other = load_backbone(WEIGHTS, dtype="bfloat16")
    assert TransformersGenerator(backbone=other).identity != identity
    other.tokenizer.chat_template = "{{ messages[0]['content'] }}"
    assert TransformersGenerator(backbone=other).identity["chat_template"] is not None


def test_a_tokenizers_identity_is_the_same_before_and_after_its_first_call(bytewise):
    plain = tokenizer_identity(bytewise)
    bytewise.backend_tokenizer.enable_truncation(8)
    bytewise.backend_tokenizer.enable_padding()
    before = tokenizer_identity(bytewise)
    bytewise("who?")
    assert before == tokenizer_identity(bytewise) == plain


@pytest.mark.parametrize("stop", ["\n", "。"])
@pytest.mark.parametrize("text", ["Paris", "é 德古拉 🦇"])
def test_a_text_is_not_cut_within_a_character(text, stop):
    """Here every byte of an incomplete character decodes to a replacement sign."""
    tokenizer = byte_fallback()
    ids = tuple(tokenizer(text + stop + "Q")["input_ids"])
    reply = msgspec.structs.replace(generated("", finish="length"), token_ids=ids)
    cut = cut_at_stop(reply, (stop,), tokenizer)
    n_kept = len(tokenizer(text)["input_ids"])
    assert (cut.text, cut.token_ids, cut.stop_id) == (text, ids[:n_kept], ids[n_kept])


def test_a_text_without_ids_loses_its_log_probs_when_it_is_cut():
    fields = {"text": "Paris\nQ: who?", "token_ids": None, "log_probs": (-0.5,) * 9}
    reply = msgspec.structs.replace(generated("", finish="stop"), **fields)
    cut = cut_at_stop(reply, ("\n",), None)
    assert (cut.text, cut.log_probs) == ("Paris", None)
    assert cut_at_stop(reply, ("!",), None) == reply


def byte_fallback():
    """A tokenizer like Llama 2's and Gemma's, with tokens for few characters."""
    words = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁Pariswho?"]
    ids = {word: i for i, word in enumerate(dict.fromkeys(words))}
    bpe = models.BPE(ids, [], byte_fallback=True, unk_token="<unk>")
    model = Tokenizer(bpe)
    model.normalizer = normalizers.Replace(" ", "▁")
    model.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return PreTrainedTokenizerFast(tokenizer_object=model)


def test_a_chat_template_wraps_a_message_and_a_long_prompt_is_refused():
    backbone = load_backbone(WEIGHTS)
    backbone.tokenizer.chat_template = (
        "{{ bos_token }}Question: {{ messages[0]['content'] }}"
        "{% if add_generation_prompt %} Answer:{% endif %}"
    )
    generator = TransformersGenerator(backbone=backbone)
    chat = generator.prompt_ids(GeneratorPrompt(text="who?", is_chat=True))
    assert chat == generator.prompt_ids(GeneratorPrompt(text="Question: who? Answer:"))
    with pytest.raises(ValueError, match="window of 512"):
        list(generator.stream([GeneratorPrompt(text="who? " * 600)], GREEDY))


def test_an_empty_list_of_prompts_is_not_refused_as_too_long(local):
    assert texts(local, [], SamplingConfig(max_new_tokens=10_000)) == []


@pytest.mark.parametrize(("top_k", "top_p"), [(5, 0.7), (5, 1.0), (None, 0.7)])
def test_a_draw_is_that_of_noise_over_the_whole_vocabulary(top_k, top_p):
    config = SamplingConfig(temperature=0.7, top_k=top_k, top_p=top_p)
    scores = torch.randn((6, 40), generator=torch.Generator().manual_seed(0)) * 2
    scores[0, :9] = 5.0  # all that equal the fifth are kept
    choice = TokenChooser(config, range(6), torch.device("cpu"), [39])
    drawn = choice(torch.zeros((6, 1), dtype=torch.long), scores).argmax(-1)
    filtered = TopKLogitsWarper(top_k or 40)(None, scores / 0.7)
    filtered = TopPLogitsWarper(top_p)(None, filtered) if top_p < 1 else filtered
    seeds = [torch.Generator().manual_seed(i) for i in range(6)]
    noise = torch.stack([torch.rand(40, generator=seed) for seed in seeds])
    wanted = (filtered - torch.log(-torch.log(noise))).argmax(-1)
    rows = slice(top_p < 1, 6)  # top_p may sort the ties of row 0 otherwise
    assert drawn[rows].tolist() == wanted[rows].tolist()
    log_probs = scores.log_softmax(-1).gather(-1, drawn[:, None])
    torch.testing.assert_close(torch.tensor(choice.taken()), log_probs)


def test_nothing_is_drawn_for_a_row_that_has_ended():
    config = SamplingConfig(temperature=1.0, top_k=5)
    choice = TokenChooser(config, range(3), torch.device("cpu"), [7, 9])
    scores = torch.randn((3, 40), generator=torch.Generator().manual_seed(0))
    first = choice(torch.full((3, 1), 7), scores)  # a prompt may end with such an id
    second = choice(torch.tensor([[1], [9], [2]]), scores)
    assert first.isfinite().sum(-1).tolist() == [1, 1, 1]
    assert second.isfinite().sum(-1).tolist() == [1, 0, 1]


N_SHARED = 40


def backbone_of(name):
    model = tiny_model(name)
    if name == "gemma4":  # between N_SHARED and the lengths of sequences
        model.config.sliding_window = N_SHARED + 8
        model = type(model)(model.config).eval().requires_grad_(False)
    model.generation_config.update(eos_token_id=0, pad_token_id=0)
    return Backbone.from_model(model, tokenizer=Numbers())


def prompts_with(n_shared):
    rng = np.random.default_rng(0)
    common = rng.integers(3, N_TEXT_IDS, n_shared).tolist()
    tails = [rng.integers(3, N_TEXT_IDS, n).tolist() for n in (9, 4, 1, 12, 9, 6)]
    return [(*common, *tail) for tail in tails]


SIX = SamplingConfig(max_new_tokens=6)


def written(backbone, prompts, config=SIX):
    generator = TransformersGenerator(backbone=backbone)
    prompts = [GeneratorPrompt(text="", ids=ids) for ids in prompts]
    return texts(generator, prompts, config)


SHARED, WIDTH = [(1, N_SHARED), (6, 12)], N_SHARED + 12


@pytest.mark.parametrize(
    ("name", "n_shared", "expected"),
    [
        *((name, N_SHARED, SHARED) for name in ("llama", "gpt2", "bloom", "gemma4")),
        ("llama", 15, [(6, 27)]),  # too few shared tokens
        ("mistral_window", N_SHARED, [(1, N_SHARED), (6, WIDTH)]),  # a short window
        ("qwen3_5", N_SHARED, [(6, WIDTH)]),  # recurrent states
    ],
)
def test_a_shared_beginning_is_computed_once_if_possible(name, n_shared, expected):
    backbone = backbone_of(name)
    with shapes_run(backbone) as shapes:
        written(backbone, prompts_with(n_shared))
    assert shapes[: len(expected)] == expected


def test_the_last_token_of_the_shortest_prompt_is_not_shared():
    prompts = prompts_with(N_SHARED)
    assert local.n_shared([*prompts, prompts[0][:30]]) == 29
    assert local.n_shared([prompts[0], prompts[0]]) == len(prompts[0]) - 1
    assert local.n_shared([(1, 2, 3), (2, 2, 3)]) == 0


@pytest.mark.parametrize("temperature", [1e-300, 1e-38])
def test_a_draw_at_almost_no_temperature_is_the_greedy_text(temperature):
    config = SamplingConfig(max_new_tokens=10, temperature=temperature)
    backbone, prompts = backbone_of("llama"), prompts_with(N_SHARED)
    drawn, best = (written(backbone, prompts, c) for c in (config, GREEDY))
    assert [text.token_ids for text in drawn] == [text.token_ids for text in best]


@pytest.mark.parametrize(
    "name", ["llama", "gpt2", "bloom", "gemma3", "gemma4", "qwen3_5"]
)
def test_draws_for_equal_prompts_are_those_of_each_prompt_by_itself(name):
    config = SamplingConfig(max_new_tokens=5, temperature=9.0, top_k=20, top_p=0.9)
    generator = TransformersGenerator(backbone=backbone_of(name))
    prompts = [
        GeneratorPrompt(text="", ids=ids, sample=k)
        for ids in prompts_with(N_SHARED)[:3]
        for k in range(3)
    ]
    result = texts(generator, prompts, config)
    assert len({item.token_ids for item in result}) > 3
    for item, prompt in zip(result, prompts, strict=True):
        (alone,) = texts(generator, [prompt], config)
        assert item.token_ids == alone.token_ids
        assert item.log_probs == pytest.approx(alone.log_probs, abs=2e-4)


def test_an_equal_prompt_is_computed_once():
    backbone, prompts = backbone_of("llama"), prompts_with(N_SHARED)
    with shapes_run(backbone) as shapes:
        written(backbone, [*prompts[:2], *prompts[:2], prompts[0]])
    assert shapes[:3] == [(1, N_SHARED), (2, 8), (5, 1)]


def test_a_prompt_is_computed_once_for_all_its_draws(local, requests, tmp_path):
    config = DrawConfig(n_samples=3, sampling=SamplingConfig(temperature=1.0))
    replies = open_replies(tmp_path / "sample.jsonl")
    with shapes_run(local.backbone) as shapes:
        draw_answers(requests[:2], local, replies, config, lambda done, total: None)
    width = max(len(request.prompt.ids) for request in requests[:2])
    assert shapes[:2] == [(2, width - 1), (6, 1)]


ENDING = SamplingConfig(max_new_tokens=24, stop=("5",))


# Full attention, learned positions, ALiBi, windows shorter than the shared beginning,
# recurrent layers, and layers that share their keys.
@pytest.mark.parametrize("draws", [{}, {"temperature": 3.0, "top_k": 40}])
@pytest.mark.parametrize(
    "name", ["llama", "gpt2", "bloom", "gemma3", "mistral_window", "qwen3_5", "gemma4"]
)
def test_finished_rows_leave_the_batch_and_no_text_changes(name, draws):
    backbone, config = backbone_of(name), dataclasses.replace(ENDING, **draws)
    prompts = prompts_with(N_SHARED)
    with shapes_run(backbone) as shapes:
        together = written(backbone, prompts, config)
    n_rows = [n for n, _ in shapes]
    n_new = [item.n_new_tokens for item in together]
    assert len(set(n_new)) > 1
    for prompt, item in zip(prompts, together, strict=True):
        (alone,) = written(backbone, [prompt], config)
        assert item.log_probs == pytest.approx(alone.log_probs, abs=2e-4)
        assert msgspec.structs.replace(item, log_probs=alone.log_probs) == alone
    n_steps = max(n_new)
    if name == "qwen3_5":  # rows with recurrent states stay
        assert n_rows[-n_steps:] == [len(prompts)] * n_steps
    else:
        # Rows leave once half are done: no forward reads over twice the rows needed.
        left = [sum(n > step for n in n_new) for step in range(n_steps)]
        assert all(a <= 2 * b for a, b in zip(n_rows[-n_steps:], left, strict=True))
