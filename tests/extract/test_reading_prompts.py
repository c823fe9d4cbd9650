"""The second prompt and the swapped passages."""

import msgspec
import pytest

from extract.backbone.checkpoint import load_tokenizer
from extract.generate.templates import TEMPLATES
from extract.readings import prompts
from extract.records import Answer, Example, Passage
