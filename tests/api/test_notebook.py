"""The steps of a notebook: questions, answers, signals, a probe, a score."""

import copy
import dataclasses
import gc
import itertools
import os
import re
import runpy
import shutil
import threading
import weakref
from multiprocessing.reduction import ForkingPickler

import numpy as np
import pandas
import pytest
import torch
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
)
from transformers.utils import logging

import beatrice
from beatrice.extract.backbone.names import (
    GEMMA,
    IN_MEMORY,
    WEIGHTS,
    ModelHashes,
    fetch_model,
    locked_folder,
)
from beatrice.extract.generate.templates import MAX_NEW_TOKENS, PromptConfig
from beatrice.extract.records import SETTINGS
from beatrice.extract.run.contents import read_answers, read_examples
from beatrice.extract.run.files import user_cache
from beatrice.extract.signals.extract import ExtractConfig
from beatrice.extract.store.store import open_kvstore, open_store, read_family
from beatrice.jaxprobe.detector import Provenance
from beatrice.jaxprobe.rows import closed_book_rows
from beatrice.pgir.warnings import differences
from tests.extract.generate.test_local import byte_fallback
from tests.pgir.small import PASSAGE, QUESTION
from tests.process import ROOT
from tests.test_house import ROOMS

pytestmark = pytest.mark.filterwarnings("ignore:too few to", "ignore:the probe is not")
README = (ROOT / "README.md").read_text()
FIRST, NOTEBOOK, GATE = re.findall(r"```python\n(.*?)```", README, re.S)


@pytest.fixture(scope="module")
def examples(run):
    return read_examples(run)[:60]


def test_a_notebook_of_ten_lines_goes_from_questions_to_a_score(run, working_folder):
    assert len(NOTEBOOK.strip().splitlines()) <= 12
    shutil.copy(run.examples, "questions.jsonl")
    names = {}
    exec(NOTEBOOK, names)
    assert sorted(os.listdir()) == ["probe", "questions.jsonl"]
    probe = names["probe"]
    score = probe.answer(QUESTION)
    p_correct = probe.predict(names["signals"][:1])
    again = probe.score(names["questions"][0].question, names["answers"][0].text)
    assert again.p_correct == pytest.approx(p_correct[0], abs=1e-4)
    assert score.text and 0 <= score.p_correct <= 1


@pytest.mark.slow
def test_the_first_lines_of_the_readme_print_what_it_shows(capsys):
    try:
        fetch_model(GEMMA, user_cache("models"), print)
    except ValueError as error:
        pytest.skip(f"the model of these lines is not here: {error}")
    capsys.readouterr()
    (expected,) = re.findall(r"```\n('.*?)```", README, re.S)
    exec(FIRST, {})
    assert capsys.readouterr().out == expected


def test_completion_offers_only_public_names_modules_and_rooms():
    names = {name for name in dir(beatrice) if not name.startswith("__")}
    files = {path.stem for path in (ROOT / "api").iterdir()}
    assert {*beatrice.__all__} <= names
    assert names <= {*beatrice.__all__, *files, *ROOMS}


def test_the_gate_of_the_readme_keeps_the_answer_with_the_higher_p():
    names = {"beatrice": beatrice}
    exec(GATE.replace("0.7", "1.0"), names)  # no draft stands
    draft, kept = names["draft"], names["kept"]
    probe, passages = names["gate"].scorer, names["passages"]
    score = probe.score(draft.question, "Guzolt Falls", passages)
    assert kept.is_grounded == (score.p_correct > draft.p_correct)
    assert kept.answer == ("Guzolt Falls" if kept.is_grounded else draft.answer)


def test_answers_equal_those_of_the_verb(run, model, examples):
    passages = [e.passages for e in examples]
    for setting, contexts in (("closed_book", None), ("with_context", passages)):
        known = {a.key: a for a in read_answers(run, setting)}
        for answer in model.answer(examples, contexts, max_new_tokens=10):
            assert answer == known[answer.key]


