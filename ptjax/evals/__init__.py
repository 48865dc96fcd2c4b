"""Held-out evaluation: suites, the gates between stages, and the report a person reads."""
