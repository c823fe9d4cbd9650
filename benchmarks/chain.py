"""The way of the data, stage by stage, for what does all of it: `demo` and `real`."""

# What `demo` does, in order: where each stage stands. Real questions take the place of
# the world's in `real`.
CHAIN = (
    "extract.world.commands:WORLD",
    "extract.generate.stage:ANSWER",
    "extract.label.stage:LABEL",
    "extract.signals.stage:EXTRACT",
    "selection.sweep:SWEEP",
    "jaxprobe.fit.stage:TRAIN",
    "selection.stage:SELECT",
    "jaxprobe.stage:CALIBRATE",
    "benchmarks.results.evaluate:EVALUATE",
    "benchmarks.baselines.stage:BASELINES",
    "pgir.controllers.stage:CONTROL",
    "benchmarks.results.stage:REPORT",
)
