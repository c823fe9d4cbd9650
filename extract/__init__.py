"""From questions to signals on disk: records, answers, labels, signals, store."""
