"""What the scripts of benchmarks/ measure: torch's own module beside zbpipe.

``stages.py``     the stages that are measured
``store.py``      the third side: layers with a queue of their own
``host_time.py``  what the split costs the host
``memory.py``     bytes and times of a microbatch
``results.py``    what is written of it
"""
