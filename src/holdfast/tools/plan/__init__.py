"""The arithmetic of capacity and failure. Pure: neither torch nor I/O."""
