"""When to retrieve, and what to keep: PGIR and its rivals.

Here are the printed names of controllers and of bounds on them, in the order of the
tables. Others, such as a user's judge, follow them under their ids.
"""

from collections.abc import Iterable

CROSS_FIT = "pgir_cross_fit"  # only run with `control --set cross_fit=yes`
CONTROLLERS = {
    "no_rag": "Never retrieve",
    "vanilla_rag": "Always retrieve once",
    "draft_rag": "Always retrieve once, draft in the query",
    "skr": "SKR",
    "adaptive_rag": "Adaptive-RAG",
    "dragin": "DRAGIN",
    "seakr": "SeaKR",
    "probing_rag": "Probing-RAG",
    "perplexity_rag": "PGIR's loop, answer perplexity in it",
    "pgir": "PGIR",
    CROSS_FIT: "PGIR, τ and B on cross-fitted probabilities",
    "perplexity_rag_query": "PGIR's loop, perplexity in it, query chosen on validation",
    "pgir_query": "PGIR, query chosen on validation",
}
OPTIONAL = (CROSS_FIT, "pgir_query", "perplexity_rag_query")
# PGIR's rivals, each registered by a module of this folder, in the order in which they
# run: what was never published, then by month of publication, then by name.
RIVALS = (
    "perplexity_rag",
    "skr",  # 2023-10
    "adaptive_rag",  # 2024-03
    "dragin",  # 2024-03
    "seakr",  # 2024-06
    "probing_rag",  # 2024-10
)
# Not controllers: what PGIR would give if one part of it knew the gold answers.
BOUNDS = {
    "perfect_gate": "PGIR, first draft judged without error",
    "perfect_choice": "PGIR, the kept draft chosen without error",
    "perfect_judge": "PGIR's drafts, judged without error",
}


def titles_of(names: Iterable[str]) -> dict[str, str]:
    """Return the titles of all controllers; others of `names` come last, untitled."""
    return CONTROLLERS | {x: x for x in names if x not in CONTROLLERS | BOUNDS}
