"""Whether the model that reads the answers is the one that gave them."""

import json
import string

from extract.backbone.backbone import Backbone
from extract.run.rundir import RunDir


def _is_commit(revision: str) -> bool:
    """Tell a commit hash from a name that somebody gave a server's weights."""
    return len(revision) == 40 and set(revision) <= set(string.hexdigits)


def _may_differ(found: dict[str, object], backbone: Backbone) -> bool:
    """Tell whether two revisions are of kinds that say nothing of each other.

    What a server holds is called as its user likes; only a commit can be compared
    with a commit.
    """
    return found.get("backend") != "transformers" and not (
        _is_commit(str(found.get("revision"))) and _is_commit(backbone.revision)
    )


def require_answering_model(run: RunDir, backbone: Backbone) -> None:
    """Refuse to read answers with other weights than gave them.

    The signals would be those of a model that never wrote these answers, and nothing
    later would show it.

    Args:
      run: holds the answers and `answers/backend.json`, which says who gave them;
        without that file (an earlier version's run) nothing can be compared.
      backbone: the model that is to read them.

    Raises:
      ValueError: another revision answered.
    """
    path = run.answers / "backend.json"
    if not path.exists():
        return
    found = json.loads(path.read_text(encoding="utf-8"))
    answered = str(found.get("revision"))
    if answered == backbone.revision or _may_differ(found, backbone):
        return
    raise ValueError(
        f"{run.answers} was answered by revision {answered[:12]} of the backbone, but "
        f"{backbone.name} is now {backbone.revision[:12]}; put the weights that "
        f"answered back, or delete {run.answers} to answer again"
    )
