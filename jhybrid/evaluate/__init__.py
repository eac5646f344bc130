"""Offline evaluation: log-likelihoods, perplexity, the tasks of lm-evaluation-harness, batch files."""
