"""A backbone with its detector: the backbone answers, the detector scores.

Signals are assembled as NumPy arrays. Encoders and heads run in Torch on the backbone's
device, see `TorchForward`. It is a second implementation of the modules trained in JAX
and scores all answers, since it needs no compilation and takes any length. The encoders
of a pass, `n_members = n_seeds * n_kept` in number, run stacked as batched products.
"""

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.nn.functional import gelu, layer_norm, pad

from beatrice.extract.backbone.loading import Backbone
from beatrice.extract.generate.generator import SamplingConfig
from beatrice.extract.generate.prompts import GenerationConfig, Request, build_prompt
from beatrice.extract.records import Answer, AnswerSpan, Setting
from beatrice.extract.signals.decode import check_decoding, generate_and_read
from beatrice.extract.signals.precision import exact_products
from beatrice.extract.signals.reader import AnswerSignals, SignalReader
from beatrice.extract.signals.sequence import (
    TokenSequence,
    reading_batches,
    sequence_of,
)
from beatrice.extract.store.spec import as_written
from beatrice.jaxprobe.config import MatmulDtype
from beatrice.jaxprobe.detector import (
    Detector,
    EncoderBank,
    HeadName,
    Scores,
    SettingHead,
    leaves,
)
from beatrice.jaxprobe.families import FAMILIES, FLOATS, SPANS, Features, assemble
from beatrice.pgir.warnings import differences

MOST_ROWS = 256  # most answers that are encoded together


@dataclasses.dataclass(frozen=True)
class Reading:
    """The signals of some answers, one row each."""

    signals: list[AnswerSignals]
    spans: np.ndarray  # [n_examples, 3, 2]

    def rows(self, first: int, n: int) -> "Reading":
        """Return the rows of at most `n` answers from `first` on."""
        rows = slice(first, first + n)
        return Reading(self.signals[rows], self.spans[rows])

    def features(self, setting: Setting) -> Features:
        """Return the signals in a setting's spans, each padded to its longest."""
        lengths = [len(s.prob) for s in self.signals]
        firsts = np.array([s.first_token for s in self.signals])
        rows = {
            name: np.concatenate([getattr(s, name) for s in self.signals])
            for name in FAMILIES
        }
        rows["hidden"] = rows["hidden"][:, 0]  # the only layer
        starts = np.cumsum([0, *lengths[:-1]]) - firsts
        return assemble(rows, starts, self.spans, SPANS[setting])


def emissions(signals: AnswerSignals, n_prompt: int, n_answer: int) -> np.ndarray:
    """Return the prob rows `[n, 5]` of the positions that emitted an answer."""
    start = n_prompt - 1 - signals.first_token
    return signals.prob[start : start + n_answer]


