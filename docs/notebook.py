# %% [markdown]
# # Is the answer right? Ask the model's own signals
#
# This notebook asks a small model 600 questions, reads its internal signals in the
# passes that write the answers, fits a probe, and scores new answers. It needs no
# download: model and questions are of an invented world and come with the package. For
# a model of yours put its name where it says `"embedded"`, and your questions where it
# makes some. `python docs/execute.py docs/notebook.py` runs it and writes the notebook.

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
# `read=True` takes the signals out of the passes that write. An answer is right if it
# is one of the accepted ones.

# %%
model = beatrice.LanguageModel("embedded")
answers, signals = model.answer(train, max_new_tokens=10, read=True, layers=[2, 4, 6])
labels = np.array([a.text in e.golds for a, e in zip(answers, train)])
print(signals)
print(f"{labels.mean():.0%} of the answers are right")

# %% [markdown]
# ## What a signal looks like
#
# An item of `signals` is one answer: an array a family, a row for each token. Here is
# the probability of each answer's least likely token, for right and for wrong answers.

# %%
answer_spans = signals.spans[:, 2]  # absolute, half-open
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
# A sure answer is often right, but not always: the probe reads the other families too.
#
# ## A probe
#
# `fit` holds back a part of the answers to calibrate on, and chooses among the layers.

# %%
probe = beatrice.fit(signals, labels.tolist(), progress=False)
print(probe)

# %% [markdown]
# What it is worth is told by questions that took no part in the fit.

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
# The probe answers and scores in one pass, or scores an answer that exists.

# %%
score = probe.answer("who employs Browuff Dogral?")
print(score)
print(score.reason)
print(probe.score("who employs Browuff Dogral?", "Guzolt Falls"))

# %% [markdown]
# `probe.save("folder")` keeps it, `beatrice.load("folder")` loads it. With more answers
# to calibrate on, some are trusted. The guide for a model of yours:
# [fit a probe](guides/fit-a-probe.md).
