"""What people look at: ledger, report, live view, pictures."""
