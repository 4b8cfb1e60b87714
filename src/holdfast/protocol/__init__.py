"""The messages between worker, agent and coordinator: typed, versioned, no behaviour."""
