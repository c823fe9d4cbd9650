"""What the tests of the backends share: greedy answers to prompts."""

from beatrice.extract.generate.generator import GeneratorPrompt, SamplingConfig

GREEDY = SamplingConfig(max_new_tokens=10)


def prompts_of(requests, n=None, **fields):
    return [
        GeneratorPrompt(text=r.example_id, ids=r.prompt.ids, **fields)
        for r in requests[:n]
    ]


def texts(generator, prompts, config=GREEDY):
    found = dict(generator.stream(prompts, config))
    return [found[i] for i in range(len(prompts))]
