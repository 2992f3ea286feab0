"""Decoding strategies: each proposes a tree of tokens per step, one file each."""
