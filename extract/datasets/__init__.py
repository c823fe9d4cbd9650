"""Question sets in the formats in which they are published."""

from extract.datasets.loading import DatasetFile, Loaded, Refusal, open_dataset
from extract.datasets.readers.question import Question

__all__ = ["DatasetFile", "Loaded", "Question", "Refusal", "open_dataset"]
