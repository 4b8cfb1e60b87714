"""Checks that test a node on purpose: basic ones before it joins, deep ones on request."""
