"""The way of the data, stage by stage, for what does all of it: `demo` and `real`."""

# What `demo` does, in order: where each stage stands. Real questions take the place of
# the world's in `real`.
CHAIN = (
    "beatrice.extract.world.commands:WORLD",
    "beatrice.extract.generate.answers:ANSWER",
    "beatrice.extract.label.stage:LABEL",
    "beatrice.extract.signals.extract:EXTRACT",
    "beatrice.selection.sweep:SWEEP",
    "beatrice.jaxprobe.fit.stage:TRAIN",
    "beatrice.selection.stage:SELECT",
    "beatrice.jaxprobe.stage:CALIBRATE",
    "beatrice.benchmarks.results.evaluate:EVALUATE",
    "beatrice.benchmarks.baselines.stage:BASELINES",
    "beatrice.pgir.controllers.stage:CONTROL",
    "beatrice.benchmarks.results.stage:REPORT",
)
