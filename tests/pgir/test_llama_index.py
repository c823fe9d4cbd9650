"""A LlamaIndex engine behind a gate: what is scored and kept, and who waits."""

import asyncio

import pytest

from beatrice.pgir.gate import Draft, Gate, Kept, llama_index_engine
from tests.pgir.small import PASSAGE, QUESTION

ANSWER, ONLY_STORED = "Guzolt Falls", "the path of the file"


class Retrieving:
    """A gate that retrieves every time and must not be called inside an event loop."""

    def draft(self, questions):
        with pytest.raises(RuntimeError, match="no running event loop"):
            asyncio.get_running_loop()  # a running loop would be kept waiting
        kinds = {"p_correct": None, "decision": "unknown"}
        return [Draft(question=q, answer="a draft", **kinds) for q in questions]

    def keep(self, draft, grounded, passages):
        self.draft([draft.question])
        self.passages = passages
        is_grounded = grounded == ANSWER
        answer = grounded if is_grounded else draft.answer
        kinds = {"is_grounded": is_grounded, "decision": "unknown"}
        return Kept(answer=answer, p_correct=0.5, **kinds)


def engine_of(answer):
    """Return an engine whose answer is a text, or a stream if queried in a loop."""
    pytest.importorskip("llama_index.core")
    from llama_index.core.base.response import schema
    from llama_index.core.query_engine import CustomQueryEngine
    from llama_index.core.schema import NodeWithScore, TextNode

    metadata = {"title": "Notes", "path": ONLY_STORED}
    hidden = {"excluded_llm_metadata_keys": ["path"]}
    nodes = [NodeWithScore(node=TextNode(text=PASSAGE, metadata=metadata, **hidden))]

    class Engine(CustomQueryEngine):
        def custom_query(self, query_str):
            return schema.Response(answer, nodes, {"n_hops": 2})

        async def acustom_query(self, query_str):
            async def words():
                yield answer

            return schema.AsyncStreamingResponse(words(), nodes, {"n_hops": 2})

    return Engine()


def test_nodes_are_scored_in_the_form_that_the_engines_model_reads():
    gate = Retrieving()
    llama_index_engine(gate, engine_of(ANSWER)).query(QUESTION)
    (passage,) = gate.passages
    assert "Notes" in passage and PASSAGE in passage and ONLY_STORED not in passage


@pytest.mark.parametrize(("answer", "n_hops"), [(ANSWER, 2), ("a worse one", None)])
def test_metadata_of_an_engine_is_kept_only_with_its_answer(answer, n_hops):
    reply = llama_index_engine(Retrieving(), engine_of(answer)).query(QUESTION)
    assert reply.metadata.get("n_hops") == n_hops
    assert reply.metadata["p_correct"] == 0.5


def test_a_gate_does_not_block_the_event_loop_and_reads_streams():
    gated = llama_index_engine(Retrieving(), engine_of(ANSWER))
    reply = asyncio.run(gated.aquery(QUESTION))
    assert str(reply) == ANSWER and reply.metadata["n_hops"] == 2


def fixed_engine(response, texts):
    """Return a LlamaIndex engine with a fixed reply that counts its queries."""
    pytest.importorskip("llama_index.core")
    from llama_index.core.base.response.schema import Response
    from llama_index.core.query_engine import CustomQueryEngine
    from llama_index.core.schema import NodeWithScore, TextNode

    class Fixed(CustomQueryEngine):
        n_queries: int = 0

        def custom_query(self, query_str):
            self.n_queries += 1
            nodes = [NodeWithScore(node=TextNode(text=x), score=1.0) for x in texts]
            return Response(response=response, source_nodes=nodes)

    return Fixed()


def test_an_engine_is_asked_only_if_needed_and_the_better_answer_is_kept(scorer):
    engine, gate = fixed_engine(ANSWER, [PASSAGE]), Gate(scorer, 1.0)
    gated = llama_index_engine(Gate(scorer, 1e-6), engine)
    assert str(gated.query(QUESTION)) == scorer.answer(QUESTION).text
    assert engine.n_queries == 0
    (drafted,) = gate.draft([QUESTION])
    best = gate.keep(drafted, ANSWER, [PASSAGE])
    response = llama_index_engine(gate, engine).query(QUESTION)
    assert engine.n_queries == 1 and str(response) == best.answer
    assert response.metadata["p_correct"] == best.p_correct
    assert bool(response.source_nodes) == best.is_grounded
    assert response.metadata["reason"] is None


@pytest.mark.parametrize(
    ("response", "texts"), [(None, [PASSAGE]), ("", [PASSAGE]), ("Empty Response", [])]
)
def test_an_engine_without_an_answer_or_passages_leaves_the_draft(
    scorer, response, texts
):
    engine = fixed_engine(response, texts)
    reply = llama_index_engine(Gate(scorer, 1.0), engine).query(QUESTION)
    assert str(reply) == scorer.answer(QUESTION).text
    assert not reply.metadata["is_grounded"] and not reply.source_nodes
    assert "is empty" in reply.metadata["reason"]
