"""Measurements of a running engine."""
