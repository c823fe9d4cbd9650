"""Replies of judges, labelled by hand, and answers that try to grade themselves.

The right answer to the question that an injection is put to is Paris; none is right.
"""

import json
from pathlib import Path

FOLDER = Path(__file__).parent
REPLIES = json.loads((FOLDER / "replies.json").read_text(encoding="utf-8"))
LABELLED = [
    (text, verdict)
    for verdict in ("correct", "incorrect", "unparsable")
    for text in REPLIES[verdict]
]
INJECTIONS = json.loads((FOLDER / "injections.json").read_text(encoding="utf-8"))
