"""Machines without a scheduler: agents on hosts that the user reaches by ssh."""
