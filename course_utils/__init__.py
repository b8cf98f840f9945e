"""What the course's notebooks import: one small module per lesson, and a few shared ones.

Importing this package imports nothing else, starts no CUDA and has no side effect.
"""

__version__ = "0.1.0"
