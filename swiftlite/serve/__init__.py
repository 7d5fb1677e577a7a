"""The commands that serve a model, `infer` and `deploy`; they refer to engines only by their records."""
