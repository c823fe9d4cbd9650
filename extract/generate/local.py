"""The backend on this machine: Transformers, in batches of similar length.

The common beginning of a batch's prompts, and equal prompts, are computed once. If a
layer keeps states other than keys and values (recurrent ones, an indexer's), these
cannot be copied to other rows, and every row is computed from its beginning.
"""

import contextlib
import copy
import dataclasses
import itertools
import math
import os.path
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from typing import Any, Protocol

import msgspec
import torch
from transformers import (
    DynamicCache,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers import GenerationConfig as Defaults
from transformers.cache_utils import DummyLayer, DynamicLayer, DynamicSlidingWindowLayer

from beatrice.extract.backbone.layout import Layout, evaluating
from beatrice.extract.backbone.loading import Backbone
from beatrice.extract.generate.generator import (
    Generated,
    GeneratorPrompt,
    SamplingConfig,
    cut_at_stop,
    decode_ids,
    draw_seed,
    find_stop,
    tokenizer_identity,
)
from beatrice.extract.generate.prompts import (
    GenerationConfig,
    Request,
    encode_any,
    render_message,
    stop_ids_of,
)
from beatrice.extract.records import Answer
from beatrice.extract.signals.attention import CACHE, run_decoder
from beatrice.extract.signals.precision import exact_products
from beatrice.extract.signals.sequence import batches_of

# Transformers' defaults, restated: a checkpoint, or the owner of a model in memory, may
# have set others, which choose tokens differently or run passes that a watch misses.
_UNCHANGED: dict[str, Any] = {
    name: value
    for name, value in Defaults().to_dict().items()
    if name not in ("transformers_version", "_from_model_config")
} | {
    "do_sample": False,  # `TokenChooser` samples instead
    "num_beams": 1,
    "num_return_sequences": 1,
    "use_cache": True,  # fine-tuned checkpoints may have switched it off
    "return_dict_in_generate": True,
}
# Divides any logits without an overflow, and always samples the likeliest.
_LEAST_TEMPERATURE = 1e-30
FEWEST_SHARED = 16  # for fewer tokens, a separate forward costs about what it saves


def n_shared(prompts: Sequence[Sequence[int]]) -> int:
    """Return how many ids all prompts begin with, leaving each at least its last."""
    texts: Any = list(prompts)  # `commonprefix` also takes sequences of ids
    n_equal = len(os.path.commonprefix(texts))
    return min(n_equal, min(map(len, prompts)) - 1)


class _StepwiseCache(DynamicCache):
    """A cache that cannot be cropped, so that no step can be taken back.

    If it could, Transformers would (at present on MPS) run a step more before it knows
    that a run has ended, and criteria and hooks would take that step for a token.
    """

    @property
    def is_croppable(self) -> bool:
        """Return whether steps can be taken back."""
        return False

    @property
    def is_compileable(self) -> bool:
        """Return whether generation may compile the model (Mamba's, on a GPU)."""
        return False


def _new_cache(layout: Layout) -> DynamicCache:
    return _StepwiseCache(config=layout.decoder.config.get_text_config(decoder=True))


def empty_cache(layout: Layout) -> DynamicCache | None:
    """Return a cache, or None if a layer keeps states other than keys and values."""
    cache = _new_cache(layout)
    # A dummy stands for a layer that keeps nothing and reads another layer's keys.
    kinds = {type(layer) for layer in cache.layers} - {DummyLayer}
    is_plain = bool(kinds) and kinds <= {DynamicLayer, DynamicSlidingWindowLayer}
    return cache if is_plain else None


def filled_layers(cache: DynamicCache) -> list[Any]:
    """Return the layers of a cache that hold keys and values."""
    layers: list[Any] = cache.layers
    return [layer for layer in layers if layer.keys is not None]


def is_complete_cache(cache: DynamicCache, n_tokens: int) -> bool:
    """Return whether a cache holds `n_tokens` tokens, none lost to a sliding window."""
    filled = filled_layers(cache)
    return bool(filled) and all(x.keys.shape[-2] == n_tokens for x in filled)


def prefix_cache(layout: Layout, ids: torch.Tensor) -> DynamicCache | None:
    """Return the keys and values of ids `[1, n_tokens]`, a beginning of several texts.

    None as for `empty_cache`, or if a sliding window is shorter than the beginning.
    """
    if (cache := empty_cache(layout)) is None:
        return None
    run_decoder(layout, ids, cache=cache)
    return cache if is_complete_cache(cache, ids.shape[1]) else None


def cache_for_rows(cache: DynamicCache, n_rows: int) -> DynamicCache:
    """Return a copy of a beginning's cache for the rows of a batch to append to."""
    cache = copy.copy(cache)
    cache.layers = [copy.copy(layer) for layer in cache.layers]
    for layer in filled_layers(cache):
        layer.keys = layer.keys.expand(n_rows, -1, -1, -1)
        layer.values = layer.values.expand(n_rows, -1, -1, -1)
    return cache


def shared_states(
    layout: Layout,
    prompts: Sequence[Sequence[int]],
    width: int,
    n_most: int | None = None,
) -> DynamicCache | None:
    """Return the keys and values of the prompts' common beginning, computed once.

    Each row is laid out as if it were computed by itself with its padding on the left;
    a row shorter than `width` lacks the last tokens of the beginning, computed with the
    rest of the row. At most `n_most` tokens of the beginning are used. Returns None if
    the prompts have too little in common to be worth it, or if `prefix_cache` does.
    Then every row is computed from its beginning.
    """
    n = n_shared(prompts)
    n = n if n_most is None else min(n, n_most)
    if len(prompts) < 2 or n < FEWEST_SHARED:
        return None
    ids = torch.tensor([list(prompts[0][:n])], device=layout.head.weight.device)
    if (cache := prefix_cache(layout, ids)) is None:
        return None
    n_padding = torch.tensor([[width - len(prompt)] for prompt in prompts])
    columns = (torch.arange(n) - n_padding).clamp_min(0).to(ids.device)
    for layer in filled_layers(cache):
        layer.keys = layer.keys[0][:, columns].transpose(0, 1).contiguous()
        layer.values = layer.values[0][:, columns].transpose(0, 1).contiguous()
    return cache


def starting_states(
    layout: Layout,
    prompts: Sequence[Sequence[int]],
    ids: torch.Tensor,
    mask: torch.Tensor,
    generate: Callable[..., Any],
) -> DynamicCache | None:
    """Return the cache that generation continues from, each row after its padding.

    If some prompts are equal (draws for one question) it covers all but the last token
    of each, computed once by the model's `generate`, which knows its architecture's
    positions and masks; otherwise it is that of `shared_states`. `ids` are
    `[n_prompts, width]`, padded on the left, where `mask` is 0.
    """
    width, row_of = ids.shape[1], {tuple(p): row for row, p in enumerate(prompts)}
    begun = empty_cache(layout)
    if len(row_of) == len(prompts) or min(map(len, row_of)) < 2 or begun is None:
        return shared_states(layout, prompts, width)
    shared = shared_states(layout, [prompt[:-1] for prompt in row_of], width - 1)
    output = generate(
        ids[list(row_of.values()), :-1],
        mask[list(row_of.values()), :-1],
        max_new_tokens=1,
        **{CACHE: begun if shared is None else shared},
    )
    index_of = {prompt: index for index, prompt in enumerate(row_of)}
    rows = torch.tensor([index_of[tuple(prompt)] for prompt in prompts])
    output[CACHE].batch_select_indices(rows.to(ids.device))
    return output[CACHE]


def _likeliest(scores: torch.Tensor, n_most: int | None) -> torch.Tensor:
    """Return the indices of each row's `n_most` largest scores, with ties of the last.

    Only these can be drawn, and sorting a whole vocabulary for its top p takes 20 times
    as long as everything else in a row.
    """
    n_words = scores.shape[-1]
    if n_most is None or n_most >= n_words:
        return torch.arange(n_words, device=scores.device).expand(len(scores), -1)
    top = scores.topk(min(2 * n_most, n_words), dim=-1)
    last = top.values[:, n_most - 1, None]
    if (top.values[:, -1:] == last).any():
        top = scores.topk(int((scores >= last).sum(-1).max()), dim=-1)
    return top.indices


class TokenChooser(LogitsProcessor):
    """Chooses each token, greedily or by sampling, and keeps its log-probability.

    With Gumbel noise added, the largest logit is a sample from the softmax. Each row
    has its own generator, so that a sample does not depend on the batch. Once a row has
    ended in a stop id it is padded with a stop id and not sampled any more.

    Only log-probabilities are kept: the logits of `output_logits` would take tens of
    gigabytes for a batch of rewrites and a vocabulary of 150 000.
    """

    def __init__(
        self,
        config: SamplingConfig,
        seeds: Sequence[int],
        device: torch.device,
        stops: Sequence[int],
    ) -> None:
        """Begin with all rows, one seed for each; a greedy config ignores the seeds."""
        self._stops = torch.tensor(list(stops), device=device)
        self._largest: list[torch.Tensor] = []
        self._generators: list[torch.Generator] = []
        self._warpers, self._n_most = LogitsProcessorList(), config.top_k
        if config.is_greedy:
            return
        self._generators = [torch.Generator(device).manual_seed(s) for s in seeds]
        temperature = max(float(config.temperature), _LEAST_TEMPERATURE)
        self._warpers.append(TemperatureLogitsWarper(temperature))
        if config.top_k is not None:
            self._warpers.append(TopKLogitsWarper(config.top_k))
        if config.top_p < 1:
            self._warpers.append(TopPLogitsWarper(config.top_p))

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        """Return `[n_rows, n_vocabulary]` scores; each row's largest is its token."""
        if not self._generators:
            log_probs = scores.to(torch.float32).log_softmax(-1)
            # Not `argmax`: finding the index takes ten times as long on a CPU.
            self._largest.append(log_probs.amax(-1, keepdim=True))
            return scores
        is_live = torch.ones_like(input_ids[:, -1], dtype=torch.bool)
        if self._largest:  # in the first step, the prompt's last token is there
            is_live = ~torch.isin(input_ids[:, -1], self._stops)
        live = is_live.nonzero()[:, 0]
        logits = scores[live]
        words = _likeliest(logits, self._n_most)
        warped = self._warpers(input_ids, logits.gather(-1, words))
        n_words, device = scores.shape[1], logits.device
        generators = [self._generators[row] for row in live.tolist()]
        rows = [torch.rand(n_words, generator=g, device=device) for g in generators]
        tiny = torch.finfo(torch.float32).tiny
        noise = torch.stack(rows).gather(-1, words).clamp_min(tiny)
        best = (warped - torch.log(-torch.log(noise))).argmax(-1, keepdim=True)
        chosen = words.gather(-1, best)
        totals = logits.float().logsumexp(-1, keepdim=True)
        log_probs = torch.zeros((len(scores), 1), device=device)
        log_probs.index_copy_(0, live, logits.gather(-1, chosen) - totals)
        self._largest.append(log_probs)
        drawn = torch.full_like(scores, -torch.inf)
        drawn[live, chosen[:, 0]] = 0.0
        return drawn

    def taken(self) -> list[list[float]]:
        """Pop the model's own log-probabilities `[n_rows, n_new_tokens]`, in nats."""
        log_probs = torch.cat(self._largest, dim=1).tolist()
        self._largest.clear()
        return log_probs

    def keep(self, rows: Sequence[int]) -> None:
        """Continue with only these rows."""
        if self._generators:
            self._generators = [self._generators[row] for row in rows]


class ForwardWatcher(Protocol):
    """Sees every forward of a batch that is generated, see `extract.signals.decode`."""

    n_unread: int  # columns of the padded prompts that it need not see
    runs_last: bool  # whether the last token of a cut-off answer is forwarded too

    def watching(
        self, rows: Sequence[int], n_cached: int
    ) -> contextlib.AbstractContextManager[None]:
        """Watch one run of some rows, whose first `n_cached` columns are cached."""
        ...

    def on_choice(self, ids: torch.Tensor, is_done: torch.Tensor) -> None:
        """Take the ids of all columns after a step, and which rows are done."""


@dataclasses.dataclass(eq=False)
class RowsDone(StoppingCriteria):
    """Ends a run once enough of its rows are done, so that the others go on alone.

    A row is done at a stop token, at the length limit, or when its text contains a stop
    string. Texts are decoded, since hundreds of tokens may hold one (a line feed, say).
    """

    tokenizer: Any  # decodes the texts
    edges: tuple[int, int]  # columns of the padded prompts, without and with new tokens
    stop: Sequence[str]  # stop strings
    stop_ids: tuple[int, ...]
    # Is told which tokens were chosen, and which rows are done.
    watch: ForwardWatcher | None
    least_done: float  # share of done rows that ends a run; 0 is one token per run
    # `[n_rows]` bool, whether each is done; set from the first call on.
    rows: torch.Tensor = dataclasses.field(init=False, repr=False)

    def __call__(self, input_ids: Any, scores: Any, **_: Any) -> Any:
        """Return `[n_rows]` bool, all true if the run is to end."""
        start, stop = self.edges
        stops = torch.tensor(self.stop_ids, device=input_ids.device)
        is_done = torch.isin(input_ids[:, -1], stops) | (input_ids.shape[1] >= stop)
        if self.stop:
            rows = input_ids[:, start:].tolist()
            texts = (decode_ids(self.tokenizer, row) for row in rows)
            ended = [find_stop(text, self.stop) is not None for text in texts]
            is_done |= torch.tensor(ended, device=input_ids.device)
        self.rows = is_done
        if self.watch is not None:
            self.watch.on_choice(input_ids, is_done)
        return is_done | (int(is_done.sum()) >= self.least_done * len(is_done))


def stop_ids(backbone: Backbone) -> tuple[int, ...]:
    """Return the tokens that end a text, see `stop_ids_of`."""
    defaults, config = backbone.model.generation_config, backbone.model.config
    config = config.get_text_config()
    return stop_ids_of(defaults, config, backbone.tokenizer, backbone.name)


def _n_common(
    prompts: Sequence[GeneratorPrompt], ids: Sequence[Sequence[int]]
) -> int | None:
    """Return the most padded columns that may be computed once; None sets no limit."""
    width, pairs = max(map(len, ids)), zip(prompts, ids, strict=True)
    columns = (width - len(i) + p.n_common for p, i in pairs if p.n_common is not None)
    return min(columns, default=None)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TransformersGenerator:
    """Generates with a backbone that is loaded in this process."""

    backbone: Backbone  # has a tokenizer
    tokens_per_batch: int = 16_384  # prompt and new tokens, padding included

    @property
    def identity(self) -> dict[str, Any]:
        """Return what affects a text."""
        return {
            "backend": "transformers",
            "revision": self.backbone.revision,
            **tokenizer_identity(self.backbone.tokenizer),
            "enable_thinking": False,
            "stop_ids": list(stop_ids(self.backbone)),
            "dtype": str(self.backbone.dtype).removeprefix("torch."),
        }

    @property
    def max_length(self) -> int | None:
        """Return the backbone's window in tokens."""
        return self.backbone.max_length

    def count_tokens(self, prompt: GeneratorPrompt) -> int:
        """Return how many tokens a prompt has."""
        return len(self.prompt_ids(prompt))

    def prompt_ids(self, prompt: GeneratorPrompt) -> tuple[int, ...]:
        """Return the ids that the model reads.

        A model without a chat template reads a chat message as plain text.
        """
        if prompt.ids is not None:
            return prompt.ids
        tokenizer = self.backbone.tokenizer
        if not prompt.is_chat or tokenizer.chat_template is None:
            return encode_any(tokenizer, prompt.text, add_special_tokens=True).ids
        rendered = render_message(tokenizer, prompt.text)
        # The template writes its own special tokens.
        return encode_any(tokenizer, rendered.text, add_special_tokens=False).ids

    def stream(
        self,
        prompts: Sequence[GeneratorPrompt],
        config: SamplingConfig,
        done: Collection[int] = (),
    ) -> Iterator[tuple[int, Generated]]:
        """Yield (index of the prompt, text); see `batches`."""
        return itertools.chain.from_iterable(self.batches(prompts, config, done))

    def plan(
        self, prompts: Sequence[GeneratorPrompt], config: SamplingConfig
    ) -> list[list[int]]:
        """Return the batches of prompts, as indices; see `batches_of`."""
        n_new = config.max_new_tokens
        return batches_of(
            [self.count_tokens(prompt) for prompt in prompts],
            self.tokens_per_batch,
            n_beside=n_new,
            n_passes=n_new,
        )

    def batches(
        self,
        prompts: Sequence[GeneratorPrompt],
        config: SamplingConfig,
        done: Collection[int] = (),
    ) -> Iterator[list[tuple[int, Generated]]]:
        """Yield the (index, text) pairs of each batch that is not wholly done.

        A batch that does not fit in the device's memory comes in parts.
        """
        ids = [self.prompt_ids(prompt) for prompt in prompts]
        lengths, n_new = [len(tokens) for tokens in ids], config.max_new_tokens
        window = self.max_length
        if window is not None and any(n + n_new > window for n in lengths):
            raise ValueError(
                f"the longest prompt has {max(lengths)} tokens and its reply may have "
                f"{n_new}, but {self.backbone.name} has a window of {window}; nothing "
                "is cut, so use a model with a longer window"
            )
        for batch in self.plan(prompts, config):
            if all(i in done for i in batch):
                continue
            parts = self.backbone.splitter.run(
                lambda rows: self.write([prompts[i] for i in rows], config),
                batch,
                lambda i: lengths[i] + n_new,
            )
            for rows, texts in parts:
                yield list(zip(rows, texts, strict=True))

    def write(
        self,
        prompts: Sequence[GeneratorPrompt],
        config: SamplingConfig,
        watch: ForwardWatcher | None = None,
    ) -> list[Generated]:
        """Return the texts of one batch; `watch` sees every forward."""
        seeds = [draw_seed(prompt, config) for prompt in prompts]
        ids = [self.prompt_ids(prompt) for prompt in prompts]
        n_common = _n_common(prompts, ids) if watch is None else watch.n_unread
        # Rows can leave a cache of keys and values; otherwise a run ends with its last.
        least_done = 1.0 if empty_cache(self.backbone.layout) is None else 0.5
        *_, texts = self._runs(ids, config, seeds, watch, n_common, least_done)
        return [
            self._text(len(tokens), *text, config)
            for tokens, text in zip(ids, texts, strict=True)
        ]

    def write_stepwise(
        self, prompt: GeneratorPrompt, config: SamplingConfig, watch: ForwardWatcher
    ) -> Generator[int, None, Generated]:
        """Yield the ids of one text as they are chosen, and return the text.

        Between two ids nothing watches the model, so that others may use it.
        """
        seeds = [draw_seed(prompt, config)]
        ids, texts = self.prompt_ids(prompt), []
        for texts in self._runs([ids], config, seeds, watch, None, least_done=0.0):
            tokens, log_probs = texts[0]
            self._check_finite(log_probs)
            if len(tokens) <= config.max_new_tokens:
                yield tokens[-1]
        return self._text(len(ids), *texts[0], config)

    @torch.inference_mode()
    def _runs(
        self,
        prompts: Sequence[Sequence[int]],
        config: SamplingConfig,
        seeds: Sequence[int],
        watch: ForwardWatcher | None,
        n_common: int | None,
        least_done: float,
    ) -> Iterator[list[tuple[list[int], list[float]]]]:
        """Yield each prompt's new ids and their log-probabilities, after every run.

        At most `n_common` columns of the padded prompts are computed once for all. A
        run ends once a share `least_done` of its rows is done, and the others go on
        without them, so that a long answer does not keep short ones in the batch. A
        watch may see one step more, which forwards the last token of a cut-off answer.
        """
        stops, (ids, mask) = stop_ids(self.backbone), self._padded(prompts)
        choice, width = TokenChooser(config, seeds, ids.device, stops), ids.shape[1]
        texts: list[tuple[list[int], list[float]]] = [([], []) for _ in prompts]
        options: dict[str, Any] = {}
        if watch is not None and self.backbone.model._supports_logits_to_keep():
            # Given a number, Gemma 4 would leave the prompt out of its last layers.
            options["logits_to_keep"] = torch.tensor([-1], device=ids.device)
        rows, n_new = list(range(len(prompts))), config.max_new_tokens
        edges = (width, width + n_new + (watch is not None and watch.runs_last))
        layout, tokenizer = self.backbone.layout, self.backbone.tokenizer
        if n_common is None:
            cache = starting_states(layout, prompts, ids, mask, self._run)
        else:
            cache = shared_states(layout, prompts, width, n_common)
        n_cached = 0 if cache is None else filled_layers(cache)[0].keys.shape[-2]
        if cache is None and self.backbone.model._supports_default_dynamic_cache():
            cache = _new_cache(layout)
        while rows:
            n_read = ids.shape[1]
            done = RowsDone(tokenizer, edges, config.stop, stops, watch, least_done)
            watching = contextlib.nullcontext()
            if watch is not None:
                watching = watch.watching(rows, n_cached)
            with watching:
                output = self._run(
                    ids,
                    mask,
                    max_new_tokens=edges[1] - n_read,
                    logits_processor=LogitsProcessorList([choice]),
                    stopping_criteria=StoppingCriteriaList([done]),
                    **{CACHE: cache},
                    **options,
                )
            new = output.sequences[:, n_read:]
            log_probs = choice.taken()
            for row, chosen, values in zip(rows, new, log_probs, strict=True):
                texts[row][0].extend(chosen.tolist())
                texts[row][1].extend(values)
            yield texts
            left = (~done.rows).nonzero()[:, 0]
            cache, ids = output.get(CACHE), output.sequences[left]
            if 0 < len(left) < len(rows):
                cache.batch_select_indices(left)
                choice.keep(left.tolist())
            mask = torch.cat([mask[left], torch.ones_like(new[left])], dim=1)
            rows = [rows[index] for index in left.tolist()]
            n_cached = ids.shape[1] - 1

    def _run(self, ids: torch.Tensor, mask: torch.Tensor, **options: Any) -> Any:
        """Return what Transformers generates after `ids`, until the run ends."""
        stops, model = stop_ids(self.backbone), self.backbone.model
        ends = {"eos_token_id": list(stops), "pad_token_id": stops[0]}
        # Only a prompt's last states are multiplied by the output matrix, in a view
        # with gaps. In bfloat16 on a CPU, Torch would copy the matrix for each of its
        # rows: 58 GB for 172 rows and 262,144 words.
        hook = model.get_output_embeddings().register_forward_pre_hook(
            lambda _, args: (args[0].contiguous(),)
        )
        with hook, evaluating(model), exact_products():
            return model.generate(
                input_ids=ids, attention_mask=mask, **_UNCHANGED | ends | options
            )

    def _padded(
        self, prompts: Sequence[Sequence[int]]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ids and mask, padded on the left: generation appends on the right."""
        width, device = max(map(len, prompts)), self.backbone.device
        ids = [[0] * (width - len(p)) + list(p) for p in prompts]
        mask = [[0] * (width - len(p)) + [1] * len(p) for p in prompts]
        return torch.tensor(ids, device=device), torch.tensor(mask, device=device)

    def _text(
        self,
        n_prompt: int,
        tokens: list[int],
        log_probs: list[float],
        config: SamplingConfig,
    ) -> Generated:
        """Return the text up to its stop, without the padding after it."""
        stops, tokens = stop_ids(self.backbone), tokens[: config.max_new_tokens]
        end = next((i for i, token in enumerate(tokens) if token in stops), None)
        ids = tokens[:end]
        n_new = len(ids) + (end is not None)
        self._check_finite(log_probs[:n_new])
        text = Generated(
            text=self.backbone.tokenizer.decode(ids, skip_special_tokens=True).strip(),
            token_ids=tuple(ids),
            stop_id=None if end is None else tokens[end],
            log_probs=tuple(log_probs[:n_new]),
            finish="length" if end is None else "stop",
            n_prompt_tokens=n_prompt,
            n_new_tokens=n_new,
        )
        cut = cut_at_stop(text, config.stop, self.backbone.tokenizer)
        if cut is text:
            return text
        # What follows the stop token is padding, or was written while other rows ran.
        n_new = len(cut.token_ids or ()) + 1
        return msgspec.structs.replace(cut, n_new_tokens=n_new)

    def _check_finite(self, log_probs: Sequence[float]) -> None:
        if any(map(math.isnan, log_probs)):
            dtype = self.identity["dtype"]
            wider = ", or load them as float32" * (dtype != "float32")
            raise ValueError(
                f"{self.backbone.name} gives logits that are not finite, in "
                f"{dtype}: its weights are damaged, or too large for this type; check "
                f"them{wider}"
            )


def why_overlong(
    backbone: Backbone, requests: Sequence[Request], n_new: int
) -> dict[int, str]:
    """Return why prompts with `n_new` more tokens exceed the model's window.

    The reasons are keyed by the request's index, and continue a question's name.
    """
    window, reasons = backbone.max_length, dict[int, str]()
    for i, request in enumerate(requests):
        n_prompt = len(request.prompt.ids)
        if window is None or n_prompt + n_new <= window:
            continue
        remedy = "give fewer or shorter passages"
        if request.setting == "closed_book":
            remedy = "give a shorter question"
        if n_prompt < window < 2 * n_new:  # the answer takes most of it
            remedy = "allow fewer new tokens"
        reasons[i] = (
            f"needs {n_prompt} prompt and {n_new} answer tokens, but {backbone.name} "
            f"has a window of {window}; {remedy}"
        )
    return reasons


def check_requests_fit(
    backbone: Backbone, requests: Sequence[Request], n_new: int
) -> None:
    """Check that every prompt with `n_new` more tokens fits the model's window."""
    for i, reason in why_overlong(backbone, requests, n_new).items():
        raise ValueError(f"question {requests[i].example_id!r} {reason}")


def generate(
    backbone: Backbone,
    requests: Sequence[Request],
    config: GenerationConfig,
    sampling: SamplingConfig | None = None,
) -> list[Answer]:
    """Answer requests in batches, by default greedily, and return answers in order."""
    sampling = sampling or config.greedy
    check_requests_fit(backbone, requests, sampling.max_new_tokens)
    generator = TransformersGenerator(
        backbone=backbone, tokens_per_batch=config.tokens_per_batch
    )
    prompts = [GeneratorPrompt(text="", ids=r.prompt.ids) for r in requests]
    replies = dict(generator.stream(prompts, sampling))
    return [request.answer(replies[i]) for i, request in enumerate(requests)]
