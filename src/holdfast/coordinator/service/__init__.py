"""The coordinator as a process: connections, clock, ledger, report and metrics. Nothing here decides."""
