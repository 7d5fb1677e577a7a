"""The terms in which the file of a family states how engines draft with its heads, as measured (conventions).

The adapters of engines use conventions to know how an engine runs a checkpoint. Training uses them to give heads the
inputs that the engine will pass to them (`sft --draft_for`).
"""