def test_signals_in_memory_and_in_a_folder_equal_those_of_the_verb(
    run, model, examples, tmp_path
):
    answers = model.answer(examples, max_new_tokens=10)
    store = open_store(run.features("closed_book"))
    for where in (None, tmp_path / "signals"):
        signals = model.read(answers, layers=[2, 4], store=where)
        assert signals.layers == (2, 4) and signals.setting == "closed_book"
        for i, answer in enumerate(answers[:5]):
            at = [store.spec.keys.index(answer.key)]
            stored = read_family(store, "hidden", at).values[:, [2, 4]]
            both = signals[i]["hidden"].astype("f4"), stored.astype("f4")
            # In bfloat16, sums in another order may round to the next value.
            np.testing.assert_allclose(*both, rtol=2**-7, atol=1e-4)
            for name in ("prob", "resid", "attn"):
                stored = read_family(store, name, at).values
                np.testing.assert_allclose(signals[i][name], stored, rtol=0, atol=1e-4)
    assert len(model.read(answers, layers=[2, 4], store=where)) == len(answers)


def test_the_packaged_probes_script_takes_a_runs_signals_as_its_models(
    run, model, examples
):
    stored = runpy.run_path(str(ROOT / "docs" / "packaged_probe.py"))["stored"]
    answers, signals = stored(run, model, "closed_book", examples)
    assert signals.keys == tuple(answer.key for answer in answers)
    assert signals.store.spec.fingerprint["name"] == "embedded"


class Failing:
    """A reader whose device is lost at the fifth batch."""

    def __init__(self, reader):
        self._reader, self._numbers = reader, itertools.count(1)

    def __getattr__(self, name):
        return getattr(self._reader, name)

    def start(self, sequences):
        if next(self._numbers) == 5:
            raise ValueError("the device is lost")
        return self._reader.start(sequences)


def test_signals_that_could_not_all_be_read_leave_nothing_in_memory(examples):
    model = beatrice.LanguageModel("embedded")
    answers = model.answer(examples, max_new_tokens=4)
    choice = (3,), "all"
    model._readers[choice] = Failing(model._reader(*choice))
    memory = open_kvstore("memory://beatrice-signals-")
    before = {*memory.list().result()}
    config = ExtractConfig(tokens_per_batch=64)
    with pytest.raises(ValueError, match="is lost"):
        model.read(answers, layers=[3], config=config)
    assert {*memory.list().result()} <= before


def test_reading_into_a_folder_waits_until_its_lock_is_free(model, tmp_path):
    answers = model.answer(QUESTIONS, max_new_tokens=4)
    store, read = tmp_path / "signals", []
    reading = threading.Thread(
        target=lambda: read.append(model.read(answers, store=store))
    )
    with locked_folder(store):
        reading.start()
        reading.join(0.5)
        assert reading.is_alive() and not (store / "index.json").exists()
    reading.join()
    assert len(read[0]) == len(answers)


CONTEXTS = [PASSAGE, "in Falls", ["x y", "was z"]]
QUESTIONS = [QUESTION, "where was Guzolt Falls born?", "where was Skiband born?"]


@pytest.mark.parametrize("contexts", [None, CONTEXTS])
def test_answers_are_read_in_the_passes_that_write_them(model, contexts):
    inputs = {"questions": QUESTIONS, "contexts": contexts}
    inputs["max_new_tokens"] = np.int64(8)  # such as the largest length in an array
    answers, signals = model.answer(**inputs, read=True, layers=[1, 3])
    inputs["max_new_tokens"] = 8
    assert answers == model.answer(**inputs)
    again = model.read(answers, layers=[1, 3])
    assert signals.keys == again.keys and signals.layers == again.layers == (1, 3)
    for read, expected in zip(signals, again, strict=True):
        for name, rows in expected.items():
            # Hidden states are stored as bfloat16.
            np.testing.assert_allclose(read[name], rows, rtol=1e-2, atol=1e-3)


def test_a_repeated_example_is_not_read_and_nothing_is_written(
    model, examples, tmp_path
):
    twice = [*examples[:2], examples[0]]
    assert len(model.answer(twice, max_new_tokens=2)) == 3
    with pytest.raises(ValueError, match=r"questions\[0\] and questions\[2\]"):
        model.answer(twice, read=True, store=tmp_path / "signals")
    assert not any(tmp_path.iterdir())


def test_a_model_that_needs_a_second_pass_warns_and_is_read_again(model):
    tokenizer = model.backbone.tokenizer
    sizes = {"vocab_size": len(tokenizer), "hidden_size": 16, "n_layer": 2, "n_head": 2}
    bloom = BloomForCausalLM(BloomConfig(**sizes))
    tiny = beatrice.LanguageModel(bloom, tokenizer, prompt=model.prompt)
    with pytest.warns(UserWarning, match="read again"):
        answers, signals = tiny.answer(["where is he?"], max_new_tokens=2, read=True)
    assert len(answers) == len(signals) == 1


