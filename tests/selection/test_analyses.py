"""Analyses of a detector for which it is known which signals know the truth.

Hidden states of layer 1 know it at the answer's second token; one attention head knows
a little in the whole answer; probabilities and residual contributions know nothing.
"""

import dataclasses
import json
import shutil
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
from click.testing import CliRunner
from sklearn.metrics import roc_auc_score

from beatrice.benchmarks.results.tables import find, results_of
from beatrice.cli import main
from beatrice.extract.records import IN_DOMAIN, SETTINGS, Passage
from beatrice.extract.run.directory import RunDir
from beatrice.extract.run.rows import encoder, read_rows, rows_file
from beatrice.extract.store.spec import Family
from beatrice.jaxprobe.checkpoint import Cache
from beatrice.jaxprobe.config import (
    EncoderConfig,
    FusionConfig,
    GridConfig,
    SelectConfig,
    TrainConfig,
)
from beatrice.jaxprobe.encoder import MemberOutputs
from beatrice.jaxprobe.evaluation import DetectorScores, detection_rows
from beatrice.jaxprobe.families import LETTERS, N_SUBSETS, subset_index
from beatrice.jaxprobe.metrics import BootstrapConfig
from beatrice.jaxprobe.rows import training_set
from beatrice.jaxprobe.train import train_encoders
from beatrice.selection import decisions, places, reach
from beatrice.selection.ablation import Ablation, span_variants
from beatrice.selection.analysis import Deployed, QuestionTexts, Search
from beatrice.selection.anatomy import ANATOMY
from beatrice.selection.exhaustive import Ranking, all_sets, traits
from tests.extract.small_run import beatrice
from tests.jaxprobe.samples import rows_like, store_like
from tests.records import an_answer, an_example

# Columns of rows of shares; each row has values in at most two of them.
WHOLE = {"span": None, "family": None, "position": None, "kind": None}
N_QUESTION, N_ANSWER = 3, 4
N_TOKENS = N_QUESTION + N_ANSWER
N_LAYERS, N_HEADS, HEAD = 2, 5, (1, 3)
FAMILIES = {
    "hidden": Family(shape=(3, 4), by_layer=True),
    "prob": Family(shape=(5,)),
    "resid": Family(shape=(2,)),
    "attn": Family(shape=(2, 2, N_LAYERS, N_HEADS)),
}
SPLITS = {"train": 140, "validation": 60, "test": 90, "ood": 240}
GRID = GridConfig(
    encoder=EncoderConfig(
        projection=2, hidden=4, n_blocks=1, n_groups=1, is_linear_first=True
    ),
    train=TrainConfig(batch_size=64, max_epochs=1, n_seeds=1, n_microbatches=1),
)


@pytest.fixture(scope="module")
def deployed():
    rng, n = np.random.default_rng(3), sum(SPLITS.values())
    splits = np.repeat(list(SPLITS), list(SPLITS.values()))
    sets = np.where(splits == "ood", "held", np.array(["one", "two"])[np.arange(n) % 2])
    rows = rows_like(rng.random(n) < 0.5, datasets=sets, splits=splits)
    truth = np.where(rows.labels, 1.0, -1.0)
    values = {
        name: rng.standard_normal((n, N_TOKENS, *family.shape), np.float32)
        for name, family in FAMILIES.items()
    }
    values["hidden"][:, N_QUESTION + 1, 1, 0] += 6.0 * truth
    values["attn"][:, N_QUESTION:, :, :, *HEAD] += 0.5 * truth[:, None, None, None]
    spans = [[(0, 0), (0, N_QUESTION), (N_QUESTION, N_TOKENS)]] * n
    store = store_like(
        "memory://analyses/",
        FAMILIES,
        spans,
        {name: x.reshape(n * N_TOKENS, *x.shape[2:]) for name, x in values.items()},
        rows_per_shard=1 << 12,
        hidden_layers=(0, 1, 2),
    )
    trained, outputs = train_encoders(
        training_set(store, rows, layer=1, n_batch=64), GRID
    )
    return Deployed(
        setting="closed_book",
        store=store,
        rows=rows,
        layer=1,
        tree={"params": trained.params, "outputs": outputs._asdict()},
        config=GRID,
        selected=("HA",),
        bootstrap=BootstrapConfig(n_resamples=100, seed=0),
    )


