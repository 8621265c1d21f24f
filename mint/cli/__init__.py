"""The `mint` command: one file a verb, heavy imports inside the verbs."""
