"""The run file: its tree, how it is read, and what a start resolves it to. Pure: no torch, no Ray."""
