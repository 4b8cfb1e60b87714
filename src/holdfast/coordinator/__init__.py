"""One per job: `core` decides (pure), `service` talks, `store` remembers."""
