"""Doors to other libraries: transformers and optimum, optimum's command line, the EleutherAI harness.

Each module needs the library that it is named after, which the base installation lacks. Nothing else of EdgeKit imports
them.
"""
