import msgspec
import pytest

from beatrice.extract.run.rows import ResultRow
from tests.benchmarks.results.old_names import columns_of

OLD = dict(experiment="x", setting="both", dataset="d", split="test", value=0.5, n=1)


@pytest.mark.parametrize(
    ("detector", "metric", "columns"),
    [
        ("champion", "auroc", ""),
        ("encoder:HP", "auroc", "detector=encoder families=HP"),
        ("encoder:H at 400", "auroc", "detector=encoder families=H n_labels=400"),
        ("probe:HPRA from nq", "auroc", "detector=probe families=HPRA source=nq"),
        ("layer 7", "auroc", "detector=layer_probe layer=7"),
        (
            "[HPRA]-A",
            "flips at 0.5 -1.5 in 1",
            "detector=encoder families=HPRA family=A "
            "metric=flips bin_x=0.5 bin_y=-1.5 bin_width=1.0",
        ),
        (
            "(A)",
            "share at 3 2",
            "detector=encoder families=A metric=share layer=3 head=2",
        ),
        (
            "2 closed-book",
            "share in part 5",
            "detector=sets_of_three n_closed_book=2 metric=share bin=5",
        ),
        (
            "zeroed_answer_span_encoders",
            "auprc",
            "detector=zeroed_span span=answer kind=encoders",
        ),
        ("text_encoder", "epoch_of_seed_1", "metric=epoch seed=1"),
    ],
)
def test_what_was_in_a_name_is_in_columns(detector, metric, columns):
    old = OLD | dict(detector=detector, metric=metric)
    new = columns_of(old)
    wanted = old | dict(pair.split("=") for pair in columns.split())
    assert {k: str(v) for k, v in new.items()} == {k: str(v) for k, v in wanted.items()}
    assert isinstance(msgspec.convert(new, ResultRow), ResultRow)


def test_a_difference_says_what_its_rival_reads():
    old = dict(detector="early_fusion", metric="auroc_difference", p_value=0.1)
    new = columns_of(OLD | old | dict(against="encoder:PRA"))
    assert (new["metric"], new["against"]) == ("auroc", "encoder")
    assert new["against_families"] == "PRA"
