"""The health of machines, and what is done about it: findings, triage, remedies, admission. Pure."""
