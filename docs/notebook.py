# %% [markdown]
# # Is the answer right? Ask the model's own signals
#
# This notebook asks a small model 600 questions, reads its internal signals in the
# passes that write the answers, fits a probe, and scores new answers. It needs no
# download: the model and the questions are about an invented world and come with the
# package. To use your own model and questions, replace `"embedded"` and `examples`.
# `python docs/execute.py docs/notebook.py` runs the cells and writes the notebook.

# %%
import matplotlib.pyplot as plt
import numpy as np

import beatrice
from beatrice.extract.world.facts import (
    QuestionConfig,
    WorldConfig,
    make_examples,
    make_world,
)

examples = make_examples(make_world(WorldConfig()), QuestionConfig())
train = [e for e in examples if e.split == "train"][:600]
test = [e for e in examples if e.split == "test"][:200]
print(train[0].question, "→", train[0].golds[0])

# %% [markdown]
# ## Answers, with their signals
#
# `read=True` takes the signals from the passes that write the answers. An answer is
# right if it equals one of the accepted answers.

# %%
model = beatrice.LanguageModel("embedded")
answers, signals = model.answer(train, max_new_tokens=10, read=True, layers=[2, 4, 6])
labels = np.array([a.text in e.golds for a, e in zip(answers, train)])
print(signals)
print(f"{labels.mean():.0%} of the answers are right")

# %% [markdown]
# ## What a signal looks like
#
# Each item of `signals` is one answer: an array per family, with a row per token. The
# plot shows the probability of each answer's least likely token.

# %%
answer_spans = signals.spans[:, 2]  # start and stop of the answers' tokens
least = [
    signals[i]["prob"][start:stop, 0].min()
    for i, (start, stop) in enumerate(answer_spans)
]
figure, axes = plt.subplots(figsize=(6, 3))
bins = np.linspace(0, 1, 21)
groups = [np.array(least)[labels], np.array(least)[~labels]]
axes.hist(groups, bins, label=["right", "wrong"], color=["#1f68ad", "#f1c5a0"])
axes.set(xlabel="probability of the least likely token", ylabel="answers")
axes.legend(frameon=False)
plt.show()

# %% [markdown]
# A confident answer is often right, but not always, so the probe reads all families.
#
# ## A probe
#
# `fit` keeps some of the answers for calibration, and chooses one of the layers.

# %%
probe = beatrice.fit(signals, labels.tolist(), progress=False)
print(probe)

# %% [markdown]
# To see how good the probe is, test it on questions that were not used in the fit.

# %%
answers, signals = model.answer(
    test, max_new_tokens=10, read=True, layers=[probe.layer]
)
is_right = np.array([a.text in e.golds for a, e in zip(answers, test)])
p_correct = probe.predict(signals)
pairs = p_correct[is_right][:, None] - p_correct[~is_right]
print(f"a right answer scores above a wrong one in {(pairs > 0).mean():.0%} of pairs")
for low, high in ((0.0, 0.2), (0.2, 0.8), (0.8, 1.0)):
    where = (p_correct >= low) & (p_correct <= high)
    share = is_right[where].mean()
    print(f"P from {low} to {high}: {where.sum()} answers, {share:.0%} of them right")

# %% [markdown]
# ## Scores
#
# The model answers and the probe scores in one pass, or it scores an existing answer.

# %%
score = probe.answer("who employs Browuff Dogral?")
print(score)
print(score.reason)
print(probe.score("who employs Browuff Dogral?", "Guzolt Falls"))

# %% [markdown]
# `probe.save("folder")` saves the probe, and `beatrice.load("folder")` loads it. With
# more answers for calibration, it trusts some answers. To fit a probe for your own
# model, see [Fit a probe](guides/fit-a-probe.md).
