"""The layouts in which question sets are published, each with its reader.

`FORMATS` at the end lists them all; `recognise_record` tells which one a record has.
Files that are often mistaken for questions are refused with what they are.
"""

import collections
import dataclasses
import decimal
import itertools
import json
import math
import re
import string
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, get_args

import msgspec

from beatrice.extract.datasets import fields
from beatrice.extract.datasets.fields import (
    QUESTIONS,
    Format,
    Question,
    Record,
    any_passages,
    check_no_passages,
    dataset_marked,
    dataset_named,
    dataset_of_id,
    dataset_tagged,
    question_of,
    read_passages,
    reader,
)
from beatrice.extract.records import Passage, Split, normalise

N_WORDS = 100  # a passage, as in DPR's psgs_w100
# In running text a mark often separates two words ("Boulevard (1950)", "a-ha"), so it
# becomes a space, as in TriviaQA's own script; exact match deletes it.
_MARKS = str.maketrans(dict.fromkeys(string.punctuation, " "))


def find_evidence(path: Path) -> Path | None:
    """Return the folder `evidence` next to a question file or above it, or None."""
    folders = (folder / "evidence" for folder in path.absolute().parents[:3])
    return next(filter(Path.is_dir, folders), None)


def read_page(evidence: Path, document: fields.Document) -> str | None:
    """Return the text of one page, or None if it is missing or not UTF-8."""
    base = (evidence / document.folder).resolve()
    path = (base / document.filename).resolve()
    if not path.is_relative_to(base):
        raise ValueError(
            f"the evidence file {document.filename!r} is outside the folder {base}"
        )
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError):
        return None


def _plain_words(text: str) -> str:
    return normalise(text.translate(_MARKS))


def _passages(title: str, page: str, golds: Sequence[str]) -> Iterator[Passage]:
    """Yield a page in passages of 100 words; the first with a gold is supporting."""
    wanted = [f" {words} " for gold in golds if (words := _plain_words(gold))]
    words = page.split()
    for start in range(0, len(words), N_WORDS):
        body = " ".join(words[start : start + N_WORDS])
        padded = f" {_plain_words(body)} " if wanted else ""
        holds_gold = any(gold in padded for gold in wanted)
        wanted = [] if holds_gold else wanted
        yield Passage(title=title, text=body, is_supporting=holds_gold)


def attach_pages(question: Question, folder: Path | None) -> Question:
    """Return a question of TriviaQA with the passages of its pages in a folder.

    Whole pages that came with the record (hub rows) are cut up the same way. Missing
    pages are skipped, as in TriviaQA's own readers, and counted in `meta`.
    """
    passages = [p for page in question.passages
                for p in _passages(page.title, page.text, question.golds)]  # fmt: skip
    n_missing = 0
    for document in question.documents:
        page = None if folder is None else read_page(folder, document)
        if page is None or not page.strip():
            n_missing += 1
        else:
            passages += _passages(document.title, page, question.golds)
    meta = {**question.meta, "evidence": "distant"} if passages else question.meta
    return dataclasses.replace(
        question,
        passages=tuple(passages),
        meta={**meta, "n_missing_documents": n_missing} if n_missing else meta,
    )


_BLIND = " (a test set without answers?)"


def _golds(record: Record, field: str, *names: str) -> tuple[str, ...]:
    """Return the canonical answer and its aliases.

    `names` are the fields of its value, aliases, human answers and normalised aliases;
    the last are used only if there is nothing else.
    """
    answer = fields.required(record, field, object, why=_BLIND)
    answer = fields.expect(fields.parse_nested(answer, field), dict, field)
    value, *lists, normalised = names
    texts = [fields.expect(answer.get(value) or "", str, f"{field}.{value}")]
    for name in (*lists, normalised):
        if name != normalised or not any(texts):
            aliases = fields.expect(answer.get(name) or [], list, f"{field}.{name}")
            texts += [
                fields.expect(alias, str, f"{field}.{name}[{i}]")
                for i, alias in enumerate(aliases)
            ]
    golds = fields.distinct(texts)
    if not golds or golds == ("<unk>",):  # the hub's mark of a hidden answer
        raise ValueError(f"{field!r} holds no word: there is no answer")
    return golds


