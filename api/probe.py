"""A probe: a detector beside the language model whose answers it judges."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from beatrice.benchmarks.recipes import what_to_do
from beatrice.extract.records import Setting
from beatrice.extract.run.directory import NotWritten, RunDir, read_manifest
from beatrice.extract.run.files import read_sealed, seal, write_json_atomic
from beatrice.jaxprobe.config import set_compiler
from beatrice.jaxprobe.detector import Detector, HeadName
from beatrice.pgir.arguments import as_path

if TYPE_CHECKING:
    import pandas

    from beatrice.extract.store.store import FeatureStore
    from beatrice.model import LanguageModel
    from beatrice.pgir.scorer import Score, Scorer
    from beatrice.pgir.streaming import StreamedToken
    from beatrice.signals import Signals

_DETECTOR, _ABOUT = "detector", "probe.json"


class Probe:
    """A detector of right answers, with the language model that it belongs to.

    `predict` takes signals and needs no language model. `score` takes texts: the model
    is loaded when it is first needed, see `load`.
    """

    def __init__(
        self,
        detector: Detector,
        report: Sequence[Mapping[str, Any]] = (),
        *,
        layer: int | None,
        open_scorer: "Callable[[], Scorer] | None" = None,
    ) -> None:
        """Take a detector; see `fit` and `load`.

        Args:
          detector: the encoders, heads and maps.
          report: what it is worth, as rows.
          layer: entry of the resid axis that hidden states are read from; None where
            no family has layers.
          open_scorer: loads the language model; None loads the one that the detector
            names.
        """
        self.detector = detector
        self.layer = layer
        self._rows = [dict(row) for row in report]
        self._open_scorer = open_scorer or partial(scorer_of, detector)

    def __repr__(self) -> str:
        """Say what it reads, and of which model."""
        heads = ", ".join(
            f"{name}: {'+'.join(subset for _, subset in head.reads)}"
            for name, head in self.detector.heads.items()
        )
        provenance = self.detector.provenance
        of = "arrays" if provenance is None else provenance.model
        return f"Probe({heads}; fitted on {of})"

    @property
    def report(self) -> "pandas.DataFrame":
        """AUROC, AUPRC, ECE and Brier score with 95 % intervals, a row each.

        Rows of the split "validation" flatter: it has chosen layer, encoders, heads and
        map. Those of "test" do not.
        """
        import pandas

        return pandas.DataFrame(self._rows)

    def predict(
        self, signals: "Signals", *, closed_book: "Signals | None" = None
    ) -> np.ndarray:
        """Return calibrated P(correct) of answers from their signals, `[n_answers]`.

        Args:
          signals: of answers in one setting, read as those of the fit.
          closed_book: of with-context answers, the signals of the same questions asked
            closed-book, which the head of both passes reads too and finds by their
            ids; None takes the head that reads the with-context pass alone.

        Raises:
          ValueError: the signals are not of the probe's families, layer or setting.
        """
        from beatrice.jaxprobe.calibrate import score_store
        from beatrice.signals import by_setting

        passes = by_setting(signals)
        if closed_book is not None:
            passes |= by_setting(closed_book)
            if list(passes) != ["with_context", "closed_book"]:
                raise ValueError(
                    "closed_book: expected closed-book signals beside with-context "
                    f"ones, found {closed_book} beside {signals}"
                )
        branch: HeadName = signals.setting
        if branch == "with_context" and closed_book is None:
            branch = "single_pass"
        for part in passes.values():
            if part.layers and self.layer not in part.layers:
                raise ValueError(
                    f"signals: the probe reads layer {self.layer}, these keep "
                    f"{', '.join(map(str, part.layers))}; read them with that layer"
                )
        stores: dict[Setting, FeatureStore] = {
            setting: part.store for setting, part in passes.items()
        }
        return score_store(
            self.detector,
            branch,
            stores,
            layer=self.layer,
            examples=signals.indices,
        ).p_correct

    @cached_property
    def scorer(self) -> "Scorer":
        """The probe beside its language model, which is loaded now."""
        return self._open_scorer()

    def score(
        self,
        question: str | None = None,
        answer: str | None = None,
        context: Any = None,
        *,
        prompt: str | None = None,
        messages: Sequence[Mapping[str, str]] | None = None,
        prompt_ids: Sequence[int] | None = None,
        answer_ids: Sequence[int] | None = None,
        context_range: tuple[int, int] | None = None,
        question_range: tuple[int, int] | None = None,
    ) -> "Score":
        """Return P(the answer is correct) from one forward pass.

        Args:
          question: as the model was asked.
          answer: its answer, or anybody's; it is read as if the model had written it.
          context: the passages that the model was shown: a text, a mapping with `text`
            and `title`, a document with `page_content`, or a list of these; None for
            closed-book.
          prompt: the text that was really sent to be completed.
          messages: the chat that was really sent, each with `role` and `content`.
          prompt_ids: the ids that the model really read.
          answer_ids: the ids that it wrote.
          context_range: characters `[start, stop)` of the context in the prompt's text.
          question_range: likewise of the question.

        Raises:
          ValueError: an argument is of another type, a text is empty or holds control
            tokens, or the probe was fitted on arrays or in another setting.
        """
        return self.scorer.score(
            question,
            answer,
            context,
            prompt=prompt,
            messages=messages,
            prompt_ids=prompt_ids,
            answer_ids=answer_ids,
            context_range=context_range,
            question_range=question_range,
        )

    def score_many(self, rows: Any, batch_size: int = 64) -> "list[Score]":
        """Return the scores of many answers, in shared forward passes.

        Args:
          rows: a list or a data frame. A row is a mapping of what `score` takes, or a
            tuple of question, answer and perhaps context. One that cannot be read has
            no P, the decision "unknown" and the reason in `error`.
          batch_size: most answers in one forward pass.
        """
        return self.scorer.score_many(rows, batch_size)

    @overload
    def answer(
        self,
        questions: str | None = None,
        contexts: Any = None,
        *,
        messages: Sequence[Mapping[str, str]] | None = None,
        max_new_tokens: int | None = None,
        stop: Sequence[str] | None = None,
        temperature: float = 0.0,
        seed: int = 0,
    ) -> "Score": ...
    @overload
    def answer(
        self,
        questions: Sequence[str],
        contexts: Sequence[Any] | None = None,
        *,
        max_new_tokens: int | None = None,
        stop: Sequence[str] | None = None,
        temperature: float = 0.0,
        seed: int = 0,
    ) -> "list[Score]": ...

    def answer(
        self,
        questions: Any = None,
        contexts: Any = None,
        *,
        messages: Sequence[Mapping[str, str]] | None = None,
        max_new_tokens: int | None = None,
        stop: Sequence[str] | None = None,
        temperature: float = 0.0,
        seed: int = 0,
    ) -> Any:
        """Answer questions, and score the answers in the passes that write them.

        The language model is asked as in the fit.

        Args:
          questions: a text, or several.
          contexts: what is shown with the question, as `score` takes it; or a list of
            that, one for each question. None asks closed-book.
          messages: one chat that asks instead, each with `role` and `content`; a
            question and its context are then looked for in it.
          max_new_tokens: most tokens of an answer; None is as in the fit.
          stop: texts that end an answer; None is as in the fit.
          temperature: of draws; 0 takes the likeliest tokens.
          seed: of draws. A draw depends on its prompt and the seed, on nothing else.

        Returns:
          A score with the answer's `text`; of several questions a list of scores.

        Raises:
          ValueError: an argument is of another type, a prompt does not fit the model's
            window, or the model's logits are not finite.
        """
        is_one = questions is None or isinstance(questions, str)
        if is_one:
            contexts = None if contexts is None else [contexts]
            questions = None if questions is None else [questions]
        scores = self.scorer.answer_and_score(
            questions,
            contexts,
            messages=messages,
            max_new_tokens=max_new_tokens,
            stop=stop,
            temperature=temperature,
            seed=seed,
        )
        return scores[0] if is_one else scores

    def stream(
        self,
        question: str | None = None,
        context: Any = None,
        *,
        every: int | None = None,
        messages: Sequence[Mapping[str, str]] | None = None,
        max_new_tokens: int | None = None,
        stop: Sequence[str] | None = None,
        temperature: float = 0.0,
        seed: int = 0,
    ) -> "Iterator[StreamedToken | Score]":
        """Answer a question token by token, and score the answer in the same passes.

            *tokens, score = probe.stream("where was Skiband Rugrond born?", every=4)

        Args:
          question: a text.
          context: what is shown with it, as `score` takes it; None asks closed-book.
          every: so many tokens apart a token has `p_correct`, P of the answer so far;
            None is nowhere. It costs a small part of a step.
          messages: as in `answer`.
          max_new_tokens: most tokens of an answer; None is as in the fit.
          stop: texts that end an answer; None is as in the fit.
          temperature: of draws; 0 takes the likeliest tokens.
          seed: of draws.

        Returns:
          Every token as it comes, with its text, probability and entropy, the stop
          token too; last the score, which is that of `answer`.

        Raises:
          ValueError: as `answer`, or the model cannot be read while it writes.
        """
        return self.scorer.stream(
            question,
            context,
            every=every,
            messages=messages,
            max_new_tokens=max_new_tokens,
            stop=stop,
            temperature=temperature,
            seed=seed,
        )

    def threshold(self, setting: Setting) -> Any:
        """Return at which P answers of a setting are trusted, and how often rightly."""
        return self.scorer.threshold(setting)

    def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        """Return messages as the text that the model reads, in which ranges count."""
        return self.scorer.render(messages)

    def save(self, path: str | Path, *, untrustworthy: bool = False) -> None:
        """Write the probe into a folder, which `load` reads: weights, maps, report.

        Args:
          path: of the folder.
          untrustworthy: save a probe that rests on too few answers; each of its scores
            says so.

        Raises:
          ValueError: something else is there, or too few answers and not
            `untrustworthy`.
        """
        doubts = self.detector.doubts
        if doubts and not untrustworthy:
            raise ValueError(
                f"{doubts[0]}; fit it on more answers, or save it as it is with "
                "untrustworthy=True, and each of its scores will say so"
            )
        folder = as_path(path, "path")
        if folder.exists() and not _is_saved(folder) and any(folder.iterdir()):
            raise ValueError(
                f"{folder} holds something else; give a new folder, or that of a "
                "probe, which is replaced"
            )
        folder.mkdir(parents=True, exist_ok=True)
        self.detector.save(folder / _DETECTOR)
        about = {"layer": self.layer, "report": self._rows}
        write_json_atomic(folder / _ABOUT, seal(about))


def _is_saved(folder: Path) -> bool:
    return (folder / _DETECTOR).is_dir() and (folder / _ABOUT).is_file()


def scorer_of(
    detector: Detector,
    model: Any = None,
    device: str | None = None,
    dtype: str | None = None,
) -> "Scorer":
    """Load the language model that a detector names, or take the one that is given."""
    from beatrice.extract.generate.requests import GenerationConfig
    from beatrice.model import LanguageModel, usual_stop
    from beatrice.pgir.scorer import Scorer

    provenance = detector.provenance
    if provenance is None:
        raise ValueError(
            "this probe was fitted on arrays and names no language model; "
            "predict(signals) works, or fit it on signals of LanguageModel.read"
        )
    if model is None or isinstance(model, str | Path):
        model = LanguageModel(
            model or provenance.model,
            device=device,
            dtype=dtype or provenance.dtype,
            prompt=provenance.prompt,
        )
    generation = GenerationConfig(max_new_tokens=32, stop=usual_stop(provenance.prompt))
    return Scorer(model, detector, generation)


def load(
    path: str | Path,
    *,
    model: "str | Path | LanguageModel | None" = None,
    device: str | None = None,
    dtype: str | None = None,
) -> Probe:
    """Return a saved probe, or the probe of a finished run.

    Args:
      path: a folder written by `Probe.save`, or a run directory.
      model: where the language model lies, if that has moved; or one in memory.
      device: of the language model, which is loaded when it is first needed.
      dtype: likewise; None takes the type in which the probe was fitted.

    Raises:
      ValueError: neither is there, or a file is not as it was written.
    """
    folder = as_path(path, "path")
    options = {"model": model, "device": device, "dtype": dtype}
    if _is_saved(folder):
        about = read_sealed(folder / _ABOUT, "save the probe again")
        detector = Detector.load(folder / _DETECTOR)
        opener = partial(scorer_of, detector, **options)
        return Probe(
            detector, about["report"], layer=about["layer"], open_scorer=opener
        )
    read_manifest(folder)  # refuses what is no run
    run = RunDir(folder)
    try:
        detector = Detector.load(run.require(run.detector))
    except NotWritten as error:
        raise ValueError(f"{error}; {what_to_do(error)}") from None
    set_compiler(run.preset)

    def open_scorer() -> "Scorer":
        from beatrice.pgir.scorer import Scorer

        return Scorer.load(folder, **options)

    layer = None if detector.provenance is None else detector.provenance.layer
    return Probe(detector, layer=layer, open_scorer=open_scorer)
