"""The operator's tasks: they look, have `policy` decide, and act. All that they remember may be lost."""
