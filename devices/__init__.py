"""What EdgeKit knows about the machines a model runs on.

The folder is reserved for device profiles (memory, bandwidth, supported operators). This release has none: a memory
budget is given in bytes, and the runtime measures the machine it runs on.
"""
