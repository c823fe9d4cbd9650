"""The stage that calibrates the selected heads and saves the detector."""

import dataclasses
from collections.abc import Mapping

from extract.records import SETTINGS, Setting
from extract.run.console import Progress, Update
from extract.run.directory import RunDir
from extract.run.manifest import read_manifest
from extract.run.stages import Stage
from jaxprobe import checkpoint
from jaxprobe.calibration import fit_calibrator
from jaxprobe.compiler import set_compiler
from jaxprobe.detector import Detector, EncoderBank, HeadName, SettingHead
from jaxprobe.features.families import Standardizer
from jaxprobe.features.reading import longest_spans
from jaxprobe.features.rows import chosen_layer, load_rows
from jaxprobe.features.subsets import SUBSET_NAMES, FamilyDims
from jaxprobe.fit.grid import Trained, grid_members
from jaxprobe.pool import BRANCHES, branch_setting, read_selection, reads
from jaxprobe.settings import grid_config, select_config


def _head(run: RunDir, branch: HeadName) -> SettingHead:
    """Return a calibrated head; calibration sees validation rows alone."""
    tree, found = read_selection(run, branch)
    _, rows = load_rows(run, branch_setting(branch))
    where = rows.where("validation")
    raw = tree["champion"]["scores"].mean(axis=0)
    return SettingHead(
        reads=reads(branch, found["members"]),
        config=dataclasses.replace(select_config(run).head, n_slots=found["n_slots"]),
        params=tree["champion"]["params"],
        calibrator=fit_calibrator(raw[where], rows.labels[where]),
    )


def _bank(
    run: RunDir,
    setting: Setting,
    heads: Mapping[HeadName, SettingHead],
) -> EncoderBank | None:
    """Return the encoders of a pass that some head reads, or None."""
    read = {name for h in heads.values() for where, name in h.reads if where == setting}
    names = [name for name in SUBSET_NAMES if name in read]
    if not names:
        return None
    tree, facts = checkpoint.restore(run.encoders(setting))
    store, _ = load_rows(run, setting)
    config = grid_config(run)
    members = grid_members(config.train.n_seeds)
    return EncoderBank.from_trained(
        Trained(members, tree["params"], tree["info"]),
        names,
        dims=FamilyDims(**facts["dims"]),
        config=config.encoder,
        standardizer=Standardizer(**tree["standardizer"]),
        lengths=longest_spans(store.spec.spans, setting),
    )


def _calibrate(run: RunDir, config: None, update: Update, progress: Progress) -> None:
    set_compiler(run.preset)
    sections = read_manifest(run.path)["sections"]
    prompt, backbone = sections["answer"]["prompt"], sections["backbone"]
    store, _ = load_rows(run, SETTINGS[0])
    heads = {branch: _head(run, branch) for branch in BRANCHES}
    banks = {setting: _bank(run, setting, heads) for setting in SETTINGS}
    Detector(
        banks={setting: bank for setting, bank in banks.items() if bank is not None},
        heads=heads,
        facts={
            "revision": str(store.spec.fingerprint["model"]),
            "layer": str(chosen_layer(run)),
            "template": prompt["template"],
            "chat": "yes" if prompt["chat"] else "no",
            "model_dtype": backbone["dtype"],
            "model": backbone["model"],
            "answer_span": sections["extract"]["answer_span"],
            "dtype": store.spec.families["hidden"].dtype,
            "scalars": store.spec.families["prob"].dtype,
        },
    ).save(run.detector)


CALIBRATE = Stage(
    name="calibrate",
    inputs=lambda run: [
        run.labels,
        run.sweep,
        run.path / "selection",
        *(run.encoders(setting) for setting in SETTINGS),
    ],
    outputs=lambda run: [run.detector],
    work=_calibrate,
)
