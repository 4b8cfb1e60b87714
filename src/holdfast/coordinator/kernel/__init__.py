"""The foundation of the core: its state, events and actions, deadlines, and the context that every handler gets."""