def _documents(record: Record) -> Iterator[fields.Document]:
    """Yield the evidence documents of a record that name a file."""
    for key, folder in (("EntityPages", "wikipedia"), ("SearchResults", "web")):
        for page in fields.objects(record, key) if record.get(key) is not None else ():
            if filename := fields.text_or_empty(page.get("Filename")):
                title = fields.text_or_empty(page.get("Title"))
                yield fields.Document(folder=folder, filename=filename, title=title)


def read_official(record: Record) -> Question:
    """Read one entry of `Data` in TriviaQA's own files."""
    names = ("Value", "Aliases", "HumanAnswers", "NormalizedAliases")
    meta: dict[str, Any] = {}
    if record.get("QuestionPartOfVerifiedEval") is not None:
        meta["verified"] = bool(record["QuestionPartOfVerifiedEval"])
    return Question(
        question=fields.text(record, "Question"),
        golds=_golds(record, "Answer", *names),
        id=fields.text(record, "QuestionId"),
        dataset="triviaqa",
        documents=tuple(_documents(record)),
        meta=meta,
    )


def _pages_of(holder: Any, body: str) -> Iterator[Passage]:
    """Yield the pages in a list of objects or in an object of lists."""
    pages = fields.parse_nested(holder, body)
    if isinstance(pages, dict):
        lists = [pages.get(name) for name in ("title", body)]
        lists = [x if isinstance(x, list) else [] for x in lists]
        rows = itertools.zip_longest(*lists)
        pages = [{"title": title, body: text} for title, text in rows]
    for page in pages if isinstance(pages, list) else ():
        text = fields.text_or_empty(page.get(body) if isinstance(page, dict) else None)
        if text.strip():
            yield Passage(title=fields.text_or_empty(page.get("title")), text=text)


def read_hub(record: Record) -> Question:
    """Read one row of TriviaQA's hub copy: names in snake case, parallel lists."""
    names = ("value", "aliases", "human_answers", "normalized_aliases")
    return Question(
        question=fields.text(record, "question"),
        golds=_golds(record, "answer", *names),
        id=fields.text(record, "question_id"),
        dataset="triviaqa",
        passages=(
            *_pages_of(record.get("entity_pages"), "wiki_context"),
            *_pages_of(record.get("search_results"), "search_context"),
        ),
    )


def _fits_hub(record: Record) -> bool:
    answer = record.get("answer")
    return {"question", "question_id"} <= record.keys() and (
        bool({"entity_pages", "search_results"} & record.keys())
        or (isinstance(answer, dict) and "aliases" in answer)
    )


# Tuples, not sets: a damaged record may have a list here, which is not hashable.
_TWOWIKI_TYPES = ("compositional", "inference", "bridge_comparison")
_BARE_TYPES = ("bridge", "comparison", *_TWOWIKI_TYPES)
_LEVELS = ("easy", "medium", "hard")
_TWOWIKI_KEYS = {"evidences", "evidence", "entity_ids", "evidences_id", "answer_id"}


def is_twowiki(record: Record) -> bool:
    """Return whether a record is from 2WikiMultihopQA rather than HotpotQA.

    A type, an id or a level, which the sets write themselves, decide first. Keys that a
    third party may have added to HotpotQA decide only if there is nothing else.
    """
    kind = record.get("type")
    if kind == "bridge" or kind in _TWOWIKI_TYPES:
        return kind != "bridge"
    by_id = dataset_of_id(record.get("_id", record.get("id")))
    if by_id in ("hotpotqa", "2wikimultihopqa"):
        return by_id == "2wikimultihopqa"
    if record.get("level") in _LEVELS:
        return False
    return not _TWOWIKI_KEYS.isdisjoint(record)


