"""The health of a node: sources that read the machine, rules that judge the readings, checks, and the detection of
stragglers."""
