"""Data for the report page that `evaluate` and `control` write besides their rows."""

from beatrice.extract.records import Record, Setting, Share


class Bin(Record, frozen=True, kw_only=True):
    """One bin of a reliability curve, with `n` examples."""

    lower: Share
    upper: Share
    mean_p: Share
    accuracy: Share
    n: int
    n_questions: int | None = None  # fewer with two wordings; older runs lack it


class Curves(Record, frozen=True, kw_only=True):
    """A setting's reliability, of the head's raw probability and the calibrated one."""

    raw: tuple[Bin, ...]
    calibrated: tuple[Bin, ...]
    brier_raw: Share
    brier_calibrated: Share
    ece_raw: Share
    ece_calibrated: Share
    # What the ECE stays below in 39 of 40 draws if P is right; older runs lack it.
    ece_by_chance: Share | None = None


class Point(Record, frozen=True, kw_only=True):
    """Quality and cost of a loop on one set at one budget; "pgir" is the paper's."""

    controller: str
    dataset: str
    budget: int
    em: Share
    f1: Share
    generations: float


class Token(Record, frozen=True, kw_only=True):
    """A shown token, with the numbers of the position that emitted it."""

    text: str
    span: str
    p: float
    surprisal: float
    entropy: float
    margin: float


class ShownDraft(Record, frozen=True, kw_only=True):
    """An answer, with its score and the passages that were in its prompt."""

    setting: Setting
    answer: str
    p_correct: Share
    correct: bool
    passages: tuple[str, ...]
    tokens: tuple[Token, ...]


class Case(Record, frozen=True, kw_only=True):
    """A question that the controller answered, with its action and drafts."""

    dataset: str
    question: str
    golds: tuple[str, ...]
    action: str
    verdict: str
    drafts: tuple[ShownDraft, ...]


class ShownAnswer(Record, frozen=True, kw_only=True):
    """An answer of a question set; `golds` are the first of `n_golds`."""

    id: str
    question: str
    golds: tuple[str, ...]
    n_golds: int
    draft: ShownDraft


class ShownKind(Record, frozen=True, kw_only=True):
    """Some of the `n` answers of one kind, see `evaluate.KINDS`."""

    name: str
    n: int
    answers: tuple[ShownAnswer, ...]


class ShownSet(Record, frozen=True, kw_only=True):
    """The answers shown of a set with `n` answers, trusted from P = `threshold`.

    A threshold that is not certified only groups the answers on the page.
    """

    setting: Setting
    dataset: str
    split: str
    n: int
    threshold: Share
    is_certified: bool = True
    wanted: Share | None = None  # requested precision; older runs lack it
    kinds: tuple[ShownKind, ...]


class Control(Record, frozen=True, kw_only=True):
    """PGIR's policy, its quality and cost at each budget, and example cases."""

    tau: Share
    budget: int
    cap: float
    frontier: tuple[Point, ...]
    cases: tuple[Case, ...]