def values_in(results, **usual):
    """A function that finds the value of the row of a metric and other columns."""
    return lambda metric, **columns: (
        find(results, metric=metric, **usual | columns).value
    )


def inputs_of(deployed, **fields):
    """What an analysis reads, of one setting."""
    usual = {"settings": {deployed.setting: deployed}, "without_hidden": {}}
    return SimpleNamespace(**usual | fields)


def test_a_family_that_knows_corrects_mistakes_of_one_that_knows_nothing(deployed):
    results = results_of(decisions.complementarity(deployed))
    for split, dataset in (("ood", "held"), ("test", IN_DOMAIN)):
        value = values_in(results, family=None, split=split, dataset=dataset)
        assert value("error_rate", families="H") < 0.05
        assert 0.3 < value("error_rate", families="P") < 0.7
        assert value("rights", families="H", family="P") > 0.9
    where = deployed.rows.where("test")
    labels, wrong = deployed.rows.labels[where], {}
    for letter in LETTERS:  # again, from ranks
        ranks = deployed.logits_of(letter)[0, where].argsort().argsort()
        wrong[letter] = (ranks >= (~labels).sum()) != labels
        expected = wrong[letter].mean()
        assert value("error_rate", families=letter) == pytest.approx(expected)
    corrected = (wrong["P"] & ~wrong["A"]).sum() / wrong["P"].sum()
    assert value("rights", families="A", family="P") == pytest.approx(corrected)


def test_pairs_and_the_selected_set_are_compared_with_others_by_auroc(deployed):
    def auroc(scores, split="test"):
        where = deployed.rows.where(split)
        return roc_auc_score(deployed.rows.labels[where], scores[0, where])

    pairs = results_of(decisions.pairs(deployed))
    noise = np.random.default_rng(0).random((1, len(deployed.rows.labels)))
    scores = {"champion": deployed.logits_of("HA"), "random": noise}
    inputs = SimpleNamespace(
        settings={"with_context": deployed},  # alone: no head reads two passes
        searches={"with_context": Search((("with_context", "HA"),), scores)},
        without_hidden={"with_context": deployed.logits_of("PRA")},
    )
    fusion = results_of(decisions.fusion(inputs))
    for split, dataset in (("test", IN_DOMAIN), ("ood", "held")):
        at = {"split": split, "dataset": dataset, "seed": "mean"}
        for pair, letter in (("HP", "P"), ("HP", "H"), ("RA", "R")):
            gain = auroc(deployed.logits_of(pair), split)
            gain -= auroc(deployed.logits_of(letter), split)
            against = {
                "families": pair,
                "against": "encoder",
                "against_families": letter,
            }
            assert find(pairs, **at, **against).value == pytest.approx(gain, abs=1e-6)
        rivals = {"random": noise, "hidden_only": deployed.logits_of("H")}
        rivals["early_fusion"] = deployed.logits_of("HPRA")
        rivals["without_family"] = deployed.logits_of("PRA")
        for name, rival in rivals.items():
            gain = auroc(scores["champion"], split) - auroc(rival, split)
            row = find(fusion, **at, against=name)
            assert row.value == pytest.approx(gain, abs=1e-6)


def test_the_decisions_of_an_encoder_depend_on_the_family_that_knows(deployed):
    results = results_of(decisions.flips(deployed))
    at = {"dataset": IN_DOMAIN, "split": "test"}
    value = values_in(results, **at, families="HPRA", family=None)
    assert value("accuracy") > 0.95
    assert 0.35 < value("flip_rate", family="H")
    assert value("flip_precision", family="H") > 0.9
    moved = value("mean_contribution", family="H")
    for family in "PR":
        assert value("flip_rate", family=family) < 0.05
        assert value("mean_contribution", family=family) < moved / 5
    labels = deployed.rows.labels[deployed.rows.where("test")]
    assert find(results, metric="right", **at).value == pytest.approx(labels.mean())