class ProbedBackbone:
    """A frozen backbone with its detector: answers questions and scores answers.

    Prompts and answer spans are those of the detector's training. `most_bytes` limits
    the memory for encoding answers together; `strict` refuses a backbone of another
    revision or type than the detector's.
    """

    def __init__(
        self,
        backbone: Backbone,
        detector: Detector,
        config: GenerationConfig = GenerationConfig(),  # noqa: B008 (it is frozen)
        *,
        most_bytes: int = 1 << 30,
        strict: bool = True,
    ) -> None:
        """Check that backbone and detector belong together."""
        trained = detector.provenance
        if trained is None:
            raise ValueError(
                "the detector was trained on arrays, not on a model's answers, so it "
                f"cannot be used with {backbone.name}; give it arrays"
            )
        if strict and (first := next(differences(trained, backbone), None)):
            raise ValueError(
                f"{first}; in Python, strict=False loads it with a warning per score"
            )
        if backbone.attention != trained.attention_layers:
            backbone = dataclasses.replace(backbone, attention=trained.attention_layers)
        self.backbone = backbone
        self.detector = detector
        self.trained = trained
        self.template = trained.prompt.prompt_template()
        self.config = config
        self.answer_span: AnswerSpan = trained.answer_span
        self.most_bytes = most_bytes
        self.lock = backbone.splitter.lock
        self.reader = SignalReader(backbone, (trained.layer,))
        self.forward = TorchForward(detector, backbone.device)

    def requests(
        self, setting: Setting, questions: Sequence[str], contexts: Sequence
    ) -> list[Request]:
        """Return one request per question, identified by its index."""
        build = functools.partial(build_prompt, self.backbone.tokenizer, self.template)
        with self.lock:
            prompts = [build(*x) for x in zip(questions, contexts, strict=True)]
        return [
            Request(str(i), setting, "original", prompt)
            for i, prompt in enumerate(prompts)
        ]

    def answer(
        self, requests: Sequence[Request], sampling: SamplingConfig | None = None
    ) -> list[Answer]:
        """Return the answers, in order; without `sampling` they are greedy."""
        from beatrice.extract.generate.local import generate

        return generate(self.backbone, requests, self.config, sampling)

    @functools.cached_property
    def why_read_again(self) -> str | None:
        """Why answers cannot be read in the passes that write them, or None."""
        with self.lock:
            return check_decoding(self.reader)

    def answer_and_read(
        self, requests: Sequence[Request], sampling: SamplingConfig | None = None
    ) -> tuple[list[Answer], Reading]:
        """Return answers and their signals, from the passes that write them.

        If the model cannot be read while it writes, it reads the answers in a second
        pass. Without `sampling` they are greedy.
        """
        if self.why_read_again is not None:
            answers, signals = self.answer(requests, sampling), None
        else:
            answers, signals = generate_and_read(
                self.reader,
                requests,
                self.config,
                answer_span=self.answer_span,
                sampling=sampling,
                runs_last=False,  # the last token is in no span
            )
        sequences = list(map(self.sequence, requests, answers))
        if signals is None:
            return answers, self.read_sequences(sequences)
        return answers, self.reading(signals, sequences)

    def sequence(self, request: Request, answer: Answer) -> TokenSequence:
        """Return prompt and answer as one sequence, with the spans of training."""
        start = request.prompt.question_start
        return sequence_of(answer, answer_span=self.answer_span, question_start=start)

    def sequences(self, answers: Sequence[Answer]) -> list[TokenSequence]:
        """Return the sequences of answers, see `sequence`."""
        return [sequence_of(a, answer_span=self.answer_span) for a in answers]

    def reading(
        self, signals: Sequence[AnswerSignals], sequences: Sequence[TokenSequence]
    ) -> Reading:
        """Return signals with their spans, rounded as those of the training were."""
        return Reading(
            [self._as_trained(item) for item in signals],
            np.stack([sequence.spans for sequence in sequences]),
        )

    def read(self, answers: Sequence[Answer]) -> Reading:
        """Return the signals of answers, one forward pass per batch."""
        return self.read_sequences(self.sequences(answers))

    def read_sequences(self, sequences: Sequence[TokenSequence]) -> Reading:
        """Return the signals of sequences, one forward pass per batch."""
        signals: dict[int, AnswerSignals] = {}
        for batch, of_batch in self.read_batches(self.reader, sequences):
            signals |= zip(batch, of_batch, strict=True)
        ordered = [signals[i] for i in range(len(sequences))]
        return self.reading(ordered, sequences)

    def read_batches(
        self, reader: SignalReader, sequences: Sequence[TokenSequence]
    ) -> Iterator[tuple[list[int], list[AnswerSignals]]]:
        """Yield batches of sequences: their indices, and the signals read of them."""
        for batch in reading_batches(sequences, self.config.tokens_per_batch):
            with self.lock:
                signals = reader.read([sequences[i] for i in batch])
            yield batch, signals

    def _as_trained(self, signals: AnswerSignals) -> AnswerSignals:
        """Round signals as the store of the training did, perhaps to 8 bits."""
        types = self.trained.stored_as or FLOATS
        rounded = {
            name: as_written(getattr(signals, name), kind)
            for name, kind in zip(FAMILIES, types, strict=False)
        }
        return dataclasses.replace(signals, **rounded)

    def rows_at_once(self, setting: Setting) -> int:
        """Return how many answers may be encoded together, at least one."""
        bank = self.detector.banks.get(setting)
        fits = self.most_bytes // max(1, bank.row_bytes if bank else 0)
        return min(max(1, fits), MOST_ROWS)

    def score(self, branch: HeadName, readings: Mapping[Setting, Reading]) -> Scores:
        """Return the scores of answers from their readings in each setting, `[n]`."""
        n = min(self.rows_at_once(setting) for setting in readings)
        n_all = len(next(iter(readings.values())).signals)
        parts = []
        for first in range(0, n_all, n):
            features: dict[Setting, Features] = {
                setting: reading.rows(first, n).features(setting)
                for setting, reading in readings.items()
            }
            parts.append(self.forward.score(branch, features))
        return Scores.joined(parts)


