"""Probing-RAG: probes on hidden states judge each generation (Baek et al., 2025).

After baekingeol/Probing-RAG 5e59a2b. Six probes (LayerNorm, 512, 512, 2) read the mean
state of the generated tokens, at layers from a third of the model's depth to nearly its
end. An answer is returned if theta plus the summed probability of "wrong" is below that
of "right". Otherwise passages are retrieved and replace earlier ones; the query is
first the question, and then the whole last prompt with its output. After the fourth
retrieval the last answer is returned.

Training is as in the original: labels by containment, balanced classes, AdamW, a
learning rate that decays at every step, and a cross-entropy of probabilities that are
already softmaxed. Departures: the run's template and k; no worked examples in the
query; gold answers count only as whole words; theta chosen on validation (theirs: 0).
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch

from beatrice.extract.label.labels import contains_gold
from beatrice.extract.records import Example
from beatrice.pgir.controllers.loop import Call, ControllerConfig, Cost, Plan
from beatrice.pgir.controllers.session import Session, rival
from beatrice.pgir.controllers.waves import AnswerService, BatchedService

_DEPTHS = tuple(layer / 18 for layer in (6, 8, 10, 12, 14, 16))  # of Gemma 2B's 18
_WIDTH, _BATCH, _EPOCHS = 512, 8, 2
_LEARNING_RATE, _DECAY, _DROPOUT = 1e-4, 0.995, 0.1
_CALLS_PER_BATCH = 256
_SHARES = tuple(round(0.1 * i, 1) for i in range(11))


def state_layers(n_layers: int) -> tuple[int, ...]:
    """Return the layers whose outputs are read, at the published depths.

    They are indices of the resid axis `[n_layers + 1]`, so 1 is the first layer's.
    """
    return tuple(sorted({min(n_layers, 1 + round(n_layers * d)) for d in _DEPTHS}))


def make_probe(d_model: int) -> torch.nn.Module:
    """Return one untrained probe."""
    return torch.nn.Sequential(
        torch.nn.LayerNorm(d_model),
        torch.nn.Linear(d_model, _WIDTH),
        torch.nn.SiLU(),
        torch.nn.LayerNorm(_WIDTH),
        torch.nn.Dropout(_DROPOUT),
        torch.nn.Linear(_WIDTH, _WIDTH),
        torch.nn.SiLU(),
        torch.nn.LayerNorm(_WIDTH),
        torch.nn.Dropout(_DROPOUT),
        torch.nn.Linear(_WIDTH, 2),
    )


def balanced(labels: np.ndarray) -> np.ndarray:
    """Return sorted indices of equally many right and wrong answers, by seed 0."""
    rng = np.random.default_rng(0)
    right, wrong = np.flatnonzero(labels), np.flatnonzero(~labels)
    n = min(len(right), len(wrong))
    chosen = [rng.choice(places, n, replace=False) for places in (right, wrong)]
    return np.sort(np.concatenate(chosen))


def fit_probe(states: np.ndarray, labels: np.ndarray, seed: int) -> torch.nn.Module:
    """Train one probe on balanced answers.

    Args:
      states: `[n, d_model]` float32.
      labels: `[n]` bool, True for right answers.
      seed: seed of weights and order; the original uses the layer, counted from 0.
    """
    rows = balanced(labels)
    inputs = torch.from_numpy(states[rows])
    targets = torch.from_numpy(labels[rows]).long()
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        torch.default_generator.manual_seed(seed)  # leaves GPU generators alone
        probe = make_probe(states.shape[1])
        optimizer = torch.optim.AdamW(probe.parameters(), lr=_LEARNING_RATE)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, _DECAY)
        for _ in range(_EPOCHS):
            for batch in torch.randperm(len(rows)).split(_BATCH):
                optimizer.zero_grad()
                softmaxed = probe(inputs[batch]).softmax(-1)
                torch.nn.functional.cross_entropy(softmaxed, targets[batch]).backward()
                optimizer.step()
                schedule.step()
    return probe.eval()


class ProbeService(BatchedService):
    """Serves "probe": the summed probabilities (wrong, right) of an answer.

    Probes are trained, on answers to training questions, when the first value is
    needed, so nothing is trained if the journal has all values. They read the mean
    state of the generated tokens except the last, which is never fed to the model; if
    there is no other, the state that emitted it is read.
    """

    size = _CALLS_PER_BATCH

    def __init__(
        self, answering: AnswerService, training: Sequence[tuple[Call, Example]]
    ) -> None:
        """Take the answers to learn from; a single class raises a ValueError."""
        self._answering, self._calls = answering, [call for call, _ in training]
        texts = [answering.journal.value(call).text for call in self._calls]
        golds = (example.golds for _, example in training)
        self._labels = np.array([*map(contains_gold, texts, golds)], bool)
        n_right = int(self._labels.sum())
        if not 0 < n_right < len(training):
            raise ValueError(
                f"{n_right} of {len(training)} training answers are right, and a "
                "single class teaches nothing; take more questions (--n-train)"
            )
        self._probes: list[torch.nn.Module] = []

    @torch.no_grad()
    def values(self, calls: Sequence[Call]) -> list[tuple[float, float]]:
        """Return the summed probabilities (wrong, right) of each answer."""
        with self._answering.probed.lock:
            if not self._probes:
                training = self._answering.states_of(self._calls)
                layers = state_layers(self._answering.probed.backbone.n_layers)
                self._probes = [
                    fit_probe(training[:, index], self._labels, layer - 1)
                    for index, layer in enumerate(layers)
                ]
            states = self._answering.states_of([call.answer for call in calls])
        inputs = torch.from_numpy(states).unbind(1)
        pairs = zip(self._probes, inputs, strict=True)
        sums = torch.stack([probe(x).softmax(-1) for probe, x in pairs]).sum(0)
        return [(wrong, right) for wrong, right in sums.tolist()]

    def cost(self, call: Call, value: tuple[float, float]) -> Cost:
        """Return the cost: one pass if the answer has to be read again."""
        return Cost(forwards=int(not self._answering.is_read_at_once))


def probing_rag(
    question: str,
    theta: float,
    n_training: int,
    shown: Callable[[tuple[int, ...]], str],
    config: ControllerConfig,
) -> Plan[str]:
    """Answer until the probes favour "right" over "wrong" by more than theta.

    `n_training`, the number of their training answers, tells probes apart.
    """
    passages: tuple[int, ...] = ()
    reply = yield Call("answer", question)
    for _ in range(config.max_budget):
        wrong, right = yield Call("probe", question, passages, n=n_training)
        if wrong + theta < right:
            return reply.text
        query = question
        if passages:
            of_prompt = shown(passages[: reply.n_shown])
            query = f"{of_prompt} {question} {reply.text}"
        ranking = yield Call("search", query, n=config.depth)
        if not ranking:
            return reply.text
        passages = tuple(ranking[: config.n_passages])
        reply = yield Call("answer", question, passages)
    return reply.text


@rival("probing_rag")
def run_probing(session: Session) -> None:
    """Train probes, if they can learn; then choose theta on validation, and run."""
    answering = session.answering
    shared, training = session.config, []
    _ = session.outcomes  # the answers to learn from
    for example in session.training:
        search = Call("search", example.question, n=shared.depth)
        ranking = answering.fitting(example.question, answering.journal.value(search))
        shown_to = ranking[: shared.n_passages]
        training.append((Call("answer", example.question), example))
        training.append((Call("answer", example.question, shown_to), example))
    n = len(training)
    try:
        session.waves.services["probe"] = ProbeService(answering, training)
    except ValueError as error:
        session.left_out["probing_rag"] = str(error)
        return
    template = answering.probed.template

    def shown(indices: tuple[int, ...]) -> str:
        return template.context_text([answering.passages[p] for p in indices])

    def gap(example: Example) -> Plan[float]:
        yield Call("answer", example.question)
        wrong, right = yield Call("probe", example.question, n=n)
        return right - wrong

    results = session.run("probing:draft", session.validation, gap)
    gaps = [done.value for done in results]
    grid = [0.0, *np.quantile(gaps, _SHARES).tolist()]

    def plan(theta: float, example: Example) -> Plan[str]:
        return probing_rag(example.question, theta, n, shown, shared)

    session.tune("probing_rag", grid, plan)