@pytest.mark.parametrize("context", [[], ["на столе"]])
def test_the_words_of_a_template_are_in_no_script_of_training(context):
    """Else a probe fitted on Russian questions would not warn of an English one."""
    tokenizer, n = byte_fallback(), {"num_attention_heads": 4, "num_hidden_layers": 1}
    n |= {"vocab_size": len(tokenizer), "hidden_size": 16, "intermediate_size": 16}
    tiny = beatrice.LanguageModel(
        LlamaForCausalLM(LlamaConfig(**n)), tokenizer, prompt=PromptConfig()
    )
    rows = [(question, "там", context) for question in ("где книга?", "где он?")]
    signals = tiny.read(tiny.as_answers(rows))
    assert signals.store.spec.fingerprint["scripts"] == ["CYRILLIC"]


def test_a_probe_answers_and_scores_in_one_pass(run, model):
    probe = beatrice.load(run.path)
    for contexts in (None, CONTEXTS):
        scores = probe.answer(QUESTIONS, contexts)
        shown = [None] * len(QUESTIONS) if contexts is None else contexts
        for question, context, score in zip(QUESTIONS, shown, scores, strict=True):
            again = probe.score(question, score.text, context)
            assert score.p_correct == pytest.approx(again.p_correct, abs=1e-4)
            assert (score.decision, score.reason) == (again.decision, again.reason)
    alone = probe.answer(QUESTIONS[0], CONTEXTS[0])
    assert alone.text == scores[0].text
    *tokens, score = probe.stream(QUESTIONS[0], CONTEXTS[0], every=1)
    assert score == alone and all(0 <= token.p <= 1 for token in tokens)
    assert probe.answer(QUESTIONS[0], temperature=9.0, seed=1, max_new_tokens=2).text
    with pytest.raises(ValueError, match="contexts"):
        probe.answer(QUESTIONS, CONTEXTS[:2])


def test_fitted_and_saved_probes_answer_with_the_settings_of_the_fit(model, tmp_path):
    questions = [f"where was {name} born?" for name in "ABCDEFGHIJKLMNOPQRST"]
    (whole,) = model.answer([QUESTION])
    stop = [whole.text[3]]
    settings = {"max_new_tokens": 5, "stop": stop}
    answers, signals = model.answer([QUESTION, *questions], read=True, **settings)
    labels = [n % 2 == 0 for n in range(21)]
    splits = ["train"] * 14 + ["validation"] * 7
    probe = beatrice.fit(signals, labels, splits=splits)
    probe.save(tmp_path / "probe", untrustworthy=True)
    for each in (probe, beatrice.load(tmp_path / "probe")):
        assert each.answer(QUESTION).text == answers[0].text != whole.text
        assert each.scorer.probed.config.max_new_tokens == 5


def test_a_probe_of_a_model_in_memory_scores_with_that_model(model, examples):
    backbone, options = model.backbone, {"prompt": model.prompt}
    ours = beatrice.LanguageModel(backbone.model, backbone.tokenizer, **options)
    answers = ours.answer(examples, max_new_tokens=10)
    labels = [a.text in e.golds for a, e in zip(answers, examples, strict=True)]
    signals = ours.read(answers)
    probe = beatrice.fit(signals, labels, config="smoke", progress=False)
    score = probe.score(examples[0].question, answers[0].text)
    assert "float32 on cpu" in repr(ours)
    assert probe.scorer.probed.backbone.model is backbone.model
    assert score.p_correct == pytest.approx(probe.predict(signals[:1])[0], abs=1e-4)


PLACES = [f"where is {n}?" for n in range(20)]


def fitted(model, **options):
    """Return a probe of a model, and the answers and signals that it is fitted on."""
    answers, signals = model.answer(PLACES, read=True, **options)
    return beatrice.fit(signals, [True, False] * 10, progress=False), answers, signals