def _has_paragraphs(record: Record) -> bool:
    """Return whether a record has, or should have, paragraphs of titled sentences.

    A record without facts, or with facts and another kind of context, also counts: its
    reader refuses it, while as a plain question it would silently lose its passages.
    """
    if "question" not in record or not {"supporting_facts", "context"} & record.keys():
        return False
    context = record.get("context")
    if "supporting_facts" in record or fields.is_titled(context):
        return True
    is_prose = isinstance(context, str) and context.lstrip()[:1] not in ("[", "{")
    return "_id" in record and not is_prose and not fields.is_list_of_objects(context)


def _multihop_set(record: Record) -> str:
    return "2wikimultihopqa" if is_twowiki(record) else "hotpotqa"


def read_titled(record: Record) -> Question:
    """Read one record of HotpotQA or 2WikiMultihopQA, in any of its layouts."""
    question, golds = fields.text(record, "question"), _answer(record)
    facts = fields.required(record, "supporting_facts", object)
    titles = fields.supporting_titles(facts)
    context = fields.required(record, "context", object)
    passages = fields.read_context(context, titles)
    names = ("type", "level")
    meta = {key: record[key] for key in names if isinstance(record.get(key), str)}
    missing = set(titles) - {p.title for p in passages if p.is_supporting}
    if missing:  # fullwiki: the retrieved paragraphs may lack gold ones
        meta["missing_titles"] = sorted(missing)
    return Question(
        id=fields.identity(record, "_id", "id"),
        dataset=_multihop_set(record),
        question=question,
        golds=golds,
        passages=passages,
        meta=meta,
    )


def _answer(record: Record) -> tuple[str, ...]:
    value = fields.required(record, "answer", object, why=_BLIND)
    return fields.answers(value, "answer")


# Values of MuSiQue's mark: copies write text or a number; MuSiQue-Ans has no mark.
_ANSWERABLE = {"none": True, "true": True, "1": True, "false": False, "0": False}


def read_musique(record: Record) -> Question:
    """Read one MuSiQue record; only marks tell gold, since distractors share titles."""
    mark = record.get("answerable")
    is_answerable = _ANSWERABLE.get(str(mark).strip().lower())
    if is_answerable is None:
        raise ValueError(f"'answerable': expected true or false, found {mark!r}")
    if not is_answerable:
        raise ValueError(
            "unanswerable on purpose (MuSiQue-Full): its paragraphs do not contain the "
            "answer; use the file musique_ans, or leave such records out"
        )
    question = fields.text(record, "question")
    golds = _answer(record)
    if "answer_aliases" in record:
        aliases = fields.required(record, "answer_aliases", list)
        golds = fields.answers([*golds, *aliases], "answer_aliases")
    passages = read_passages(fields.objects(record, "paragraphs"), "paragraphs")
    if not passages:
        raise ValueError("'paragraphs' is an empty list")
    name = fields.identity(record, "id")
    return Question(
        id=name,
        dataset="musique",
        question=question,
        golds=golds,
        passages=passages,
        meta={"hops": name.partition("__")[0]} if name and "__" in name else {},
    )


def _fits_musique(record: Record) -> bool:
    paragraphs = record.get("paragraphs")
    return "question_decomposition" in record or (
        fields.is_list_of_objects(paragraphs) and "paragraph_text" in paragraphs[0]
    )


def _fits_bare(record: Record) -> bool:
    return (
        {"question", "answer"} <= record.keys()
        and not {"context", "paragraphs", "ctxs"} & record.keys()
        and record.get("type") in _BARE_TYPES
    )


# Spaces to remove between NQ's tokens, as DPR joins them: "Monk 's Café",
# "late 14th - century", "1997 -- 98".
_BLANK = re.compile(
    r"(?<=\S) (?='(?:s|re|ve|ll|d|m)\b|n't\b|(?:--|[-–−/:&]) \S)"
    r"|(?:(?<=\S --)|(?<=\S [-–−/:&])) (?=\S)"
)