_LAYER_NORM_EPSILON = 1e-6  # as in Flax
_GROUP_NORM_EPSILON = 1e-5
_SUREST = 1e-6  # probabilities are clipped to [1e-6, 1 - 1e-6] before a logit
Weights = dict[str, torch.Tensor]


class TorchForward:
    """Scores features with a detector's weights on one device."""

    def __init__(self, detector: Detector, device: torch.device | str = "cpu") -> None:
        """Stack the weights, as float32 even if the backbone uses another type."""
        self.detector = detector
        needs_pooled = any(
            np.any(head.params["params"][name])
            for head in detector.heads.values()
            for name in ("out_kernel", "out_bias")
        )
        self._banks = {
            where: _StackedEncoders(bank, device, needs_pooled)
            for where, bank in detector.banks.items()
        }
        self._heads = {
            id(head): _tensors(head.params["params"], device)
            for head in detector.heads.values()
        }

    @exact_products()
    @torch.inference_mode()
    def score(self, branch: HeadName, passes: Mapping[Setting, Features]) -> Scores:
        """Return a head's scores from the signals of the same answers in each pass."""
        return self.detector.score(
            branch, passes, lambda where, x: self._banks[where](x), self._fuse
        )

    def _fuse(
        self, head: SettingHead, logits: list[torch.Tensor], pooled: list[torch.Tensor]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Fuse encoders, see `jaxprobe.fusion.FusionHead`.

        Args:
          head: a head with `n_slots` slots, of which the first `n_selected` are filled.
          logits: for each encoder, `[n_seeds, n_examples]`.
          pooled: for each encoder, `[n_seeds, n_examples, d_pooled]`.
        """
        weights, n = self._heads[id(head)], len(logits)
        p_correct = torch.sigmoid(torch.stack(logits, dim=1))
        inputs = torch.cat([torch.stack(pooled, dim=1), p_correct[..., None]], dim=-1)
        kernel = weights["kernel"].unflatten(1, (head.config.n_slots, -1))[:, :n]
        x = torch.einsum("snbd,sndh->sbh", inputs, kernel)
        first, second = np.triu_indices(head.config.n_slots, 1)
        is_filled = second < n
        gaps = p_correct[:, first[is_filled]] - p_correct[:, second[is_filled]]
        gap_kernel = weights["gaps"][:, np.flatnonzero(is_filled)]
        x = x + torch.einsum("sgb,sgh->sbh", gaps.abs(), gap_kernel)
        x = x + weights["bias"][:, None]
        x = layer_norm(x, x.shape[-1:], eps=_LAYER_NORM_EPSILON)
        x = x * weights["norm/scale"][:, None] + weights["norm/bias"][:, None]
        x = gelu(x, approximate="tanh") @ weights["out_kernel"][..., None]
        mean_logit = torch.logit(p_correct, eps=_SUREST).mean(dim=1)
        fused = torch.sigmoid(x[..., 0] + weights["out_bias"][:, None] + mean_logit)
        return _mean_over_seeds(fused), _mean_over_seeds(p_correct).T


class _StackedEncoders:
    """The encoders of one pass; see `jaxprobe.encoder.Encoder`."""

    def __init__(
        self, bank: EncoderBank, device: torch.device | str, needs_pooled: bool
    ) -> None:
        """Stack the encoders of a bank.

        Args:
          bank: encoders with parameter leaves `[n_seeds, n_kept, …]`.
          device: device for the weights.
          needs_pooled: whether a head reads the pooled vectors. If none does, a network
            that adds nothing to its linear part is not run.
        """
        self.bank, self.device = bank, device
        _, first = next(leaves(bank.params))
        self.shape = tuple(first.shape[:2])
        weights = {
            path: x.flatten(0, 1) for path, x in _tensors(bank.params, device).items()
        }
        self.linear = _weights_below("linear/", weights)
        network = _weights_below("params/", weights)
        self.is_silent = not needs_pooled and not any(
            bool(network[f"mlp_out/{name}"].any()) for name in ("kernel", "bias")
        )
        self.network = {
            path: x.flatten(2).mT if path.endswith("kernel") else x
            for path, x in network.items()
        }
        self.spans = [
            _weights_below(f"span_{s}/", self.network) for s in range(len(bank.spans))
        ]
        subsets = [bank.dims.subset_index(name) for name in bank.names]
        masks = np.tile(bank.dims.subset_masks[subsets], (self.shape[0], 1))
        self.readers = [np.flatnonzero(reads) for reads in masks.T]
        self.is_read = torch.as_tensor(masks, device=device)
        mean, std = bank.standardizer
        self.mean = torch.as_tensor(np.asarray(mean), device=device)
        self.inverse = 1.0 / torch.as_tensor(np.asarray(std), device=device)

    def __call__(self, features: Features) -> tuple[torch.Tensor, torch.Tensor]:
        """Return logits `[n_seeds, n_kept, n_examples]` and pooled `[…, 2 * hidden]`.

        Args:
          features: signals of `n_examples` answers, not yet standardised.
        """
        masks = [torch.as_tensor(m, device=self.device) for m in features.masks]
        spans = [
            self._standardized(torch.as_tensor(x, device=self.device), mask, span)
            for span, (x, mask) in enumerate(zip(features.tokens, masks, strict=True))
        ]
        n_members, n_examples = len(self.is_read), features.n_examples
        logits = torch.zeros(n_members, n_examples, device=self.device)
        pooled = torch.zeros(
            n_members, n_examples, self.bank.config.d_pooled, device=self.device
        )
        if not self.is_silent:
            logits, pooled = self._network(spans, masks)
        if self.linear:
            logits = logits + self._linear(spans, masks)
        return logits.unflatten(0, self.shape), pooled.unflatten(0, self.shape)

    def _standardized(
        self, x: torch.Tensor, mask: torch.Tensor, span: int
    ) -> torch.Tensor:
        """Standardise one span; padding and families not read there become zero."""
        x = torch.where(mask[..., None], (x - self.mean) * self.inverse, 0.0)
        is_answer = span == len(self.bank.spans) - 1
        for family in () if is_answer else self.bank.dims.of_answers:
            x[..., self.bank.dims.slices[family]] = 0.0
        return x

    def _network(
        self, spans: list[torch.Tensor], masks: list[torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return logits `[n_members, n_examples]` and pooled `[…, 2 * hidden]`."""
        weights, config = self.network, self.bank.config
        vectors = []
        for x, mask, of_span in zip(spans, masks, self.spans, strict=True):
            vectors.append(self._span(self._projected(x), mask.float(), of_span))
        pairs = itertools.combinations(vectors, 2)
        x = torch.cat([*vectors, *(a - b for a, b in pairs)], dim=-1)
        x = self._product(x, weights["mlp_in/kernel"]) + weights["mlp_in/bias"][:, None]
        x = layer_norm(x, (config.hidden,), eps=_LAYER_NORM_EPSILON)
        x = x * weights["mlp_norm/scale"][:, None] + weights["mlp_norm/bias"][:, None]
        x = self._product(gelu(x, approximate="tanh"), weights["mlp_out/kernel"])
        return (x + weights["mlp_out/bias"][:, None])[..., 0], vectors[-1]

    def _projected(self, x: torch.Tensor) -> torch.Tensor:
        """Project to `[n_members, n_examples, n_tokens, n_families * d]`."""
        weights, d = self.network, self.bank.config.projection
        biases = weights["projection_bias"] * self.is_read[..., None]
        shape = (len(self.is_read), *x.shape[:2], biases[0].numel())
        projected = torch.zeros(shape, device=x.device)
        for family, at in enumerate(self.bank.dims.slices):
            members = self.readers[family]
            if not len(members):
                continue
            kernels = weights[f"projection_{family}"][members].flatten(0, 1).T
            y = self._product(x[..., at], kernels).unflatten(-1, (len(members), d))
            projected[members, ..., family * d : (family + 1) * d] = y.movedim(2, 0)
        return projected + biases.flatten(1)[:, None, None]

    def _span(
        self, projected: torch.Tensor, real: torch.Tensor, weights: Weights
    ) -> torch.Tensor:
        """Run the residual blocks of a span and pool, `[n_members, n_examples, 2 * d]`.

        Args:
          projected: `[n_members, n_examples, n_tokens, n_families * projection]`.
          real: `[n_examples, n_tokens]`, 1 on real tokens and 0 on padding.
          weights: the weights of this span.
        """
        config, mask = self.bank.config, real[..., None]

        def layer(x: torch.Tensor, name: str) -> torch.Tensor:
            wide = pad(x, (0, 0, 1, 1))
            beside = torch.cat([wide[:, :, :-2], x, wide[:, :, 2:]], dim=-1)
            y = self._product(beside, weights[f"conv_{name}/kernel"])
            y = (y + weights[f"conv_{name}/bias"][:, None, None]) * mask
            scale, bias = weights[f"norm_{name}/scale"], weights[f"norm_{name}/bias"]
            return _group_norm(y, real, config.n_groups, scale, bias)

        x = self._product(projected, weights["entry_kernel"])
        x = (x + weights["entry_bias"][:, None, None]) * mask
        for block in range(config.n_blocks):
            y = gelu(layer(x, f"{block}_0"), approximate="tanh")
            x = gelu(x + layer(y, f"{block}_1"), approximate="tanh")
        count = real.sum(dim=1)[:, None]
        highest = x.masked_fill(mask == 0, -1e30).amax(dim=2)
        highest = torch.where(count > 0, highest, 0.0)
        return torch.cat([highest, x.sum(dim=2) / count.clamp(min=1.0)], dim=-1)

    def _product(self, x: torch.Tensor, kernels: torch.Tensor) -> torch.Tensor:
        """Multiply `[…, n, d_in]` by `[n_members, d_in, d_out]` or `[d_in, d_out]`."""
        dtype: MatmulDtype = self.bank.config.matmul_dtype
        if dtype == "bfloat16":  # rounded operands, sums in float32
            x, kernels = x.bfloat16().float(), kernels.bfloat16().float()
        if kernels.ndim == 2:
            return x @ kernels
        return torch.bmm(x.flatten(1, -2), kernels).unflatten(1, x.shape[1:-1])

    def _linear(
        self, spans: list[torch.Tensor], masks: list[torch.Tensor]
    ) -> torch.Tensor:
        """Return the linear parts' logits, see `jaxprobe.encoder.pooled_signals`."""
        means = [
            x.sum(dim=1) / mask.sum(dim=1).clamp(min=1)[:, None]
            for x, mask in zip(spans, masks, strict=True)
        ]
        answer, mask = spans[-1], masks[-1][..., None]
        is_empty = ~masks[-1].any(dim=1)[:, None]
        low, high = (
            torch.where(is_empty, 0.0, pick(answer.masked_fill(~mask, end), dim=1))
            for end, pick in ((torch.inf, torch.amin), (-torch.inf, torch.amax))
        )
        parts = [means[-1], low, high, *means[:-1]]
        logits = self.linear["bias"][:, None]
        for family, at in enumerate(self.bank.dims.slices):
            pooled = torch.cat([part[:, at] for part in parts], dim=1)
            logits = logits + self.linear[f"kernel_{family}"] @ pooled.T
        return logits


def _group_norm(
    x: torch.Tensor,
    real: torch.Tensor,
    n_groups: int,
    scale: torch.Tensor,
    bias: torch.Tensor,
) -> torch.Tensor:
    """Normalise groups of channels over the real tokens.

    Args:
      x: `[n_members, n_examples, n_tokens, d]`, zero on padding; so is the result.
      real: `[n_examples, n_tokens]`.
      n_groups: divides `d`.
      scale: `[n_members, d]`.
      bias: `[n_members, d]`.
    """
    size = x.shape[-1] // n_groups
    count = real.sum(dim=1).clamp(min=1.0)[:, None] * size
    mean = x.sum(dim=2).unflatten(-1, (n_groups, size)).sum(-1) / count
    square = (x * x).sum(dim=2).unflatten(-1, (n_groups, size)).sum(-1) / count
    variance = (square - mean * mean).clamp(min=0.0)
    inverse = torch.rsqrt(variance + _GROUP_NORM_EPSILON)
    gain = inverse.repeat_interleave(size, -1) * scale[:, None]
    shift = bias[:, None] - mean.repeat_interleave(size, -1) * gain
    return (x * gain[:, :, None] + shift[:, :, None]) * real[..., None]


def _mean_over_seeds(p_correct: torch.Tensor) -> np.ndarray:
    """Average over the first axis in float32, as JAX does; return float64."""
    return p_correct.mean(dim=0).cpu().numpy().astype(np.float64)


def _tensors(tree: Mapping[str, Any], device: torch.device | str) -> Weights:
    return {
        path: torch.as_tensor(np.array(x), device=device) for path, x in leaves(tree)
    }


def _weights_below(prefix: str, weights: Weights) -> Weights:
    """Return the weights whose paths begin with a prefix, by the rest of the path."""
    n = len(prefix)
    return {path[n:]: x for path, x in weights.items() if path.startswith(prefix)}
