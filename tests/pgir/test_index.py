"""Dense retrieval finds what exact search finds, and refuses files of others."""

import dataclasses
import json
import multiprocessing
import os
import re
import resource
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor, wait

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoTokenizer, XLMRobertaConfig, XLMRobertaModel

from beatrice.benchmarks.baselines.detectors.clustering import load_pretrained
from beatrice.extract.run.files import seal, sha256_file, write_json_atomic
from beatrice.extract.signals.precision import loading_weights
from beatrice.pgir import index
from beatrice.pgir.corpus import as_document
from tests.extract.small_run import assert_error_sentence, beatrice
from tests.pgir.small import make_corpus, save_encoder, text_of
from tests.pretended_gpu import DEVICE, PretendedGpu
from tests.process import ROOT, forked, run_python
from tests.records import flip_bit

N = 300
NOTHING = lambda done, total: None  # noqa: E731
MEMORY = """
import resource, sys
from pathlib import Path
import faiss, numpy as np
from beatrice.extract.run.files import seal, sha256_file, write_json_atomic
from beatrice.pgir.index import *
folder, rows = Path(sys.argv[1]), np.ones((4096, 256), np.float16)
for i in range(17):  # an index grown by doubling has room for 32, beside the first 16
    np.save(folder / f"vectors-{i:05d}.npy", rows * i)
shards = {path.name: sha256_file(path) for path in folder.glob("*.npy")}
write_json_atomic(folder / "vectors.json", seal({"shards": shards}))
vectors, query = Vectors(folder), np.ones((1, 256), np.float32)
faiss.knn(query, query, 1)  # its threads
(line,) = (x for x in open("/proc/self/status") if x.startswith("VmData"))
most = int(line.split()[1]) * 1024 + 4096 * 256 * 4 * 17 * 3 // 2
resource.setrlimit(resource.RLIMIT_DATA, (most, most))
search = open_index(vectors, "flat")
assert search(query, k=1)[1] // 4096 == 16
"""


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    return index.TextEncoder(save_encoder(tmp_path_factory.mktemp("encoder") / "tiny"))


@pytest.fixture(scope="module")
def encoded(encoder, tmp_path_factory):
    """A corpus with an encoder and its vectors."""
    corpus = make_corpus(tmp_path_factory.mktemp("dense"), N)
    result = index.index_folder(corpus, "tiny")
    vectors = index.build_vectors(result, corpus, encoder, NOTHING, rows_per_shard=64)
    return corpus, encoder, vectors


@pytest.fixture(scope="module")
def built(encoded):
    """The same corpus, encoder and vectors with an index of each lossy form."""
    pytest.importorskip("faiss")
    for form in ("sq8", "ivf_pq"):
        index.build_index(encoded[-1], form)
    return encoded


def test_code_of_an_encoder_never_runs_even_if_a_user_agrees(tmp_path):
    path = save_encoder(tmp_path / "tiny").path
    code = f"from pathlib import Path\nPath({str(tmp_path / 'ran')!r}).touch()\n"
    (path / "code.py").write_text(code)
    config = json.loads((path / "config.json").read_text())
    config |= {"model_type": "mine", "auto_map": {"AutoConfig": "code.Config"}}
    (path / "config.json").write_text(json.dumps(config))
    program = (
        "import sys; from pathlib import Path; from beatrice.pgir import index\n"
        "index.TextEncoder(index.read_encoder_config(Path(sys.argv[1])))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(path)],
        cwd=ROOT,
        env={**os.environ, "HF_MODULES_CACHE": str(tmp_path / "modules")},
        input="y\ny\ny\n",
        text=True,
        capture_output=True,
        check=False,
    )
    assert "the argument `trust_remote_code=True` to allow" in done.stderr
    assert not (tmp_path / "ran").exists()


