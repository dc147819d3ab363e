"""Durable state: arrays, progress and config, saved and restored together."""
