"""The interfaces of an engine of your own, and the functions that take one.

A `Generator` writes texts; a `Reader` reads the four signal families of a given text.
Each may be any class with these methods that returns arrays or lists. They work with or
without a run: `tests/extract/test_own_engine.py` shows both with small classes.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

from beatrice.extract.generate.answers import (
    Engine,
    answer_stage,
    generate,
    open_local,
)
from beatrice.extract.generate.generator import (
    Generated,
    Generator,
    GeneratorPrompt,
    SamplingConfig,
)
from beatrice.extract.generate.prompts import (
    AnswerConfig,
    PromptModel,
    Request,
    TokenizerOnly,
    make_requests,
)
from beatrice.extract.generate.templates import PromptConfig
from beatrice.extract.run.contents import settings_of
from beatrice.extract.run.directory import RunDir
from beatrice.extract.signals.extract import (
    EXTRACT_PRESETS,
    ExtractConfig,
    check_room,
    extract,
)
from beatrice.extract.signals.sequence import Reader, TokenSequence, first_read_token

if TYPE_CHECKING:
    from beatrice.extract.backbone.loading import Backbone


def open_readable(run: RunDir, config: AnswerConfig) -> Engine:
    """Load a run's backbone to answer, and check that its signals can be read later."""
    from beatrice.extract.signals.reader import SignalReader

    engine = open_local(run, config)
    # Fail before, not after, hours of answers whose signals cannot be read.
    SignalReader(cast("Backbone", engine.model), (0,))
    return engine._replace(why_alone="")


def open_reading(run: RunDir, config: AnswerConfig) -> Engine:
    """Load a run's backbone to read signals in the passes that write the answers.

    The signals wait in `run.written` until the stage `extract` stores them.
    """
    from beatrice.extract.signals.decode import ReadingGenerator, check_decoding
    from beatrice.extract.signals.reader import SignalReader
    from beatrice.extract.signals.written import save_batch, waiting_config

    engine = open_local(run, config)
    config_of_store = run.resolve_section("extract", EXTRACT_PRESETS, is_recorded=False)
    reader = SignalReader.for_config(cast("Backbone", engine.model), config_of_store)
    features = run.features(settings_of(run)[0]).parent
    if (reason := check_decoding(reader)) is not None:
        return engine._replace(why_alone=reason)

    def reading(requests: Sequence[Request]) -> Generator:
        prompts = {request.prompt.ids: request.prompt for request in requests}.values()
        check_room(
            run,
            # The waiting signals are deleted only once all are in the store.
            {run.written: waiting_config(config_of_store), features: config_of_store},
            reader.shapes,
            n_tokens=sum(
                len(p.ids) - first_read_token(p.context_span[0]) for p in prompts
            ),
            n_answer=0,  # not known yet
            advice="answer with --no-read, or make the run with --hidden-layers or "
            "--set hidden_spans=answer",
        )
        return ReadingGenerator(
            backbone=reader.backbone,
            tokens_per_batch=config.generation.tokens_per_batch,
            reader=reader,
            requests={request.prompt.ids: request for request in requests},
            on_batch=lambda answers, signals: save_batch(
                run.written, reader, config_of_store, answers, signals
            ),
            answer_span=config_of_store.answer_span,
        )

    return engine._replace(reading=reading)


ANSWER = answer_stage(open_reading)

__all__ = [
    "ANSWER",
    "ExtractConfig",
    "Generated",
    "Generator",
    "GeneratorPrompt",
    "PromptConfig",
    "PromptModel",
    "Reader",
    "SamplingConfig",
    "TokenSequence",
    "TokenizerOnly",
    "extract",
    "generate",
    "make_requests",
    "open_readable",
    "open_reading",
]
