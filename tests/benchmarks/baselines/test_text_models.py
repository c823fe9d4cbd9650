"""Text alone, further up: each rung finds what was planted, and nothing else."""

import dataclasses

import numpy as np
import pytest
import torch
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.metrics import roc_auc_score
from sklearn.svm import LinearSVC
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

from beatrice.benchmarks.baselines.detector import DetectorInput, catalogue
from beatrice.benchmarks.baselines.detectors.text_models import (
    FineTuneConfig,
    MlpConfig,
    best_epoch,
    encoder_scores,
    mlp_scores,
    svm_scores,
)
from beatrice.extract.generate.requests import PromptConfig
from beatrice.extract.records import Passage
from beatrice.jaxprobe.linear import INVERSE_PENALTIES
from tests.benchmarks.baselines.test_probes import (
    chosen,
    measured,
    rows_of,
    some_labels,
)
from tests.records import an_answer, an_example

WORDS = [f"word{i}" for i in range(30)]


def planted(labels, seed=0):
    """Random words around the name of the answer; ten of twenty names are right."""
    rng = np.random.default_rng(seed)
    texts = []
    for label in labels:
        before, after = (" ".join(rng.choice(WORDS, 4)) for _ in range(2))
        texts.append(f"{before}\nit is name{rng.integers(10) + 10 * label}\n{after}")
    return texts


def either_or(n=1200):
    """Right where exactly one of two words is there, which no sum of words tells."""
    rng = np.random.default_rng(0)
    first, second = rng.random((2, n)) < 0.5
    texts = [
        f"{('ada', 'bob')[a]} {' '.join(rng.choice(WORDS[:3], 2))} {('cy', 'di')[b]}"
        for a, b in zip(first * 1, second * 1, strict=True)
    ]
    return texts, rows_of(first ^ second)


def test_an_mlp_sees_what_a_linear_rung_cannot():
    texts, rows = either_or()
    config = MlpConfig(max_epochs=60, patience=60, learning_rate=0.01, n_seeds=1)
    assert measured(mlp_scores(texts, rows, config), rows) > 0.95
    assert measured(svm_scores(texts, rows), rows) < 0.7


def test_every_seed_of_an_mlp_is_a_fit_of_its_own_and_can_be_repeated():
    labels = some_labels(150)
    texts, rows = planted(labels), rows_of(labels)
    first, second = (mlp_scores(texts, rows) for _ in range(2))
    assert first.scores.shape == (3, 150)
    np.testing.assert_array_equal(first.scores, second.scores)
    assert len({tuple(score) for score in first.scores}) == 3


def test_validation_chooses_the_penalty_of_the_svm():
    labels, penalties = some_labels(300), set()
    texts = planted(labels)
    for noisy in (0.0, 0.4):
        flipped = labels ^ (np.random.default_rng(1).random(300) < noisy)
        rows = rows_of(np.where(np.arange(300) < 100, flipped, labels))
        train, valid = rows.where("train"), rows.where("validation")
        words = TfidfVectorizer(ngram_range=(1, 2)).fit([texts[i] for i in train])
        matrix = words.transform(texts)
        aurocs = {}
        for penalty in INVERSE_PENALTIES:
            svm = LinearSVC(C=penalty).fit(matrix[train], rows.labels[train])
            scores = svm.decision_function(matrix[valid])
            aurocs[penalty] = roc_auc_score(rows.labels[valid], scores)
        result = chosen(svm_scores(texts, rows))["inverse_penalty"]
        assert aurocs[result] == pytest.approx(max(aurocs.values()), abs=1e-3)
        penalties.add(result)
    assert len(penalties) == 2  # clean labels and noisy ones want another penalty


def test_validation_chooses_the_penalty_of_the_mlp():
    labels = some_labels(300)
    texts, rows = planted(labels), rows_of(labels)
    alone = {
        penalty: mlp_scores(texts, rows, MlpConfig(penalties=(penalty,), n_seeds=1))
        for penalty in (100.0, 1e-4)
    }
    valid = rows.where("validation")
    aurocs = {
        penalty: roc_auc_score(labels[valid], output.scores[0, valid])
        for penalty, output in alone.items()
    }
    best = max(aurocs, key=aurocs.get)
    config = MlpConfig(penalties=(100.0, 1e-4), n_seeds=1)
    both = mlp_scores(texts, rows, config)
    assert aurocs[100.0] != aurocs[1e-4] and chosen(both) == {"penalty": best}
    np.testing.assert_array_equal(both.scores, alone[best].scores)


