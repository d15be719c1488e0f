"""The story: which step follows which, and the command line."""
