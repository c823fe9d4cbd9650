"""The microworld: its language, facts, questions, and the model that learned it."""