def _with_original_wording(golds: Iterable[str]) -> tuple[str, ...]:
    """Return golds, and for joined tokens also the wording of the original page."""
    pairs = ((gold, _BLANK.sub("", gold)) for gold in golds)
    return fields.distinct(itertools.chain(*pairs))


def _joined_answers(record: Record) -> tuple[str, ...]:
    return _with_original_wording(fields.any_answers(record))


# The scores that mark a positive from the annotated page.
_GOLD_SCORES = (1000, "1000", "1000.0")


def _listed_answers(record: Record) -> tuple[str, ...]:
    value = fields.text(record, fields.HEADERLESS[1])
    golds = fields.parse_nested(value, fields.HEADERLESS[1])
    if not isinstance(golds, list):
        raise ValueError(
            f"expected a list of answers in the second column, found {value[:40]!r}"
        )
    return _with_original_wording(fields.answers(golds, "answers"))


def _with_negatives(record: Record, key: str, *others: str) -> tuple[Passage, ...]:
    """Return the positive passages of a field, then the negative ones of others."""
    items = fields.objects(record, key)
    passages = read_passages(items, key, is_supporting=False)
    # Positives of the annotated page are gold, or the first if no score tells.
    is_gold = [item.get("score") in _GOLD_SCORES for item in items]
    is_gold = is_gold if any(is_gold) else [i == 0 for i in range(len(items))]
    positives = (
        msgspec.structs.replace(passage, is_supporting=gold)
        for passage, gold in zip(passages, is_gold, strict=True)
    )
    negatives = (
        read_passages(record.get(other) or [], other, is_supporting=False)
        for other in others
    )
    return *positives, *itertools.chain(*negatives)


def _biencoder_set(record: Record) -> str | None:
    positives = record["positive_ctxs"]
    if record.get("dataset") is not None or not positives:
        return dataset_tagged(record)
    return "nq" if "passage_id" in positives[0] else None


def _gold_passage(record: Record) -> tuple[Passage, ...]:
    body = fields.required(record, "context", str)
    title = fields.text_or_empty(record.get("title"))
    passage = Passage(title=title, text=body, is_supporting=True)
    return (passage,) if body.strip() else ()


def _fits_gold_info(record: Record) -> bool:
    """Return whether a record is DPR's; a title and a context could also be SQuAD's."""
    if "question_tokens" in record:
        return "context" in record and fields.has_answers(record)
    return {"question", "context", "title", "short_answers"} <= record.keys()


_PARAGRAPHS = {"context", "ctxs", "paragraphs", "supporting_facts"}
_TAG = re.compile(r"^<[^>]+>$")


def _fits_open(record: Record) -> bool:
    """Return whether a line may be NQ-open's and has no mark of another set.

    A hexadecimal id is such a mark: NQ-open and EfficientQA have no ids.
    """
    if not isinstance(record.get("answer"), list) or "question" not in record:
        return False
    if _PARAGRAPHS & record.keys():
        return False
    if dataset_named(record.get("dataset")) not in (None, "nq"):
        return False
    marked = dataset_of_id(record.get("_id", record.get("id")))
    return marked in (None, "nq") and not {"prop", "subj"} <= record.keys()


def _span(holder: Any, name: str, n_tokens: int) -> tuple[int, int]:
    """Return `[start, stop)` of an answer in tokens; (-1, -1) if there is none."""
    fields.expect(holder, dict, name)
    start, stop = holder.get("start_token"), holder.get("end_token")
    for value in (start, stop):
        if not isinstance(value, int) or isinstance(value, bool):
            raise ValueError(f"{name!r}: expected token numbers, found {value!r}")
    if start == -1:
        return -1, -1
    if not 0 <= start < stop <= n_tokens:
        raise ValueError(
            f"{name!r}: tokens {start} to {stop} are no span of {n_tokens} tokens"
        )
    return start, stop


