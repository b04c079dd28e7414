"""The common parts of benchmarks/, which measure torch's own module beside zbpipe.

``stages.py``     the stages that are measured
``store.py``      the third side: layers with their own queue
``host_time.py``  what the split costs the host
``memory.py``     bytes and times of a microbatch
``results.py``    the files of results
"""