def test_the_attention_head_that_knows_moves_the_logit_most(deployed):
    value = values_in(results_of(places.heads(deployed)), families="A")
    heads = np.ndindex(N_LAYERS, N_HEADS)
    shares = {at: value("share", layer=at[0], head=at[1]) for at in heads}
    assert max(shares, key=shares.get) == HEAD
    assert sum(shares.values()) == pytest.approx(1.0)
    assert value("incompleteness") < 0.01
    assert value("even_share_of_top_heads") == 0.8 < value("share_of_top_heads")
    assert value("moved_more_by_top_heads") == pytest.approx(
        value("moved_by_top_heads") - value("moved_by_random_heads")
    )
    assert value("moved_more_by_top_heads") > 0


def test_heads_found_on_the_first_half_of_the_answers_are_measured_on_the_second(
    deployed,
):
    where = places.attributed_rows(deployed)
    half = len(where) // 2
    is_top = np.arange(N_LAYERS * N_HEADS).reshape(N_LAYERS, N_HEADS) >= 2
    sums = np.ones((len(where), N_LAYERS, N_HEADS))
    sums[:half, is_top] = 9.0  # large only in the first half
    at = deployed.set_fields(IN_DOMAIN, "test")
    results = results_of(places._head_rows(deployed, "A", where, sums, at))
    share = find(results, metric="share_of_top_heads")
    assert (share.value, share.n) == (pytest.approx(0.8), len(where) - half)
    gone = [
        places.channels_of_heads(deployed.dims, deployed.n_spans, cells)
        for cells in (is_top & ~is_top, is_top)
    ]
    ((intact, without),) = deployed.logits_without(["A"], where[half:], gone)
    moved = find(results, metric="moved_by_top_heads").value
    assert moved == pytest.approx(np.abs(without - intact).mean(), rel=1e-3)


@pytest.mark.parametrize(("n", "is_clear"), [(4, False), (40, True)])
def test_heads_are_not_shown_to_move_more_on_two_answers(deployed, n, is_clear):
    where = places.attributed_rows(deployed)[:n]
    sums, _ = places.head_sums(deployed, "A", where)
    at = deployed.set_fields(IN_DOMAIN, "test")
    results = results_of(places._head_rows(deployed, "A", where, sums, at))
    row = find(results, metric="moved_more_by_top_heads")
    assert (row.ci_low > 0) == is_clear and row.value > 0


def test_the_token_span_and_layer_that_know_are_found(deployed):
    value = values_in(results_of(places.positions(deployed)), **WHOLE)
    by_position = [value("share", position=k) for k in range(1, N_ANSWER + 1)]
    assert np.argmax(by_position) == 1 and by_position[1] > 0.5
    assert value("share", span="answer") > value("token_share", span="answer")
    assert value("share", span="answer", family="H") > 0.5
    gone = results_of(places.spans_gone(deployed))
    at = {"families": "HPRA", "dataset": "held", "metric": "auroc", "seed": "mean"}
    at |= {"experiment": "anatomy_spans"}
    lost = {
        span: find(gone, **at, span=span, against="encoder").value
        for span in ("question", "answer")
    }
    assert lost["answer"] < -0.4 and abs(lost["question"]) < 0.02
    layers = results_of(places.layers(deployed))
    at = {"dataset": "held", "seed": "mean"}
    aurocs = [find(layers, **at, layer=layer).value for layer in range(3)]
    assert aurocs[1] > 0.95 and max(aurocs[0], aurocs[2]) < 0.65


def test_with_few_labels_only_the_family_that_knows_is_learned(deployed, tmp_path):
    search = Search((("closed_book", "H"), ("closed_book", "HA")), {})
    folder = tmp_path / "members"
    inputs = inputs_of(deployed, searches={"closed_book": search}, folder=folder)
    results = results_of(reach.learning_curve(inputs))
    at = {"metric": "auroc", "dataset": "held", "seed": "mean"}
    for detector, n_labels in (("probe", 100), ("probe", 200), ("encoder", 100)):
        columns = at | {"detector": detector, "n_labels": n_labels}
        assert find(results, **columns, families="H").value > 0.9
        assert abs(find(results, **columns, families="P").value - 0.5) < 0.15
    assert find(results, **at, detector="selected", n_labels=100).value > 0.9
    n = SPLITS["train"] + SPLITS["validation"]
    assert find(results, metric="labels").value == n
    assert not folder.exists()
    searches = {"single_pass": search, "with_context": Search((), {})}
    both = inputs_of(deployed, searches=searches)
    assert reach.selected_members(both, "with_context") == ["H", "HA"]  # of its pass


