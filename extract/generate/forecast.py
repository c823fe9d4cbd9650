"""What texts a stage would ask a model for, counted instead of asked."""

from collections.abc import Callable, Sequence

from beatrice.extract.generate.generator import (
    Generator,
    GeneratorPrompt,
    SamplingConfig,
    reply_key,
)
from beatrice.extract.generate.replies import Reply
from beatrice.extract.run.console import Update
from beatrice.extract.run.files import JournalFiles
from beatrice.extract.run.stages import Forecast


def count_requests(
    stage: str,
    prompts: Sequence[GeneratorPrompt],
    config: SamplingConfig,
    generator: Generator | None = None,
) -> Forecast:
    """Return what texts would need.

    Args:
      stage: whose forecast it is.
      prompts: what a model would be asked.
      config: how.
      generator: counts the tokens of prompts without ids; a server's may not.
    """
    counts = [
        len(prompt.ids)
        if prompt.ids is not None
        else generator and generator.count_tokens(prompt)
        for prompt in prompts
    ]
    is_known = None not in counts
    return Forecast(
        stage=stage,
        n_rows=len(prompts),
        n_requests=len(prompts),
        n_prompt_tokens=sum(n or 0 for n in counts) if is_known else None,
        n_new_tokens=len(prompts) * config.max_new_tokens,
        basis=(
            "what is there already is not counted; retries are not foreseen"
            if is_known
            else "the server does not count prompt tokens; retries are not foreseen"
        ),
    )


class CountedReplies:
    """Stands in for `Replies` in a dry run: counts the texts that are not there yet.

    Whoever asks for texts gets None, as for a share of them, and goes no further: the
    stage itself decides what it would ask.

    Args:
      files: of the texts that are there, see `reply_files`.
      stage: whose forecast it is.
    """

    n_missing = 0

    def __init__(self, files: JournalFiles[str, Reply], stage: str) -> None:
        """Look which texts are there; nothing is written."""
        self._there = files.keys()
        self._stage = stage
        self.forecast = count_requests(stage, (), SamplingConfig())

    def generate(
        self,
        generator: Generator,
        prompts: Sequence[GeneratorPrompt],
        config: SamplingConfig,
        progress: Update = lambda done, total: None,
    ) -> None:
        """Count what `Replies.generate` would ask the generator."""
        identity = generator.identity
        left = {reply_key(identity, prompt, config): prompt for prompt in prompts}
        todo = [prompt for key, prompt in left.items() if key not in self._there]
        self.forecast = count_requests(self._stage, todo, config, generator)


def forecast_texts(
    files: JournalFiles[str, Reply],
    stage: str,
    ask: Callable[[CountedReplies], object],
) -> str:
    """Return in words what texts `ask` would generate with these replies."""
    replies = CountedReplies(files, stage)
    ask(replies)
    return replies.forecast.as_text()
