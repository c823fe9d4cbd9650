"""Every warning of a P that is less reliable, and every reason for having none.

`docs/warnings.md` explains what each means, where it comes from and what to do; a test
checks that it quotes every text here.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from beatrice.extract.backbone.names import IN_MEMORY, ModelHashes
from beatrice.extract.generate.prompts import special_pattern
from beatrice.extract.generate.templates import PromptConfig
from beatrice.extract.records import Setting
from beatrice.extract.store.spec import ReadingPath
from beatrice.jaxprobe.detector import Detector, Provenance
from beatrice.jaxprobe.families import SPAN_NAMES, SPANS, Features
from beatrice.jaxprobe.scope import count_scripts, share_outside
from beatrice.pgir.given import ScoringInput

if TYPE_CHECKING:
    from beatrice.extract.backbone.loading import Backbone
    from beatrice.pgir.bridge import ProbedBackbone

MOST_UNKNOWN = 0.5  # share of a text's tokens that the model may not know
MOST_FOREIGN = 0.1  # share of letters in a script that training did not have
_LESS = "P may be less reliable"
# Warnings leave P as it is.
WARNINGS = {
    "other_model": "another model: the probe was fitted on the model {trained}, "
    f"revision {{revision}}, but {{model}} has revision {{here}}; {_LESS}: load the "
    "probe's model, or fit a probe for this one",
    "other_hash": "another {what}: the probe was fitted with the {what} of SHA-256 "
    f"{{trained}}, but {{model}} has {{here}}; {_LESS}: load the model with "
    "the probe's {what}, or fit a probe for this one",
    "other_dtype": "another precision: the probe was fitted on signals in {trained}, "
    f"but {{model}} computes in {{here}}; {_LESS}: load the model in {{trained}}",
    "other_prompt": "another prompt than the probe's own (template {template!r}, "
    f"{{chat}} chat template): P was fitted with that one; {_LESS}: ask with the "
    "probe's prompt, or fit a probe with yours",
    "other_span": "another answer span: the probe was fitted on {trained} tokens, but "
    f"these signals were read on {{here}} ones; {_LESS}: read them with ExtractConfig("
    "answer_span={trained!r})",
    "unknown_tokens": "unknown words: {n} of {of} tokens of {what} are unknown to the "
    f"model; {_LESS}: write them in words that the model knows",
    "special_token": "special token: {what} spells {token}, which {model} reads here "
    f"as plain text; {_LESS}: take it out, as decoding with skip_special_tokens=True "
    "does",
    "changed_passages": "changed passages: of {n}, {n_empty} left out as empty and "
    "{n_split} changed by splitting control tokens of the model with a blank; "
    f"{_LESS}: retrieve passages of plain text",
    "long": "long input: the {what} has {n} tokens, but at most {most} in training; "
    f"{_LESS}: give a shorter one",
    "cut": "cut answer: it has {n} tokens and no end, but P was fitted on answers that "
    f"end; {_LESS}: let the model write more tokens",
    "other_script": "another script: {n} of {of} letters are {scripts}, but training "
    f"had {{known}}; {_LESS}: fit a probe on questions in this script",
    "other_path": "another reading: the signals come from {actual}, those of training "
    f"from {{trained}}, and {{dtype}} rounds the two differently; {_LESS}: compute in "
    "float32, or fit on answers that were read the same way",
    "unusual_signals": "unusual input: {share} of the {family} signals lie outside the "
    f"training range (at most {{limit}} in validation); {_LESS}: look at the answer "
    "yourself, or fit on questions like this one",
}
# Reasons why there is no P, or no decision.
REASONS = {
    "too_long": "prompt and answer have {n} tokens, but {model} has a window of "
    "{most}; give fewer or shorter passages, or shorter texts if there are none",
    "mostly_unknown": "{n} of {of} tokens of {what} are unknown to {model}, so its "
    "signals mean nothing; use a model that reads this script or vocabulary",
    "not_finite": "the model's signals of this answer are not finite numbers; load the "
    "model in another dtype",
}


def why_unreadable(model: "Backbone", prepared: ScoringInput) -> str | None:
    """Return why an answer cannot be scored, or None."""
    n_tokens, most = len(prepared.sequence.ids), model.max_length
    if most is not None and n_tokens > most:
        return REASONS["too_long"].format(n=n_tokens, model=model.name, most=most)
    for what, _, ids in prepared.parts:
        n_unknown = ids.count(model.tokenizer.unk_token_id)  # 0 where it is None
        if n_unknown > MOST_UNKNOWN * len(ids):
            return REASONS["mostly_unknown"].format(
                n=n_unknown, of=len(ids), what=what, model=model.name
            )
    return None


def _warning(name: str, **fields: object) -> str:
    if fields.get("model") == IN_MEMORY:
        fields["model"] = "the model in memory"
    return WARNINGS[name].format(**fields)


def _name_dtype(model: "Backbone") -> str:
    return str(model.dtype).removeprefix("torch.")


def warn_of_path(
    trained: Provenance, setting: Setting, dtype: str, path: ReadingPath
) -> Iterator[str]:
    """Yield the warning for signals that were read by another path than in training.

    None in float32, where the two paths differ only by the order of sums. `dtype` is
    the type in which the model computed them, as Torch spells it.
    """
    dtype = dtype.removeprefix("torch.")
    passes = {
        "decode": "the passes that write an answer",
        "teacher_forced": "a pass that reads it again",
    }
    usual = trained.paths.get(setting, "teacher_forced")
    if usual != path and dtype != "float32":
        paths = {"actual": passes[path], "trained": passes[usual]}
        yield _warning("other_path", **paths, dtype=dtype)


def is_of_model(trained: Provenance, revision: str, model: "Backbone | None") -> bool:
    """Return whether a revision is that of a detector's model.

    It may be known by its commit, its files, or its weights in memory. `model` is the
    model of that revision, or None if it is not loaded.
    """
    known = {trained.revision, trained.files_sha256, trained.weights_sha256} - {""}
    if revision in known:
        return True
    if model is None or model.revision != revision:
        return False
    if trained.model == IN_MEMORY:
        return model.weights_sha256 in known
    return model.files_sha256 in known


def differences(trained: Provenance, model: "Backbone") -> Iterator[str]:
    """Yield a warning for each difference between a model and the detector's model."""
    if (dtype := _name_dtype(model)) != trained.dtype:
        names = {"trained": trained.dtype, "model": model.name, "here": dtype}
        yield _warning("other_dtype", **names)
    if not is_of_model(trained, model.revision, model):
        yield _other_model(trained, model.name, model.revision)
    for field in dataclasses.fields(ModelHashes):
        if field.name == "chat_template" and not trained.prompt.chat:
            continue  # it is not used
        expected, here = (
            getattr(hashes, field.name) for hashes in (trained.hashes, model.hashes)
        )
        if expected and expected != here:
            yield _warning(
                "other_hash",
                what=field.name.replace("_", " "),
                trained=expected[:12],
                model=model.name,
                here=here[:12] or "none",
            )


