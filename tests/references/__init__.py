"""Reference outputs of transformers on tiny seeded checkpoints, and what rebuilds these checkpoints without it."""