def test_copying_or_pickling_a_probe_and_signals_leaves_their_model_intact(model):
    probe, answers, signals = fitted(model)
    given, expected = ("where is 3?", answers[3].text), probe.predict(signals)
    for copied in (
        copy.deepcopy,
        lambda x: ForkingPickler.loads(ForkingPickler.dumps(x)),
    ):
        there, read = copied((probe, signals))
        score = there.score(*given)
        assert score.p_correct == probe.score(*given).p_correct
        assert np.array_equal(there.predict(read), expected)
        assert read.model.answer(["where is 3?"]) == [answers[3]]
    assert model.answer(["where is 3?"]) == [answers[3]]
    assert copy.copy(model).backbone is model.backbone
    ours = beatrice.LanguageModel(model.backbone.model, model.backbone.tokenizer)
    signals = beatrice.Signals(signals.store, model=ours)
    again = ForkingPickler.loads(ForkingPickler.dumps(signals))
    assert again.model is None and again.keys == signals.keys
    for copied in (copy.copy(signals), copy.deepcopy(signals)):
        assert copied.model.backbone is ours.backbone and copied.keys == signals.keys
    with pytest.raises(ValueError, match="a model in memory cannot be sent"):
        ForkingPickler.dumps(ours)


def test_a_probe_reads_the_attention_of_the_layers_that_it_was_fitted_on(
    model, examples, tmp_path
):
    kinds = ["sliding_attention", "full_attention"] * 2
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    tokenizer = model.backbone.tokenizer
    config = Gemma3TextConfig(
        vocab_size=len(tokenizer), layer_types=kinds, sliding_window=8, **sizes, **heads
    )
    tiny, options = Gemma3ForCausalLM(config), {"prompt": model.prompt}
    full = beatrice.LanguageModel(tiny, tokenizer, attention_layers="full", **options)
    answers, signals = full.answer(examples, max_new_tokens=3, read=True)
    assert signals[0]["attn"].shape[1:] == (2, 2, 2, 4)
    labels = [len(answer.text) % 2 for answer in answers]
    probe = beatrice.fit(signals, labels, config="smoke", progress=False)
    probe.save(tmp_path / "probe", examples=[], untrustworthy=True)
    every = beatrice.LanguageModel(tiny, tokenizer, **options)
    loaded = beatrice.load(tmp_path / "probe", model=every)
    scores = loaded.answer([e.question for e in examples[:3]], max_new_tokens=3)
    values = [score.p_correct for score in scores]
    assert values == pytest.approx(probe.predict(signals[:3]).tolist(), abs=1e-4)
    with pytest.raises(ValueError, match="attn"):
        loaded.predict(every.read(answers[:3]))
    passages = [PASSAGE] * len(examples)
    shown = every.answer(examples, passages, max_new_tokens=3, read=True)[1]
    both = {"closed_book": signals, "with_context": shown}
    with pytest.raises(ValueError, match="their attention_layers are full and all"):
        beatrice.fit(both, dict.fromkeys(both, labels), config="smoke", progress=False)


def test_a_probe_records_how_the_answers_of_each_setting_were_read(model):
    _, written = model.answer(PLACES, max_new_tokens=3, read=True)
    shown = model.read(model.answer(PLACES, [PASSAGE] * 20, max_new_tokens=3))
    both = {"closed_book": written, "with_context": shown}
    labels = dict.fromkeys(both, [True, False] * 10)
    probe = beatrice.fit(both, labels, progress=False)
    paths = {"closed_book": "decode", "with_context": "teacher_forced"}
    assert probe.detector.provenance.paths == paths
    assert probe.detector.provenance.max_new_tokens == 3  # `read` does not know it


def test_a_probe_of_both_settings_takes_what_ends_answers_from_both(model):
    shown, right = {"contexts": [PASSAGE] * 20, "read": True}, [True, False] * 10
    _, cut = model.answer(PLACES, max_new_tokens=1, read=True)
    whole, ended = (model.answer(PLACES, **shown, stop=x)[1] for x in (None, ["Falls"]))
    both = {"closed_book": cut, "with_context": whole}
    provenance = beatrice.fit(
        both, dict.fromkeys(both, right), progress=False
    ).detector.provenance
    assert provenance.max_new_tokens == MAX_NEW_TOKENS
    assert provenance.stop_id == whole.store.spec.fingerprint["stop_id"] is not None
    with pytest.raises(ValueError, match=r"their stop are None and \('Falls',\)"):
        both["with_context"] = ended
        beatrice.fit(both, dict.fromkeys(both, right), progress=False)


def test_loading_a_model_does_not_change_the_verbosity_of_transformers():
    before = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_info()
    logging.enable_progress_bar()
    beatrice.LanguageModel("embedded")
    beatrice.load("embedded").load_scorer()
    assert logging.get_verbosity() == logging.INFO
    assert logging.is_progress_bar_enabled()
    logging.set_verbosity(before[0])
    if not before[1]:
        logging.disable_progress_bar()


