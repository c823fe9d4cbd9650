"""Clusters of sampled answers with the same meaning, by an NLI model or by words.

Farquhar et al. (Nature, 2024) and their code (jlko/semantic_uncertainty, a8d9aa8,
`get_semantic_ids`): two answers mean the same if, according to an NLI model, each
entails the other when the question precedes both.
"""

import dataclasses
import itertools
import json
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy.special import softmax

from beatrice.benchmarks.baselines.detector import DetectorInput, Requirement
from beatrice.extract.backbone.names import check_weights
from beatrice.extract.records import normalise

RELATIONS = ("entailment", "neutral", "contradiction")
# Which samples of each row mean the same: `[n_samples, n_samples]` bool, symmetric.
Equivalences = Callable[[DetectorInput], list[np.ndarray]]
# Clusters of one row, from its texts and their equivalences: `[n_samples]` ids from 0.
Clustering = Callable[[Sequence[str], np.ndarray], np.ndarray]

BY_WORDS = (
    "no NLI model: two answers mean the same where all words of each are in the other, "
    "without case, punctuation and articles"
)


def requirements(equivalences: Equivalences) -> frozenset[Requirement]:
    """Return the requirements of a detector that compares sampled answers."""
    also: tuple[Requirement, ...] = () if equivalences is by_words else ("entailment",)
    return frozenset(("samples", *also))


def by_entailment(inputs: DetectorInput) -> list[np.ndarray]:
    """Return which samples of each row entail each other, by the NLI model.

    Entailment must be the likeliest of the three relations in both directions
    (`strict_entailment`, the default of the official code). As there, equal texts are
    also compared by the model.
    """
    texts = [
        [f"{example.question} {sample.text}" for sample in samples]
        for example, samples in zip(inputs.examples, inputs.samples, strict=True)
    ]
    rows = [list(itertools.permutations(row, 2)) for row in texts]
    matrices = []
    for row, relations in zip(texts, relations_by_row(inputs, rows), strict=True):
        entails = np.eye(len(row), dtype=bool)
        # Off-diagonal pairs, in the order of the permutations.
        entails[~entails] = relations.argmax(axis=1) == 0
        matrices.append(entails & entails.T)
    return matrices


def relations_by_row(
    inputs: DetectorInput, rows: Sequence[Sequence[tuple[str, str]]]
) -> list[np.ndarray]:
    """Return the relations of each row's pairs, `[n_pairs, 3]` float64.

    The inputs' NLI model is called once, with all distinct pairs.
    """
    if inputs.relations is None:
        raise ValueError(
            "expected an NLI model, found none; pass `relations`, such as "
            "`load_entailment(path)`, or use the detectors that compare words"
        )
    pairs = list(dict.fromkeys(itertools.chain.from_iterable(rows)))
    relations = dict(zip(pairs, inputs.relations(pairs) if pairs else (), strict=True))
    return [np.array([relations[pair] for pair in row]).reshape(-1, 3) for row in rows]


def by_words(inputs: DetectorInput) -> list[np.ndarray]:
    """Return which samples of each row have the same words, see `BY_WORDS`."""
    words = [[words_of(sample.text) for sample in row] for row in inputs.samples]
    return [
        np.array([[a == b for b in row] for a in row], bool).reshape(len(row), len(row))
        for row in words
    ]


def words_of(text: str) -> frozenset[str]:
    """Return a text's normalised words, or the text if none are left (as for "The")."""
    folded = unicodedata.normalize("NFKC", text).casefold()
    return frozenset((normalise(folded) or folded).split())


def official_clusters(texts: Sequence[str], equivalent: np.ndarray) -> np.ndarray:
    """Return the clusters of `get_semantic_ids`.

    The first text without a cluster opens one, and every later text that means the same
    joins it, leaving another cluster if need be; a text that matches several first
    members ends with the last of them. Ids count clusters as they are opened.
    """
    return _opened_in_turn(equivalent, leaves=True)


def paper_clusters(texts: Sequence[str], equivalent: np.ndarray) -> np.ndarray:
    """Return clusters as the paper's pseudo-code builds them.

    Like `official_clusters`, but a text stays in the first cluster whose first member
    means the same, and equal texts mean the same whatever the NLI model says.
    """
    alike = np.array([[a == b for b in texts] for a in texts], bool)
    return _opened_in_turn(equivalent | alike.reshape(equivalent.shape), leaves=False)


def distinct_clusters(texts: Sequence[str], equivalent: np.ndarray) -> np.ndarray:
    """Return clusters as the Bayesian estimator's code builds them.

    Equal texts are one; distinct ones are clustered as in `official_clusters`, sorted
    (the official code has the order of a Python set, which changes from run to run).
    """
    _, first, of_texts = np.unique(
        np.array(texts, object), return_index=True, return_inverse=True
    )
    return _opened_in_turn(equivalent[np.ix_(first, first)], leaves=True)[of_texts]


def _opened_in_turn(equivalent: np.ndarray, *, leaves: bool) -> np.ndarray:
    """Open clusters in turn; if `leaves`, a text may move to a later cluster."""
    ids = np.full(len(equivalent), -1, np.int64)
    for i in range(len(ids)):
        if ids[i] < 0:
            later = np.arange(len(ids)) > i
            joins = equivalent[i] & later & (leaves | (ids < 0))
            ids[i] = ids[joins] = ids.max() + 1
    return ids


def clusters_of(
    inputs: DetectorInput, equivalences: Equivalences, clustering: Clustering
) -> list[np.ndarray]:
    """Return the clusters of every row's samples; empty for rows without samples."""
    return [
        clustering([sample.text for sample in row], matrix)
        for row, matrix in zip(inputs.samples, equivalences(inputs), strict=True)
    ]


