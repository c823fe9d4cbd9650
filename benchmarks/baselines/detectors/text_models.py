"""Stronger text-only detectors: linear SVM, MLP, and a fine-tuned sentence encoder.

The weaker ones, majority class and logistic regression, are in `../plain.py`. All read
the same text and are chosen on the same validation rows. The paper (appendix "How Far
Surface Text Alone Goes") names the classifiers but none of their settings, so these are
ours.
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from scipy.sparse import csr_matrix
from sklearn.neural_network import MLPClassifier
from sklearn.svm import LinearSVC

from beatrice.benchmarks.baselines.detector import (
    DetectorInput,
    DetectorOutput,
    baseline,
)
from beatrice.benchmarks.baselines.detectors.clustering import load_pretrained
from beatrice.benchmarks.baselines.plain import chosen_row, word_pairs
from beatrice.extract.run.process import two_at_once
from beatrice.jaxprobe.linear import both_classes, fit_linear
from beatrice.jaxprobe.metrics import auroc
from beatrice.jaxprobe.rows import StoreRows


def _tfidf(texts: Sequence[str], rows: StoreRows) -> csr_matrix:
    """Return TF-IDF of all texts `[n_rows, n_words]`, fitted on training texts."""
    vectorizer = word_pairs().fit([texts[i] for i in rows.where("train")])
    return csr_matrix(vectorizer.transform(texts))


def svm_scores(texts: Sequence[str], rows: StoreRows) -> DetectorOutput:
    """Return the margins of a linear SVM on TF-IDF, `[1, n_rows]`."""
    matrix = _tfidf(texts, rows)
    train, valid = rows.where("train"), rows.where("validation")
    labels = rows.labels[train], rows.labels[valid]
    svm = fit_linear(matrix[train], labels[0], matrix[valid], labels[1], _svm)
    chosen = chosen_row(rows, "tfidf_svm", "inverse_penalty", svm.C)
    return DetectorOutput(svm.decision_function(matrix)[None], (chosen,))


def _svm(inverse_penalty: float) -> LinearSVC:
    return LinearSVC(C=inverse_penalty, max_iter=10_000, random_state=0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MlpConfig:
    """How the MLP is fitted; validation chooses penalty and epoch."""

    width: int = 32
    penalties: tuple[float, ...] = (10.0, 1.0, 0.1)
    learning_rate: float = 1e-3
    max_epochs: int = 20
    patience: int = 3  # epochs without improvement before it stops
    n_seeds: int = 3


def mlp_scores(
    texts: Sequence[str], rows: StoreRows, config: MlpConfig | None = None
) -> DetectorOutput:
    """Return P(answer is correct) from an MLP on TF-IDF, `[n_seeds, n_rows]`.

    The first seed's validation AUROC chooses the penalty (ties: the strongest); each
    seed's own chooses its epoch.
    """
    config = config or MlpConfig()
    train = rows.where("train")
    # float32 takes half the time of float64: Adam updates the weights of every word.
    matrix = csr_matrix(_tfidf(texts, rows), dtype=np.float32)
    labels = both_classes(rows.labels[train], len(train), "training")

    def fitted(case: tuple[float, int]) -> tuple[float, np.ndarray, int]:
        penalty, seed = case
        network = MLPClassifier(
            (config.width,),
            alpha=penalty,
            learning_rate_init=config.learning_rate,
            random_state=seed,
        )

        def epochs() -> Iterator[np.ndarray]:
            for _ in range(config.max_epochs):
                network.partial_fit(matrix[train], labels, classes=[False, True])
                yield np.asarray(network.predict_proba(matrix))[:, 1]

        return best_epoch(epochs(), rows, config.patience)

    tried = two_at_once(fitted, [(penalty, 0) for penalty in config.penalties])
    first = dict(zip(config.penalties, tried, strict=True))
    penalty = max(first, key=lambda penalty: first[penalty][0])
    others = two_at_once(fitted, [(penalty, seed) for seed in range(1, config.n_seeds)])
    seeds = [first[penalty], *others]
    chosen = chosen_row(rows, "tfidf_mlp", "penalty", penalty)
    return DetectorOutput(np.stack([scores for _, scores, _ in seeds]), (chosen,))


def best_epoch(
    epochs: Iterator[np.ndarray], rows: StoreRows, patience: int
) -> tuple[float, np.ndarray, int]:
    """Return the validation AUROC, scores and number of the best epoch.

    `epochs` yields the scores `[n_rows]` after each epoch; it is stopped after
    `patience` epochs without a better one.
    """
    valid = rows.where("validation")
    labels = both_classes(rows.labels[valid], len(valid), "validation")
    best, scores_then, when = -1.0, np.zeros(0), 0
    for number, scores in enumerate(epochs, start=1):
        value = auroc(scores[valid], labels).value
        if value > best:
            best, scores_then, when = value, scores, number
        elif number >= when + patience:
            break
    return best, scores_then, when


@dataclasses.dataclass(frozen=True, kw_only=True)
class FineTuneConfig:
    """How a sentence encoder is fine-tuned: the usual recipe for a classifier."""

    n_epochs: int = 3
    batch_size: int = 32
    learning_rate: float = 2e-5
    weight_decay: float = 0.01
    warmup: float = 0.1  # share of the steps, before the rate falls linearly to 0
    n_tokens: int = 256  # most tokens of a text; the end of the passages is cut
    n_seeds: int = 1


def encoder_scores(
    texts: Sequence[str],
    rows: StoreRows,
    path: Path,
    config: FineTuneConfig | None = None,
) -> DetectorOutput:
    """Return log-odds from a fine-tuned sentence encoder, `[n_seeds, n_rows]`.

    Trains all weights and a linear head on the mean token state; validation AUROC
    chooses the epoch. `path` holds a Transformers encoder in safetensors, with its
    tokenizer.
    """
    config = config or FineTuneConfig()
    best = [_fine_tuned(texts, rows, path, config, x) for x in range(config.n_seeds)]
    chosen = tuple(
        chosen_row(rows, "text_encoder", "epoch", number, seed=str(seed))
        for seed, (_, _, number) in enumerate(best)
    )
    return DetectorOutput(np.stack([scores for _, scores, _ in best]), chosen)


def _fine_tuned(
    texts: Sequence[str], rows: StoreRows, path: Path, config: FineTuneConfig, seed: int
) -> tuple[float, np.ndarray, int]:
    """Fine-tune with one seed; return the best epoch, see `best_epoch`."""
    import torch
    from transformers import get_linear_schedule_with_warmup

    train, size = rows.where("train"), config.batch_size
    labels = both_classes(rows.labels[train], len(train), "training")
    gpus = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    device = torch.device("cuda", *gpus) if gpus else torch.device("cpu")
    n_steps = config.n_epochs * math.ceil(len(train) / size)
    targets = torch.tensor(labels, dtype=torch.float32, device=device)

    # By default, Torch would create a context on every GPU of the machine, and warn.
    with torch.random.fork_rng(gpus):
        torch.default_generator.manual_seed(seed)
        torch.cuda.manual_seed(seed)  # does nothing without a GPU
        what = "a text encoder such as E5 or MiniLM"
        tokenizer, encoder, _ = load_pretrained(path, "AutoModel", what)
        head = torch.nn.Linear(encoder.config.hidden_size, 1)
        model = torch.nn.ModuleDict({"encoder": encoder, "head": head}).to(device)
        adamw = torch.optim.AdamW(
            model.parameters(), config.learning_rate, weight_decay=config.weight_decay
        )
        rate = get_linear_schedule_with_warmup(
            adamw, round(config.warmup * n_steps), n_steps
        )

        def logits(rows_read: np.ndarray) -> torch.Tensor:
            tokens = tokenizer(
                [texts[i] for i in rows_read],
                truncation=True,
                max_length=config.n_tokens,
                padding=True,
                return_tensors="pt",
            ).to(device)
            states = model["encoder"](**tokens).last_hidden_state
            mask = tokens["attention_mask"][..., None]
            return model["head"]((states * mask).sum(1) / mask.sum(1))[:, 0]

        def epochs() -> Iterator[np.ndarray]:
            for _ in range(config.n_epochs):
                model.train()
                for batch in torch.randperm(len(train)).split(size):
                    losses = torch.nn.functional.binary_cross_entropy_with_logits(
                        logits(train[batch.numpy()]), targets[batch.to(device)]
                    )
                    adamw.zero_grad()
                    losses.backward()
                    adamw.step()
                    rate.step()
                model.eval()
                with torch.no_grad():
                    every = np.arange(len(texts))
                    parts = [logits(every[i : i + size]) for i in every[::size]]
                yield torch.cat(parts).double().cpu().numpy()

        return best_epoch(epochs(), rows, config.n_epochs)


_PAPER = "Paper, appendix 'How Far Surface Text Alone Goes', without settings"


@baseline("tfidf_svm", title="TF-IDF, linear SVM", source=_PAPER, is_trained=True)
def tfidf_svm(inputs: DetectorInput) -> DetectorOutput:
    """Score with a linear SVM, see `svm_scores`."""
    return svm_scores(inputs.texts, inputs.rows)


@baseline("tfidf_mlp", title="TF-IDF, MLP", source=_PAPER, is_trained=True)
def tfidf_mlp(inputs: DetectorInput) -> DetectorOutput:
    """Score with an MLP, see `mlp_scores`."""
    return mlp_scores(inputs.texts, inputs.rows)


@baseline(
    "text_encoder",
    title="Fine-tuned text encoder",
    source=_PAPER,
    needs={"encoder"},
    is_trained=True,
    variant="the encoder given by path; the paper fine-tunes e5-base",
)
def text_encoder(inputs: DetectorInput) -> DetectorOutput:
    """Score with the fine-tuned `inputs.encoder`, see `encoder_scores`."""
    if inputs.encoder is None:
        raise ValueError(
            "a text encoder is needed; pass encoder= or, to a verb, --encoder DIRECTORY"
        )
    return encoder_scores(inputs.texts, inputs.rows, inputs.encoder)