def _words(tokens: list[str], start: int, stop: int) -> str:
    return " ".join(t for t in tokens[start:stop] if not _TAG.match(t)).strip()


def read_simplified(record: Record) -> Question:
    """Read a simplified NQ page: long answers are gold passages, short ones golds."""
    question = fields.text(record, "question_text")
    # Not stripped, since token numbers also count the empty tokens between two spaces.
    fields.text(record, "document_text")
    tokens = record["document_text"].split(" ")
    long_answers, short, notes = [], [], fields.objects(record, "annotations")
    for i, note in enumerate(notes):
        within = f"annotations[{i}]."
        start, stop = _span(
            note.get("long_answer"), f"{within}long_answer", len(tokens)
        )
        if start < 0:
            continue
        long_answers.append(_words(tokens, start, stop))
        for j, item in enumerate(fields.objects(note, "short_answers", within=within)):
            name = f"{within}short_answers[{j}]"
            short.append(_words(tokens, *_span(item, name, len(tokens))))
        if note.get("yes_no_answer") in ("YES", "NO"):
            short.append(str(note["yes_no_answer"]).lower())
    if not long_answers:
        raise ValueError(
            f"no long answer in any of {len(notes)} annotations: there is neither a "
            "gold passage nor an answer"
        )
    golds = _with_original_wording(short)
    if not golds:
        raise ValueError("a long answer but no short one: there is no answer to match")
    title = _words(tokens, 0, 64).split(" - wikipedia")[0].split(" - Wikipedia")[0]
    return Question(
        id=fields.identity(record, "example_id"),
        dataset="nq",
        question=question,
        golds=golds,
        passages=tuple(
            Passage(title=title, text=body, is_supporting=True)
            for body in fields.distinct(long_answers)
        ),
    )


_COLUMNS = ("subj", "prop", "obj", "s_wiki_title", "o_wiki_title", "s_pop", "o_pop")


def _json_cell(value: Any, name: str) -> str | int | float | None:
    """Return a cell as a JSON value; Parquet has decimals, pandas NaN for missing."""
    if isinstance(value, decimal.Decimal):
        value = float(value) if value % 1 else int(value)
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if value is None or isinstance(value, str | int | float):
        return value
    raise ValueError(
        f"{name!r}: expected text or a number, found {fields.kind_of(value)}"
    )


# Questions about subjects of the same name are equal: the id tells them apart.
_read_popqa = reader(
    dataset=lambda record: "popqa",
    # A JSON list written as text.
    golds=lambda r: fields.field_answers(
        fields.required(r, "possible_answers", object), "possible_answers"
    ),
    passages=any_passages,
    meta=lambda r: {key: _json_cell(r[key], key) for key in _COLUMNS if key in r},
)


def _metadata(record: Record) -> dict[str, Any]:
    """Return FlashRAG's metadata of the source, which is sometimes nested twice."""
    outer = record.get("metadata", record.get("meta_data"))
    if outer is None:
        return {}
    inner = fields.expect(outer, dict, "metadata").get("metadata")
    return {**outer, **inner} if isinstance(inner, dict) else outer


def _source(meta: Record) -> str | None:
    """Return the question set that a FlashRAG record was made from, or None."""
    if "question_decomposition" in meta:
        return "musique"
    context = meta.get("context")
    if "supporting_facts" in meta or fields.is_titled(context):
        has_content = isinstance(context, dict) and "content" in context
        return "2wikimultihopqa" if has_content or is_twowiki(meta) else "hotpotqa"
    return dataset_marked(meta)


