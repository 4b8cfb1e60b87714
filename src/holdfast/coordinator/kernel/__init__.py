"""What every part stands on: the state, events and actions, and the machine that calls the parts."""
