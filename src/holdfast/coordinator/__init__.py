"""One per job: `kernel`, `membership`, `storage` and `health` decide (pure); `service` talks and remembers."""
