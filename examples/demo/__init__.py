"""The demo: a small language model trained by pipeline parallelism, on torch's own backward and on zbpipe.

``make demo`` starts one process per rank, trains the same model on the same text with
each schedule twice, and prints one table per schedule. The files, in reading order:

``__main__.py``  the command line
``config.py``    what can be chosen, and the schedules
``text.py``      the text and its batches
``model.py``     the language model, cut into stages
``train.py``     one training run of one rank; the ordinary backward that all runs are compared with
``measure.py``   what one step holds in memory, counted by zbpipe.memory
``worker.py``    what a rank does from start to end
``launch.py``    starts the ranks and ends them
``report.py``    the tables and the verdict
``plot.py``      the picture
"""