def test_the_best_epoch_is_that_of_the_validation_rows_and_patience_ends_the_search():
    rows = rows_of(np.arange(600) % 2 == 0)
    is_valid = rows.splits == "validation"
    # On validation rows the second is best, on all others the fourth.
    quality, elsewhere = [0.2, 0.9, 0.5, 0.4, 0.95], [0.1, 0.2, 0.3, 0.99, 0.1]
    noise = np.random.default_rng(0).random(600)
    calls = []

    def epochs():
        for number, (here, other) in enumerate(zip(quality, elsewhere, strict=True), 1):
            calls.append(number)
            weight = np.where(is_valid, here, other)
            yield weight * rows.labels + (1 - weight) * noise

    value, scores, number = best_epoch(epochs(), rows, patience=2)
    assert number == 2 and calls == [1, 2, 3, 4]
    valid = rows.where("validation")
    assert value == roc_auc_score(rows.labels[valid], scores[valid])


@pytest.fixture(scope="module")
def tiny_encoder(tmp_path_factory):
    """A random BERT of one layer that knows the words above."""
    path = tmp_path_factory.mktemp("encoders") / "tiny-bert"
    names = ["[PAD]", "[UNK]", "it", "is", *WORDS, *(f"name{i}" for i in range(20))]
    words = Tokenizer(WordLevel({x: i for i, x in enumerate(names)}, "[UNK]"))
    words.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="[PAD]", unk_token="[UNK]"
    ).save_pretrained(path)
    config = BertConfig(
        vocab_size=len(names),
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        BertModel(config).save_pretrained(path)
    return path


QUICK = FineTuneConfig(learning_rate=5e-3, n_epochs=4, n_tokens=16)


def test_an_encoder_is_fine_tuned_to_planted_words(tiny_encoder):
    labels = some_labels(900)
    texts, rows = planted(labels), rows_of(labels)
    state = torch.random.get_rng_state()
    result = encoder_scores(texts, rows, tiny_encoder, QUICK)
    assert result.scores.shape == (1, 900) and measured(result, rows) > 0.95
    assert chosen(result)["epoch"] in (2, 3, 4)
    assert torch.equal(state, torch.random.get_rng_state())
    again = encoder_scores(texts, rows, tiny_encoder, QUICK)
    np.testing.assert_array_equal(result.scores, again.scores)


def test_an_encoder_learns_nothing_from_permuted_labels(tiny_encoder):
    texts, permuted = planted(some_labels(900)), rows_of(some_labels(900, 9))
    result = encoder_scores(texts, permuted, tiny_encoder, QUICK)
    assert abs(measured(result, permuted) - 0.5) < 0.12


def test_padding_beside_a_longer_text_changes_no_score(tiny_encoder):
    labels = some_labels(90)
    texts, rows = planted(labels), rows_of(labels)
    longer = [*texts[:-1], " ".join(WORDS)]
    config = FineTuneConfig(n_epochs=1, n_tokens=40)
    first, second = (
        encoder_scores(x, rows, tiny_encoder, config).scores[0, :-1]
        for x in (texts, longer)
    )
    np.testing.assert_allclose(first, second, atol=1e-5)


def test_an_encoder_that_is_not_safetensors_is_refused(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    rows = rows_of(some_labels(30))
    with pytest.raises(ValueError, match="no \\*.safetensors"):
        encoder_scores(["a"] * 30, rows, tmp_path)


@pytest.mark.parametrize("setting", ["closed_book", "with_context"])
def test_the_rungs_read_question_answer_and_passages_of_a_run(
    setting, tmp_path, tiny_encoder
):
    labels = some_labels(300)
    rows = rows_of(labels, setting)
    parts = [text.split("\n") for text in planted(labels)]
    examples, answers = [], []
    for i, (question, text, other) in enumerate(parts):
        # With context the name stands in the passage, closed-book in the answer.
        if setting == "with_context":
            text, other = other, text
        fields = dict(question=question, passages=(Passage(title="page", text=other),))
        examples.append(an_example(id=f"q{i}", split=rows.splits[i], **fields))
        answers.append(an_answer(example_id=f"q{i}", setting=setting, text=text))
    inputs = DetectorInput.of(
        None,
        rows,
        questions=examples,
        answers=reversed(answers),
        template=PromptConfig().prompt_template(),
        encoder=tiny_encoder,
    )
    assert measured(encoder_scores(inputs.texts, rows, tiny_encoder, QUICK), rows) > 0.8
    for name in ("tfidf_svm", "tfidf_mlp"):
        assert measured(catalogue()[name].score(inputs), rows) > 0.8
    with pytest.raises(ValueError, match="--encoder DIRECTORY"):
        catalogue()["text_encoder"].score(dataclasses.replace(inputs, encoder=None))
    with pytest.raises(ValueError, match="give questions, answers and the template"):
        catalogue()["tfidf_svm"].score(dataclasses.replace(inputs, template=None))
