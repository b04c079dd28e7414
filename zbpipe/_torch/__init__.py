"""The only package that uses private names of torch (tests/test_layers.py).

Each module offers what zbpipe needs of one part of torch, under names of zbpipe's own. The table in ``needs.py`` says
what zbpipe expects of each release of torch, and what depends on it.
"""
