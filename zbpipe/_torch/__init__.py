"""The only package that uses private names of torch: each module offers what zbpipe needs of one part of torch."""
