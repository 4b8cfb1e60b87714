"""Output for people: lines of the ledger, the report, the live view, pictures."""