def read_flashrag(record: Record) -> Question:
    """Read `{"id", "question", "golden_answers", "metadata"}` of FlashRAG, UltraRAG."""
    question, meta = question_of(record, *QUESTIONS), _metadata(record)
    golds = fields.field_answers(record.get("golden_answers"), "golden_answers")
    passages: tuple[Passage, ...] = ()
    if record.get("context") not in (None, ""):
        passages = read_passages(record["context"], "context")
    elif meta.get("context"):
        # Without the facts, the paragraphs are read but none is gold.
        facts = meta.get("supporting_facts")
        titles = [] if facts is None else fields.supporting_titles(facts)
        passages = fields.read_context(meta["context"], titles)
    elif "question_decomposition" not in meta:  # MuSiQue's passages are left out there
        passages = any_passages(record) or any_passages(meta)
    names = ("type", "level", "prop", "subj", "s_wiki_title", "s_pop")
    return Question(
        id=fields.identity(record, "id"),
        dataset=_source(meta) or dataset_marked(record),
        question=question,
        golds=golds,
        passages=passages,
        meta={key: meta[key] for key in names if isinstance(meta.get(key), str | int)},
    )


def read_example(record: Record) -> Question:
    """Read one line of an `examples.jsonl` that this program wrote."""
    dataset, name = fields.text(record, "dataset"), fields.identity(record, "id")
    splits: dict[str, Split] = {split: split for split in get_args(Split)}
    split = splits.get(fields.text(record, "split"))
    if split is None:
        raise ValueError(
            f"'split': expected one of {', '.join(splits)}, found {record['split']!r}"
        )
    meta = fields.expect(record.get("meta") or {}, dict, "meta")
    try:
        json.dumps(meta)
    except TypeError as error:  # dates or decimals of a Parquet file
        raise ValueError(f"'meta': expected JSON values ({error})") from None
    return Question(
        split=split,
        id=name.removeprefix(f"{dataset}-") if name else None,
        dataset=dataset,
        question=fields.text(record, "question"),
        golds=fields.field_answers(record.get("golds"), "golds"),
        passages=read_passages(record.get("passages") or [], "passages"),
        rewritten=read_passages(record.get("rewritten") or [], "rewritten"),
        meta=meta,
    )


def _read_document(record: Record) -> Question | None:
    """Read the source record inside a log; None if it has no known layout."""
    layout = recognise_record(record)
    if layout is None or layout.read is None:
        return None
    if layout.is_weak and not fields.has_answers(record):
        return None  # the answer is then in the log's `target`
    return layout.read(record)


def _response(record: Record) -> str | None:
    """Return the model's answer in a log: filtered if possible, else as generated."""
    for name in ("filtered_resps", "resps"):
        response = record.get(name)
        while isinstance(response, list) and response:
            response = response[0]
        if isinstance(response, str):
            return response
    return None


def read_lm_eval(record: Record, *, needs_golds: bool = True) -> Question:
    """Read one line of lm-eval's `samples_*.jsonl`, and keep the model's answer.

    Without `needs_golds`, accepted answers that cannot be read are not an error, and
    those in 'target' are left out.
    """
    document = fields.expect(record.get("doc"), dict, "doc")
    try:
        question = _read_document(document)
        passages = () if question is not None else any_passages(document)
    except ValueError as error:
        if needs_golds:
            raise ValueError(f"in 'doc': {error}") from None
        question, passages = None, any_passages(document)
    if question is None:
        target = record.get("target")
        if needs_golds and target is None:
            raise ValueError("neither 'doc' nor 'target' holds an answer")
        question = Question(
            id=fields.identity(document, "id", "question_id"),
            dataset=None,
            question=question_of(document, *QUESTIONS),
            golds=fields.field_answers(target, "target") if needs_golds else (),
            passages=passages,
        )
    if not (question.passages or question.documents):
        check_no_passages(document, within="in 'doc': ")
    response = _response(record)
    if response is None:
        raise ValueError("no response in 'filtered_resps' or 'resps'")
    meta = {**question.meta, "response": response}
    for key in ("doc_id", "filter"):
        if isinstance(record.get(key), str | int):
            meta[key] = record[key]
    return dataclasses.replace(question, meta=meta)


def _kilt_answers(record: Record) -> tuple[str, ...]:
    outputs = fields.expect(record.get("output"), list, "output")
    texts = [item.get("answer") for item in outputs if isinstance(item, dict)]
    golds = [text for text in texts if isinstance(text, str)]
    return fields.answers(golds, "output[].answer")


