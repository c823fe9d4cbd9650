import json

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    AutoModel,
    AutoModelForSequenceClassification,
    BertConfig,
    DebertaV2Config,
    PreTrainedTokenizerFast,
)

from beatrice.benchmarks.baselines.detector import catalogue
from beatrice.benchmarks.baselines.detectors.clustering import (
    columns_of,
    load_entailment,
)
from tests.benchmarks.baselines.planted import drawn_inputs, scores

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *"abcdefghij", "Q0", "?"]
SIZES = dict(
    vocab_size=len(WORDS),
    hidden_size=16,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=32,
    max_position_embeddings=24,
)
CONFIGS = {
    "bert": BertConfig(**SIZES),
    "deberta": DebertaV2Config(
        **SIZES, relative_attention=True, pos_att_type=["p2c", "c2p"]
    ),
}
MNLI = ("CONTRADICTION", "NEUTRAL", "ENTAILMENT")
PAIRS = [("a b c", "d"), ("d", "a b c"), ("a", "a"), ("b c d e f g h", "i j")]


def save_tokenizer(folder):
    """Words and marks, and pairs as BERT has them."""
    tokenizer = Tokenizer(
        models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    names = ("pad", "unk", "cls", "sep")
    special = {f"{name}_token": f"[{name.upper()}]" for name in names}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(
        folder
    )


def save_model(folder, kind="bert", labels=MNLI, seed=0, with_head=True):
    """Save a random model; its weights are large, so that relations differ."""
    config = CONFIGS[kind].__class__(**CONFIGS[kind].to_dict())
    config.id2label = dict(enumerate(labels))
    config.label2id = {label: i for i, label in enumerate(labels)}
    build = AutoModelForSequenceClassification if with_head else AutoModel
    torch.manual_seed(seed)
    model = build.from_config(config)
    with torch.no_grad():
        for weights in model.parameters():
            if weights.ndim > 1:
                weights.normal_(std=0.5)
    model.save_pretrained(folder)
    save_tokenizer(folder)
    return folder


@pytest.fixture(scope="module", params=list(CONFIGS))
def saved(request, tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("nli"), request.param)


def alone(folder, pair, order=(2, 1, 0)):
    """The same by Transformers' own way, one pair at a time, without padding."""
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    with torch.inference_mode():
        logits = model(**tokenizer(*pair, return_tensors="pt")).logits[0]
    return logits.softmax(-1).numpy()[list(order)]


def test_relations_are_those_of_each_pair_read_alone(saved):
    result = load_entailment(saved)(PAIRS)
    expected = [alone(saved, pair) for pair in PAIRS]
    assert result.shape == (4, 3) and result.dtype == np.float64
    np.testing.assert_allclose(result, expected, atol=1e-5)  # of float32, padded
    np.testing.assert_allclose(result.sum(axis=1), 1)
    assert np.ptp(result, axis=0).max() > 0.01  # it does tell pairs apart


def test_batches_and_the_order_of_pairs_change_nothing(saved):
    together = load_entailment(saved)(PAIRS)
    apart = load_entailment(saved, n_batch=1)(PAIRS[::-1])[::-1]
    np.testing.assert_allclose(together, apart, atol=1e-5)  # of float32, padded


def test_the_order_of_labels_is_that_of_the_config(tmp_path):
    first = save_model(tmp_path / "one")
    other = save_model(
        tmp_path / "other", labels=("entailment", "contradiction", "neutral")
    )
    result, permuted = (load_entailment(path)(PAIRS) for path in (first, other))
    np.testing.assert_allclose(result[:, [2, 0, 1]], permuted, atol=1e-12)


def test_a_model_of_two_classes_never_finds_neutral(tmp_path):
    path = save_model(tmp_path, labels=("entailment", "contradiction"))
    result = load_entailment(path)(PAIRS)
    assert (result[:, 1] == 0).all()
    expected = [alone(path, pair, order=(0, 1)) for pair in PAIRS]
    np.testing.assert_allclose(result[:, [0, 2]], expected, atol=1e-5)


def test_no_pair_is_read_twice(saved):
    read = []
    model = load_entailment(saved, n_batch=2, progress=lambda *at: read.append(at))
    first = model([*PAIRS, PAIRS[0]])
    assert read == [(2, 4), (4, 4)]
    np.testing.assert_array_equal(first, model([*PAIRS, PAIRS[0]]))
    assert len(read) == 2 and len(model.known) == 4


def test_no_pairs_have_no_relations(saved):
    assert load_entailment(saved)([]).shape == (0, 3)


def test_a_pair_longer_than_the_model_is_cut(saved):
    result = load_entailment(saved)([("a " * 100, "b"), ("a " * 200, "b")])
    np.testing.assert_array_equal(result[0], result[1])


@pytest.mark.parametrize(
    "labels",
    [
        ("LABEL_0", "LABEL_1", "LABEL_2"),
        ("LABEL_0", "LABEL_1"),
        ("entailment", "not_entailment"),
        ("entailment", "neutral"),
        ("entailment", "neutral", "contradiction", "other"),
        ("entailment", "Entailment", "neutral", "contradiction"),
    ],
)
def test_other_labels_are_refused_in_one_sentence(tmp_path, labels):
    with pytest.raises(ValueError, match="expected entailment, neutral, contr") as info:
        columns_of(dict(enumerate(labels)), tmp_path)
    assert "\n" not in str(info.value) and labels[0] in str(info.value)


def test_labels_are_read_in_any_case_and_order(tmp_path):
    columns = columns_of({0: "Neutral", 1: "ENTAILMENT", 2: "contradiction"}, tmp_path)
    assert columns == {"entailment": 1, "neutral": 0, "contradiction": 2}


def test_remote_code_is_not_run(tmp_path):
    path = save_model(tmp_path)
    name = "AutoModelForSequenceClassification"
    rewrite(path, auto_map={name: "modeling.Net", "AutoConfig": "modeling.Config"})
    (path / "modeling.py").write_text("raise SystemExit('run')\n")
    assert type(load_entailment(path).model).__name__ == "BertForSequenceClassification"


def rewrite(path, **changes):
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | changes))