def test_a_sample_with_a_single_right_training_answer_trains_no_encoder(
    deployed, tmp_path
):
    rows, order = deployed.rows, np.arange(20)  # every fifth is for validation
    labels = np.isin(np.arange(len(rows.labels)), [0, 4, SPLITS["train"]])
    few = dataclasses.replace(deployed, rows=dataclasses.replace(rows, labels=labels))
    trainer = reach.SmallSampleTrainer(few, order, len(order), tmp_path)
    assert trainer.scores(["H"], order, order) is None


def test_members_of_a_killed_analysis_are_not_reused_with_other_inputs(
    deployed, tmp_path
):
    taken = np.arange(40)

    def cache_of(**changes):
        changed = dataclasses.replace(deployed, **changes)
        return reach.SmallSampleTrainer(changed, taken, 100, tmp_path).cache(taken)

    cache_of().save("member", {"weights": np.ones(3)})
    assert cache_of().load("member") is not None
    labels = deployed.rows.labels ^ (np.arange(len(deployed.rows.labels)) == 7)
    longer = dataclasses.replace(deployed.config.train, max_epochs=99)
    for changes in (
        {"rows": dataclasses.replace(deployed.rows, labels=labels)},
        {"layer": deployed.layer + 1},
        {"store": dataclasses.replace(deployed.store, id="another")},
        {"config": dataclasses.replace(deployed.config, train=longer)},
    ):
        assert cache_of(**changes).load("member") is None


def test_a_set_in_which_signals_mean_the_opposite_teaches_the_opposite(
    deployed, tmp_path
):
    rows = deployed.rows
    labels = rows.labels ^ (rows.datasets == "two")
    # One set has one question, of the half that trains nothing; another has too few.
    held = rows.where("ood")
    datasets, is_teaching = rows.datasets.copy(), reach._half(rows.ids[held])
    datasets[held[~is_teaching][0]] = "lone"
    datasets[held[is_teaching][:9]] = "few"
    turned = dataclasses.replace(
        deployed, rows=dataclasses.replace(rows, labels=labels, datasets=datasets)
    )
    inputs = inputs_of(turned, folder=tmp_path / "members")
    results = results_of(reach.transfer(inputs))
    for detector in ("probe", "encoder"):
        for source, dataset, is_known in (
            ("one", "one", True),
            ("one", "held", True),
            ("held", "one", True),
            ("held", "held", True),
            ("two", "two", True),
            ("one", "two", False),
            ("two", "held", False),
        ):
            at = {"metric": "auroc", "dataset": dataset, "seed": "mean"}
            value = find(results, **at, detector=detector, source=source).value
            assert value > 0.9 if is_known else value < 0.1
        at = {"detector": detector, "dataset": "held", "seed": "mean"}
        for source in ("lone", "few"):  # have a row with the reason
            row = find(results, **at, source=source)
            assert (row.value, row.n_labels) == (None, 0) and "too few" in row.reason
        # Only the half of the held-out set that trains nothing is evaluated.
        row = find(results, **at, source="one")
        assert 0.3 * SPLITS["ood"] < row.n < 0.7 * SPLITS["ood"]
        least = is_teaching.sum() - 9
        assert row.n_labels == min(least, (SPLITS["train"] + SPLITS["validation"]) / 2)


def test_backbones_rank_encoders_alike_or_in_reverse(deployed):
    outputs = deployed.tree["outputs"]
    turned = {"outputs": outputs | {"logits": -outputs["logits"]}}
    for tree, expected in ((deployed.tree, 1.0), (turned, -1.0)):
        other = {"closed_book": dataclasses.replace(deployed, tree=tree)}
        inputs = inputs_of(deployed, other=other, models=("small", "large"))
        results = results_of(reach.backbones(inputs))
        row = find(results, metric="spearman")
        assert row.value == pytest.approx(expected) and row.n == N_SUBSETS
        assert (row.ci_low, row.ci_high) == pytest.approx((expected, expected))
        second = find(results, kind="second", families="H", metric="auroc")
        assert second.source == "large"
        assert second.value > 0.95 if expected > 0 else second.value < 0.05
    first = find(results, kind="first", families="H", metric="auroc")
    scored = DetectorScores(name=encoder("H"), scores=deployed.logits_of("H"))
    detected = results_of(detection_rows([scored], deployed.rows, deployed.bootstrap))
    at = {"split": "test", "dataset": IN_DOMAIN, "metric": "auroc", "seed": "mean"}
    row = find(detected, **at)  # the same AUROC has the same interval
    for end in ("value", "ci_low", "ci_high"):
        assert getattr(first, end) == pytest.approx(getattr(row, end))
    with pytest.raises(ValueError, match="no setting in common"):
        reach.backbones(inputs_of(deployed, other={"with_context": deployed}))
    rows = deployed.rows
    known = dataclasses.replace(rows, is_labelled=rows.splits == "ood")
    other = {"closed_book": dataclasses.replace(deployed, rows=known)}
    results = results_of(reach.backbones(inputs_of(deployed, other=other)))
    assert set(results.experiment) == {reach.OTHER_PAIRS}  # without test answers


