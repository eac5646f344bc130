"""Training of small native models: corpus, recipe, optimiser, loop. The demo model comes from here."""
