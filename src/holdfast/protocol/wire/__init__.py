"""From bytes to messages and back: what every stream, file and reply goes through."""
