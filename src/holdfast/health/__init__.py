"""The health of a node: what is read of the machine, rules over it, checks, stragglers."""