def test_an_encoder_whose_index_names_other_weights_is_refused(tmp_path):
    path = save_encoder(tmp_path / "tiny").path
    weights = load_file(path / "model.safetensors")
    torch.save(weights, path / "pytorch_model.bin")
    (path / "model.safetensors").rename(path / "decoy.safetensors")
    places = dict.fromkeys(weights, "pytorch_model.bin")
    index_file = {"metadata": {}, "weight_map": places}
    (path / "model.safetensors.index.json").write_text(json.dumps(index_file))
    with pytest.raises(ValueError, match="'pytorch_model.bin' as weights"):
        index.TextEncoder(index.read_encoder_config(path))


def test_a_batch_encodes_like_its_texts_one_by_one_to_unit_vectors(encoder):
    texts = [text_of(i) for i in range(9)] + ["river"]
    together = encoder.encode(texts, "passage")
    alone = np.concatenate([encoder.encode([text], "passage") for text in texts])
    # Padding changes the order of float32 sums.
    np.testing.assert_allclose(together, alone, atol=1e-5)
    np.testing.assert_allclose(np.linalg.norm(together, axis=1), 1, atol=1e-5)


def test_pooling_is_the_mean_over_the_tokens_of_the_text(encoder):
    result = encoder._tokenizer("river city", return_tensors="pt")
    with torch.inference_mode():
        states = encoder._model(**result).last_hidden_state[0].mean(0)
    (row,) = encoder.encode(["river city"], "query")
    np.testing.assert_allclose(row, states / states.norm(), atol=1e-5)


def test_an_encoder_gives_the_same_vectors_on_a_gpu_and_on_a_cpu(encoder):
    texts = [text_of(i) for i in range(9)]
    with PretendedGpu():
        on_gpu = index.TextEncoder(encoder.config)
        vectors = on_gpu.encode(texts, "passage")
        assert {x.device for x in on_gpu._model.parameters()} == {DEVICE}
    np.testing.assert_array_equal(vectors, encoder.encode(texts, "passage"))


def test_the_prefix_of_e5_is_put_before_a_text_unless_another_is_chosen(tmp_path):
    e5 = save_encoder(tmp_path / "e5-base-v2").path
    assert index.read_encoder_config(e5, query_prefix="ask: ").query_prefix == "ask: "
    plain, requests = (
        index.TextEncoder(index.read_encoder_config(e5, max_tokens=48, **prefix))
        for prefix in ({"query_prefix": ""}, {})
    )
    rows = requests.encode(["river"], "query"), plain.encode(["query: river"], "query")
    np.testing.assert_allclose(*rows, atol=1e-6)
    assert plain.identity != requests.identity
    trained = save_encoder(tmp_path / "multilingual-e5-large-instruct").path
    config = index.read_encoder_config(trained)  # was trained with a task, see its card
    assert config.query_prefix.startswith("Instruct: Given a web search query, ")
    assert config.query_prefix.endswith("\nQuery: ") and config.passage_prefix == ""


@pytest.mark.parametrize("prompts", [{"query": "", "document": ""}, None])
def test_e5_is_recognised_by_link_or_cache_folder_even_with_empty_prompts(
    tmp_path, prompts
):
    hub = tmp_path / "e5s" / "models--intfloat--e5-base-v2" / "snapshots" / "f52bf8ec"
    plain, link = tmp_path / "e5s" / "se57en", tmp_path / "my-e5"
    for path in (hub, plain):
        save_encoder(path)
        file = path / "config_sentence_transformers.json"
        file.write_text(json.dumps({"prompts": prompts}))
    link.symlink_to(plain)
    results = [index.read_encoder_config(path) for path in (hub, link, plain)]
    prefixes = [(result.query_prefix, result.passage_prefix) for result in results]
    assert prefixes == [("query: ", "passage: ")] * 2 + [("", "")]
    file.write_text(json.dumps({"prompts": {"query": "q ", "document": "d "}}))
    result = index.read_encoder_config(link)
    assert (result.query_prefix, result.passage_prefix) == ("q ", "d ")


MODES = ("mean_tokens", "cls_token", "max_tokens", "lasttoken")


def flags(*modes):
    """Return a pooling in the format of sentence-transformers before 5.4."""
    return {f"pooling_mode_{mode}": mode in modes for mode in MODES}