def test_a_model_that_is_no_longer_used_is_freed_even_after_reading():
    model = beatrice.LanguageModel("embedded")
    model.answer(QUESTIONS[:1], max_new_tokens=2, read=True)
    weights = weakref.ref(model.backbone.model)
    del model
    gc.collect()
    assert weights() is None


def test_a_model_in_memory_needs_its_own_tokenizer_and_takes_no_device(model):
    tokenizer, of_memory = copy.deepcopy(model.backbone.tokenizer), model.backbone.model
    tokenizer.add_tokens(["Zyxw"])
    bare = beatrice.LanguageModel(of_memory)
    for call, named in (
        (lambda: beatrice.load("embedded", model=model, device="cpu"), "keeps its dev"),
        (
            lambda: beatrice.load("embedded", model=of_memory),
            "expected .*LanguageModel",
        ),
        (lambda: beatrice.LanguageModel(of_memory, tokenizer), "resize the embeddings"),
        (lambda: bare.answer(["where?"]), "needs its tokenizer"),
        (lambda: bare.as_answers(["where?"]), "needs its tokenizer"),
    ):
        with pytest.raises(ValueError, match=named):
            call()


def test_a_users_model_stays_unchanged_and_is_read_without_its_dropout(model):
    own = copy.deepcopy(model.backbone.model).requires_grad_(True)
    dropout = torch.nn.Dropout(0.5)
    own.model.layers[0].mlp.register_module("noise", dropout)
    own.model.layers[0].mlp.register_forward_hook(lambda _, __, y: dropout(y))
    own.train()
    dropout.eval()
    language_model = beatrice.LanguageModel(own, model.backbone.tokenizer)
    (expected,) = language_model.answer([QUESTION])
    own.eval()
    dropout.train()  # only this module, as for Monte Carlo dropout
    assert language_model.answer([QUESTION]) == [expected]
    assert dropout.training and all(p.requires_grad for p in own.parameters())


def test_examples_that_differ_because_torch_rounds_factors_say_so():
    torch.set_float32_matmul_precision("medium")
    try:
        with pytest.raises(ValueError, match="rounds factors to bf16 here, so first c"):
            beatrice.load("embedded").score(QUESTION, "Paris")
    finally:
        torch.set_float32_matmul_precision("highest")
    beatrice.load("embedded").score(QUESTION, "Paris")


def scaled(own):
    with torch.no_grad():
        own.model.norm.weight.mul_(1.5)


def written_past_autograd(own):
    own.model.norm.weight.data.mul_(1.5)


