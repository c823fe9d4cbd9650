"""Where correctness can be read: what deployed encoders say when they are queried."""

from beatrice.extract.records import Record, Share


class Study(Record, frozen=True, kw_only=True):
    """One question of a set that shows a kind of decision; `p_…` are calibrated."""

    dataset: str
    split: str
    kind: str
    question: str
    gold: str
    closed_book: str
    p_closed_book: Share
    is_closed_book_right: bool
    with_context: str
    p_with_context: Share
    is_with_context_right: bool