@pytest.mark.parametrize(
    ("pooling", "files"),
    [
        ("mean", ({"pooling_mode": "mean"}, flags("mean_tokens"))),
        ("mean", ({"pooling_mode": ["mean"]},)),
        ("cls", ({"pooling_mode": "cls"}, flags("cls_token"))),
        (None, ({"pooling_mode": "lasttoken"}, flags("lasttoken"))),
        (None, ({"pooling_mode": ["cls", "mean"]}, flags("cls_token", "mean_tokens"))),
        (None, ({"pooling_mode": None}, flags())),
    ],
)
def test_both_formats_of_a_pooling_are_read_and_other_poolings_are_refused(
    tmp_path, pooling, files
):
    path = save_encoder(tmp_path / "tiny").path
    (path / "1_Pooling").mkdir()
    for content in files:
        content = {"embedding_dimension": 16, "include_prompt": True, **content}
        (path / "1_Pooling" / "config.json").write_text(json.dumps(content))
        if pooling is None:
            with pytest.raises(ValueError, match="a pooling by mean or first token"):
                index.read_encoder_config(path)
        else:
            assert index.read_encoder_config(path).pooling == pooling


@pytest.mark.parametrize("library", ["models", "sentence_transformer.modules.any"])
def test_an_encoder_with_modules_that_would_not_be_run_is_refused(tmp_path, library):
    path = save_encoder(tmp_path / "tiny").path
    types = [f"{library}.{x}" for x in ("Transformer", "Pooling", "Normalize", "Dense")]
    types = [f"sentence_transformers.{name}" for name in types]

    def read(*types):
        content = [{"idx": i, "type": name} for i, name in enumerate(types)]
        (path / "modules.json").write_text(json.dumps(content))
        return index.read_encoder_config(path)

    assert read(*types[:3]).pooling == "mean"
    for foreign in (types[3], "custom_st.Transformer"):
        with pytest.raises(ValueError, match=f"modules.json: .* found '{foreign}'"):
            read(*types[:3], foreign)
    (path / "modules.json").unlink()
    (path / "1_Pooling").mkdir()
    (path / "1_Pooling" / "config.json").write_text('{"include_prompt": false}')
    assert index.read_encoder_config(path).passage_prefix == ""
    with pytest.raises(ValueError, match="found include_prompt false"):
        index.read_encoder_config(path, passage_prefix="passage: ")


def test_more_tokens_than_an_encoder_has_positions_are_refused(tmp_path):
    config = index.read_encoder_config(save_encoder(tmp_path / "tiny").path)
    with pytest.raises(ValueError, match="at most 64 tokens, not 256"):
        index.TextEncoder(config)
    bert = AutoConfig.from_pretrained(config.path).to_dict()
    del bert["model_type"], bert["architectures"]
    roberta = XLMRobertaConfig(**{**bert, "pad_token_id": 1})  # counts from 2
    XLMRobertaModel(roberta).save_pretrained(config.path)
    with pytest.raises(ValueError, match="at most 62 tokens, not 64"):
        index.TextEncoder(dataclasses.replace(config, max_tokens=64))
    encoder = index.TextEncoder(dataclasses.replace(config, max_tokens=62))
    assert np.isfinite(encoder.encode(["a " * 99], "passage")).all()


def test_passages_of_which_only_the_beginning_is_encoded_are_counted(tmp_path):
    pytest.importorskip("faiss")
    corpus, path = make_corpus(tmp_path / "c", 20), save_encoder(tmp_path / "tiny").path
    tokenizer = AutoTokenizer.from_pretrained(path)
    lengths = [len(tokenizer(as_document(p))["input_ids"]) for p in corpus]
    for n in (min(lengths), max(lengths)):
        words = ("corpus", corpus.folder, "--encoder", path, "--set", f"max_tokens={n}")
        n_cut = sum(length > n for length in lengths)
        for _ in range(2):  # a finished index says so again
            counts = re.findall(r"encode: (\d+) passages", beatrice(*words).stderr)
            assert counts == ([str(n_cut)] if n_cut else [])
        shutil.rmtree(corpus.folder / "index")
    assert min(lengths) < max(lengths)


