"""Copy the checkpoints of a run to an object store or another file system, and back (`--checkpoint_store`)."""
