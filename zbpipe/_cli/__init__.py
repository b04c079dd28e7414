"""The commands of python -m zbpipe."""