def _wordings(answer: Record) -> list[Any]:
    spans = list(fields.expect(answer.get("spans") or [], list, "spans"))
    number, date = answer.get("number"), answer.get("date")
    if number not in (None, ""):
        spans.append(str(number))
    if isinstance(date, dict):
        words = (str(date.get(key) or "") for key in ("day", "month", "year"))
        spans.append(" ".join(words).strip())
    return spans


def _ircot_answers(record: Record) -> tuple[str, ...]:
    objects = fields.objects(record, "answers_objects")
    golds = [wording for answer in objects for wording in _wordings(answer)]
    return fields.any_answers({"answers": golds})


def _fits_kilt(record: Record) -> bool:
    # In instruction data (Alpaca) it is a text.
    has_output = "output" in record and not isinstance(record["output"], str)
    return has_output and bool({"input", "id"} & record.keys())


def _fits_ircot(record: Record) -> bool:
    return "question_text" in record and (
        "answers_objects" in record or "contexts" in record
    )


_read_plain = reader(
    ids=("id", "_id", "question_id", "qid"),
    questions=QUESTIONS,
    dataset=dataset_marked,
    passages=any_passages,
)


def read_plain(record: Record) -> Question:
    """Read a question and its answers under names in any case, as tables have them."""
    folded = {**{name.lower(): value for name, value in record.items()}, **record}
    question = _read_plain(folded)
    if not question.passages:
        check_no_passages(folded)
    return question


_NOT_READ = "not questions; a retriever searches it, `beatrice data` does not read it"


