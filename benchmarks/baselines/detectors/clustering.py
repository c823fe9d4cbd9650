"""Which drawn answers mean the same, by an NLI model or by words, and their clusters.

Farquhar et al. (Nature, 2024) and their code (jlko/semantic_uncertainty, a8d9aa8,
`get_semantic_ids`): two answers mean the same where an NLI model finds that each
entails the other, the question put before both.
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
    """Return what a detector of drawn answers needs beyond the answer's pass."""
    also: tuple[Requirement, ...] = () if equivalences is by_words else ("entailment",)
    return frozenset(("samples", *also))


def by_entailment(inputs: DetectorInput) -> list[np.ndarray]:
    """Return which samples of each row entail each other, by the NLI model.

    Entailment must be the likeliest of the three relations in both directions
    (`strict_entailment`, the default of the official code). Equal texts are read too,
    as there.
    """
    texts = [
        [f"{example.question} {sample.text}" for sample in samples]
        for example, samples in zip(inputs.examples, inputs.samples, strict=True)
    ]
    rows = [list(itertools.permutations(row, 2)) for row in texts]
    matrices = []
    for row, relations in zip(texts, relations_by_row(inputs, rows), strict=True):
        entails = np.eye(len(row), dtype=bool)
        # The pairs off the diagonal, in the order of the permutations.
        entails[~entails] = relations.argmax(axis=1) == 0
        matrices.append(entails & entails.T)
    return matrices


def relations_by_row(
    inputs: DetectorInput, rows: Sequence[Sequence[tuple[str, str]]]
) -> list[np.ndarray]:
    """Return the relations of the pairs of each row, `[n_pairs, 3]` float64.

    The NLI model of the inputs is called once, with each pair once.
    """
    if inputs.relations is None:
        raise ValueError(
            "expected an NLI model, found none; give the path of one, or take the "
            "detectors that compare words"
        )
    pairs = list(dict.fromkeys(itertools.chain.from_iterable(rows)))
    relations = dict(zip(pairs, inputs.relations(pairs) if pairs else (), strict=True))
    return [np.array([relations[pair] for pair in row]).reshape(-1, 3) for row in rows]


def by_words(inputs: DetectorInput) -> list[np.ndarray]:
    """Return which samples of each row have the same words; see `BY_WORDS`."""
    words = [[words_of(sample.text) for sample in row] for row in inputs.samples]
    return [
        np.array([[a == b for b in row] for a in row], bool).reshape(len(row), len(row))
        for row in words
    ]


def words_of(text: str) -> frozenset[str]:
    """Return the normalised words of a text; without any, as of "The", the text."""
    folded = unicodedata.normalize("NFKC", text).casefold()
    return frozenset((normalise(folded) or folded).split())


def official_clusters(texts: Sequence[str], equivalent: np.ndarray) -> np.ndarray:
    """Return the clusters of `get_semantic_ids`.

    The first text without a cluster opens one, and every later text that means the same
    joins, out of another cluster if need be: a text that matches two first members ends
    with the last.

    Args:
      texts: of the samples, not read.
      equivalent: `[n_samples, n_samples]` bool.

    Returns:
      `[n_samples]` int64 from 0, numbered as they are opened.
    """
    return _opened_in_turn(equivalent, leaves=True)


def paper_clusters(texts: Sequence[str], equivalent: np.ndarray) -> np.ndarray:
    """Return clusters as the paper's pseudo-code builds them.

    A text stays with the first cluster whose first member means the same, and equal
    texts mean the same whatever the NLI model finds. As `official_clusters` otherwise.
    """
    alike = np.array([[a == b for b in texts] for a in texts], bool)
    return _opened_in_turn(equivalent | alike.reshape(equivalent.shape), leaves=False)


def distinct_clusters(texts: Sequence[str], equivalent: np.ndarray) -> np.ndarray:
    """Return clusters as the Bayesian estimator's code builds them.

    Equal texts are one; the distinct texts are clustered as by `official_clusters`, in
    sorted order (there in the order of a Python set, which changes from run to run).
    """
    _, first, of_texts = np.unique(
        np.array(texts, object), return_index=True, return_inverse=True
    )
    return _opened_in_turn(equivalent[np.ix_(first, first)], leaves=True)[of_texts]