# NLI models from a directory: any sequence classifier that Transformers supports and
# that was trained on MNLI, such as the semantic-entropy papers'
# microsoft/deberta-v2-xlarge-mnli.


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Entailment:
    """An NLI model; call it with pairs of texts to get their relations."""

    model: Any  # a sequence classifier
    tokenizer: Any  # of the model
    # Relation -> column of the logits, in the order of `RELATIONS`; without "neutral"
    # if the model has two classes.
    columns: Mapping[str, int]
    max_tokens: int  # per pair; in longer pairs, the longer text is cut
    n_batch: int = 32  # pairs per batch
    # Pair -> its relations, so that several detectors can use a pair that is read once.
    known: dict[tuple[str, str], np.ndarray] = dataclasses.field(default_factory=dict)

    def __call__(self, pairs: Sequence[tuple[str, str]]) -> np.ndarray:
        """Return the relations of pairs of premise and hypothesis, `[n_pairs, 3]`.

        P(entailment), P(neutral) (0 for a model with two classes), P(contradiction).
        """
        new = [pair for pair in dict.fromkeys(pairs) if pair not in self.known]
        # The longest first, so that running out of memory happens at once.
        new.sort(key=lambda pair: -len(pair[0]) - len(pair[1]))
        for start in range(0, len(new), self.n_batch):
            batch = new[start : start + self.n_batch]
            self.known.update(zip(batch, self._read(batch), strict=True))
        return np.array([self.known[pair] for pair in pairs]).reshape(-1, 3)

    def _read(self, pairs: list[tuple[str, str]]) -> np.ndarray:
        import torch  # not loaded with the catalogue

        first, second = map(list, zip(*pairs, strict=True))
        read = self.tokenizer(
            first,
            second,
            padding=True,
            truncation=True,
            max_length=self.max_tokens,
            return_tensors="pt",
        ).to(self.model.device)
        with torch.inference_mode():
            logits = self.model(**read).logits.cpu().to(torch.float64).numpy()
        if not np.isfinite(logits).all():
            raise ValueError(
                f"the NLI model gives logits that are not finite for {pairs[0]!r} or "
                "a pair read with it; its weights are damaged or too large for float32"
            )
        relations = np.zeros((len(pairs), len(RELATIONS)))
        places = [RELATIONS.index(name) for name in self.columns]
        relations[:, places] = softmax(logits[:, list(self.columns.values())], axis=1)
        return relations


def columns_of(labels: Mapping[int, str], path: Path) -> dict[str, int]:
    """Return each relation's column in the logits, from a config's `id2label`."""
    columns = {str(label).lower(): column for column, label in labels.items()}
    wanted = [name for name in RELATIONS if name in columns]
    if len(columns) != len(labels) or set(columns) not in (
        set(RELATIONS),
        set(RELATIONS) - {"neutral"},
    ):
        raise ValueError(
            f"{path} has the labels {', '.join(map(str, labels.values()))}, expected "
            f"{', '.join(RELATIONS)} in any order, or without neutral; use a model "
            "trained on MNLI, or name its labels in id2label of its config.json"
        )
    return {name: columns[name] for name in wanted}


def load_pretrained(path: Path, kind: str, what: str) -> tuple[Any, Any, list[str]]:
    """Load a Transformers model of the auto class `kind` in float32, on the CPU.

    Returns:
      The tokenizer, the model, and the names of tensors missing in the directory.
    """
    import torch
    import transformers

    from beatrice.extract.signals.precision import loading_weights

    if not (path / "config.json").is_file() or not any(path.glob("*.safetensors")):
        raise ValueError(
            f"{path} is not a directory with config.json and *.safetensors, expected "
            f"{what} written by save_pretrained"
        )
    origin = {"local_files_only": True, "trust_remote_code": False}
    try:
        about = json.loads((path / "config.json").read_bytes())
        check_weights(str(path), path, about)
        tokenizer = transformers.AutoTokenizer.from_pretrained(path, **origin)
        with loading_weights(torch.float32):
            model, report = getattr(transformers, kind).from_pretrained(
                path,
                dtype=torch.float32,
                use_safetensors=True,
                output_loading_info=True,
                **origin,
            )
    # Any exception: a config's values reach all of Transformers, which checks few.
    except Exception as error:
        first_line = str(error).strip().partition("\n")[0]
        raise ValueError(f"{path} could not be loaded: {first_line}") from error
    return tokenizer, model, sorted(report["missing_keys"])


def load_entailment(path: Path) -> Entailment:
    """Load an NLI model in float32, on the GPU if Torch has one."""
    import torch

    kind = "AutoModelForSequenceClassification"
    tokenizer, model, missing = load_pretrained(path, kind, "an NLI model")
    columns = columns_of(model.config.id2label, path)
    if missing:
        raise ValueError(
            f"{path} lacks {len(missing)} tensors of {type(model).__name__}, first "
            f"{missing[0]!r}; use a model that was trained to classify"
        )
    # RoBERTa numbers positions from two; tokenizers without a limit report a huge one.
    n_positions = getattr(model.config, "max_position_embeddings", 512) - 2
    is_limited = tokenizer.model_max_length < 1 << 20
    gpus = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    device = torch.device("cuda", *gpus) if gpus else torch.device("cpu")
    return Entailment(
        model=model.eval().to(device),
        tokenizer=tokenizer,
        columns=columns,
        max_tokens=tokenizer.model_max_length if is_limited else n_positions,
    )