def test_without_the_span_or_family_that_knows_scores_are_worse(deployed, tmp_path):
    search = SelectConfig(
        head=FusionConfig(hidden=4, n_slots=2),
        train=TrainConfig(batch_size=64, max_epochs=0, n_seeds=1),  # the mean logit
    )
    settings = {"closed_book": tuple(map(subset_index, ("H", "HPRA")))}
    outputs = MemberOutputs(**deployed.tree["outputs"])
    ablation = Ablation(
        champions=settings,
        rows={"closed_book": deployed.rows},
        read_outputs=lambda setting: outputs,
        read_training_set=lambda setting: training_set(
            deployed.store, deployed.rows, layer=1, n_batch=64
        ),
        grid=GRID,
        config=search,
        cache=Cache(tmp_path, "a key"),
    )
    epochs, again, variants = [], [], []
    ablation.train_without_spans("closed_book", epochs.append)
    ablation.fit_variants("closed_book", lambda: variants.append("fitted"))
    assert len(variants) == 4 + 4
    # As after a kill between the last encoder and the deletion of all parts.
    (tmp_path / f"closed_book.{span_variants('closed_book')[0]}.members").mkdir()
    ablation.train_without_spans("closed_book", again.append)
    assert sum(epochs) == sum(again) == 2 * 4 * GRID.train.max_epochs
    assert not list(tmp_path.glob("*.members"))
    results = results_of(ablation.result_rows("closed_book", deployed.bootstrap))
    auroc = partial(values_in(results, dataset="held", seed="mean"), "auroc")
    assert auroc(detector="champion", kind="encoders") > 0.95
    for way in ("zeroed_span", "without_span"):
        for kind in ("encoders", None):
            assert auroc(detector=way, span="question", kind=kind) > 0.95
            assert 0.35 < auroc(detector=way, span="answer", kind=kind) < 0.65
    families = partial(auroc, detector="without_family")
    assert families(families="HRA") > 0.95
    assert 0.7 < families(families="PRA") < families(families="HPR")


def test_the_best_sets_of_a_ranking_are_described_by_what_they_read():
    by_trait = traits("with_context", 2 * N_SUBSETS)
    is_closed = by_trait["H", "closed_book"] | by_trait["P", "closed_book"]
    is_closed |= by_trait["R", "closed_book"] | by_trait["A", "closed_book"]
    sets = all_sets(2 * N_SUBSETS, 3)
    n_closed = is_closed[sets].sum(axis=1)
    n_hidden = by_trait["H", "with_context"][sets].sum(axis=1)
    aurocs = 0.5 + 0.2 * (n_closed == 1) + 0.1 * (n_hidden == 2)
    ranking = Ranking(sets, aurocs[:, None].astype(np.float32))
    inputs = inputs_of(
        Pass("with_context", [0], [0]), rankings={"with_context": ranking}
    )
    value = values_in(results_of(decisions.combinations(inputs)))
    hidden = {"family": "H", "kind": "with_context"}
    assert value("encoders_in_best_set", **hidden) == 2.0
    mean = 3 * by_trait["H", "with_context"].mean()
    assert value("encoders_in_set", **hidden) == pytest.approx(mean)
    best = [value("best_sets", n_closed_book=k) for k in range(4)]
    assert best == [0.0, 10.0, 0.0, 0.0]
    assert value("share", n_closed_book=1, bin=1) == 1.0
    assert value("share", n_closed_book=1, bin=20) == 0.0
    for k in (1, 20):
        shares = [value("share", n_closed_book=n, bin=k) for n in range(4)]
        assert sum(shares) == pytest.approx(1.0)
    # A run asked only with context has no closed-book encoders to count.
    ranking = Ranking(all_sets(N_SUBSETS, 3), np.zeros((455, 1), np.float32))
    alone = inputs_of(
        Pass("with_context", [0], [0]), rankings={"with_context": ranking}
    )
    metrics = {row.metric for row in decisions.combinations(alone)}
    assert metrics == {"encoders_in_best_set", "encoders_in_set"}


