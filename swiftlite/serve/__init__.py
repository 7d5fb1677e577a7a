"""The commands that serve a model, `infer` and `deploy`. They access engines only through their `EngineInfo`."""
