"""The written map from the names of rows before they had columns to columns.

Before, a row's detector and metric were text that held numbers and names ("encoder:H at
400", "flips at 0.5 1.5 in 1"). `columns_of` is what each of them is now.
"""

import re

# Pattern of an old detector, and the columns in its place; {0} is the first group.
DETECTORS = {
    r"(encoder|probe):([HPRA]+)": "detector={0} families={1}",
    r"(encoder|probe):([HPRA]+) at (\d+)": "detector={0} families={1} n_labels={2}",
    r"(encoder|probe):([HPRA]+) from (.+)": "detector={0} families={1} source={2}",
    r"selected at (\d+)": "detector=selected n_labels={0}",
    r"layer:(\w+)": "detector={0}_layer",
    r"layer (\d+)": "detector=layer_probe layer={0}",
    r"champion:(raw|calibrated)": "detector=champion kind={0}",
    r"labels:(right|wrong)": "detector=labels kind={0}",
    r"[\[(]([HPRA]+)[\])]": "detector=encoder families={0}",
    r"[\[(]([HPRA]+)[\])]-(.)": "detector=encoder families={0} family={1}",
    r"[\[(]([HPRA]+)[\])] without (\w+)": "detector=encoder families={0} span={1}",
    r"champion_encoders": "detector=champion kind=encoders",
    r"(zeroed|without)_(context|question|answer)_span": "detector={0}_span span={1}",
    r"(zeroed|without)_(context|question|answer)_span_encoders": (
        "detector={0}_span span={1} kind=encoders"
    ),
    r"without_hidden": "detector=without_family families=PRA",
    r"without_prob": "detector=without_family families=HRA",
    r"without_resid": "detector=without_family families=HPA",
    r"without_attn": "detector=without_family families=HPR",
    r"([HPRA]):(closed_book|with_context)": (
        "detector=sets_of_three family={0} kind={1}"
    ),
    r"(\d) closed-book": "detector=sets_of_three n_closed_book={0}",
    r"(first|second) ([HPRA]+)": "detector=encoder families={1} kind={0}",
    r".+ \| .+": "detector=two_backbones",
    r"(accepted closed-book|trusted with context|both flagged)": (
        "detector=answers kind={0}"
    ),
}
# The same of an old metric.
METRICS = {
    r"(\w+)_difference": "metric={0}",
    r"rights:(.)": "metric=rights family={0}",
    r"(answers|flips) at (\S+) (\S+) in (\S+)": (
        "metric={0} bin_x={1} bin_y={2} bin_width={3}"
    ),
    r"epoch_of_seed_(\d+)": "metric=epoch seed={0}",
    r"encoders in a best set": "metric=encoders_in_best_set",
    r"encoders in a set": "metric=encoders_in_set",
    r"best sets": "metric=best_sets",
    r"share in part (\d+)": "metric=share bin={0}",
    r"share at (\d+) (\d+)": "metric=share layer={0} head={1}",
    r"share of 8": "metric=share_of_top_heads",
    r"even share of 8": "metric=even_share_of_top_heads",
    r"moved by 8": "metric=moved_by_top_heads",
    r"moved by random 8": "metric=moved_by_random_heads",
    r"moved more by 8": "metric=moved_more_by_top_heads",
    r"(share|tokens) in (\w+)": "metric={0} span={1}",
    r"share in (\w+) by (\w+)": "metric=share span={0} family={1}",
    r"share at (\d+)": "metric=share position={0}",
    r"even share at (\d+)": "metric=even_share position={0}",
    r"share at last": "metric=share kind=last",
    r"even share at last": "metric=even_share kind=last",
    r"right (with context|closed-book)": "metric=right_{0}",
    r"(wrong|right) ones that stand there": "metric={0}_in_passage",
    r"flip (precision|rate)": "metric=flip_{0} family=A",
    r"flip (precision|rate), there but wrong": (
        "metric=flip_{0} kind=in_passage_but_wrong family=A"
    ),
    r"flip (precision|rate), right but not there": (
        "metric=flip_{0} kind=right_not_in_passage family=A"
    ),
}
FAMILIES = {"hidden": "H", "prob": "P", "resid": "R", "attn": "A"}
INTEGERS = "layer head position bin n_labels n_closed_book".split()


def _parts(text, patterns, column):
    """Return the columns of one old name; the text itself where nothing was in it."""
    for pattern, template in patterns.items():
        if match := re.fullmatch(pattern, text):
            pairs = (pair.split("=") for pair in template.split())
            return {k: _value(k, v.format(*match.groups())) for k, v in pairs}
    return {column: text}


def _value(column, text):
    if column.startswith("bin_"):
        return float(text)
    return int(text) if column in INTEGERS else text


def columns_of(row):
    """Return a row of before, a mapping, as a mapping of the columns of now."""
    new = {k: v for k, v in row.items() if v is not None or k == "value"}
    new |= _parts(row["detector"], DETECTORS, "detector")
    new |= _parts(row["metric"], METRICS, "metric")
    if "family" in new:
        new["family"] = FAMILIES.get(new["family"], new["family"])
    new["metric"] = new["metric"].replace(" ", "_").replace("-", "_")
    if row.get("against") is not None:
        against = _parts(row["against"], DETECTORS, "detector")
        new["against"] = against["detector"]
        if "families" in against:
            new["against_families"] = against["families"]
    if row["experiment"] == "annotated":
        new |= {"kind": row["dataset"], "dataset": "annotated"}
    return new
