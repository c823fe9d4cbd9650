"""What an engine of one's own plays, and the functions that take one.

A `Generator` writes texts, a `Reader` reads the four signal families of a text that is
there. Both may be any class with these methods, whose results are arrays or lists; no
run directory is needed:

    requests = make_requests(examples, model, PromptConfig(), max_new_tokens).requests
    answers = list(generate(my_generator, requests, SamplingConfig()))
    extract(my_reader, answers, "memory://signals/", ExtractConfig())

In a run, `extract.generate.answers.answer_with` answers its questions by a generator,
and the stage of `extract.signals.extract.extract_stage(lambda run, config: my_reader)`
reads the answers. `tests/extract/test_own_engine.py` does both with small classes.
"""

from beatrice.extract.generate.answers import (
    AnswerConfig,
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
from beatrice.extract.generate.prompts import PromptConfig
from beatrice.extract.generate.requests import PromptModel, TokenizerOnly, make_requests
from beatrice.extract.run.directory import RunDir
from beatrice.extract.signals.extract import ExtractConfig, Reader, extract
from beatrice.extract.signals.sequence import TokenSequence


def open_readable(run: RunDir, config: AnswerConfig) -> Engine:
    """Load a run's backbone to answer, if its signals can be read afterwards."""
    from beatrice.extract.signals.reader import SignalReader

    # Hours of answers whose signals cannot be read would be in vain.
    return open_local(run, config, lambda backbone: SignalReader(backbone, (0,)))


ANSWER = answer_stage(open_readable)

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
]
