"""An NLI model read from a directory: how likely one text entails another.

Any classifier of sequences that Transformers knows and that was trained on MNLI, such
as microsoft/deberta-v2-xlarge-mnli of the semantic-entropy papers.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.special import softmax
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from beatrice.extract.run.console import Update

RELATIONS = ("entailment", "neutral", "contradiction")


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
    # told how many pairs are read, of how many
    progress: Update = lambda done, total: None
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
            self.progress(start + len(batch), len(new))
        return np.array([self.known[pair] for pair in pairs]).reshape(-1, 3)

    def _read(self, pairs: list[tuple[str, str]]) -> np.ndarray:
        first, second = map(list, zip(*pairs, strict=True))
        read = self.tokenizer(
            first,
            second,
            padding=True,
            truncation=True,
            max_length=self.max_tokens,
            return_tensors="pt",
        )
        with torch.inference_mode():
            logits = self.model(**read).logits.to(torch.float64).numpy()
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
    """Return which column of the logits is which relation.

    Args:
      labels: `id2label` of the model's config, in any case.
      path: of the model, for the message.
    """
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


def load_entailment(
    path: Path, *, n_batch: int = 32, progress: Update = lambda done, total: None
) -> Entailment:
    """Load an NLI model in float32, on the processor."""
    if not (path / "config.json").is_file() or not any(path.glob("*.safetensors")):
        raise ValueError(
            f"{path} is no directory with config.json and *.safetensors, expected an "
            "NLI model written by save_pretrained"
        )
    origin = {"local_files_only": True, "trust_remote_code": False}
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, **origin)
        model, report = AutoModelForSequenceClassification.from_pretrained(
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
    columns = columns_of(model.config.id2label, path)
    if missing := sorted(report["missing_keys"]):
        raise ValueError(
            f"{path} lacks {len(missing)} tensors of {type(model).__name__}, first "
            f"{missing[0]!r}; take a model that was trained to classify"
        )
    # RoBERTa counts positions from two; a tokenizer without a limit has a huge one.
    n_positions = getattr(model.config, "max_position_embeddings", 512) - 2
    is_limited = tokenizer.model_max_length < 1 << 20
    return Entailment(
        model=model.eval(),
        tokenizer=tokenizer,
        columns=columns,
        max_tokens=tokenizer.model_max_length if is_limited else n_positions,
        n_batch=n_batch,
        progress=progress,
    )