def trained(own):
    """Take a step as Transformers' Trainer does, only of the matrices of one layer."""
    weights = own.model.layers[1].mlp.requires_grad_(True).parameters()
    optimizer = torch.optim.AdamW(weights, lr=1e-3, fused=True)
    ids = torch.tensor([[1, 2, 3, 4]])
    own(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()


@pytest.mark.parametrize("change", [scaled, written_past_autograd, trained])
def test_weights_that_change_in_memory_are_noticed(model, change):
    own = copy.deepcopy(model.backbone.model)
    language_model = beatrice.LanguageModel(own, model.backbone.tokenizer)
    (answer,) = language_model.answer([QUESTION])
    probe = beatrice.load("embedded", model=language_model, strict=False)
    assert probe.score(QUESTION, answer.text).p_correct is not None
    change(own)
    for ask in (
        lambda: language_model.answer([QUESTION]),
        lambda: language_model.read([answer]),
        lambda: probe.score(QUESTION, answer.text),
        lambda: probe.answer(QUESTION),
        lambda: probe.score_many([(QUESTION, answer.text)]),
    ):
        with pytest.raises(ValueError, match="the weights of 'in memory' have changed"):
            ask()
    other = beatrice.LanguageModel(own, model.backbone.tokenizer)
    assert other.backbone.revision != language_model.backbone.revision


def test_a_probe_of_a_model_in_memory_also_works_with_the_saved_model(model, tmp_path):
    own, tokenizer = copy.deepcopy(model.backbone.model), model.backbone.tokenizer
    language_model = beatrice.LanguageModel(own, tokenizer, prompt=model.prompt)
    probe, answers, _ = fitted(language_model)
    probe.save(tmp_path / "probe", untrustworthy=True)
    with pytest.raises(ValueError, match="fitted on a model in memory; give that mod"):
        beatrice.load(tmp_path / "probe").score(QUESTION, answers[0].text)
    for saved in (own, tokenizer):
        saved.save_pretrained(tmp_path / "model")
    given = QUESTION, answers[0].text
    scores = [
        beatrice.load(tmp_path / "probe", model=where).score(*given).p_correct
        for where in (tmp_path / "model", language_model)
    ]
    assert scores[0] == pytest.approx(scores[1], abs=1e-6)
    with torch.no_grad():
        own.model.norm.weight.mul_(1.1)
    own.save_pretrained(tmp_path / "model")
    with pytest.raises(ValueError, match="another model"):
        beatrice.load(tmp_path / "probe", model=tmp_path / "model").score(*given)


def test_a_model_given_by_a_relative_path_is_found_from_another_folder(
    model, working_folder, monkeypatch
):
    shutil.copytree(WEIGHTS, "tiny")
    (working_folder / "elsewhere").mkdir()
    tiny = beatrice.LanguageModel("tiny", prompt=model.prompt)
    probe, answers, signals = fitted(tiny)
    probe.save("probe", untrustworthy=True)
    monkeypatch.chdir("elsewhere")
    given, expected = ("where is 3?", answers[3].text), probe.predict(signals)[3]
    for there in (
        ForkingPickler.loads(ForkingPickler.dumps(probe)),
        beatrice.load("../probe"),
    ):
        assert there.score(*given).p_correct == pytest.approx(expected, abs=1e-4)


def test_signals_on_disk_are_resumed_after_their_model_was_moved(model, working_folder):
    ids = []
    for folder in ("here", "there"):
        shutil.copytree(WEIGHTS, folder)
        moved = beatrice.LanguageModel(folder, prompt=model.prompt)
        probe, _, signals = fitted(moved, store="signals")
        ids.append(signals.store.id)
        shutil.rmtree(folder)
    assert ids[0] == ids[1]
    assert probe.detector.provenance.model == str(working_folder / "there")


def test_questions_and_signals_may_lie_in_the_home_folder(
    model, working_folder, monkeypatch
):
    home = working_folder / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    (home / "asked.jsonl").write_text('{"question": "where?", "golds": ["here"]}')
    questions = beatrice.read_questions("~/asked.jsonl")
    answers, _ = model.answer(questions, read=True, store="~/written")
    model.read(answers, store="~/read")
    beatrice.Signals.from_arrays({"a": np.eye(2)}, store="~/arrays")
    for name in ("written", "read", "arrays"):
        assert len(beatrice.Signals(f"~/{name}")) == len(beatrice.Signals(home / name))
    assert [*working_folder.iterdir()] == [home]
    with pytest.raises(ValueError, match="store: expected a path"):
        model.read(answers, store=True)


def test_progress_is_shown_only_if_asked_for(model, tmp_path, capsys):
    for progress in (False, True):
        for store in (None, tmp_path / str(progress)):
            options = {"max_new_tokens": 2, "store": store, "progress": progress}
            model.answer(PLACES, read=True, **options)
            shown = capsys.readouterr().err
            for words in ("answer closed_book: done", "read closed_book: done"):
                assert (words in shown) == progress


def test_a_store_of_other_signals_is_refused_before_anything_is_answered(
    model, tmp_path
):
    store = tmp_path / "signals"
    answers = model.answer(["where?"])
    model.read(answers, store=store)
    for questions, layers in ((["where?", "who?"], "middle"), (["where?"], [2])):
        with pytest.raises(ValueError, match="other answers or layers"):
            model.answer(questions, read=True, store=store, layers=layers)
    assert [path.name for path in tmp_path.iterdir()] == ["signals"]


def test_a_store_of_other_prompts_is_refused_and_its_answers_stay_recorded(
    model, tmp_path
):
    options = {"read": True, "store": tmp_path / "signals", "max_new_tokens": 2}
    model.answer(QUESTIONS, CONTEXTS, **options)
    lines = (tmp_path / "signals.written" / "answers.jsonl").read_bytes()
    with pytest.raises(ValueError, match="other answers or layers"):
        model.answer(QUESTIONS, CONTEXTS[::-1], **options)
    assert (tmp_path / "signals.written" / "answers.jsonl").read_bytes() == lines


def test_the_identity_of_a_model_in_memory_ignores_how_it_is_used(model):
    backbones, uses = [], {"use_cache": False, "transformers_version": "9"}
    uses |= {"output_hidden_states": True, "architectures": None}  # as if from no file
    uses |= {"pad_token_id": 7}
    for name, value in {"use_cache": True, **uses}.items():
        ours = copy.deepcopy(model.backbone.model)
        setattr(ours.config, name, value)
        language_model = beatrice.LanguageModel(ours, model.backbone.tokenizer)
        backbones.append(language_model.backbone)
    revision, hashes = backbones[0].revision, backbones[0].hashes
    trained = Provenance(model=IN_MEMORY, revision=revision, layer=2, hashes=hashes)
    for backbone in backbones:
        assert backbone.revision == revision
        assert not list(differences(trained, backbone))
    other = dataclasses.replace(trained, hashes=ModelHashes(tokenizer="f" * 64))
    (text,) = differences(other, backbones[0])
    assert "another tokenizer" in text and "but the model in memory has" in text


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"model": 3}, "model"),
        ({"model": "no/such model"}, "no/such model"),
        ({"model": "embedded", "dtype": "int4"}, "dtype"),
        ({"model": "embedded", "device": "tpu"}, "device"),
        ({"model": "embedded", "device": 1.5}, "device: expected a Torch device"),
        ({"model": "embedded", "device": ""}, "device"),
        (
            {"model": "embedded", "prompt": "short"},
            "prompt: expected a mapping or a PromptConfig",
        ),
        ({"model": "embedded", "attention_layers": "most"}, "attention_layers"),
        ({"model": "embedded", "tokenizer": object()}, "tokenizer"),
        ({"model": torch.nn.Linear(2, 2), "device": "cpu"}, "device"),
    ],
)
def test_a_model_that_cannot_be_opened_is_refused_in_one_sentence(given, named):
    with pytest.raises(ValueError, match=named):
        beatrice.LanguageModel(**given)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"questions": "where?"}, "questions"),
        ({"questions": ["where?", " "]}, r"questions\[1\]"),
        ({"contexts": [[3]]}, r"contexts\[0\]"),
        ({"contexts": [beatrice.Passage(title="", text=3)]}, r"contexts\[0\]"),
        ({"max_new_tokens": None}, "max_new_tokens: expected a whole number"),
        ({"max_new_tokens": 2.5}, "max_new_tokens: expected a whole number"),
        ({"stop": "Falls"}, "stop: expected a list of texts"),  # not letter by letter
        ({"stop": [3]}, r"stop\[0\]: expected a text"),
        ({"store": "signals"}, "store: only applies to signals; add read=True"),
        ({"progress": True}, "progress: only applies to signals; add read=True"),
        ({"layers": [2]}, "layers: only applies to signals; add read=True"),
        ({"read": True, "questions": []}, "questions: expected some .* found none"),
        ({"read": True, "layers": []}, "layers: expected numbers"),
        ({"read": True, "layers": None}, "layers: expected numbers"),
        ({"read": True, "layers": [2.5]}, "layers: expected numbers"),
    ],
)
def test_bad_arguments_of_answer_are_refused_in_one_sentence(model, given, named):
    with pytest.raises(ValueError, match=named):
        model.answer(**{"questions": ["where?"], **given})


