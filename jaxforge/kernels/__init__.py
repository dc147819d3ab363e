"""Attention, grouped products and 8-bit products for each platform: arrays in, arrays out."""
