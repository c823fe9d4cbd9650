"""The embedded model as a backend, requests to it, and a tokenizer of bytes."""

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from beatrice.extract.backbone.loading import load_backbone
from beatrice.extract.backbone.names import WEIGHTS
from beatrice.extract.generate.local import TransformersGenerator
from beatrice.extract.generate.prompts import make_requests
from beatrice.extract.generate.templates import PromptConfig
from beatrice.extract.world.facts import make_examples
from beatrice.extract.world.stage import WORLD_PRESETS
from tests.extract.small_run import embedded_world


@pytest.fixture(scope="module")
def local():
    return TransformersGenerator(backbone=load_backbone(WEIGHTS))


@pytest.fixture(scope="module")
def requests(local):
    examples = make_examples(embedded_world(), WORLD_PRESETS["smoke"].questions)
    return make_requests(examples, local.backbone, PromptConfig(), 10).requests


@pytest.fixture
def bytewise():
    """A tokenizer that can spell anything: one token per byte, two control tokens."""
    letters = pre_tokenizers.ByteLevel.alphabet()
    model = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    model.add_special_tokens(["<s>", "</s>"])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=model, bos_token="<s>", eos_token="</s>"
    )
    tokenizer.chat_template = (
        "{{ '<s>' }}{% for m in messages %}{{ m['content'] }}{% endfor %}{{ '</s>' }}"
    )
    return tokenizer
