"""Custom engines, up to a store and its rows, and plugs by name or entry point."""

import sys
from types import SimpleNamespace

import numpy as np
import pytest

from beatrice.extract import engines
from beatrice.extract.generate.answers import Engine, answer_with
from beatrice.extract.label.labels import label_by_match
from beatrice.extract.plugs import load_plug
from beatrice.extract.run.console import Progress
from beatrice.extract.run.contents import read_answers
from beatrice.extract.run.directory import RunDir
from beatrice.extract.run.process import Share
from beatrice.extract.run.stages import run_stage
from beatrice.extract.signals.extract import extract_stage
from beatrice.extract.store.store import open_store, read_family
from beatrice.jaxprobe.rows import rows_of
from tests.extract.small_run import make_run, questions

N_WORDS, D_MODEL = 50, 8
CONFIG = engines.ExtractConfig(dtype="float32", tokens_per_batch=4096)


class Words:
    """A fast tokenizer whose ids depend on words' first letters, with offsets."""

    is_fast, chat_template, unk_token_id = True, None, None
    bos_token_id = eos_token_id = 0
    all_special_ids, all_special_tokens, added_tokens_decoder = [], [], {}

    def __len__(self):
        return N_WORDS

    def __call__(self, text, **options):
        words, start, offsets = text.split(), 0, []
        for word in words:
            start = text.index(word, start)
            offsets.append((start, start + len(word)))
            start += len(word)
        ids = [1 + ord(word[0].lower()) % (N_WORDS - 1) for word in words]
        return {"input_ids": ids, "offset_mapping": offsets}


MODEL = engines.TokenizerOnly(Words(), name="words")


class LastWord:
    """A generator that repeats a prompt's second-to-last word, as two ids."""

    identity = {"backend": "last word", "revision": "1"}
    max_length = None

    def count_tokens(self, prompt):
        return len(prompt.ids)

    def stream(self, prompts, config, done=()):
        counts = {"log_probs": None, "n_prompt_tokens": None, "n_new_tokens": 3}
        for i in reversed(sorted(set(range(len(prompts))) - set(done))):
            word = prompts[i].text.split()[-2]
            ids = {"token_ids": (len(word), 7), "stop_id": 0, "finish": "stop"}
            yield i, engines.Generated(text=word, **ids, **counts)


class IdReader:
    """A reader whose signals are arrays made from only the ids."""

    hidden_layers, hidden_spans = (1,), "all"
    fingerprint = {"model": "one hot", "dtype": "float32"}
    shapes = {"hidden": (1, D_MODEL), "prob": (5,), "resid": (8,), "attn": (2, 2, 2, 1)}

    def start(self, sequences):
        # The next batch starts before this one's result is taken.
        batch = list(map(self.read, sequences))
        return SimpleNamespace(result=lambda: batch)

    def read(self, sequence):
        """Return one answer's signals, `[n_tokens, ...]` by family."""
        ids, next_ids = sequence.ids, sequence.targets
        return SimpleNamespace(
            hidden=np.eye(D_MODEL)[ids % D_MODEL][:, None],
            prob=np.repeat(ids[:, None], 5, axis=1) / N_WORDS,
            resid=np.repeat(next_ids[:, None], 8, axis=1) / N_WORDS,
            attn=np.zeros((len(ids), 2, 2, 2, 1)),
        )


def test_a_custom_engine_turns_questions_into_rows_of_a_store():
    examples = questions()
    prompts = engines.PromptConfig()
    requests = engines.make_requests(examples, MODEL, prompts, 2).requests
    sampling = engines.SamplingConfig(max_new_tokens=2)
    answers = list(engines.generate(LastWord(), requests, sampling))
    assert {answer.key for answer in answers} == {request.key for request in requests}
    labels = label_by_match(answers, examples)
    closed = [answer for answer in answers if answer.setting == "closed_book"]
    url = "memory://own-engine/"
    report = engines.extract(IdReader(), closed, url, CONFIG)
    assert report.n_missing == 0
    store = open_store(url)
    assert store.spec.fingerprint["model"] == "one hot"
    rows = rows_of(store, examples, labels)
    assert list(rows.ids) == [answer.example_id for answer in closed]
    ids = np.concatenate([[*a.prompt_ids, *a.token_ids] for a in closed])
    np.testing.assert_array_equal(
        read_family(store, "hidden", layer=1).values, np.eye(D_MODEL)[ids % D_MODEL]
    )


