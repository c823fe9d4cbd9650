"""The four families by forward hooks on a Llama of Transformers: what to beat.

Written to be fast, with nothing of the reader's: the model attends eagerly and returns
its weights; "plain" lets Transformers return all states, weights and logits and reduces
them in the end; "tuned" reduces every layer as it runs and takes logits a few tokens at
a time. Both leave out what the reader checks, parity with the model above all.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from transformers import LlamaForCausalLM

from beatrice.extract.signals.sequence import TokenSequence

_N_LOGITS = 128  # tokens whose logits are alive at once
Readings = dict[str, torch.Tensor]


def _probabilities(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return `[n, 5]` of `[n, vocab_size]`: see `AnswerSignals`."""
    log_p = logits.float().log_softmax(-1)
    chosen, p = log_p.gather(-1, targets[:, None])[:, 0], log_p.exp()
    top = p.topk(2, -1).values
    entropy = -(p * log_p).sum(-1)
    return torch.stack(
        [chosen.exp(), -chosen, entropy, top[:, 0], top[:, 0] - top[:, 1]], -1
    )


def _entropy_and_mass(mass: torch.Tensor, plogp: torch.Tensor) -> torch.Tensor:
    safe = mass.clamp_min(1e-30)
    entropy = torch.where(mass > 1e-30, safe.log() - plogp / safe, 0.0).clamp_min(0)
    return torch.stack([entropy, mass], -1)


class Hooked:
    """A batch of equal lengths, read by hooks.

    Readings are `[n_examples, n_tokens, …]` by family, hidden states of every layer.
    """

    def __init__(
        self, model: LlamaForCausalLM, sequences: Sequence[TokenSequence]
    ) -> None:
        """Prepare what does not depend on the pass."""
        self.model, device = model, model.device
        self.ids, self.targets = (
            torch.tensor([getattr(s, name).tolist() for s in sequences], device=device)
            for name in ("ids", "targets")
        )
        spans = torch.tensor([s.spans.tolist() for s in sequences], device=device)
        at = torch.arange(self.ids.shape[1], device=device)
        self.members = (at >= spans[..., :1]) & (at < spans[..., 1:])
        self.first_row = int(spans[:, 1, 0].min())  # only later rows look back
        self.directions = model.lm_head.weight[self.targets]

    @contextlib.contextmanager
    def _hooks(self, hooks: Sequence[tuple[Any, Any]]) -> Iterator[None]:
        """Attend eagerly under `(module, hook)`."""
        config = self.model.config
        before: Any = config._attn_implementation
        handles = [module.register_forward_hook(hook) for module, hook in hooks]
        self.model.set_attn_implementation("eager")
        try:
            yield
        finally:
            self.model.set_attn_implementation(before)
            for handle in handles:
                handle.remove()

    @torch.no_grad()
    def plain(self) -> Readings:
        """Return everything, then reduce it."""
        outputs: dict[str, list[torch.Tensor]] = {"att": [], "ffn": []}

        def keep(name: str) -> Any:
            def hook(module: Any, inputs: Any, output: Any) -> None:
                is_tuple = isinstance(output, tuple)
                outputs[name].append(output[0] if is_tuple else output)

            return hook

        hooks = [
            (module, keep(name))
            for block in self.model.model.layers
            for name, module in (("att", block.self_attn), ("ffn", block.mlp))
        ]
        with self._hooks(hooks):
            out = self.model(
                input_ids=self.ids,
                use_cache=False,
                output_hidden_states=True,
                output_attentions=True,
            )
        # Transformers' last state is final-normed; the stream's is the sum.
        states = list(out.hidden_states)
        states[-1] = states[-2] + outputs["att"][-1] + outputs["ffn"][-1]
        pairs = zip(states, outputs["att"], outputs["ffn"], strict=False)
        logits = out.logits.flatten(0, 1).split(_N_LOGITS)
        return self._readings(
            states,
            [self._contributions(*parts) for parts in pairs],
            [self._attention(weights) for weights in out.attentions],
            list(logits),
        )

    @torch.no_grad()
    def tuned(self) -> Readings:
        """Reduce every layer as it runs."""
        states: list[torch.Tensor] = []
        resid: list[torch.Tensor] = []
        attention: list[torch.Tensor] = []
        now: dict[str, torch.Tensor] = {}

        def embed(module: Any, inputs: Any, output: Any) -> None:
            states.append(output)

        def attend(module: Any, inputs: Any, output: Any) -> None:
            now["att"] = output[0]
            attention.append(self._attention(output[1]))

        def feed(module: Any, inputs: Any, output: Any) -> None:
            resid.append(self._contributions(states[-1], now["att"], output))

        def end(module: Any, inputs: Any, output: Any) -> None:
            states.append(output[0] if isinstance(output, tuple) else output)

        decoder = self.model.model
        hooks = [(decoder.embed_tokens, embed)]
        for block in decoder.layers:
            hooks += [(block.self_attn, attend), (block.mlp, feed), (block, end)]
        with self._hooks(hooks):
            final = decoder(input_ids=self.ids, use_cache=False).last_hidden_state
        chunks = final.flatten(0, 1).split(_N_LOGITS)
        logits = map(self.model.lm_head, chunks)
        return self._readings(states, resid, attention, logits)

    def _readings(self, states, resid, attention, logits) -> Readings:
        targets = self.targets.flatten().split(_N_LOGITS)
        prob = torch.cat(
            [_probabilities(x, t) for x, t in zip(logits, targets, strict=True)]
        )
        return {
            "hidden": torch.stack(states, 2),
            "prob": prob.view(*self.ids.shape, 5),
            "resid": torch.cat(resid, -1),
            "attn": torch.stack(attention, -2),
        }

    def _contributions(self, before, att, ffn) -> torch.Tensor:
        """Return `[n_examples, n_tokens, 4]`: norm and push of both."""
        norm, middle = self.model.model.norm, before + att
        normed = [norm(x) for x in (before, middle, middle + ffn)]
        pushes = [
            ((b - a) * self.directions).sum(-1)
            for a, b in zip(normed, normed[1:], strict=False)
        ]
        return torch.stack(
            [att.norm(dim=-1), pushes[0], ffn.norm(dim=-1), pushes[1]], -1
        )

    def _attention(self, weights: torch.Tensor) -> torch.Tensor:
        """Return `[n_examples, n_tokens, 2, 2, n_heads]` of a layer's weights."""
        first, n_heads = self.first_row, weights.shape[1]
        rows = weights[:, :, first:].float()
        terms = torch.xlogy(rows, rows)
        members = self.members[:, None].float()
        later = members[:, :, 1:, first:]
        shape = len(rows), n_heads, 2, first
        to = [
            torch.cat([x.new_zeros(shape), members[:, :, :2] @ x.mT], -1)
            for x in (rows, terms)
        ]
        to_spans = _entropy_and_mass(*to)
        from_spans = _entropy_and_mass(later @ rows, later @ terms)
        context, question, answer = self.members[:, None, :, :, None].unbind(2)
        is_any = context | question | answer
        first_partner = torch.where(context, from_spans[:, :, 0], to_spans[:, :, 0])
        second = torch.where(answer, to_spans[:, :, 1], from_spans[:, :, 1])
        both = torch.stack([first_partner, second], 3) * is_any[..., None]
        return both.permute(0, 2, 3, 4, 1)