@pytest.mark.parametrize("form", ["sq8", "ivf_pq"])
def test_flat_and_a_rescored_lossy_index_find_the_highest_inner_products(built, form):
    corpus, encoder, vectors = built
    queries = encoder.encode([text_of(i) for i in range(0, N, 7)], "query")
    dense = index.DenseRetriever(corpus, encoder)
    flat = dense.search_vectors(queries, 20)
    ties = dense.search_vectors(np.zeros_like(queries), 20)
    assert (np.diff(ties, axis=1) > 0).all()  # equal scores
    lossy = index.DenseRetriever(corpus, encoder, form)
    result = lossy.search_vectors(queries, 20)
    assert result.shape == (len(queries), 20) and (result >= 0).all()
    assert all(len(set(row)) == 20 for row in result.tolist())
    every = lossy.search_vectors(queries, N)  # more than the nearest lists can hold
    products = queries @ vectors.take(np.arange(N)).T
    scores, top = (np.take_along_axis(products, x, axis=1) for x in (every, flat))
    assert (np.diff(scores, axis=1) <= 1e-6).all()
    np.testing.assert_allclose(scores[:, :20], top, atol=1e-5)


def test_a_planted_passage_is_found_and_a_permuted_index_misses_it(built):
    corpus, encoder, vectors = built
    requests = [f'"Title {i}"\n{text_of(i)}' for i in range(0, N, 11)]
    result = index.DenseRetriever(corpus, encoder).search(requests, 3)
    planted = np.arange(0, N, 11)
    assert (result == planted[:, None]).any(axis=1).mean() > 0.95
    shuffled = np.random.default_rng(0).permutation(N)[result]
    assert (shuffled == planted[:, None]).any(axis=1).mean() < 0.2


def test_an_index_of_more_shards_than_a_process_may_open_is_built_and_read(tmp_path):
    pytest.importorskip("faiss")
    rows = np.eye(100, dtype=np.float16)
    for i in range(100):
        np.save(tmp_path / f"vectors-{i:05d}.npy", rows[i : i + 1])
    shards = {path.name: sha256_file(path) for path in tmp_path.glob("*.npy")}
    write_json_atomic(tmp_path / "vectors.json", seal({"shards": shards}))

    def child():
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
        vectors = index.Vectors(tmp_path)
        index.build_index(vectors, "sq8")
        for form in ("flat", "sq8"):
            index.open_index(vectors, form)
        assert (vectors.take(np.arange(100)) == rows).all()

    assert forked(child) == 0


@pytest.mark.parametrize(
    "load",
    [index.TextEncoder, lambda config: load_pretrained(config.path, "AutoModel", "")],
)
def test_an_encoder_is_loaded_after_the_model_of_another_thread(encoder, load):
    with ThreadPoolExecutor() as pool:
        with loading_weights(torch.float32):
            loading = pool.submit(load, encoder.config)
            wait([loading], timeout=0.5)
            assert not loading.done()
        assert loading.result()


def test_exact_search_holds_only_one_copy_of_its_vectors_in_memory(tmp_path):
    pytest.importorskip("faiss")
    run_python(MEMORY, tmp_path)


def build(corpus, encoder, on_shard):
    """Build both lossy indexes, in shards of 16 rows; report each one written anew."""
    folder = index.index_folder(corpus, "tiny")
    n_there = len([*folder.glob("vectors-*")])

    def update(done, total):
        if done > 16 * n_there:
            on_shard(done)

    vectors = index.build_vectors(folder, corpus, encoder, update, rows_per_shard=16)
    for form in ("sq8", "ivf_pq"):
        index.build_index(vectors, form)
    return folder


def kill_build(corpus, encoder, seconds, n_shards):
    """Start a build that waits after each shard, and kill it soon after some."""
    context = multiprocessing.get_context("fork")
    near, far = context.Pipe()

    def on_shard(done):
        far.send(done)
        time.sleep(seconds)

    process = context.Process(target=build, args=(corpus, encoder, on_shard))
    process.start()
    far.close()  # so that a build that fails ends the wait
    for _ in range(n_shards):
        near.recv()
    time.sleep(0.02)  # somewhere within a shard
    process.kill()
    process.join()


