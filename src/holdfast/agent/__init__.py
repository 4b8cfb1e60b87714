"""The agent of a node: it starts and watches the workers, and passes their messages on."""
