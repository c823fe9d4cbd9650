"""The gate in pipelines of others: FlashRAG, LangGraph, LlamaIndex.

None of them is imported before it is used, and none is needed by this package. Each
adapter is short enough to be pasted.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypedDict

from pgir.border import as_texts, refuse
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
        if not hasattr(config, "__getitem__") or isinstance(config, (str, Sequence)):
            refuse("config", "a mapping, such as FlashRAG's Config", config)
        self.name = config["judger_name"] if "judger_name" in config else "beatrice"
        if gate is None:
            settings = config["judger_config"] if "judger_config" in config else {}
            if not isinstance(settings, Mapping) or "run" not in settings:
                refuse("judger_config", "a mapping that names a 'run'", settings)
            gate = Gate.load(settings["run"], threshold=settings.get("threshold"))
        self.gate = gate

    def judge(self, dataset: Any) -> list[bool]:
        """Return of every question whether to retrieve.

        Args:
          dataset: FlashRAG's Dataset, a list of questions, or one question.
        """
        if isinstance(dataset, str):
            dataset = [dataset]
        questions = as_texts(getattr(dataset, "question", dataset), "dataset")
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
        (answered,) = gate.draft([state.get("question")])
        answer = {"answer": answered.answer, "p_correct": answered.p_correct}
        return {"draft": answered, **answer}

    def ground(state: dict) -> dict:
        passages = retrieve(state["question"])
        grounded = generate(state["question"], passages)
        kept = gate.keep(state["draft"], grounded, passages)
        answer = {"answer": kept.answer, "p_correct": kept.p_correct}
        return {"passages": passages, **answer}

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
            reply = engine.query(query_str)
            passages = [node.get_content() for node in reply.source_nodes]
            kept = gate.keep(draft, str(reply), passages)
            return Response(
                response=kept.answer,
                source_nodes=reply.source_nodes if kept.is_grounded else [],
                metadata={"p_correct": kept.p_correct, "is_grounded": kept.is_grounded},
            )

    return GatedEngine()