def test_all_questions_are_answered_or_an_error_names_the_overlong_one(model):
    may_cut = dataclasses.replace(model.prompt, overlong="drop-passages")
    cutting = beatrice.LanguageModel("embedded", prompt=may_cut)
    questions, long = ["where?", "who?", "what?"], PASSAGE * 90
    contexts = [[PASSAGE], [PASSAGE, long], [PASSAGE]]
    assert len(cutting.answer(questions, contexts)) == 3
    contexts[1] = [long]
    with pytest.raises(
        ValueError, match=r"of 1 of 3 questions do not fit .*: questions\[1\]$"
    ):
        cutting.answer(questions, contexts)
    refused = r"questions\[1\], has .* PromptConfig\(overlong='drop-passages'\)"
    with pytest.raises(ValueError, match=refused):
        model.answer(questions, contexts)
    with pytest.raises(ValueError, match=r"^questions\[1\]: passage 2 is empty"):
        model.answer(questions, [PASSAGE, [PASSAGE, " "], PASSAGE])
    with pytest.raises(
        ValueError, match=r"questions\[0\], has .* even without passages"
    ):
        model.answer(["who " * 900])  # there are no passages to drop


def test_answers_to_a_question_are_matched_whatever_their_source_and_order(model):
    questions = [f"where is {n}?" for n in range(4)]
    closed_book = [(question, "there") for question in questions]
    # Two contexts each, in another order; later mixed with the closed-book answers.
    contexts = [(q, "here", [text]) for q in questions[::-1] for text in ("a", PASSAGE)]
    written = model.answer([q for q, *_ in contexts], [c for *_, c in contexts])
    mixed = model.as_answers([*contexts, *closed_book])
    apart = model.as_answers(contexts), model.as_answers(closed_book)
    assert [a.example_id for a in written] == [a.example_id for a in apart[0]]
    for with_context, without in (apart, (mixed[:8], mixed[8:])):
        ids = [[a.example_id for a in answers] for answers in (with_context, without)]
        where = closed_book_rows(*ids)
        assert [questions[i] for i in where] == [q for q, *_ in contexts]
        assert not {*ids[0][::2]} & {*ids[0][1::2]}  # else a store would hold only half