def test_stages_of_a_run_take_a_custom_engine(tmp_path):
    with RunDir.open(make_run(tmp_path / "run").path) as run:
        answer_with(run, Engine(LastWord(), MODEL), Progress())
        assert run.stage_done("answer")
        run_stage(extract_stage(lambda run, config: IdReader()), run, Progress())
        assert run.stage_done("extract")
        answers = read_answers(run, "closed_book")
        store = open_store(run.features("closed_book"))
        assert store.spec.keys == tuple(answer.key for answer in answers)
        assert {answer.stop_id for answer in answers} == {0}
        other = LastWord()
        other.identity = {"backend": "another"}
        with pytest.raises(ValueError, match="holds answers with backend='last word'"):
            answer_with(run, Engine(other, MODEL), Progress())
        with pytest.raises(ValueError, match="holds answers of a server"):
            run_stage(engines.ANSWER, run, Progress())
        assert run.stage_done("answer")


def test_a_worker_that_ends_last_finds_no_ranges_missing_in_any_setting(tmp_path):
    path = make_run(tmp_path / "run", questions(n_train=12)).path
    with RunDir.open(path) as run:
        answer_with(run, Engine(LastWord(), MODEL), Progress())
        n_closed_book = len(read_answers(run, "closed_book"))
    stage = extract_stage(lambda run, config: IdReader())
    config = engines.ExtractConfig(tokens_per_batch=96, rows_per_shard=64)

    def extract_share(rank, on_read=lambda done: None):
        """Extract one of two shares; return how many ranges are then missing."""
        with RunDir.open(path, share=Share(rank, 2)) as run:
            return stage.work(run, config, lambda done, _: on_read(done), Progress())

    n_missing = []  # for worker 1, during worker 0's second setting

    def on_read(done):
        if done > n_closed_book and not n_missing:
            n_missing.append(extract_share(1))

    assert extract_share(0, on_read) == 0 < n_missing[0]


GROUP = "beatrice.judges"


@pytest.fixture
def folder(working_folder):
    """The current folder; modules imported from it are unloaded afterwards."""
    before = set(sys.modules)
    yield working_folder
    for name in set(sys.modules) - before:
        del sys.modules[name]


def test_a_module_in_the_current_folder_can_import_its_neighbours(folder):
    (folder / "its_words.py").write_text("WORD = 'yes'\n")
    (folder / "strict_judge.py").write_text(
        "class Judges:\n"
        "    @staticmethod\n"
        "    def strict(text):\n"
        "        import its_words\n"
        "        return text == its_words.WORD\n"
    )
    strict = load_plug("strict_judge:Judges.strict", GROUP)
    assert strict("yes") and not strict("no")
    (folder / "json.py").write_text("loads = None\n")  # has no effect
    assert load_plug("json:loads", GROUP)("[1]") == [1]


def test_an_entry_point_of_the_group_is_loaded_by_its_name(folder):
    info = folder / "site" / "their_judges-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: their-judges\n")
    (info / "entry_points.txt").write_text(
        f"[{GROUP}]\nlenient = their_judges:lenient\nwhole = their_judges\n"
        "[beatrice.retrievers]\nother = their_judges:other\n"
    )
    (folder / "site" / "their_judges.py").write_text("lenient = 'a judge'\n")
    sys.path.append(str(folder / "site"))
    assert load_plug("lenient", GROUP) == "a judge"
    assert load_plug("whole", GROUP).lenient == "a judge"
    with pytest.raises(ValueError, match=r"'other'.*lenient"):
        load_plug("other", GROUP)


@pytest.mark.parametrize(
    ("spec", "named"),
    [
        ("nobody", ["nobody", GROUP]),
        ("no_such_module:judge", ["no_such_module", "no_such_module.py"]),
        ("no_such_package.inner:judge", ["no_such_package", "no_such_package.py"]),
        ("flawed:judge", ["flawed", "ModuleNotFoundError", "absent_library"]),
        ("failing:judge", ["failing", "ZeroDivisionError"]),
        ("script:judge", ["script", "SystemExit"]),
        ("sound:jugde", ["sound", "jugde", "judge"]),
        ("sound:judge.inner", ["sound", "judge.inner"]),
        ("sound:", ["sound:"]),
        ("runs/my judge:judge", ["runs/my judge:judge"]),
        (":judge", [":judge"]),
        (None, ["NoneType", GROUP]),
    ],
)
def test_a_plug_that_cannot_be_loaded_is_named_with_the_reason(folder, spec, named):
    (folder / "flawed.py").write_text("import absent_library\n")
    (folder / "failing.py").write_text("judge = 1 / 0\n")
    (folder / "script.py").write_text("import sys\njudge = len\nsys.exit()\n")
    (folder / "sound.py").write_text("judge = len\n")
    with pytest.raises(ValueError) as error:
        load_plug(spec, GROUP)
    for name in named:
        assert name in str(error.value)