WEIGHTS = "model.safetensors"
BROKEN = {
    "no configuration": (lambda x: (x / "config.json").unlink(), "is no directory"),
    "no weights": (lambda x: (x / WEIGHTS).unlink(), "is no directory"),
    "pickled weights": (
        lambda x: (x / WEIGHTS).rename(x / "pytorch_model.bin"),
        "safetensors",
    ),
    "other sizes": (lambda x: rewrite(x, hidden_size=32), "could not be loaded"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_directory_without_an_nli_model_is_refused_in_one_sentence(tmp_path, kind):
    damage, message = BROKEN[kind]
    damage(save_model(tmp_path))
    with pytest.raises(ValueError, match=message) as error:
        load_entailment(tmp_path)
    assert "\n" not in str(error.value) and str(tmp_path) in str(error.value)


def test_a_model_that_was_not_trained_to_classify_is_refused(tmp_path):
    path = save_model(tmp_path, with_head=False)
    with pytest.raises(ValueError, match="lacks 2 tensors of BertForSequenceClassif"):
        load_entailment(path)


def test_logits_that_are_not_finite_are_refused(tmp_path):
    model = load_entailment(save_model(tmp_path))
    with torch.no_grad():
        model.model.classifier.weight.fill_(torch.nan)
    with pytest.raises(ValueError, match="logits that are not finite"):
        model(PAIRS)


def test_semantic_entropy_reads_a_model_from_a_directory(saved, tmp_path):
    model = load_entailment(saved)
    drawn = drawn_inputs([["a", "b c", "a"], ["d"]], relations=model)
    result = scores(catalogue()["semantic_entropy"], drawn)
    assert -np.log(3) - 1e-9 <= result[0] <= 0 == result[1]
    # Both orders of (a, b c), and a with itself, asked once.
    assert len(model.known) == 3
