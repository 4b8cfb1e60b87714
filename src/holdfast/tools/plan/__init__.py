"""Calculations of capacity and failures. Pure: neither torch nor I/O."""
