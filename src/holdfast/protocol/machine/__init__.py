"""What this machine and its kernel say: processes, memory, who owns a file, pages shared with workers."""