def _other_model(trained: Provenance, name: str, revision: str) -> str:
    names = {"trained": trained.model, "revision": trained.revision[:12]}
    return _warning("other_model", **names, model=name, here=revision[:12])


def signal_differences(
    trained: Provenance, about: Mapping[str, Any], model: "Backbone | None"
) -> Iterator[str]:
    """Yield a warning for each difference between signals and those of training.

    `about` is the fingerprint of their store; `model` is the model from which they were
    read, or None if it is not loaded.
    """
    name, revision = str(about.get("name", "their model")), str(about["model"])
    if not is_of_model(trained, revision, model):
        yield _other_model(trained, name, revision)
    dtype = str(about.get("dtype", trained.dtype)).removeprefix("torch.")
    if dtype != trained.dtype:
        yield _warning("other_dtype", trained=trained.dtype, model=name, here=dtype)
    span = about.get("answer_span", trained.answer_span)
    if span != trained.answer_span:
        yield _warning("other_span", trained=trained.answer_span, here=span)


def warn_of_prompt(trained: Provenance, about: Mapping[str, Any]) -> Iterator[str]:
    """Yield the warning for signals under another prompt than that of training."""
    prompt = msgspec.convert(about.get("prompt", trained.prompt), PromptConfig)
    if prompt.prompt_template() != trained.prompt.prompt_template():
        yield _other_prompt(trained)


def _other_prompt(trained: Provenance) -> str:
    chat = "with" if trained.prompt.chat else "without"
    template = trained.prompt.template_name
    return _warning("other_prompt", template=template, chat=chat)


def warn_before(probed: "ProbedBackbone", prepared: ScoringInput) -> Iterator[str]:
    """Yield the warnings for an answer that need no forward pass."""
    trained, model, prompt = probed.trained, probed.backbone, prepared.prompt
    tokenizer = model.tokenizer
    yield from differences(trained, model)
    if not prompt.is_templates:
        yield _other_prompt(trained)
    for what, _, ids in prepared.parts:
        if n_unknown := ids.count(tokenizer.unk_token_id):
            yield _warning("unknown_tokens", n=n_unknown, of=len(ids), what=what)
    specials = special_pattern(tokenizer, len(tokenizer))
    # A prompt given as it was sent has its special tokens read as such: skip it.
    for what, text, _ in prepared.parts[0 if prompt.is_templates else -1 :]:
        for token in dict.fromkeys(specials.findall(text)):
            names = {"what": what, "token": repr(token), "model": model.name}
            yield _warning("special_token", **names)
    longest = probed.detector.banks[prompt.setting].lengths
    lengths = np.diff(prepared.sequence.spans)[:, 0]
    for span, most in zip(SPANS[prompt.setting], longest, strict=True):
        if lengths[span] > most:
            yield _warning("long", what=SPAN_NAMES[span], n=lengths[span], most=most)
    if prepared.answer.stop_id is None:
        yield _warning("cut", n=len(prepared.pieces))
    known = trained.scripts
    counts = count_scripts(" ".join(part.text for part in prepared.parts))
    foreign = {script: n for script, n in counts.items() if script not in known}
    n_foreign = sum(foreign.values())
    if known and n_foreign > MOST_FOREIGN * counts.total():
        scripts = {"scripts": ", ".join(sorted(foreign)), "known": ", ".join(known)}
        yield _warning("other_script", n=n_foreign, of=counts.total(), **scripts)


def warn_after(
    detector: Detector, features: Features, setting: Setting
) -> list[list[str]]:
    """Return for each answer the warnings for signals unlike those of training."""
    bank = detector.banks[setting]
    shares = share_outside(features, bank.dims, bank.scope.low, bank.scope.high)
    shares = shares.astype(bank.scope.limits.dtype)  # else equal ones may be larger
    limits = list(zip(bank.dims.names, bank.scope.limits, strict=True))
    return [
        [
            _warning(
                "unusual_signals",
                share=f"{share:.1%}",
                family=family,
                limit=f"{limit:.1%}",
            )
            for share, (family, limit) in zip(row, limits, strict=True)
            if share > limit
        ]
        for row in shares
    ]