# All layouts, in the order in which they are tried.
FORMATS: tuple[Format, ...] = (
    Format("lm-eval samples",
           lambda r: "doc" in r
           and not {"target", "resps", "filtered_resps", "doc_id"}.isdisjoint(r),
           read_lm_eval),
    Format("TriviaQA",
           lambda r: "QuestionId" in r
           or ("Question" in r
               and ("EntityPages" in r or isinstance(r.get("Answer"), dict))),
           read_official, "triviaqa"),
    Format("TriviaQA (hub rows)", _fits_hub, read_hub, "triviaqa"),
    Format("PopQA with paragraphs",
           lambda r: {"possible_answers", "paragraphs"} <= r.keys(),
           _read_popqa, "popqa"),
    Format("PopQA",
           lambda r: "possible_answers" in r or {"s_wiki_title", "prop"} <= r.keys(),
           _read_popqa, "popqa"),
    Format("DPR question file (qa.csv)",
           lambda r: r.keys() == set(fields.HEADERLESS),
           reader(ids=(), questions=fields.HEADERLESS[:1], golds=_listed_answers)),
    Format("DPR biencoder", lambda r: "positive_ctxs" in r,
           reader(ids=("question_id", "id"), dataset=_biencoder_set,
                  golds=_joined_answers,
                  passages=lambda r: _with_negatives(
                      r, "positive_ctxs", "hard_negative_ctxs", "negative_ctxs"))),
    Format("Tevatron", lambda r: {"query", "positive_passages"} <= r.keys(),
           reader(ids=("query_id",), questions=("query",), dataset=dataset_tagged,
                  passages=lambda r: _with_negatives(
                      r, "positive_passages", "negative_passages"))),
    # Only `isgold` marks a gold passage: `has_answer` says that a string occurs.
    Format("questions with contexts (FiD, NQ oracle)",
           lambda r: {"question", "ctxs"} <= r.keys(),
           reader(ids=("id", "question_id", "q_id"),
                  dataset=lambda r: dataset_marked(r)
                  if r.get("nq_annotated_gold") is None else "nq",
                  passages=lambda r: read_passages(
                      fields.required(r, "ctxs", object), "ctxs"))),
    Format("DPR gold passages (gold_info)", _fits_gold_info,
           reader(ids=("example_id", "id"),
                  dataset=lambda r: dataset_tagged(r) or "nq",
                  golds=_joined_answers, passages=_gold_passage)),
    Format("NQ original",
           lambda r: "document_html" in r
           or (isinstance(r.get("document"), dict) and "annotations" in r),
           refusal="holds whole HTML pages of Natural Questions' original release; "
           "give the simplified release, NQ-open or DPR's files"),
    Format("NQ simplified",
           lambda r: {"document_text", "question_text"} <= r.keys(),
           read_simplified, "nq"),
    # This layout is so plain that the file's name may name another set.
    Format("NQ-open", _fits_open,
           reader(ids=("id", "example_id"), dataset=dataset_tagged,
                  passages=any_passages), "nq", is_weak=True),
    Format("FlashRAG", lambda r: "golden_answers" in r, read_flashrag),
    Format("examples of this program",
           lambda r: {"golds", "question", "split", "dataset"} <= r.keys(),
           read_example),
    Format("KILT, ids alone", lambda r: _fits_kilt(r) and "input" not in r,
           refusal="names questions by id only, as KILT's TriviaQA does; give "
           "TriviaQA's own files"),
    # Its file names pages but does not have their text.
    Format("KILT", _fits_kilt,
           reader(dataset=lambda r: dataset_of_id(r.get("id")), questions=("input",),
                  golds=_kilt_answers)),
    Format("MuSiQue", _fits_musique, read_musique, "musique"),
    Format("2WikiMultihopQA", lambda r: _has_paragraphs(r) and is_twowiki(r),
           read_titled, "2wikimultihopqa"),
    Format("HotpotQA", _has_paragraphs, read_titled, "hotpotqa"),
    Format("RetrievalQA", lambda r: {"data_source", "ground_truth"} <= r.keys(),
           # Its passages were retrieved; none is marked gold.
           reader(ids=("question_id", "id"),
                  dataset=lambda r: dataset_named(r.get("data_source")),
                  passages=lambda r: read_passages(
                      r.get("context") or [], "context", is_supporting=False))),
    Format("IRCoT / Adaptive-RAG", _fits_ircot,
           reader(ids=("question_id",), questions=("question_text",),
                  dataset=lambda r: dataset_tagged(r)
                  or dataset_named(r.get("question_id")),
                  golds=_ircot_answers,
                  passages=lambda r: read_passages(
                      fields.required(r, "contexts", object), "contexts"))),
    Format("passages (FlashRAG corpus)",
           lambda r: "contents" in r and not {"question", "query"} & r.keys(),
           refusal=f"holds passages (a FlashRAG corpus), {_NOT_READ}"),
    Format("passages (titles and texts)",
           lambda r: {"title", "text"} <= r.keys()
           and not {"question", "query", "answers", "answer"} & r.keys(),
           refusal=f"holds passages (titles and texts, as psgs_w100.tsv), {_NOT_READ}"),
    Format("HotpotQA, questions and answers only", _fits_bare,
           reader(ids=("_id", "id"), dataset=_multihop_set, golds=_answer,
                  meta=lambda r: {"type": r["type"]}), is_weak=True),
    Format("questions and answers",
           lambda r: not {"question", "query"}.isdisjoint(map(str.lower, r)),
           read_plain, is_weak=True),
)  # fmt: skip
_STRONG_FIRST = sorted(FORMATS, key=lambda layout: layout.is_weak)


def recognise_record(record: Record) -> Format | None:
    """Return the first strong layout that fits a record, else the first weak one."""
    return next((layout for layout in _STRONG_FIRST if layout.fits(record)), None)


def choose_format(records: Iterable[Record]) -> Format | None:
    """Return the most frequent layout of a file's first records.

    A weak one, which damaged records fit as well, only counts if there is no other.
    """
    counts = collections.Counter(map(recognise_record, records))
    del counts[None]
    return min(
        (layout for layout in counts if layout is not None),
        key=lambda x: (x.is_weak, -counts[x], _STRONG_FIRST.index(x)),
        default=None,
    )
