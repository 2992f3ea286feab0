"""Engines that compare.py measures, each in a process of its own, and what it makes of the figures."""
