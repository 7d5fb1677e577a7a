"""Run the commands that serve a model, `infer` and `deploy`. They access engines only through `EngineInfo`."""
