"""Backends: what runs the steps of a decoder, one file each."""
