"""Whether a detector may speak: what it warns of, and where it abstains.

A warning leaves the number; a reason takes it away. Limits come from training: lengths,
scripts, and the ranges of the signals, see `jaxprobe.scope`.
"""

import numpy as np

from extract.generate.requests import PromptModel
from extract.records import Setting
from jaxprobe.detector import Detector
from jaxprobe.features.families import Features
from jaxprobe.features.reading import SPAN_NAMES, SPANS
from jaxprobe.features.subsets import FAMILIES
from jaxprobe.scope import count_scripts, share_outside
from pgir.scoring.given import Prepared

MOST_UNKNOWN = 0.5  # share of a text's tokens that the model may not know
_MOST_FOREIGN = 0.1  # share of letters in a script that training did not have


def why_not(model: PromptModel, prepared: Prepared) -> str | None:
    """Say why an answer cannot be read to any use, or return None."""
    n_tokens = len(prepared.sequence.ids)
    if model.max_length is not None and n_tokens > model.max_length:
        return (
            f"prompt and answer have {n_tokens} tokens, but {model.name} has a "
            f"window of {model.max_length}; give fewer or shorter passages"
        )
    for what, ids in prepared.parts:
        n_unknown = ids.count(model.tokenizer.unk_token_id)  # 0 where it is None
        if n_unknown > MOST_UNKNOWN * len(ids):
            return (
                f"{what} has {n_unknown} of {len(ids)} tokens that {model.name} "
                "does not know, so its signals mean nothing; use a backbone that reads "
                "this script or vocabulary"
            )
    return None


def warn_before(
    detector: Detector, model: PromptModel, prepared: Prepared
) -> list[str]:
    """Say what can be told without the model."""
    facts, asked = detector.facts, prepared.asked
    found = []
    if not asked.is_own:
        chat = "with" if facts.get("chat") == "yes" else "without"
        found.append(
            "the prompt is not the detector's own (template "
            f"{facts.get('template', 'unknown')!r}, {chat} chat template): P was "
            "calibrated under that one, and how far it holds here is not known"
        )
    unknown = model.tokenizer.unk_token_id
    for what, ids in prepared.parts:
        if n_unknown := ids.count(unknown):
            found.append(
                f"{what} has {n_unknown} of {len(ids)} tokens unknown to the model"
            )
    bank = detector.banks.get(asked.setting)
    lengths = np.diff(prepared.sequence.spans)[:, 0]
    longest = bank.lengths if bank else ()  # empty where unknown
    for span, most in zip(SPANS[asked.setting], longest, strict=False):
        if lengths[span] > most:
            found.append(
                f"the {SPAN_NAMES[span]} has {lengths[span]} tokens, more than any "
                f"that the detector was made with ({most})"
            )
    return found + _warn_of_script(facts.get("scripts", ""), prepared.text)


def _warn_of_script(known: str, text: str) -> list[str]:
    """Warn of letters in scripts that the training texts did not have."""
    counts = count_scripts(text)
    foreign = {s: n for s, n in counts.items() if s not in known.split()}
    if not known or sum(foreign.values()) <= _MOST_FOREIGN * counts.total():
        return []
    return [
        f"{sum(foreign.values())} of {counts.total()} letters are in a script that the "
        f"detector's training did not have ({', '.join(sorted(foreign))}; it had "
        f"{', '.join(known.split())})"
    ]


def warn_after(
    detector: Detector, features: Features, n: int, setting: Setting
) -> list[list[str]]:
    """Say, of each of the first `n` answers, which signals are unlike training's."""
    bank = detector.banks.get(setting)
    if bank is None or bank.scope is None:
        return [[] for _ in range(n)]
    shares = share_outside(features, bank.dims, bank.scope.low, bank.scope.high)
    return [
        [
            f"{share:.1%} of the {family} signals lie outside the range of 99.8 % of "
            f"training's; of 999 in 1,000 validation answers at most {limit:.1%} do"
            for family, share, limit in zip(
                FAMILIES, row, bank.scope.limits, strict=True
            )
            if share > limit
        ]
        for row in shares[:n]
    ]
