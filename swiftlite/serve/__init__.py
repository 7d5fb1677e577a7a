"""The commands that serve a model, `infer` and `deploy`; they know engines by their records alone."""