class Pass:
    """A pass over questions `q0`, `q1`, … in some order, with made-up scores."""

    queried = ("HPRA", "HP")
    bootstrap = BootstrapConfig(n_resamples=50, seed=0)

    def __init__(self, setting, order, labels, p=None, without=None):
        self.setting, self.order = setting, np.asarray(order)
        ids = [f"q{i}" for i in order]
        n = len(order)
        fields = {"ids": ids, "splits": ["test"] * n, "datasets": ["one"] * n}
        self.rows = rows_like(np.asarray(labels, bool)[self.order], setting, **fields)
        self.judged = np.arange(n)
        self.p, self._without = p, without

    def of_rows(self, values):
        return np.asarray(values, float)[None, self.order]

    def intact(self, name):
        return self.of_rows(self.p) - 0.5

    def without(self, name, letter):
        assert letter == "A" and "A" in name
        return self.of_rows(self._without) - 0.5

    def set_fields(self, dataset, split):
        return {"setting": self.setting, "dataset": dataset, "split": split}


QUESTIONS = {
    f"q{i}": an_example(
        id=f"q{i}",
        golds=(f"gold{i}",),
        passages=(Passage(title="", text=f"has word{i}"),),
    )
    for i in range(6)
}


def texts_of(*answers):
    by_key = {(a.example_id, a.setting, a.variant): a for a in answers}
    return lambda: QuestionTexts(QUESTIONS, by_key)


def test_decisions_of_both_passes_are_matched_by_question_in_any_order():
    closed = Pass("closed_book", [3, 1, 0, 2, 5, 4], [1, 0, 0, 0, 1, 0])
    shown = Pass("with_context", [0, 1, 2, 3, 4, 5], [0, 0, 1, 0, 1, 0])
    p_closed, p_shown = [0.9, 0.8, 0.1, 0.2, 0.3, 0.7], [0.1, 0.2, 0.9, 0.95, 0.1, 0.9]

    def head(threshold):
        trust = SimpleNamespace(p_correct=threshold)
        thresholds = SimpleNamespace(trust=trust)
        return SimpleNamespace(calibrator=lambda x: x, thresholds=lambda: thresholds)

    settings = {x.setting: x for x in (closed, shown)}
    ps = {"closed_book": p_closed, "with_context": p_shown}
    answers = [
        an_answer(example_id=f"q{i}", setting=setting, text=f"{setting} {i}")
        for setting in settings
        for i in range(6)
    ]
    inputs = SimpleNamespace(
        settings=settings,
        heads={"closed_book": head(0.75), "with_context": head(None)},  # None: .6
        searches={
            s: Search((), {"champion": x.of_rows(ps[s])}) for s, x in settings.items()
        },
        read_texts=texts_of(*answers),
    )
    output = decisions.cases(inputs)
    rows = [row for row in output if hasattr(row, "metric")]
    value = values_in(results_of(rows), dataset=IN_DOMAIN)
    # q0 and q1 are accepted, q2, q3 and q5 are trusted, and q4 is flagged.
    expected = {"accepted closed-book": (2, 1), "trusted with context": (3, 1)}
    expected |= {"both flagged": (1, 1)}
    for kind, (n, n_right) in expected.items():
        assert value("share", kind=kind) == pytest.approx(n / 6)
        assert value("right", kind=kind) == pytest.approx(n_right / n)
    studies = {x.kind: x for x in output if not hasattr(x, "metric")}
    assert {kind: x.gold for kind, x in studies.items()} == {
        "accepted closed-book": "gold0",
        "trusted with context": "gold3",
        "both flagged": "gold4",
    }
    study = studies["trusted with context"]
    assert (study.closed_book, study.with_context) == (
        "closed_book 3",
        "with_context 3",
    )
    assert (study.p_closed_book, study.p_with_context) == (0.2, 0.95)
    assert (study.is_closed_book_right, study.is_with_context_right) == (False, False)


