"""What the tests of the backends share: greedy answers, and what a model computes."""

import contextlib

from beatrice.extract.generate.generator import GeneratorPrompt, SamplingConfig

GREEDY = SamplingConfig(max_new_tokens=10)


def prompts_of(requests, n=None, **fields):
    return [
        GeneratorPrompt(text=r.example_id, ids=r.prompt.ids, **fields)
        for r in requests[:n]
    ]


def texts(generator, prompts, config=GREEDY):
    result = dict(generator.stream(prompts, config))
    return [result[i] for i in range(len(prompts))]


@contextlib.contextmanager
def shapes_run(backbone):
    """Collect `(n_rows, n_tokens)` of every forward through a model's first layer."""
    shapes = []
    handle = backbone.layout.layers[0].module.register_forward_pre_hook(
        lambda module, given: shapes.append(tuple(given[0].shape[:2]))
    )
    yield shapes
    handle.remove()
