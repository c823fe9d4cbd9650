"""SeaKR: retrieve if sampled answers differ inside the model (Yao et al., 2025).

After THU-KEG/SeaKR d75fe70, the single-hop script, which suits short answers. The
direct answer is taken if its uncertainty is below delta. Otherwise the model answers
from every passage on its own, and the least uncertain answer is taken. Here the
passages are the k that all controllers retrieve (theirs: ten), and are only read if
needed; their script always runs everything. Delta is chosen on validation: -6 was
chosen for one model, and the scale depends on the width of the states.
"""

import math
from collections.abc import Sequence

import numpy as np

from beatrice.extract.generate.generator import GeneratorPrompt, SamplingConfig
from beatrice.extract.generate.local import stop_ids
from beatrice.extract.readings.reader import end_states
from beatrice.extract.records import Example
from beatrice.jaxprobe.tokens import mean_log_eigenvalue
from beatrice.pgir.controllers.loop import Call, ControllerConfig, Cost, Plan
from beatrice.pgir.controllers.session import Session, rival
from beatrice.pgir.controllers.waves import AnswerService, BatchedService

_SEED = 42
_CALLS_PER_BATCH = 32  # calls whose samples are drawn and kept together
_SHARES = (0.5, 0.0, 0.1, 0.2, 0.3, 0.4, 0.6, 0.7, 0.8, 0.9, 1.0)


def uncertainty(states: np.ndarray) -> float:
    """Return how far apart states `[k, d]` are; inf, above every delta, for none."""
    return mean_log_eigenvalue(states) if len(states) else math.inf


class SpreadService(BatchedService):
    """Serves "spread": samples answers, and measures how far apart their states are.

    The state is what the feed-forward part of the middle layer adds (the official code
    takes a layer's first output in vLLM, to which the residual is not added yet), at a
    stop token that replaces the last token written.
    """

    size = _CALLS_PER_BATCH

    def __init__(self, answering: AnswerService) -> None:
        """Take the service that makes prompts and generates."""
        self._answering = answering
        probed = answering.probed
        self._sampling = SamplingConfig(
            max_new_tokens=probed.config.max_new_tokens,
            temperature=1.0,
            top_k=50,
            top_p=0.9,
            seed=_SEED,
            stop=probed.config.stop,
        )
        self._layer = max(0, probed.backbone.n_layers // 2 - 1)

    def values(self, calls: Sequence[Call]) -> list[tuple[float, int]]:
        """Return the uncertainty of each call's samples, and their number of tokens."""
        answering, lock = self._answering, self._answering.probed.lock
        prompts = [answering.request(call)[0].prompt.ids for call in calls]
        owners = [index for index, call in enumerate(calls) for _ in range(call.n)]
        draws = [
            GeneratorPrompt(text="", ids=ids, sample=k)
            for ids, call in zip(prompts, calls, strict=True)
            for k in range(call.n)
        ]
        with lock:
            texts = dict(answering.generator.stream(draws, self._sampling))
        stop = stop_ids(answering.probed.backbone)[0]
        n_new = [0] * len(calls)
        sequences: list[list[tuple[int, ...]]] = [[] for _ in calls]
        for i, text in sorted(texts.items()):
            ids, log_probs = text.token_ids or (), text.log_probs or ()
            n_new[owners[i]] += len(log_probs)
            # The last token is replaced, even if it is a stop token.
            before_stop = ids[:-1] if text.stop_id is None else ids
            if text.text:  # empty answers are left out
                read_ids = (*prompts[owners[i]], *before_stop, stop)
                sequences[owners[i]].append(read_ids)
        with lock:
            spreads = [uncertainty(self._states(of_call)) for of_call in sequences]
        return list(zip(spreads, n_new, strict=True))

    def _states(self, sequences: Sequence[tuple[int, ...]]) -> np.ndarray:
        """Return the states at the last tokens of sequences, `[n, d_model]` float32."""
        answering = self._answering
        states = end_states(
            answering.probed.backbone,
            sequences,
            lambda layer: layer.ffn if layer.index == self._layer else None,
            answering.generator.tokens_per_batch,
        )
        return states.float().numpy()

    def cost(self, call: Call, value: tuple[float, int]) -> Cost:
        """Return the cost of samples; their request counts with the direct answer's.

        Each sample reads one more token, the stop token. In the original that is a step
        of the sampling; here it is a separate pass, which only the seconds include.
        """
        return Cost(sequences=call.n, tokens=value[1] + call.n)


def seakr(
    question: str, delta: float, n_draws: int, config: ControllerConfig
) -> Plan[str]:
    """Answer directly if that is certain, else from the best single passage."""
    direct = yield Call("answer", question)
    spread, _ = yield Call("spread", question, n=n_draws)
    if spread < delta:
        return direct.text
    ranking = yield Call("search", question, n=config.depth)
    answers = []
    for passage in ranking[: config.n_passages]:
        reply = yield Call("answer", question, (passage,))
        spread, _ = yield Call("spread", question, (passage,), n=n_draws)
        # Empty answers rank last.
        answers.append((not reply.text, spread, len(answers), reply.text))
    return min(answers)[-1] if answers else direct.text


def deltas(spreads: Sequence[float]) -> list[float]:
    """Return the values to try for delta; with the last one nothing is retrieved."""
    finite = [spread for spread in spreads if math.isfinite(spread)] or [0.0]
    return [*np.quantile(finite, _SHARES).tolist(), max(finite) + 1]


@rival("seakr")
def run_seakr(session: Session) -> None:
    """Choose delta among quantiles of the validation uncertainties, and run."""
    session.waves.services["spread"] = SpreadService(session.answering)
    shared, n_draws = session.config, session.n_draws

    def direct(example: Example) -> Plan[float]:
        yield Call("answer", example.question)
        spread, _ = yield Call("spread", example.question, n=n_draws)
        return spread

    results = session.run("seakr:direct", session.validation, direct)
    grid = deltas([done.value for done in results])
    session.tune("seakr", grid, lambda x, e: seakr(e.question, x, n_draws, shared))
