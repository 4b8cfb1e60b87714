"""The catalogue: Holdfast's own rules, as TOML files beside this one, each with the public reference it comes from."""