def test_flips_by_attention_are_counted_if_support_and_truth_disagree():
    labels = [1, 0, 0, 1, 1, 0]
    # Attention flips every second decision; passages hold the answers to q0, q1 and q2.
    p, without = [0.9, 0.9, 0.8, 0.8, 0.9, 0.1], [0.1, 0.9, 0.2, 0.9, 0.2, 0.3]
    shown = Pass("with_context", [4, 2, 0, 1, 3, 5], labels, p, without)
    closed = Pass("closed_book", [0, 1, 2], [0, 1, 1])  # the others were not asked
    answers = [
        an_answer(
            example_id=f"q{i}",
            setting="with_context",
            text=f"word{i}" if i < 3 else "another",
            context_span=(0, 1),
        )
        for i in range(6)
    ]
    inputs = SimpleNamespace(
        settings={"closed_book": closed, "with_context": shown},
        read_texts=texts_of(*answers),
    )
    results = results_of(decisions.grounding(inputs))

    at = {"dataset": IN_DOMAIN, "kind": None, "families": None}
    value = values_in(results, **at)
    assert value("right_with_context") == pytest.approx(3 / 6)
    row = find(results, metric="right_closed_book", **at)
    assert (row.value, row.n) == (pytest.approx(2 / 3), 3)
    assert value("wrong_in_passage") == pytest.approx(2 / 3)
    assert value("right_in_passage") == pytest.approx(1 / 3)
    # Decisions flip at q0, q2 and q4; the answer to q2 is in the passage but wrong.
    assert value("flip_precision", families="HPRA") == pytest.approx(2 / 3)
    wrong = {"kind": "in_passage_but_wrong", "families": "HPRA"}  # q1 and q2
    assert value("flip_rate", **wrong) == pytest.approx(1 / 2)
    assert value("flip_precision", **wrong) == 0.0
    at |= {"kind": "right_not_in_passage", "families": "HPRA"}
    unsupported = find(results, metric="flip_precision", **at)
    assert (unsupported.value, unsupported.n) == (1.0, 1)  # q4 of q3 and q4
    assert {*results["families"].dropna()} == {"HPRA"}  # HP reads no attention


def test_an_analysis_requested_later_keeps_the_results_of_others(smoke_run, tmp_path):
    run = RunDir(shutil.copytree(smoke_run, tmp_path / "run"))

    def ask_for(*names):
        words = [word for name in names for word in ("--only", name)]
        done = CliRunner().invoke(main, ["anatomy", str(run.path), *words])
        assert done.exit_code == 0, done.output
        studies = json.loads((run.path / "anatomy" / "cases.json").read_text())
        return done.stderr, [*read_rows(rows_file(run, "anatomy"))], studies

    notes, rows, studies = ask_for("complementarity", "combinations")
    assert {row.experiment for row in rows} == {"anatomy_complementarity"}
    assert "combinations needs the ranking of `beatrice select" in notes and not studies
    notes, more, studies = ask_for("cases")
    assert "complementarity took" not in notes
    assert [x for x in more if x.experiment == "anatomy_complementarity"] == rows
    judged = {x.dataset for x in more if x.experiment == "anatomy_cases"}
    assert {x["dataset"] for x in studies} > judged - {IN_DOMAIN} and len(judged) > 1


def test_an_analysis_is_repeated_for_another_detector_but_not_for_the_same(
    smoke_run, tmp_path
):
    run = shutil.copytree(smoke_run, tmp_path / "run")

    is_new = []
    for precision in (0.9, 0.9, 0.8):
        beatrice("calibrate", run, "--precision", precision)
        notes = beatrice("anatomy", run, "--only", "complementarity").stderr
        is_new.append("complementarity took" in notes)
    assert is_new == [True, False, True]


def test_an_analysis_depends_on_answers_encoders_and_detector(smoke_run):
    run = RunDir(smoke_run)
    encoders = {run.path / "encoders" / setting for setting in SETTINGS}
    files = {run.answers, run.labels, run.selection, run.detector, *encoders}
    assert files <= {*ANATOMY.inputs(run)}