def _opened_in_turn(equivalent: np.ndarray, *, leaves: bool) -> np.ndarray:
    """Open clusters in turn; `leaves` whether a text may leave one for a later one."""
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
    """Return the clusters of every row's samples; empty where none was drawn."""
    return [
        clustering([sample.text for sample in row], matrix)
        for row, matrix in zip(inputs.samples, equivalences(inputs), strict=True)
    ]


# An NLI model read from a directory: how likely one text entails another. Any
# classifier of sequences that Transformers knows and that was trained on MNLI, such as
# microsoft/deberta-v2-xlarge-mnli of the semantic-entropy papers.


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Entailment:
    """An NLI model; called with pairs of texts it returns their relations."""

    model: Any  # classifies sequences
    tokenizer: Any  # of the model
    # of its logits, in the order of `RELATIONS`; neutral is absent where the model has
    # two classes
    columns: Mapping[str, int]
    max_tokens: int  # of a pair; the longer text of a longer pair is cut
    n_batch: int = 32  # pairs that are read together
    # what was found for each pair, so that no pair is read twice: several detectors ask
    # for the same ones
    known: dict[tuple[str, str], np.ndarray] = dataclasses.field(default_factory=dict)

    def __call__(self, pairs: Sequence[tuple[str, str]]) -> np.ndarray:
        """Return the relations of pairs of premise and hypothesis.

        Returns:
          `[n_pairs, 3]` float64: P(entailment), P(neutral), P(contradiction); neutral
          is 0 of a model with two classes.
        """
        new = [pair for pair in dict.fromkeys(pairs) if pair not in self.known]
        # The longest first: what does not fit in memory shows at once.
        new.sort(key=lambda pair: -len(pair[0]) - len(pair[1]))
        for start in range(0, len(new), self.n_batch):
            batch = new[start : start + self.n_batch]
            self.known.update(zip(batch, self._read(batch), strict=True))
        return np.array([self.known[pair] for pair in pairs]).reshape(-1, 3)

    def _read(self, pairs: list[tuple[str, str]]) -> np.ndarray:
        import torch  # the catalogue loads none

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
                "a pair read with it; its weights are damaged, or too large for float32"
            )
        relations = np.zeros((len(pairs), len(RELATIONS)))
        places = [RELATIONS.index(name) for name in self.columns]
        relations[:, places] = softmax(logits[:, list(self.columns.values())], axis=1)
        return relations


def columns_of(labels: Mapping[int, str], path: Path) -> dict[str, int]:
    """Return which column of the logits is which relation, by a config's `id2label`."""
    columns = {str(label).lower(): column for column, label in labels.items()}
    wanted = [name for name in RELATIONS if name in columns]
    if len(columns) != len(labels) or set(columns) not in (
        set(RELATIONS),
        set(RELATIONS) - {"neutral"},
    ):
        raise ValueError(
            f"{path} has the labels {', '.join(map(str, labels.values()))}, expected "
            f"{', '.join(RELATIONS)} in any order, or without neutral; take a model "
            "trained on MNLI, or name its labels in id2label of its config.json"
        )
    return {name: columns[name] for name in wanted}


def load_pretrained(path: Path, kind: str, what: str) -> tuple[Any, Any, list[str]]:
    """Load a Transformers model of an auto class in float32, on the processor.

    Returns:
      The tokenizer, the model, and the names of tensors that the directory lacks.
    """
    import torch
    import transformers

    if not (path / "config.json").is_file() or not any(path.glob("*.safetensors")):
        raise ValueError(
            f"{path} is no directory with config.json and *.safetensors, expected "
            f"{what} written by save_pretrained"
        )
    origin = {"local_files_only": True, "trust_remote_code": False}
    try:
        about = json.loads((path / "config.json").read_bytes())
        check_weights(str(path), path, about)
        tokenizer = transformers.AutoTokenizer.from_pretrained(path, **origin)
        model, report = getattr(transformers, kind).from_pretrained(
            path,
            dtype=torch.float32,
            use_safetensors=True,
            output_loading_info=True,
            **origin,
        )
    # All of them: a config's values reach every part of Transformers, which checks few.
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
            f"{missing[0]!r}; take a model that was trained to classify"
        )
    # RoBERTa counts positions from two; a tokenizer without a limit has a huge one.
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
