"""What is known of the machines, and what is done about it: findings, triage, remedies, admission. Pure."""