def test_signals_under_two_prompts_are_not_fitted_together(model, tmp_path):
    words = {"closed_book": "Q: {question} A:"}
    other = beatrice.LanguageModel("embedded", prompt=words)
    rows = [(f"where is {n}?", str(n), PASSAGE) for n in range(20)]
    with_context = model.read(model.as_answers(rows))
    labels = dict.fromkeys(SETTINGS, [n % 2 == 0 for n in range(20)])
    splits = dict.fromkeys(SETTINGS, ["train"] * 14 + ["validation"] * 6)
    signals = {"with_context": with_context}
    signals["closed_book"] = other.read(other.as_answers([row[:2] for row in rows]))
    with pytest.raises(ValueError, match="their prompt are .*'Q: {question} A:'"):
        beatrice.fit(signals, labels, splits=splits)
    answers = model.as_answers([row[:2] for row in rows])
    signals["closed_book"] = model.read(answers, store=tmp_path / "store")
    probe = beatrice.fit(signals, labels, splits=splits)  # on disk and in memory
    assert probe.detector.provenance.prompt == model.prompt


def test_read_accepts_only_answers_and_layers_that_the_model_has(model):
    for no_answers in (None, [], "text", ["text"]):
        with pytest.raises(ValueError, match="answers"):
            model.read(no_answers)
    answers = model.answer([QUESTION])
    for layers in ("last", [99], [-1], [], None, 3, [2.5]):
        with pytest.raises(ValueError, match="layers"):
            model.read(answers, layers=layers)
    assert model.read(answers, layers=range(1, 3)).layers == (1, 2)
    with pytest.raises(ValueError, match="config: expected an ExtractConfig"):
        model.read(answers, config="smoke")


def test_a_data_frame_gets_columns_with_the_p_and_reasons_of_each_row():
    probe = beatrice.load("embedded")
    answers = ["Guzolt Falls", "", "Vovem Works"]
    frame = pandas.DataFrame({"question": QUESTION, "answer": answers}, index=[7, 5, 3])
    scored = probe.score_frame(frame)
    assert list(scored.index) == [7, 5, 3] and list(scored.answer) == answers
    scores = probe.score_many(frame)
    for row, score in zip(scored.itertuples(), scores, strict=True):
        p_correct = None if row.p_correct != row.p_correct else row.p_correct
        assert (p_correct, row.decision) == (score.p_correct, score.decision)
        assert row.warnings == "; ".join(score.warnings)
    assert "empty" in scored.error[5] and list(frame.columns) == ["question", "answer"]
    for part in (frame.loc[[5]], frame.iloc[:0]):
        types = probe.score_frame(part).dtypes
        assert [*types[-5:]] == [np.dtype(x) for x in (float, *[object] * 4)]
    with pytest.raises(ValueError, match="already has a column 'p_correct'"):
        probe.score_frame(scored)
    with pytest.raises(ValueError, match="a pandas or Polars data frame"):
        probe.score_frame([frame])


def test_polars_frames_that_were_scored_one_by_one_can_be_concatenated():
    polars = pytest.importorskip("polars")
    frame = polars.DataFrame({"question": QUESTION, "answer": ["Guzolt Falls", ""]})
    probe = beatrice.load("embedded")
    scored = [probe.score_frame(rows) for rows in frame.iter_slices(1)]
    assert polars.concat(scored)["p_correct"].is_null().to_list() == [False, True]