@pytest.mark.filterwarnings(r"ignore:os\.fork")  # JAX warns if other tests loaded it
@pytest.mark.filterwarnings("ignore:this process was forked")  # likewise of a model
def test_a_build_killed_again_and_again_gives_the_same_bytes(encoder, tmp_path):
    pytest.importorskip("faiss")
    corpus = make_corpus(tmp_path, N)
    whole = build(corpus, encoder, print)
    expected = {p.name: p.read_bytes() for p in whole.iterdir()}
    shutil.rmtree(whole)
    for _ in range(2):  # each after one more shard
        kill_build(corpus, encoder, 30, n_shards=1)
        assert not (whole / "vectors.json").exists()
    kill_build(corpus, encoder, 0.05, n_shards=4)
    build(corpus, encoder, print)
    built = {p.name: p.read_bytes() for p in whole.iterdir() if p.suffix != ".tmp"}
    assert built == expected


@pytest.fixture
def copied(encoded, tmp_path):
    """A copy of corpus and vectors that a test may damage."""
    corpus, encoder, _ = encoded
    folder = tmp_path / "corpus"
    shutil.copytree(corpus.folder, folder)
    return type(corpus)(folder), encoder


def test_one_flipped_bit_of_an_index_is_refused_by_name(built, copied):
    corpus, encoder = copied
    folder = index.index_folder(corpus, "tiny")
    flip_bit(folder / "sq8.faiss")
    with pytest.raises(ValueError, match=r"sq8\.faiss is damaged"):
        index.DenseRetriever(corpus, encoder, "sq8")
    assert len(index.DenseRetriever(corpus, encoder).search(["river"], 2)[0]) == 2
    flip_bit(folder / "vectors-00001.npy")
    with pytest.raises(ValueError, match=r"vectors-00001\.npy is damaged"):
        index.DenseRetriever(corpus, encoder)


def test_deleted_vectors_are_built_again_to_the_same_bytes(copied):
    corpus, encoder = copied
    folder = index.index_folder(corpus, "tiny")
    expected = (folder / "vectors-00001.npy").read_bytes()
    (folder / "vectors-00001.npy").unlink()
    (folder / "vectors.json").unlink()
    index.build_vectors(folder, corpus, encoder, NOTHING)
    assert (folder / "vectors-00001.npy").read_bytes() == expected


def test_an_index_of_another_encoder_or_corpus_is_refused_by_name(copied, tmp_path):
    corpus, encoder = copied
    other = index.TextEncoder(save_encoder(tmp_path / "x" / "tiny", seed=1))
    with pytest.raises(ValueError, match="by another encoder"):
        index.DenseRetriever(corpus, other)
    folder = index.index_folder(corpus, "tiny")
    with pytest.raises(ValueError, match="by another encoder"):
        index.build_vectors(folder, corpus, other, NOTHING)
    other = make_corpus(tmp_path / "other", N - 1)
    shutil.copytree(*(index.index_folder(x, "tiny") for x in (corpus, other)))
    with pytest.raises(ValueError, match="on another corpus"):
        index.DenseRetriever(other, encoder)


def test_a_form_that_was_not_built_is_an_error_that_names_its_option(built, tmp_path):
    corpus, encoder, vectors = built
    shutil.copytree(vectors.folder, tmp_path / "own")
    (tmp_path / "own" / "ivf_pq.json").unlink()
    with pytest.raises(ValueError, match="--index ivf_pq"):
        index.open_index(index.Vectors(tmp_path / "own"), "ivf_pq")


def test_without_faiss_one_sentence_says_what_to_install(encoded):
    corpus, encoder, _ = encoded
    words = ["corpus", corpus.folder, "--retriever", "dense", "--search", "x"]
    words += ["--encoder", encoder.config.path, "--set", "max_tokens=48"]

    def child():
        sys.modules["faiss"] = None
        torch.set_num_threads(1)  # more do not survive a fork, as a warning would say
        done = beatrice(*words, code=1)
        assert_error_sentence(done, "pip install 'beatrice-probe[dense]'")

    assert forked(child) == 0
