"""The gate in pipelines of others: FlashRAG, LangGraph, LlamaIndex.

None of them is imported before it is used, and none is needed by this package. Each
adapter is short enough to be pasted.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypedDict

from pgir.gate.gate import Draft, Gate


class FlashRagJudger:
    """A judger of FlashRAG's ConditionalPipeline (flashrag/judger/judger.py, 099da14).

    `pipeline.judger = FlashRagJudger(config)`, where `config["judger_config"]` has the
    `run`, and may have a `threshold`. The run's backbone should be the pipeline's
    generator: it is its knowledge that is judged.

    Args:
      config: FlashRAG's, or any mapping like it.
      gate: an open one, in the place of the one that the config names.
    """

    def __init__(self, config: Mapping[str, Any], gate: Gate | None = None) -> None:
        """Open the gate."""
        own = config["judger_config"] if "judger_config" in config else {}
        self.name = config["judger_name"] if "judger_name" in config else "beatrice"
        self.gate = gate or Gate.load(own["run"], threshold=own.get("threshold"))

    def judge(self, dataset: Any) -> list[bool]:
        """Return of every question whether to retrieve.

        Args:
          dataset: FlashRAG's Dataset, a list of questions, or one question.
        """
        if isinstance(dataset, str):
            dataset = [dataset]
        questions = dataset if isinstance(dataset, list) else dataset.question
        return [draft.retrieve for draft in self.gate.draft(questions)]


class _GraphState(TypedDict, total=False):
    """What the nodes of the graph hand on."""

    question: str
    draft: Draft
    answer: str
    p_correct: float | None
    passages: Sequence[Any]


def langgraph_app(
    gate: Gate,
    retrieve: Callable[[str], Sequence[Any]],
    generate: Callable[[str, Sequence[Any]], str],
) -> Any:
    """Return a compiled LangGraph graph: draft, and only if need be retrieve and keep.

    Args:
      gate: an open one.
      retrieve: passages for a question.
      generate: an answer to a question with passages.

    Returns:
      `app.invoke({"question": ...})` gives `answer`, `p_correct` and `passages`.
    """
    from langgraph.graph import END, START, StateGraph

    def draft(state: dict) -> dict:
        (own,) = gate.draft([state["question"]])
        return {"draft": own, "answer": own.answer, "p_correct": own.p_correct}

    def ground(state: dict) -> dict:
        passages = retrieve(state["question"])
        grounded = generate(state["question"], passages)
        kept = gate.keep(state["draft"], grounded, passages)
        found = {"answer": kept.answer, "p_correct": kept.p_correct}
        return {"passages": passages, **found}

    graph = StateGraph(_GraphState)
    graph.add_node("write", draft)
    graph.add_node("ground", ground)
    graph.add_edge(START, "write")
    graph.add_conditional_edges(
        "write", lambda state: "ground" if state["draft"].retrieve else END
    )
    graph.add_edge("ground", END)
    return graph.compile()


def llama_index_engine(gate: Gate, engine: Any) -> Any:
    """Return a LlamaIndex query engine that asks another only if need be.

    Args:
      gate: an open one.
      engine: any query engine; its answer is kept if it scores better.
    """
    from llama_index.core.base.response.schema import Response
    from llama_index.core.query_engine import CustomQueryEngine

    class GatedEngine(CustomQueryEngine):
        def custom_query(self, query_str: str) -> Response:
            (draft,) = gate.draft([query_str])
            if not draft.retrieve:
                facts = {"p_correct": draft.p_correct, "is_grounded": False}
                return Response(response=draft.answer, metadata=facts)
            found = engine.query(query_str)
            passages = [node.get_content() for node in found.source_nodes]
            kept = gate.keep(draft, str(found), passages)
            return Response(
                response=kept.answer,
                source_nodes=found.source_nodes if kept.is_grounded else [],
                metadata={"p_correct": kept.p_correct, "is_grounded": kept.is_grounded},
            )

    return GatedEngine()
